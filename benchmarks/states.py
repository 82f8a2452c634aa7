"""What it costs to hold, continue, fork, save, load and move states.

    python benchmarks/states.py [--model NAME] [--tokens N] [--rounds N] [--only bookkeeping|files|sockets]

Bookkeeping runs on an executor that computes nothing, so it is the host's share alone. Files and sockets move the KV of a
real model; each is measured beside a plain copy of the same bytes in pieces of the same size, in alternating rounds.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from segue import EngineConfig, EngineCore, Request, SamplingParams, State
from segue.engine import StepPlan, StepResult
from segue.engine.desk import FILE_CHUNK, WIRE_CHUNK
from segue.engine.wire import receive_request, send_request
from segue.kv import KVLayout

ONE = SamplingParams(max_tokens=1, temperature=0)


class Idle:
    """Computes nothing."""

    kv_layout = KVLayout("uint8", (1,))

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult([1] * sum(row.sampling is not None for row in plan.rows))

    def read_kv(self, *_: object) -> None: ...

    def write_kv(self, *_: object) -> None: ...

    def close(self) -> None: ...


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def us(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e6:8.0f} us"


# Bookkeeping


def held_state(num_tokens: int) -> tuple[EngineCore, State]:
    config = EngineConfig(20_000, 16, 65_536, 256, max_model_len=65_536)
    engine = EngineCore(Idle(), config, vocab_size=50_000)
    prompt = [token % 1000 for token in range(num_tokens - 1)]
    state = engine.generate(prompt, ONE, hold=True)[0].state
    assert state is not None and state.num_tokens == num_tokens
    return engine, state


def continuation(num_tokens: int, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Submitting; the plan that admits it, whose parent lends its blocks; the same when it consumes its parent."""
    engine, state = held_state(num_tokens)
    submits, plans, consuming = [], [], []
    for number in range(600):  # until the ledger is full, so that memory is no longer taken fresh from the system
        engine.submit(Request(parent=state, suffix=[1000 + number, 1], params=ONE))
        step(engine)
    for number in range(rounds):
        request = Request(parent=state, suffix=[2000 + number, 2, 3, 4], params=ONE)
        submits.append(timed(lambda: engine.submit(request)))
        plans.append(step(engine))
    for number in range(rounds):
        fork = engine.fork(state)
        engine.submit(Request(parent=fork, suffix=[4000 + number, 2, 3, 4], params=ONE, consume=True))
        consuming.append(step(engine))
    return submits, plans, consuming


def step(engine: EngineCore) -> float:
    """Run a step; how long its plan took to make."""
    started = time.perf_counter()
    plan = engine._scheduler.plan()
    seconds = time.perf_counter() - started
    produced = engine._scheduler.apply(plan, engine._executor.execute(plan))
    engine._answers.publish(produced, engine._scheduler.finish)
    return seconds


def bookkeeping(rounds: int) -> None:
    gc.disable()
    print("continuation of a held state, host side          submit        plan  plan, consuming")
    sums = {}
    for num_tokens in (1024, 32_768, 1024, 32_768):
        submits, plans, consuming = continuation(num_tokens, rounds)
        sums[num_tokens] = statistics.median(submits), statistics.median(map(sum, zip(submits, plans, strict=True)))
        print(f"  {num_tokens:6} tokens                        {us(submits)} {us(plans)}     {us(consuming)}")
    submit, both = (sums[32_768][i] / sums[1024][i] for i in range(2))
    print(f"  32K over 1K: submit {submit:.2f}x, submit and plan {both:.2f}x")
    forks(rounds)
    gc.enable()


def forks(rounds: int) -> None:
    """32 children of a 4,096-token state: as 32 states, as one request for 32 answers, as 32 requests."""
    engine, state = held_state(4096)
    as_states, as_answers, as_requests = [], [], []
    copies = [0, 0]
    for number in range(max(rounds // 10, 5)):
        children: list[State] = []
        as_states.append(timed(lambda: children.extend(engine.fork(state) for _ in range(32))))
        for fork in children:
            engine.release(fork)
        params = SamplingParams(max_tokens=2, temperature=0, n=32)
        engine.submit(Request(parent=state, suffix=[2000 + number, 1, 1], params=params))
        first = engine._scheduler.plan()
        result = engine._executor.execute(first)
        started = time.perf_counter()
        produced = engine._scheduler.apply(first, result)
        second = engine._scheduler.plan()
        as_answers.append(time.perf_counter() - started)
        copies[0] = len(first.copies) + len(second.copies)
        engine._answers.publish(produced, engine._scheduler.finish)
        engine._answers.publish(
            engine._scheduler.apply(second, engine._executor.execute(second)), engine._scheduler.finish
        )
        while engine.has_work:
            engine.step()
        for child in range(32):
            engine.submit(Request(parent=state, suffix=[3000 + 32 * number + child], params=ONE))
        started = time.perf_counter()
        plan = engine._scheduler.plan()
        as_requests.append(time.perf_counter() - started)
        copies[1] = len(plan.copies)
        engine._answers.publish(engine._scheduler.apply(plan, engine._executor.execute(plan)), engine._scheduler.finish)
    print("a 4,096-token state into 32 children")
    print(f"  32 states                {us(as_states)}")
    print(f"  one request, 32 answers  {us(as_answers)}  ({copies[0]} blocks copied)")
    print(f"  plan of 32 requests      {us(as_requests)}  ({copies[1]} blocks copied)")


# Files and sockets


def real_state(model: str, num_tokens: int):
    from segue import Engine

    blocks = -(-num_tokens // 16) + 40
    source = Engine(model, device="cpu", num_blocks=blocks, max_model_len=num_tokens + 64)
    destination = Engine(source.model, device="cpu", num_blocks=blocks, max_model_len=num_tokens + 64)
    for engine in (source, destination):
        engine.runner.kv.normal_()  # every page is there, as after some minutes of work
    prompt = [3 + token % 200 for token in range(num_tokens)]
    return source, destination, prompt


def pages(size: int) -> memoryview:
    """Memory that begins on a page and has been written: some processors copy to odd places several times slower."""
    memory = memoryview(mmap.mmap(-1, size))
    for start in range(0, size, 2**20):
        memory[start : start + 2**20] = os.urandom(len(memory[start : start + 2**20]))
    return memory


def pieces_of(engine, state, at_most: int) -> tuple[int, int]:
    """How many bytes of KV a state has, and how many go at a time."""
    outgoing, done = engine.begin_save(state)
    done()
    block = engine.runner.kv_layout.token_bytes * engine.kv.block_size
    return outgoing.snapshot.kv_bytes, max(at_most // block, 1) * block


def raw_write(path: Path, total: int, piece: memoryview) -> None:
    with open(path, "wb", buffering=0) as file:
        for start in range(0, total, len(piece)):
            file.write(piece[: total - start])
        os.fsync(file.fileno())


def raw_read(path: Path, places: list[memoryview]) -> None:
    with open(path, "rb", buffering=0) as file:
        for place in places:
            file.readinto(place)


def compare(name: str, total: int, raw: list[float], ours: list[float], note: str = "") -> None:
    ratio = statistics.median(a / b for a, b in zip(raw, ours, strict=True))
    speeds = [total / statistics.median(seconds) / 2**20 for seconds in (raw, ours)]
    print(
        f"  {name:8} raw {speeds[0]:7.0f} MiB/s   ours {speeds[1]:7.0f} MiB/s   {ratio:.0%} of raw {note and f'({note})'}"
    )


def files(model: str, num_tokens: int, rounds: int, folder: str | None) -> None:
    source, destination, prompt = real_state(model, num_tokens)
    state = source.generate(prompt, ONE, hold=True)[0].state
    total, size = pieces_of(source, state, FILE_CHUNK)
    print(
        f"a state of {state.num_tokens} tokens of {model}: {total / 2**20:.0f} MiB of KV in pieces of {size / 2**20:.2f} MiB"
    )
    piece, whole = pages(size), pages(total)
    spread = [whole[start : start + size] for start in range(0, total, size)]
    loaded: list[State] = []
    with tempfile.TemporaryDirectory(dir=folder) as chosen:
        raw, saved = Path(chosen, "raw"), Path(chosen, "state.segue")
        actions = {
            "raw write": lambda: raw_write(raw, total, piece),
            "save": lambda: source.save(state, saved),
            "read to one place": lambda: raw_read(raw, [piece[: len(place)] for place in spread]),
            "read to its place": lambda: raw_read(raw, spread),
            "load": lambda: loaded.append(destination.load(saved)),
        }
        times: dict[str, list[float]] = {name: [] for name in actions}
        for number in range(rounds):
            for name in list(actions)[:2][:: 1 if number % 2 else -1] + list(actions)[2:][:: 1 if number % 2 else -1]:
                if name in ("raw write", "save"):  # into a new file, on a disk that has nothing else to do
                    (raw if name == "raw write" else saved).unlink(missing_ok=True)
                    os.sync()
                times[name].append(timed(actions[name]))
                while loaded:
                    destination.release(loaded.pop())
                    destination.forget()
    compare("save", total, times["raw write"], times["save"])
    compare("load", total, times["read to its place"], times["load"])
    compare("load", total, times["read to one place"], times["load"], "one small buffer, which stays in the cache")


def sockets(model: str, num_tokens: int, rounds: int) -> None:
    """The source is another process, as in a fleet; so is the sender of the plain copy."""
    _, destination, _ = real_state(model, num_tokens)
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, __file__, "--model", model, "--tokens", str(num_tokens), "--source-for"]
        source = subprocess.Popen([*command, str(server.getsockname()[1])], stdin=subprocess.PIPE, text=True)
        control, _ = server.accept()
        total, size = (int(number) for number in control.recv(100).split())
        raw, ours = [], []
        for _ in range(rounds):
            raw.append(ask(source, server, "copy", lambda sock: plain_copy(sock, size)))
            destination.forget()
            ours.append(ask(source, server, "move", lambda sock: destination.abort(receive_request(sock, destination))))
        source.stdin.close()
        source.wait(60)
    compare("import", total, raw, ours)


def ask(source, server: socket.socket, what: str, take: Callable[[socket.socket], object]) -> float:
    print(what, file=source.stdin, flush=True)
    with server.accept()[0] as sock:
        return timed(lambda: take(sock))


def plain_copy(sock: socket.socket, size: int) -> None:
    into = pages(size)
    while sock.recv_into(into):
        pass


def serve_as_source(model: str, num_tokens: int, port: int) -> None:
    source, _, prompt = real_state(model, num_tokens)
    held = source.generate(prompt, ONE, hold=True)[0].state
    total, size = pieces_of(source, held, WIRE_CHUNK)
    piece = pages(size)
    control = socket.create_connection(("127.0.0.1", port))
    control.sendall(f"{total} {size}".encode())
    for number, line in enumerate(sys.stdin):
        request_id = f"moved-{number}"
        if line == "move\n":
            request = Request(parent=held, params=SamplingParams(max_tokens=9, temperature=0), request_id=request_id)
            source.submit(request)
            source.step()
        with socket.create_connection(("127.0.0.1", port)) as sock:
            if line == "move\n":
                send_request(sock, source, request_id)
                source.step()
            else:
                for start in range(0, total, size):
                    sock.sendall(piece[: total - start])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="where files are written (default: the system's temporary folder)")
    parser.add_argument("--only", choices=["bookkeeping", "files", "sockets"])
    parser.add_argument("--source-for", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.source_for:
        serve_as_source(chosen.model, chosen.tokens, chosen.source_for)
        sys.exit()
    if chosen.only in (None, "bookkeeping"):
        bookkeeping(200)
    if chosen.only in (None, "files"):
        files(chosen.model, chosen.tokens, chosen.rounds, chosen.folder)
    if chosen.only in (None, "sockets"):
        sockets(chosen.model, chosen.tokens, chosen.rounds)
