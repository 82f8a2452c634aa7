"""What is remembered between requests: never beyond its bounds, and nobody pushes out what others have less of."""

from hypothesis import given
from hypothesis import strategies as st

from segue.server.kept import Kept

SALTS = ["a", "a\0salted", "b", "c"]


def tenant_of(salt):
    return salt.partition("\0")[0]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.sampled_from(SALTS), st.integers(1, 40)), max_size=60),
    st.integers(1, 8),
    st.integers(1, 120),
)
def test_bounds_hold_and_what_is_found_is_the_owners(adds, most, most_bytes):
    kept: Kept[int] = Kept(most, most_bytes)
    latest = {}
    for number, (key, salt, size) in enumerate(adds):
        latest[str(key)] = (salt, number, size)
        kept.add(str(key), salt, number, size)
        found = {key: entry for key, entry in latest.items() if kept.get(key, entry[0]) is not None}
        assert all(kept.get(key, salt) == number for key, (salt, number, _) in found.items())
        assert len(found) == len(kept) <= most
        assert sum(size for *_, size in found.values()) == kept.size_bytes <= most_bytes
        for key, (salt, *_) in found.items():
            assert all(kept.get(key, other) is None for other in SALTS if other != salt)
    for key in latest:
        kept.remove(key)
    assert len(kept) == kept.size_bytes == 0


def test_a_flood_pushes_out_its_own():
    kept: Kept[str] = Kept(10, 1000)
    for number in range(3):
        kept.add(f"mine {number}", "a", "x", 100)
    for number in range(100):
        kept.add(f"flood {number}", "b\0salt" if number % 2 else "b", "y", 10)
    kept.add("huge", "b", "y", 900)
    assert all(kept.get(f"mine {number}", "a") == "x" for number in range(3))
    assert kept.get("huge", "b") is None


def test_the_least_recently_used_goes_first():
    kept: Kept[int] = Kept(3, 1000)
    for number in range(3):
        kept.add(str(number), "", number, 1)
    assert kept.get("0", "") == 0
    kept.add("3", "", 3, 1)
    assert [kept.get(str(number), "") for number in range(4)] == [0, None, 2, 3]
