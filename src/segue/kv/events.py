"""What happened to KV memory, for metrics, routers and dashboards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Stored:
    """A full block's content can now be found by others."""

    block: int
    key: int


@dataclass(frozen=True, slots=True)
class Removed:
    """Cached content can no longer be found: its block is reused, or the index was emptied."""

    block: int
    key: int | None


@dataclass(frozen=True, slots=True)
class Leased:
    lease_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """A lease has other terms from now on."""

    lease_id: int
    expires_at: float | None
    value: float


@dataclass(frozen=True, slots=True)
class Revoked:
    """A lease lost `num_blocks` from its tail: other work needed memory, or its tenant was over quota."""

    lease_id: int
    num_blocks: int
    why: Literal["pressure", "quota"] = "pressure"


@dataclass(frozen=True, slots=True)
class Ended:
    """A lease gave up the `num_blocks` it still held."""

    lease_id: int
    num_blocks: int
    why: Literal["released", "expired", "continued"]


KVEvent = Stored | Removed | Leased | Renewed | Revoked | Ended
Observer = Callable[[KVEvent], None]
