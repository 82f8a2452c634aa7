"""The queue of those that hold no blocks."""

from __future__ import annotations

import heapq
from typing import Any

from segue.engine.sequence import Sequence

_FEW = 64


class WaitingQueue:
    """A heap by the policy's key; whoever leaves from the middle is skipped when it comes up. Of `fair_every` admissions one is
    for the sequence that waits longest."""

    def __init__(self, fair_every: int | None = None) -> None:
        self._heap: list[tuple[Any, int, Sequence]] = []
        self._by_age: list[tuple[Any, int, Sequence]] = []
        self._entries: dict[int, int] = {}  # sequence id -> the one entry of it that counts
        self._count = 0
        self._fair_every = fair_every
        self.num_admitted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, sequence: Sequence, key: tuple[Any, ...]) -> None:
        self._count += 1
        self._entries[sequence.id] = self._count
        self._push(self._heap, (key, self._count, sequence))
        if self._fair_every is not None:
            self._push(self._by_age, ((sequence.turn.arrived_at, sequence.id), self._count, sequence))

    def _push(self, heap: list[tuple[Any, int, Sequence]], entry: tuple[Any, int, Sequence]) -> None:
        heapq.heappush(heap, entry)
        if len(heap) > 2 * len(self._entries) + _FEW:  # those that are gone may never come up
            heap[:] = [entry for entry in heap if self._entries.get(entry[2].id) == entry[1]]
            heapq.heapify(heap)

    def peek(self) -> Sequence | None:
        if self._fair_every is not None and self.num_admitted % self._fair_every == self._fair_every - 1:
            return self._first(self._by_age)
        return self._first(self._heap)

    def admit(self, sequence: Sequence) -> None:
        """It runs."""
        self.remove(sequence)
        self.num_admitted += 1

    def remove(self, sequence: Sequence) -> None:
        """Does nothing if the sequence is not waiting."""
        self._entries.pop(sequence.id, None)
        if not self._entries:  # nothing waits: what is left are entries of those that are gone
            self._heap.clear()
            self._by_age.clear()

    def _first(self, heap: list[tuple[Any, int, Sequence]]) -> Sequence | None:
        while heap:
            _, entry, sequence = heap[0]
            if self._entries.get(sequence.id) == entry:
                return sequence
            heapq.heappop(heap)
        return None
