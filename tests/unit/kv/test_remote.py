"""Blocks in a real Redis: found by whoever has the name, never loaded wrongly, and gone when they are to be."""

import pytest

redis = pytest.importorskip("redis")

from segue.base.errors import InvalidRequest, TierError  # noqa: E402
from segue.kv.tiers import RemoteTier  # noqa: E402
from tests.remotes import redis_server  # noqa: E402

BLOCK = 4096


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def client(server):
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        yield client


def name_of(number, tenant=0):
    return bytes([tenant]) * 8 + number.to_bytes(24, "big")


def content_of(number):
    return bytes([number % 251]) * BLOCK


def stored(server, numbers, tenant=0):
    tier = RemoteTier(server.url)
    tier.store_all([(name_of(number, tenant), memoryview(content_of(number))) for number in numbers])
    return tier


def loaded(tier, number, tenant=0):
    out = bytearray(BLOCK)
    [outcome] = tier.load_all([(name_of(number, tenant), memoryview(out))])
    if isinstance(outcome, TierError):
        raise outcome
    return bytes(out) if outcome else None


def test_another_engine_finds_what_was_stored(server, client):
    assert stored(server, range(5)).find([name_of(2), name_of(9)]) == [True, False]
    other = RemoteTier(server.url)
    names = [name_of(number) for number in range(7)]
    assert not any(other.find(names)), "it has not looked yet"
    other.look(names)
    assert other.find(names) == [True] * 5 + [False] * 2
    assert [loaded(other, number) for number in range(5)] == [content_of(number) for number in range(5)]
    assert loaded(other, 5) is None and len(other) == 5 and other.size_bytes == 5 * BLOCK


def test_what_the_server_gave_up_is_a_miss(server, client):
    tier = stored(server, [1])
    client.flushall()
    assert tier.find([name_of(1)]) == [True]
    assert loaded(tier, 1) is None
    assert tier.find([name_of(1)]) == [False] and tier.size_bytes == 0


@pytest.mark.parametrize("damage", ["a bit", "cut short", "longer", "empty", "another block", "another digest"])
def test_what_is_not_what_was_stored_is_never_loaded(server, client, damage):
    tier = stored(server, [1, 2])
    one, other = sorted(client.scan_iter("*:kv"))
    value = bytearray(client.get(one))
    flipped = bytearray(value)
    flipped[100] ^= 4
    changed = {"a bit": flipped, "cut short": value[:-1], "longer": value + b"x", "empty": b""}
    if damage == "another digest":
        client.set(one[:-2] + b"sum", client.get(other[:-2] + b"sum"))
    else:
        client.set(one, bytes(changed.get(damage, client.get(other))))
    with pytest.raises(TierError, match="damaged"):
        loaded(tier, 1)
    assert loaded(tier, 1) is None and loaded(tier, 2) == content_of(2)


@pytest.mark.parametrize("part", [b":kv", b":sum"])
def test_one_half_without_the_other_is_a_miss(server, client, part):
    tier = stored(server, [1])
    [key] = [key for key in client.scan_iter() if key.endswith(part)]
    client.delete(key)
    assert loaded(tier, 1) is None
    tier.store_all([(name_of(1), memoryview(content_of(1)))])
    assert loaded(tier, 1) == content_of(1)


def test_something_else_under_its_name_is_a_miss(server, client):
    tier = stored(server, [1])
    [key] = client.scan_iter("*:kv")
    client.delete(key)
    client.hset(key, "kv", content_of(1))
    assert loaded(tier, 1) is None


def test_verify_counts_and_deletes(server, client):
    tier = stored(server, range(4))
    client.set(next(client.scan_iter("*:kv")), b"!" * BLOCK)
    assert tier.verify() == (3, 1) and tier.verify() == (3, 0)


def test_a_tenants_blocks_go_and_nothing_else(server, client):
    tier = stored(server, range(3), tenant=1)
    stored(server, range(2), tenant=2)
    client.set("somebody:elses", "x")
    assert tier.drop(bytes([1]) * 8) == 3
    assert loaded(tier, 0, tenant=1) is None and loaded(tier, 0, tenant=2) == content_of(0)
    assert tier.drop() == 2 and client.keys() == [b"somebody:elses"]


def test_an_address_that_is_none_is_refused_without_saying_it():
    with pytest.raises(InvalidRequest) as refused:
        RemoteTier("http://user:secret@host")
    assert "secret" not in str(refused.value)
