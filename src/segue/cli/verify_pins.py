"""Show, on a running server, that KV stays through a job's tool calls and is given back at its end."""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import dataclass
from typing import Any

from segue.base.errors import SegueError

SYSTEM = "You are an agent that repairs programs. Answer with one shell command, and wait for what it prints."
TOOL_OUTPUTS = (
    "src/app.py  src/db.py  tests/test_app.py  README.md  setup.cfg  Makefile",
    "def load(path):\n    rows = open(path).read().split('\\n')\n    return [row.split(',') for row in rows]\n" * 3,
    "E   ValueError: not enough values to unpack (expected 3, got 1)\ntests/test_app.py:14: ValueError\n" * 3,
    "3 passed, 1 warning in 0.21s\nThe warning: an open file was never closed. See src/app.py, line 2, in load.",
)
TASK = "The tests of this project fail. Find out why, and repair it. Begin by listing the files."


@dataclass(frozen=True, slots=True)
class Row:
    turn: int
    prompt: int
    cached: int
    output: int
    expected: int  # blocks held through the gap
    blocks: tuple[int, ...]  # as seen in the gap

    @property
    def holds(self) -> bool:
        return set(self.blocks) == {self.expected}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("url", nargs="?", default=argparse.SUPPRESS, help="default: http://127.0.0.1:8000")
    command.add_argument("--url", help="the same", default="http://127.0.0.1:8000")
    command.add_argument("--key", help="API key")
    command.add_argument("--gap", type=float, default=1.0, metavar="SECONDS", help="how long a tool takes (default: 1)")
    command.add_argument("--hold", action="store_true", help="ask for holds, instead of leaving it to the policy")
    command.add_argument("--max-tokens", type=int, default=12, metavar="N", help="of each answer (default: 12)")


def run(arguments: argparse.Namespace) -> int:
    """Exit status 0 if every row holds. The server must have nothing else to do."""
    try:
        import httpx
    except ImportError as error:
        raise SegueError("this needs httpx: pip install 'segue[client]'") from error
    headers = {"authorization": f"Bearer {arguments.key}"} if arguments.key else {}
    with httpx.Client(base_url=arguments.url, headers=headers, timeout=600) as http:
        try:
            rows = _play(http, arguments.gap, arguments.max_tokens, hold=arguments.hold)
        except httpx.HTTPError as error:
            raise SegueError(f"{arguments.url} does not answer: {error}") from error
    print("turn  prompt  cached  output   blocks in the gap   blocks to be held   holds")
    for row in rows:
        seen = " ".join(map(str, sorted(set(row.blocks))))
        print(
            f"{row.turn:4}  {row.prompt:6}  {row.cached:6}  {row.output:6}   {seen:>17}   {row.expected:>17}"
            f"   {'yes' if row.holds else 'NO'}"
        )
    if not all(row.holds for row in rows):
        print("KV was not held as it should be, or the server had other work.", file=sys.stderr)
        return 1
    return 0


def _play(http: Any, gap: float, max_tokens: int, *, hold: bool) -> list[Row]:
    block_size, num_blocks = _pool(http)
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    job = f"verify-{time.time_ns():x}"
    rows = []
    for turn in range(1, len(TOOL_OUTPUTS) + 2):
        is_last = turn > len(TOOL_OUTPUTS)
        terms = {"is_last_step": True} if is_last else {"hold_seconds": gap + 60} if hold else {}
        body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "job_id": job, **terms}
        response = http.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            raise SegueError(f"turn {turn} was answered with {response.status_code}: {response.text[:300]}")
        answer = response.json()
        usage, choice = answer["usage"], answer["choices"][0]
        with_kv = 0 if is_last else choice["state"]["num_tokens"] - 1
        seen = _watch(http, gap, num_blocks)
        rows.append(
            Row(
                turn,
                usage["prompt_tokens"],
                usage["prompt_tokens_details"]["cached_tokens"],
                usage["completion_tokens"],
                -(-with_kv // block_size),
                seen,
            )
        )
        if not is_last:
            messages = [*messages, choice["message"], {"role": "user", "content": TOOL_OUTPUTS[turn - 1]}]
    return rows


def _pool(http: Any) -> tuple[int, int]:
    """Block size and number of blocks, as the server's metrics tell."""
    return int(_metric(http, "block_size")), int(_metric(http, "kv_blocks"))


def _watch(http: Any, seconds: float, num_blocks: int) -> tuple[int, ...]:
    """Blocks in use, several times during the gap."""
    seen, deadline = [], time.monotonic() + seconds
    while True:
        seen.append(round(_metric(http, "kv_cache_usage_perc") * num_blocks))
        if time.monotonic() >= deadline:
            return tuple(seen)
        time.sleep(min(0.3, max(deadline - time.monotonic(), 0)))


def _metric(http: Any, name: str) -> float:
    found = re.search(rf"^segue:{name} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    if found is None:
        raise SegueError(f"the server has no metric segue:{name}")
    return float(found[1])
