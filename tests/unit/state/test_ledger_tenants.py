"""A tenant with less than its share loses no state to another, however many that one makes."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from segue.base.types import Scope
from segue.state import State, StateLedger


def state(name, tenant, num_tokens=4):
    return State(name, Scope(tenant), array("i", range(num_tokens)), [], num_tokens - 1)


def test_a_flood_of_one_tenant_leaves_the_others_states():
    ledger = StateLedger(10, 1 << 20)
    for number in range(3):
        ledger.add(state(f"quiet {number}", "quiet"))
    for number in range(1000):
        ledger.add(state(f"loud {number}", "loud\0of its many salts" if number % 2 else "loud"))
    assert [known.id for known in ledger.all("quiet")] == ["quiet 0", "quiet 1", "quiet 2"]
    assert len(ledger) == 10


def test_a_flood_of_long_states_leaves_the_others():
    ledger = StateLedger(1000, 40_000)
    ledger.add(state("quiet", "quiet", 1000))
    for number in range(100):
        ledger.add(state(f"loud {number}", "loud", 2000))
    assert ledger.get("quiet") is not None
    assert ledger.size_bytes <= 40_000


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30), st.integers(1, 50)), max_size=80), st.integers(1, 12)
)
def test_the_books_agree_and_nobody_below_the_share_loses(additions, most):
    ledger = StateLedger(most, 4_000)
    for tenant, name, num_tokens in additions:
        if (known := ledger.get(str(name))) is not None and known.scope.tenant != tenant:
            continue
        before = {owner: len(ledger.all(owner)) for owner in "abc"}
        gone = [other for other in ledger.add(state(str(name), tenant, num_tokens)) if other.id != str(name)]
        for other in gone if ledger.size_bytes < 2_000 else ():
            assert before[other.scope.tenant] + (other.scope.tenant == tenant) >= max(before.values())
        everything = [known for owner in "abc" for known in ledger.all(owner)]
        assert len(everything) == len(ledger) <= most
        assert ledger.size_bytes == sum(known.size_bytes for known in everything)
        assert ledger.get(str(name)) is not None
