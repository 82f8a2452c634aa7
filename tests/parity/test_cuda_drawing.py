"""Tokens drawn on a device: as the sampler draws them in double precision, whatever else is drawn, recorded or not. The kernels'
tests in Triton's interpreter are in `tests/unit/model`; here they run on a device, and are compiled where there is none."""

import os
import subprocess
import sys
from array import array

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compiled

from segue import Engine, SamplingParams
from segue.engine import Row, Sampling
from segue.model.chat import ChatTemplate
from segue.model.cuda import drawing, sampling
from segue.model.cuda.choosing import PARTS, likeliest
from segue.model.loading import LoadedModel
from segue.model.sampler import sample
from segue.model.tiny import random_weights
from segue.model.tokenizer import ByteTokenizer
from segue.model.weights import Weights, fingerprint
from tests.parity.conftest import family

needs_device = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
KINDS = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.8, "min_p": 0.1},
    {"temperature": 3.0, "top_k": 5000},
    {"temperature": 1e-200, "top_p": 0.5},
]


def rows(count):
    made = [SamplingParams(**KINDS[at % len(KINDS)]) for at in range(count)]
    return [
        Row(at, array("i"), at, at + 1, array("i"), Sampling(params, 7 * at, 1, frozenset()))
        for at, params in enumerate(made)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", [151936, 49152, 1000])
@pytest.mark.parametrize("spread", [0.5, 4.0])
class TestOnADevice:
    pytestmark = needs_device

    def test_the_sampler_draws_the_same(self, dtype, vocab, spread):
        """But for a random number that falls on the border of two tokens, which double precision sees elsewhere."""
        torch.manual_seed(3)
        some = rows(140)
        logits = (torch.randn(len(some), vocab, device="cuda") * spread).to(dtype)
        found, wanted = sampling.draw_now(logits, some).tolist(), sample(logits.float(), some).tokens
        assert sum(one != other for one, other in zip(found, wanted, strict=True)) <= 1

    def test_alone_and_together_recorded_and_not(self, dtype, vocab, spread):
        torch.manual_seed(4)
        some = rows(21)
        logits = (torch.randn(32, vocab, device="cuda") * spread).to(dtype)
        wanted = sampling.draw_now(logits[:21], some)
        assert torch.equal(sampling.draw_now(logits[:21].float(), some), wanted)
        for at in (0, 2, 3, 20):
            assert sampling.draw_now(logits[at : at + 1], some[at : at + 1]).tolist() == [int(wanted[at])]
        tops, tokens = torch.empty(32, PARTS, device="cuda"), torch.empty(32, dtype=torch.int32, device="cuda")
        places = torch.empty(32, PARTS, dtype=torch.int32, device="cuda")
        with torch.inference_mode():
            draws = sampling.Draws([8, 32], tops, places)
            likeliest(logits, tops, places, tokens)
            for _ in range(2):
                assert torch.equal(draws.tokens(logits, some), wanted)
                assert torch.equal(draws.tokens(logits, some[:5]), wanted[:5])

    def test_numbers_that_are_none(self, dtype, vocab, spread):
        logits = (torch.randn(7, vocab, device="cuda") * spread).to(dtype)
        logits[2, 900] = torch.nan
        logits[3, 0] = torch.inf
        found = sampling.draw_now(logits, rows(7)).tolist()
        assert found[2] == found[3] == -1 and all(0 <= found[at] < vocab for at in (0, 1, 4, 5, 6))


class TestAnEngine:
    pytestmark = needs_device

    def test_draws_what_the_cpu_draws_and_steps_begin_ahead(self):
        spec = family("qwen3")
        weights = random_weights(spec, seed=11)
        template, identity = ChatTemplate("", "", ""), fingerprint(spec, weights)
        loaded = LoadedModel("drawn", spec, Weights.in_memory(weights), ByteTokenizer(), template, identity)
        prompts = [[(3 * at + shift) % 250 for at in range(5 + 9 * shift)] for shift in range(len(KINDS))]
        params = [SamplingParams(max_tokens=40, seed=at, ignore_eos=True, **kind) for at, kind in enumerate(KINDS)]

        def answers(**options):
            with Engine(loaded, num_blocks=200, **options) as engine:
                found = [result.token_ids for result in engine.generate(prompts, params)]
                engine.check()
                return found

        wanted = answers(device="cpu", native=False)
        assert answers(device="cuda", dtype="fp32") == wanted
        assert answers(device="cuda", dtype="fp32", max_step_tokens=24, max_running=5) == wanted
        assert answers(device="cuda", dtype="fp32", exact=True) == wanted


def compile_all() -> None:
    """In a process of its own: Triton's interpreter, which other tests here use, is on or off for all of one."""
    shape = {"SHIFT": 16, "PARTS": PARTS, "BLOCK": 4096}
    first = {"SHIFT": 16, "PARTS": PARTS, "BY_COUNT": False, "IS_FIRST": True, "IS_LAST": True}
    kinds = {"logits": "*bf16", "tops": "*fp32", "masses": "*i64", "sums": "*i64"}
    kinds |= {"values": "*fp32"} | dict.fromkeys(("vocab", "each", "below", "count"), "i32")
    for kernel, fixed, warps in (
        (drawing._sum_digits, shape | {"BY_COUNT": True, "IS_FIRST": False}, 8),
        (drawing._narrow, first, 4),
        (drawing._pick, shape, 8),
        (drawing._pick_of_few, {"PARTS": PARTS, "MOST": 64}, 4),
    ):
        names = kernel.arg_names
        signature = {name: "constexpr" if name in fixed else kinds.get(name, "*i32") for name in names}
        values = {(names.index(name),): value for name, value in fixed.items()}
        target = GPUTarget("cuda", 90, 32)
        made = compiled(ASTSource(kernel, signature, values, {}), target=target, options={"num_warps": warps})
        print(kernel.__name__, len(made.asm["cubin"]) > 0, made.asm["ptx"].count("shr.s32"))


def test_they_compile_without_a_device():
    """For an H100 or H200, by the Triton that is here. Keys have no sign, so none of their shifts may keep one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", "from tests.parity import test_cuda_drawing as test; test.compile_all()"]
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert run.stdout.splitlines() == ["_sum_digits True 0", "_narrow True 0", "_pick True 0", "_pick_of_few True 0"]
