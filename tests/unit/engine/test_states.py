"""What can be done with a state, one promise a test, with a model that notices every wrong block."""

from dataclasses import replace

import pytest

from segue.base.clock import VirtualClock
from segue.base.config import EngineConfig
from segue.base.errors import (
    ForgottenState,
    InvalidRequest,
    NoRoom,
    ParentFailed,
    RequestTooLong,
    SnapshotError,
    StateError,
    UnknownState,
)
from segue.base.types import FinishReason, SamplingParams
from segue.engine import EngineCore, Request, hand_over
from tests.fakes import FakeExecutor, expected

PROMPT = [token % 40 for token in range(30)]


def make(num_blocks=64, size=4, *, clock=None, **options) -> EngineCore:
    config = EngineConfig(
        num_blocks, size, **{"max_step_tokens": 64, "max_running": 8, "max_model_len": 200, **options}
    )
    return EngineCore(FakeExecutor(num_blocks, size), config, clock=clock)


def greedy(max_tokens=8, **more):
    return SamplingParams(max_tokens=max_tokens, temperature=0, **more)


def hold(engine, prompt=PROMPT, max_tokens=8, **options):
    return engine.generate(prompt, greedy(max_tokens), hold=True, **options)[0].state


def computed(engine, run):
    """How many tokens the executor computed, and how many blocks it copied, while `run()` ran."""
    executor = engine._executor
    tokens, copies = executor.num_computed, executor.num_copied
    result = run()
    engine.check()
    return result, executor.num_computed - tokens, executor.num_copied - copies


def finish(engine, request_id):
    """Run to the end; tokens and error of one request."""
    tokens, error = [], None
    while engine.has_work:
        for delta in engine.step():
            if delta.request_id == request_id:
                tokens += delta.token_ids
                error = delta.error or error
        engine.check()
    return tokens, error


# Continue


@pytest.mark.parametrize("num_prompt", range(26, 35))  # every place in a block
@pytest.mark.parametrize("suffix", [[], [7], [7, 8, 9, 1, 2]])
def test_a_continuation_prefills_the_last_token_and_the_suffix(num_prompt, suffix):
    engine = make()
    prompt = PROMPT[:20] + PROMPT[: num_prompt - 20]
    state = hold(engine, prompt)
    assert (state.num_tokens, state.num_held) == (num_prompt + 8, num_prompt + 7)
    full = [*prompt, *expected(prompt, 8), *suffix]
    result, tokens, copies = computed(engine, lambda: engine.continue_(state, suffix, greedy(5)))
    assert result.token_ids == expected(full, 5)
    assert result.prompt_token_ids == full
    assert tokens == 1 + len(suffix) + 4, "four of the five tokens sampled are fed"
    assert copies == (state.num_held % 4 > 0)
    assert (result.reuse.held, result.reuse.recomputed, result.reuse.new) == (state.num_held, 0, 1 + len(suffix))
    assert result.num_prefilled == 1 + len(suffix)


def test_a_consumed_parent_is_written_in_place():
    engine = make(prefix_caching=False)
    state = hold(engine)
    used = engine.kv.num_free
    result, tokens, copies = computed(engine, lambda: engine.continue_(state, [7], greedy(5), consume=True))
    assert (tokens, copies) == (1 + 1 + 4, 0)
    assert result.token_ids == expected([*state.tokens, 7], 5)
    assert state.num_held == 0 and engine.stats().kv_usage == 0.0 and engine.kv.num_free > used
    again = engine.continue_(state, [7], greedy(5))  # the tokens are still known
    assert again.token_ids == result.token_ids and again.reuse.recomputed == state.num_computed


def test_a_parent_that_others_hold_too_is_consumed_with_a_copy():
    engine = make()
    state = hold(engine)
    other = engine.fork(state)
    _, _, copies = computed(engine, lambda: engine.continue_(state, [7], greedy(5), consume=True))
    assert copies == 1 and state.num_held == 0
    result = engine.continue_(other, [9], greedy(5))
    assert result.token_ids == expected([*other.tokens, 9], 5) and result.reuse.held == other.num_computed


def test_of_a_shrunk_lease_only_what_was_lost_is_computed_again():
    engine = make(num_blocks=20, prefix_caching=False)
    state = hold(engine)  # 37 tokens of KV in 10 of 19 blocks
    engine.generate([45] * 40, greedy(2))  # needs 11: two blocks must give way
    assert state.num_held == 32
    result, tokens, _ = computed(engine, lambda: engine.continue_(state, [7], greedy(3)))
    assert result.token_ids == expected([*state.tokens, 7], 3)
    assert (result.reuse.held, result.reuse.recomputed, result.reuse.new) == (32, 5, 2)
    assert tokens == 5 + 2 + 2


def test_a_shrunk_lease_and_the_prefix_cache_together():
    engine = make(num_blocks=20)
    state = hold(engine)
    engine.kv.leases.trim(state.lease, 12)
    result = engine.continue_(state, [7], greedy(3))
    assert (result.reuse.held, result.reuse.cached, result.reuse.recomputed) == (12, 25, 0)
    assert result.token_ids == expected([*state.tokens, 7], 3)


def test_a_second_child_with_the_same_suffix_finds_it_computed():
    engine = make()
    state = hold(engine)
    suffix = [7, 8, 9, 10, 11, 12]
    engine.continue_(state, suffix, greedy(3))
    result, tokens, copies = computed(engine, lambda: engine.continue_(state, [*suffix, 13], greedy(3)))
    assert (result.reuse.held, result.reuse.cached, result.reuse.new) == (37, 7, 1)
    assert result.token_ids == expected([*state.tokens, *suffix, 13], 3) and tokens == 1 + 2 and copies <= 1


def test_kv_gone_tokens_known():
    engine = make()
    first = engine.generate(PROMPT, greedy(8))[0]  # not held
    full = [*PROMPT, *first.token_ids, 7]
    cached = engine.continue_(first.request_id, [7], greedy(5))
    assert cached.token_ids == expected(full, 5)
    assert (cached.reuse.held, cached.reuse.cached, cached.reuse.recomputed) == (0, 37, 0)
    engine.forget()
    cold = engine.continue_(first.request_id, [7], greedy(5))
    assert cold.token_ids == expected(full, 5)
    assert (cold.reuse.inherited, cold.reuse.recomputed, cold.reuse.new) == (0, 37, 2)


def test_the_ledger_is_bounded_by_count_and_says_what_it_forgot():
    engine = make(max_states=3)
    ids = [engine.generate([i], greedy(1))[0].request_id for i in range(5)]
    with pytest.raises(ForgottenState, match="was forgotten: the last 3 states") as caught:
        engine.continue_(ids[0])
    assert caught.value.status == 410
    with pytest.raises(UnknownState, match="no state or request 'nobody' is known"):
        engine.continue_("nobody")
    assert [engine.state(known).id for known in ids[2:]] == ids[2:] and engine.stats().num_states == 3


def test_the_ledger_is_bounded_by_bytes_and_prefers_what_is_held():
    engine = make(max_state_bytes=4000)
    held = hold(engine, [1] * 20, 2)
    others = [engine.generate([i] * 100, greedy(1))[0].state for i in range(2, 8)]
    assert engine._desk.ledger.size_bytes <= 4000
    assert engine.state(held.id) is held
    with pytest.raises(ForgottenState):
        engine.state(others[0].id)


def test_a_held_state_that_the_ledger_gives_up_loses_its_lease():
    engine = make(max_states=2)
    for i in range(5):
        hold(engine, [i] * 9, 2)
        engine.check()
    assert len(engine.kv.leases) == 2


def test_a_child_waits_for_its_running_parent():
    engine = make()
    parent = engine.submit(PROMPT, greedy(8))
    engine.step()
    child = engine.submit(Request(parent=parent, suffix=[7], params=greedy(5)))
    grandchild = engine.submit(Request(parent=parent, suffix=[9], params=greedy(5), at=33))
    tokens = {parent: [], child: [], grandchild: []}
    reuse = {}
    while engine.has_work:
        for delta in engine.step():
            tokens[delta.request_id] += delta.token_ids
            reuse[delta.request_id] = delta.reuse
        engine.check()
    answer = expected(PROMPT, 8)
    assert tokens[child] == expected([*PROMPT, *answer, 7], 5)
    assert tokens[grandchild] == expected([*PROMPT, *answer[:3], 9], 5)
    assert reuse[child].held == 37 and reuse[child].new == 2, "held for it, though nobody asked for a hold"
    assert engine.stats().kv_usage == 0.0, "and not longer than that"


def test_a_running_parent_is_forked_where_it_stands():
    engine = make()
    parent = engine.submit(PROMPT, greedy(12))
    for _ in range(4):
        engine.step()
    answer = expected(PROMPT, 12)
    child = engine.submit(Request(parent=parent, suffix=[7], params=greedy(5), at="now"))
    tokens = {parent: [], child: []}
    while engine.has_work:
        for delta in engine.step():
            tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason:
                reuse = delta.reuse
        engine.check()
    assert tokens[parent] == answer[-len(tokens[parent]) :]
    assert tokens[child] == expected([*PROMPT, *answer[:4], 7], 5)
    assert reuse is not None and engine.stats().kv_usage == 0.0


def test_children_of_children_wait_in_line():
    engine = make()
    parent = engine.submit(PROMPT, greedy(4))
    child = engine.submit(Request(parent=parent, suffix=[7], params=greedy(3)))
    grandchild = engine.submit(Request(parent=child, suffix=[8], params=greedy(3)))
    with pytest.raises(StateError, match="waits for its own parent"):
        engine.submit(Request(parent=child, at="now"))
    tokens, error = finish(engine, grandchild)
    line = [*PROMPT, *expected(PROMPT, 4), 7]
    line += [*expected(line, 3), 8]
    assert error is None and tokens == expected(line, 3)
    assert engine.stats().kv_usage == 0.0


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_a_parent_that_comes_to_nothing_takes_its_heirs_along(end):
    engine = make()
    parent = engine.submit(PROMPT, greedy(12), request_id="parent")
    engine.step()
    child = engine.submit(Request(parent=parent, params=greedy(5), request_id="child"))
    orphaned = engine.submit(PROMPT[:3], greedy(30))
    if end == "abort":
        engine.abort(parent)
    else:
        engine.abort(orphaned)
        engine._executor.fail_next = RuntimeError("injected")
    _, error = finish(engine, child)
    assert isinstance(error, ParentFailed) and "'parent'" in str(error) and error.status == 409
    word = "aborted" if end == "abort" else "failed"
    with pytest.raises(ParentFailed, match=word):
        engine.continue_(parent)
    assert engine.stats().kv_usage == 0.0


def test_an_heir_can_be_aborted_and_its_parent_goes_on():
    engine = make()
    parent = engine.submit(PROMPT, greedy(6))
    engine.step()
    child = engine.submit(Request(parent=parent, params=greedy(5)))
    assert engine.abort(child) and not engine.is_active(child)
    tokens, error = finish(engine, parent)
    assert error is None and tokens == expected(PROMPT, 6)[1:]
    with pytest.raises(ParentFailed):
        engine.continue_(child)


def test_an_heir_that_turns_out_too_long_is_told_so():
    engine = make()
    parent = engine.submit([1] * 100, SamplingParams(max_tokens=95, temperature=0, ignore_eos=True))
    child = engine.submit(Request(parent=parent, params=greedy(50)))
    _, error = finish(engine, child)
    assert isinstance(error, RequestTooLong) and engine.stats().kv_usage == 0.0


def test_too_long_for_a_finished_parent_is_refused_at_once():
    engine = make()
    state = hold(engine, [1] * 100, 2)
    with pytest.raises(RequestTooLong, match="102 prompt tokens \\+ max_tokens=99"):
        engine.submit(Request(parent=state, params=greedy(99)))
    with pytest.raises(RequestTooLong):
        engine.submit(Request(parent=state, suffix=[1] * 97, params=greedy(2)))
    assert not engine.has_work


def test_tenants_and_adapters_do_not_mix():
    engine = make()
    state = hold(engine, salt="a")
    for salt in ("", "b"):
        with pytest.raises(UnknownState, match="no state or request"):
            engine.continue_(state, salt=salt)
        with pytest.raises(UnknownState):
            engine.state(state.id, salt=salt)
        with pytest.raises(UnknownState):
            engine.release(state.id, salt=salt)
    running = engine.submit(PROMPT, greedy(3), salt="a")
    with pytest.raises(UnknownState):
        engine.submit(Request(parent=running))
    with pytest.raises(InvalidRequest, match="adapter: is 'x', and the parent was computed with ''"):
        engine.continue_(state, salt="a", adapter="x")
    with pytest.raises(InvalidRequest, match="adapter"):
        engine.submit(PROMPT, adapter="x")
    assert engine.continue_(state, salt="a", params=greedy(2)).reuse.held == 37
    assert [found.id for found in engine.states(salt="b")] == []


def test_another_engines_state_is_refused():
    state = hold(make())
    other = make()
    with pytest.raises(UnknownState):
        other.continue_(state)
    hold(other, request_id=state.id)
    with pytest.raises(InvalidRequest, match="not a state of this engine"):
        other.continue_(state)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt": [1], "parent": "x"}, "prompt"),
        ({}, "prompt"),
        ({"prompt": [1], "suffix": [2]}, "suffix"),
        ({"prompt": [1], "at": 3}, "at"),
        ({"parent": "x", "at": 0}, "at"),
        ({"parent": "x", "at": "later"}, "at"),
        ({"parent": 5}, "parent"),
        ({"parent": ""}, "parent"),
        ({"parent": "x", "consume": 1}, "consume"),
        ({"prompt": [1], "hold": -1.0}, "hold"),
        ({"prompt": [1], "hold": float("nan")}, "hold"),
        ({"prompt": [1], "value": "dear"}, "value"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_by_name(fields, name):
    with pytest.raises(InvalidRequest) as caught:
        Request(**fields)
    assert caught.value.field == name


def test_wrong_suffixes_and_positions_are_refused_and_nothing_changes():
    engine = EngineCore(FakeExecutor(64, 4), EngineConfig(64, 4, max_model_len=200), vocab_size=50)
    state = hold(engine)
    for fields, field in [({"suffix": [50]}, "suffix"), ({"suffix": [1.5]}, "suffix"), ({"at": 39}, "at")]:
        with pytest.raises(InvalidRequest) as caught:
            engine.submit(Request(parent=state, **fields))
        assert caught.value.field == field
    with pytest.raises(InvalidRequest, match="release the state that has it first"):
        engine.submit([1], request_id=state.id)
    engine.check()
    assert not engine.has_work and state.lease.num_heirs == 0


# Fork


def test_forks_at_every_token_and_forks_of_forks():
    engine = make(num_blocks=400)
    state = hold(engine)
    full = [*PROMPT, *expected(PROMPT, 8)]
    for at in range(1, 39):
        child = engine.fork(state, at)
        assert (child.num_tokens, child.num_held) == (at, min(at, 37))
        grandchild = engine.fork(child, max(at - 3, 1))
        for fork in (child, grandchild):
            suffix = [7] if fork.num_tokens % 2 else []
            result = engine.continue_(fork, suffix, greedy(3))
            kept = full[: fork.num_tokens]
            assert result.token_ids == expected([*kept, *suffix], 3)
            assert result.reuse.held == min(len(kept), 37, len(kept) + len(suffix) - 1)
    engine.check()


def test_many_children_share_their_parent_and_copy_one_block_each():
    engine = make(num_blocks=64)
    state = hold(engine)
    params = greedy(3, n=8)
    result, tokens, copies = computed(engine, lambda: engine.continue_(state, [7], params))
    assert all(answer.token_ids == expected([*state.tokens, 7], 3) for answer in result.completions)
    assert copies <= 8 and tokens <= 2 + 7 + 8 * 2
    names = [answer.state.id for answer in result.completions]
    assert names == [f"{result.request_id}/{i}" for i in range(8)]
    assert engine.continue_(names[5], [8], greedy(2)).token_ids == expected(
        [*state.tokens, 7, *result.completions[5].token_ids, 8], 2
    )
    with pytest.raises(UnknownState):
        engine.continue_(result.request_id)


def test_one_of_several_running_answers_must_be_named():
    engine = make()
    parent = engine.submit(PROMPT, greedy(9, n=2), request_id="two")
    for _ in range(3):
        engine.step()
    with pytest.raises(InvalidRequest, match="name one, such as 'two/0'"):
        engine.submit(Request(parent=parent))
    child = engine.submit(Request(parent="two/1", suffix=[7], params=greedy(2)))
    tokens, _ = finish(engine, child)
    assert tokens == expected([*PROMPT, *expected(PROMPT, 9), 7], 2)


def test_a_fork_of_a_running_request_holds_its_kv():
    engine = make()
    parent = engine.submit(PROMPT, greedy(12))
    for _ in range(5):
        engine.step()
    fork = engine.fork(parent)
    early = engine.fork(parent, 10)
    answer = expected(PROMPT, 12)
    assert (list(fork.tokens), fork.num_held) == ([*PROMPT, *answer[:5]], 34)
    assert (early.num_tokens, early.num_held) == (10, 10)
    tokens, _ = finish(engine, parent)
    assert tokens == answer[5:]
    assert engine.continue_(fork, [7], greedy(3)).token_ids == expected([*fork.tokens, 7], 3)


# Hold and release


def test_a_lease_ends_by_the_clock_and_the_state_stays_known():
    clock = VirtualClock()
    engine = make(clock=clock)
    state = engine.generate(PROMPT, greedy(8), hold=30.0)[0].state
    assert state.expires_at == 30.0
    clock.advance(29.0)
    assert engine.expire() == 1.0 and engine.stats().leased_blocks == 10
    clock.advance(1.0)
    assert engine.stats().leased_blocks == 0 and state.num_held == 0 and state.expires_at is None
    assert engine.continue_(state, [7], greedy(2)).token_ids == expected([*state.tokens, 7], 2)


def test_a_hold_can_be_renewed_and_taken_again():
    clock = VirtualClock()
    engine = make(clock=clock)
    state = engine.generate(PROMPT, greedy(8), hold=5.0)[0].state
    engine.hold(state, 50.0, value=2.0)
    clock.advance(20.0)
    assert engine.stats().leased_blocks == 10 and state.lease.value == 2.0
    engine.release(state)
    engine.release(state)
    assert engine.stats().leased_blocks == 0
    engine.hold(state.id)  # the prefix cache has it still
    assert state.num_held == 37 and state.expires_at is None
    engine.check()
    assert engine.continue_(state, [7], greedy(2)).reuse.held == 37


def test_a_lease_does_not_end_while_a_child_waits_for_it():
    clock = VirtualClock()
    engine = make(num_blocks=24, clock=clock, prefix_caching=False)
    state = engine.generate(PROMPT, greedy(8), hold=5.0)[0].state
    busy = engine.submit([45] * 40, greedy(12))
    child = engine.submit(Request(parent=state, suffix=[7] * 20, params=greedy(5)))
    engine.step()
    clock.advance(10.0)
    for _ in range(3):
        engine.step()
    assert engine.is_active(busy) and state.num_held == 37
    tokens, _ = finish(engine, child)
    assert tokens == expected([*state.tokens, *[7] * 20], 5) and state.num_held == 0


def test_a_tenant_over_its_quota_loses_from_its_own_leases():
    engine = make(num_blocks=100, lease_quota=12)
    mine = hold(engine, salt="a")  # 10 blocks
    dear = hold(engine, [41, *PROMPT], salt="b", value=3.0)
    more = hold(engine, [42, *PROMPT], salt="a")
    assert (len(more.lease.blocks), len(mine.lease.blocks), len(dear.lease.blocks)) == (10, 2, 10)
    assert engine.kv.leases.totals == {"a": 12, "b": 10}
    engine.set_lease_quota("b", 4)
    less = hold(engine, [43, *PROMPT], salt="b", value=1.0)
    assert (less.num_held, len(dear.lease.blocks)) == (0, 4), "the least valuable first, here the new one"
    assert engine.continue_(mine, [7], greedy(2), salt="a").token_ids == expected([*mine.tokens, 7], 2)
    engine.check()


def flood(engine, salt, count=12):
    """More work of one tenant than memory holds at once, each answer held for good measure."""
    for number in range(count):
        engine.submit([number % 40, *PROMPT, *PROMPT], greedy(30), salt=salt, hold=True)
    while engine.has_work:
        engine.step()
        engine.check()


def test_a_tenants_share_is_out_of_reach_of_the_others_work():
    engine = make(num_blocks=80, max_model_len=100)  # 25 blocks for the longest request, 54 to share
    for tenant in ("a", "b", "c"):
        engine.set_lease_quota(tenant, None)
    older = hold(engine, salt="a")  # 10 blocks each, a share is 18, and of two alike the newer one is the dearer
    mine = hold(engine, [41, *PROMPT], salt="a")
    flood(engine, "b")
    assert (mine.num_held, older.num_held) == (38, 32)
    answer, num_computed, _ = computed(engine, lambda: engine.continue_(mine, [7], greedy(2), salt="a"))
    assert num_computed == 3 and answer.token_ids == expected([*mine.tokens, 7], 2)
    flood(engine, "a")
    assert mine.num_held == 0, "its own work may take it"


def test_without_shares_a_flood_takes_from_itself_first():
    engine = make(num_blocks=80)
    mine = hold(engine, salt="a")
    held = [hold(engine, [number, *PROMPT], salt="b") for number in range(6)]
    new = [hold(engine, [48 + number, *PROMPT], salt="c") for number in range(2)]
    assert mine.num_held == 37 and all(state.num_held == 38 for state in new)
    assert held[0].num_held < 38 and all(state.num_held == 38 for state in held[2:]), "the oldest first"


# Move


def running(engine, max_tokens=20, steps=6, **options):
    request_id = engine.submit(PROMPT, greedy(max_tokens), **options)
    for _ in range(steps):
        engine.step()
    return request_id


def test_after_an_export_the_source_is_empty_and_the_destination_pays_exactly():
    for size in (3, 4, 7, 16):
        source, destination = make(), make(num_blocks=64, size=size)
        request_id = running(source)  # 35 tokens of KV
        moved = hand_over(source, destination, request_id)
        assert source.stats().kv_usage == 0.0 and not source.is_active(request_id)
        assert 63 - destination.kv.num_free == -(-35 // size)
        tokens, _ = finish(destination, moved)
        assert tokens == expected(PROMPT, 20)[6:]
        assert destination.stats().kv_usage == 0.0


def test_the_destination_pays_less_for_what_it_has():
    source, destination = make(), make()
    hold(destination, PROMPT, 1)  # 30 tokens, 7 full blocks
    request_id = running(source)
    export = source.export_request(request_id)
    before = destination.kv.num_free
    arrival = destination.import_request(export.snapshot)
    assert before - destination.kv.num_free == -(-35 // 4) - 7
    assert list(arrival.missing) == list(destination.missing(export.snapshot))
    arrival.abort()
    assert destination.kv.num_free == before
    destination.check()


def test_a_destination_one_block_short_refuses_before_any_change():
    source = make()
    request_id = running(source, max_tokens=6, steps=5)  # 34 tokens of KV: 9 blocks
    destination = make(num_blocks=10)
    blocker = destination.submit([45], greedy(2))
    destination.step()  # holds one of the nine
    events = []
    destination.kv.observe(events.append)
    export = source.export_request(request_id)
    with pytest.raises(NoRoom, match="9 blocks are needed"):
        destination.import_request(export.snapshot)
    assert events == [] and destination.kv.num_free == 8
    destination.check()
    export.abort()
    tokens, _ = finish(source, request_id)
    assert tokens == expected(PROMPT, 6)[5:]
    finish(destination, blocker)
    export = source.export_request(running(source, max_tokens=6, steps=5))
    assert destination.import_request(export.snapshot).commit()


def test_a_lost_payload_is_computed_again():
    source, destination = make(size=4), make(size=3)
    request_id = running(source)
    export = source.export_request(request_id)
    arrival = destination.import_request(export.snapshot)
    moved = arrival.commit()  # nothing was shipped
    export.commit()
    destination.check()
    stream = destination.follow(moved)
    assert [token for delta in stream for token in delta.token_ids] == expected(PROMPT, 20)[6:]
    assert stream.result.reuse.recomputed == 35


def test_a_stream_goes_on_across_two_moves():
    a, b, c = make(), make(size=5), make(size=16, num_blocks=20)
    stream = a.stream(PROMPT, greedy(20), request_id="r")
    seen = [next(stream) for _ in range(5)]
    hand_over(a, b, "r")
    seen += [next(stream) for _ in range(4)]
    hand_over(b, c, "r")
    seen += list(stream)
    assert [token for delta in seen for token in delta.token_ids] == expected(PROMPT, 20)
    assert stream.result.token_ids == expected(PROMPT, 20)
    assert stream.result.completions[0].finish_reason is FinishReason.LENGTH
    assert [engine.stats().kv_usage for engine in (a, b, c)] == [0.0, 0.0, 0.0]
    with pytest.raises(ParentFailed, match="moved"):
        a.continue_("r")


def test_a_request_that_was_moved_without_a_successor_says_so():
    source = make()
    export = source.export_request(running(source, request_id="r"))
    export.commit()
    assert [delta.finish_reason for delta in source.step()][-1] is FinishReason.MOVED
    with pytest.raises(StateError, match="not on its way"):
        export.commit()


def test_export_and_abort_in_the_middle_of_everything():
    engine = make()
    request_id = running(engine)
    export = engine.export_request(request_id)
    assert not engine.has_work and not engine.step(), "it stands still"
    with pytest.raises(StateError, match="already"):
        engine.export_request(request_id)
    engine.generate([45] * 190, greedy(3))  # takes what it needs, the parked request's KV included
    export.abort()
    tokens, _ = finish(engine, request_id)
    assert tokens == expected(PROMPT, 20)[6:]
    export = engine.export_request(running(engine, request_id="x"))
    assert engine.abort("x")
    export.abort()
    with pytest.raises(StateError):
        export.commit()
    engine.check()
    assert engine.stats().kv_usage == 0.0


def test_what_cannot_be_moved_is_refused():
    source, destination = make(), make()
    with pytest.raises(InvalidRequest, match="name one"):
        source.export_request(source.submit(PROMPT, greedy(4, n=2)))
    with pytest.raises(UnknownState):
        source.export_request("nobody")
    request_id = running(source)
    export = source.export_request(request_id)
    small = make(max_model_len=40)
    with pytest.raises(RequestTooLong):
        small.import_request(export.snapshot)
    running(destination, request_id=request_id)
    with pytest.raises(InvalidRequest, match="has not ended"):
        destination.import_request(export.snapshot)
    with pytest.raises(SnapshotError, match="another scope"):
        make().import_request(export.snapshot, salt="x")


# Save and load


@pytest.mark.parametrize(("size", "num_blocks"), [(1, 64), (3, 20), (16, 9)])
def test_a_state_comes_back_in_an_engine_of_another_shape(tmp_path, size, num_blocks):
    engine = make()
    state = hold(engine)
    engine.save(state, tmp_path / "s.segue")
    other = make(num_blocks=num_blocks, size=size)
    loaded = other.load(tmp_path / "s.segue")
    assert (loaded.id, loaded.num_held, list(loaded.tokens)) == (state.id, 37, list(state.tokens))
    other.check()
    result, tokens, _ = computed(other, lambda: other.continue_(loaded, [7], greedy(3)))
    assert result.token_ids == expected([*state.tokens, 7], 3) and tokens == 2 + 2
    again = other.generate([*state.tokens, 8], greedy(3))[0]
    assert again.reuse.cached >= 37, "others find it too"
    assert other.load(tmp_path / "s.segue").id != state.id
    other.check()


def test_a_request_saved_in_the_middle_goes_on(tmp_path):
    engine = make()
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5)
    request_id = engine.submit(PROMPT, params)
    for _ in range(6):
        engine.step()
    engine.save(request_id, tmp_path / "r.segue")
    wanted = expected(PROMPT, 20, 5, 1.0)
    assert finish(engine, request_id)[0] == wanted[6:], "saving does not disturb it"
    other = make(size=7)
    stream = other.follow(other.resume(other.load(tmp_path / "r.segue"), consume=True))
    assert [token for delta in stream for token in delta.token_ids] == wanted[6:]
    assert stream.result.token_ids == wanted and stream.result.reuse.held == 35
    assert other.stats().kv_usage == 0.0
    with pytest.raises(StateError, match="had finished"):
        other.resume(stream.result.state)


def test_a_load_that_does_not_fit_changes_nothing(tmp_path):
    engine = make()
    state = hold(engine, salt="a")
    engine.save(state, tmp_path / "s.segue")
    tight = make(num_blocks=11)
    request_id = tight.submit([45], greedy(5))
    tight.step()
    with pytest.raises(NoRoom):
        tight.load(tmp_path / "s.segue", salt="a")
    with pytest.raises(SnapshotError, match="another scope"):
        make().load(tmp_path / "s.segue")
    foreign = EngineCore(FakeExecutor(64, 4), EngineConfig(64, 4), model_fingerprint="other")
    with pytest.raises(SnapshotError, match="belongs to model"):
        foreign.load(tmp_path / "s.segue", salt="a")
    tight.check()
    assert finish(tight, request_id)[0] == expected([45], 5)[1:]
    assert foreign.stats().kv_usage == 0.0 and foreign.stats().num_states == 0
    loaded = make().load(tmp_path / "s.segue", salt="a", hold=False, state_id="mine")
    assert loaded.id == "mine" and loaded.num_held == 0


def test_a_state_without_kv_is_saved_as_tokens(tmp_path):
    engine = make(prefix_caching=False)
    state = engine.generate(PROMPT, greedy(8))[0].state
    assert engine.save(state, tmp_path / "s.segue") < 2000
    other = make()
    loaded = other.load(tmp_path / "s.segue")
    assert loaded.num_held == 0
    assert other.continue_(loaded, [7], greedy(3)).token_ids == expected([*state.tokens, 7], 3)


def test_a_resumed_request_cannot_name_tokens_that_are_not_there():
    source = make()
    export = source.export_request(running(source))
    progress = export.snapshot.progress
    odd = replace(export.snapshot, progress=replace(progress, params=replace(progress.params, logit_bias={10**6: 1.0})))
    destination = EngineCore(FakeExecutor(64, 4), EngineConfig(64, 4, max_model_len=200), vocab_size=50)
    with pytest.raises(InvalidRequest, match="logit_bias"):
        destination.import_request(odd)
    assert destination.stats().kv_usage == 0.0
