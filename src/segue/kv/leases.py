"""Holds on finished work: time-limited, revocable, and shrinking from the tail."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, merge
from math import inf
from typing import Literal, NamedTuple, Protocol

from segue.base.types import Scope
from segue.kv.events import Ended, KVEvent, Leased, Renewed, Revoked


class HolderCounts(Protocol):
    def __getitem__(self, block: int, /) -> int: ...


class Pool(Protocol):
    """Blocks with holders, ours or another engine's."""

    @property
    def num_free(self) -> int: ...
    @property
    def num_releases(self) -> int: ...
    @property
    def ref_count(self) -> HolderCounts: ...
    def retain(self, blocks: Sequence[int], /) -> None: ...
    def release(self, blocks: Sequence[int], /) -> None: ...


@dataclass(slots=True, eq=False)
class Lease:
    """Keeps the KV of a sequence's first `num_computed` tokens from being reused.

    `blocks` shrinks from its end when memory is needed, and is empty once the lease has ended and nothing of it is lent.
    `value` is per block: what the policy thinks losing one would cost. While `num_heirs` requests wait to continue from
    it, a lease does not expire and is the last to shrink. A `transient` one is the engine's own: no tenant is charged for
    it, and it ends with the last of its heirs.
    """

    id: int
    scope: Scope
    job: str | None
    blocks: array[int]
    num_computed: int
    indexed: bool  # its full blocks are in the index, each below the one before
    expires_at: float | None = None
    value: float = 0.0
    transient: bool = False
    num_heirs: int = 0
    loans: list[int] = field(default_factory=list)  # how many blocks each borrower runs on, in order

    @property
    def num_lent(self) -> int:
        """Blocks that tables run on instead of holding them: they stay until they are back, even after the lease's end."""
        return self.loans[-1] if self.loans else 0

    @property
    def worth(self) -> tuple[bool, float, int]:
        """Of one tenant's, the least is reclaimed first: the wanted last, then by value, then by age."""
        return (self.num_heirs > 0, self.value, self.id)


class Giver(NamedTuple):
    """A lease that memory is to be taken from: all but its first `kept` blocks."""

    lease: Lease
    kept: int


class Leases:
    """All leases that still hold something, in the order in which memory is taken back from them.

    A lease is never a reason that work cannot run: whoever needs blocks calls `reclaim`. The tenant that holds most gives
    first; of its leases the cheapest, from the tail. What a tenant holds within its `share`, the dearest leases first, is
    taken back for its own work only:

        its leases   |-- dearest --|----- -----|----- -----|-- cheapest --|
        own work     <-----------------------------------------------------   takes from the right
        others'                            <-------------------------------
                     0                   share

    `totals` counts each tenant's blocks, once per lease that holds them; a tenant whose leases hold more different blocks
    than its quota loses from its own.
    """

    def __init__(self, pool: Pool, block_size: int, emit: Callable[[KVEvent], None]) -> None:
        self.default_quota: int | None = None
        self.quotas: dict[str, int | None] = {}  # by tenant
        self.share = 0  # blocks
        self.watch: Callable[[Lease], None] = _nobody  # hears of each lease that has shrunk or ended
        self.totals: Counter[str] = Counter()
        self._pool = pool
        self._block_size = block_size
        self._emit = emit
        self._leases: dict[int, Lease] = {}
        self._orders: dict[str, list[tuple[bool, float, int]]] = {}  # by tenant: its leases' worths
        self._transient: set[int] = set()  # ids of those that are
        self._expiries: list[tuple[float, int]] = []  # a heap; may name leases that were renewed or have ended
        self._outstanding: dict[int, Lease] = {}  # ended, with blocks still lent
        self._refused: dict[str, tuple[int, float, int]] = {}  # what a tenant could not have, for how much, and when
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def __contains__(self, lease: Lease) -> bool:
        """Still in force, and one of these: another engine's may have the same id."""
        return self._leases.get(lease.id) is lease

    @property
    def num_blocks(self) -> int:
        return sum(len(lease.blocks) for lease in self)

    def set_quota(self, tenant: str, num_blocks: int | None, spare: int) -> None:
        """Applies to the tenant's next lease. Those who have a quota share `spare` blocks out among themselves."""
        self.quotas[tenant] = num_blocks
        self.share = max(spare, 0) // len(self.quotas)
        self._refused.clear()

    # One lease's life

    def grant(
        self,
        scope: Scope,
        blocks: array[int],
        num_computed: int,
        *,
        indexed: bool,
        job: str | None = None,
        expires_at: float | None = None,
        value: float = 0.0,
        transient: bool = False,
    ) -> Lease:
        """One more holder for `blocks`, which the lease takes over as its own array."""
        self._pool.retain(blocks)
        self._refused.clear()
        self._last_id += 1
        lease = Lease(
            self._last_id,
            scope,
            job,
            blocks,
            num_computed,
            indexed,
            expires_at=expires_at,
            value=value,
            transient=transient,
        )
        self._leases[lease.id] = lease
        if transient:
            self._transient.add(lease.id)
        self._charge(lease, len(blocks))
        insort(self._orders.setdefault(scope.tenant, []), lease.worth)
        self._note_expiry(lease)
        self._emit(Leased(lease.id, len(blocks)))
        self._enforce_quota(scope.tenant)
        if not lease.blocks and lease in self:
            self._forget(lease)
        return lease

    def renew(self, lease: Lease, *, expires_at: float | None, value: float) -> None:
        """Other terms from now on, and the tenant's own; one that has ended stays ended."""
        if lease in self:
            with self._reordered(lease):
                lease.expires_at, lease.value = expires_at, value
            if lease.transient:
                lease.transient = False
                self._transient.discard(lease.id)
                self._charge(lease, len(lease.blocks))
            self._emit(Renewed(lease.id, expires_at, value))
            self._enforce_quota(lease.scope.tenant)

    def end(self, lease: Lease, why: Literal["released", "expired", "continued"] = "released") -> None:
        """A second time does nothing."""
        if lease in self:
            held = lease.blocks
            self._forget(lease)
            self._pool.release(held[lease.num_lent :])
            if lease.loans:
                lease.blocks = held[: lease.num_lent]
                self._outstanding[lease.id] = lease
            self._emit(Ended(lease.id, len(held), why))

    def trim(self, lease: Lease, num_tokens: int) -> None:
        """Let go of everything past the first `num_tokens` tokens."""
        keep = -(-num_tokens // self._block_size)
        if lost := lease.blocks[keep:]:
            del lease.blocks[keep:]
            self._pool.release(lost)
            self._charge(lease, -len(lost))
        lease.num_computed = min(lease.num_computed, num_tokens)
        if not lease.blocks and lease in self:
            self._forget(lease)

    def await_heir(self, lease: Lease) -> None:
        with self._reordered(lease):
            lease.num_heirs += 1

    def heir_settled(self, lease: Lease) -> None:
        """One that waited to continue has what it needs, or will not come."""
        with self._reordered(lease):
            lease.num_heirs -= 1
        if lease.transient and not lease.num_heirs:
            self.end(lease)

    # Loans

    def lend(self, lease: Lease, num_blocks: int) -> None:
        """A table is going to run on the first `num_blocks` blocks: one entry instead of a count for each block, however
        long the state is."""
        insort(lease.loans, num_blocks)

    def give_back(self, lease: Lease, num_blocks: int) -> None:
        del lease.loans[bisect_left(lease.loans, num_blocks)]
        self._refused.clear()
        if lease.id in self._outstanding and self._outstanding[lease.id] is lease:
            unused = lease.blocks[lease.num_lent :]
            del lease.blocks[lease.num_lent :]
            self._pool.release(unused)
            if not lease.loans:
                del self._outstanding[lease.id]

    def outstanding(self) -> Iterator[Lease]:
        """Leases that have ended and whose blocks somebody still runs on."""
        return iter(self._outstanding.values())

    # Memory taken back

    def expire(self, now: float) -> None:
        """End what is over, unless somebody waits to continue it."""
        while self._expiries and self._expiries[0][0] <= now:
            at, lease_id = heappop(self._expiries)
            lease = self._leases.get(lease_id)
            if lease is not None and lease.expires_at == at and not lease.num_heirs:
                self.end(lease, "expired")

    def next_expiry(self) -> float | None:
        """When to look again: never later than the next lease's end."""
        return self._expiries[0][0] if self._expiries else None

    def reclaim(
        self, num_free: int, now: float, tenant: str = "", below: float = inf, *, takes_shares: bool = False
    ) -> bool:
        """Shrink leases of a value `below` this (all of them, if that is infinite), each from its tail, until `num_free` blocks
        are free for work of `tenant`. False, and nothing but what expired is taken, when the leases it may take from could not
        give that much. `takes_shares`: also what other tenants hold within their shares, for work that is more than the longest
        request, and that nothing else can help."""
        if self._pool.num_free >= num_free:
            return True
        self.expire(now)
        wanted = num_free - self._pool.num_free
        if not self._leases or (not takes_shares and self._is_refused(tenant, wanted, below)):
            return wanted <= 0
        if wanted > 0 and not self._has_cheaper(below):
            self._refused[tenant] = (wanted, below, self._pool.num_releases)
            return False
        share = 0 if takes_shares else self.share
        victims = self._unshared_tails(tenant, wanted, below, share)
        if victims is not None:
            self._shrink(victims, num_free)
            return True
        givers = list(self._givers(tenant, below, share))
        held = Counter(block for lease, _ in givers for block in lease.blocks)
        only_leased = {block for block, count in held.items() if self._pool.ref_count[block] == count}
        only_leased.difference_update(*(lease.blocks[:kept] for lease, kept in givers))
        if len(only_leased) < wanted:
            if not takes_shares:
                self._refused[tenant] = (wanted, below, self._pool.num_releases)
            return False
        self._take_back(givers, lambda _: self._pool.num_free >= num_free, only_leased.__contains__, "pressure")
        return True

    def _givers(self, tenant: str, below: float, share: int) -> Iterator[Giver]:
        """What work of `tenant` may take from, in that order. Valid until the next change."""
        offers = (self._offers(other, 0 if other == tenant else share, below) for other in self._orders)
        return (Giver(self._leases[lease_id], kept) for *_, lease_id, kept in merge(*offers))

    def _offers(self, tenant: str, safe: int, below: float) -> Iterator[tuple[bool, int, float, int, int]]:
        """A tenant's cheaper leases, beyond its first `safe` blocks, ranked by how many it holds up to and with each."""
        held = self.totals[tenant]
        for wanted, value, lease_id in self._orders[tenant]:
            lease = self._leases[lease_id]
            if lease.transient:
                yield wanted, -held, value, lease_id, lease.num_lent
                continue
            if held <= safe:
                continue
            rest = held - len(lease.blocks)
            if value < below or below == inf:
                yield wanted, -held, value, lease_id, max(safe - rest, lease.num_lent)
            held = rest

    def _has_cheaper(self, below: float) -> bool:
        """Whether there can be any lease that is to be had for that; found without looking at all of them."""
        if below == inf or self._transient:
            return True
        cheapest = ((order, at) for order in self._orders.values() for at in (0, bisect_left(order, (True, -inf, 0))))
        return any(at < len(order) and order[at][1] < below for order, at in cheapest)

    def _is_refused(self, tenant: str, wanted: int, below: float) -> bool:
        """As much could not be had before, for no less, and since then nothing was let go that would change it."""
        least, price, when = self._refused.get(tenant, (0, 0.0, None))
        return when == self._pool.num_releases and wanted >= least and below <= price

    def _unshared_tails(self, tenant: str, wanted: int, below: float, share: int) -> list[Giver] | None:
        """The first leases whose tails, held by nobody else, come to `wanted` blocks. None if all of them do not, or if a
        dearer one would come before a cheaper one whose tail is shared."""
        refs = self._pool.ref_count
        victims, found = [], 0
        passed_over: tuple[str, bool, float] | None = None
        for giver in self._givers(tenant, below, share):
            lease, kept = giver
            rank = (lease.scope.tenant, lease.num_heirs > 0, lease.value)
            if passed_over is not None and rank != passed_over:
                return None
            victims.append(giver)
            for block in reversed(lease.blocks[kept:]):
                if found >= wanted:
                    break
                if refs[block] > 1:
                    passed_over = rank
                    break
                found += 1
            if found >= wanted:
                return victims
        return None

    def _shrink(self, givers: Iterable[Giver], num_free: int) -> None:
        """Take unshared tails until there is enough."""
        pool, refs = self._pool, self._pool.ref_count
        for lease, kept in givers:
            blocks, had = lease.blocks, len(lease.blocks)
            while len(blocks) > kept and pool.num_free < num_free and refs[blocks[-1]] == 1:
                pool.release((blocks.pop(),))
            if len(blocks) < had:
                self._lost(lease, had - len(blocks), "pressure")

    def _take_back(
        self,
        givers: list[Giver],
        enough: Callable[[int], bool],
        useful: Callable[[int], bool],
        why: Literal["pressure", "quota"],
    ) -> None:
        """Shrink leases in order. A block that several of them hold goes when it is the dearest one's turn, from all of
        them at once; at one that is not `useful` to take, none of those below it would be."""
        dearest: dict[int, int] = {}
        ending: dict[int, list[Lease]] = {}  # block -> the leases of which it is the last
        for position, (lease, _) in enumerate(givers):
            dearest.update(dict.fromkeys(lease.blocks, position))
            ending.setdefault(lease.blocks[-1], []).append(lease)
        lost: Counter[int] = Counter()
        num_taken = 0
        for position, (lease, kept) in enumerate(givers):
            while len(lease.blocks) > kept and not enough(num_taken):
                block = lease.blocks[-1]
                if dearest[block] > position or not useful(block):
                    break
                num_taken += 1
                for holder in ending.pop(block):
                    self._pool.release((holder.blocks.pop(),))
                    lost[holder.id] += 1
                    if holder.blocks:
                        ending.setdefault(holder.blocks[-1], []).append(holder)
        for lease, _ in givers:
            if lost[lease.id]:
                self._lost(lease, lost[lease.id], why)

    def _enforce_quota(self, tenant: str) -> None:
        """`totals` is never below the number of different blocks, so most of the time it settles the question."""
        quota = self.quotas.get(tenant, self.default_quota)
        if quota is None or self.totals[tenant] <= quota:
            return
        own = [self._leases[lease_id] for _, _, lease_id in self._orders.get(tenant, ())]
        givers = [Giver(lease, lease.num_lent) for lease in own if not lease.transient and lease.blocks]
        different = {block for lease, _ in givers for block in lease.blocks}
        lent = {block for lease, kept in givers for block in lease.blocks[:kept]}
        surplus = len(different) - quota
        self._take_back(givers, lambda num_taken: num_taken >= surplus, lambda block: block not in lent, "quota")

    def _lost(self, lease: Lease, num_blocks: int, why: Literal["pressure", "quota"]) -> None:
        """`blocks` is shorter by this much already."""
        lease.num_computed = min(lease.num_computed, len(lease.blocks) * self._block_size)
        self._charge(lease, -num_blocks)
        self._emit(Revoked(lease.id, num_blocks, why))
        if not lease.blocks:
            self._forget(lease)
        else:
            self.watch(lease)

    # Order

    def order_agrees(self) -> bool:
        """For `check()`."""
        worths: dict[str, list[tuple[bool, float, int]]] = {}
        for lease in self:
            worths.setdefault(lease.scope.tenant, []).append(lease.worth)
        if self._transient != {lease.id for lease in self if lease.transient}:
            return False
        return self._orders == {tenant: sorted(found) for tenant, found in worths.items()}

    @contextmanager
    def _reordered(self, lease: Lease) -> Iterator[None]:
        """Around a change of what decides a lease's place; one that has ended has none."""
        order = self._orders[lease.scope.tenant] if lease in self else None
        if order is not None:
            del order[bisect_left(order, lease.worth)]
        yield
        if order is not None:
            insort(order, lease.worth)
            self._note_expiry(lease)

    def _note_expiry(self, lease: Lease) -> None:
        if lease.expires_at is not None and not lease.num_heirs:
            heappush(self._expiries, (lease.expires_at, lease.id))
            if len(self._expiries) > 2 * len(self._leases) + 64:
                self._expiries = [(x.expires_at, x.id) for x in self if x.expires_at is not None and not x.num_heirs]
                heapify(self._expiries)

    def _charge(self, lease: Lease, num_blocks: int) -> None:
        tenant = lease.scope.tenant
        if not lease.transient:
            self.totals[tenant] += num_blocks
            if not self.totals[tenant]:
                del self.totals[tenant]

    def _forget(self, lease: Lease) -> None:
        """Out of the ledger, with nothing held."""
        del self._leases[lease.id]
        self._transient.discard(lease.id)
        order = self._orders[lease.scope.tenant]
        del order[bisect_left(order, lease.worth)]
        if not order:
            del self._orders[lease.scope.tenant]
        self._charge(lease, -len(lease.blocks))
        lease.blocks = array("i")
        lease.num_computed = 0
        self.watch(lease)


def _nobody(_: Lease) -> None:
    """Until somebody watches."""
