"""What tiers have for a sequence, and what is on its way to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from segue.engine.sequence import Sequence
from segue.kv import BlockTable
from segue.kv.tiers.courier import Look


@dataclass(slots=True, eq=False)
class Load:
    """Blocks `at … stop-1` of a sequence that are still to come."""

    sequence: Sequence
    table: BlockTable
    names: list[bytes]
    at: int
    stop: int
    num_held: int
    moved_at: float
    first: int = field(init=False)
    asked: set[bytes] = field(default_factory=set)
    pinned: set[bytes] = field(default_factory=set)
    is_over: bool = False

    def __post_init__(self) -> None:
        self.first = self.at

    @property
    def num_blocks(self) -> int:
        """That have come."""
        return self.at - self.first


class Asked(NamedTuple):
    """A tier that is shared was asked what it has for a sequence."""

    looks: list[Look]
    until: float


class Offer(NamedTuple):
    """Blocks that tiers have for a sequence, and how many of them are to be loaded."""

    num_there: int
    num_wanted: int
    num_looked: int = 0  # for how many blocks something was looked for
    found: tuple[int, ...] = ()  # of those: in the host, in the first slow tier, …


NO_OFFER = Offer(0, 0)


def worth_loading(costs: list[float], computing: float) -> int:
    """For how many blocks, from the first on, loading gains most; `computing` is the seconds for one. All, while that is not
    known."""
    if not computing:
        return len(costs)
    gain = best = 0.0
    count = 0
    for number, loading in enumerate(costs, 1):
        gain += computing - loading
        if gain >= best:
            best, count = gain, number
    return count
