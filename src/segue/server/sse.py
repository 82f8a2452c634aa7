"""Server-sent events, written straight to the connection, and what happens when nobody reads them any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def event(value: Any, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return head + b"data: " + _encode(value) + b"\n\n"


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return _encode(content)


class EventStream(Response):
    """Each item of `events` is one write. However it ends, and when the client goes, `close` is called."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], close: Callable[[], None], headers: dict[str, str] | None = None
    ) -> None:
        given = {"cache-control": "no-cache", "x-accel-buffering": "no"} | (headers or {})
        super().__init__(b"", headers=given)
        if "content-length" not in given:
            del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Any, receive: Receive, send: Callable[[Any], Awaitable[None]]) -> None:
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            leaving.cancel()
            writing.cancel()
            await asyncio.wait((writing, leaving))
            self._close()  # an iterator that was never begun has no end of its own

    async def _write(self, send: Callable[[Any], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            close = getattr(self._events, "aclose", None)
            if close is not None:
                await close()


class ByteStream(EventStream):
    """Bytes of a known length, as they come."""

    media_type = "application/octet-stream"

    def __init__(self, content: AsyncIterator[bytes], close: Callable[[], None], size: int) -> None:
        super().__init__(content, close, {"content-length": str(size)})


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """The result of `work`, which is cancelled if the client goes first; then there is none."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.wait((working, leaving))
