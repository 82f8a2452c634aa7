"""Beam search in the engine, with a model that notices every wrong slot: exact under any pressure, or refused."""

import random

import pytest

from segue import (
    BeamParams,
    EngineConfig,
    EngineCore,
    FinishReason,
    InvalidRequest,
    Request,
    SamplingParams,
    StateError,
    Then,
)
from segue.base.errors import RequestTooLong, StepFailed
from tests.fakes import VOCAB, FakeExecutor, PipelinedFake, digest_of, expected, logprob

PROMPT = [token % 40 for token in range(30)]


def make(num_blocks=200, size=4, fake=FakeExecutor, **options) -> EngineCore:
    config = EngineConfig(
        num_blocks, size, **{"max_step_tokens": 128, "max_running": 32, "max_model_len": 200, **options}
    )
    return EngineCore(fake(num_blocks, size), config)


def searched(prompt, params, stops=()):
    """The plain way: every line as a list of tokens, nothing shared. The best lines with their scores."""
    live, done = [((), 0.0)], []
    for depth in range(1, params.max_tokens + 1):
        found = [
            ((*line, token), total + logprob(digest_of([*prompt, *line]), token))
            for line, total in live
            for token in range(VOCAB)
        ]
        found.sort(key=lambda pair: -pair[1])
        live = []
        for rank, (line, total) in enumerate(found[: max(2, 1 + len(stops)) * params.width]):
            if line[-1] in stops or depth == params.max_tokens:
                if rank < params.width:
                    done.append((total / depth**params.length_penalty, line))
            elif len(live) < params.width:
                live.append((line, total))
        done = sorted(done, reverse=True)[: params.width]
        is_full = len(done) == params.width and bool(live)
        if is_full and (params.early_stopping is True or live[0][1] / depth**params.length_penalty <= done[-1][0]):
            break
    return done


def lines(result):
    return [(pytest.approx(beam.score), beam.token_ids) for beam in result.beams]


def run(engine, *request_ids):
    """Step to the end; the last delta of each request."""
    last = {}
    while engine.has_work:
        for delta in engine.step():
            last[delta.request_id] = delta
        engine.check()
    return [last[request_id] for request_id in request_ids]


def found(delta):
    return [beam.token_ids for beam in delta.beams]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("stops", [(), (3, 7, 11)])
@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize("fake", [FakeExecutor, PipelinedFake])
def test_what_the_plain_way_finds(fake, width, stops, penalty, early):
    engine = make(fake=fake)
    params = BeamParams(width=width, max_tokens=7, length_penalty=penalty, early_stopping=early, stop_token_ids=stops)
    result = engine.generate(Request(PROMPT, beam=params))[0]
    engine.check()
    assert lines(result) == searched(PROMPT, params, stops)
    assert engine.stats().kv_usage == 0
    assert [completion.token_ids for completion in result.completions] == [list(b.token_ids) for b in result.beams]


def test_beams_take_memory_only_for_what_they_do_not_share():
    engine = make()
    execute, held = engine._executor.execute, []

    def watched(plan):
        held.append(round(engine.kv.usage * engine.kv.num_blocks))
        return execute(plan)

    engine._executor.execute = watched
    engine.generate(Request(PROMPT, beam=BeamParams(width=16, max_tokens=4)))
    assert held == [-(-(30 + 16 * steps) // 4) for steps in range(4)]
    assert engine._executor.num_computed == 30 + 16 * 3


def test_from_a_held_state_only_what_is_new_is_computed():
    engine = make()
    state = engine.generate(PROMPT, SamplingParams(max_tokens=20, temperature=0), hold=True)[0].state
    prefix = [*PROMPT, *expected(PROMPT, 20), 5, 6, 7]
    engine.generate([[9, token, 8] * 60 for token in range(9)], SamplingParams(max_tokens=2))  # evict what can be
    before = engine._executor.num_computed
    params = BeamParams(width=8, max_tokens=3)
    result = engine.generate(Request(parent=state, suffix=[5, 6, 7], beam=params))[0]
    assert lines(result) == searched(prefix, params)
    assert engine._executor.num_computed - before == 1 + 3 + 2 * 8
    assert result.num_prefilled == 1 + 3


def test_a_thought_goes_over_into_a_search_in_place():
    engine = make()
    params, beam = SamplingParams(max_tokens=20, temperature=0), BeamParams(width=8, max_tokens=3)
    before = engine._executor.num_computed
    result = engine.generate(Request(PROMPT, params, then=Then(beam, [5, 6, 7])))[0]
    engine.check()
    thought = expected(PROMPT, 20)
    assert result.token_ids == thought and result.completions[0].finish_reason is FinishReason.LENGTH
    assert lines(result) == searched([*PROMPT, *thought, 5, 6, 7], beam)
    assert engine._executor.num_computed - before == 30 + 20 + 3 + 2 * 8
    assert result.completions[0].search_prefilled == 1 + 3
    assert result.state.tokens.tolist() == [*PROMPT, *thought, 5, 6, 7, *result.beams[0].token_ids]


@pytest.mark.parametrize("fake", [FakeExecutor, PipelinedFake])
def test_the_part_of_the_suffix_that_a_stopped_thought_has_is_not_repeated(fake):
    engine = make(fake=fake)
    thought = expected(PROMPT, 20)
    stop = thought[6]
    first = thought.index(stop)
    params = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=(stop,))
    beam = BeamParams(width=4, max_tokens=2)
    result = engine.generate(Request(PROMPT, params, then=Then(beam, [stop, 2, 3])))[0]
    assert result.completions[0].finish_reason is FinishReason.STOP
    assert result.token_ids == thought[: first + 1], "also if a step more was under way"
    assert lines(result) == searched([*PROMPT, *thought[: first + 1], 2, 3], beam)
    assert result.completions[0].search_prefilled == 1 + 2


def test_many_thoughts_are_merged_each_line_once():
    engine = make()
    params = SamplingParams(n=8, max_tokens=6, temperature=1, seed=3)
    beam = BeamParams(width=16, max_tokens=1, n=10)
    result = engine.generate(Request(PROMPT, params, then=Then(beam, [1])))[0]
    engine.check()
    assert len(result.completions) == 8 and len({tuple(c.token_ids) for c in result.completions}) > 1
    best = {}
    for thought in result.completions:
        for score, line in searched([*PROMPT, *thought.token_ids, 1], beam):
            best[line] = max(best.get(line, -1e9), score)
    wanted = sorted(((score, line) for line, score in best.items()), reverse=True)[:10]
    assert lines(result) == wanted
    by_sum = engine.generate(Request(PROMPT, params, then=Then(BeamParams(width=16, max_tokens=1, merge="sum"), [1])))[
        0
    ]
    assert {b.token_ids: b.score for b in by_sum.beams} != {b.token_ids: b.score for b in result.beams}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("fake", [FakeExecutor, PipelinedFake])
def test_hundreds_of_searches_among_others_with_little_memory(fake, seed):
    """Searches, thoughts and sampling share a pool that is much too small for all: some are preempted, some aborted, and what
    ends well is what it would have been alone."""
    pick = random.Random(seed)
    engine = make(pick.choice([40, 60, 120]), fake=fake, max_step_tokens=64, max_running=pick.choice([4, 16]))
    wanted, ids, aborted = {}, [], set()
    for number in range(60):
        prompt = [pick.randrange(VOCAB) for _ in range(pick.randint(1, 50))]
        beam = BeamParams(width=pick.choice([1, 3, 8, 20]), max_tokens=pick.randint(1, 4))
        kind, name = pick.choice(["beam", "then", "sample"]), f"r{number}"
        if kind == "beam":
            engine.submit(Request(prompt, beam=beam, request_id=name))
            wanted[name] = [line for _, line in searched(prompt, beam)]
        elif kind == "then":
            params = SamplingParams(max_tokens=9, temperature=0)
            engine.submit(Request(prompt, params, then=Then(beam, [1, 2]), request_id=name))
            wanted[name] = [line for _, line in searched([*prompt, *expected(prompt, 9), 1, 2], beam)]
        else:
            engine.submit(Request(prompt, SamplingParams(max_tokens=12, temperature=0), request_id=name))
            wanted[name] = expected(prompt, 12)
        ids.append(name)
    tokens, last = {}, {}
    while engine.has_work:
        for delta in engine.step():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            last[delta.request_id] = delta
        engine.check()
        if pick.random() < 0.1 and (victim := pick.choice(ids)) not in last and engine.abort(victim):
            aborted.add(victim)
            engine.check()
    assert engine.stats().kv_usage == 0
    for name in set(ids) - aborted:
        assert last[name].error is None
        assert (found(last[name]) if last[name].beams is not None else tokens[name]) == wanted[name]


def test_searches_alone_in_a_step_are_carried_to_their_ends():
    """All passes in one step, with their memory reserved beforehand; where there is none, or beside others, one by one."""
    params = BeamParams(width=16, max_tokens=4)
    engine = make(fake=PipelinedFake)
    assert lines(engine.generate(Request(PROMPT, beam=params))[0]) == searched(PROMPT, params)
    assert engine.stats().num_steps == 1 and engine._executor.num_computed == 30 + 16 * 3
    assert engine._scheduler.num_planned == 30 + 16 * 3
    others = [[token + shift for token in PROMPT] for shift in range(4)]
    small = make(num_blocks=60, fake=PipelinedFake)
    for prompt, result in zip(others, small.generate([Request(each, beam=params) for each in others]), strict=True):
        assert lines(result) == searched(prompt, params)
    assert small.stats().num_steps > 1
    small.submit(PROMPT, SamplingParams(max_tokens=9))
    small.step()
    before = small.stats().num_steps
    assert lines(small.generate(Request(others[1], beam=params))[0]) == searched(others[1], params)
    assert small.stats().num_steps - before >= 4


@pytest.mark.parametrize("seed", range(6))
def test_searches_begin_while_others_run(seed):
    """Too many for one step, with prompts and aborts in between: all that end well find what they would have found alone."""
    pick = random.Random(seed)
    engine = make(400, fake=PipelinedFake, max_step_tokens=128, max_running=32, max_model_len=300)
    ids, wanted, last = [], {}, {}
    for number in range(80):
        prompt = [pick.randrange(VOCAB) for _ in range(pick.randint(1, 9))]
        if number < 20 and pick.random() < 0.1:
            engine.submit(Request(prompt, SamplingParams(max_tokens=6, temperature=0), request_id=f"r{number}"))
        else:
            beam = BeamParams(width=pick.choice([4, 10, 30]), max_tokens=pick.randint(2, 4))
            ids.append(f"r{number}")
            engine.submit(Request(prompt, beam=beam, request_id=ids[-1]))
            wanted[ids[-1]] = [line for _, line in searched(prompt, beam)]
        if number % 16 > 10:
            last |= {delta.request_id: delta for delta in engine.step()}
            engine.check()
        if ids and pick.random() < 0.2 and engine.abort(victim := pick.choice(ids)):
            del wanted[victim]
            ids.remove(victim)
    while engine.has_work:
        last |= {delta.request_id: delta for delta in engine.step()}
        engine.check()
    assert engine._executor.num_beside and engine.stats().kv_usage == 0
    assert {name: found(last[name]) for name in ids} == wanted


def test_a_preempted_search_finds_the_same():
    """The second one's beams do not fit beside the first one's: one of them starts again."""
    engine = make(num_blocks=41)
    params = BeamParams(width=20, max_tokens=5)
    other = [token + 1 for token in PROMPT]
    one, two = engine.submit(Request(PROMPT, beam=params)), engine.submit(Request(other, beam=params))
    deltas = run(engine, one, two)
    assert engine.stats().num_preemptions
    assert [found(delta) for delta in deltas] == [
        [line for _, line in searched(prompt, params)] for prompt in (PROMPT, other)
    ]


def test_a_pool_one_block_too_small_refuses_by_name():
    params = BeamParams(width=20, max_tokens=5)
    needed = -(-(30 + 20 * 4) // 4)
    assert make(num_blocks=needed + 1).generate(Request(PROMPT, beam=params))[0].beams
    with pytest.raises(RequestTooLong, match=f"width: {needed} blocks are needed"):
        make(num_blocks=needed).submit(Request(PROMPT, beam=params))


def test_a_thought_without_a_limit_leaves_room_for_its_search():
    engine = make(num_blocks=30)
    beam = BeamParams(width=8, max_tokens=3)
    result = engine.generate(Request(PROMPT, SamplingParams(max_tokens=None, temperature=0), then=Then(beam, [1, 2])))[
        0
    ]
    assert len(PROMPT) + len(result.token_ids) == 29 * 4 - 2 - 16
    assert len(result.beams) == 8


def test_room_that_a_search_needs_is_no_room_for_a_thought():
    engine = make(num_blocks=30)
    then = Then(BeamParams(width=8, max_tokens=3), [1, 2])
    fits = 29 * 4 - 2 - 16 - len(PROMPT)
    with pytest.raises(RequestTooLong, match=f"min_tokens: {fits + 1} is over the {fits} tokens"):
        engine.submit(Request(PROMPT, SamplingParams(max_tokens=None, min_tokens=fits + 1), then=then))
    engine.submit(Request(PROMPT, SamplingParams(max_tokens=None, min_tokens=fits), then=then))


def test_tokens_outside_the_vocabulary_are_refused_wherever_they_stand():
    """None may get as far as a step, where others would fail with it."""
    config = EngineConfig(200, 4, max_step_tokens=128, max_running=32, max_model_len=200)
    engine = EngineCore(FakeExecutor(200, 4), config, vocab_size=VOCAB)
    state = engine.generate(PROMPT, SamplingParams(max_tokens=2), hold=True)[0].state
    beam = BeamParams(width=2, max_tokens=2)
    for wrong in (
        Request([VOCAB], beam=beam),
        Request(parent=state, suffix=[VOCAB], beam=beam),
        Request(parent=state, suffix=[VOCAB], then=Then(beam, [1])),
        Request(PROMPT, then=Then(beam, [VOCAB])),
        Request(PROMPT, then=Then(beam, [1], [VOCAB])),
        Request(PROMPT, beam=BeamParams(max_tokens=2, stop_token_ids=[VOCAB])),
        Request(PROMPT, beam=BeamParams(max_tokens=2, allowed_token_ids=[VOCAB])),
        Request(PROMPT, SamplingParams(allowed_token_ids=[VOCAB])),
    ):
        with pytest.raises(InvalidRequest, match=f"token id {VOCAB} is outside"):
            engine.submit(wrong)
    assert not engine.has_work


def test_a_failed_step_ends_its_searches_and_no_others():
    engine = make()
    one = engine.submit(Request(PROMPT, beam=BeamParams(width=4, max_tokens=4)))
    engine.step()
    engine.step()
    engine._executor.fail_next = RuntimeError("gone")
    [delta] = engine.step()
    assert delta.request_id == one and isinstance(delta.error, StepFailed)
    engine.check()
    assert engine.stats().kv_usage == 0
    assert engine.generate(Request(PROMPT, beam=BeamParams(width=4, max_tokens=4)))[0].beams


class NoMemory(PipelinedFake):
    """The first step with copies fails before they are made."""

    failures = 1

    def launch(self, plan, after):
        if self.failures and plan.copies:
            self.failures -= 1
            raise MemoryError("no room for a recording")
        return super().launch(plan, after)


def test_a_search_that_waits_for_the_next_step_does_not_count_on_copies_of_a_failed_one():
    engine = make(400, fake=NoMemory, max_step_tokens=80, max_running=8, max_model_len=300)
    engine.generate(PROMPT, SamplingParams(max_tokens=1, temperature=0))  # its last block is shared, and to be copied
    beam = BeamParams(width=45, max_tokens=3)  # of which two are too many for one step
    one, two = (engine.submit(Request([*PROMPT, token], beam=beam)) for token in (5, 6))
    failed, fine = run(engine, one, two)
    assert isinstance(failed.error, StepFailed) and engine._executor.failures == 0
    assert found(fine) == [line for _, line in searched([*PROMPT, 6], beam)]


class Interrupted(PipelinedFake):
    """In the middle of waiting for searches."""

    def land(self, ticket):
        if isinstance(ticket, list):
            self.num_in_flight -= 1
            raise KeyboardInterrupt
        return super().land(ticket)


def test_a_step_that_was_only_planned_is_undone_when_the_one_before_it_is_interrupted():
    engine = make(400, fake=Interrupted, max_step_tokens=64, max_running=8, max_model_len=300)
    base = [7] * 22
    engine.generate(base, SamplingParams(max_tokens=1, temperature=0))
    engine.submit(Request(PROMPT, beam=BeamParams(width=20, max_tokens=3)))
    plan_beside, begun = engine._scheduler.plan_beside, []

    def beside(plan):
        """A prompt longer than a step comes meanwhile: its first part samples nothing, so it is not launched."""
        if not begun:
            begun.append(engine.submit([*base, *[9] * 150], SamplingParams(max_tokens=3, temperature=0)))
        return plan_beside(plan)

    engine._scheduler.plan_beside = beside
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.check()
    ended = {delta.request_id: delta.error for delta in engine.step()}
    assert isinstance(ended[begun[0]], StepFailed)
    assert not engine.has_work and engine.stats().kv_usage == 0


def test_what_follows_a_search_follows_its_best_line():
    engine = make()
    beam = BeamParams(width=4, max_tokens=3)
    one = engine.submit(Request(PROMPT, beam=beam, request_id="one"))
    two = engine.submit(Request(parent="one", suffix=[9], params=SamplingParams(max_tokens=4, temperature=0)))
    tokens = []
    while engine.has_work:
        tokens += [token for delta in engine.step() if delta.request_id == two for token in delta.token_ids]
    best = searched(PROMPT, beam)[0][1]
    assert tokens == expected([*PROMPT, *best, 9], 4) and one == "one"


def test_a_search_is_not_moved_or_saved_half_way(tmp_path):
    engine = make()
    name = engine.submit(Request(PROMPT, SamplingParams(max_tokens=5), then=Then(BeamParams(width=2, max_tokens=2))))
    engine.step()
    with pytest.raises(StateError, match="searches"):
        engine.export_request(name)
    with pytest.raises(StateError, match="searches"):
        engine.save(name, tmp_path / "state")
    assert run(engine, name)[0].beams


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"beam": BeamParams(width=97, max_tokens=1)}, "width"),
        ({"beam": BeamParams(width=4, max_tokens=180)}, "max_tokens"),
        ({"beam": BeamParams(max_tokens=1), "then": Then(BeamParams(max_tokens=1))}, "beam"),
        ({"beam": BeamParams(max_tokens=1), "params": SamplingParams(n=2)}, "params"),
        ({"beam": {"width": 3}}, "beam"),
        ({"beam": BeamParams(catalogue="none")}, "catalogue"),
        ({"beam": BeamParams(catalogue=3)}, "catalogue"),
        ({"then": BeamParams(max_tokens=1)}, "then"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, field):
    engine = make()
    with pytest.raises(InvalidRequest, match=field):
        engine.submit(Request(PROMPT, **options))
    assert not engine.has_work


@pytest.mark.parametrize(
    "options",
    [
        {"early_stopping": 1},
        {"width": 0}, {"width": 513}, {"width": 2.0}, {"n": 5}, {"n": 0}, {"early_stopping": "ever"}, {"scoring": "none"},
        {"merge": "all"}, {"scoring": "legal"}, {"allow": ["a"]}, {"deny": ["a"]}, {"length_penalty": float("nan")},
        {"temperature": -1}, {"seed": -1}, {"max_tokens": None}, {"ignore_eos": 1}, {"allowed_token_ids": [-1]},
        {"catalogue": "a", "allowed_token_ids": [1]}, {"catalogue": "a", "deny": [1]},
    ],
)  # fmt: skip
def test_beam_params_that_cannot_work(options):
    with pytest.raises(
        InvalidRequest, match=next(iter(reversed(options))) if "catalogue" in options else next(iter(options))
    ):
        BeamParams(**{"max_tokens": 3, **options})
