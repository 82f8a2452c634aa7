"""Draw results: how long jobs take as load grows, what policies save, and what single runs did."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from segue.base.errors import InvalidRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {
    "load": "mean job time by load, a figure for each GPU",
    "panels": "the same for all GPUs in one",
    "gain": "job time saved against fcfs without tiers",
    "turns": "latency of each turn, at one load",
    "blocks": "what blocks are for over time, from a trace",
    "jobs": "when the first jobs wait and are answered, from a trace",
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    kinds = "; ".join(f"{kind}: {what}" for kind, what in KINDS.items())
    command.add_argument("kind", metavar="KIND", help=f"{kinds}; all: all that the files have records for")
    command.add_argument("results", type=Path, nargs="+", metavar="RESULTS", help="JSON lines, or folders of them")
    command.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="made if it is not there")
    command.add_argument("--format", default="png", metavar="png,svg", help="default: png")
    command.add_argument("--gpu", metavar="NAME", help="only this one (default: all, or the first where one is shown)")
    command.add_argument("--jps", type=float, metavar="N", help="of turns, blocks and jobs (default: the highest load)")
    command.add_argument("--jobs", type=int, default=30, metavar="N", help="rows of `jobs` (default: 30)")


def run(arguments: argparse.Namespace) -> int:
    if arguments.kind not in (*KINDS, "all"):
        raise InvalidRequest("kind", f"{arguments.kind!r:.40} is not known: there are {', '.join(KINDS)} and all")
    if arguments.jobs < 1:
        raise InvalidRequest("jobs", f"must be at least 1, got {arguments.jobs}")
    try:
        from segue.bench.sheet import FORMATS, save
    except ImportError as error:
        raise InvalidRequest("plot", f"needs matplotlib: pip install 'segue[plots]' ({error})") from error
    formats = arguments.format.split(",")
    if any(each not in FORMATS for each in formats):
        raise InvalidRequest("format", f"{arguments.format!r:.40} is not known: there are {' and '.join(FORMATS)}")
    wanted = list(KINDS) if arguments.kind == "all" else [arguments.kind]
    for figures in _drawn(wanted, _kinds(arguments)):
        for path in save(figures, arguments.out, formats):
            print(path)
    return 0


def _drawn(wanted: Sequence[str], draw: dict[str, Callable[[], dict[str, Figure]]]) -> list[dict[str, Figure]]:
    """Of several, those that can be drawn; what cannot is said."""
    found, failed = [], []
    for kind in wanted:
        try:
            found.append(draw[kind]())
        except InvalidRequest as error:
            failed.append((kind, error))
    if not found:
        raise failed[0][1]
    for kind, why in failed:
        print(f"segue: no {kind}: {why}", file=sys.stderr)
    return found


def _kinds(arguments: argparse.Namespace) -> dict[str, Callable[[], dict[str, Figure]]]:
    """What draws each kind; records are read when the first needs them."""
    from segue.bench import pictures, plots
    from segue.bench.results import Choice, read_counts, read_results, read_turns

    choice = Choice(arguments.gpu, arguments.jps)
    results = cache(lambda: read_results(arguments.results, arguments.gpu))
    return {
        "load": lambda: plots.load(results()),
        "panels": lambda: plots.panels(results()),
        "gain": lambda: plots.gain(results()),
        "turns": lambda: pictures.turns(results(), choice),
        "blocks": lambda: pictures.blocks(read_counts(arguments.results), choice),
        "jobs": lambda: pictures.jobs(read_turns(arguments.results), choice, arguments.jobs),
    }
