"""An engine with a thread of its own, and a stream for each request."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from segue.base.errors import EngineClosed, SegueError, StateError
from segue.base.types import SamplingParams
from segue.engine.admission import Prompt
from segue.engine.core import EngineCore
from segue.engine.handoff import Export, Import
from segue.engine.inbox import Inbox, Item, Move, put_all
from segue.engine.loop import new_request_id
from segue.engine.outputs import Delta
from segue.engine.request import Request, as_request
from segue.state import State
from segue.state.store import SavedState
from segue.state.store import save as save_snapshot

_log = logging.getLogger(__name__)
_LONGEST_SLEEP = 60.0  # seconds; a thread cannot wait for years
T = TypeVar("T")


class AsyncEngine:
    """Runs an `EngineCore` beside an asyncio program.

    Everything that touches the engine is a command that its thread carries out between two steps, so callers never
    wait for a lock that a step holds. Tokenising happens on the caller's side. The thread starts with the first call.
    """

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._inboxes: dict[str, Inbox] = {}
        self._stopping = self._ended = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def generate(
        self, request: Request | Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[Delta]:
        """Stream one request; see `EngineCore.submit`. Closing the stream, or cancelling the task that reads it, aborts
        the request."""
        wanted = as_request(request, params, options)
        request_id = new_request_id() if wanted.request_id is None else wanted.request_id
        encoded = replace(wanted, request_id=request_id, **self._encoded(wanted))
        return self._stream(request_id, wanted.params.n, lambda: self._engine.submit(encoded))

    def generate_continuation(
        self, parent: State | str, suffix: Prompt = (), params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[Delta]:
        """Stream what follows a state, or a request by its id; see `Request` for the options."""
        return self.generate(Request(params=params or SamplingParams(), parent=parent, suffix=suffix, **options))

    def resume(self, state: State | str, *, request_id: str | None = None, **options: Any) -> AsyncGenerator[Delta]:
        """Stream the rest of a request that was saved unfinished; see `EngineCore.resume`."""
        chosen_id = new_request_id() if request_id is None else request_id
        return self._stream(chosen_id, 1, lambda: self._engine.resume(state, request_id=chosen_id, **options))

    async def save(self, state: State | str, path: str | Path, **options: Any) -> int:
        """As `EngineCore.save`, chunk by chunk between steps: requests go on meanwhile. Cancelling it does not stop the
        writing, which ends by itself."""
        outgoing, done = await self._ask(lambda: self._engine.begin_save(state, **options), lambda begun: begun[1]())

        def write() -> int:
            try:
                return save_snapshot(Path(path), outgoing.snapshot, self._in_turn(outgoing.read))
            finally:
                self.post(done)

        return await asyncio.to_thread(write)

    async def load(self, path: str | Path, **options: Any) -> State:
        """As `EngineCore.load`, chunk by chunk between steps: requests go on meanwhile. Cancelled, it leaves nothing."""
        cancelled = threading.Event()

        def take() -> State:
            with SavedState.open(Path(path)) as saved:
                arrival = self._call(lambda: self._engine.begin_load(saved.snapshot, **options)).result()
                try:
                    saved.take(self._in_turn(arrival.write))
                    state = self._call(arrival.commit).result()
                except BaseException:
                    self.post(arrival.abort)
                    raise
                if cancelled.is_set():
                    self.post(lambda: self._engine.release(state))
                return state

        taking = asyncio.ensure_future(asyncio.to_thread(take))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            cancelled.set()
            taking.add_done_callback(self._release_loaded)
            raise

    def _release_loaded(self, done: asyncio.Future[State]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.post(partial(self._engine.release, done.result()))

    def _in_turn(self, function: Callable[[int, memoryview], None]) -> Callable[[int, memoryview], None]:
        """For a chunk at a time, on the engine's thread."""
        return lambda index, data: self._call(lambda: function(index, data)).result()

    async def hand_over(self, request_id: str, destination: AsyncEngine, *, salt: str = "") -> str:
        """Move a request to another engine of this event loop. Its stream goes on without a break; its new id. Cancelled
        or refused, it leaves the request where it is."""
        export = await self._ask(
            lambda: self._engine.export_request(request_id, salt=salt), lambda begun: begun.abort()
        )
        try:
            arrival = await destination._ask(
                lambda: destination._engine.import_request(export.snapshot, salt=salt), lambda begun: begun.abort()
            )
            try:
                await self._ship(export, arrival, destination)
                inbox = await destination._begin(arrival.request_id, arrival.commit)
            except BaseException:
                destination.post(arrival.abort)
                raise
        except BaseException:
            self.post(export.abort)
            raise
        move = Move(destination, arrival.request_id, inbox)
        left = self._call(lambda: self._leave(export, move))
        left.add_done_callback(lambda done: move.abort() if done.exception() else None)
        await asyncio.shield(asyncio.wrap_future(left))
        return arrival.request_id

    async def _ship(self, export: Export, arrival: Import[str], destination: AsyncEngine) -> None:
        """KV that has to give way meanwhile is computed again over there."""
        with suppress(StateError):
            for index in arrival.missing:
                chunk = memoryview(bytearray(export.snapshot.chunk_bytes(index)))
                await asyncio.wrap_future(self._call(partial(export.read, index, chunk)))
                await asyncio.wrap_future(destination._call(partial(arrival.write, index, chunk)))

    async def call(self, function: Callable[[EngineCore], T]) -> T:
        """Run `function` on the engine's thread, between two steps."""
        return await asyncio.wrap_future(self._call(lambda: function(self._engine)))

    async def close(self) -> None:
        """Abort what runs, stop the thread, close the engine."""
        self._stopping = True
        self.post(lambda: None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def _ask(self, function: Callable[[], T], undo: Callable[[T], object]) -> T:
        """A command whose effect is undone if nobody waits for it any more when it has been carried out."""
        future = self._call(function)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: self._undo(done, undo))
            raise

    def _undo(self, done: Future[T], undo: Callable[[T], object]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.post(partial(_discard, undo, done.result()))

    def _encoded(self, request: Request) -> dict[str, Any]:
        """Text becomes tokens here, on the caller's side."""
        if request.prompt is not None:
            return {"prompt": self._engine.encode(request.prompt)}
        return {"suffix": self._engine.encode_suffix(request.suffix)}

    async def _stream(self, request_id: str, num_answers: int, start: Callable[[], str]) -> AsyncGenerator[Delta]:
        inbox = await self._begin(request_id, start)
        deltas = self.deltas(request_id, num_answers, inbox)
        try:
            async for delta in deltas:
                yield delta
        finally:
            await deltas.aclose()

    async def _begin(self, request_id: str, start: Callable[[], str]) -> Inbox:
        """Start a request on the engine's thread; where its deltas will arrive."""
        inbox = Inbox()

        def begin() -> None:
            start()
            self._inboxes[request_id] = inbox

        try:
            await asyncio.wrap_future(self._call(begin))
        except BaseException:
            self.post(lambda: self.end(request_id, inbox))  # it may have started: the wait was cancelled
            raise
        return inbox

    async def deltas(self, request_id: str, num_answers: int, inbox: Inbox) -> AsyncGenerator[Delta]:
        """Until the last answer has ended, wherever the request goes meanwhile."""
        unfinished = num_answers
        try:
            while unfinished:
                item = await inbox.get()
                if isinstance(item, SegueError):
                    raise item
                if isinstance(item, Move):
                    unfinished = 0
                    async with aclosing(item.deltas()) as elsewhere:
                        async for delta in elsewhere:
                            yield delta
                    return
                if item.error is not None:
                    raise item.error
                unfinished -= item.finish_reason is not None
                yield item
        finally:
            if unfinished:
                self.post(lambda: self.end(request_id, inbox))
                inbox.leave()

    # The engine's thread

    def _leave(self, export: Export, move: Move) -> None:
        """The request goes on elsewhere, and whoever reads its stream reads that; if nobody does any more, it ends."""
        export.commit()
        inbox = self._inboxes.pop(export.request_id, None)
        if inbox is None:
            move.forget()
        elif not put_all(inbox.loop, [(inbox, move)]):
            move.abort()

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
                self._wake.wait(min(self._engine.expire() or _LONGEST_SLEEP, _LONGEST_SLEEP))
        while self._commands:
            self._carry_out(self._commands.popleft())

    def _carry_out(self, command: Callable[[], None]) -> None:
        """What one caller asked for cannot end the engine for the others."""
        try:
            command()
        except Exception:
            _log.exception("a command failed")

    def _deliver(self, deltas: list[Delta]) -> None:
        """One hand-over per event loop and step, not one per token."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Inbox, Item]]] = {}
        for delta in deltas:
            inbox = self._inboxes.get(delta.request_id)
            if inbox is None:
                continue
            by_loop.setdefault(inbox.loop, []).append((inbox, delta))
        for loop, items in by_loop.items():
            if not put_all(loop, items):
                self._abandon(loop)
        for delta in deltas:
            if delta.finish_reason is not None and not self._engine.is_active(delta.request_id):
                self._inboxes.pop(delta.request_id, None)

    def _abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        """An event loop ended without closing its streams: nobody will read them."""
        for request_id, inbox in list(self._inboxes.items()):
            if inbox.loop is loop:
                self.end(request_id, inbox)

    def drop_inbox(self, request_id: str, inbox: Inbox) -> None:
        if self._inboxes.get(request_id) is inbox:
            del self._inboxes[request_id]

    def end(self, request_id: str, inbox: Inbox) -> None:
        """Only if the request is still this stream's: an id may have been refused because another has it."""
        if self._inboxes.get(request_id) is inbox:
            del self._inboxes[request_id]
            self._engine.abort(request_id)

    def _shut_down(self) -> None:
        self._stopping = True
        try:
            self._engine.close()
        except Exception as failure:
            self._failure = self._failure or failure
            _log.exception("the engine could not be closed")
        finally:
            error = EngineClosed(f"the engine stopped: {self._failure}" if self._failure else "the engine is closed")
            for inbox in self._inboxes.values():
                put_all(inbox.loop, [(inbox, error)])
            self._inboxes.clear()
            with self._wake:
                self._ended = True
            while self._commands:
                self._carry_out(self._commands.popleft())  # each finds the engine stopping, and tells its caller

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

        self.post(run)
        return future

    def post(self, command: Callable[[], None]) -> None:
        with self._wake:
            if not self._ended:
                self._commands.append(command)
                self._wake.notify()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="segue-engine", daemon=True)
                    self._thread.start()
                return
        command()


def _discard(undo: Callable[[T], object], result: T) -> None:
    undo(result)
