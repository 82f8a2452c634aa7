"""The exactness matrix, extended: {never moved} = {demoted to the host, loaded} = {demoted to disk, loaded after a restart},
to the last bit of the log-probabilities. One real model on the CPU kernels."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segue import Engine, SamplingParams

SIZES = [3, 8, 16]
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.9, 1.5]),
    top_p=st.sampled_from([1.0, 0.95]),
    seed=st.integers(0, 2**62),
    max_tokens=st.integers(1, 20),
    logprobs=st.just(2),
    ignore_eos=st.booleans(),
)
PROMPTS = st.lists(st.integers(0, 255), min_size=2, max_size=100)


@pytest.fixture(scope="module", autouse=True)
def computing_takes_long():
    """A model as small as this is often computed sooner."""
    with pytest.MonkeyPatch.context() as patch:
        slow = property(lambda gauge: 1.0, lambda gauge, seconds: None)
        patch.setattr("segue.engine.gauge.Gauge.seconds_per_token", slow, raising=False)
        yield


def make(model, size, *tiers):
    blocks = 140 // size + 2
    return Engine(model, device="cpu", num_blocks=blocks, block_size=size, max_model_len=140, threads=1, tiers=tiers)


def told(result):
    first = result.completions[0]
    return first.token_ids, first.text, first.finish_reason, first.logprobs


def flood(engine, salt=0):
    """Something else takes every block."""
    size = engine.config.block_size
    engine.generate([salt] * ((engine.config.num_blocks - 2) * size), SamplingParams(max_tokens=1))
    engine.check()


@pytest.fixture(scope="module")
def engines(model):
    made = {size: (make(model, size), make(model, size, "host=64MiB")) for size in SIZES}
    yield made
    for pair in made.values():
        for engine in pair:
            engine.close()


@given(prompt=PROMPTS, params=PARAMS, size=st.sampled_from(SIZES), suffix=st.lists(st.integers(0, 255), max_size=9))
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_from_the_host(engines, prompt, params, size, suffix):
    plain, tiered = engines[size]
    plain.forget()
    first = plain.generate(prompt, params)[0]
    second = plain.continue_(first.state, suffix, params)
    tiered.forget()
    moved = tiered.generate(prompt, params)[0]
    flood(tiered, 1)
    again = tiered.generate(prompt, params)[0]
    flood(tiered, 2)
    continued = tiered.continue_(moved.state, suffix, params)
    tiered.check()
    assert told(moved) == told(again) == told(first) and told(continued) == told(second)
    full = (len(prompt) - 1) // size * size
    assert again.reuse.loaded + again.reuse.cached >= full and (again.reuse.loaded or full <= 2 * size)
    assert continued.reuse.recomputed < size


def test_from_disk_after_a_restart(model, tmp_path):
    for case, size in enumerate(SIZES * 3):
        prompt = [(7 * case + token * token) % 256 for token in range(10 + 11 * case)]
        params = SamplingParams(max_tokens=12, temperature=case % 2, seed=case, logprobs=2, ignore_eos=True)
        with make(model, size) as engine:
            wanted = engine.generate(prompt, params)[0]
        tier = f"disk={tmp_path / str(case)},64MiB"
        with make(model, size, tier) as engine:
            assert told(engine.generate(prompt, params)[0]) == told(wanted)
        with make(model, size, tier) as engine:
            again = engine.generate(prompt, params)[0]
            assert told(again) == told(wanted) and again.reuse.loaded == (len(prompt) - 1) // size * size
            assert again.num_prefilled <= size
