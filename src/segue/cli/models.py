"""List the models that are known by name, or fetch one."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from segue.base.config import Environment


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--fetch", metavar="NAME", help="get this model into the cache now")


def run(arguments: argparse.Namespace) -> int:
    from segue.cli.progress import FetchProgress
    from segue.model.catalog import list_models, resolve

    cache = Environment.read().cache_dir
    if arguments.fetch:
        with FetchProgress(f"Fetching {arguments.fetch}") as progress:
            resolve(arguments.fetch, cache, progress=progress)
    table = Table("name", "cached", "size", "what it is")
    for model in list_models(cache):
        size = f"{model.size_bytes / 2**20:.0f} MiB" if model.size_bytes else "-"
        table.add_row(model.name, "yes" if model.cached else "no", size, model.description)
    console = Console()
    console.print(table)
    console.print("Any Hugging Face folder (safetensors) or .gguf file works as --model too.")
    return 0
