"""What goes wrong on a GPU: no memory, a broken device, numbers in eight bits."""

import subprocess
import sys

import pytest
import torch

from segue import Engine, SamplingParams, SnapshotError
from segue.base.errors import RequestTooLong, StepFailed, UnsupportedModel
from segue.model.chat import ChatTemplate
from segue.model.loading import LoadedModel
from segue.model.tiny import random_weights
from segue.model.tokenizer import ByteTokenizer
from segue.model.weights import Weights, fingerprint
from tests.parity.conftest import family

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPT = [(7 * at) % 250 for at in range(90)]


@pytest.fixture(scope="module")
def loaded():
    spec = family("qwen3")
    weights = random_weights(spec, seed=11)
    template, identity = ChatTemplate("", "", ""), fingerprint(spec, weights)
    return LoadedModel("parity", spec, Weights.in_memory(weights), ByteTokenizer(), template, identity)


def test_a_step_that_finds_no_memory_ends_its_requests_alone(loaded):
    with Engine(loaded, device="cuda", num_blocks=4000, max_step_tokens=16384) as engine:
        wanted = engine.generate(PROMPT, GREEDY)[0].token_ids
        engine.forget()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        hoard = [torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda")]
        while True:  # to the last byte
            try:
                hoard.append(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                break
        many = [[(shift * at) % 250 for at in range(400)] for shift in range(1, 40)]
        with pytest.raises(StepFailed, match="OutOfMemory"):
            engine.generate(many, GREEDY)
        engine.check()
        del hoard
        torch.cuda.empty_cache()
        assert engine.generate(PROMPT, GREEDY)[0].token_ids == wanted
        assert engine.stats().kv_usage == 0.0


BROKEN = """
import os
import torch
from segue import Engine, SamplingParams
from segue.base.errors import DeviceLost, StepFailed
with Engine("tiny", device="cuda", num_blocks=64, tiers=["host=16MiB"]) as engine:
    engine.generate([1, 2, 3], SamplingParams(max_tokens=4))
    lost = engine.submit([4, 5, 6], SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    torch.zeros(4, device="cuda")[torch.tensor([7], device="cuda")]  # a kernel's assertion: nothing runs after it
    deltas = []
    try:
        while engine.has_work:
            deltas += engine.step()
    except DeviceLost as error:
        print("lost", type(error.__cause__).__name__)
    deltas += engine._arrived
    assert isinstance(deltas[-1].error, StepFailed), deltas
    engine.check()
print("closed", flush=True)
os._exit(0)
"""


def test_a_lost_device_is_said_and_ends_the_engine():
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split()[0] == "lost" and "closed" in done.stdout, done.stderr[-3000:]


def test_what_does_not_fit_is_refused_before_it_is_loaded(loaded):
    free, _ = torch.cuda.mem_get_info()
    hoard = torch.empty(free - (600 << 20), dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises(RequestTooLong, match="kv_memory"):
            Engine(loaded, device="cuda", kv_memory="4GiB")
        with Engine(loaded, device="cuda", kv_memory="8MiB") as engine:
            assert engine.generate(PROMPT, GREEDY)[0].token_ids
        more = torch.empty(torch.cuda.mem_get_info()[0] - (2 << 20), dtype=torch.uint8, device="cuda")
        with pytest.raises((UnsupportedModel, RequestTooLong)):
            Engine(loaded, device="cuda")
        del more
    finally:
        del hoard
        torch.cuda.empty_cache()


def test_the_automatic_budget_leaves_room_for_the_largest_step(loaded):
    """All the memory there is, and then the largest prompts that can come at once."""
    with Engine(loaded, device="cuda", max_step_tokens=8192) as engine:
        assert "a step" in str(engine.budget)
        many = [[(shift * at) % 250 for at in range(480)] for shift in range(1, 60)]
        assert len(engine.generate(many, SamplingParams(max_tokens=4, temperature=0.9, logprobs=5))) == len(many)


def test_kv_in_eight_bits_is_close_and_a_kind_of_its_own(loaded, tmp_path):
    with (
        Engine(loaded, device="cuda", num_blocks=64, dtype="bf16") as full,
        Engine(loaded, device="cuda", num_blocks=64, dtype="bf16", kv_dtype="fp8") as half,
        Engine(loaded, device="cuda", num_blocks=64, dtype="bf16", kv_dtype="fp8", block_size=32) as other,
    ):
        assert half.budget.block_bytes * 2 == full.budget.block_bytes
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=20)
        tops = [dict(engine.generate(PROMPT, params)[0].completions[0].logprobs[0].top) for engine in (full, half)]
        common = tops[0].keys() & tops[1].keys()
        assert len(common) >= 10 and all(abs(tops[0][token] - tops[1][token]) < 0.3 for token in common)
        state = half.generate(PROMPT, GREEDY, hold=True)[0].state
        wanted = half.continue_(state, [1, 2], GREEDY).token_ids
        half.save(state, tmp_path / "s.segue")
        assert other.continue_(other.load(tmp_path / "s.segue"), [1, 2], GREEDY).token_ids == wanted
        with pytest.raises(SnapshotError, match="fp8"):
            full.load(tmp_path / "s.segue")
    with pytest.raises(UnsupportedModel, match="fp8"):
        Engine(loaded, device="cpu", num_blocks=64, kv_dtype="fp8")
