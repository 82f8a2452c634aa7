"""Holds on finished work: time-limited, revocable, and shrinking from the tail."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Literal

from segue.base.types import Scope
from segue.kv.events import Ended, KVEvent, Leased, Renewed, Revoked
from segue.kv.pool import BlockPool


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
        """The least is reclaimed first: the wanted last, then by value, then by age."""
        return (self.num_heirs > 0, self.value, self.id)


class Leases:
    """All leases that still hold something, in the order in which memory is taken back from them.

    A lease is never a reason that work cannot run: whoever needs blocks calls `reclaim`. `totals` counts each tenant's
    blocks, once per lease that holds them; a tenant whose leases hold more different blocks than its quota loses from
    its own.
    """

    def __init__(self, pool: BlockPool, block_size: int, emit: Callable[[KVEvent], None]) -> None:
        self.default_quota: int | None = None
        self.quotas: dict[str, int | None] = {}  # by tenant
        self.totals: Counter[str] = Counter()
        self._pool = pool
        self._block_size = block_size
        self._emit = emit
        self._leases: dict[int, Lease] = {}
        self._order: list[tuple[bool, float, int]] = []  # every lease's worth
        self._expiries: list[tuple[float, int]] = []  # a heap; may name leases that were renewed or have ended
        self._outstanding: dict[int, Lease] = {}  # ended, with blocks still lent
        self._refused: tuple[int, int] | None = None  # what could not be had, and when: `_pool.num_releases`
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
        self._refused = None
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
        self._charge(lease, len(blocks))
        insort(self._order, lease.worth)
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
        self._refused = None
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

    def reclaim(self, num_free: int, now: float) -> bool:
        """Shrink leases, each from its tail, until `num_free` blocks are free. False, and nothing but what expired is
        taken, when all the leases together could not give that much."""
        if self._pool.num_free >= num_free:
            return True
        self.expire(now)
        wanted = num_free - self._pool.num_free
        if not self._leases or self._is_refused(wanted):
            return wanted <= 0
        victims = self._unshared_tails(wanted)
        if victims is not None:
            self._shrink(victims, num_free)
            return True
        held = Counter(block for lease in self for block in lease.blocks)
        only_leased = {block for block, count in held.items() if self._pool.ref_count[block] == count}
        only_leased.difference_update(*(lease.blocks[: lease.num_lent] for lease in self))
        if len(only_leased) < wanted:
            self._refused = (wanted, self._pool.num_releases)
            return False
        everyone = [self._leases[lease_id] for _, _, lease_id in self._order]
        self._take_back(everyone, lambda _: self._pool.num_free >= num_free, only_leased.__contains__, "pressure")
        return True

    def _is_refused(self, wanted: int) -> bool:
        """As much could not be had before, and since then nothing was let go that would change it."""
        return self._refused is not None and self._refused[1] == self._pool.num_releases and wanted >= self._refused[0]

    def _unshared_tails(self, wanted: int) -> list[Lease] | None:
        """The first leases whose tails, held by nobody else, come to `wanted` blocks. None if all of them do not, or if a
        dearer one would come before a cheaper one whose tail is shared."""
        refs = self._pool.ref_count
        victims, found = [], 0
        passed_over: tuple[bool, float] | None = None
        for heirs, value, lease_id in self._order:
            if passed_over is not None and (heirs, value) > passed_over:
                return None
            lease = self._leases[lease_id]
            victims.append(lease)
            for block in reversed(lease.blocks[lease.num_lent :]):
                if found >= wanted:
                    break
                if refs[block] > 1:
                    passed_over = (heirs, value)
                    break
                found += 1
            if found >= wanted:
                return victims
        return None

    def _shrink(self, leases: Iterable[Lease], num_free: int) -> None:
        """Take unshared tails until there is enough."""
        pool, refs = self._pool, self._pool.ref_count
        for lease in leases:
            blocks, lent, had = lease.blocks, lease.num_lent, len(lease.blocks)
            while len(blocks) > lent and pool.num_free < num_free and refs[blocks[-1]] == 1:
                pool.release((blocks.pop(),))
            if len(blocks) < had:
                self._lost(lease, had - len(blocks), "pressure")

    def _take_back(
        self,
        leases: list[Lease],
        enough: Callable[[int], bool],
        useful: Callable[[int], bool],
        why: Literal["pressure", "quota"],
    ) -> None:
        """Shrink leases in order. A block that several of them hold goes when it is the dearest one's turn, from all of
        them at once; at one that is not `useful` to take, none of those below it would be."""
        dearest: dict[int, int] = {}
        ending: dict[int, list[Lease]] = {}  # block -> the leases of which it is the last
        for position, lease in enumerate(leases):
            dearest.update(dict.fromkeys(lease.blocks, position))
            ending.setdefault(lease.blocks[-1], []).append(lease)
        lost: Counter[int] = Counter()
        num_taken = 0
        for position, lease in enumerate(leases):
            while len(lease.blocks) > lease.num_lent and not enough(num_taken):
                block = lease.blocks[-1]
                if dearest[block] > position or not useful(block):
                    break
                num_taken += 1
                for holder in ending.pop(block):
                    self._pool.release((holder.blocks.pop(),))
                    lost[holder.id] += 1
                    if holder.blocks:
                        ending.setdefault(holder.blocks[-1], []).append(holder)
        for lease in leases:
            if lost[lease.id]:
                self._lost(lease, lost[lease.id], why)

    def _enforce_quota(self, tenant: str) -> None:
        """`totals` is never below the number of different blocks, so most of the time it settles the question."""
        quota = self.quotas.get(tenant, self.default_quota)
        if quota is None or self.totals[tenant] <= quota:
            return
        own = [self._leases[lease_id] for _, _, lease_id in self._order]
        own = [lease for lease in own if lease.scope.tenant == tenant and not lease.transient and lease.blocks]
        different = {block for lease in own for block in lease.blocks}
        lent = {block for lease in own for block in lease.blocks[: lease.num_lent]}
        surplus = len(different) - quota
        self._take_back(own, lambda num_taken: num_taken >= surplus, lambda block: block not in lent, "quota")

    def _lost(self, lease: Lease, num_blocks: int, why: Literal["pressure", "quota"]) -> None:
        """`blocks` is shorter by this much already."""
        lease.num_computed = min(lease.num_computed, len(lease.blocks) * self._block_size)
        self._charge(lease, -num_blocks)
        self._emit(Revoked(lease.id, num_blocks, why))
        if not lease.blocks:
            self._forget(lease)

    # Order

    def order_agrees(self) -> bool:
        """For `check()`."""
        return self._order == sorted(lease.worth for lease in self)

    @contextmanager
    def _reordered(self, lease: Lease) -> Iterator[None]:
        """Around a change of what decides a lease's place; one that has ended has none."""
        present = lease in self
        if present:
            del self._order[bisect_left(self._order, lease.worth)]
        yield
        if present:
            insort(self._order, lease.worth)
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
        del self._order[bisect_left(self._order, lease.worth)]
        self._charge(lease, -len(lease.blocks))
        lease.blocks = array("i")
        lease.num_computed = 0
