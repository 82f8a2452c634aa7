"""Connections with limits that uvicorn does not have: on the head of a request, on clients that do not read, on their number."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from segue.server.failures import failure
from segue.server.service import Limits

_SEPARATORS = 4  # bytes of a header's line that are neither its name nor its value
_GRACE = 0.1  # seconds to read what came while this process was busy, before its sender is called late


class _HeadTooLong(Exception):
    pass


def limited(limits: Limits) -> type[Connection]:
    """The protocol class for uvicorn, which makes the instances itself."""
    return type("LimitedConnection", (Connection,), {"limits": limits})


class Connection(HttpToolsProtocol):
    """One connection of a client.

    The time for a head runs from the connection's first moment, and later from the first byte after a request: a client that
    sends a byte now and then does not get more of it. A connection that is idle between requests is uvicorn's to close.
    """

    limits = Limits()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0
        self._head_is_next = True  # what comes next belongs to a head, not to a body
        self._head_is_too_long = False
        self._cycles: list[RequestResponseCycle] = []  # not yet answered: more than one if the client pipelines

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            transport.abort()
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """uvicorn tells only the newest request that its client is gone; one that runs before it must hear it too."""
        self._forget_head()
        self._forget_stall()
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles.clear()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._head_is_next:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head_is_next and self._num_head_bytes > self.limits.max_head_bytes:
            self._refuse_head()
        elif self._head_timer is None and not self._is_answering():
            self._expect_head()

    # The parser

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + _SEPARATORS for name, value in self.headers)
        if size > self.limits.max_head_bytes:
            self._head_is_too_long = True
            raise _HeadTooLong  # the parser stops, and `send_400_response` is called
        self._forget_head()
        self._num_head_bytes = 0
        self._head_is_next = False
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)

    def on_message_complete(self) -> None:
        self._head_is_next = True
        super().on_message_complete()

    # The time for a head

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.head_seconds, self._head_is_late)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = self.loop.call_later(_GRACE, self._give_up_head)

    def _give_up_head(self) -> None:
        """Without a word if nothing was asked: what a client asks next must not find an answer that is already there."""
        self._head_timer = None
        if not self._num_head_bytes:
            self.transport.close()
        elif not self.transport.is_closing():
            self._refuse(408, f"the head of a request did not come within {self.limits.head_seconds:g} s")

    def _is_answering(self) -> bool:
        return any(not cycle.response_complete for cycle in self._cycles)

    # A client that does not read, while its requests keep their places

    def pause_writing(self) -> None:
        super().pause_writing()
        self._forget_stall()
        self._expect_progress()

    def resume_writing(self) -> None:
        self._forget_stall()
        super().resume_writing()

    def _expect_progress(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self.limits.stall_seconds, self._check_progress, left)

    def _check_progress(self, left_before: int) -> None:
        """Slow is fine. Nothing more is written while it is paused, so what is left says whether any of it was read."""
        if self.transport.get_write_buffer_size() < left_before:
            self._expect_progress()
        else:
            self.transport.abort()

    def _forget_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    # Refusals, before there is an application to make them

    def _refuse_head(self) -> None:
        self._refuse(431, f"the head of a request has at most {self.limits.max_head_bytes} bytes")

    def send_400_response(self, msg: str) -> None:
        if self._head_is_too_long:
            self._refuse_head()
        else:
            self._refuse(400, "this is not HTTP")

    def _refuse(self, status: int, message: str) -> None:
        """Ends the connection. An answer that has begun must not have another in the middle of it."""
        if not any(cycle.response_started and not cycle.response_complete for cycle in self._cycles):
            body = msgspec.json.encode(failure(status, message))
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
