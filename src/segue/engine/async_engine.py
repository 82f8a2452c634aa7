"""An engine with a thread of its own, and a stream for each request."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from segue.base.errors import EngineClosed, SegueError
from segue.base.types import SamplingParams
from segue.engine.admission import Prompt
from segue.engine.core import EngineCore, new_request_id
from segue.engine.outputs import Delta

_log = logging.getLogger(__name__)
T = TypeVar("T")


class _Inbox(asyncio.Queue[Delta | SegueError]):
    """Where one stream's deltas arrive, and the event loop they must be handed over on."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()


class AsyncEngine:
    """Runs an `EngineCore` beside an asyncio program.

    Everything that touches the engine is a command that its thread carries out between two steps, so callers never
    wait for a lock that a step holds. Tokenising happens on the caller's side. The thread starts with the first call.
    """

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._inboxes: dict[str, _Inbox] = {}
        self._stopping = self._ended = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, **options: Any
    ) -> AsyncIterator[Delta]:
        """Stream one request; see `EngineCore.submit` for the options. Closing the stream, or cancelling the task
        that reads it, aborts the request."""
        inbox = _Inbox()
        tokens = self._engine.encode(prompt)
        chosen_id = new_request_id() if request_id is None else request_id

        def submit() -> None:
            self._engine.submit(tokens, params, request_id=chosen_id, **options)
            self._inboxes[chosen_id] = inbox

        unfinished = params.n if params is not None else 1
        try:
            await asyncio.wrap_future(self._call(submit))
            while unfinished:
                item = await inbox.get()
                if isinstance(item, SegueError):
                    raise item
                if item.error is not None:
                    raise item.error
                unfinished -= item.finish_reason is not None
                yield item
        finally:
            if unfinished:
                self._post(lambda: self._abort(chosen_id, inbox))

    async def call(self, function: Callable[[EngineCore], T]) -> T:
        """Run `function` on the engine's thread, between two steps."""
        return await asyncio.wrap_future(self._call(lambda: function(self._engine)))

    async def close(self) -> None:
        """Abort what runs, stop the thread, close the engine."""
        self._stopping = True
        self._post(lambda: None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    # The engine's thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._drain()
                if self._engine.has_work:
                    self._deliver(self._engine.step())
        except Exception as error:
            self._failure = error
            _log.exception("the engine stopped")
        finally:
            self._shut_down()

    def _drain(self) -> None:
        """Carry out what was asked meanwhile; sleep if there is neither that nor work."""
        with self._wake:
            while not (self._commands or self._engine.has_work or self._stopping):
                self._wake.wait()
        while self._commands:
            self._commands.popleft()()

    def _deliver(self, deltas: list[Delta]) -> None:
        """One hand-over per event loop and step, not one per token."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Inbox, Delta | SegueError]]] = {}
        for delta in deltas:
            inbox = self._inboxes.get(delta.request_id)
            if inbox is None:
                continue
            by_loop.setdefault(inbox.loop, []).append((inbox, delta))
        for loop, items in by_loop.items():
            if not _hand_over(loop, items):
                self._abandon(loop)
        for delta in deltas:
            if delta.finish_reason is not None and not self._engine.is_active(delta.request_id):
                self._inboxes.pop(delta.request_id, None)

    def _abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        """An event loop ended without closing its streams: nobody will read them."""
        for request_id, inbox in list(self._inboxes.items()):
            if inbox.loop is loop:
                self._abort(request_id, inbox)

    def _abort(self, request_id: str, inbox: _Inbox) -> None:
        """Only if the request is still this stream's: an id may have been refused because another has it."""
        if self._inboxes.get(request_id) is inbox:
            del self._inboxes[request_id]
            self._engine.abort(request_id)

    def _shut_down(self) -> None:
        self._stopping = True
        self._engine.close()
        error = EngineClosed(f"the engine stopped: {self._failure}" if self._failure else "the engine is closed")
        for inbox in self._inboxes.values():
            _hand_over(inbox.loop, [(inbox, error)])
        self._inboxes.clear()
        with self._wake:
            self._ended = True
        while self._commands:
            self._commands.popleft()()  # each finds the engine stopping, and tells its caller

    # The caller's side

    def _call(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._stopping:
                    raise EngineClosed("the engine is closed")
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._post(run)
        return future

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            if not self._ended:
                self._commands.append(command)
                self._wake.notify()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="segue-engine", daemon=True)
                    self._thread.start()
                return
        command()


def _hand_over(loop: asyncio.AbstractEventLoop, items: list[tuple[_Inbox, Delta | SegueError]]) -> bool:
    """False if the loop is no more."""

    def put() -> None:
        for inbox, item in items:
            inbox.put_nowait(item)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:
        return False
    return True
