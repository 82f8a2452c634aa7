"""A request on its way from one engine to another, in two phases: nothing is lost, whichever side fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from segue.base.errors import StateError
from segue.base.types import FinishReason
from segue.engine.outputs import Delta
from segue.engine.scheduler import Scheduler
from segue.engine.sequence import Sequence, Status
from segue.engine.transfer import Incoming, Outgoing
from segue.state import Snapshot, State

if TYPE_CHECKING:
    from segue.engine.core import EngineCore

T = TypeVar("T")


class Export:
    """A request that stands still at its source. `commit` once the destination has it, `abort` to let it go on here.

    Until then its KV is under the most valuable of leases; what has to give way to running work all the same is computed
    again, by whoever goes on with it.
    """

    def __init__(
        self, engine: EngineCore, scheduler: Scheduler, sequence: Sequence, state: State, outgoing: Outgoing
    ) -> None:
        self.request_id = sequence.turn.id
        self.snapshot: Snapshot = outgoing.snapshot
        self.read = outgoing.read
        self._engine = engine
        self._scheduler = scheduler
        self._sequence = sequence
        self._state = state

    def commit(self, successor: Iterator[Delta] | None = None) -> None:
        """Free everything here. A stream of the request goes on with `successor`, the destination's deltas; without it,
        it ends with `FinishReason.MOVED`."""
        self._require_parked()
        self.drop()
        self._scheduler.finish(self._sequence, FinishReason.MOVED)
        self._engine.end_export(self, successor)

    def abort(self) -> None:
        """Let the request go on here; does nothing after `commit`, or if the request was aborted meanwhile."""
        if self._sequence.status is Status.PARKED:
            self._engine.withdraw_export(self)
            self._scheduler.unpark(self._sequence, self._state)

    def drop(self) -> None:
        """Give up the KV."""
        if self._state.lease is not None:
            self._scheduler.kv.leases.end(self._state.lease)

    def _require_parked(self) -> None:
        if self._sequence.status is not Status.PARKED:
            raise StateError(f"{self.request_id!r} is not on its way any more: it was aborted, or goes on here")


class Import(Generic[T]):
    """Room for a state, or a request, that is about to arrive. Chunks of `missing` are enough; one that never comes is
    computed again. `commit` gives what the caller is to go on with: a running request's id, or a state.

    Its id is kept for it from the beginning. After `commit` or `abort` it is of no more use.
    """

    def __init__(
        self, incoming: Incoming, request_id: str, commit: Callable[[State], T], free_id: Callable[[], None]
    ) -> None:
        self.request_id = request_id
        self.missing = incoming.missing
        self._incoming = incoming
        self._commit = commit
        self._free_id = free_id
        self._open = True

    def write(self, index: int, data: memoryview) -> None:
        """Take in one chunk."""
        self._require_open()
        self._incoming.write(index, data)

    def commit(self) -> T:
        self._require_open()
        self._close()
        try:
            return self._commit(self._incoming.finish(self.request_id))
        except BaseException:
            self._incoming.abort()
            raise

    def abort(self) -> None:
        """Give everything back; does nothing after `commit`."""
        if self._open:
            self._close()
            self._incoming.abort()

    def _close(self) -> None:
        self._open = False
        self._free_id()

    def _require_open(self) -> None:
        if not self._open:
            raise StateError(f"the import of {self.request_id!r} has ended")


def hand_over(source: EngineCore, destination: EngineCore, request_id: str, *, salt: str = "") -> str:
    """Move a request between two engines of one process. A stream of it at the source goes on without a break."""
    export = source.export_request(request_id, salt=salt)
    try:
        arrival = destination.import_request(export.snapshot, salt=salt)
        try:
            buffer = memoryview(bytearray(export.snapshot.chunk_bytes(0))) if arrival.missing else memoryview(b"")
            with suppress(StateError):  # KV that had to give way is computed again
                for index in arrival.missing:
                    chunk = buffer[: export.snapshot.chunk_bytes(index)]
                    export.read(index, chunk)
                    arrival.write(index, chunk)
            moved_id = arrival.commit()
        except BaseException:
            arrival.abort()
            raise
    except BaseException:
        export.abort()
        raise
    export.commit(destination.follow(moved_id) if source.has_reader(request_id) else None)
    return moved_id
