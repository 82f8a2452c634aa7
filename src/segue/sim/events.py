"""What happens to a fleet, in order, and what is counted of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappush
from itertools import count
from typing import Any


class Agenda:
    """What is to happen, in order of time and then of when it was found out."""

    __slots__ = ("_count", "heap")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._count = count()

    def add(self, at: float, act: Callable[[float, Any], None], what: Any = None) -> None:
        heappush(self.heap, (at, next(self._count), act, what))


@dataclass(slots=True)
class Counts:
    """Of a whole fleet. Tokens of prompts: found where they are computed, loaded there from a remote store, and computed."""

    num_prompt: int = 0
    num_found: int = 0
    num_loaded: int = 0
    num_computed: int = 0
    num_recomputed: int = (
        0  # of those, the ones that had been before: by the job's last turn, or one that was cut short
    )
    num_moved: int = 0  # over the network, whatever for
    num_failures: int = 0
    num_resubmitted: int = 0
    stored: int = 0  # of the trunk, in a store that outlives engines
