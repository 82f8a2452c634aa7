"""Think, then search for items: what each way of serving it costs."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from segue.base.errors import InvalidRequest


def add_arguments(two: argparse.ArgumentParser) -> None:
    two.add_argument("task", type=Path, metavar="FOLDER", help="made by examples/recommender/make.py")
    two.add_argument("--url", help="a server that has the task's model (default: one is started)")
    two.add_argument(
        "--other", action="store_true", help="that server is not Segue: no states, catalogues or fused requests"
    )
    two.add_argument("--modes", help="some of resend, prefix-cache, continuation, fused (default: all the server has)")
    two.add_argument("--pressure", action="store_true", help="evict everything that can be between the two stages")
    two.add_argument("--users", type=int, default=200, metavar="N", help="default: 200")
    two.add_argument("--concurrency", type=int, default=4, metavar="N", help="users served at once (default: 4)")
    two.add_argument("--width", type=int, default=32, metavar="N", help="beams (default: 32)")
    two.add_argument("--thoughts", type=int, default=1, metavar="N", help="for each user (default: 1)")
    two.add_argument("--no-catalogue", action="store_true", help="let searches find lines that are no item")
    two.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    try:
        from segue.bench.two_stage import MODES, Load, Task, popularity
    except ImportError as error:
        raise InvalidRequest("bench", f"needs the client's packages: pip install 'segue[client]' ({error})") from error
    task = Task.read(arguments.task)
    for name in ("users", "concurrency", "width", "thoughts"):
        if getattr(arguments, name) < 1:
            raise InvalidRequest(name, f"must be at least 1, got {getattr(arguments, name)}")
    catalogue = None if arguments.no_catalogue or arguments.other else "items"
    load = Load(arguments.width, arguments.thoughts, arguments.concurrency, catalogue, arguments.pressure)
    modes = arguments.modes.split(",") if arguments.modes else MODES[:2] if arguments.other else MODES
    with _server(arguments.url, task.folder) as url:
        reports = asyncio.run(_play(url, task, load, modes, arguments.users, ours=not arguments.other))
    base = popularity(task, arguments.users)
    if arguments.json:
        print(json.dumps({"popular": base, "modes": reports}))
        return 0
    print(
        f"{min(arguments.users, len(task.users))} users; the best-selling items would reach recall@10 {base['recall@10']:.3f}"
    )
    for name in reports[0]:
        print(f"{name:22}" + "".join(_cell(report[name]) for report in reports))
    return 0


def _cell(value: Any) -> str:
    return f"{value:>15}" if isinstance(value, (str, int)) else f"{value:15.3f}"


async def _play(url: str, task: Any, load: Any, modes: Any, num_users: int, *, ours: bool) -> list[dict[str, Any]]:
    import httpx

    from segue.bench.two_stage import Player

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        player = Player(client, task, load, ours=ours)
        users = task.users[:num_users]
        await player.play(modes[0], min(num_users, 2))  # what is slow once is not what is measured
        return [(await player.play(mode, num_users)).report(users) for mode in modes]


@contextmanager
def _server(url: str | None, folder: Path) -> Iterator[str]:
    """The one that is given, or one of our own on this machine."""
    if url is not None:
        yield url
        return
    command = [sys.executable, "-m", "segue", "serve", str(folder / "model"), "--port", "0", "--quiet"]
    command += ["--catalogue", f"items={folder / 'catalogue.json'}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        said = re.match(r"Serving at (http://\S+?)\. Try it:", process.stdout.readline())
        if said is None:
            raise InvalidRequest("task", f"no server could be started with {folder / 'model'}")
        yield said[1]
    finally:
        process.terminate()
        process.wait()
