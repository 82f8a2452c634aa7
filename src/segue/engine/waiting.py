"""The queue of those that hold no blocks."""

from __future__ import annotations

import heapq
from typing import Any

from segue.engine.sequence import Sequence


class WaitingQueue:
    """A heap by the policy's key; whoever leaves from the middle is skipped when it comes up."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[Any, ...], int, Sequence]] = []
        self._entries: dict[int, int] = {}  # sequence id -> the one entry of it that counts
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, sequence: Sequence, key: tuple[Any, ...]) -> None:
        self._count += 1
        self._entries[sequence.id] = self._count
        heapq.heappush(self._heap, (key, self._count, sequence))

    def peek(self) -> Sequence | None:
        while self._heap:
            _, entry, sequence = self._heap[0]
            if self._entries.get(sequence.id) == entry:
                return sequence
            heapq.heappop(self._heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        """Does nothing if the sequence is not waiting."""
        self._entries.pop(sequence.id, None)
