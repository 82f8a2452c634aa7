"""What other tiers cost and bring: SmolLM2 on this machine.

    python benchmarks/tiers.py [--only copies|remote|resume|steps] [--folder DIR] [--rounds N]

Copies are compared with the same bytes moved plainly: a memcpy, and a file written and read in one piece in the same folder,
from and to the page cache as ours are; those to and from a remote tier with what `redis-benchmark` moves in values of the same
size, by its 50 connections, to and from as many keys of a server that this script starts. A resume is a request whose prompt of
2,900 tokens is in the tier and not on the device.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from segue import Engine, SamplingParams
from segue.engine.offers import Load
from segue.engine.tiering import TierDesk
from segue.kv.tiers import Courier, DiskTier, RemoteTier

NUM_TOKENS = 2900
BLOCK_BYTES = 30 * 2 * 3 * 16 * 64 * 4  # of SmolLM2, in fp32: layers, K and V, heads, tokens, a head's values
ONE = SamplingParams(max_tokens=1, temperature=0)


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def copies(folder: Path, rounds: int) -> None:
    with Engine("smollm2", num_blocks=400, tiers=["host=1GiB"]) as engine:
        engine.generate([token % 40000 for token in range(NUM_TOKENS)], ONE)
        desk, size = engine._tiers, engine.config.block_size
        count, block_bytes = NUM_TOKENS // size, desk._names.block_bytes
        names = [bytes(8) + blake2b(bytes([number]), digest_size=24).digest() for number in range(count)]
        plain = np.zeros(count * block_bytes, np.uint8), np.ones(count * block_bytes, np.uint8)
        for name in names:  # the pages' first write is not what is measured
            desk._host.begin(name)
            desk._host.filled(name)
        out, back, memcpy = [], [], []
        for _ in range(rounds):
            blocks, slots, memory = range(1, count + 1), [desk._host.use(name) for name in names], desk._host.memory
            out.append(seconds(lambda: engine.runner.blocks_out(blocks, slots, memory)))
            back.append(seconds(lambda: engine.runner.blocks_in(blocks, slots, memory)))
            memcpy.append(seconds(lambda: np.copyto(plain[0], plain[1])))
        megabytes = count * block_bytes / 1e6
        print(f"host, {megabytes:.0f} MB in {count} blocks, of a memcpy's speed:")
        for title, taken in (("to the host", out), ("from the host", back)):
            share = statistics.median(plain / own for plain, own in zip(memcpy, taken, strict=True))
            print(f"  {title:16}{megabytes / statistics.median(taken) / 1e3:6.1f} GB/s  {share:.0%}")
        _files(folder, names, [desk._host.view(slot) for slot in slots], rounds)


def _files(folder: Path, names: list[bytes], views: list[memoryview], rounds: int) -> None:
    """As the engine has it: by the tier's own thread. Plainly: by one thread as well, in writes and reads of 4 MiB."""
    whole, data = folder / "plain", b"".join(views)
    target = bytearray(len(data))
    taken: dict[str, list[float]] = {"store": [], "load": [], "write": [], "read": []}
    for _ in range(rounds):
        courier = Courier(DiskTier(folder / "blocks", 8 << 30), most_stores=len(names))
        _carry(courier, list(zip(names, views, strict=True)), taken)
        taken["write"].append(seconds(lambda: _write(whole, data)))
        taken["read"].append(seconds(lambda: _read(whole, target)))
        whole.unlink()
        courier.drop(None)
        courier.close(5.0)
    print(f"disk, {len(data) / 1e6:.0f} MB, of a plain file's speed:")
    for title, own, plain in (("to disk", "store", "write"), ("from disk", "load", "read")):
        share = statistics.median(p / o for p, o in zip(taken[plain], taken[own], strict=True))
        print(f"  {title:16}{len(data) / statistics.median(taken[own]) / 1e9:6.1f} GB/s  {share:.0%}")


def _carry(courier: Courier, blocks: list[tuple[bytes, memoryview]], taken: dict[str, list[float]]) -> None:
    """All of them there, and all of them back."""

    def run(begin: Callable[[bytes, memoryview], object]) -> None:
        for name, view in blocks:
            begin(name, view)
        left = len(blocks)
        while left:
            courier.wait(1.0)
            done = courier.finished()
            assert all(task.ok for task in done)
            left -= len(done)

    taken["store"].append(seconds(lambda: run(courier.store)))
    taken["load"].append(seconds(lambda: run(courier.load)))


def remote(folder: Path, rounds: int) -> None:
    size, count = BLOCK_BYTES, NUM_TOKENS // 16
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = ["--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    try:
        time.sleep(1.0)
        names = [bytes(8) + blake2b(bytes([number]), digest_size=24).digest() for number in range(count)]
        blocks = [(name, memoryview(bytearray(np.random.default_rng(0).bytes(size)))) for name in names]
        taken: dict[str, list[float]] = {"store": [], "load": []}
        plain: dict[str, list[float]] = {"store": [], "load": []}
        for _ in range(rounds):
            courier = Courier(RemoteTier(f"redis://127.0.0.1:{port}/0"), most_stores=count)
            _carry(courier, blocks, taken)
            courier.close(5.0)
            command = ["redis-benchmark", "-p", port, "-d", str(size), "-n", str(4 * count), "-r", str(count)]
            command += ["-t", "set,get", "--csv"]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-2:]
            for verb, line in zip(("store", "load"), told, strict=True):
                plain[verb].append(count / float(line.split(",")[1].strip('"')))
        print(f"remote, {count * size / 1e6:.0f} MB in {count} blocks, of redis-benchmark's speed:")
        for verb, title in (("store", "there"), ("load", "back")):
            share = statistics.median(p / o for p, o in zip(plain[verb], taken[verb], strict=True))
            print(f"  {title:16}{count * size / statistics.median(taken[verb]) / 1e9:6.2f} GB/s  {share:.0%}")
    finally:
        server.terminate()
        server.wait()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        for at in range(0, len(data), 4 << 20):
            file.write(memoryview(data)[at : at + (4 << 20)])


def _read(path: Path, target: bytearray) -> None:
    with path.open("rb", buffering=0) as file:
        for at in range(0, len(target), 4 << 20):
            file.readinto(memoryview(target)[at : at + (4 << 20)])


def resume(folder: Path, rounds: int) -> None:
    prompt = [(token * 7919) % 40000 for token in range(NUM_TOKENS)]
    for title, tiers, goal in (
        ("host", ["host=2GiB"], "1/20"),
        ("disk", [f"disk={folder / 'resume'},4GiB"], "1/8"),
    ):
        with Engine("smollm2", num_blocks=200, tiers=tiers) as engine:
            cold = seconds(lambda: engine.generate(prompt, ONE))
            while engine.has_work:
                engine.step()
        ratios, taken = [], []
        with Engine("smollm2", num_blocks=200, tiers=tiers) as engine:
            if title == "host":
                cold = seconds(lambda: engine.generate(prompt, ONE))
            for number in range(rounds):
                other = [(token * 104729 + number) % 40000 for token in range(NUM_TOKENS)]
                if title == "host" or number:
                    cold = seconds(lambda: engine.generate(other, ONE))
                if title == "disk":
                    engine._tiers._host.drop()
                began = time.perf_counter()
                result = engine.generate(prompt, ONE)[0]
                taken.append(time.perf_counter() - began)
                ratios.append(taken[-1] / cold)
                assert result.reuse.loaded + result.reuse.cached >= NUM_TOKENS - 17, result.reuse
        print(
            f"{NUM_TOKENS} tokens from the {title}: {statistics.median(taken) * 1e3:.0f} ms, "
            f"1/{1 / statistics.median(ratios):.0f} of their prefill (goal {goal})"
        )


def steps(folder: Path) -> None:
    _steps("to the host", ["host=3GiB"])
    _steps("to the host and on to disk", ["host=3GiB", f"disk={folder / 'steps'},8GiB"])
    _steps("from the host", ["host=3GiB"], is_load=True)


def _steps(title: str, tiers: list[str], *, is_load: bool = False, window: int = 25, least: int = 1 << 30) -> None:
    """Decoding, alone and while other requests' KV moves, until that is `least` bytes: windows of steps in turns, so that the
    context and the machine's state are the same for both."""
    with Engine("smollm2", num_blocks=1600, max_running=8, tiers=tiers) as engine:
        long = SamplingParams(max_tokens=6000, temperature=0, ignore_eos=True)
        engine.submit(list(range(1000, 1100)), long)
        for _ in range(20):
            engine.step()
        desk = engine._tiers
        begin, end = _loads(desk) if is_load else _saves(desk)
        engine.kv.holds = lambda block, name: True  # type: ignore[method-assign]
        alone, beside = [], []
        moved = 0
        while moved < least or len(alone) < 500:
            end()
            desk.rest()
            while any(courier.has_work for courier in desk._couriers):
                desk._collect()
                time.sleep(0.01)
            os.sync()
            engine.step()
            alone += [seconds(engine.step) for _ in range(window)]
            begin()
            engine.step()
            beside += [seconds(engine.step) for _ in range(window)]
            moved = (desk.num_loaded if is_load else desk.num_saved) * desk._names.block_bytes
        end()
    p99 = [statistics.quantiles(taken, n=100)[-1] * 1e3 for taken in (alone, beside)]
    print(
        f"a decode step, p99 of {len(alone)}: {p99[0]:.1f} ms alone, {p99[1]:.1f} ms while {moved / 2**30:.1f} GiB go {title}: "
        f"{p99[1] / p99[0]:.2f}x (goal 1.25x); medians {statistics.median(alone) * 1e3:.1f} and "
        f"{statistics.median(beside) * 1e3:.1f} ms"
    )


def _saves(desk: TierDesk) -> tuple[Callable[[], None], Callable[[], None]]:
    """What begins copies of blocks to the host, always of new names, and what ends them."""
    names = ((b"x" * 24 + at.to_bytes(8, "little")) for at in range(1 << 20))

    def begin() -> None:
        desk._to_save.extend((1 + at % 1500, name) for at, name in enumerate(islice(names, 4096)))

    return begin, desk._to_save.clear


def _loads(desk: TierDesk) -> tuple[Callable[[], None], Callable[[], None]]:
    """The same from the host, to blocks that nobody uses."""
    names = [b"x" * 24 + at.to_bytes(8, "little") for at in range(1000)]
    slots = {name: (1, desk._host.begin(name)) for name in names}
    desk._read_into(slots)
    desk._executor.blocks_in(
        range(600, 1500), range(900), desk._host.memory
    )  # the pages' first write is not what is measured
    table = SimpleNamespace(blocks=[600 + at % 900 for at in range(20 * len(names))])
    nobody: Any = object()

    def begin() -> None:
        desk._loads[nobody] = Load(nobody, cast(Any, table), names * 20, 0, 20 * len(names), 0, time.monotonic())

    return begin, lambda: desk.cancel(nobody)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["copies", "remote", "resume", "steps"])
    parser.add_argument("--folder", type=Path, help="for files; default: a temporary one")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        if given.only in (None, "copies"):
            copies(Path(folder), given.rounds)
        if given.only in (None, "remote"):
            remote(Path(folder), given.rounds)
        if given.only in (None, "resume"):
            resume(Path(folder), given.rounds)
        if given.only in (None, "steps"):
            steps(Path(folder))


if __name__ == "__main__":
    main()
