"""The exactness matrix: {never moved} = {continued} = {forked} = {saved and loaded in another process} = {exported and imported
after prefill, in the middle, twice} = {preempted}, to the last bit of the log-probabilities, greedy and sampled.

One real model on the CPU kernels; block sizes, pools, prompts, cut points and stop strings are random.
"""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segue import Engine, SamplingParams
from segue.engine import hand_over

SIZES = [3, 8, 16]
CASES = 200

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.9, 1.5]),
    top_k=st.sampled_from([0, 0, 40]),
    top_p=st.sampled_from([1.0, 0.95]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 2**62),
    max_tokens=st.integers(2, 28),
    logprobs=st.sampled_from([None, 2]),
    ignore_eos=st.booleans(),
)
PROMPTS = st.lists(st.integers(0, 255), min_size=1, max_size=80)

OTHER_PROCESS = """
import json, sys
from segue import Engine, SamplingParams
options = dict(device="cpu", num_blocks=90, max_model_len=140, threads=1)
engines = {size: Engine("tiny", block_size=size, **options) for size in (3, 8, 16)}
print("ready", flush=True)
for line in sys.stdin:
    job = json.loads(line)
    engine = engines[job["size"]]
    engine.forget()
    state = engine.load(job["path"], hold=False)
    engine.hold(state)
    if job["suffix"] is None:
        stream = engine.follow(engine.resume(state, consume=True))
        list(stream)
        result = stream.result
    else:
        params = SamplingParams(**job["params"])
        result = engine.continue_(state, job["suffix"], params, consume=True)
    engine.check()
    assert engine.stats().kv_usage == 0.0
    first = result.completions[0]
    answer = [first.token_ids, first.text, first.finish_reason, first.logprobs, result.reuse.held, result.reuse.recomputed]
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="module")
def engines(model):
    made = {
        (size, place): Engine(model, device="cpu", num_blocks=90, block_size=size, max_model_len=140, threads=1)
        for size in SIZES
        for place in "ab"
    }
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture(scope="module")
def other_process():
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"

    def ask(**job):
        print(json.dumps(job), file=process.stdin, flush=True)
        line = process.stdout.readline()
        assert line, "the other process ended"
        return json.loads(line)

    yield ask
    process.stdin.close()
    assert process.wait(60) == 0


def clean(engine):
    for state in engine.states():
        engine.release(state)
    engine.forget()
    engine.check()
    assert engine.stats().kv_usage == 0.0
    return engine


def told(completion):
    return (completion.token_ids, completion.text, completion.finish_reason, completion.logprobs)


def start(engine, prompt, params, num_tokens):
    """A stream of which `num_tokens` deltas have been read; None if the request has ended by then."""
    stream = engine.stream(prompt, params)
    pieces = list(islice(stream, num_tokens))
    return None if pieces[-1].finish_reason else (stream, pieces)


def rest(stream, pieces):
    """Read to the end: what the consumer saw must be the whole answer, once."""
    pieces += stream
    seen = [token for delta in pieces for token in delta.token_ids]
    answer = stream.result.completions[0]
    assert seen == answer.token_ids
    assert "".join(delta.text for delta in pieces) == answer.text
    return told(answer)


@given(
    prompt=PROMPTS,
    params=PARAMS,
    sizes=st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES)),
    share=st.floats(0, 0.99),
    stop_at=st.none() | st.floats(0, 1),
    penalty=st.sampled_from([0.0, 0.7]),
)
@settings(max_examples=CASES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_the_answer_never_changes(
    engines, other_process, tmp_path_factory, prompt, params, sizes, share, stop_at, penalty
):
    here, there = clean(engines[sizes[0], "a"]), clean(engines[sizes[1], "b"])
    plain = here.generate(prompt, params)[0].completions[0]
    cut = max(int(share * len(plain.token_ids)), 1)
    path = tmp_path_factory.getbasetemp() / "matrix.segue"
    if cut < len(plain.token_ids):
        _continued_and_forked(here, there, other_process, path, prompt, params, plain, cut)

    # The rest resumes one and the same request, so that penalties and stop strings span the move.
    whole = replace(params, presence_penalty=penalty)
    if stop_at is not None and (text := clean(here).generate(prompt, whole)[0].text):
        whole = replace(whole, stop=(text[int(stop_at * (len(text) - 1)) :][:3],))
    wanted = told(clean(here).generate(prompt, whole)[0].completions[0])
    cut = max(int(share * len(wanted[0])), 1)
    for moves in ([1], [cut], [1, cut]):
        moved(here, there, prompt, whole, wanted, moves)
    preempted(here, prompt, whole, wanted, cut)
    _saved_unfinished(here, other_process, path, sizes[1], prompt, whole, wanted, cut)


def _continued_and_forked(here, there, other_process, path, prompt, params, plain, cut):
    before, after = plain.token_ids[:cut], plain.token_ids[cut:]
    remaining = replace(params, max_tokens=params.max_tokens - cut, logprobs=None)
    first = clean(here).generate(prompt, replace(params, max_tokens=cut), hold=True)[0]
    assert first.token_ids == before
    suffix = [(after[0] + 1) % 256, 7, 7]
    assert here.continue_(first.state, suffix, replace(remaining, max_tokens=1)).num_prefilled == 1 + len(suffix)
    child = here.continue_(first.state, (), remaining)
    assert child.token_ids == after and child.num_prefilled == 1

    whole = clean(here).generate(prompt, params, hold=True)[0]
    fork = here.fork(whole.state, len(prompt) + cut)
    assert here.continue_(fork, (), remaining).token_ids == after
    assert here.continue_(whole.state, (), remaining, at=len(prompt) + cut, consume=True).token_ids == after

    here.save(fork, path)
    fields = {
        name: getattr(remaining, name) for name in ("temperature", "top_k", "top_p", "repetition_penalty", "seed")
    }
    fields |= {"max_tokens": remaining.max_tokens, "ignore_eos": remaining.ignore_eos}
    answer = other_process(path=str(path), size=there.config.block_size, suffix=[], params=fields)
    assert answer[0] == after and answer[5] <= 1, "all of its KV came along; a fork's last token is fed again"


def moved(here, there, prompt, params, wanted, moves):
    engines = [clean(here), clean(there)]
    started = start(engines[0], prompt, params, moves[0])
    if started is None:
        return
    stream, pieces = started
    for number, at in enumerate(moves):
        pieces += islice(stream, at - len(pieces))
        if pieces[-1].finish_reason:
            break
        source, destination = engines[number % 2], engines[(number + 1) % 2]
        hand_over(source, destination, stream.result.request_id)
        assert source.stats().kv_usage == 0.0
        destination.check()
    assert rest(stream, pieces) == wanted


def preempted(here, prompt, params, wanted, cut):
    started = start(clean(here), prompt, params, cut)
    if started is not None:
        stream, pieces = started
        here._scheduler._preempt(next(iter(here._scheduler._running.values())))
        assert rest(stream, pieces) == wanted


def _saved_unfinished(here, other_process, path, size, prompt, params, wanted, cut):
    started = start(clean(here), prompt, params, cut)
    if started is None:
        return
    stream, pieces = started
    here.save(stream.result.request_id, path)
    assert rest(stream, pieces) == wanted, "saving disturbs nothing"
    token_ids, text, reason, logprobs, held, recomputed = other_process(path=str(path), size=size, suffix=None)
    exact = [(chosen, rank, tuple(tuple(entry) for entry in top)) for chosen, rank, top in logprobs]
    assert (token_ids, text, reason, exact) == wanted
    assert (held, recomputed) == (len(prompt) + cut - 1, 0)
