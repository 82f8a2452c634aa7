"""What happened to KV memory, for metrics, routers and dashboards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


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
class Revoked:
    """A lease lost `num_blocks` from its tail because running work needed memory."""

    lease_id: int
    num_blocks: int


KVEvent = Stored | Removed | Leased | Revoked
Observer = Callable[[KVEvent], None]
