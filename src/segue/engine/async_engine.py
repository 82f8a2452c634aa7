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
from segue.engine.core import EngineCore, Prompt
from segue.engine.outputs import Delta

_log = logging.getLogger(__name__)
T = TypeVar("T")
_Inbox = asyncio.Queue[Delta | SegueError]


class AsyncEngine:
    """Runs an `EngineCore` beside an asyncio program.

    Everything that touches the engine is a command that its thread carries out between two steps, so callers never
    wait for a lock that a step holds. Tokenising happens on the caller's side.
    """

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._inboxes: dict[str, tuple[asyncio.AbstractEventLoop, _Inbox]] = {}
        self._stopping = self._ended = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="segue-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[Delta]:
        """Stream one request; see `EngineCore.submit` for the options. Leaving the loop early aborts it at once."""
        loop = asyncio.get_running_loop()
        inbox: _Inbox = asyncio.Queue()
        tokens = self._engine.encode(prompt)

        def submit() -> str:
            request_id = self._engine.submit(tokens, params, **options)
            self._inboxes[request_id] = (loop, inbox)
            return request_id

        request_id = await asyncio.wrap_future(self._call(submit))
        unfinished = (params or SamplingParams()).n
        try:
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
                self._post(lambda: self._abort(request_id))

    async def call(self, function: Callable[[EngineCore], T]) -> T:
        """Run `function` on the engine's thread, between two steps."""
        return await asyncio.wrap_future(self._call(lambda: function(self._engine)))

    async def close(self) -> None:
        """Abort what runs, stop the thread, close the engine."""
        self._stopping = True
        self._post(lambda: None)
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
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Inbox, Delta]]] = {}
        for delta in deltas:
            if delta.request_id in self._inboxes:
                loop, inbox = self._inboxes[delta.request_id]
                by_loop.setdefault(loop, []).append((inbox, delta))
        for loop, items in by_loop.items():
            self._hand_over(loop, items)
        for delta in deltas:
            if delta.finish_reason is not None and not self._engine.is_active(delta.request_id):
                self._inboxes.pop(delta.request_id, None)

    def _hand_over(self, loop: asyncio.AbstractEventLoop, items: list[tuple[_Inbox, Any]]) -> None:
        def put() -> None:
            for inbox, item in items:
                inbox.put_nowait(item)

        if not loop.is_closed():
            loop.call_soon_threadsafe(put)

    def _abort(self, request_id: str) -> None:
        self._engine.abort(request_id)
        self._inboxes.pop(request_id, None)

    def _shut_down(self) -> None:
        error = EngineClosed(f"the engine stopped: {self._failure}" if self._failure else "the engine is closed")
        self._stopping = True
        for loop, inbox in self._inboxes.values():
            self._hand_over(loop, [(inbox, error)])
        self._inboxes.clear()
        with self._wake:
            self._ended = True
        while self._commands:
            self._commands.popleft()()  # each finds the engine stopping, and tells its caller
        self._engine.close()

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
                return
        command()
