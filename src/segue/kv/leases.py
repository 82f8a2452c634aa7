"""Holds on finished work: revocable, and shrinking from the tail."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from segue.base.types import Scope


@dataclass(slots=True)
class Lease:
    """Keeps the KV of `tokens` from being reused.

    `blocks` shrinks from its end when memory is needed; `tokens` never does, so that what was lost can be recomputed.
    `value` is per block: what the policy thinks losing one would cost.
    """

    id: int
    scope: Scope
    job: str | None
    blocks: list[int]
    tokens: array[int]
    num_computed: int
    expires_at: float | None
    value: float


class LeaseLedger:
    """All leases, and the order in which memory is taken back from them."""

    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    @property
    def num_blocks(self) -> int:
        """Blocks under lease, counted once per lease that holds them."""
        return sum(len(lease.blocks) for lease in self)

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def add(self, lease: Lease) -> None:
        self._leases[lease.id] = lease

    def remove(self, lease_id: int) -> Lease | None:
        return self._leases.pop(lease_id, None)

    def by_worth(self, now: float) -> list[Lease]:
        """Expired ones first, then the least valuable, then the oldest."""

        def worth(lease: Lease) -> tuple[bool, float, int]:
            alive = lease.expires_at is None or lease.expires_at > now
            return (alive, lease.value, lease.id)

        return sorted((lease for lease in self if lease.blocks), key=worth)
