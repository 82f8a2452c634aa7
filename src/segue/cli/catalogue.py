"""Compile a catalogue of items for `serve --catalogue`, or say what is in one."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from segue.base.errors import InvalidRequest


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "file", type=Path, metavar="FILE", help='JSON ({"item": [ids], …}), CSV (item, id, …) or compiled'
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="write it compiled, which is read in seconds")


def run(arguments: argparse.Namespace) -> int:
    from segue.model.items import Catalogue

    began = time.perf_counter()
    catalogue = Catalogue.read(arguments.file)
    taken = time.perf_counter() - began
    sizes = ", ".join(f"{len(level):,}" for level in catalogue.levels)
    print(
        f"{len(catalogue):,} items of at most {catalogue.depth} tokens, read in {taken:.1f} s; prefixes by length: {sizes}"
    )
    if arguments.out is not None:
        try:
            catalogue.write(arguments.out)
        except OSError as error:
            raise InvalidRequest("out", f"{arguments.out} cannot be written: {error}") from error
        print(f"Use it: segue serve --catalogue items={arguments.out}")
    return 0
