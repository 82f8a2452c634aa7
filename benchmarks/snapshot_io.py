"""Saving and loading a state against moving the same bytes without one: no digests, no copy of the KV.

    python benchmarks/snapshot_io.py [--folder FOLDER] [--rounds N]

Writing ends with fsync; reading is from the page cache. Raw reads go into one buffer, which stays in the processor's cache,
and straight into the destination, which is the least that a load must do. Medians of alternating rounds; a save and a load
use two threads, so that only a machine with two idle cores shows what they can do.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from segue.kv.layout import KVLayout
from segue.state.snapshot import Snapshot
from segue.state.store import SavedState, save

MIB = 1 << 20
TOKEN = KVLayout("bfloat16", (16, 2, 4, 32))  # 8 KiB a token


class Case:
    """One size of state: its KV in memory, page-aligned, as source and as destination."""

    def __init__(self, folder: Path, kv_bytes: int, chunk_bytes: int) -> None:
        num_tokens = kv_bytes // TOKEN.token_bytes
        tokens = array("i", range(num_tokens + 1))
        chunk_tokens = chunk_bytes // TOKEN.token_bytes
        self.snapshot = Snapshot("bench", "bench", TOKEN, tokens, num_tokens, chunk_tokens, time.time())
        self.source, self.destination = pages(self.snapshot.kv_bytes), pages(self.snapshot.kv_bytes)
        self.source[:] = np.random.default_rng(0).integers(0, 256, len(self.source), np.uint8)
        self.destination[:] = 0
        self.raw_path, self.path = folder / "raw", folder / "state.segue"

    def span(self, index: int) -> slice:
        start, stop = self.snapshot.chunk(index)
        return slice(start * TOKEN.token_bytes, stop * TOKEN.token_bytes)

    def write(self) -> None:
        with open(self.raw_path, "wb", buffering=0) as file:
            for index in range(self.snapshot.num_chunks):
                file.write(self.source[self.span(index)].data)
            os.fsync(file.fileno())

    def save(self) -> None:
        def fill(index: int, out: memoryview) -> None:
            np.frombuffer(out, np.uint8)[:] = self.source[self.span(index)]

        save(self.path, self.snapshot, fill)

    def read(self) -> None:
        buffer = pages(self.snapshot.chunk_bytes(0)).data
        with open(self.raw_path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    def read_to_destination(self) -> None:
        with open(self.raw_path, "rb", buffering=0) as file:
            for index in range(self.snapshot.num_chunks):
                file.readinto(self.destination[self.span(index)].data)

    def load(self) -> None:
        def use(index: int, data: memoryview) -> None:
            self.destination[self.span(index)] = np.frombuffer(data, np.uint8)

        with SavedState.open(self.path) as saved:
            saved.take(use)


def pages(num_bytes: int) -> np.ndarray:
    """Page-aligned: elsewhere, where exactly an array happens to begin decides the speed of a read."""
    return np.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(case: Case, rounds: int) -> None:
    actions: dict[str, Callable[[], None]] = {
        "write + fsync": case.write,
        "save": case.save,
        "read": case.read,
        "read to destination": case.read_to_destination,
        "load": case.load,
    }
    times: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds):
        writes, reads = list(actions)[:2], list(actions)[2:]
        for name in writes[:: 1 if number % 2 else -1] + reads[:: 1 if number % 2 else -1]:
            if name in writes:  # each on a disk that has nothing else to do, into a new file
                (case.path if name == "save" else case.raw_path).unlink(missing_ok=True)
                os.sync()
            times[name].append(seconds(actions[name]))
        assert np.array_equal(case.source, case.destination)
        case.destination[:] = 0
    mib = case.snapshot.kv_bytes / MIB
    speed = {name: mib / statistics.median(values) for name, values in times.items()}
    print(f"{mib:.0f} MiB in chunks of {case.snapshot.chunk_bytes(0) / MIB:.2f} MiB, MiB/s:")
    for ours, raw in (("save", "write + fsync"), ("load", "read"), ("load", "read to destination")):
        print(f"  {ours} {speed[ours]:6.0f}   {raw:>20} {speed[raw]:6.0f}   {speed[ours] / speed[raw]:5.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the one for temporary files")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for kv_mib, chunk_mib in ((512, 1.0), (64, 0.7)):
            measure(Case(Path(folder), kv_mib * MIB, int(chunk_mib * MIB)), options.rounds)


if __name__ == "__main__":
    main()
