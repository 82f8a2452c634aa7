"""Many engines behind a router: a thousand of them and a million jobs in minutes (docs/scale.md)."""

from __future__ import annotations

import heapq
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from segue.base.errors import InvalidRequest
from segue.sim.coarse import BOTH, DECODE, PREFILL, CoarseEngine, EngineLimits
from segue.sim.costs import StepCosts
from segue.sim.events import Agenda, Counts
from segue.sim.jobs import FleetJob, JobShape
from segue.sim.linear import CoarseCosts
from segue.sim.memory import CoarseMemory
from segue.sim.routers import ROUTERS, Router, check_router
from segue.sim.slow import Link

CARD = Link(50e9, 2e-4)  # 400 Gbit/s, for each engine


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """`blocks` are each engine's. `split`: the share of engines that only prefill. `mtbf` and `repair`: seconds between two
    failures of an engine, in the mean, and until it is back; None: none fails. `remote_tier`: a store that outlives engines has
    all KV."""

    engines: int
    blocks: int
    router: str = "prefix"
    block_size: int = 16
    max_running: int = 256
    max_step_tokens: int = 2048
    choices: int = 2  # engines that are drawn, to take the least loaded of
    overload: float = 4.0  # times as many turns as at another are too many
    lease_seconds: float = 10.0
    split: float = 0.0
    mtbf: float | None = None
    repair: float = 600.0
    remote_tier: bool = False
    network: Link = CARD
    turn_seconds: float = 0.008  # of a turn on its way there and back
    seed: int = 0

    def __post_init__(self) -> None:
        check_router(self.router)
        for name in ("engines", "blocks", "block_size", "max_running", "max_step_tokens", "choices"):
            if getattr(self, name) < 1:
                raise InvalidRequest(name, f"must be at least 1, got {getattr(self, name)}")
        if self.max_running > self.max_step_tokens:
            raise InvalidRequest("max_running", f"{self.max_running} is over max_step_tokens={self.max_step_tokens}")
        for name in ("mtbf", "repair", "lease_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InvalidRequest(name, f"must be seconds above 0, got {value}")
        if not 0 <= self.turn_seconds < float("inf"):
            raise InvalidRequest("turn_seconds", f"must be at least 0, got {self.turn_seconds}")
        if not 1 <= self.overload < float("inf"):
            raise InvalidRequest("overload", f"must be at least 1, got {self.overload}")
        if not 0 <= self.split < 1:
            raise InvalidRequest("split", f"must be at least 0 and below 1, got {self.split}")
        if self.split and self.engines < 2:
            raise InvalidRequest("split", "takes at least two engines")

    @property
    def num_prefill(self) -> int:
        return min(max(round(self.engines * self.split), 1), self.engines - 1) if self.split else 0


@dataclass(frozen=True, slots=True)
class FleetReport:
    """Seconds are simulated ones. Shares of the tokens of all prompts, resubmitted ones again."""

    router: str
    num_jobs: int  # that have ended
    num_turns: int
    seconds: float
    job_seconds: dict[str, float]
    ttft_seconds: dict[str, float]
    found_share: float  # where the turn ran
    loaded_share: float  # over the network from a remote store
    computed_tokens: int
    recomputed_tokens: int
    moved_bytes: float
    busy_share: float  # of the engines' time, a turn ran
    imbalance: float  # busy time of the busiest engine, as a multiple of the mean
    turns_running: float  # at an engine, in the mean
    num_failures: int
    num_resubmitted: int
    num_events: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class _Seen:
    jobs: array[float] = field(default_factory=lambda: array("d"))
    first_tokens: array[float] = field(default_factory=lambda: array("d"))


class Fleet:
    """One run. Jobs go through it once, in order of arrival."""

    def __init__(self, config: FleetConfig, costs: StepCosts, shape: JobShape) -> None:
        longest = -(-shape.max_tokens // config.block_size)
        if config.blocks < 2 * longest + 2:
            raise InvalidRequest("blocks", f"must be at least {2 * longest + 2}, for the longest context twice")
        self.config = config
        self.shape = shape
        self.counts = Counts()
        self.num_events = 0
        self.now = 0.0
        self._agenda = Agenda()
        self._seen = _Seen()
        self._jobs: Iterator[FleetJob] = iter(())
        self._num_under_way = 0
        self._homeless: deque[FleetJob] = deque()  # turns that no engine is alive for
        self._failures = random.Random(f"failures {config.seed}")
        self._token_bytes = costs.kv_bytes
        self.engines = self._build(costs)
        prefill = config.num_prefill
        self._decoding = self._router(self.engines[prefill:])
        self._prefilling = self._router(self.engines[:prefill]) if prefill else None

    def _build(self, costs: StepCosts) -> list[CoarseEngine]:
        config = self.config
        coarse = CoarseCosts.of(costs, config.max_running)
        token_seconds = coarse.token_bytes / config.network.bytes_per_second
        loads = config.remote_tier and token_seconds < coarse.prompt_token  # else it is computed sooner
        limits = EngineLimits(config.max_running, config.max_step_tokens, config.network, loads)
        lease_seconds = config.lease_seconds if config.router == "lease" else 0.0
        return [
            CoarseEngine(
                number,
                (PREFILL if number < config.num_prefill else DECODE) if config.num_prefill else BOTH,
                coarse,
                CoarseMemory(config.blocks - 1, config.block_size, lease_seconds),  # the null block
                limits,
                self._agenda,
                self.counts,
                self._end_turn,
            )
            for number in range(config.engines)
        ]

    def _router(self, engines: Sequence[CoarseEngine]) -> Router:
        config = self.config
        seed = f"router {config.seed} {engines[0].role}"
        return ROUTERS[config.router](engines, config.choices, config.overload, seed)

    def run(self, jobs: Iterable[FleetJob], watch: Callable[[float], None] | None = None) -> FleetReport:
        """`watch` is called after each event, with its time."""
        self._jobs = iter(jobs)
        self._admit_next()
        if not self._num_under_way:
            raise InvalidRequest("jobs", "there are none")
        if self.config.mtbf is not None:
            for engine in self.engines:
                self._agenda.add(self._failures.expovariate(1 / self.config.mtbf), self._fail, engine)
        heap, pop, num_events = self._agenda.heap, heapq.heappop, 0
        while self._num_under_way:
            at, _, act, what = pop(heap)
            num_events += 1
            act(at, what)
            if watch is not None:
                watch(at)
        self.num_events = num_events
        self.now = at
        return self._report()

    # Jobs

    def _admit_next(self) -> None:
        job = next(self._jobs, None)
        if job is not None:
            self._num_under_way += 1
            self._agenda.add(job.at + self.config.turn_seconds / 2, self._arrive, job)

    def _arrive(self, now: float, job: FleetJob) -> None:
        self._admit_next()
        self._ask(now, job)

    def _ask(self, now: float, job: FleetJob) -> None:
        job.ask(self.shape)
        self._send(job, now)

    def _send(self, job: FleetJob, now: float) -> None:
        """To where its prompt is computed."""
        if self._prefilling is None:
            job.home = engine = self._decoding.choose(job.home)
        else:
            job.source = engine = self._prefilling.choose(job.source)
        if engine is not None:
            engine.submit(job, now)
        else:
            self._homeless.append(job)

    def _hand_over(self, job: FleetJob, now: float) -> None:
        """To where its answer is decoded."""
        job.home = engine = self._decoding.choose(job.home)
        if engine is not None:
            engine.submit(job, now)
        else:
            self._homeless.append(job)

    def _end_turn(self, engine: CoarseEngine, job: FleetJob, now: float) -> None:
        if engine.role is PREFILL:
            self._hand_over(job, now)
            return
        half = self.config.turn_seconds / 2
        self._seen.first_tokens.append(job.first_at + half - job.asked_at)
        job.num_kv = job.prompt + job.output - 1
        if job.answers_as_usual and job.num_kv > self.counts.stored:
            self.counts.stored = job.num_kv
        if job.is_last:
            self._seen.jobs.append(now + half - job.at)
            self._num_under_way -= 1
            return
        job.asked_at = now + half + job.gaps[job.turn]
        job.turn += 1
        self._agenda.add(job.asked_at + half, self._ask, job)

    # Failures

    def _fail(self, now: float, engine: CoarseEngine) -> None:
        self.counts.num_failures += 1
        self._side(engine).remove(engine)
        self._agenda.add(now + self.config.repair, self._repair, engine)
        for job in engine.fail(now):
            self.counts.num_resubmitted += 1
            self._send(job, now)

    def _repair(self, now: float, engine: CoarseEngine) -> None:
        assert self.config.mtbf is not None
        engine.alive = True
        self._side(engine).add(engine)
        self._agenda.add(now + self._failures.expovariate(1 / self.config.mtbf), self._fail, engine)
        homeless, self._homeless = self._homeless, deque()
        for job in homeless:
            self._send(job, now)

    def _side(self, engine: CoarseEngine) -> Router:
        return self._prefilling if engine.role is PREFILL and self._prefilling is not None else self._decoding

    # Counts

    def check(self) -> None:
        """That no engine has more blocks in use than it has."""
        for engine in self.engines:
            engine.memory.check(engine.num_running_blocks)

    def _report(self) -> FleetReport:
        counts, config = self.counts, self.config
        busy = [engine.busy_seconds for engine in self.engines]
        time = self.now * config.engines
        return FleetReport(
            config.router,
            len(self._seen.jobs),
            len(self._seen.first_tokens),
            self.now,
            _spread(self._seen.jobs),
            _spread(self._seen.first_tokens),
            counts.num_found / counts.num_prompt,
            counts.num_loaded / counts.num_prompt,
            counts.num_computed,
            counts.num_recomputed,
            counts.num_moved * self._token_bytes,
            sum(busy) / time,
            max(busy) * config.engines / sum(busy),
            sum(engine.row_seconds for engine in self.engines) / time,
            counts.num_failures,
            counts.num_resubmitted,
            self.num_events,
        )


def _spread(values: array[float]) -> dict[str, float]:
    ordered = np.sort(np.frombuffer(values))
    shares = {f"p{share}": float(ordered[min(share * len(ordered) // 100, len(ordered) - 1)]) for share in (50, 90, 99)}
    return {"mean": float(ordered.mean()), **shares}
