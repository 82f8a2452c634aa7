"""Show where a server's KV is besides the device; empty the tiers, or check a folder of them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from segue.base.errors import SegueError
from segue.cli.asking import add_server_arguments, ask

_COLUMNS = (
    ("tier", "tier"),
    ("blocks", "blocks"),
    ("MiB", "bytes"),
    ("of MiB", "capacity_bytes"),
    ("stored", "stored_blocks"),
    ("loaded", "loaded_blocks"),
    ("hits, %", "hit_percent"),
    ("computed", "num_computed"),
    ("missed", "missed_blocks"),
    ("skipped", "skipped_blocks"),
    ("damaged", "damaged_blocks"),
    ("errors", "errors"),
    ("in, MB/s", "store_bytes_per_second"),
    ("out, MB/s", "load_bytes_per_second"),
)
_UNITS = {"bytes": 2**20, "capacity_bytes": 2**20, "store_bytes_per_second": 1e6, "load_bytes_per_second": 1e6}


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_server_arguments(command)
    command.add_argument("--json", action="store_true", help="one JSON object a line, with every field")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--reset", action="store_true", help="forget what is in all of them; with a key, that tenant's")
    which.add_argument(
        "--verify",
        metavar="FOLDER|redis://…",
        help="read every block of a disk or remote tier, without a server; bad ones are deleted",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.verify is not None:
        return _verify(arguments.verify)
    if arguments.reset:
        deleted = ask(arguments, "POST", "/v1/tiers/reset")["deleted_blocks"]
        print(
            json.dumps(deleted) if arguments.json else ", ".join(f"{name}: {count}" for name, count in deleted.items())
        )
        return 0
    found = ask(arguments, "GET", "/v1/tiers")["data"]
    if arguments.json:
        print("\n".join(map(json.dumps, found)))
    else:
        print(_table(found) if found else "No tiers: `segue serve --tier host=4GiB` has one.")
    return 0


def _verify(place: str) -> int:
    from segue.kv.tiers import DiskTier, RemoteTier

    try:
        if "://" in place:
            good, bad = RemoteTier(place).verify()
        elif Path(place).is_dir():
            good, bad = DiskTier(Path(place), 1 << 62).verify()
        else:
            raise SegueError(f"{place} is no folder")
    except OSError as error:
        raise SegueError(f"it cannot be read: {error}") from error
    print(f"{good} blocks are whole, {bad} were damaged and are deleted.")
    return 1 if bad else 0


def _table(found: list[dict[str, Any]]) -> str:
    rows = [[title for title, _ in _COLUMNS]]
    for entry in found:
        looked = entry["looked_blocks"]
        shown = {
            **entry,
            "hit_percent": 100 * entry["found_blocks"] // looked if looked else None,
            "num_computed": entry["requests"]["compute"],
        }
        rows.append([_cell(shown.get(name), _UNITS.get(name)) for _, name in _COLUMNS])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _cell(value: Any, unit: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if unit is None else f"{value / unit:,.0f}"
