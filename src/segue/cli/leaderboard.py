"""All policies over traces and devices, in one table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from segue.base.errors import InvalidRequest


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "traces",
        nargs="*",
        type=Path,
        metavar="TRACE",
        help="files or folders of them (default: generated agents and chats)",
    )
    command.add_argument("--gpu", default="rtx6000,rtx5090,a100-40", metavar="LIST", help="simulated devices")
    command.add_argument("--policy", metavar="LIST", help="default: all of ours, fixed times, and an oracle")
    command.add_argument("--also", metavar="LIST", default="", help="further policies, by name")
    command.add_argument(
        "--tier", dest="tiers", action="append", metavar="TIER", help="of POLICY+tiers (default: host=64GiB)"
    )
    command.add_argument(
        "--jps", type=float, metavar="R", help="jobs a second (default: as recorded, or high enough to hurt)"
    )
    command.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of generated jobs (default: 60)")
    command.add_argument("--limit", type=int, default=200, metavar="N", help="jobs of each trace (default: 200)")
    command.add_argument("--model", default="llama-3.1-8b", metavar="MODEL")
    command.add_argument("--max-model-len", type=int, default=32768, metavar="N", help="longer jobs are left out")
    command.add_argument("--seed", type=int, default=0, metavar="N")
    command.add_argument("--workers", type=int, default=1, metavar="N", help="simulations at once (default: 1)")
    command.add_argument("--out", type=Path, metavar="FILE", help="add every run to it, as JSON lines")
    command.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    from segue.bench.leaderboard import CONTESTANTS, standings
    from segue.bench.records import write_lines
    from segue.bench.sweep import cells, run_all
    from segue.cli.bench import _bar

    policies = arguments.policy.split(",") if arguments.policy else list(CONTESTANTS)
    policies += [name for name in arguments.also.split(",") if name]
    tiers = arguments.tiers or ["host=64GiB"]
    chosen = []
    for machine, load in _pairs(arguments):
        chosen += cells([load], [machine], policies, tiers, [arguments.seed])
    with _bar() as done:
        records = [record for record, _ in run_all(chosen, arguments.workers, done)]
    if arguments.out is not None:
        write_lines(arguments.out, records)
    found = standings(records, arguments.seed)
    if arguments.json:
        print(json.dumps([_as_json(each) for each in found]))
        return 0
    print(f"{'policy':22}{'of fcfs':>9}{'95 % of draws':>18}{'computed again':>16}   by trace and device")
    for each in found:
        by_cell = "  ".join(f"{share:.2f}" for share in each.by_cell.values())
        interval = f"{each.low:.3f} to {each.high:.3f}"
        print(f"{each.name:22}{each.share:9.3f}{interval:>18}{each.recompute_ratio:16.3f}   {by_cell}")
    for number, cell in enumerate(found[0].by_cell, 1):
        print(f"{number}: {cell}")
    return 0


def _as_json(standing: Any) -> dict[str, Any]:
    return {name: getattr(standing, name) for name in ("name", "share", "low", "high", "recompute_ratio", "by_cell")}


def _pairs(arguments: argparse.Namespace) -> list[tuple[Any, Any]]:
    """Each device with each load."""
    from segue.bench.sweep import Load, Machine

    machines = [
        Machine(gpu, arguments.model, max_model_len=arguments.max_model_len) for gpu in arguments.gpu.split(",")
    ]
    files = [file for path in arguments.traces for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    if arguments.traces and not files:
        raise InvalidRequest("traces", f"{arguments.traces[0]} is empty")
    if files:
        loads = [Load("replay", arguments.jps, trace=file, limit=arguments.limit) for file in files]
        return [(machine, load) for machine in machines for load in loads]
    rates = {"rtx6000": 5.0, "rtx5090": 10.0, "a100-40": 14.0, "l40s": 14.0}
    pairs = []
    for machine in machines:
        rate = arguments.jps or rates.get(machine.gpu, 30.0)
        pairs += [
            (machine, Load(kind, rate, arguments.seconds, limit=arguments.limit * 10)) for kind in ("agents", "chat")
        ]
    return pairs
