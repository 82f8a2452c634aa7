"""Plays a workload on an engine in this process: the real one in real time, or the simulated one in its own."""

from __future__ import annotations

import heapq
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from segue.base.clock import VirtualClock
from segue.base.errors import InvalidRequest, SegueError
from segue.base.types import BeamParams, SamplingParams
from segue.bench.workload import Job, Run, Texts, Turn, Workload
from segue.engine import EngineCore
from segue.engine.outputs import Delta
from segue.engine.request import Request
from segue.sim.engine import SimulatedEngine


class TurnRecord(NamedTuple):
    """One request as it was seen from outside; seconds since the workload's start."""

    job: str
    turn: int  # from 0
    asked_at: float
    first_token_at: float
    ended_at: float
    num_prompt: int
    num_output: int
    num_reused: int
    num_lost: int  # tokens that had KV when the job's last turn ended, and had to be computed again

    @property
    def seconds(self) -> float:
        return self.ended_at - self.asked_at


class Occupancy(NamedTuple):
    """Blocks, by what they are for; at some time. What is leased and runs besides counts as leased."""

    at: float
    running: int
    leased: int
    cached: int
    free: int


@dataclass(slots=True)
class Played:
    """What came of a workload."""

    turns: list[TurnRecord] = field(default_factory=list)
    durations: dict[str, float] = field(default_factory=dict)  # of jobs that have ended, by id
    occupancy: list[Occupancy] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # jobs that ended with an error
    num_computed: int = 0  # tokens
    num_recomputed: int = 0  # of those, again
    num_preemptions: int = 0
    num_events: int = 0
    wasted_pin_block_seconds: float = 0.0
    used_pin_block_seconds: float = 0.0
    wall_seconds: float = 0.0  # of the workload's own time


class Pace(Protocol):
    """Time as a player meets it."""

    def now(self) -> float: ...
    def sleep_until(self, at: float) -> None: ...


class RealPace:
    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, at: float) -> None:
        time.sleep(max(at - time.monotonic(), 0.0))


class VirtualPace:
    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def now(self) -> float:
        return self._clock.now()

    def sleep_until(self, at: float) -> None:
        self._clock.advance(max(at - self._clock.now(), 0.0))


@dataclass(slots=True, eq=False)
class _Going:
    """A job under way."""

    job: Job
    number: int
    began_at: float
    said: array[int] = field(default_factory=lambda: array("i"))
    at: int = 0  # its turn
    num_prompt: int = 0
    num_kv: int = 0  # of the conversation, when the last turn ended
    seed: int = 0  # of its last request
    searches: bool = False  # this turn does
    asked_at: float = 0.0
    first_token_at: float | None = None

    @property
    def turn(self) -> Turn:
        return self.job.turns[self.at]


class Player:
    """One heap of what is to happen, in order of time and then of when it was found out."""

    def __init__(
        self,
        workload: Workload,
        engine: EngineCore,
        *,
        pace: Pace | None = None,
        texts: Texts | None = None,
        turn_seconds: float = 0.0,
        sample_seconds: float | None = None,
        progress: Callable[[int, int], None] | None = None,
        step: Callable[[], list[Delta]] | None = None,
    ) -> None:
        """`turn_seconds`: what a turn takes besides the engine, on its way there and back. `sample_seconds`: how often blocks are
        counted by what they are for. `progress` is told how many jobs of how many have ended. `step` takes the engine's, if
        somebody wants to watch them."""
        is_simulated = isinstance(engine, SimulatedEngine)
        self._workload = workload
        self._engine = engine
        self._answers = engine.executor.answers if isinstance(engine, SimulatedEngine) else None
        self._pace: Pace = pace or (VirtualPace(engine.clock) if isinstance(engine, SimulatedEngine) else RealPace())
        self._texts = texts or Texts(32_000 if is_simulated else 250)
        self._turn_seconds = turn_seconds
        self._sample_seconds = sample_seconds
        self._progress = progress
        self._step = step or engine.step
        self._events: list[tuple[float, int, _Going]] = []
        self._count = 0
        self._waiting: deque[Job] = deque()  # of a closed loop
        self._under_way: dict[str, _Going] = {}
        self._num_requests = 0
        self._began = 0.0
        self._next_sample = 0.0
        self.played = Played()

    def play(self) -> Played:
        engine, pace, played = self._engine, self._pace, self.played
        self._began = pace.now()
        before = engine.stats()
        self._admit_first()
        while self._events or self._under_way:
            self._submit_due(pace.now())
            if not engine.has_work:
                self._sleep()
                continue
            self._take(self._step())
            if self._sample_seconds is not None:
                self._sample()
        after = engine.stats()
        engine.check()
        played.wall_seconds = pace.now() - self._began
        played.num_preemptions = after.num_preemptions - before.num_preemptions
        played.num_events += after.num_steps - before.num_steps
        self._count_tokens()
        for sums in engine.decision_sums().values():
            played.wasted_pin_block_seconds += sums.wasted_block_seconds
            played.used_pin_block_seconds += sums.used_block_seconds
        return played

    # Time

    def _admit_first(self) -> None:
        jobs, concurrency = self._workload.jobs, self._workload.concurrency
        if concurrency is None:
            for job in jobs:
                self._begin(job, self._began + job.at)
            return
        self._waiting.extend(jobs[concurrency:])
        for job in jobs[:concurrency]:
            self._begin(job, self._began)

    def _begin(self, job: Job, at: float) -> None:
        going = _Going(job, self._count, at)
        going.asked_at = at
        self._push(at + self._turn_seconds / 2, going)

    def _push(self, at: float, going: _Going) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, going))

    def _sleep(self) -> None:
        """Until something happens, or the engine wants to look at what it keeps."""
        if not self._events:
            return
        until = self._events[0][0]
        if (wait := self._engine.expire()) is not None:
            until = min(until, self._pace.now() + max(wait, 1e-6))
        self._pace.sleep_until(until)

    def _submit_due(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            self.played.num_events += 1
            self._ask(heapq.heappop(self._events)[2])

    # Turns

    def _ask(self, going: _Going) -> None:
        turn, said = going.turn, going.said
        if turn.keep is not None:
            del said[turn.keep :]
            going.num_kv = min(going.num_kv, len(said))
        self._texts.append(said, turn.added)
        going.num_prompt, going.first_token_at, going.searches = len(said), None, turn.beam_width > 0
        self._num_requests += 1
        request_id = f"{going.job.id}.{going.at}"
        try:
            self._engine.submit(self._request(going, request_id))
        except SegueError as error:
            self._fail(going, str(error))
            return
        self._under_way[request_id] = going

    def _request(self, going: _Going, request_id: str) -> Request:
        turn, is_last = going.turn, going.at == len(going.job.turns) - 1
        more = {"request_id": request_id, "job_id": going.job.id, "is_last_step": is_last, "detokenize": False}
        if turn.beam_width:
            beam = BeamParams(width=turn.beam_width, max_tokens=turn.num_output, ignore_eos=True)
            return Request(going.said, beam=beam, **more)  # type: ignore[arg-type]
        seed = going.seed = self._num_requests
        if self._answers is not None:
            self._answers[seed] = self._texts.tokens(turn.answer or Run(2**40 + seed, 0, turn.num_output))
        params = SamplingParams(max_tokens=turn.num_output, temperature=0.0, ignore_eos=True, seed=seed)
        return Request(going.said, params, **more)  # type: ignore[arg-type]

    def _take(self, deltas: list[Delta]) -> None:
        under_way, now = self._under_way, self._pace.now()
        self.played.num_events += len(deltas)
        for delta in deltas:
            going = under_way.get(delta.request_id)
            if going is None:
                continue
            if going.first_token_at is None:
                going.first_token_at = now
            if not going.searches:
                going.said.extend(delta.token_ids)
            if delta.finish_reason is not None:
                del under_way[delta.request_id]
                if delta.error is not None:
                    self._fail(going, str(delta.error))
                else:
                    self._end_turn(going, delta)

    def _end_turn(self, going: _Going, delta: Delta) -> None:
        now, turn, half = self._pace.now(), going.turn, self._turn_seconds / 2
        reused = delta.reuse.inherited if delta.reuse is not None else 0
        assert going.first_token_at is not None
        record = TurnRecord(
            going.job.id,
            going.at,
            going.asked_at - self._began,
            going.first_token_at + half - self._began,
            now + half - self._began,
            going.num_prompt,
            turn.num_output,
            reused,
            max(going.num_kv - reused, 0),
        )
        self.played.turns.append(record)
        going.num_kv = len(going.said) - (0 if turn.beam_width else 1)
        if self._answers is not None:
            self._answers.pop(going.seed, None)
        going.at += 1
        if going.at < len(going.job.turns):
            going.asked_at = now + half + turn.gap_seconds
            self._push(going.asked_at + half, going)
        else:
            self.played.durations[going.job.id] = now + half - going.began_at
            self._ended()

    def _fail(self, going: _Going, why: str) -> None:
        self.played.failed[going.job.id] = why
        self._ended()

    def _ended(self) -> None:
        if self._waiting:
            self._begin(self._waiting.popleft(), self._pace.now())
        if self._progress is not None:
            self._progress(len(self.played.durations) + len(self.played.failed), len(self._workload.jobs))

    # Counts

    def _sample(self) -> None:
        now = self._pace.now() - self._began
        if now >= self._next_sample:
            assert self._sample_seconds is not None
            self._next_sample = now + self._sample_seconds
            self.played.occupancy.append(occupancy(self._engine, now))

    def _count_tokens(self) -> None:
        """What was computed twice: what jobs had lost when they came back, and what was lost by preemption."""
        played = self.played
        once = sum(turn.num_prompt - turn.num_reused + turn.num_output - 1 for turn in played.turns)
        lost = sum(turn.num_lost for turn in played.turns)
        if isinstance(self._engine, SimulatedEngine) and not any(
            turn.beam_width for job in self._workload.jobs for turn in job.turns
        ):
            played.num_computed = self._engine.executor.num_computed
            lost += max(played.num_computed - once, 0)
        else:
            played.num_computed = once
        played.num_recomputed = lost


def occupancy(engine: EngineCore, at: float) -> Occupancy:
    kv = engine.kv
    used, cached = kv.num_blocks - kv.num_free, kv.count_cached()
    leased = len({block for lease in kv.leases for block in lease.blocks})
    return Occupancy(at, used - leased, leased, cached, kv.num_free - cached)


def check_fits(workload: Workload, engine: EngineCore) -> None:
    longest = engine.config.max_sequence_len
    if workload.max_tokens > longest:
        raise InvalidRequest("workload", f"a sequence of {workload.max_tokens} tokens is over the engine's {longest}")
