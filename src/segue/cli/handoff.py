"""`segue demo handoff`: a request moves to another engine while it is being answered, and its reader cannot tell."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.text import Text

from segue.base.errors import InvalidRequest, SegueError, StateError
from segue.base.types import SamplingParams
from segue.cli.options import open_engine
from segue.engine import Stream, hand_over
from segue.engine.wire import receive_request, send_request, stream_back

if TYPE_CHECKING:
    from segue.model.engine import Engine

_NOT_OF_THE_ENGINE = {"run", "words", "what", "processes", "join", "max_tokens"}
_WORTH_MOVING = 5 * 2**19  # bytes of KV that the prompts have in common, so that it is several chunks
_START_SECONDS = 300.0
_IDLE_SECONDS = 600.0


def run(arguments: argparse.Namespace, system: str, questions: tuple[str, ...]) -> int:
    """Questions with a common start, each moved while it is being answered. What they share is shipped once."""
    if arguments.join:
        return _serve(arguments)
    if arguments.max_tokens < 2:
        raise InvalidRequest("max_tokens", "must be at least 2: each engine is to make one")
    with open_engine(arguments) as engine:
        _warm_up(engine)
        system *= _repeats(engine, system)
        neighbour = SameProcess(arguments, engine) if arguments.processes == 1 else OtherProcess(arguments)
        with closing(neighbour):
            demo = Demonstration(Console(highlight=False), engine, neighbour, arguments.max_tokens)
            outcomes = [demo.answer(system, question) for question in questions]
    return 0 if all(outcomes) else 1


@dataclass(frozen=True, slots=True)
class Move:
    """What it took to bring a request to engine B, which gave it `num_blocks` blocks that had been free."""

    num_bytes: int
    seconds: float
    num_blocks: int


class Neighbour(Protocol):
    """Engine B, wherever it is."""

    def take(self, engine: Engine, request_id: str) -> Move:
        """Move a request of `engine` there. After any error it goes on here."""
        ...

    def close(self) -> None: ...


class Demonstration:
    """Shows on the console what happens to a prompt that is moved while it is being answered."""

    def __init__(self, console: Console, engine: Engine, neighbour: Neighbour, max_tokens: int) -> None:
        self._console = console
        self._engine = engine
        self._neighbour = neighbour
        self._num_before = max(max_tokens // 3, 1)
        self._params = SamplingParams(max_tokens=max_tokens, min_tokens=self._num_before + 1, temperature=0)

    def answer(self, system: str, question: str) -> bool:
        """Whether it moved, and was answered as if it had not."""
        self._console.print(Text(question, "italic"))
        prompt = self._engine.chat_prompt(
            [{"role": "system", "content": system}, {"role": "user", "content": question}]
        )
        self._engine.forget()
        stream = self._engine.stream(prompt, self._params)
        for _ in range(self._num_before):
            self._write(next(stream).text)
        move = self._move(stream)
        self._write_rest(stream, "green" if move is not None else "")
        if move is not None:
            self._explain(prompt, stream, move)
        self._engine.forget()
        reference = self._engine.generate(prompt, self._params)[0]
        same = reference.token_ids == stream.result.token_ids and reference.text == stream.result.text
        self._say(f"Compared with a run that never moved: {'identical' if same else 'DIFFERENT'}.\n")
        return same and move is not None

    def _move(self, stream: Stream) -> Move | None:
        try:
            move = self._neighbour.take(self._engine, stream.result.request_id)
        except SegueError as error:
            self._say(f"\nEngine B did not take it over, so it goes on at A: {error}")
            return None
        self._write(" ⇢ engine B ⇢ ", "bold")
        return move

    def _write_rest(self, stream: Stream, style: str) -> None:
        try:
            for delta in stream:
                self._write(delta.text, style)
        except SegueError as error:
            self._say(f"\n{error}")
        self._say("")

    def _explain(self, prompt: list[int], stream: Stream, move: Move) -> None:
        num_computed = len(prompt) + self._num_before - 1
        whole = num_computed * self._engine.runner.kv_layout.token_bytes
        prefill = (stream.result.first_token_seconds or 0.0) * 1e3
        self._say(
            f"Engine A prefilled {len(prompt):,} tokens in {prefill:,.0f} ms and answered with {self._num_before}. "
            f"The move took {move.seconds * 1e3:,.0f} ms: {move.num_bytes / 2**20:,.2f} MiB shipped for "
            f"{whole / 2**20:,.2f} MiB of KV, {move.num_blocks} blocks taken at B, {self._engine.kv.usage:.0%} in use at A."
        )

    def _write(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), end="", soft_wrap=True)

    def _say(self, text: str) -> None:
        self._console.print(Text(text))


class SameProcess:
    """Engine B beside A, with the model's files opened once."""

    def __init__(self, arguments: argparse.Namespace, engine: Engine) -> None:
        from segue.model.engine import Engine

        options = {name: value for name, value in _engine_options(arguments).items() if name != "model"}
        self._engine = Engine(engine.model, **options)
        _warm_up(self._engine)

    def take(self, engine: Engine, request_id: str) -> Move:
        export = engine.export_request(request_id)
        export.abort()  # only asked what would be sent
        snapshot, free = export.snapshot, self._engine.kv.num_free
        num_bytes = sum(snapshot.chunk_bytes(index) for index in self._engine.missing(snapshot))
        began = time.perf_counter()
        hand_over(engine, self._engine, request_id)
        return Move(num_bytes, time.perf_counter() - began, free - self._engine.kv.num_free)

    def close(self) -> None:
        self._engine.close()


class OtherProcess:
    """Engine B in a process of its own, which ends with the connection. It says on its output what it paid.

    If it does not come, or goes, that is found out when a request is to be moved.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            command = [sys.executable, "-m", "segue", "demo", "handoff", "--join", address, *_as_words(arguments)]
            self._child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self._sock = self._accept(listener)

    def _accept(self, listener: socket.socket) -> CountingSocket:
        listener.settimeout(0.1)
        deadline = time.monotonic() + _START_SECONDS
        while self._child.poll() is None and time.monotonic() < deadline:
            try:
                return CountingSocket(listener.accept()[0])
            except TimeoutError:
                continue
        return CountingSocket(socket.socket())  # whatever is tried with it fails

    def take(self, engine: Engine, request_id: str) -> Move:
        if (status := self._child.poll()) is not None:
            raise StateError(f"its process has ended with status {status}")
        assert self._child.stdout is not None
        before, began = self._sock.num_sent, time.perf_counter()
        send_request(self._sock, engine, request_id)
        seconds = time.perf_counter() - began
        return Move(self._sock.num_sent - before, seconds, int(self._child.stdout.readline() or 0))

    def close(self) -> None:
        self._sock.close()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()


class CountingSocket(socket.socket):
    """Counts what is sent; takes the place of the socket it is made from."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self.num_sent = 0

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        super().sendall(data, flags)
        self.num_sent += len(data)


def _serve(arguments: argparse.Namespace) -> int:
    """Engine B in a process of its own: takes over one request after the other until the connection ends."""
    host, _, port = arguments.join.rpartition(":")
    with open_engine(arguments) as engine:
        _warm_up(engine)
        try:
            sock = socket.create_connection((host, int(port)))
        except (OSError, ValueError) as error:
            raise StateError(f"engine A cannot be reached at {arguments.join!r}: {error}") from error
        with sock, suppress(StateError):
            while True:
                free = engine.kv.num_free
                request_id = receive_request(sock, engine, timeout=_IDLE_SECONDS)
                if request_id is not None:
                    print(free - engine.kv.num_free, flush=True)
                    stream_back(sock, engine, request_id)
    return 0


def _engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if name not in _NOT_OF_THE_ENGINE}


def _as_words(arguments: argparse.Namespace) -> list[str]:
    """The engine's options again, for another process."""
    words: list[str] = []
    for name, value in _engine_options(arguments).items():
        option = name.replace("_", "-")
        if isinstance(value, list):  # tiers
            words += [word for each in value for word in (f"--{option.removesuffix('s')}", each)]
        elif isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            words += [f"--{option}", str(value)]
    return words


def _repeats(engine: Engine, system: str) -> int:
    """How often a text is needed for the prompts' KV to be worth moving: once, unless the model is very small."""
    num_tokens = len(engine.encode(system))
    enough = -(-_WORTH_MOVING // (engine.runner.kv_layout.token_bytes * num_tokens))
    return max(min(enough, engine.config.max_sequence_len // (2 * num_tokens)), 1)


def _warm_up(engine: Engine) -> None:
    """The first step of a process pays for pages and threads."""
    engine.generate([1, 2, 3], SamplingParams(max_tokens=2))
