"""Holds on finished work: time-limited, revocable, and shrinking from the tail."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal

from segue.base.types import Scope
from segue.kv.events import Ended, KVEvent, Leased, Renewed, Revoked
from segue.kv.pool import BlockPool


@dataclass(slots=True, eq=False)
class Lease:
    """Keeps the KV of a sequence's first `num_computed` tokens from being reused.

    `blocks` shrinks from its end when memory is needed, and is empty once the lease has ended. `value` is per block: what
    the policy thinks losing one would cost. While `num_heirs` requests wait to continue from it, a lease does not expire
    and is the last to shrink; a `transient` one is there for them only, and ends with the last of them.
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
    num_loans: int = 0  # tables that run on its first blocks instead of holding those themselves
    num_lent: int = 0  # how many blocks that is: they stay until the last loan is back, even after the lease's end

    @property
    def worth(self) -> tuple[bool, float, int]:
        """The least is reclaimed first: the wanted last, then by value, then by age."""
        return (self.num_heirs > 0, self.value, self.id)


class Leases:
    """All leases that still hold something, in the order in which memory is taken back from them.

    A lease is never a reason that work cannot run: whoever needs blocks calls `reclaim`. `totals` counts each tenant's
    blocks, once per lease that holds them; a tenant over its quota loses from its own leases.
    """

    def __init__(self, pool: BlockPool, block_size: int, emit: Callable[[KVEvent], None]) -> None:
        self.default_quota: int | None = None
        self.quotas: dict[str, int | None] = {}  # by salt
        self.totals: Counter[str] = Counter()
        self._pool = pool
        self._block_size = block_size
        self._emit = emit
        self._leases: dict[int, Lease] = {}
        self._order: list[tuple[bool, float, int]] = []  # every lease's worth
        self._expiries: list[tuple[float, int]] = []  # a heap; may name leases that were renewed or have ended
        self._outstanding: dict[int, Lease] = {}  # ended, with blocks still lent
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    @property
    def num_blocks(self) -> int:
        return sum(self.totals.values())

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
        self.totals[scope.salt] += len(blocks)
        insort(self._order, lease.worth)
        self._note_expiry(lease)
        self._emit(Leased(lease.id, len(blocks)))
        self._enforce_quota(scope.salt)
        if not lease.blocks and lease.id in self._leases:
            self._forget(lease)
        return lease

    def renew(self, lease: Lease, *, expires_at: float | None, value: float) -> None:
        """Other terms from now on, and no longer transient; one that has ended stays ended."""
        if lease.id in self._leases:
            with self._reordered(lease):
                lease.expires_at, lease.value, lease.transient = expires_at, value, False
            self._emit(Renewed(lease.id, expires_at, value))

    def end(self, lease: Lease, why: Literal["released", "expired", "continued"] = "released") -> None:
        """A second time does nothing."""
        if lease.id in self._leases:
            held = lease.blocks
            self._forget(lease)
            self._pool.release(held[lease.num_lent :])
            if lease.num_lent:
                lease.blocks = held[: lease.num_lent]
                self._outstanding[lease.id] = lease
            self._emit(Ended(lease.id, len(held), why))

    # Loans

    def lend(self, lease: Lease, num_blocks: int) -> None:
        """A table is going to run on the first `num_blocks` blocks: one count instead of one for each block, however
        long the state is."""
        lease.num_loans += 1
        lease.num_lent = max(lease.num_lent, num_blocks)

    def lend_again(self, lease: Lease) -> None:
        """A second table runs on what the first one borrowed."""
        lease.num_loans += 1

    def give_back(self, lease: Lease) -> None:
        lease.num_loans -= 1
        if not lease.num_loans:
            lease.num_lent = 0
            if self._outstanding.pop(lease.id, None) is not None:
                self._pool.release(lease.blocks)
                lease.blocks = array("i")

    def outstanding(self) -> Iterator[Lease]:
        """Leases that have ended and whose blocks somebody still runs on."""
        return iter(self._outstanding.values())

    def trim(self, lease: Lease, num_tokens: int) -> None:
        """Let go of everything past the first `num_tokens` tokens."""
        keep = -(-num_tokens // self._block_size)
        if lost := lease.blocks[keep:]:
            del lease.blocks[keep:]
            self._pool.release(lost)
            self._charge(lease, -len(lost))
        lease.num_computed = min(lease.num_computed, num_tokens)
        if not lease.blocks and lease.id in self._leases:
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
        leases = [self._leases[lease_id] for _, _, lease_id in self._order]
        if not self._can_free(leases, num_free - self._pool.num_free):
            return False
        before = [len(lease.blocks) for lease in leases]
        for spare_shared in (True, False):  # first what frees memory at once, then what others still hold
            for lease in leases:
                if self._pool.num_free < num_free:
                    self._shrink(lease, num_free, spare_shared)
        for lease, had in zip(leases, before, strict=True):
            if lost := had - len(lease.blocks):
                self._lost(lease, lost, "pressure")
        return True

    def _can_free(self, leases: list[Lease], wanted: int) -> bool:
        """Counts unshared tails, which is nearly always enough, before it counts every block that only leases hold."""
        refs = self._pool.ref_count
        found = 0
        for lease in leases:
            for block in reversed(lease.blocks[lease.num_lent :]):
                if found >= wanted or refs[block] > 1:
                    break
                found += 1
            if found >= wanted:
                return True
        held = Counter(block for lease in leases for block in lease.blocks[lease.num_lent :])
        return sum(refs[block] == count for block, count in held.items()) >= wanted

    def _shrink(self, lease: Lease, num_free: int, spare_shared: bool) -> None:
        refs = self._pool.ref_count
        while len(lease.blocks) > lease.num_lent and self._pool.num_free < num_free:
            if spare_shared and refs[lease.blocks[-1]] > 1:
                return
            self._pool.release((lease.blocks.pop(),))

    def _enforce_quota(self, salt: str) -> None:
        quota = self.quotas.get(salt, self.default_quota)
        if quota is None or self.totals[salt] <= quota:
            return
        for lease in [self._leases[lease_id] for _, _, lease_id in self._order]:
            surplus = self.totals[salt] - quota
            if surplus > 0 and lease.scope.salt == salt:
                lost = lease.blocks[max(len(lease.blocks) - surplus, lease.num_lent) :]
                del lease.blocks[len(lease.blocks) - len(lost) :]
                self._pool.release(lost)
                self._lost(lease, len(lost), "quota")

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
        present = lease.id in self._leases
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
        salt = lease.scope.salt
        self.totals[salt] += num_blocks
        if not self.totals[salt]:
            del self.totals[salt]

    def _forget(self, lease: Lease) -> None:
        """Out of the ledger, with nothing held."""
        del self._leases[lease.id]
        del self._order[bisect_left(self._order, lease.worth)]
        self._charge(lease, -len(lease.blocks))
        lease.blocks = array("i")
        lease.num_computed = 0
