"""The engine as the HTTP process sees it: a process that is started, asked, watched, and started again if it dies."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.base.errors import EngineClosed, SegueError
from segue.base.types import BeamParams, SamplingParams
from segue.server.messages import (
    Abort,
    Ask,
    Deltas,
    Failed,
    Frames,
    FromEngine,
    Part,
    Ready,
    Refused,
    Reply,
    Start,
    Submit,
    ToEngine,
    as_bytes,
    as_dict,
    error_of,
    frame,
)

_log = logging.getLogger(__name__)
_RECEIVE_BYTES = 1 << 18
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0  # seconds between attempts to start
_SETTLED_SECONDS = 60.0  # an engine that lived so long did not fail at its start


@dataclass(frozen=True, slots=True)
class Call:
    """One request for the engine. With a `parent`, `tokens` are the suffix."""

    request_id: str
    tokens: list[int] | array[int]
    params: SamplingParams
    salt: str = ""
    parent: str | None = None
    at: int | str | None = None
    job_id: str | None = None
    hold: bool | float = False
    priority: int = 0
    is_last_step: bool = False
    beam: BeamParams | None = None  # a search, at once or, if the answers are thoughts, after each of them
    thinks: bool = False
    search_suffix: Sequence[int] = ()
    search_rest: Sequence[int] | None = None  # what of it follows a thought that ended in a stop string
    imported: bool = False  # from another engine: it begins in the middle of its text, which the engine therefore makes

    def message(self) -> Submit:
        return Submit(
            self.request_id,
            as_bytes(self.tokens),
            as_dict(self.params),
            self.salt,
            self.parent,
            self.at,
            self.job_id,
            self.hold,
            self.priority,
            self.is_last_step,
            as_dict(self.beam) if self.beam is not None else None,
            self.thinks,
            as_bytes(self.search_suffix),
            None if self.search_rest is None else as_bytes(self.search_rest),
        )

    @property
    def num_choices(self) -> int:
        """Answers that a client sees: a search's lines, if nothing was sampled before it."""
        if self.beam is None or self.thinks:
            return self.params.n
        return self.beam.n or self.beam.width


class Answering:
    """The parts of one or more requests' answers as they come; closing it before the last one aborts what is unfinished."""

    def __init__(self, engine: RemoteEngine, calls: Sequence[Call]) -> None:
        self._engine = engine
        self._open = {call.request_id: call.params.n for call in calls}  # answers that are still to end
        self.salts = {call.request_id: call.salt for call in calls}
        self._parts: list[Part] = []
        self._error: SegueError | None = None
        self._news = asyncio.Event()

    async def next(self) -> list[Part]:
        """What came since the last call, at least one part; empty after the last. Raises what refused or ended it."""
        while not self._parts:
            if self._error is not None:
                raise self._error
            if not self._open:
                return []
            self._news.clear()
            await self._news.wait()
        parts, self._parts = self._parts, []
        return parts

    def put(self, part: Part) -> None:
        if part.problem is not None:
            self.fail(error_of(part.problem))
            return
        self._parts.append(part)
        self._news.set()
        if part.finish is not None:
            self._open[part.request_id] -= 1
            if not self._open[part.request_id]:
                del self._open[part.request_id]
                self._engine.forget(part.request_id)

    def fail(self, error: SegueError) -> None:
        self._error = error
        self._news.set()
        self.close()

    def close(self) -> None:
        while self._open:
            self._engine.abort(self._open.popitem()[0])


class RemoteEngine:
    """Starts the process, keeps it alive, and carries messages both ways."""

    def __init__(
        self,
        model: str,
        options: dict[str, Any],
        *,
        policy: str | None = None,
        policy_state: Path | None = None,
        policy_model: Path | None = None,
        catalogues: Mapping[str, str] | None = None,
    ) -> None:
        state, trained = (None if path is None else str(path.absolute()) for path in (policy_state, policy_model))
        self._start = Start(model, options, policy, state, trained, dict(catalogues or {}))
        self._answering: dict[str, Answering] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._last_number = 0
        self._writer: asyncio.StreamWriter | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._running: asyncio.Task[None] | None = None
        self._first: asyncio.Future[Ready] | None = None
        self._greetings: list[tuple[str, dict[str, Any]]] = []
        self.ready: Ready | None = None
        self.num_restarts = 0
        self.failure: str | None = None
        self._closing = False

    @property
    def num_requests(self) -> int:
        return len(self._answering)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> Ready:
        """Wait until it can serve; raises what the engine says if it cannot."""
        self._first = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._keep_alive())
        return await asyncio.shield(self._first)

    def greet(self, verb: str, **arguments: Any) -> None:
        """Ask this of every process that is started, before anything else."""
        self._greetings.append((verb, arguments))
        if self.ready is not None:
            self._ask(verb, arguments).add_done_callback(_log_failure)

    async def close(self) -> None:
        self._closing = True
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running
        if self._process is not None:
            await asyncio.to_thread(self._reap, self._process)

    # Asking

    def submit(self, calls: Sequence[Call]) -> Answering:
        """Refusals are heard with the first part."""
        if self.ready is None:
            raise EngineClosed(self.failure or "the engine is starting")
        answering = Answering(self, calls)
        messages = [frame(call.message()) for call in calls]
        for call in calls:
            self._answering[call.request_id] = answering
        if self._writer is not None:
            self._writer.writelines(messages)
        return answering

    def expect(self, call: Call) -> Answering:
        """The answers of a request that comes to the engine in another way; if it does not come, `fail` them."""
        answering = self._answering[call.request_id] = Answering(self, [call])
        return answering

    def abort(self, request_id: str) -> None:
        if self._answering.pop(request_id, None) is not None:
            self._send(Abort(request_id))

    def abort_arrived(self, request_id: str) -> None:
        """Of a request that came in another way, perhaps only after nobody waited for it any more."""
        self._send(Abort(request_id))

    def is_under_way(self, request_id: str, salt: str) -> bool:
        answering = self._answering.get(request_id)
        return answering is not None and answering.salts.get(request_id) == salt

    def forget(self, request_id: str) -> None:
        """Its last part has come."""
        self._answering.pop(request_id, None)

    async def ask(self, verb: str, **arguments: Any) -> Any:
        if self.ready is None:
            raise EngineClosed(self.failure or "the engine is starting")
        return await self._ask(verb, arguments)

    def _ask(self, verb: str, arguments: dict[str, Any]) -> asyncio.Future[Any]:
        self._last_number += 1
        future = asyncio.get_running_loop().create_future()
        self._send(Ask(self._last_number, verb, arguments))
        self._asked[self._last_number] = future
        return future

    def _send(self, message: ToEngine) -> None:
        if self._writer is not None:
            self._writer.write(frame(message))

    # The process

    async def _keep_alive(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            began = time.monotonic()
            try:
                await self._live()
            finally:
                self._forget_process()
            self.num_restarts += 1
            if self._first is not None and not self._first.done():
                self._first.set_exception(EngineClosed(self.failure or "the engine could not be started"))
                return
            pause = _FIRST_PAUSE if time.monotonic() - began > _SETTLED_SECONDS else min(2 * pause, _LONGEST_PAUSE)
            _log.error("%s; it is started again in %.1f s", self.failure, pause)
            await asyncio.sleep(pause)

    async def _live(self) -> None:
        """Start a process and hear it out."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "segue.server.worker", str(theirs.fileno())]
            process = self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=_RECEIVE_BYTES)
        self._send(self._start)
        frames = Frames(FromEngine)
        try:
            while data := await reader.read(_RECEIVE_BYTES):
                for message in frames.push(data):
                    self._hear(message)
        except ConnectionError:
            pass  # it ended without a word, which its status tells
        status = await asyncio.to_thread(self._reap, process)
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        self.failure = self.failure or f"the engine's process ended {how}"

    def _reap(self, process: subprocess.Popen[bytes]) -> int:
        if self._writer is not None and self._closing:
            process.terminate()
        try:
            return process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _forget_process(self) -> None:
        """Whoever waits for it hears that it is gone."""
        self.ready = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        error = EngineClosed("the server is shutting down" if self._closing else self.failure or "the engine ended")
        answering, self._answering = self._answering, {}
        for waiting in answering.values():
            waiting.fail(error)
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_exception(error)

    # Hearing

    def _hear(self, message: FromEngine) -> None:
        if isinstance(message, Deltas):
            for part in message.parts:
                if (answering := self._answering.get(part.request_id)) is not None:  # it may have been aborted
                    answering.put(part)
        elif isinstance(message, Reply):
            self._hear_reply(message)
        elif isinstance(message, Refused):
            refused = self._answering.pop(message.request_id, None)
            if refused is not None:
                refused.fail(error_of(message.problem))
        elif isinstance(message, Ready):
            self._hear_ready(message)
        else:
            self._hear_failed(message)

    def _hear_reply(self, reply: Reply) -> None:
        future = self._asked.pop(reply.number, None)
        if future is None or future.done():
            return
        if reply.problem is not None:
            future.set_exception(error_of(reply.problem))
        else:
            future.set_result(reply.value)

    def _hear_ready(self, ready: Ready) -> None:
        self.ready, self.failure = ready, None
        for verb, arguments in self._greetings:
            self._ask(verb, arguments).add_done_callback(_log_failure)
        if self._first is not None and not self._first.done():
            self._first.set_result(ready)

    def _hear_failed(self, failed: Failed) -> None:
        error = error_of(failed.problem)
        self.failure = str(error)
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)


def _log_failure(done: asyncio.Future[Any]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        _log.error("the engine refused its settings: %s", error)
