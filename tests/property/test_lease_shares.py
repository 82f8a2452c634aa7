"""Whose leases give way: what is in a tenant's share stays, whatever the others do, and the largest holder gives first."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from segue.base.types import Scope
from segue.kv.leases import Leases
from segue.kv.pool import BlockPool

SALTS = ["a", "b", "b\0another of its salts", "c", "d"]


class Ledger:
    def __init__(self, num_blocks: int = 400) -> None:
        self.pool = BlockPool(num_blocks)
        self.leases = Leases(self.pool, 4, lambda _: None)

    def grant(self, salt, num_blocks, value, heirs, fork_of=None):
        """Of fresh blocks, or the first ones of another's."""
        if fork_of is None:
            blocks = array("i", self.pool.allocate(num_blocks))
        else:
            blocks = fork_of.blocks[:num_blocks]
        lease = self.leases.grant(Scope(salt), blocks, 4 * len(blocks), indexed=False, value=value)
        if fork_of is None:
            self.pool.release(blocks[:])
        for _ in range(heirs):
            self.leases.await_heir(lease)
        return lease

    def held(self):
        """By tenant, the dearest first."""
        found = {}
        for lease in sorted(self.leases, key=lambda lease: lease.worth, reverse=True):
            found.setdefault(lease.scope.tenant, []).append((lease, len(lease.blocks)))
        return found


@st.composite
def ledgers(draw, forks=True):
    ledger = Ledger()
    made = []
    for _ in range(draw(st.integers(1, 14))):
        salt = draw(st.sampled_from(SALTS))
        own = [lease for lease in made if lease.scope.tenant == Scope(salt).tenant] if forks else []
        parent = draw(st.none() | st.sampled_from(own)) if own else None
        count = draw(st.integers(1, 12))
        made.append(ledger.grant(salt, count, draw(st.sampled_from([0.0, 0.0, 1.0])), draw(st.integers(0, 1)), parent))
    return ledger


def within(leases, share):
    """Of one tenant's leases, the dearest first: how many blocks of each are in the share."""
    found = []
    for lease, count in leases:
        found.append((lease, min(count, share)))
        share -= found[-1][1]
    return found


@given(ledger=ledgers(), share=st.integers(0, 30), asking=st.sampled_from(["a", "b", "nobody"]), data=st.data())
def test_what_is_in_a_share_is_for_its_tenants_own_work(ledger, share, asking, data):
    ledger.leases.share = share
    before = ledger.held()
    free = ledger.pool.num_free
    all_leased = len({block for lease in ledger.leases for block in lease.blocks})
    for wanted in range(1, data.draw(st.integers(1, all_leased + 1)) + 1):
        if not ledger.leases.reclaim(free + wanted, now=0.0, tenant=asking):
            break
        assert ledger.pool.num_free >= free + wanted
    for tenant, leases in before.items():
        if tenant != asking:
            for lease, count in within(leases, share):
                assert len(lease.blocks) >= count
    assert ledger.leases.order_agrees()
    # With no share, or for its own, everything could have been had.
    if share == 0 and not any(lease.num_heirs for lease in ledger.leases):
        assert ledger.leases.reclaim(free + all_leased, now=0.0, tenant=asking) and not len(ledger.leases)


@given(ledger=ledgers(forks=False), wanted=st.integers(1, 60))
def test_the_tenant_that_holds_most_gives_first(ledger, wanted):
    """Afterwards nobody who lost anything is left with less than another has, beyond the size of its last lease."""
    totals = dict(ledger.leases.totals)
    wanted_ones = [lease for lease in ledger.leases if lease.num_heirs]
    sizes = {tenant: max(count for _, count in leases) for tenant, leases in ledger.held().items()}
    free = ledger.pool.num_free
    if wanted_ones or not ledger.leases.reclaim(free + wanted, now=0.0, tenant="nobody"):
        return
    after = {tenant: ledger.leases.totals[tenant] for tenant in totals}
    for loser in (tenant for tenant in totals if after[tenant] < totals[tenant]):
        assert after[loser] + sizes[loser] >= max(after.values())
    assert sum(totals.values()) - sum(after.values()) == wanted, "no more is taken than was asked for"
