"""An engine with few events: turns share a device whose step takes longer the more of them there are.

    steps   ──┬───────────┬────────┬──▶  a counter that all running turns share; it goes on by one in `step_seconds`
              │           │        │
           begins      others   has all of its tokens: at the step that was known when it began

A turn is over when the counter has reached a number, so only the next end needs an event, however often the pace changes.
A turn joins when the step that runs is over, if that has tokens left for its prompt. While prompts are computed, as far as that
takes longer than the step they are part of, the counter stands still.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import ceil, floor, inf
from typing import Any

from segue.sim.events import Agenda, Counts
from segue.sim.jobs import FleetJob
from segue.sim.linear import CoarseCosts
from segue.sim.memory import CoarseMemory
from segue.sim.slow import Link

BOTH, PREFILL, DECODE = "both", "prefill", "decode"
_NEARLY = 1e-6  # of a step, which floats may be wrong by
_BEHIND = 1 << 60  # in rank, all whose KV is there


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
        self._steps = self._step_seconds = 0.0
        self._stall = 0.0  # seconds until the counter goes on
        self._joins = 0.0  # the step that turns which came last are in first
        self._prompts = self._slack = 0.0  # what that one takes longer for their prompts, and has time for besides
        self._budget = limits.max_step_tokens  # tokens that it can still compute; below 0, later ones cannot
        self._rows = self._context = 0
        self._due = inf  # the next event's time
        self._link_free_at = 0.0

    @property
    def num_running_blocks(self) -> int:
        return sum(job.blocks for _, _, job in self._running) + sum(job.blocks for job in self._loading)

    def submit(self, job: FleetJob, now: float) -> None:
        """First come, first served. With leases, whose KV is here goes before the others, and older jobs before newer ones."""
        self.load += 1
        self._advance(now)
        rank = 0
        if self.memory.lease_seconds:
            rank = job.number if self.memory.expect(job.number) else job.number + _BEHIND
        if self._waiting:
            heappush(self._waiting, (rank, next(self._order), job))
            self._admit(now)
        elif not self._seat(job, now):
            self._waiting.append((rank, next(self._order), job))
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
        self._stall = self._prompts = self._link_free_at = 0.0
        self._due = inf
        return lost

    # Time

    def _advance(self, now: float) -> None:
        passed, self._at = now - self._at, now
        if not self._rows:
            return
        self.busy_seconds += passed
        self.row_seconds += passed * self._rows
        passed -= self._stall
        if self._prompts and (ahead := (self._joins - self._steps) * self._step_seconds) < passed:
            self._steps = self._joins
            passed -= ahead
            self._note_first_tokens(now - passed)
            passed -= self._prompts
            self._prompts = 0.0
        if passed < 0:
            self._stall = -passed
            return
        self._stall = 0.0
        self._steps += passed / self._step_seconds
        if self._firsts:
            self._note_first_tokens(now)

    def _note_first_tokens(self, now: float) -> None:
        firsts, steps = self._firsts, self._steps
        while firsts and firsts[0][0] <= steps + _NEARLY:
            at, _, job = heappop(firsts)
            job.first_at = now - (steps - at) * self._step_seconds

    def _schedule(self, now: float) -> None:
        """An event that comes too early is not taken back: it finds nothing to do, and looks again."""
        if not self._running:
            return
        step = self._running[0][0]
        if self._waiting and self._budget <= 0 and self._steps + _NEARLY < self._joins < step:
            step = self._joins  # then the next step has room for prompts again
        left = self._stall + (step - self._steps) * self._step_seconds
        if step > self._joins:
            left += self._prompts
        at = now + left if left > 0 else now
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
                self._end(heappop(running)[2], now)
            self._step_seconds = self._costs.steps[self._rows] + self._context * self._costs.context_token
        if self._waiting:
            self._admit(now)
        self._schedule(now)

    def _look_ahead(self) -> None:
        """To the step that a turn which comes now is in first: the next one, or if nothing runs this one."""
        most = self._limits.max_step_tokens
        if self._rows:
            joins = floor(self._steps + _NEARLY) + 1.0
            if joins == self._joins:
                return
            left = min(min(self._budget, 0) + int(joins - self._joins) * most, most)
        else:
            joins = self._steps = float(ceil(self._steps - _NEARLY))
            left = most
        self._joins = joins
        self._budget = left - self._rows
        self._slack = self._costs.slack[self._rows]
        self._stall += self._prompts
        self._prompts = 0.0

    # Turns

    def _admit(self, now: float) -> None:
        """In order, and nobody past one that does not fit."""
        while self._waiting and self._seat(self._waiting[0][2], now):
            heappop(self._waiting)

    def _seat(self, job: FleetJob, now: float) -> bool:
        num_others = self._rows + len(self._loading)
        if num_others >= self._limits.max_running:
            return False
        if self._budget <= 0:
            self._look_ahead()
            if self._budget <= 0:
                return False
        found = self.memory.seat(job, now, num_others)
        if found is None:
            return False
        self._begin(job, found, now)
        return True

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
            self._start(job, found)

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
        self._start(job, there)
        self._schedule(now)

    def _start(self, job: FleetJob, there: int) -> None:
        """With KV for `there` of its tokens. It joins when the step that runs is over."""
        self._look_ahead()
        costs, joins, prompt = self._costs, self._joins, job.prompt
        first = joins + (self.role is not DECODE)  # the step with which it has its first token
        missing = prompt - there
        if missing > 0:
            self._prompts += self._beyond(missing * costs.prompt_token)
            self._prompts += (prompt * (prompt + 1) - there * (there + 1)) * 0.5 * costs.pair
            self._budget -= missing
            if self._budget < 0:
                first += -(self._budget // self._limits.max_step_tokens)
        self._rows += 1
        job.weight = prompt + job.output // 2
        self._context += job.weight
        before, self._step_seconds = self._step_seconds, costs.steps[self._rows] + self._context * costs.context_token
        self._stall -= (joins - self._steps) * (self._step_seconds - before)  # what is left of this step is without it
        number = next(self._order)
        if self.role is not DECODE:
            heappush(self._firsts, (first, number, job))
        heappush(self._running, (first if self.role is PREFILL else first + job.output - 1, number, job))

    def _beyond(self, seconds: float) -> float:
        """What products take beyond the time in which a step reads its weights anyway. Turns that come while a step runs are in
        the next one together, and its slack is there once."""
        if seconds <= self._slack:
            self._slack -= seconds
            return 0.0
        seconds -= self._slack
        self._slack = 0.0
        return seconds

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
