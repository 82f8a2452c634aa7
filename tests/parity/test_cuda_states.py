"""States move between CPU and GPU, and stay on a GPU through everything that can be done with them."""

import pytest
import torch

from segue import Engine, SamplingParams, SnapshotError
from segue.engine import hand_over
from segue.model.chat import ChatTemplate
from segue.model.loading import LoadedModel
from segue.model.tiny import random_weights
from segue.model.tokenizer import ByteTokenizer
from segue.model.weights import Weights, fingerprint
from tests.parity.conftest import FAMILIES, family

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
PROMPT = torch.randint(0, 250, (70,), generator=torch.Generator().manual_seed(4)).tolist()
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, temperature=0.9, top_p=0.95, seed=7, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request):
    spec = family(request.param)
    weights = random_weights(spec, seed=11)
    template, identity = ChatTemplate("", "", ""), fingerprint(spec, weights)
    return LoadedModel("parity", spec, Weights.in_memory(weights), ByteTokenizer(), template, identity)


def make(loaded, device="cuda", dtype="fp32", block_size=16, *, exact=False):
    """Plain torch, one sequence after the other; or our kernels, where they give the same whatever comes together."""
    return Engine(loaded, device=device, dtype=dtype, num_blocks=64, block_size=block_size, native=exact, exact=exact)


def start(engine, params, num_tokens=9):
    stream = engine.stream(PROMPT, params, request_id="r")
    return stream, [next(stream) for _ in range(num_tokens)]


@pytest.mark.parametrize(("dtype", "exact"), [("fp32", False), ("bf16", False), ("fp16", False), ("bf16", True)])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_an_answer_on_the_gpu_never_changes(loaded, dtype, params, exact, tmp_path):
    home, away = (make(loaded, dtype=dtype, block_size=size, exact=exact) for size in (16, 5))
    wanted = home.generate(PROMPT, params)[0].completions[0]
    home.forget()
    stream, seen = start(home, params)
    home.save("r", tmp_path / "r.segue")
    hand_over(home, away, "r")
    assert home.stats().kv_usage == 0.0
    seen += [next(stream) for _ in range(9)]
    hand_over(away, home, "r")
    seen += stream
    assert [token for delta in seen for token in delta.token_ids] == wanted.token_ids
    assert stream.result.completions[0].logprobs == wanted.logprobs
    away.forget()
    resumed = away.follow(away.resume(away.load(tmp_path / "r.segue"), consume=True))
    list(resumed)
    assert resumed.result.token_ids == wanted.token_ids and resumed.result.reuse.recomputed == 0
    for engine in (home, away):
        engine.check()
        assert engine.stats().kv_usage == 0.0


@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_state_goes_on_across_devices(loaded, devices, tmp_path):
    source, destination = make(loaded, devices[0]), make(loaded, devices[1], block_size=8)
    wanted = source.generate(PROMPT, GREEDY)[0].token_ids
    source.forget()
    stream, seen = start(source, GREEDY)
    source.save("r", tmp_path / "r.segue")
    hand_over(source, destination, "r")
    seen += stream
    assert [token for delta in seen for token in delta.token_ids] == wanted
    state = destination.load(tmp_path / "r.segue", state_id="again")
    result = destination.continue_(state, (), SamplingParams(max_tokens=31, temperature=0, ignore_eos=True))
    assert result.token_ids == wanted[9:] and result.num_prefilled == 1


def test_another_precision_is_refused(loaded, tmp_path):
    with make(loaded) as full, make(loaded, dtype="bf16") as half:
        full.save(full.generate(PROMPT, GREEDY)[0].state, tmp_path / "s.segue")
        with pytest.raises(SnapshotError, match="fp32"):
            half.load(tmp_path / "s.segue")


@pytest.mark.parametrize(("dtype", "exact"), [("fp32", False), ("bf16", False), ("bf16", True)])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_an_answer_is_the_same_from_another_tier(loaded, dtype, exact, tier, tmp_path, monkeypatch):
    monkeypatch.setattr("segue.kv.tiers.courier.Speed.seconds_for", lambda speed, num_bytes: 0.0)
    tiers = ["host=16MiB"] if tier == "host" else [f"disk={tmp_path / 'kv'},16MiB"]
    options = {
        "device": "cuda",
        "dtype": dtype,
        "num_blocks": 16,
        "max_model_len": 160,
        "native": exact,
        "exact": exact,
    }
    prompts = [[(token * number + token) % 250 for token in range(120)] for number in (1, 7)]
    with Engine(loaded, **options) as engine:
        wanted = [engine.generate(prompt, SAMPLED)[0].completions[0] for prompt in prompts]
    with Engine(loaded, tiers=tiers, **options) as engine:
        for _ in range(3):
            for prompt, before in zip(prompts, wanted, strict=True):
                result = engine.generate(prompt, SAMPLED)[0]
                assert result.token_ids == before.token_ids  # logits differ in the last bits: fewer rows are computed
                if exact:
                    assert result.completions[0].logprobs == before.logprobs
                chosen = [each.chosen for each in result.completions[0].logprobs]
                assert chosen == pytest.approx(
                    [each.chosen for each in before.logprobs], abs=1e-4 if dtype == "fp32" else 0.1
                )
                engine.check()
        assert result.reuse.loaded > 0
