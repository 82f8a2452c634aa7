"""On the CPU kernels an answer is a function of its own request: tokens and log-probabilities are equal to the last bit,
alone or in company, in one piece or in chunks, computed or found in memory, preempted or not."""

from hypothesis import given, settings
from hypothesis import strategies as st

from segue import Engine, SamplingParams

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8, 1.5]),
    top_k=st.sampled_from([0, 0, 30]),
    top_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    seed=st.integers(0, 2**62),
    max_tokens=st.integers(1, 24),
    logprobs=st.just(3),
    n=st.sampled_from([1, 1, 2]),
    ignore_eos=st.just(True),
)
# Two alphabets of two letters: prompts often begin alike.
PROMPTS = st.lists(st.sampled_from([65, 66]), min_size=1, max_size=70)


def answers(engine, prompts, params):
    results = engine.generate(prompts, params)
    engine.check()
    return [[(c.token_ids, c.logprobs, c.finish_reason) for c in result.completions] for result in results]


@given(st.lists(st.tuples(PROMPTS, PARAMS), min_size=1, max_size=5), st.sampled_from([4, 16]), st.integers(5, 40))
@settings(max_examples=25)
def test_an_answer_depends_on_its_request_alone(model, requests, block_size, chunk):
    prompts, params = [list(p) for p, _ in requests], [p for _, p in requests]

    def engine(**options):
        return Engine(
            model, device="cpu", **{"block_size": block_size, "num_blocks": 400, "max_model_len": 128, **options}
        )

    with engine(prefix_caching=False) as cold:
        wanted = [answers(cold, prompt, own)[0] for prompt, own in zip(prompts, params, strict=True)]
        assert answers(cold, prompts, params) == wanted
    with engine(max_step_tokens=chunk, max_running=5) as small_steps:
        assert answers(small_steps, prompts, params) == wanted
        assert answers(small_steps, prompts[::-1], params[::-1]) == wanted[::-1], "everything is found in memory now"
    with engine(num_blocks=100 // block_size + 2) as tight:
        assert answers(tight, prompts, params) == wanted
