"""States and requests on their way out and in: what each phase allows, what it costs, and what it leaves alone."""

import io
import json
import struct
from dataclasses import replace
from itertools import pairwise
from math import inf, nan

import pytest

from segue.base.clock import VirtualClock
from segue.base.config import EngineConfig
from segue.base.errors import EngineClosed, InvalidRequest, SnapshotError, StateError
from segue.base.types import FinishReason, SamplingParams
from segue.engine import EngineCore, Request, Reuse, hand_over
from segue.state.codec import DIGEST_BYTES, MAGIC, VERSION, chunk_digest, encode, read_preamble
from tests.fakes import FakeExecutor, cut_chunks, expected

PROMPT = [token % 40 for token in range(30)]
ANSWER = expected(PROMPT, 20)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Eight tokens in a chunk, where a block has four, so that one of several can be missing."""
    cut_chunks(monkeypatch, 8 * FakeExecutor(2, 1).kv_layout.token_bytes)


def make(num_blocks=64, size=4, *, clock=None, **options) -> EngineCore:
    config = EngineConfig(
        num_blocks, size, **{"max_step_tokens": 64, "max_running": 8, "max_model_len": 200, **options}
    )
    return EngineCore(FakeExecutor(num_blocks, size), config, clock=clock)


def greedy(max_tokens=8, **more):
    return SamplingParams(max_tokens=max_tokens, temperature=0, **more)


def hold(engine, prompt=PROMPT, max_tokens=8, **options):
    """A held state; of PROMPT, 38 tokens and KV for 37 of them in 10 blocks."""
    return engine.generate(prompt, greedy(max_tokens), hold=True, **options)[0].state


def running(engine, request_id="r", steps=6, **options):
    """A request with six of its twenty tokens: KV for 35 in 9 blocks."""
    engine.submit(PROMPT, greedy(20), request_id=request_id, **options)
    for _ in range(steps):
        engine.step()
    return request_id


def finish(engine):
    """Run to the end; tokens by request, and the last delta of each."""
    tokens, last = {}, {}
    while engine.has_work:
        for delta in engine.step():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            last[delta.request_id] = delta
        engine.check()
    return tokens, last


def chunk_of(outgoing, index):
    chunk = memoryview(bytearray(outgoing.snapshot.chunk_bytes(index)))
    outgoing.read(index, chunk)
    return chunk


def ship(outgoing, arrival, indices=None):
    for index in arrival.missing if indices is None else indices:
        arrival.write(index, chunk_of(outgoing, index))


def begun(kind):
    """A destination, an arrival there, what it comes from, and what ends it at the source."""
    source, destination = make(), make()
    if kind == "load":
        outgoing, done = source.begin_save(hold(source))
        return destination, destination.begin_load(outgoing.snapshot, state_id="r"), outgoing, done
    export = source.export_request(running(source))
    return destination, destination.import_request(export.snapshot), export, export.commit


def outcome(engine, committed):
    """What comes of an arrival that was committed: the tokens it goes on with, and those it should."""
    if isinstance(committed, str):
        return finish(engine)[0][committed], ANSWER[6:]
    return engine.continue_(committed, [7], greedy(3)).token_ids, expected([*committed.tokens, 7], 3)


def nothing_left(engine):
    engine.check()
    return engine.stats().kv_usage == 0.0 and not engine.has_work and not len(engine.kv.leases)


KINDS = pytest.mark.parametrize("kind", ["load", "import"])


# Import and load: begin, write, then commit or abort


@KINDS
def test_an_arrival_is_committed_once(kind):
    engine, arrival, outgoing, done = begun(kind)
    ship(outgoing, arrival)
    committed = arrival.commit()
    done()
    for again in range(2):
        with pytest.raises(StateError):
            arrival.commit()
        engine.check()
        if not again:
            engine.step()
    if kind == "import":
        assert finish(engine)[0]["r"] == ANSWER[7:]
    else:
        assert engine.states() == [committed] and committed.num_held == 37
        engine.release(committed)
    assert nothing_left(engine)


@KINDS
def test_what_is_written_after_the_commit_is_refused_and_changes_no_kv(kind):
    engine, arrival, outgoing, _ = begun(kind)
    ship(outgoing, arrival)
    committed = arrival.commit()
    for index in range(outgoing.snapshot.num_chunks):
        with pytest.raises(StateError):
            arrival.write(index, memoryview(bytearray(outgoing.snapshot.chunk_bytes(index))))
    tokens, wanted = outcome(engine, committed)
    assert tokens == wanted


@KINDS
def test_an_arrival_that_was_aborted_is_over(kind):
    engine, arrival, outgoing, _ = begun(kind)
    chunk = chunk_of(outgoing, 0)
    arrival.write(0, chunk)
    arrival.abort()
    arrival.abort()
    with pytest.raises(StateError):
        arrival.commit()
    with pytest.raises(StateError):
        arrival.write(0, chunk)
    assert not engine.is_active("r") and engine.states() == [] and nothing_left(engine)


@KINDS
def test_an_abort_after_the_commit_does_nothing(kind):
    engine, arrival, outgoing, _ = begun(kind)
    ship(outgoing, arrival)
    committed = arrival.commit()
    arrival.abort()
    assert isinstance(committed, str) or committed.num_held == 37
    tokens, wanted = outcome(engine, committed)
    assert tokens == wanted


@KINDS
def test_nothing_arrives_in_an_engine_that_is_closed(kind):
    engine, arrival, outgoing, _ = begun(kind)
    ship(outgoing, arrival)
    engine.close()
    with pytest.raises((EngineClosed, StateError)):
        arrival.commit()
    arrival.abort()
    assert not engine.is_active("r") and engine.states() == [] and nothing_left(engine)


@KINDS
def test_a_chunk_of_the_wrong_size_is_refused_and_the_right_one_still_taken(kind):
    engine, arrival, outgoing, _ = begun(kind)
    chunk = chunk_of(outgoing, 0)
    for wrong in (chunk[:-1], memoryview(b""), memoryview(bytes(chunk) * 2)):
        with pytest.raises(StateError, match="bytes instead of"):
            arrival.write(0, wrong)
    ship(outgoing, arrival)
    tokens, wanted = outcome(engine, arrival.commit())
    assert tokens == wanted


@KINDS
@pytest.mark.parametrize("order", [range(5), range(4, -1, -1), [2, 0, 4, 1, 3], [3, 3, 1], []], ids=str)
def test_an_engine_is_sound_while_something_arrives_and_others_find_none_of_it(kind, order):
    engine, arrival, outgoing, _ = begun(kind)
    engine.check()
    for index in order:
        ship(outgoing, arrival, [index])
        engine.check()
        assert engine.generate([*PROMPT, index], greedy(2))[0].token_ids == expected([*PROMPT, index], 2)
    tokens, wanted = outcome(engine, arrival.commit())
    assert tokens == wanted
    engine.check()


@KINDS
@pytest.mark.parametrize("known", [3, 4, 10, 30])
def test_an_engine_that_has_a_part_already_is_sound_while_the_rest_arrives(kind, known):
    engine, _, outgoing, _ = begun(kind)
    engine = make(num_blocks=30)
    engine.generate(PROMPT[:known], greedy(1))
    arrival = engine.begin_load(outgoing.snapshot) if kind == "load" else engine.import_request(outgoing.snapshot)
    engine.check()
    engine.generate([49] * 60, greedy(1))  # takes what is free, and the cache with it
    engine.check()
    ship(outgoing, arrival)
    engine.check()
    tokens, wanted = outcome(engine, arrival.commit())
    assert tokens == wanted


def test_what_is_being_filled_is_not_the_first_to_give_way():
    source, engine = make(), make(num_blocks=30)
    held = hold(engine, [41] * 38, 2, value=1e9)
    export = source.export_request(running(source))
    arrival = engine.import_request(export.snapshot)
    engine.generate([43] * 60, greedy(2))  # 16 blocks, where 10 are free
    assert held.num_held < 39
    ship(export, arrival)
    stream = engine.follow(arrival.commit())
    assert [token for delta in stream for token in delta.token_ids] == ANSWER[6:]
    assert stream.result.reuse == Reuse(held=35, new=1)


# Export: stands still, then leaves or goes on


@pytest.mark.timeout(20)
def test_a_stream_of_a_request_on_its_way_says_so_and_goes_on_after_the_abort():
    engine = make()
    stream = engine.stream(PROMPT, greedy(20), request_id="r")
    seen = [next(stream) for _ in range(3)]
    export = engine.export_request("r")
    for _ in range(2):
        with pytest.raises(StateError, match="on its way"):
            next(stream)
    export.abort()
    seen += list(stream)
    assert [token for delta in seen for token in delta.token_ids] == ANSWER == stream.result.token_ids
    assert nothing_left(engine)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("busy", [False, True])
def test_who_waits_for_a_request_on_its_way_hears_that_it_stands_still(busy):
    engine = make()
    export = engine.export_request(running(engine))
    other = engine.submit([5], greedy(9)) if busy else None
    with pytest.raises(StateError, match="on its way"):
        engine.continue_("r", [7], greedy(2))
    export.abort()
    tokens, _ = finish(engine)
    assert tokens.pop("r") == ANSWER[6:]
    assert tokens == ({other: expected([5], 9)} if busy else {}), "and nobody else waits any more"
    assert engine.continue_("r", [7], greedy(2)).token_ids == expected([*PROMPT, *ANSWER, 7], 2)


@pytest.mark.timeout(20)
def test_a_stream_can_be_left_while_its_request_is_on_its_way():
    engine = make()
    stream = engine.stream(PROMPT, greedy(20), request_id="r")
    next(stream)
    export = engine.export_request("r")
    stream.close()
    assert not engine.is_active("r") and nothing_left(engine)
    with pytest.raises(StateError):
        export.commit()
    export.abort()
    assert nothing_left(engine)


def test_an_export_is_over_when_its_engine_closes():
    engine = make()
    stream = engine.stream(PROMPT, greedy(20), request_id="r")
    next(stream)
    export = engine.export_request("r")
    engine.close()
    export.abort()
    with pytest.raises(StateError):
        export.commit()
    assert list(stream) == [] and nothing_left(engine)


def test_a_committed_export_gives_nothing_any_more():
    engine = make()
    export = engine.export_request(running(engine))
    export.commit()
    export.abort()
    assert not engine.is_active("r") and nothing_left(engine) is False, "its last delta is still to be taken"
    with pytest.raises(StateError, match="had to give way"):
        chunk_of(export, 0)
    assert [delta.finish_reason for delta in engine.step()] == [FinishReason.MOVED] and nothing_left(engine)


def test_kv_that_gives_way_during_a_move_is_computed_again():
    source, destination = make(num_blocks=20), make()
    stream = source.stream(PROMPT, greedy(20), request_id="r")
    seen = [next(stream) for _ in range(6)]
    real = destination.import_request

    def busy_meanwhile(snapshot, **options):
        source.generate([41] * 60, greedy(3))  # 16 of 19 blocks
        return real(snapshot, **options)

    destination.import_request = busy_meanwhile
    assert hand_over(source, destination, "r") == "r"
    seen += list(stream)
    assert [token for delta in seen for token in delta.token_ids] == ANSWER
    assert 0 < stream.result.reuse.recomputed <= 35
    assert nothing_left(source) and nothing_left(destination)


# Snapshots of several answers: there are none


def several(snapshot):
    return replace(snapshot, progress=replace(snapshot.progress, params=replace(snapshot.progress.params, n=3)))


def test_one_unfinished_request_is_not_several():
    source = make()
    snapshot = several(source.export_request(running(source)).snapshot)
    engine = make()
    with pytest.raises(StateError):
        engine.import_request(snapshot)
    with pytest.raises(StateError):
        engine.resume(engine.begin_load(snapshot).commit())
    assert not engine.has_work
    engine.check()


def test_a_file_that_says_several_is_refused():
    source = make()
    snapshot = source.export_request(running(source)).snapshot
    with pytest.raises(SnapshotError):
        encode(several(snapshot))
    honest = encode(snapshot)
    assert read_preamble(io.BytesIO(honest), available=len(honest)).snapshot == snapshot
    forged = forge(honest, lambda header: header["progress"]["params"].update(n=3))
    with pytest.raises(SnapshotError, match="3"):
        read_preamble(io.BytesIO(forged), available=len(forged))


def forge(data, change):
    """The same preamble with another header, and digests that fit."""
    start = len(MAGIC) + 8
    (length,) = struct.unpack("<I", data[start - 4 : start])
    header = json.loads(data[start : start + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    sections = [
        MAGIC + struct.pack("<II", VERSION, len(text)) + text,
        data[start + length + DIGEST_BYTES : -DIGEST_BYTES],
    ]
    digest, forged = b"", b""
    for section in sections:
        digest = chunk_digest(digest, 0, section)
        forged += section + digest
    return forged


# Quotas: the tenant's own holds are counted, the engine's own are not


def distinct(engine, salt=""):
    """Blocks that a tenant's states hold, each counted once."""
    return len({block for state in engine.states(salt=salt) if state.num_held for block in state.lease.blocks})


@pytest.mark.parametrize("value", [0.0, 5.0])
def test_a_save_at_the_quota_is_complete_and_cuts_nothing(value):
    engine = make(lease_quota=10)
    state = hold(engine, value=value)
    outgoing, done = engine.begin_save(state)
    assert (outgoing.snapshot.num_computed, state.num_held) == (37, 37)
    for index in range(outgoing.snapshot.num_chunks):
        chunk_of(outgoing, index)
    done()
    assert state.num_held == 37
    engine.check()


def test_a_request_is_saved_whole_by_a_tenant_without_a_quota_to_spare():
    engine = make(lease_quota=0)
    outgoing, done = engine.begin_save(running(engine))
    assert outgoing.snapshot.num_computed == 35
    done()
    assert finish(engine)[0]["r"] == ANSWER[6:] and nothing_left(engine)


def test_a_fork_of_a_running_request_cuts_no_hold():
    engine = make(lease_quota=10)
    state = hold(engine)
    engine.submit([41, *PROMPT], greedy(20), request_id="r")
    engine.step()
    engine.submit(Request(parent="r", at="now", params=greedy(2), request_id="child"))
    assert state.num_held == 37
    _, last = finish(engine)
    assert last["child"].reuse.held == 31 and state.num_held == 37


def test_an_heir_finds_its_parents_kv_whatever_the_quota():
    engine = make(lease_quota=10, prefix_caching=False)
    state = hold(engine)
    engine.submit(Request(parent=running(engine, steps=1), suffix=[7], params=greedy(2), request_id="heir"))
    _, last = finish(engine)
    assert last["heir"].reuse == Reuse(held=49, new=2) and state.num_held == 37


@pytest.mark.parametrize("quota", [0, 4])
def test_an_export_is_complete_whatever_the_quota(quota):
    engine = make(lease_quota=quota)
    state = hold(engine, [41] * 14, 2)  # 4 blocks
    held = state.num_held
    export = engine.export_request(running(engine))
    assert export.snapshot.num_computed == 35 and state.num_held == held
    export.abort()
    assert finish(engine)[0]["r"] == ANSWER[6:] and state.num_held == held


@pytest.mark.parametrize("quota", [0, 4, None])
def test_a_destination_with_a_quota_pays_exactly(quota):
    source, engine = make(), make(lease_quota=quota)
    state = hold(engine, [41] * 14, 2)
    held, free = state.num_held, engine.kv.num_free
    export = source.export_request(running(source))
    arrival = engine.import_request(export.snapshot)
    assert free - engine.kv.num_free == 9 and state.num_held == held
    ship(export, arrival)
    stream = engine.follow(arrival.commit())
    assert free - engine.kv.num_free == 9 and state.num_held == held
    list(stream)
    assert stream.result.token_ids == ANSWER and stream.result.reuse == Reuse(held=35, new=1)
    assert state.num_held == held


@pytest.mark.parametrize(("value", "kept"), [(1.0, 15), (9.0, 0)], ids=["the loaded", "the other"])
def test_a_loaded_state_counts_once_it_is_there(value, kept):
    source, engine = make(), make(lease_quota=4)
    other = hold(engine, [41] * 14, 2, value=5.0)
    outgoing, _ = source.begin_save(hold(source))
    arrival = engine.begin_load(outgoing.snapshot, value=value)
    ship(outgoing, arrival)
    assert other.num_held == 15, "not before"
    loaded = arrival.commit()
    assert (loaded.num_held, other.num_held) == (0 if kept else 16, kept), "the less valuable gives way"
    assert engine.continue_(loaded, [7], greedy(2)).token_ids == expected([*loaded.tokens, 7], 2)
    engine.check()


def test_a_block_that_two_states_share_counts_once():
    engine = make(lease_quota=10)
    state = hold(engine)
    forks = [engine.fork(state, at) for at in (38, 20, 3)]
    assert [found.num_held for found in (state, *forks)] == [37, 37, 20, 3]
    engine.release(state)
    assert [fork.num_held for fork in forks] == [37, 20, 3]
    engine.check()


def test_states_that_share_their_blocks_shrink_together():
    engine = make(lease_quota=12)
    state = hold(engine)
    fork = engine.fork(state)
    dear = hold(engine, [41, *PROMPT], value=1.0)  # 10 blocks
    assert dear.num_held == 38 and distinct(engine) <= 12
    assert max(state.num_held, fork.num_held) == 8
    for found in (state, fork):
        assert engine.continue_(found, [7], greedy(2)).token_ids == expected([*found.tokens, 7], 2)
    engine.check()


def test_no_sequence_of_holds_goes_over_the_quota():
    engine = make(num_blocks=200, lease_quota=12)
    for salt in ("a", "b"):
        first = hold(engine, salt=salt)
        for number in range(6):
            state = hold(engine, [41 + number, *PROMPT[: 5 * number]], salt=salt, value=float(number % 3))
            engine.fork(state, 3, salt=salt, value=2.0)
            engine.hold(first, value=number / 2)
            engine.check()
            assert distinct(engine, "a") <= 12 and distinct(engine, "b") <= 12


# Admissions that are refused


def test_a_refused_admission_takes_nothing_from_who_runs():
    def run(waits):
        engine = make(num_blocks=17, prefix_caching=False)
        state = hold(engine)  # 10 of 16 blocks
        first = engine.submit(Request(parent=state, at=5, params=greedy(40)))
        engine.step()
        lent = state.lease.num_lent
        if waits:
            engine.submit(Request(parent=state, suffix=[7] * 20, params=greedy(2)))
        engine.step()
        assert state.lease.num_lent == lent == 1
        while engine.is_active(first):
            engine.step()
            engine.check()
        cost = engine.stats().num_preemptions, engine._executor.num_computed
        finish(engine)
        return cost

    assert run(waits=True) == run(waits=False)


# Numbers


def moved_back(engine, request_id):
    engine.export_request(request_id).abort()


@pytest.mark.parametrize("steps", [0, 1, 6])
@pytest.mark.parametrize("squeeze", [False, True])
def test_an_export_that_was_aborted_leaves_no_trace_in_the_numbers(steps, squeeze):
    def run(exported):
        engine = make()
        running(engine, steps=steps)
        if exported:
            export = engine.export_request("r")
            if squeeze:
                engine.generate([45] * 190, greedy(3), salt="other")
            export.abort()
            engine.step()
            moved_back(engine, "r")
        _, last = finish(engine)
        return last["r"].reuse

    assert run(exported=True) == run(exported=False) == Reuse(new=30)


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("consume", [False, True])
def test_a_continuation_that_was_exported_and_aborted_is_as_it_was(steps, consume):
    engine = make(prefix_caching=False)
    state = hold(engine)
    engine.submit(Request(parent=state, suffix=[7], params=greedy(6), request_id="c", consume=consume))
    for _ in range(steps):
        engine.step()
    moved_back(engine, "c")
    moved_back(engine, "c")
    _, last = finish(engine)
    assert last["c"].reuse == Reuse(held=37, new=2)
    assert state.num_held == (0 if consume else 37)
    assert engine.stats().held_tokens == 37 and engine.stats().recomputed_tokens == 0


def test_a_waiting_continuation_that_came_back_computes_only_what_is_new():
    engine = make(prefix_caching=False)
    state = hold(engine)
    before = engine._executor.num_computed
    engine.submit(Request(parent=state, suffix=[7], params=greedy(1), request_id="c"))
    moved_back(engine, "c")
    assert finish(engine)[0]["c"] == expected([*state.tokens, 7], 1)
    assert engine._executor.num_computed - before == 2


def test_what_a_moved_request_brings_is_counted_where_it_goes_on():
    engines = make(), make(size=3), make(size=5)
    stream = engines[0].stream(PROMPT, greedy(20), request_id="r")
    for source, destination in pairwise(engines):
        for _ in range(5):
            next(stream)
        hand_over(source, destination, "r")
    list(stream)
    assert stream.result.reuse == Reuse(held=39, new=1)
    assert all(nothing_left(engine) for engine in engines)


# What a child consumes


def test_a_hold_taken_anew_outlives_the_preemption_of_a_child_that_consumed_the_first():
    engine = make(num_blocks=31)
    state = hold(engine)
    old = engine.submit([41] * 5, greedy(60), request_id="old")
    engine.submit(Request(parent=state, suffix=[7], params=greedy(40), consume=True, request_id="child"))
    engine.step()
    assert state.num_held == 0, "consumed"
    engine.hold(state)  # the prefix cache has nearly all of it
    held = state.num_held
    tokens, _ = finish(engine)
    assert engine.stats().num_preemptions > 0
    assert len(tokens["child"]) == 39 and tokens[old] == expected([41] * 5, 60)[1:]
    assert held > 30 and state.num_held == held


def test_a_hold_taken_anew_outlives_the_siblings_of_a_child_that_consumed_the_first():
    engine = make(max_running=1)
    state = hold(engine)
    engine.submit(Request(parent=state, suffix=[7], params=greedy(4, n=3), consume=True))
    engine.step()
    assert state.num_held == 0
    engine.hold(state)
    held = state.num_held
    finish(engine)
    assert held > 30 and state.num_held == held


# What can be held


def test_a_shrunk_hold_that_is_renewed_waits_for_a_child_too():
    clock = VirtualClock()
    engine = make(num_blocks=24, clock=clock, max_running=1)
    state = engine.generate(PROMPT, greedy(), hold=5.0)[0].state
    engine.submit([45] * 4, greedy(12))
    engine.step()
    engine.submit(Request(parent=state, params=greedy(1), request_id="child"))
    engine.kv.leases.trim(state.lease, 12)
    engine.hold(state, 1.0)
    clock.advance(3.0)
    engine.step()
    assert state.num_held >= 12, "a child waits for it"
    tokens, last = finish(engine)
    assert tokens["child"] == expected(state.tokens, 1) and last["child"].reuse.held >= 12
    clock.advance(3.0)
    assert engine.stats().leased_blocks == 0 and state.num_held == 0, "and for nobody now"


def test_a_hold_that_gave_way_is_renewed_in_full_as_long_as_the_cache_has_it():
    engine = make()
    state = hold(engine)
    engine.kv.leases.trim(state.lease, 12)
    engine.hold(state)
    assert state.num_held == 37
    engine.check()


def test_a_short_hold_does_not_hide_what_the_cache_has():
    engine = make()
    state = hold(engine)
    engine.forget()
    engine.kv.leases.trim(state.lease, 4)
    engine.generate(list(state.tokens), greedy(1))  # now all of it is in the cache again
    result = engine.continue_(state, [7], greedy(3))
    assert result.token_ids == expected([*state.tokens, 7], 3)
    assert (result.reuse.inherited, result.reuse.recomputed) == (38, 0)
    engine.check()


def test_a_long_hold_is_used_where_the_cache_has_less():
    engine = make()
    state = hold(engine)
    engine.forget()
    engine.generate(list(state.tokens[:9]), greedy(1))
    assert engine.continue_(state, [7], greedy(3)).reuse == Reuse(held=37, new=2)
    engine.check()


def test_a_state_loaded_as_tokens_can_hold_what_the_cache_has(tmp_path):
    source, engine = make(prefix_caching=False), make()
    source.save(source.generate(PROMPT, greedy())[0].state, tmp_path / "s.segue")
    loaded = engine.load(tmp_path / "s.segue")
    assert loaded.num_held == 0
    engine.continue_(loaded, [7], greedy(1))
    engine.hold(loaded)
    assert loaded.num_held >= 37
    engine.check()
    result = engine.continue_(loaded, [8], greedy(2))
    assert result.token_ids == expected([*loaded.tokens, 8], 2)
    assert (result.reuse.held, result.reuse.inherited + result.reuse.new) == (loaded.num_held, 39)
    assert min(result.reuse.cached, result.reuse.recomputed, result.reuse.new) == 0


# How long


@pytest.mark.parametrize("seconds", [1e9 + 1, 1e10, 10**400, inf, nan, -1, -0.5, "5", None], ids=str)
def test_a_hold_without_sense_is_refused_wherever_it_is_asked_for(seconds):
    engine, source = make(), make()
    state = hold(engine, request_id="s")
    outgoing, _ = source.begin_save(hold(source))
    snapshot = source.export_request(running(source)).snapshot
    asleep = engine.begin_load(snapshot, state_id="asleep").commit()
    asks = [
        lambda: Request(prompt=[1], hold=seconds),
        lambda: engine.submit([1], hold=seconds),
        lambda: engine.fork(state, hold=seconds),
        lambda: engine.begin_load(outgoing.snapshot, hold=seconds),
        lambda: engine.import_request(snapshot, hold=seconds),
        lambda: engine.resume(asleep, hold=seconds),
    ]
    if seconds is not None:
        asks.append(lambda: engine.hold(state, seconds))
    for ask in asks:
        with pytest.raises(InvalidRequest) as caught:
            ask()
        assert caught.value.field == "hold"
    assert [found.id for found in engine.states()] == ["s", "asleep"] and not engine.has_work


@pytest.mark.parametrize("seconds", [1e9, 10**9, 0, 0.5])
def test_a_hold_of_up_to_a_billion_seconds_is_taken(seconds):
    clock = VirtualClock()
    engine = make(clock=clock)
    state = engine.generate(PROMPT, greedy(), hold=seconds)[0].state
    engine.hold(state, seconds)
    clock.advance(seconds)
    assert engine.stats().leased_blocks == 0
