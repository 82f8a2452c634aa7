"""Whose an id is: what may take it, what may not, and what whoever had it before still hears."""

import gc
from contextlib import suppress
from itertools import pairwise

import pytest

from segue.base.config import EngineConfig
from segue.base.errors import InvalidRequest, ParentFailed, RequestTooLong, StateError, UnknownState
from segue.base.types import SamplingParams
from segue.engine import EngineCore, Request
from segue.engine.sequence import sample_seed
from tests.fakes import FakeExecutor, expected

PROMPT = [token % 40 for token in range(30)]


def make(num_blocks=64, size=4, **options) -> EngineCore:
    config = EngineConfig(
        num_blocks, size, **{"max_step_tokens": 64, "max_running": 8, "max_model_len": 200, **options}
    )
    return EngineCore(FakeExecutor(num_blocks, size), config)


def greedy(max_tokens=8, **more):
    return SamplingParams(max_tokens=max_tokens, temperature=0, **more)


def known(engine, state_id, **options):
    """A finished request's state."""
    return engine.generate(PROMPT, greedy(), request_id=state_id, **options)[0].state


def running(engine, request_id, steps=3, **options):
    engine.submit(PROMPT, options.pop("params", greedy(20)), request_id=request_id, **options)
    for _ in range(steps):
        engine.step()
    return request_id


def saved(state_id, salt=""):
    """A snapshot of a finished state, and one of a request under way, both from another engine and with this id."""
    engine = make()
    finished = engine.begin_save(known(engine, state_id, salt=salt, hold=True))[0].snapshot
    other = make()
    return finished, other.export_request(running(other, state_id, salt=salt), salt=salt).snapshot


def told(engine, steps=1000):
    """Tokens and errors of each request, until there is no more work."""
    tokens, errors = {}, {}
    while engine.has_work and steps:
        for delta in engine.step():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.error is not None:
                errors.setdefault(delta.request_id, []).append(delta.error)
        engine.check()
        steps -= 1
    return tokens, errors


TAKERS = {
    "submit": lambda engine, name, salt: engine.submit([1, 2], greedy(2), request_id=name, salt=salt),
    "submit several": lambda engine, name, salt: engine.submit([1, 2], greedy(2, n=2), request_id=name, salt=salt),
    "continue": lambda engine, name, salt: engine.submit(
        Request(parent=known(engine, "parent", salt=salt), params=greedy(2), request_id=name, salt=salt)
    ),
    "fork": lambda engine, name, salt: engine.fork(known(engine, "parent", salt=salt), state_id=name, salt=salt),
    "load": lambda engine, name, salt: engine.begin_load(saved(name, salt)[0], state_id=name, salt=salt),
    "import": lambda engine, name, salt: engine.import_request(saved(name, salt)[1], salt=salt),
    "resume": lambda engine, name, salt: engine.resume(
        engine.begin_load(saved("unfinished", salt)[1], state_id="unfinished", salt=salt).commit(), request_id=name
    ),
}
SINGLE = [taker for taker in TAKERS if taker != "submit several"]


def refuse(engine, taker, name, salt=""):
    """The id is not to be had, and nothing is changed by asking."""
    with pytest.raises(InvalidRequest) as caught:
        TAKERS[taker](engine, name, salt)
    assert caught.value.field == "request_id"
    engine.check()


# An id that is reserved for what is on its way


@pytest.mark.parametrize("taker", SINGLE)
@pytest.mark.parametrize("kind", [0, 1], ids=["load", "import"])
@pytest.mark.parametrize("salt", ["", "other"])
def test_an_id_on_its_way_is_taken(taker, kind, salt):
    engine = make()
    snapshot = saved("r")[kind]
    arrival = (engine.begin_load, engine.import_request)[kind](snapshot)
    refuse(engine, taker, "r", salt)
    arrival.abort()
    TAKERS[taker](engine, "r", salt)


@pytest.mark.parametrize("kind", [0, 1], ids=["load", "import"])
def test_a_load_that_names_no_id_gets_another_while_its_own_is_on_its_way(kind):
    engine = make()
    finished, unfinished = saved("r")
    first = engine.import_request(unfinished) if kind else engine.begin_load(finished)
    second = engine.begin_load(finished)
    third = engine.begin_load(finished)
    first.commit()
    states = [second.commit(), third.commit()]
    assert len({"r", *(state.id for state in states)}) == 3
    assert [engine.state(state.id) for state in states] == states
    engine.check()


def test_what_arrives_takes_nothing_from_who_asked_for_its_id_meanwhile():
    engine = make()
    finished, unfinished = saved("r")
    arrivals = [engine.begin_load(finished), engine.import_request(unfinished, request_id="moved")]
    for name in ("r", "moved"):
        refuse(engine, "submit", name, "victim")
    assert arrivals[0].commit().id == "r" and arrivals[1].commit() == "moved"
    assert told(engine)[0]["moved"] == expected(PROMPT, 20)[3:]
    assert engine.state("r").num_tokens == 38


@pytest.mark.parametrize("kind", [0, 1], ids=["load", "import"])
def test_no_hold_is_left_on_a_state_whose_id_was_taken_meanwhile(kind):
    engine = make()
    state = known(engine, "r")
    finished, unfinished = saved("r")
    arrival = engine.import_request(unfinished) if kind else engine.begin_load(finished, state_id="r")
    with suppress(StateError, InvalidRequest):
        engine.hold(state)
    arrival.commit()
    told(engine)
    for found in engine.states():
        engine.release(found)
    assert len(engine.kv.leases) == 0 and engine.stats().kv_usage == 0.0
    engine.check()


def test_an_id_that_has_arrived_is_as_any_other():
    engine = make()
    engine.import_request(saved("r")[1]).commit()
    refuse(engine, "submit", "r")
    told(engine)
    engine.submit([1], greedy(1), request_id="r")


# Tenants


@pytest.mark.parametrize("taker", SINGLE)
@pytest.mark.parametrize("hold", [False, True])
def test_another_tenants_state_keeps_its_id(taker, hold):
    engine = make()
    mine = known(engine, "chat", salt="mine", hold=hold)
    refuse(engine, taker, "chat", "theirs")
    assert engine.state("chat", salt="mine") is mine and mine.num_held == (37 if hold else 0)
    told(engine)
    assert engine.continue_("chat", [7], greedy(2), salt="mine").token_ids == expected([*mine.tokens, 7], 2)


@pytest.mark.parametrize("taker", TAKERS)
def test_another_tenants_request_keeps_its_id(taker):
    engine = make()
    running(engine, "chat", salt="mine")
    refuse(engine, taker, "chat", "theirs")
    assert told(engine)[0]["chat"] == expected(PROMPT, 20)[3:]


def test_a_file_whose_id_another_tenant_has_is_loaded_under_another(tmp_path):
    source, engine = make(), make()
    source.save(known(source, "chat", salt="theirs", hold=True), tmp_path / "s.segue", salt="theirs")
    mine = known(engine, "chat", salt="mine")
    loaded = engine.load(tmp_path / "s.segue", salt="theirs")
    assert loaded.id != "chat" and loaded.num_held == 37
    assert engine.state("chat", salt="mine") is mine


def test_a_tenant_may_use_the_id_of_its_own_unheld_state_again():
    engine = make()
    for prompt in ([1, 2, 3], [4, 5], [6]):
        state = engine.generate(prompt, greedy(2), request_id="x", salt="a")[0].state
        assert engine.state("x", salt="a") is state and state.tokens[: len(prompt)].tolist() == prompt
    assert len(engine.states(salt="a")) == 1


def test_a_held_state_keeps_its_id_even_from_its_own_tenant():
    engine = make()
    state = known(engine, "x", hold=True)
    for taker in SINGLE:
        refuse(engine, taker, "x")
    assert state.num_held == 37
    engine.release(state)
    engine.submit([1], greedy(1), request_id="x")


def test_a_state_is_gone_as_soon_as_a_request_takes_its_id():
    engine = make()
    engine.generate([1, 2, 3], greedy(2), request_id="x")
    running(engine, "x", steps=1)
    assert engine.states() == []
    engine.abort("x")
    with pytest.raises(ParentFailed, match="aborted"):
        engine.continue_("x", [7], greedy(1))


def test_a_refused_request_leaves_the_state_whose_id_it_wanted():
    engine = make()
    state = known(engine, "x")
    with pytest.raises(RequestTooLong):
        engine.submit([1] * 300, greedy(2), request_id="x")
    with pytest.raises(UnknownState):
        engine.submit(Request(parent="nobody", request_id="x"))
    with pytest.raises(InvalidRequest):
        engine.fork(state, 99, state_id="x")
    with pytest.raises(StateError):
        engine.import_request(saved("x")[0])  # it had finished
    assert engine.state("x") is state


def test_a_continuation_may_take_its_parents_id():
    engine = make()
    state = known(engine, "x")
    result = engine.continue_("x", [7], greedy(3), request_id="x")
    assert result.token_ids == expected([*state.tokens, 7], 3)
    assert engine.state("x") is result.state


# The names of several answers


def several(engine, salt=""):
    return running(engine, "x", salt=salt, params=greedy(20, n=2))


@pytest.mark.parametrize("taker", SINGLE)
@pytest.mark.parametrize("salt", ["", "other"])
@pytest.mark.parametrize("steps", [0, 3])
def test_the_names_of_answers_under_way_are_taken(taker, salt, steps):
    engine = make()
    running(engine, "x", steps, params=greedy(20, n=2))
    for name in ("x/0", "x/1"):
        refuse(engine, taker, name, salt)
    told(engine)
    assert [engine.state(name).num_tokens for name in ("x/0", "x/1")] == [50, 50]


def test_the_name_of_an_answer_that_there_is_not_is_free():
    engine = make()
    several(engine)
    for name in ("x/2", "x/00", "x/", "x/0/0"):
        engine.submit([1, 2], greedy(2), request_id=name)
    told(engine)
    assert {state.id for state in engine.states()} == {"x/0", "x/1", "x/2", "x/00", "x/", "x/0/0"}


def test_a_load_without_an_id_leaves_the_names_of_answers_under_way_alone(tmp_path):
    engine = make()
    several(engine)
    engine.save("x/1", tmp_path / "s.segue")
    loaded = engine.load(tmp_path / "s.segue")
    assert loaded.id != "x/1" and loaded.num_held == 31
    told(engine)
    assert loaded.num_held == 31 and engine.state("x/1").num_tokens == 50
    rest = engine.follow(engine.resume(loaded))
    assert [token for delta in rest for token in delta.token_ids] == expected(PROMPT, 20)[3 - 1 :]


OWNERS = {
    "a request": lambda engine: running(engine, "x/1", salt="mine"),
    "a held state": lambda engine: known(engine, "x/1", salt="mine", hold=True),
    "a state": lambda engine: known(engine, "x/1", salt="mine"),
    "a load": lambda engine: engine.begin_load(saved("x/1", "mine")[0], salt="mine").commit,
    "an import": lambda engine: engine.import_request(saved("x/1", "mine")[1], salt="mine").commit,
}


@pytest.mark.parametrize("owner", OWNERS)
def test_several_answers_do_not_take_names_that_are_in_use(owner):
    engine = make()
    owned = OWNERS[owner](engine)
    with pytest.raises(InvalidRequest, match="x/1"):
        several(engine, "theirs")
    engine.submit([1], greedy(1), request_id="x", salt="theirs")  # one answer has no such name
    if callable(owned):
        owned()
    told(engine)
    assert engine.state("x/1", salt="mine").tokens[:30].tolist() == PROMPT


def test_several_answers_may_take_the_names_of_their_tenants_unheld_states():
    engine = make()
    known(engine, "x/0")
    several(engine)
    assert engine.states() == []
    engine.abort("x")
    for name in ("x/0", "x/1"):
        with pytest.raises(ParentFailed):
            engine.continue_(name)


# Ids that are none


@pytest.mark.parametrize("name", [5, "", b"x", ["x"]])
def test_an_id_is_a_text_that_is_not_empty(name):
    engine = make()
    state = known(engine, "s", hold=True)
    finished, unfinished = saved("r")
    asleep = engine.begin_load(unfinished, state_id="asleep").commit()
    for take in (
        lambda: engine.submit([1], request_id=name),
        lambda: engine.fork(state, state_id=name),
        lambda: engine.begin_load(finished, state_id=name),
        lambda: engine.import_request(unfinished, request_id=name),
        lambda: engine.resume(asleep, request_id=name),
    ):
        with pytest.raises(InvalidRequest, match="non-empty"):
            take()
    assert {state.id for state in engine.states()} == {"s", "asleep"} and not engine.has_work
    engine.check()


@pytest.mark.parametrize("number", ["1" * 5000, "2", "01", "-1", "+1", " 1", "1 ", "1_0", "١", "²", "", "x"])
def test_only_the_name_of_an_answer_finds_it(number):
    engine = make()
    several(engine)
    for use in (
        lambda name: engine.submit(Request(parent=name, params=greedy(2))),
        lambda name: engine.fork(name),
        lambda name: engine.begin_save(name),
        lambda name: engine.export_request(name),
    ):
        with pytest.raises(UnknownState):
            use(f"x/{number}")
    engine.check()


# States of other engines


@pytest.mark.parametrize("same_id", [False, True])
def test_another_engines_state_is_left_alone(same_id):
    home, other = make(), make()
    state = known(home, "s", hold=True)
    mine = other.generate([9] * 9, greedy(), request_id="s" if same_id else "t", hold=True)[0].state
    for use in (other.release, other.hold, other.fork, other.begin_save, other.resume, other.continue_):
        with pytest.raises((UnknownState, InvalidRequest)):
            use(state)
    for engine in (home, other):
        engine.check()
        assert len(engine.kv.leases) == 1 and not engine.has_work
    assert (state.num_held, mine.num_held) == (37, 16)


# Who hears of it


def ended_unread(engine):
    """A stream whose request, "x", has ended and which nobody has read."""
    stream = engine.stream(PROMPT, greedy(3), request_id="x", salt="a")
    engine.generate([5], greedy(9))
    assert not engine.is_active("x")
    return stream


def test_a_finished_stream_that_nobody_read_gets_nothing_of_the_next_request_with_its_id():
    engine = make()
    old = ended_unread(engine)
    engine.submit([9, 9], greedy(4), request_id="x", salt="a")
    seen = [token for _ in range(2) for delta in engine.step() for token in delta.token_ids]
    assert [token for delta in old for token in delta.token_ids] == expected(PROMPT, 3)
    assert old.result.token_ids == expected(PROMPT, 3)
    assert seen + told(engine)[0]["x"] == expected([9, 9], 4)


@pytest.mark.parametrize("leave", ["close", "delete"])
def test_leaving_a_finished_stream_does_not_end_the_next_request_with_its_id(leave):
    engine = make()
    old = ended_unread(engine)
    engine.submit([9, 9], greedy(4), request_id="x", salt="a")
    if leave == "close":
        old.close()
    del old
    assert told(engine)[0]["x"] == expected([9, 9], 4)


def test_a_finished_stream_and_the_next_one_with_its_id_are_read_in_turns():
    engine = make()
    old = ended_unread(engine)
    new = engine.stream([9, 9], greedy(4), request_id="x", salt="a")
    tokens = [(next(old).token_ids[0], next(new).token_ids[0]) for _ in range(3)]
    assert tokens == list(zip(expected(PROMPT, 3), expected([9, 9], 4), strict=False))
    assert list(old) == [] and next(new).token_ids == (expected([9, 9], 4)[3],)


def test_an_aborted_stream_leaves_its_id_to_the_next():
    engine = make()
    old = engine.stream(PROMPT, greedy(9), request_id="x")
    next(old)
    engine.abort("x")
    engine.submit([9, 9], greedy(4), request_id="x")
    assert list(old) == []
    old.close()
    assert told(engine)[0]["x"] == expected([9, 9], 4)


def leave_in_a_cycle(engine):
    """A stream that only the garbage collector can end; its request's id."""
    cycle = [engine.stream(PROMPT, greedy(20), request_id="left")]
    cycle.append(cycle)
    next(cycle[0])


def test_a_stream_collected_in_the_middle_of_a_step_does_not_disturb_it(monkeypatch):
    engine = make()
    execute = engine._executor.execute

    def collecting(plan):
        gc.collect()
        return execute(plan)

    gc.collect()
    gc.disable()
    try:
        leave_in_a_cycle(engine)
        other = engine.submit([5], greedy(9))
        monkeypatch.setattr(engine._executor, "execute", collecting)
        seen = [token for delta in engine.step() for token in delta.token_ids]
    finally:
        gc.enable()
    engine.check()
    seen += [token for delta in engine.step() for token in delta.token_ids]
    assert not engine.is_active("left"), "the next call ends it"
    assert seen + told(engine)[0][other] == expected([5], 9)
    assert engine.stats().kv_usage == 0.0


def test_what_a_collected_stream_left_does_not_keep_an_engine_busy():
    engine = make()
    gc.collect()
    gc.disable()
    try:
        leave_in_a_cycle(engine)
        gc.collect()
    finally:
        gc.enable()
    engine.step()
    assert not engine.has_work and engine.stats().kv_usage == 0.0
    engine.submit([9, 9], greedy(4), request_id="left")
    assert told(engine)[0]["left"] == expected([9, 9], 4)


# Heirs


def early_end():
    """Parameters for two answers of which only the first ends after a few tokens."""
    for seed in range(1000):
        first, second = (expected(PROMPT, 20, sample_seed(seed, index), 1.0) for index in (0, 1))
        if first[4] not in second and first[4] not in first[:4]:
            return SamplingParams(max_tokens=20, temperature=1.0, seed=seed, n=2, stop_token_ids=(first[4],))
    raise AssertionError("no such seed")


def test_an_heir_that_was_refused_is_told_once_and_its_id_is_free():
    engine = make()
    running(engine, "p", 2, params=early_end())
    engine.submit(Request(parent="p/0", at=50, params=greedy(2), request_id="h"))
    heard = [delta for _ in range(7) for delta in engine.step() if delta.request_id == "h"]
    assert [(type(delta.error), delta.error.field) for delta in heard] == [(InvalidRequest, "at")]
    assert engine.is_active("p") and not engine.is_active("h")
    engine.submit([1, 2, 3], greedy(20), request_id="h")
    engine.step()
    engine.abort("p")
    tokens, errors = told(engine)
    assert errors == {} and tokens["h"] == expected([1, 2, 3], 20)[1:]


def test_an_heir_that_went_on_is_not_ended_with_its_parents_other_answers():
    engine = make()
    running(engine, "p", 2, params=early_end())
    engine.submit(Request(parent="p/0", suffix=[7], params=greedy(9), request_id="h"))
    lost = engine.submit(Request(parent="p/1", params=greedy(2)))
    seen = []
    while not seen:
        seen += [token for delta in engine.step() if delta.request_id == "h" for token in delta.token_ids]
    assert engine.is_active("p")
    engine.abort("p")
    tokens, errors = told(engine)
    assert seen + tokens["h"] == expected([*engine.state("p/0").tokens, 7], 9)
    assert list(errors) == [lost] and [type(error) for error in errors[lost]] == [ParentFailed]


def line_of_heirs(engine, first):
    """Three thousand requests, each of which waits for the one before it; their ids."""
    names = [first, *(f"{first}-{number}" for number in range(3000))]
    for parent, name in pairwise(names):
        engine.submit(Request(parent=parent, params=greedy(1), request_id=name))
    return names[1:]


@pytest.mark.parametrize("end", ["abort", "fail", "refuse"])
def test_a_long_line_of_heirs_ends_with_its_first(end):
    engine = make()
    first = running(engine, "first", 1)
    if end == "refuse":
        first = engine.submit(Request(parent=first, at=180, params=greedy(1)))
    names = line_of_heirs(engine, first)
    if end == "abort":
        engine.abort(first)
    elif end == "fail":
        engine._executor.fail_next = RuntimeError("injected")
    _, errors = told(engine)
    assert all([type(error) for error in errors[name]] == [ParentFailed] for name in names)
    assert not any(engine.is_active(name) for name in names)
    assert engine.stats().kv_usage == 0.0


def test_an_engine_with_a_long_line_of_heirs_can_be_closed():
    engine = make()
    names = line_of_heirs(engine, running(engine, "first"))
    engine.close()
    assert not any(engine.is_active(name) for name in names)
    assert engine.stats().kv_usage == 0.0
