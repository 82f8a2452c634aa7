"""On a GPU the same answers come out: fp32 as the reference's, bf16 close to it."""

from array import array
from dataclasses import replace

import pytest
import torch

from segue import BeamParams, Catalogue, Engine, Request, SamplingParams, Then
from segue.base.errors import StepFailed
from segue.engine import Row, StepPlan
from segue.engine.sequence import Sampling
from segue.model.chat import ChatTemplate
from segue.model.loading import LoadedModel
from segue.model.tiny import random_weights
from segue.model.tokenizer import ByteTokenizer
from segue.model.weights import Weights, fingerprint
from tests.parity.conftest import FAMILIES, family

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
GREEDY = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request):
    spec = family(request.param)
    weights = random_weights(spec, seed=11)
    template, identity = ChatTemplate("", "", ""), fingerprint(spec, weights)
    return LoadedModel("parity", spec, Weights.in_memory(weights), ByteTokenizer(), template, identity)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 250, (length,), generator=generator).tolist() for length in (3, 17, 40, 90)]


def answers(loaded, params=GREEDY, **options):
    with Engine(loaded, **options) as engine:
        found = [result.token_ids for result in engine.generate(prompts(), params)]
        engine.check()
        assert engine.stats().kv_usage == 0.0
        return found


def test_fp32_tokens_equal_the_cpus(loaded):
    wanted = answers(loaded, num_blocks=64, device="cpu", native=False)
    assert answers(loaded, num_blocks=64, device="cuda", dtype="fp32") == wanted
    assert answers(loaded, num_blocks=64, device="cuda", dtype="fp32", max_step_tokens=8, max_running=4) == wanted
    assert answers(loaded, num_blocks=18, device="cuda", dtype="fp32", max_step_tokens=32, max_running=4) == wanted


def test_sampled_tokens_are_repeatable(loaded):
    params = SamplingParams(
        max_tokens=20, temperature=0.8, top_p=0.9, top_k=20, seed=3, n=3, logprobs=2, ignore_eos=True
    )
    assert answers(loaded, params, num_blocks=64, device="cuda", dtype="fp32") == answers(
        loaded, params, num_blocks=64, device="cuda", dtype="fp32"
    )


def test_fp32_searches_find_what_the_cpu_finds(loaded):
    items = Catalogue({str(number): (number % 9, 40 + number % 31, 100 + number) for number in range(150)})
    searches = [
        BeamParams(width=32, max_tokens=3, ignore_eos=True),
        BeamParams(width=4, max_tokens=9, stop_token_ids=tuple(range(0, 250, 9)), ignore_eos=True),
        BeamParams(width=16, catalogue=items),
        BeamParams(width=16, catalogue=items, scoring="legal", deny=("3", "4", "5")),
        BeamParams(
            width=8, max_tokens=4, allowed_token_ids=tuple(range(50, 90)), scoring="legal", temperature=1.0, seed=5
        ),
    ]

    def found(**options):
        with Engine(loaded, num_blocks=400, **options) as engine:
            results = engine.generate([Request(prompt, beam=beam) for beam in searches for prompt in prompts()])
            think = Request(prompts()[2], SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
            results.append(engine.generate(replace(think, then=Then(searches[2], [1, 2])))[0])
            engine.check()
            return [{beam.token_ids: beam.score for beam in result.beams} for result in results]

    for own, wanted in zip(found(device="cuda", dtype="fp32"), found(device="cpu", native=False), strict=True):
        assert own.keys() == wanted.keys()
        assert all(abs(own[line] - wanted[line]) < 1e-4 for line in wanted)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_logits_are_close(loaded, dtype):
    ids = prompts()[3]
    row = Row(0, array("i", ids), 0, len(ids), array("i", range(1, 9)), Sampling(GREEDY, 0, 0, frozenset()))
    full = Engine(loaded, num_blocks=16, device="cpu", native=False).runner.forward(StepPlan([row], []))
    half = Engine(loaded, num_blocks=16, device="cuda", dtype=dtype).runner.forward(StepPlan([row], [])).cpu()
    assert (full - half).norm() / full.norm() < 0.03


def test_exact_products_and_tiles_give_the_cpus_tokens(loaded):
    wanted = answers(loaded, num_blocks=64, device="cpu", native=False)
    assert answers(loaded, num_blocks=64, device="cuda", dtype="fp32", exact=True) == wanted
    assert answers(loaded, num_blocks=18, device="cuda", dtype="fp32", exact=True, max_step_tokens=32) == wanted


def test_the_automatic_budget_takes_the_free_memory_and_says_so(loaded):
    with Engine(loaded, device="cuda", max_model_len=64) as engine:
        assert engine.budget.num_blocks > 10_000 and "device memory" in str(engine.budget)
        assert engine.generate(prompts()[0], GREEDY.__class__(max_tokens=4, temperature=0))[0].token_ids


def test_numbers_that_are_none_fail_their_step_and_nothing_else(loaded):
    """Also while the next step is under way, which is fed what the failed one found."""
    spec, prompt = replace(loaded.spec, tie_embeddings=False), [7, 8, 9]
    weights = random_weights(spec, seed=11)
    sound = replace(loaded, spec=spec, weights=Weights.in_memory(weights))
    with Engine(sound, num_blocks=64, device="cuda", dtype="fp32") as engine:
        wanted = engine.generate([prompt], GREEDY)[0].token_ids
    poison = next(token for token in range(10, 250) if token not in wanted)
    weights["embed"][poison] = torch.nan
    broken = replace(sound, weights=Weights.in_memory(weights))
    with Engine(broken, num_blocks=64, device="cuda", dtype="fp32") as engine:
        for _ in range(2):
            with pytest.raises(StepFailed, match="not numbers"):
                engine.generate([[poison, 6, 7]], GREEDY)
            assert engine.generate([prompt], GREEDY)[0].token_ids == wanted
        engine.check()
