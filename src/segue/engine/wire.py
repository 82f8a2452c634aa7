"""A request moves to an engine in another process, over a socket: nothing is lost, whichever side dies.

    source                                        destination
    HELLO      the snapshot, without its KV   →   makes room; or REFUSED, and the request goes on at the source
                                              ←   WANT       the chunks it lacks
    CHUNK …    index, KV, digest              →   takes in what is whole; what is not, it will compute
    LOST …     index: its KV had to give way
    END                                       →   lets the request run
    forgets the request                       ←   COMMITTED  its id here
    goes on with its stream                   ←   DELTA …    up to the last

The request is the source's until COMMITTED arrives; if that never comes, it goes on there, and the destination aborts it
because its deltas cannot be delivered. So whoever reads the stream hears from one of them only, and from one for certain.
"""

from __future__ import annotations

import mmap
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from struct import Struct

from segue.base.errors import InvalidRequest, SegueError, SnapshotError, StateError
from segue.base.types import FinishReason
from segue.engine.core import EngineCore
from segue.engine.frames import (
    HEADER,
    Body,
    Kind,
    Link,
    count_of,
    delta_from_json,
    delta_to_json,
    error_from_json,
    error_to_json,
    text_of,
    unexpected,
)
from segue.engine.handoff import Export, Import
from segue.engine.loop import new_request_id
from segue.engine.outputs import Delta
from segue.engine.stream import Stream
from segue.state import Snapshot, codec
from segue.state.codec import DIGEST_BYTES, Preamble, chunk_digest
from segue.state.header import MAX_HEADER_BYTES, MAX_TOKENS

TIMEOUT_SECONDS = 30.0
_INDEX = Struct("<I")
codec.MAX_PREAMBLE_BYTES = MAX_HEADER_BYTES + 4 * MAX_TOKENS + codec.MAX_LOGPROBS_BYTES + 2**10
_KV_AT = 64  # where a chunk's KV begins in the buffer it is sent from or received in: on a cache line


# The source


def send_request(
    sock: socket.socket, engine: EngineCore, request_id: str, *, salt: str = "", timeout: float = TIMEOUT_SECONDS
) -> str:
    """Move a request to the engine at the other end; its id there, which its state will have.

    A stream of the request goes on without a break; where there is none, the request ends here with `FinishReason.MOVED`,
    and `RemoteStream` has the rest. After any error the request goes on here. The connection is good for the next request
    after a refusal and after the last delta; any other error cuts it. Each frame, and so each token that the stream waits
    for, must come within `timeout` seconds.
    """
    link = Link(sock, timeout)
    export = engine.export_request(request_id, salt=salt)
    with _undone(link, export.abort):
        preamble = codec.encode(export.snapshot)
        answer = _propose(link, export.snapshot, preamble)
        if isinstance(answer, range):
            _ship(link, export, preamble[-DIGEST_BYTES:], answer)
            _, committed = link.receive(Kind.COMMITTED)
            moved_id = text_of(committed, "request_id")
            export.commit(RemoteStream(sock, request_id, timeout=timeout))
            return moved_id
    export.abort()
    raise answer


def _propose(link: Link, snapshot: Snapshot, preamble: bytes) -> range | SegueError:
    """The chunks that the other side wants, or why it wants nothing."""
    link.send(HEADER.pack(Kind.HELLO, len(preamble)) + preamble)
    kind, answer = link.receive(Kind.WANT, Kind.REFUSED)
    if kind == Kind.REFUSED:
        return error_from_json(answer, "the other engine refused it: ")
    first, count = count_of(answer, "first"), count_of(answer, "count")
    if first + count > snapshot.num_chunks:
        raise SnapshotError(f"{count} chunks from {first} on are wanted, and there are {snapshot.num_chunks}")
    return range(first, first + count)


def _ship(link: Link, export: Export, digest: bytes, wanted: range) -> None:
    """One chunk after another: the socket's own buffer is what lets both sides work at once."""
    buffer = _chunk_buffer(export.snapshot)
    with _undone(link):
        for index in wanted:
            link.send(_chunk_frame(export, index, digest, buffer))
    link.send(HEADER.pack(Kind.END, 0))


def _chunk_frame(export: Export, index: int, digest: bytes, buffer: memoryview) -> bytes | memoryview:
    end = _KV_AT + export.snapshot.chunk_bytes(index)
    try:
        export.read(index, buffer[_KV_AT:end])
    except StateError:
        return HEADER.pack(Kind.LOST, _INDEX.size) + _INDEX.pack(index)
    frame = buffer[_KV_AT - _INDEX.size - HEADER.size : end + DIGEST_BYTES]
    HEADER.pack_into(frame, 0, Kind.CHUNK, len(frame) - HEADER.size)
    _INDEX.pack_into(frame, HEADER.size, index)
    frame[-DIGEST_BYTES:] = chunk_digest(digest, index, buffer[_KV_AT:end])
    return frame


class RemoteStream:
    """What is still to come of a request that another engine took over. If that engine goes, the last delta says so.

    `close` ends the request over there too, unless it has ended by itself.
    """

    def __init__(self, sock: socket.socket, request_id: str, *, timeout: float = TIMEOUT_SECONDS) -> None:
        self._link = Link(sock, timeout)
        self._request_id = request_id
        self._ended = False

    def __iter__(self) -> RemoteStream:
        return self

    def __next__(self) -> Delta:
        if self._ended:
            raise StopIteration
        try:
            delta = delta_from_json(self._request_id, self._link.receive(Kind.DELTA)[1])
        except (OSError, SegueError) as cause:
            error = StateError(f"the engine that took {self._request_id!r} over is gone: {cause}")
            error.__cause__ = cause
            delta = _last(self._request_id, FinishReason.ERROR, error)
            self._link.cut()
        self._ended = delta.finish_reason is not None
        return delta

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            self._link.cut()


# The destination


def receive_request(
    sock: socket.socket, engine: EngineCore, *, salt: str = "", timeout: float = TIMEOUT_SECONDS
) -> str | None:
    """Take over the request that comes next; its id here. None if it was refused, and the other side told why.

    `stream_back` has to follow before the engine's next step. After an error, nothing of the request is left here.
    """
    link = Link(sock, timeout)
    with _undone(link):
        hello = link.begin(Kind.HELLO, codec.MAX_PREAMBLE_BYTES)
        try:
            preamble = _read_hello(hello, engine.config.max_sequence_len)
            arrival = _make_room(engine, preamble.snapshot, salt)
        except SegueError as refusal:
            hello.skip()
            link.send_json(Kind.REFUSED, error_to_json(refusal))
            return None
        with _undone(link, lambda: engine.abort(arrival.request_id), arrival.abort):
            link.send_json(Kind.WANT, {"first": arrival.missing.start, "count": len(arrival.missing)})
            _take(link, arrival, preamble)
            moved_id = arrival.commit()
            link.send_json(Kind.COMMITTED, {"request_id": moved_id})
    return moved_id


def _read_hello(hello: Body, max_tokens: int) -> Preamble:
    preamble = codec.read_preamble(hello, available=hello.left, max_tokens=max_tokens)
    if hello.left:
        raise SnapshotError(f"{hello.left} bytes follow the snapshot's preamble")
    return preamble


def _make_room(engine: EngineCore, snapshot: Snapshot, salt: str) -> Import[str]:
    """Under its own id, or under a new one where that is taken, or where a stream of it is still open."""
    if not engine.has_reader(snapshot.id):
        try:
            return engine.import_request(snapshot, salt=salt)
        except InvalidRequest as error:
            if error.field != "request_id":
                raise
    return engine.import_request(snapshot, request_id=new_request_id(), salt=salt)


def _take(link: Link, arrival: Import[str], preamble: Preamble) -> None:
    buffer = _chunk_buffer(preamble.snapshot)
    for index in arrival.missing:
        data = _receive_chunk(link, preamble, index, buffer)
        if data is not None:
            arrival.write(index, data)
    link.begin(Kind.END, 0)


def _receive_chunk(link: Link, preamble: Preamble, index: int, buffer: memoryview) -> memoryview | None:
    """Chunks come in order, each once. None for one that was lost, or is damaged: it will be computed."""
    start, end = _KV_AT - _INDEX.size, _KV_AT + preamble.snapshot.chunk_bytes(index)
    kind, length = link.header()
    if (kind, length) not in ((Kind.CHUNK, end + DIGEST_BYTES - start), (Kind.LOST, _INDEX.size)):
        raise unexpected(kind, length, f"chunk {index}")
    link.fill(buffer[start : start + length])
    if _INDEX.unpack_from(buffer, start)[0] != index:
        raise SnapshotError(f"chunk {_INDEX.unpack_from(buffer, start)[0]} came where {index} was due")
    data, digest = buffer[_KV_AT:end], buffer[end : end + DIGEST_BYTES]
    return data if kind == Kind.CHUNK and chunk_digest(preamble.digest, index, data) == digest else None


def stream_back(
    sock: socket.socket,
    engine: EngineCore,
    request_id: str,
    *,
    between: Callable[[Delta], object] | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> None:
    """Run the engine, and send what comes of a request to where it was taken over from, until it ends.

    `between` is called after each delta, for whatever else this thread has to do; it may move the request on, whose
    deltas then pass through here. If they cannot be delivered, the request is aborted.
    """
    link = Link(sock, timeout)
    with _undone(link), closing(engine.follow(request_id)) as stream:
        for delta in _to_the_end(stream, request_id):
            link.send_json(Kind.DELTA, delta_to_json(delta))
            if between is not None:
                between(delta)


def _to_the_end(stream: Stream, request_id: str) -> Iterator[Delta]:
    """There is always a last one, also of a request that fails or is aborted."""
    try:
        for delta in stream:
            yield delta
            if delta.finish_reason is not None:
                return
    except SegueError as error:
        yield _last(request_id, FinishReason.ERROR, error)
    else:
        yield _last(request_id, FinishReason.ABORT)


# Both


def _chunk_buffer(snapshot: Snapshot) -> memoryview:
    """For any one chunk, with what is sent around it. Pages are taken when they are written."""
    size = _KV_AT + (snapshot.chunk_bytes(0) if snapshot.num_chunks else 0) + DIGEST_BYTES
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return memoryview(mmap.mmap(-1, size, flags=private))


def _last(request_id: str, reason: FinishReason, error: SegueError | None = None) -> Delta:
    return Delta(request_id, 0, (), "", (), reason, error)


@contextmanager
def _undone(link: Link, *undo: Callable[[], object]) -> Iterator[None]:
    """Whatever goes wrong in here, nothing is left of it on this side, and nobody is left waiting for the socket."""
    try:
        yield
    except BaseException as error:
        for step in undo:
            step()
        link.cut()
        if isinstance(error, OSError):
            raise StateError(f"the connection to the other engine failed: {error}") from error
        raise
