"""How well the simulator agrees with what was measured, and how fast it is.

    python benchmarks/simulator.py [--only published|cells|measured|speed] [--seeds N] [--seconds S] [--workers N]

published: the table of the Continuum experiments (RTX 5090, 5,402 blocks), with as many jobs as each of its runs had.
cells: `adaptive` with a host tier against all others, on four devices and several loads.
measured: an engine on this machine, calibrated, and the simulator beside it: three policies at two loads.
speed: a simulation of a million events.
"""

from __future__ import annotations

import argparse
import statistics
import time

from segue.bench.local import LOCAL, costs_of, play_locally
from segue.bench.sweep import Cell, Load, Machine, run_all, simulate
from segue.model.engine import Engine
from segue.sim.fitting import Calibration, Step, fit

CARD = Machine("rtx5090", num_blocks=5402, max_model_len=4096)
PUBLISHED = {  # policy, jobs/s: jobs that the run had, seconds they came for, mean, p90, per turn ms
    ("fcfs", 2): (206, 110.0, 6.65, None, None),
    ("continuum", 2): (231, 110.0, 6.97, None, None),
    ("fcfs", 8): (756, 90.0, 14.10, 17.02, (1263, 735, 574, 1005, 749, 641, 3732, 1236)),
    ("continuum", 8): (704, 90.0, 12.47, 14.37, (1051, 519, 479, 841, 652, 539, 3212, 1034)),
}
DEVICES = {
    "rtx6000": (3000, (1, 2, 5, 8, 12)),
    "rtx5090": (5402, (2, 5, 8, 10, 12)),
    "a100-40": (9000, (2, 5, 10, 15, 25)),
    "l40s": (13000, (2, 5, 10, 15, 25)),
}
HOST = ("host=64GiB",)
OTHERS = (
    ("fcfs", ()),
    ("continuum-released", ()),
    ("continuum", ()),
    ("context_serve", ()),
    ("fcfs", HOST),
    ("continuum-released", HOST),
    ("continuum", HOST),
    ("context_serve", HOST),
)


def _mean(records: list[dict], name: str) -> float:
    return statistics.mean(record[name] for record in records)


def _runs(chosen: list[Cell], workers: int) -> list[dict]:
    return [record for record, _ in run_all(chosen, workers)]


def published(seeds: int, workers: int) -> None:
    print(f"{'run':22}{'jobs':>6}{'mean s':>18}{'p90 s':>20}   (published, simulated, difference; {seeds} seeds)")
    by_turn = {}
    for (policy, rate), (jobs, seconds, mean, p90, turns) in PUBLISHED.items():
        named = "continuum-released" if policy == "continuum" else policy
        load = Load("agents", jobs / seconds, seconds)
        found = _runs([Cell(load, CARD, named, seed=seed) for seed in range(seeds)], workers)
        here, tail = _mean(found, "avg_duration_s"), _mean(found, "p90_duration_s")
        text = f"{policy} {rate}/s".ljust(22) + f"{jobs:6}{mean:8.2f}{here:7.2f}{here / mean - 1:+7.1%}"
        print(text + (f"{p90:10.2f}{tail:7.2f}{tail / p90 - 1:+7.1%}" if p90 else ""), flush=True)
        if turns:
            own = [statistics.mean(r["per_turn_avg_latency_ms"][str(n)] for r in found) for n in range(1, 9)]
            by_turn[policy] = (turns, own)
    for policy, (theirs, own) in by_turn.items():
        print(f"per turn, ms, {policy}: " + "  ".join(f"{a}/{b:.0f}" for a, b in zip(theirs, own, strict=True)))
    gains = [
        [round(100 * (1 - b / a)) for a, b in zip(by_turn["fcfs"][at], by_turn["continuum"][at], strict=True)]
        for at in (0, 1)
    ]
    print(f"gain by turn, %: published {gains[0]}, simulated {gains[1]}")
    print("the same arrivals for both, mean s:")
    for rate in (2, 8, 9, 10, 12):
        load = Load("agents", rate, 90.0)
        fcfs, pinned = (
            _mean(_runs([Cell(load, CARD, policy, seed=seed) for seed in range(seeds)], workers), "avg_duration_s")
            for policy in ("fcfs", "continuum-released")
        )
        print(f"  {rate:3}/s  fcfs {fcfs:7.2f}  continuum {pinned:7.2f}  {pinned / fcfs - 1:+.1%}", flush=True)


def cells(seeds: int, seconds: float, workers: int) -> None:
    worst = 0.0
    print("mean job time, s: fcfs, continuum as released, fcfs + host, adaptive + host; the best of the others")
    for gpu, (blocks, rates) in DEVICES.items():
        machine = Machine(gpu, num_blocks=blocks)
        for rate in rates:
            load = Load("agents", float(rate), seconds)
            contest = (*OTHERS, ("adaptive", ()), ("adaptive", HOST))
            found = _runs(
                [Cell(load, machine, policy, tiers, seed) for policy, tiers in contest for seed in range(seeds)],
                workers,
            )
            means = {
                contest[at]: _mean(found[at * seeds : (at + 1) * seeds], "avg_duration_s") for at in range(len(contest))
            }
            ours = means["adaptive", HOST]
            best = min(OTHERS, key=means.__getitem__)
            worst = max(worst, ours / means[best] - 1)
            named = f"{best[0]}{' + host' if best[1] else ''} {means[best]:.2f}"
            shown = (("fcfs", ()), ("continuum-released", ()), ("fcfs", HOST), ("adaptive", HOST))
            rest = "".join(f"{means[each]:9.2f}" for each in shown)
            print(
                f"{gpu:8}{rate:3}/s {rest}   {named:34}{ours / means[best] - 1:+7.1%}",
                flush=True,
            )
    print(f"adaptive + host is at most {worst:+.1%} above the best other")


def measured(workers: int) -> None:
    """`tiny`, with memory for a third of what the jobs want at the higher load. Costs are fitted to the steps of the run itself:
    this machine is half again as fast at one time as at another."""
    blocks = 900
    options = {"usual": 0.0, "gap_scale": 0.15}
    with Engine("tiny", num_blocks=blocks, max_running=64) as engine:
        costs, budget = costs_of(engine), engine.config.max_step_tokens
    for rate in (4.0, 10.0):
        load = Load("agents", rate, 10.0, options=options)
        for policy in ("fcfs", "continuum", "adaptive"):
            steps: list[Step] = []
            real = play_locally(load.make(0), "tiny", policy, num_blocks=blocks, max_running=64, steps=steps).durations
            fitted = fit(costs, steps)
            machine = Machine(
                "local",
                num_blocks=blocks,
                max_step_tokens=budget,
                max_running=64,
                turn_seconds=0.0,
                calibration=Calibration(LOCAL, costs.shape, fitted.coefficients),
            )
            virtual = simulate(Cell(load, machine, policy))[1].durations
            here, there = statistics.mean(real.values()), statistics.mean(virtual.values())
            print(
                f"{rate:4g}/s  {policy:12} measured {here:7.3f} s  simulated {there:7.3f}  {there / here - 1:+.1%}"
                f"   ({fitted.num_steps} steps, mean error {fitted.mean_error:.1%})",
                flush=True,
            )


def speed(workers: int) -> None:
    for title, load in (("chat", Load("chat", 20.0, 60.0)), ("agents", Load("agents", 10.0, 60.0))):
        began = time.perf_counter()
        played = simulate(Cell(load, Machine("h100"), "adaptive"))[1]
        taken = time.perf_counter() - began
        print(
            f"{title}: {played.num_events:,} events in {taken:.1f} s, {played.num_events / taken:,.0f} a second; "
            f"{played.wall_seconds:.0f} s of its own time"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["published", "cells", "measured", "speed"])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0, help="that jobs arrive for, in the cells")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if options.only in (None, "speed"):
        speed(options.workers)
    if options.only in (None, "measured"):
        measured(options.workers)
    if options.only in (None, "published"):
        published(options.seeds, options.workers)
    if options.only in (None, "cells"):
        cells(options.seeds, options.seconds, options.workers)


if __name__ == "__main__":
    main()
