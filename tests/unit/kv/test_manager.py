"""What KV memory promises a scheduler, one promise a test."""

from array import array

import pytest

from segue.base.types import Scope
from segue.kv import KVManager, Removed, Revoked, Stored

SCOPE = Scope(model="m")


def tokens(*ranges: range) -> array:
    return array("i", [token for part in ranges for token in part])


def run(kv: KVManager, ids: array, scope: Scope = SCOPE):
    """Admit, compute and commit a whole sequence; the table, how many tokens were reused, the copy."""
    table = kv.open(ids, scope)
    got = kv.admit(table, kv.match(table, ids), len(ids))
    assert got is not None
    if got.copy:
        kv.settle(got.copy)
    kv.commit(table, ids, len(ids))
    kv.check()
    return table, got


def finish(kv: KVManager, table, ids: array, num_computed: int | None = None) -> None:
    kv.commit_tail(table, ids, len(ids) if num_computed is None else num_computed)
    kv.close(table)
    kv.check()


def test_two_prompts_that_share_half_use_384_blocks():
    kv = KVManager(600, 16)
    run(kv, tokens(range(2048), range(10_000, 12_048)))
    run(kv, tokens(range(2048), range(20_000, 22_048)))
    assert 599 - kv.num_free == 384


def test_a_match_is_to_the_token_and_copies_one_block():
    kv = KVManager(600, 16)
    run(kv, tokens(range(2048), range(10_000, 12_048)))
    run(kv, tokens(range(2048), range(20_000, 22_048)))
    before = kv.num_free
    table, got = run(kv, tokens(range(2048), range(10_000, 10_007), range(30_000, 32_041)))
    assert got.num_reused == 2055
    assert got.copy is not None and got.copy.dst == table.blocks[128]
    assert before - kv.num_free == 128


def test_at_least_one_token_is_left_to_compute():
    kv = KVManager(64, 16)
    ids = tokens(range(64))
    table, _ = run(kv, ids)
    finish(kv, table, ids)
    table, got = run(kv, ids)
    assert got.num_reused == 63


def test_the_partly_filled_last_block_of_finished_work_is_found():
    kv = KVManager(64, 16)
    ids = tokens(range(39))
    table, _ = run(kv, ids)
    finish(kv, table, ids)
    _, got = run(kv, tokens(range(39), range(100, 120)))
    assert got.num_reused == 39
    assert (
        kv.match(kv.open(tokens(range(36), range(200, 220)), SCOPE), tokens(range(36), range(200, 220))).num_tokens
        == 36
    )


def test_scopes_never_share():
    kv = KVManager(64, 16)
    ids = tokens(range(50))
    run(kv, ids, Scope(model="m"))
    for scope in (Scope(salt="t", model="m"), Scope(adapter="a", model="m"), Scope(model="n")):
        _, got = run(kv, ids, scope)
        assert got.num_reused == 0


@pytest.mark.parametrize("key", [7, 0, -1])
def test_a_hash_collision_is_a_miss(key):
    kv = KVManager(64, 4, hash_block=lambda parent, data: key)
    first, _ = run(kv, tokens(range(12)))
    held = list(first.blocks)
    for ids in (tokens(range(100, 112)), tokens(range(4), range(200, 208)), tokens(range(100, 104), range(4, 12))):
        table, got = run(kv, ids)
        assert got.num_reused <= 4
        if got.num_reused == 4:
            assert ids[:4] == tokens(range(4)) and table.blocks[0] == held[0]


def test_a_collision_below_an_equal_parent_is_a_miss():
    kv = KVManager(64, 4, hash_block=lambda parent, data: parent + 1)  # the key is the depth
    run(kv, tokens(range(12)))
    for ids, reused in ((tokens(range(100, 106)), 0), (tokens(range(4), range(200, 206)), 4), (tokens(range(12)), 11)):
        _, got = run(kv, ids)
        assert got.num_reused == reused


def test_scopes_never_share_even_when_every_key_collides():
    kv = KVManager(64, 4, hash_block=lambda parent, data: 1)
    run(kv, tokens(range(8)), Scope(salt="a"))
    _, got = run(kv, tokens(range(8)), Scope(salt="b"))
    assert got.num_reused == 0


def test_work_computed_twice_at_once_is_kept_once():
    kv = KVManager(64, 16)
    ids = tokens(range(48))
    left, right = kv.open(ids, SCOPE), kv.open(ids, SCOPE)
    for table in (left, right):
        assert kv.admit(table, kv.match(table, ids), 48) is not None
    assert not set(left.blocks) & set(right.blocks)
    kv.commit(left, ids, 48)
    kv.commit(right, ids, 48)
    assert left.blocks == right.blocks
    assert 63 - kv.num_free == 3
    kv.check()


def test_prefixes_outlive_tails():
    kv = KVManager(9, 4)
    ids = tokens(range(32))
    table, _ = run(kv, ids)
    finish(kv, table, ids)
    run(kv, tokens(range(100, 112)))
    again = kv.open(ids, SCOPE)
    assert kv.match(again, ids).num_tokens == 20


def test_writing_into_a_shared_block_copies_it_first():
    kv = KVManager(16, 4)
    ids = tokens(range(6))
    parent, _ = run(kv, ids)
    child = kv.fork(parent, 6)
    shared = parent.blocks[1]
    got = kv.extend(parent, 6, 7)
    assert got is not None and got.copy is not None and got.copy.src == shared
    assert parent.blocks[1] == got.copy.dst != child.blocks[1] == shared
    kv.check()
    kv.settle(got.copy)
    assert kv.extend(child, 6, 7).copy is None, "the only holder writes in place"
    kv.check()


def test_the_only_holder_of_an_indexed_tail_takes_it_back_without_a_copy():
    kv = KVManager(16, 4)
    ids = tokens(range(6))
    table, _ = run(kv, ids)
    kv.commit_tail(table, ids, 6)
    assert kv.match(kv.open(tokens(range(9)), SCOPE), tokens(range(9))).num_tokens == 6
    assert kv.extend(table, 6, 7).copy is None
    assert kv.match(kv.open(tokens(range(9)), SCOPE), tokens(range(9))).num_tokens == 4
    kv.check()


def test_a_full_indexed_block_is_never_written():
    kv = KVManager(16, 4)
    ids = tokens(range(8))
    table, _ = run(kv, ids)
    child = kv.fork(table, 6)
    kv.close(table)
    got = kv.extend(child, 6, 7)
    assert got.copy is not None, "it holds tokens 6 and 7 of the parent, which others may still find"
    kv.settle(got.copy)
    assert kv.match(kv.open(tokens(range(9)), SCOPE), tokens(range(9))).num_tokens == 8


def test_nothing_changes_when_the_pool_is_too_small():
    kv = KVManager(4, 4)
    ids = tokens(range(13))
    table = kv.open(ids, SCOPE)
    assert kv.admit(table, kv.match(table, ids), 13) is None
    assert kv.usage == 0.0 and not table.blocks
    kv.check()


def test_the_source_of_a_copy_is_given_up_when_it_would_take_the_last_block():
    kv = KVManager(4, 4)
    ids = tokens(range(12))
    table, _ = run(kv, ids)
    finish(kv, table, ids)
    other = tokens(range(10), range(50, 52))
    table, got = run(kv, other)
    assert got.num_reused == 8 and got.copy is None


def test_a_lease_keeps_blocks_and_shrinks_from_its_tail():
    kv = KVManager(9, 4)
    events = []
    kv.observe(events.append)
    ids = tokens(range(22))
    table, _ = run(kv, ids)
    lease = kv.hold(table, 22)
    finish(kv, table, ids)
    assert 8 - kv.num_free == 6
    assert kv.leases.reclaim(4, now=0.0)
    assert (len(lease.blocks), lease.num_computed) == (4, 16)
    assert Revoked(lease.id, 2) in events
    assert not kv.leases.reclaim(9, now=0.0) and len(lease.blocks) == 4, (
        "what all leases together cannot give is not begun"
    )
    kv.check()
    kv.leases.end(lease)
    kv.leases.end(lease)
    assert kv.usage == 0.0


def test_a_lease_is_not_shrunk_where_that_frees_nothing():
    kv = KVManager(9, 4)
    ids = tokens(range(20))
    table, _ = run(kv, ids)
    early = kv.hold(table, 12)
    late = kv.hold(table, 20)
    kv.close(table)
    assert kv.leases.reclaim(5, now=0.0)
    assert (len(early.blocks), len(late.blocks)) == (3, 3)


def test_admission_takes_from_leases_but_not_what_it_is_about_to_use():
    kv = KVManager(9, 4)
    ids = tokens(range(12))
    table, _ = run(kv, ids)
    own = kv.hold(table, 12, value=0.0)
    kv.close(table)
    other_ids = tokens(range(50, 66))
    table, _ = run(kv, other_ids)
    other = kv.hold(table, 16, value=9.0)
    kv.close(table)
    longer = tokens(range(12), range(80, 92))
    table, got = run(kv, longer)
    assert got.num_reused == 12
    assert (len(own.blocks), len(other.blocks)) == (3, 2)


def test_forgetting_a_very_long_chain():
    kv = KVManager(5000, 1)
    ids = tokens(range(4000))
    table, _ = run(kv, ids)
    kv.close(table)
    kv.forget()
    assert not kv._index.indexed_blocks()


def test_expired_and_cheap_leases_give_way_first():
    kv = KVManager(16, 4)
    leases = {}
    for name, value, expires_at in (("dear", 9.0, None), ("cheap", 1.0, None), ("expired", 99.0, 5.0)):
        ids = tokens(range(len(leases) * 100, len(leases) * 100 + 16))
        table, _ = run(kv, ids)
        leases[name] = kv.hold(table, 16, value=value, expires_at=expires_at)
        kv.close(table)
    kv.leases.reclaim(kv.num_free + 5, now=6.0)
    assert {name: len(lease.blocks) for name, lease in leases.items()} == {"dear": 4, "cheap": 3, "expired": 0}


def test_observers_hear_what_enters_and_leaves():
    kv = KVManager(4, 4)
    events = []
    kv.observe(events.append)
    ids = tokens(range(12))
    table, _ = run(kv, ids)
    stored = [event.block for event in events if isinstance(event, Stored)]
    assert stored == list(table.blocks)
    kv.close(table)
    run(kv, tokens(range(100, 112)))
    assert [event.block for event in events if isinstance(event, Removed)] == stored[::-1]


def test_forgetting_leaves_running_work_alone():
    kv = KVManager(16, 4)
    ids = tokens(range(20))
    table = kv.open(ids, SCOPE)
    assert kv.admit(table, kv.match(table, ids), 20)
    kv.commit(table, ids, 9)
    kv.forget()
    kv.check()
    kv.commit(table, ids, 20)
    kv.check()
    assert kv.match(kv.open(ids, SCOPE), ids).num_tokens == 0
    kv.close(table)
    assert kv.usage == 0.0


def test_a_child_is_never_found_below_a_rewritten_parent():
    kv = KVManager(16, 4)
    ids = tokens(range(12))
    table, _ = run(kv, ids)
    kv.close(table)
    first = table_block = kv.match(kv.open(ids, SCOPE), ids).blocks[0]
    kv._evict([first])  # out of order: its children must go with it
    assert not [block for block in kv._index.indexed_blocks() if block != table_block]
    kv.check()


def test_a_dear_lease_does_not_give_way_before_cheap_ones_that_share():
    kv = KVManager(20, 4)
    ids, others = tokens(range(32)), tokens(range(100, 132))
    table, _ = run(kv, ids)
    cheap = [kv.hold(table, 32, value=1.0), kv.hold(table, 24, value=1.0)]
    finish(kv, table, ids)
    table, _ = run(kv, others)
    dear = kv.hold(table, 32, value=2.0)
    finish(kv, table, others)
    assert kv.leases.reclaim(kv.num_free + 5, now=0.0)
    kv.check()
    assert ([len(lease.blocks) for lease in cheap], len(dear.blocks)) == ([3, 3], 8)


def test_a_tail_that_running_work_holds_too_is_not_given_up_for_nothing():
    kv = KVManager(20, 4)
    ids, others = tokens(range(32)), tokens(range(100, 132))
    running, _ = run(kv, ids)
    cheap = kv.hold(running, 32, value=1.0)
    table, _ = run(kv, others)
    dear = kv.hold(table, 32, value=2.0)
    finish(kv, table, others)
    assert kv.leases.reclaim(kv.num_free + 5, now=0.0) and not kv.leases.reclaim(kv.num_free + 5, now=0.0)
    kv.check()
    assert (len(cheap.blocks), len(dear.blocks)) == (8, 3)
    assert not kv.leases.reclaim(kv.num_free + 5, now=0.0)
    kv.close(running)
    assert kv.leases.reclaim(kv.num_free + 5, now=0.0), "what was refused is to be had once somebody lets go"
