"""Which block leaves a tier that is full: ours beside LRU and FIFO, on recorded traffic.

    python benchmarks/replacement.py FOLDER [--shares .02 .05 .1 .2 .4]

FOLDER has `mooncake_conversation.jsonl.gz` and `claude_code_traces_delta.jsonl.gz`. A request's prompt is a list of block ids;
what counts is the share of all blocks that are found by prefix: a block behind one that is missing is not. Capacities are
shares of the different blocks of the whole trace.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import OrderedDict
from itertools import islice
from pathlib import Path

from segue.kv.tiers.replacement import Replacement

Trace = list[list[bytes]]
NUM_SESSIONS = 150


class Lru:
    def __init__(self, capacity: int, refresh: bool = True) -> None:
        self._capacity, self._refresh = capacity, refresh
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, name: bytes) -> bool:
        return name in self._order

    def use(self, name: bytes) -> None:
        if self._refresh:
            self._order.move_to_end(name)

    def add(self, name: bytes) -> None:
        while len(self._order) >= self._capacity:
            self._order.popitem(last=False)
        self._order[name] = None


class Ours(Replacement):
    def add(self, name: bytes, size: int = 1) -> None:
        while self.size >= self.capacity:
            self.evict()
        super().add(name, size)


def found(trace: Trace, tier: Lru | Ours) -> float:
    hits = total = 0
    for blocks in trace:
        total += len(blocks)
        hits += next((at for at, name in enumerate(blocks) if name not in tier), len(blocks))
        for name in reversed(blocks):  # a sequence's last block is let go first
            if name in tier:
                tier.use(name)
            else:
                tier.add(name)
    return hits / total


def mooncake(path: Path) -> Trace:
    with gzip.open(path, "rt") as lines:
        return [[number.to_bytes(8, "little") for number in json.loads(line)["hash_ids"]] for line in lines]


def sessions(path: Path) -> Trace:
    """Requests of the first sessions, whose beginnings are spread over an hour, by the time at which they come; every eighth
    of their blocks of 64 tokens."""
    timed: list[tuple[float, list[bytes]]] = []
    with gzip.open(path, "rt") as lines:
        for number, line in enumerate(islice(lines, NUM_SESSIONS)):
            _walk(json.loads(line)["requests"], number, 3600 * number / NUM_SESSIONS, timed)
    timed.sort(key=lambda entry: entry[0])
    return [blocks for _, blocks in timed]


def _walk(requests: list[dict], session: int, begins: float, timed: list[tuple[float, list[bytes]]]) -> None:
    """An agent's requests, and those of the agents that it starts."""
    ids: list[int] = []
    for request in requests:
        if "requests" in request:
            _walk(request["requests"], session, begins + request["t"], timed)
            continue
        ids = ids[: request["keep"]] + [first + at for first, length in request["add"] for at in range(length)]
        timed.append((begins + request["t"], [b"%d/%d" % (session, each) for each in ids[::8]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.2, 0.4])
    given = parser.parse_args()
    for read, name in ((mooncake, "mooncake_conversation"), (sessions, "claude_code_traces_delta")):
        trace = read(given.folder / f"{name}.jsonl.gz")
        different = len({block for blocks in trace for block in blocks})
        total = sum(map(len, trace))
        print(f"{name}: {len(trace):,} requests, {total:,} blocks, {different:,} different ones")
        print(f"  {1 - different / total:.1%} could be found; with room for this share of the different ones:")
        print(f"  {'':16}" + "".join(f"{share:>9.0%}" for share in given.shares))
        for title, make in (("fifo", lambda n: Lru(n, False)), ("lru", Lru), ("ours", Ours)):
            row = [found(trace, make(max(int(different * share), 1))) for share in given.shares]
            print(f"  {title:16}" + "".join(f"{share:9.1%}" for share in row), flush=True)


if __name__ == "__main__":
    main()
