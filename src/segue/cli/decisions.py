"""Show what a server's policy did with the KV of jobs between their turns, and what came of it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from segue.cli.asking import add_server_arguments, ask

_COLUMNS = (
    ("ago", "seconds_ago", "{:.1f}"),
    ("job", "job_id", "{:.20}"),
    ("command", "key", "{:.20}"),
    ("tokens", "num_tokens", "{}"),
    ("kept for", "keep_seconds", "{:.2f}"),
    ("p(return)", "p_return", "{:.2f}"),
    ("worth", "benefit_seconds", "{:.3f}"),
    ("outcome", "outcome", "{}"),
    ("gap", "gap_seconds", "{:.2f}"),
    ("pinned", "pinned_time", "{:.2f}"),
    ("hit", "hit_length", "{}"),
    ("regret", "regret_seconds", "{:.3f}"),
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_server_arguments(command)
    command.add_argument("--job", metavar="ID", help="of this job only")
    command.add_argument("--limit", type=int, default=20, metavar="N", help="the newest N (default: 20)")
    command.add_argument("--json", action="store_true", help="one JSON object a line, with every field")


def run(arguments: argparse.Namespace) -> int:
    asked = {"limit": arguments.limit} | ({"job_id": arguments.job} if arguments.job else {})
    found = ask(arguments, "GET", "/v1/decisions", params=asked)["data"]
    print("\n".join(map(json.dumps, found)) if arguments.json else _table(found))
    return 0


def _table(found: list[dict[str, Any]]) -> str:
    rows = [[title for title, _, _ in _COLUMNS]]
    rows += [
        ["-" if entry[name] is None else form.format(entry[name]) for _, name, form in _COLUMNS] for entry in found
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
