"""What a caller of the engine can rely on, with a model that takes no time."""

import pytest

from segue.base.config import EngineConfig
from segue.base.errors import DeviceLost, EngineClosed, InvalidRequest, RequestTooLong, StepFailed
from segue.base.types import FinishReason, SamplingParams
from segue.engine import EngineCore, StepResult
from segue.engine.sequence import sample_seed
from tests.fakes import FakeExecutor, expected


class Letters:
    """Token i is the i-th letter; 0 ends."""

    vocab_size = 50
    eos_ids = (0,)

    def encode(self, text, add_special=True):
        return [ord(letter) - 64 for letter in text]

    def answer_stream(self, skip_special=True):
        return self

    def push(self, ids):
        return "".join(chr(64 + token) for token in ids)

    def flush(self):
        return ""


def make(num_blocks=64, size=4, *, step_tokens=64, running=8, tokenizer=None, **options) -> EngineCore:
    config = EngineConfig(num_blocks, size, step_tokens, running, max_model_len=200, **options)
    return EngineCore(FakeExecutor(num_blocks, size), config, tokenizer=tokenizer)


def greedy(max_tokens=8, **more):
    return SamplingParams(max_tokens=max_tokens, temperature=0, **more)


def test_answers_come_back_in_the_order_of_the_prompts():
    engine = make()
    prompts = [[1, 2, 3], [4, 5], list(range(30))]
    results = engine.generate(prompts, [greedy(3), greedy(9), greedy(1)])
    assert [r.token_ids for r in results] == [expected(p, n) for p, n in zip(prompts, (3, 9, 1), strict=True)]
    assert engine.stats().kv_usage == 0.0


def test_a_long_prompt_is_cut_into_steps_and_does_not_stall_the_others():
    engine = make(step_tokens=8)
    short = engine.submit([1, 2], greedy(20))
    for _ in range(2):
        engine.step()
    long = engine.submit(list(range(50)), greedy(2))
    for _ in range(5):
        tokens = {delta.request_id for delta in engine.step()}
        assert short in tokens and long not in tokens


def test_reuse_is_reported_and_saves_computing():
    engine = make()
    prompt = list(range(40))
    assert engine.generate(prompt, greedy(2))[0].num_prefilled == 40
    computed = engine._executor.num_computed
    again = engine.generate([*prompt[:33], 49, 48], greedy(2))[0]
    assert again.reuse.cached == 33 and again.num_prefilled == 2
    assert engine._executor.num_computed - computed == 3
    assert again.token_ids == expected([*prompt[:33], 49, 48], 2)


def test_a_turn_goes_on_from_the_last_token_that_has_kv():
    engine = make()
    first = engine.generate(list(range(10)), greedy(9))[0]
    turn = [*range(10), *first.token_ids, 7, 7]
    second = engine.generate(turn, greedy(3))[0]
    assert second.num_prefilled == 3, "the last sampled token was never fed, and the two new ones"
    assert second.token_ids == expected(turn, 3)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 12])
def test_n_answers_share_the_prompt(caching, max_tokens):
    engine = make(prefix_caching=caching)
    prompt = list(range(18))
    result = engine.generate(prompt, SamplingParams(n=5, max_tokens=max_tokens, seed=9, ignore_eos=True))[0]
    for index, completion in enumerate(result.completions):
        assert completion.token_ids == expected(prompt, max_tokens, sample_seed(9, index), 1.0)
    steps = engine._executor.num_computed
    assert steps == 18 + 4 + 5 * (max_tokens - 1), "the prompt once, its last token for each sibling"
    assert engine.stats().kv_usage == 0.0


def test_stop_tokens_and_minimum_length():
    answer = expected([1, 2, 3], 20)
    stop = answer[4]
    first = answer.index(stop)
    engine = make()
    result = engine.generate([1, 2, 3], greedy(20, stop_token_ids=(stop,)))[0]
    assert result.token_ids == answer[: first + 1]
    assert result.completions[0].finish_reason is FinishReason.STOP


def test_eos_ends_unless_ignored():
    prompt = next(p for p in ([a, b] for a in range(40) for b in range(40)) if 0 in expected(p, 10)[1:9])
    answer = expected(prompt, 10)
    engine = make(tokenizer=Letters())
    assert engine.generate(prompt, greedy(10))[0].token_ids == answer[: answer.index(0) + 1]
    assert engine.generate(prompt, greedy(10, ignore_eos=True))[0].token_ids == answer


def test_a_stop_string_across_tokens_is_cut_out_of_the_text():
    engine = make(tokenizer=Letters())
    text = "".join(chr(64 + token) for token in expected([1, 2, 3], 20))
    stop = text[5:8]
    cut = text.index(stop)
    pieces = list(engine.stream([1, 2, 3], greedy(20, stop=(stop,), ignore_eos=True)))
    assert "".join(piece.text for piece in pieces) == text[:cut]
    assert pieces[-1].finish_reason is FinishReason.STOP and len(pieces) == cut + 3
    assert engine.stats().kv_usage == 0.0
    kept = engine.generate([1, 2, 3], greedy(20, stop=(stop,), include_stop=True, ignore_eos=True))[0]
    assert kept.text == text[: cut + 3]
    late = engine.generate([1, 2, 3], greedy(20, stop=(stop,), min_tokens=12, ignore_eos=True))[0]
    assert len(late.token_ids) > 12


def test_text_that_could_start_a_stop_string_comes_out_when_it_did_not():
    engine = make(tokenizer=Letters())
    text = "".join(chr(64 + token) for token in expected([1, 2, 3], 6))
    result = engine.generate([1, 2, 3], greedy(6, stop=(text[-2:] + "never",), ignore_eos=True))[0]
    assert result.text == text and result.completions[0].finish_reason is FinishReason.LENGTH


def test_abort_frees_at_once_and_leaves_others_alone():
    engine = make()
    doomed, kept = engine.submit(list(range(20)), greedy(50)), engine.submit([3, 4], greedy(6))
    answer = list(engine.step())
    assert engine.abort(doomed) and not engine.abort(doomed) and not engine.abort("unknown")
    while engine.has_work:
        answer += engine.step()
    assert [d.token_ids[0] for d in answer if d.request_id == kept] == expected([3, 4], 6)
    assert engine.stats().kv_usage == 0.0


def test_a_preempted_request_can_be_aborted():
    engine = make(num_blocks=7, size=4)
    first, second = engine.submit([1] * 9, greedy(12)), engine.submit([2] * 8, greedy(12))
    tokens = []
    while not engine.stats().num_preemptions:
        tokens += engine.step()
    assert engine.abort(second)
    engine.check()
    while engine.has_work:
        tokens += engine.step()
    assert [delta.token_ids[0] for delta in tokens if delta.request_id == first] == expected([1] * 9, 12)
    assert engine.stats().kv_usage == 0.0


def test_closing_a_stream_early_frees_the_request():
    engine = make()
    stream = engine.stream([1, 2, 3], greedy(50))
    next(stream)
    stream.close()
    assert not engine.has_work and engine.stats().kv_usage == 0.0


def test_streams_and_requests_side_by_side_lose_nothing():
    engine = make()
    submitted = engine.submit([9, 9], greedy(12))
    left, right = engine.stream([1, 2], greedy(9)), engine.stream([3, 4], greedy(5))
    got = {"left": [next(left).token_ids[0]], "right": [delta.token_ids[0] for delta in right]}
    assert engine.generate([5, 6], greedy(3))[0].token_ids == expected([5, 6], 3)
    got["left"] += [delta.token_ids[0] for delta in left]
    assert got == {"left": expected([1, 2], 9), "right": expected([3, 4], 5)}
    arrived = []
    while engine.has_work:
        arrived += engine.step()
    assert [(delta.request_id, delta.token_ids[0]) for delta in arrived] == [
        (submitted, token) for token in expected([9, 9], 12)
    ]


def test_a_failed_step_fails_its_requests_and_no_others():
    engine = make(running=2)
    lost = [engine.submit([1, 2, 3], greedy(20)), engine.submit([4, 5, 6], SamplingParams(n=3, max_tokens=9))]
    waiting = engine.submit([7, 8, 9], greedy(4))
    engine.step()
    engine._executor.fail_next = RuntimeError("out of memory")
    deltas = engine.step()
    assert {delta.request_id for delta in deltas} == set(lost)
    assert all(delta.finish_reason is FinishReason.ERROR for delta in deltas)
    assert isinstance(deltas[0].error, StepFailed) and "out of memory" in str(deltas[0].error)
    engine.check()
    answer = []
    while engine.has_work:
        answer += [delta.token_ids[0] for delta in engine.step()]
    assert answer == expected([7, 8, 9], 4)
    assert not engine.is_active(waiting) and engine.stats().kv_usage == 0.0


def test_generate_raises_what_failed_and_cleans_up():
    engine = make()
    engine._executor.fail_next = RuntimeError("boom")
    with pytest.raises(StepFailed, match="boom"):
        engine.generate([[1, 2], [3, 4]], greedy())
    assert not engine.has_work and engine.stats().kv_usage == 0.0
    assert engine.generate([1, 2], greedy(3))[0].token_ids == expected([1, 2], 3)


def test_an_interrupt_undoes_the_step_and_reaches_the_caller():
    engine = make()
    engine.generate(list(range(30)), greedy(2))
    submitted = engine.submit([*range(22), 40, 41], greedy(3))
    engine._executor.fail_next = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([*range(21), 45], greedy(3))
    engine.check()
    (lost,) = engine.step()
    assert (lost.request_id, lost.finish_reason) == (submitted, FinishReason.ERROR)
    assert engine.stats().kv_usage == 0.0
    assert engine.generate([*range(22), 40, 41], greedy(3))[0].token_ids == expected([*range(22), 40, 41], 3)


def test_an_answer_that_ended_before_its_request_failed_ends_once():
    engine = make()
    prompt = [1, 2, 3]
    answers = [expected(prompt, 9, sample_seed(4, index), 1.0) for index in range(2)]
    stop = next(token for token in answers[0][:3] if token not in answers[1])
    engine.submit(prompt, SamplingParams(n=2, max_tokens=9, seed=4, stop_token_ids=(stop,)))
    ends = []
    while not ends:
        ends += [delta for delta in engine.step() if delta.finish_reason]
    engine._executor.fail_next = RuntimeError("late")
    ends += engine.step()
    assert [(delta.index, delta.finish_reason) for delta in ends] == [(0, FinishReason.STOP), (1, FinishReason.ERROR)]


def test_a_prompt_that_fills_the_pool_has_several_answers():
    engine = make(num_blocks=3, size=4)
    result = engine.generate([1] * 8, SamplingParams(n=3, max_tokens=None, temperature=0))[0]
    assert [completion.token_ids for completion in result.completions] == [expected([1] * 8, 1)] * 3
    assert engine.stats().kv_usage == 0.0


def test_an_executor_that_gives_too_few_tokens_fails_its_step():
    engine = make()
    engine._executor.execute = lambda plan: StepResult([])
    with pytest.raises(StepFailed, match="1 rows sample"):
        engine.generate([1, 2], greedy())
    assert engine.stats().kv_usage == 0.0


def test_no_lease_is_left_where_nobody_could_release_it():
    engine = make()
    request = engine.submit([1, 2, 3], greedy(20), hold=True)
    engine.step()
    engine.abort(request)
    assert engine.stats().kv_usage == 0.0
    last = list(engine.stream([1, 2, 3], greedy(4), hold=True))[-1]
    assert last.state.num_held
    engine.release(last.state)
    engine._executor.fail_next = None
    fine = engine.submit([7, 7], greedy(1))
    engine.step()
    assert not engine.is_active(fine)
    real, steps = engine._executor.execute, iter([None, None, RuntimeError("later")])

    def execute(plan):
        if error := next(steps):
            raise error
        return real(plan)

    engine._executor.execute = execute
    with pytest.raises(StepFailed):
        engine.generate([[1, 2], [3, 4]], [greedy(1), greedy(9)], hold=True)
    assert engine.stats().kv_usage == 0.0


def test_a_stream_dropped_before_its_first_token_frees_its_request():
    engine = make()
    stream = engine.stream([1, 2, 3], greedy(50))
    stream.close()
    assert not engine.has_work
    engine.stream([1, 2, 3], greedy(50))
    assert not engine.has_work, "and so does one that nobody kept"


@pytest.mark.parametrize("options", [{"salt": ["x"]}, {"salt": None}, {"job_id": 5}, {"request_id": ""}, {"hold": "1"}])
def test_options_of_the_wrong_type_are_refused_by_name(options):
    with pytest.raises(InvalidRequest) as caught:
        make().submit([1], **options)
    assert caught.value.field == next(iter(options))


@pytest.mark.parametrize("prompts", [None, 7, b"abcd", [], {}, [[]], [True], [[True]], [None], ["a", [b"x"]]], ids=repr)
def test_prompts_of_the_wrong_kind_are_refused(prompts):
    with pytest.raises(InvalidRequest):
        make(tokenizer=Letters()).generate(prompts, greedy())


def test_token_ids_may_be_any_whole_numbers():
    numpy = pytest.importorskip("numpy")
    wanted = expected([1, 2, 3], 3)
    for ids in (numpy.array([1, 2, 3]), [numpy.int64(1), 2, 3], (1, 2, 3), iter([1, 2, 3]), range(1, 4)):
        assert make().generate(ids, greedy(3))[0].token_ids == wanted
    with pytest.raises(InvalidRequest, match="params"):
        make().generate([1], {"max_tokens": 3})


@pytest.mark.parametrize(
    ("prompt", "params", "field", "words"),
    [
        ([], {}, "prompt", "empty"),
        ("", {}, "prompt", "empty"),
        ("text", {}, "prompt", "tokenizer"),
        ([1.5], {}, "prompt", "token ids"),
        ([2**40], {}, "prompt", "token ids"),
        (list(range(40)) * 6, {}, "prompt", "200"),
        ([1] * 150, {"max_tokens": 51}, "max_tokens", "200"),
        ([50], {}, "prompt", "vocabulary of 50"),
        ([-1], {}, "prompt", "vocabulary"),
        ([1], {"stop_token_ids": (50,)}, "stop_token_ids", "vocabulary"),
        ([1], {"logit_bias": {77: 1.0}}, "logit_bias", "vocabulary"),
        ([1] * 150, {"max_tokens": None, "min_tokens": 60}, "min_tokens", "50"),
    ],
)
def test_what_could_never_run_is_refused_by_name(prompt, params, field, words):
    engine = EngineCore(FakeExecutor(64, 4), EngineConfig(64, 4, max_model_len=200), vocab_size=50)
    with pytest.raises(InvalidRequest, match=words) as caught:
        engine.submit(prompt, SamplingParams(**params))
    assert caught.value.field == field
    assert not engine.has_work


def test_more_than_the_memory_can_ever_hold_is_refused():
    engine = make(num_blocks=5, size=4)
    with pytest.raises(RequestTooLong, match="16"):
        engine.submit([1] * 17, greedy(1))
    with pytest.raises(RequestTooLong, match="max_tokens"):
        engine.submit([1] * 10, greedy(8))
    assert engine.generate([1] * 10, greedy(7))[0].token_ids == expected([1] * 10, 7)
    free_running = engine.generate([1] * 10, SamplingParams(max_tokens=None, temperature=0))[0]
    assert len(free_running.token_ids) == 7, "without max_tokens it runs to the end of what memory holds"


def test_a_request_id_is_not_taken_twice_at_once():
    engine = make()
    engine.submit([1], greedy(), request_id="a")
    with pytest.raises(InvalidRequest, match="request_id"):
        engine.submit([1], greedy(), request_id="a")


def test_a_closed_engine_says_so():
    engine = make()
    engine.submit([1, 2], greedy())
    engine.close()
    engine.close()
    assert engine.stats().kv_usage == 0.0 and engine._executor.closed
    with pytest.raises(EngineClosed):
        engine.submit([1])


def test_tenants_do_not_share():
    engine = make()
    engine.submit(list(range(20)), greedy(2), salt="a")
    while engine.has_work:
        engine.step()
    result = engine.generate(list(range(20)), greedy(2), salt="b")[0]
    assert result.num_prefilled == 20


def test_held_answers_survive_what_would_evict_them():
    engine = make(num_blocks=17, size=4)
    held = engine.generate(list(range(20)), greedy(5), hold=True)[0].completions[0]
    assert held.state is not None and held.state.num_held == 24
    for start in range(3):
        engine.generate([start + 25] * 20, greedy(5))
    again = engine.generate([*range(20), *held.token_ids], greedy(2))[0]
    assert again.num_prefilled == 1
    engine.release(held.state)
    engine.release(held.state)
    assert engine.stats().kv_usage == 0.0


def test_a_lost_device_fails_its_requests_and_is_the_callers_to_hear_of():
    """Nothing more can be computed: whoever runs the engine must replace it. What is waiting is not lost in silence."""
    engine = make(running=1)
    engine.submit([1, 2, 3], greedy(9), request_id="running")
    engine.submit([4, 5], greedy(9), request_id="waiting")
    engine.step()
    engine._executor.fail_next = DeviceLost("the device is gone")
    with pytest.raises(DeviceLost):
        engine.step()
    engine.check()
    assert engine.is_active("waiting") and not engine.is_active("running")
    assert isinstance(engine._arrived[-1].error, StepFailed)
    engine.close()
