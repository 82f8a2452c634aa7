"""Many runs of one kind: policies × loads × devices × seeds, each in a process of its own, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from segue.base.config import EngineConfig
from segue.base.errors import InvalidRequest
from segue.bench.arrivals import arrival_times
from segue.bench.contestants import make_contestant
from segue.bench.generated import GENERATED, AgentJob, closed
from segue.bench.play import Played, Player, check_fits
from segue.bench.records import run_record, trace_records
from segue.bench.traces import read_trace
from segue.bench.workload import Workload
from segue.sim.budget import budget
from segue.sim.costs import Coefficients, StepCosts
from segue.sim.engine import SimulatedEngine
from segue.sim.fitting import Calibration
from segue.sim.hardware import Hardware, find_hardware
from segue.sim.shapes import ModelShape, find_shape

TIERS_MARK = "+tiers"  # after a policy's name: with the tiers that were asked for


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be served: a kind of jobs, how many a second, and for how long they come."""

    kind: str  # a generated one's name, or "replay"
    rate: float | None = None
    seconds: float = 90.0
    arrivals: str = "poisson"
    concurrency: int | None = None
    trace: Path | None = None
    limit: int | None = None
    time_scale: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, seed: int, max_tokens: int | None = None) -> Workload:
        if self.kind == "replay":
            assert self.trace is not None
            more = {"limit": self.limit, "max_tokens": max_tokens, "rate": self.rate, "time_scale": self.time_scale}
            workload = read_trace(self.trace, seed=seed, **more)  # type: ignore[arg-type]
        else:
            times = arrival_times(self.arrivals, 1.0 if self.rate is None else self.rate, self.seconds, seed)
            options = dict(self.options)
            if self.kind == "agents":
                options = {"job": AgentJob(**options)}
            workload = GENERATED[self.kind](times[: self.limit], seed, **options)
        return closed(workload, self.concurrency) if self.concurrency is not None else workload


@dataclass(frozen=True, slots=True)
class Machine:
    """What serves it, in the simulator."""

    gpu: str
    model: str = "llama-3.1-8b"
    num_blocks: int | None = None  # None: what fits beside the model
    block_size: int = 16
    utilization: float = 0.9
    max_step_tokens: int = 8192
    max_running: int = 256
    max_model_len: int = 8192
    turn_seconds: float = 0.008
    calibration: Calibration | None = None  # of a device and a model that were measured: these, then

    @property
    def hardware(self) -> Hardware:
        return self.calibration.hardware if self.calibration is not None else find_hardware(self.gpu)

    @property
    def shape(self) -> ModelShape:
        return self.calibration.shape if self.calibration is not None else find_shape(self.model)

    @property
    def coefficients(self) -> Coefficients:
        return self.calibration.coefficients if self.calibration is not None else Coefficients()

    def costs(self) -> StepCosts:
        return StepCosts(self.shape, self.hardware, self.coefficients)

    def blocks(self) -> int:
        if self.num_blocks is not None:
            return self.num_blocks
        if not self.hardware.memory_bytes:
            raise InvalidRequest("blocks", "must be given: the memory of a measured device is not known")
        found = budget(
            self.shape,
            self.hardware.memory_bytes,
            utilization=self.utilization,
            block_size=self.block_size,
            max_step_tokens=self.max_step_tokens,
        )
        return found.num_blocks


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    load: Load
    machine: Machine
    policy: str
    tiers: tuple[str, ...] = ()
    seed: int = 0
    sample_seconds: float | None = None

    def settings(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "tiers": list(self.tiers),
            "gpu": self.machine.gpu,
            "gpu_title": self.machine.hardware.title,
            "model": self.machine.model,
            "blocks": self.machine.blocks(),
            "block_size": self.machine.block_size,
            "jps": self.load.rate,
            "concurrency": self.load.concurrency,
            "arrivals": self.load.arrivals,
            "seconds": self.load.seconds,
            "seed": self.seed,
            "coefficients": self.machine.coefficients.to_json(),
        }


def cells(
    loads: Sequence[Load],
    machines: Sequence[Machine],
    policies: Sequence[str],
    tiers: Sequence[str],
    seeds: Sequence[int],
    sample_seconds: float | None = None,
) -> list[Cell]:
    """A policy whose name ends in "+tiers" has those that are given."""
    if not tiers and any(policy.endswith(TIERS_MARK) for policy in policies):
        raise InvalidRequest("tier", f"a policy{TIERS_MARK} needs some: --tier host=64GiB")
    return [
        Cell(
            load,
            machine,
            policy.removesuffix(TIERS_MARK),
            tuple(tiers) if policy.endswith(TIERS_MARK) else (),
            seed,
            sample_seconds,
        )
        for machine, load, seed, policy in product(machines, loads, seeds, policies)
    ]


def simulate(cell: Cell) -> tuple[Workload, Played]:
    machine = cell.machine
    config = EngineConfig(
        machine.blocks(),
        machine.block_size,
        max_step_tokens=machine.max_step_tokens,
        max_running=machine.max_running,
        max_model_len=machine.max_model_len,
    )
    workload = cell.load.make(cell.seed, config.max_sequence_len)
    policy = make_contestant(cell.policy, workload)
    with SimulatedEngine(machine.costs(), config, policy=policy, tiers=cell.tiers) as engine:
        check_fits(workload, engine)
        player = Player(workload, engine, turn_seconds=machine.turn_seconds, sample_seconds=cell.sample_seconds)
        return workload, player.play()


def run_cell(cell: Cell) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Its record, and those of its turns if blocks were counted."""
    workload, played = simulate(cell)
    settings = cell.settings()
    if settings["jps"] is None:
        settings["jps"] = workload.rate and round(workload.rate, 4)
    trace = list(trace_records(played, settings)) if cell.sample_seconds is not None else []
    return run_record(workload, played, settings), trace


def run_all(
    chosen: Sequence[Cell], workers: int = 1, done: Callable[[int, int], None] | None = None
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """In the order of the cells, whoever is ready first."""
    if workers < 1:
        raise InvalidRequest("workers", f"must be at least 1, got {workers}")
    if workers == 1 or len(chosen) < 2:
        for number, cell in enumerate(chosen, 1):
            yield run_cell(cell)
            if done is not None:
                done(number, len(chosen))
        return
    with ProcessPoolExecutor(min(workers, len(chosen))) as pool:
        for number, result in enumerate(pool.map(run_cell, chosen), 1):
            yield result
            if done is not None:
                done(number, len(chosen))
