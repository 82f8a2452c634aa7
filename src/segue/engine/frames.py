"""What two engines say to each other over a socket: frames, and deltas and errors as JSON.

A frame is kind u8 | length u64 | body, little endian. A length is compared with what the frame may have before anything is
allocated, and a frame must be complete within the timeout. Nothing that comes is believed before it was checked.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from enum import IntEnum
from struct import Struct
from time import monotonic
from typing import Any, TypeVar

from segue.base import errors
from segue.base.errors import InvalidRequest, SegueError, SnapshotError, StateError
from segue.base.types import FinishReason
from segue.engine.executor import TokenLogprobs
from segue.engine.outputs import Delta
from segue.engine.sequence import Reuse

HEADER = Struct("<BQ")
_MAX_JSON = 2**20
_MAX_DELTA = 16 * 2**20
_MAX_SHOWN = 2**12
_SCRATCH_BYTES = 2**16
_ERRORS: dict[str, type[SegueError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, SegueError)
}
T = TypeVar("T")


class Kind(IntEnum):
    HELLO = 1
    WANT = 2
    REFUSED = 3
    CHUNK = 4
    LOST = 5
    END = 6
    COMMITTED = 7
    DELTA = 8


class Link:
    """One end of a connection. Trouble with the socket is an OSError, and a frame that cannot be is a SnapshotError."""

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        self._sock = sock
        self._timeout = timeout
        self._deadline = 0.0
        with suppress(OSError):  # it is not TCP, or not open: what is done next will tell
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, frame: bytes | memoryview) -> None:
        self._sock.settimeout(self._timeout)
        self._sock.sendall(frame)

    def send_json(self, kind: Kind, value: object) -> None:
        body = json.dumps(value, separators=(",", ":")).encode()
        self.send(HEADER.pack(kind, len(body)) + body)

    def header(self) -> tuple[int, int]:
        """Kind and length of the next frame, which has to be complete in time from now on."""
        self._deadline = monotonic() + self._timeout
        header = bytearray(HEADER.size)
        self.fill(memoryview(header))
        kind, length = HEADER.unpack(header)
        return kind, length

    def fill(self, out: memoryview) -> None:
        """The next bytes of the frame that `header` began."""
        while out:
            remaining = self._deadline - monotonic()
            if remaining <= 0:
                raise TimeoutError("timed out")
            self._sock.settimeout(remaining)
            count = self._sock.recv_into(out)
            if not count:
                raise ConnectionError("the other side closed it")
            out = out[count:]

    def begin(self, kind: Kind, most: int) -> Body:
        """A frame of this kind, to be read piece by piece."""
        found, length = self.header()
        if found != kind or length > most:
            raise unexpected(found, length, kind.name)
        return Body(self, length)

    def receive(self, *kinds: Kind) -> tuple[int, dict[str, Any]]:
        """A frame of one of these kinds, which contains a JSON object."""
        kind, length = self.header()
        if kind not in kinds or length > (_MAX_DELTA if kind == Kind.DELTA else _MAX_JSON):
            raise unexpected(kind, length, " or ".join(due.name for due in kinds))
        body = bytearray(length)
        self.fill(memoryview(body))
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise SnapshotError(f"a frame of kind {kind} is not JSON: {error}") from error
        return kind, checked(value, dict, "a frame's body")

    def cut(self) -> None:
        """The other side notices; the socket is still its owner's to close."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


class Body:
    """What is left of a frame, as a file. Memory is taken for what is read, not for what was announced."""

    def __init__(self, link: Link, length: int) -> None:
        self._link = link
        self.left = length

    def read(self, size: int, /) -> bytes:
        data = bytearray(min(size, self.left))
        self._link.fill(memoryview(data))
        self.left -= len(data)
        return bytes(data)

    def skip(self) -> None:
        """To the end, so that the next frame can be read."""
        while self.left:
            self.read(_SCRATCH_BYTES)


def unexpected(kind: int, length: int, due: str) -> SnapshotError:
    return SnapshotError(f"a frame of kind {kind} with {length} bytes came where {due} was due")


# Deltas and errors as JSON.


def delta_to_json(delta: Delta) -> dict[str, Any]:
    reuse = delta.reuse
    return {
        "token_ids": delta.token_ids,
        "text": delta.text,
        "logprobs": delta.logprobs,
        "finish_reason": delta.finish_reason,
        "error": None if delta.error is None else error_to_json(delta.error),
        "reuse": None if reuse is None else [reuse.held, reuse.cached, reuse.recomputed, reuse.new, reuse.loaded],
    }


def delta_from_json(request_id: str, value: dict[str, Any]) -> Delta:
    """Its state stays where it is: an engine that wants it has to ask for it by id."""
    reason, error, reuse = value.get("finish_reason"), value.get("error"), value.get("reuse")
    try:
        return Delta(
            request_id,
            0,
            tuple([_whole(token) for token in value["token_ids"]]),
            checked(value["text"], str, "text"),
            tuple([_logprobs(*entry) for entry in value["logprobs"]]),
            None if reason is None else FinishReason(reason),
            None if error is None else error_from_json(error),
            None,
            None if reuse is None else Reuse(*[_whole(count) for count in reuse]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as problem:
        raise SnapshotError(f"a delta is not as it should be: {problem!r:.200}") from problem


def error_to_json(error: SegueError) -> dict[str, Any]:
    field = error.field if isinstance(error, InvalidRequest) else None
    message = str(error) if field is None else str(error).removeprefix(f"{field}: ")
    return {"kind": type(error).__name__, "field": field, "message": message[:_MAX_SHOWN]}


def error_from_json(value: object, prefix: str = "") -> SegueError:
    """Of the same class, where we have that, so that callers can tell a lack of room from a wrong model."""
    given = checked(value, dict, "an error")
    kind = _ERRORS.get(text_of(given, "kind"), StateError)
    message = prefix + text_of(given, "message")
    return kind(text_of(given, "field"), message) if issubclass(kind, InvalidRequest) else kind(message)


def text_of(value: dict[str, Any], name: str) -> str:
    return checked(value.get(name), str, name)


def count_of(value: dict[str, Any], name: str) -> int:
    count = checked(value.get(name), int, name)
    if isinstance(count, bool) or count < 0:
        raise SnapshotError(f"{name} must not be {count}")
    return count


def checked(value: object, kind: type[T], name: str) -> T:
    if not isinstance(value, kind):
        raise SnapshotError(f"{name} must be {kind.__name__}, not {value!r:.40}")
    return value


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r:.40} is not a whole number")
    return value


def _logprobs(chosen: float, rank: int, top: list[tuple[int, float]]) -> TokenLogprobs:
    return TokenLogprobs(float(chosen), _whole(rank), tuple([(_whole(token), float(value)) for token, value in top]))
