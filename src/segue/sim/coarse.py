"""An engine with few events: turns share a device whose step takes longer the more of them there are.

    steps   ──┬───────────┬────────┬──▶  a counter that all running turns share; it goes on by one in `step_seconds`
              │           │        │
           begins      others   has all of its tokens: at the step that was known when it began

A turn is over when the counter has reached a number, so only the next end needs an event, however often the pace changes.
While a prompt is computed, as far as that takes longer than the step it is part of, the counter stands still.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Any

from segue.sim.jobs import FleetJob
from segue.sim.linear import CoarseCosts
from segue.sim.memory import CoarseMemory
from segue.sim.slow import Link

BOTH, PREFILL, DECODE = "both", "prefill", "decode"
_NEARLY = 1e-6  # of a step, which floats may be wrong by
_BEHIND = 1 << 60  # in rank, all whose KV is there


class Agenda:
    """What is to happen, in order of time and then of when it was found out."""

    __slots__ = ("_count", "heap")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._count = count()

    def add(self, at: float, act: Callable[[float, Any], None], what: Any = None) -> None:
        heapq.heappush(self.heap, (at, next(self._count), act, what))


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


@dataclass(frozen=True, slots=True)
class EngineLimits:
    max_running: int
    max_step_tokens: int
    network: Link
    loads: bool  # from a remote store, what is not there


class CoarseEngine:
    """`role`: both, or prompts only (a turn ends with its first token), or what comes after, with KV that others have made."""

    def __init__(
        self,
        number: int,
        role: str,
        costs: CoarseCosts,
        memory: CoarseMemory,
        limits: EngineLimits,
        agenda: Agenda,
        counts: Counts,
        ended: Callable[[CoarseEngine, FleetJob, float], None],
    ) -> None:
        self.number = number
        self.role = role
        self.memory = memory
        self.alive = True
        self.load = 0  # turns, running and not
        self.busy_seconds = 0.0
        self.row_seconds = 0.0  # of all turns that ran
        self._costs = costs
        self._limits = limits
        self._agenda = agenda
        self._counts = counts
        self._ended = ended
        self._at = 0.0  # up to when all is worked out
        self._order = count()
        self._waiting: list[tuple[int, int, FleetJob]] = []  # a heap: by rank, then by arrival
        self._loading: dict[FleetJob, int] = {}  # with blocks, into which KV comes; the load's number
        self._running: list[tuple[float, int, FleetJob]] = []  # a heap: the step at which each is over
        self._firsts: list[tuple[float, int, FleetJob]] = []  # the step at which each has its first token
        self._steps = self._stall = self._step_seconds = 0.0
        self._slack = self._gathers_until = 0.0  # what is left of the next step's, and when that begins
        self._rows = self._context = 0
        self._due = inf  # the next event's time
        self._link_free_at = 0.0

    @property
    def num_running_blocks(self) -> int:
        return sum(job.blocks for _, _, job in self._running) + sum(job.blocks for job in self._loading)

    def submit(self, job: FleetJob, now: float) -> None:
        """First come, first served. With leases, whose KV is here goes before the others, and older jobs before newer ones."""
        self.load += 1
        rank = 0
        if self.memory.lease_seconds:
            rank = job.number if self.memory.expect(job.number) else job.number + _BEHIND
        heapq.heappush(self._waiting, (rank, next(self._order), job))
        self._advance(now)
        self._admit(now)
        self._schedule(now)

    def fail(self, now: float) -> list[FleetJob]:
        """It stops, and what it had is lost: the turns that were here."""
        self._advance(now)
        if self.role is not DECODE:
            self._counts.num_recomputed += sum(max(job.prompt - job.num_kv, 0) for _, _, job in self._running)
        lost = [job for _, _, job in sorted(self._running)] + [*self._loading]
        lost += [job for _, _, job in sorted(self._waiting)]
        for kept in (self._running, self._firsts, self._loading, self._waiting):
            kept.clear()
        self.memory.clear()
        self.alive = False
        self.load = self._rows = self._context = 0
        self._stall, self._due, self._link_free_at = 0.0, inf, 0.0
        return lost

    # Time

    def _advance(self, now: float) -> None:
        passed, self._at = now - self._at, now
        if not self._rows:
            return
        self.busy_seconds += passed
        self.row_seconds += passed * self._rows
        if self._stall:
            passed -= self._stall
            if passed <= 0:
                self._stall = -passed
                return
            self._stall = 0.0
        steps = self._steps = self._steps + passed / self._step_seconds
        firsts = self._firsts
        while firsts and firsts[0][0] <= steps + _NEARLY:
            at, _, job = heapq.heappop(firsts)
            job.first_at = now - (steps - at) * self._step_seconds

    def _schedule(self, now: float) -> None:
        """An event that comes too early is not taken back: it finds nothing to do, and looks again."""
        if not self._running:
            return
        at = now + max(self._stall + (self._running[0][0] - self._steps) * self._step_seconds, 0.0)
        if at < self._due:
            self._due = at
            self._agenda.add(at, self._wake)

    def _wake(self, now: float, _: Any) -> None:
        if now != self._due:
            return  # one that came before it was found out later
        self._due = inf
        self._advance(now)
        running, over = self._running, self._steps + _NEARLY
        if running[0][0] <= over:
            while running and running[0][0] <= over:
                self._end(heapq.heappop(running)[2], now)
            self._step_seconds = self._costs.steps[self._rows] + self._context * self._costs.context_token
            if self._waiting:
                self._admit(now)
        self._schedule(now)

    # Turns

    def _admit(self, now: float) -> None:
        """In order, and nobody past one that does not fit."""
        while self._waiting:
            job, num_others = self._waiting[0][2], self._rows + len(self._loading)
            if num_others >= self._limits.max_running:
                return
            found = self.memory.seat(job, now, num_others)
            if found is None:
                return
            heapq.heappop(self._waiting)
            self._begin(job, found, now)

    def _begin(self, job: FleetJob, found: int, now: float) -> None:
        counts, prompt = self._counts, job.prompt
        if self.role is DECODE:
            loaded = prompt - found
        else:
            loaded = 0
            if self._limits.loads:
                stored = max(job.num_kv, counts.stored) if job.common == prompt else job.num_kv
                loaded = max(min(stored, prompt - 1) - found, 0)
            missing = prompt - found - loaded
            counts.num_prompt += prompt
            counts.num_found += found
            counts.num_loaded += loaded
            counts.num_computed += missing
            if (lost := job.num_kv - found - loaded) > 0:
                counts.num_recomputed += lost
        counts.num_moved += loaded
        if loaded:
            self._load(job, found, loaded, now)
        else:
            self._start(job, found, now)

    def _load(self, job: FleetJob, found: int, loaded: int, now: float) -> None:
        """One thing at a time comes over an engine's own link."""
        link = self._limits.network
        done = max(now, self._link_free_at) + loaded * self._costs.token_bytes / link.bytes_per_second
        self._link_free_at = done
        number = self._loading[job] = next(self._order)
        self._agenda.add(done + link.latency_seconds, self._arrive, (job, found + loaded, number))

    def _arrive(self, now: float, what: tuple[FleetJob, int, int]) -> None:
        job, there, number = what
        if self._loading.get(job) != number:
            return  # the engine has failed since
        del self._loading[job]
        self._advance(now)
        self._start(job, there, now)
        self._schedule(now)

    def _start(self, job: FleetJob, there: int, now: float) -> None:
        """With KV for `there` of its tokens."""
        costs, prompt = self._costs, job.prompt
        missing = prompt - there
        wait = 0.5 if self._rows else 0.0  # steps: the one that runs has half of it to go, in the mean
        if missing > 0:
            self._stall += self._beyond(missing * costs.prompt_token, now)
            self._stall += (prompt * (prompt + 1) - there * (there + 1)) * 0.5 * costs.pair
            wait += missing // self._limits.max_step_tokens
        self._rows += 1
        job.weight = prompt + job.output // 2
        self._context += job.weight
        before, self._step_seconds = self._step_seconds, costs.steps[self._rows] + self._context * costs.context_token
        if self._rows > 1:  # the step that runs is without it
            self._stall -= 0.5 * (self._step_seconds - before)
        steps = 1 if self.role is PREFILL else job.output - (self.role is DECODE)
        number = next(self._order)
        heapq.heappush(self._running, (self._steps + wait + steps, number, job))
        if self.role is not DECODE:
            heapq.heappush(self._firsts, (self._steps + wait + 1, number, job))

    def _beyond(self, seconds: float, now: float) -> float:
        """What products take beyond the time in which a step reads its weights anyway. Turns that come while a step runs are in
        the next one together, and its slack is there once."""
        if now >= self._gathers_until:
            self._slack = self._costs.slack[self._rows]
            self._gathers_until = now + self._stall + 0.5 * self._step_seconds if self._rows else now
        beyond = seconds - self._slack
        self._slack = max(-beyond, 0.0)
        return max(beyond, 0.0)

    def _end(self, job: FleetJob, now: float) -> None:
        self.load -= 1
        self._rows -= 1
        self._context -= job.weight
        if self.role is PREFILL:
            num_tokens, is_trunk = job.prompt, job.common == job.prompt
        else:
            num_tokens, is_trunk = job.prompt + job.output - 1, job.answers_as_usual
        self.memory.release(job, num_tokens, now, is_trunk=is_trunk, is_last=job.is_last)
        self._ended(self, job, now)
