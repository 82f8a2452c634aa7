"""`exact` on a GPU: in bf16 too an answer is a function of its own request, to the last bit of the log-probabilities, whatever is
computed with it and whatever is done with its state."""

from itertools import islice

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segue import BeamParams, Catalogue, Engine, Request, SamplingParams
from segue.model.chat import ChatTemplate
from segue.model.loading import LoadedModel
from segue.model.tiny import random_weights
from segue.model.tokenizer import ByteTokenizer
from segue.model.weights import Weights, fingerprint
from tests.parity.conftest import family
from tests.property import test_exactness, test_state_matrix
from tests.property.test_exactness import answers
from tests.property.test_state_matrix import clean, moved, preempted, rest, start, told

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
HARD = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module", params=["llama3", "mistral", "qwen3"])
def loaded(request):
    spec = family(request.param)
    weights = random_weights(spec, seed=11)
    template, identity = ChatTemplate("", "", ""), fingerprint(spec, weights)
    return LoadedModel("parity", spec, Weights.in_memory(weights), ByteTokenizer(), template, identity)


def make(loaded, **options):
    return Engine(
        loaded, device="cuda", exact=True, **{"dtype": "bf16", "num_blocks": 400, "max_model_len": 140, **options}
    )


@pytest.fixture(scope="module")
def engines(loaded):
    made = {
        "plain": make(loaded, prefix_caching=False),
        "small steps": make(loaded, max_step_tokens=24, max_running=5),
        "other blocks": make(loaded, block_size=32),
        "tight": make(loaded, num_blocks=11),
        "a": make(loaded, num_blocks=90, block_size=8),
        "b": make(loaded, num_blocks=90, block_size=3),
    }
    yield made
    for engine in made.values():
        engine.close()


@given(st.lists(st.tuples(test_exactness.PROMPTS, test_exactness.PARAMS), min_size=1, max_size=5))
@HARD
def test_an_answer_depends_on_its_request_alone(engines, requests):
    prompts, params = [list(prompt) for prompt, _ in requests], [own for _, own in requests]
    wanted = [answers(engines["plain"], prompt, own)[0] for prompt, own in zip(prompts, params, strict=True)]
    assert answers(engines["plain"], prompts, params) == wanted
    for name in ("small steps", "other blocks", "tight"):
        clean(engines[name])
        assert answers(engines[name], prompts, params) == wanted, name
    assert answers(engines["small steps"], prompts[::-1], params[::-1]) == wanted[::-1], "all is in memory now"


@given(prompt=test_state_matrix.PROMPTS, params=test_state_matrix.PARAMS, share=st.floats(0, 0.99))
@HARD
def test_an_answer_never_changes(engines, tmp_path_factory, prompt, params, share):
    here, there = engines["a"], engines["b"]
    wanted = told(clean(here).generate(prompt, params)[0].completions[0])
    cut = max(int(share * len(wanted[0])), 1)
    for moves in ([1], [cut], [1, cut]):
        moved(here, there, prompt, params, wanted, moves)
    preempted(here, prompt, params, wanted, cut)
    started = start(clean(here), prompt, params, cut)
    if started is None:
        return
    stream, pieces = started
    path = tmp_path_factory.getbasetemp() / "exact.segue"
    here.save(stream.result.request_id, path)
    assert rest(stream, pieces) == wanted, "saving disturbs nothing"
    state = clean(there).load(path)
    resumed = there.follow(there.resume(state, consume=True))
    list(resumed)
    assert told(resumed.result.completions[0]) == wanted and resumed.result.reuse.recomputed == 0


def test_a_search_depends_on_its_request_alone(engines):
    items = Catalogue({str(number): (number % 9, 40 + number % 31, 100 + number) for number in range(150)})
    searches = [BeamParams(width=8, max_tokens=3, ignore_eos=True), BeamParams(width=12, catalogue=items)]
    prompts = [[(7 * at + shift) % 250 for at in range(20 + shift)] for shift in range(5)]
    requests = [Request(prompt, beam=beam) for beam in searches for prompt in prompts]

    def lines(engine, many):
        return [[(beam.token_ids, beam.logprobs) for beam in result.beams] for result in engine.generate(many)]

    wanted = [lines(engines["plain"], request)[0] for request in requests]
    assert lines(engines["plain"], requests) == wanted
    beside = engines["small steps"]
    other = beside.submit(prompts[0], SamplingParams(max_tokens=60, ignore_eos=True))  # passes are steps of their own
    assert [lines(beside, request)[0] for request in requests] == wanted
    beside.abort(other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_has_the_same_bits_for_any_number_of_rows(dtype):
    from segue.model.cuda import kernels

    x = torch.randn(300, 1000, dtype=dtype, device="cuda")
    weight = torch.randn(777, 1000, dtype=dtype, device="cuda")
    bias = torch.randn(777, dtype=dtype, device="cuda")

    def product(rows):
        return kernels.product(rows, weight, bias, torch.full((len(rows), 777), torch.nan, dtype=dtype, device="cuda"))

    whole = product(x)
    wanted = x.double() @ weight.double().t() + bias.double()
    assert (whole.double() - wanted).norm() / wanted.norm() < 1e-2
    for count in (1, 2, 17, 64, 65, 128, 299):
        assert torch.equal(product(x[:count]), whole[:count])
        assert torch.equal(product(x[-count:]), whole[-count:])


def test_streams_that_are_read_slowly_end_alike(engines):
    """Steps begin before the last one's tokens are read; what is read late is what was computed."""
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=2)
    prompts = [[5, 6, 7, shift] for shift in range(6)]
    wanted = [told(result.completions[0]) for result in clean(engines["a"]).generate(prompts, params)]
    streams = [clean(engines["a"]).stream(prompts[0], params), *(engines["a"].stream(p, params) for p in prompts[1:])]
    seen = [list(islice(stream, at)) for at, stream in enumerate(streams)]
    assert [rest(stream, pieces) for stream, pieces in zip(streams, seen, strict=True)] == wanted
