"""Many simulated engines behind a router: what each way to route, split or lose them costs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from segue.base.errors import InvalidRequest

if TYPE_CHECKING:
    from segue.sim.fleet import FleetConfig, FleetReport
    from segue.sim.jobs import JobShape

_GBIT = 1e9 / 8


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--engines", type=int, default=100, metavar="N", help="default: %(default)s")
    command.add_argument("--gpu", default="h100", help="of each engine (default: %(default)s)")
    command.add_argument(
        "--model", default="llama-3.1-8b", help="a known name, or a config.json (default: %(default)s)"
    )
    command.add_argument("--blocks", type=int, metavar="N", help="of KV on each engine (default: what fits)")
    command.add_argument("--block-size", type=int, default=16, metavar="N", help="default: %(default)s")
    command.add_argument("--max-running", type=int, default=256, metavar="N", help="turns (default: %(default)s)")
    load = command.add_argument_group("jobs, of eight turns as in the agents workload")
    load.add_argument("--jobs", type=int, default=20_000, metavar="N", help="default: %(default)s")
    load.add_argument("--jps", type=float, metavar="X", help="jobs a second (default: three for each engine)")
    load.add_argument("--usual", type=float, metavar="P", help="chance that an answer is the one all jobs get")
    load.add_argument("--gap-scale", type=float, default=1.0, metavar="X", help="tools take X times as long")
    load.add_argument(
        "--turn-seconds", type=float, default=0.008, metavar="S", help="on the way (default: %(default)s)"
    )
    load.add_argument("--seed", type=int, default=0, metavar="N")
    routing = command.add_argument_group("routing")
    routing.add_argument(
        "--router",
        default="round-robin,least-loaded,prefix,lease",
        metavar="NAME,…",
        help="one run and one row for each (default: %(default)s)",
    )
    routing.add_argument("--choices", type=int, default=2, metavar="N", help="engines that are compared (default: 2)")
    routing.add_argument("--overload", type=float, default=4.0, metavar="X", help="when to leave home (default: 4)")
    routing.add_argument("--lease", type=float, default=10.0, metavar="S", help="seconds (default: 10)")
    routing.add_argument("--split", type=float, default=0.0, metavar="P", help="share of engines that only prefill")
    faults = command.add_argument_group("failures and the network")
    faults.add_argument("--mtbf", type=float, metavar="S", help="mean seconds between an engine's failures")
    faults.add_argument("--repair", type=float, default=600.0, metavar="S", help="until it is back (default: 600)")
    faults.add_argument("--remote-tier", action="store_true", help="a store that outlives engines has all KV")
    faults.add_argument(
        "--network", type=float, default=400.0, metavar="GBIT", help="a second, each engine (default: 400)"
    )
    command.add_argument("--json", action="store_true", help="as JSON: the same bytes for the same seed")


def run(arguments: argparse.Namespace) -> int:
    from segue.sim.routers import check_router

    names = [name for name in arguments.router.split(",") if name]
    for name in names or [""]:
        check_router(name)
    configs = [_config(arguments, name) for name in names]
    shape, jps = _shape(arguments), arguments.jps if arguments.jps is not None else 3.0 * arguments.engines
    shape.jobs(arguments.jobs, jps, arguments.seed)  # wrong numbers are refused before anything runs
    reports = [_simulate(arguments, config, shape, jps) for config in configs]
    if arguments.json:
        told = {
            "gpu": arguments.gpu,
            "model": arguments.model,
            "engines": arguments.engines,
            "blocks": configs[0].blocks,
        }
        told |= {"jobs": arguments.jobs, "jps": jps, "seed": arguments.seed}
        print(json.dumps(told | {"routers": [report.to_json() for report in reports]}))
        return 0
    print(
        f"{arguments.engines:,} engines ({arguments.gpu}, {arguments.model}, {configs[0].blocks:,} blocks), "
        f"{arguments.jobs:,} jobs of {shape.num_turns} turns, {jps:,.10g} a second"
    )
    print(_table([_COLUMNS, *(_cells(report) for report in reports)]))
    return 0


def _shape(arguments: argparse.Namespace) -> JobShape:
    from segue.bench.generated import AgentJob
    from segue.sim.jobs import JobShape

    if not 0 <= arguments.gap_scale < float("inf"):
        raise InvalidRequest("gap_scale", f"must be at least 0, got {arguments.gap_scale}")
    job = AgentJob() if arguments.usual is None else AgentJob(usual=arguments.usual)
    gaps = tuple((low * arguments.gap_scale, high * arguments.gap_scale) for low, high in job.gaps)
    return JobShape(job.prompt_tokens, job.output_tokens, gaps[: len(job.prompt_tokens) - 1], job.usual)


def _config(arguments: argparse.Namespace, router: str) -> FleetConfig:
    from segue.sim.budget import budget
    from segue.sim.fleet import CARD, FleetConfig
    from segue.sim.hardware import find_hardware
    from segue.sim.shapes import find_shape
    from segue.sim.slow import Link

    if not 0 < arguments.network < float("inf"):
        raise InvalidRequest("network", f"must be above 0, got {arguments.network}")
    blocks = arguments.blocks
    if blocks is None:
        memory = find_hardware(arguments.gpu).memory_bytes
        blocks = budget(find_shape(arguments.model), memory, block_size=arguments.block_size).num_blocks
    return FleetConfig(
        engines=arguments.engines,
        blocks=blocks,
        router=router,
        block_size=arguments.block_size,
        max_running=arguments.max_running,
        choices=arguments.choices,
        overload=arguments.overload,
        lease_seconds=arguments.lease,
        split=arguments.split,
        mtbf=arguments.mtbf,
        repair=arguments.repair,
        remote_tier=arguments.remote_tier,
        network=Link(arguments.network * _GBIT, CARD.latency_seconds),
        turn_seconds=arguments.turn_seconds,
        seed=arguments.seed,
    )


def _simulate(arguments: argparse.Namespace, config: FleetConfig, shape: JobShape, jps: float) -> FleetReport:
    from segue.sim.costs import StepCosts
    from segue.sim.fleet import Fleet
    from segue.sim.hardware import find_hardware
    from segue.sim.shapes import find_shape

    fleet = Fleet(config, StepCosts(find_shape(arguments.model), find_hardware(arguments.gpu)), shape)
    began = time.perf_counter()
    report = fleet.run(shape.jobs(arguments.jobs, jps, arguments.seed))
    seconds = time.perf_counter() - began
    rate = report.num_events / seconds
    print(f"{config.router}: {report.num_events:,} events in {seconds:.1f} s, {rate:,.0f} a second", file=sys.stderr)
    return report


_COLUMNS = [
    "router", "job s", "p50", "p90", "p99", "ttft ms", "p99", "found", "loaded", "computed", "again", "busy", "max/mean",
    "turns", "failures", "resubmitted",
]  # fmt: skip


def _cells(report: FleetReport) -> list[str]:
    jobs, first = report.job_seconds, report.ttft_seconds
    return [
        report.router,
        *(f"{jobs[name]:.2f}" for name in ("mean", "p50", "p90", "p99")),
        *(f"{first[name] * 1e3:.0f}" for name in ("mean", "p99")),
        f"{report.found_share:.1%}",
        f"{report.loaded_share:.1%}",
        f"{report.computed_tokens / report.num_jobs:.0f}",
        f"{report.recomputed_tokens / report.num_jobs:.0f}",
        f"{report.busy_share:.1%}",
        f"{report.imbalance:.2f}",
        f"{report.turns_running:.1f}",
        f"{report.num_failures:,}",
        f"{report.num_resubmitted:,}",
    ]


def _table(rows: list[list[Any]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    return "\n".join(lines)
