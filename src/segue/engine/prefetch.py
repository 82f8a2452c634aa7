"""KV of a job that is about to come back: from a slow tier to the host's memory, while the job's tool still runs."""

from __future__ import annotations

import heapq
from array import array
from typing import NamedTuple

from segue.base.types import Scope
from segue.engine.sequence import Sequence
from segue.engine.tiering import TierDesk
from segue.kv import KVManager
from segue.policies import Job

_MOST_TOKENS = 1 << 24  # of all jobs that are awaited
_FEW = 64


class _Awaited(NamedTuple):
    job: Job
    num_turns: int  # that it had begun: with the next one it is back
    scope: Scope
    tokens: array[int]
    keys: list[int]
    num_blocks: int
    num_tokens: int  # that it counts for


class Prefetcher:
    """One time for each job: the last that was said. Bounded: jobs that end a turn when much is awaited are not."""

    def __init__(self, kv: KVManager, tiers: TierDesk) -> None:
        self._kv = kv
        self._tiers = tiers
        self._due: list[tuple[float, int]] = []
        self._awaited: dict[int, _Awaited] = {}
        self._number_of: dict[Job, int] = {}
        self._num_tokens = 0
        self._count = 0

    def expect(self, job: Job, sequence: Sequence, at: float) -> None:
        """The sequence has ended, and its job's next turn is expected soon after this time."""
        num_blocks = sequence.num_computed // self._kv.block_size
        self.forget(job)
        if not num_blocks or sequence.table is None or self._num_tokens + len(sequence.tokens) > _MOST_TOKENS:
            return
        scope, tokens, keys = sequence.turn.scope, sequence.tokens, sequence.table.keys
        self._add(_Awaited(job, job.num_turns, scope, tokens, keys, num_blocks, len(tokens)), at)

    def move(self, job: Job, at: float) -> None:
        """Expected at another time."""
        if (number := self._number_of.get(job)) is not None:
            self._add(self._awaited[number], at)

    def forget(self, job: Job) -> None:
        """It is back, or over."""
        if (number := self._number_of.pop(job, None)) is not None:
            self._num_tokens -= self._awaited.pop(number).num_tokens

    def next_at(self) -> float | None:
        while self._due and self._due[0][1] not in self._awaited:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def run(self, now: float) -> None:
        while (at := self.next_at()) is not None and at <= now:
            awaited = self._awaited[heapq.heappop(self._due)[1]]
            self.forget(awaited.job)
            if not awaited.job.is_over and awaited.job.num_turns == awaited.num_turns:
                self._fetch(awaited)

    def _add(self, awaited: _Awaited, at: float) -> None:
        self.forget(awaited.job)
        self._count += 1
        self._awaited[self._count] = awaited
        self._number_of[awaited.job] = self._count
        self._num_tokens += awaited.num_tokens
        heapq.heappush(self._due, (at, self._count))
        if len(self._due) > 2 * len(self._awaited) + _FEW:  # times of jobs that are awaited no longer
            self._due = [entry for entry in self._due if entry[1] in self._awaited]
            heapq.heapify(self._due)

    def _fetch(self, awaited: _Awaited) -> None:
        """What the device has lost of it."""
        kv = self._kv
        table = kv.open(awaited.tokens, awaited.scope, awaited.keys)
        num_found = len(kv.match(table, awaited.tokens).blocks)
        self._tiers.prefetch(kv.names(table, awaited.tokens, awaited.num_blocks)[num_found:])
        kv.close(table)
