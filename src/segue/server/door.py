"""What every request passes before a route sees it: the key, the size and the speed of its body, and the log."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from segue.base.errors import SegueError
from segue.server.failures import error_json, failure
from segue.server.service import Limits, new_id
from segue.server.sse import JsonResponse
from segue.server.tenants import Tenants

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_OPEN_PATHS = ("/health", "/version", "/metrics", "/docs", "/openapi.json")
_IMPORT_PATH = "/v1/requests/import"  # a request with its KV, of any size
_LINGER_SECONDS = 2.0
_log = logging.getLogger("segue.access")


class _Refused(HTTPException):
    """About a body. FastAPI lets this kind through, and makes of any other that comes while it reads a 400 of its own. The
    rest of the body is not used: the connection ends."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message, {"connection": "close"})


def _too_large(most_bytes: int) -> _Refused:
    return _Refused(413, f"a body has at most {most_bytes} bytes")


class Door:
    """A plain ASGI middleware: Starlette's own kind would come between a stream and its client."""

    def __init__(self, app: Any, tenants: Tenants, limits: Limits) -> None:
        self._app = app
        self._tenants = tenants
        self._limits = limits

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        passage = _Passage(scope, receive, send, self._limits)
        headers = Headers(scope=scope)
        try:
            if scope["path"] not in _OPEN_PATHS:
                scope.setdefault("state", {})["gate"] = self._tenants.gate(headers.get("authorization"))
            length = headers.get("content-length", "0")
            if length.isascii() and length.isdigit() and int(length[:20]) > passage.most_bytes:
                raise _too_large(passage.most_bytes)
            await self._app(scope, passage.receive, passage.send)
        except SegueError as error:  # the key: what routes raise is answered further in
            extra = {"www-authenticate": "Bearer"} if error.status == 401 else {}
            await passage.refuse(error.status, error_json(error), extra)
        except _Refused as error:
            await passage.refuse(error.status_code, failure(error.status_code, error.detail))
        finally:
            passage.log()


class _Passage:
    """One request on its way through."""

    def __init__(self, scope: Any, receive: Receive, send: Send, limits: Limits) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._limits = limits
        self._is_import = scope["path"] == _IMPORT_PATH
        self.most_bytes = limits.max_import_bytes if self._is_import else limits.max_body_bytes
        self._began = self._body_began = time.monotonic()
        self._num_bytes = 0
        self._whole = False
        self._status: int | None = None
        self._request_id = new_id("http")

    async def receive(self) -> Message:
        if self._whole:
            return await self._receive()
        if self._is_import:
            self._body_began = time.monotonic()  # it may take long, as long as it comes
        left = self._body_began + self._limits.body_seconds - time.monotonic()
        try:
            message = await asyncio.wait_for(self._receive(), max(left, 0.0))
        except TimeoutError:
            raise _Refused(408, f"the body did not come within {self._limits.body_seconds:g} s") from None
        self._num_bytes += len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        if self._num_bytes > self.most_bytes:
            raise _too_large(self.most_bytes)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = dict(message.get("headers", ()))
            self._request_id = headers.get(b"x-request-id", self._request_id.encode()).decode("latin-1")
            if b"x-request-id" not in headers:
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._request_id.encode())]
        elif self._refused_midway() and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._linger()
            message = {"type": "http.response.body"}
        await self._send(message)

    def _refused_midway(self) -> bool:
        """A client that sends nothing (408) is not waited for again."""
        return self._status is not None and self._status >= 400 and self._status != 408 and not self._whole

    async def _linger(self) -> None:
        """Read on for a moment: a connection that is closed with bytes unread is reset, and the client that is still busy
        sending them may never see its answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while not self._whole:
                    message = await self._receive()
                    self._whole = not message.get("more_body", False)

    async def refuse(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        """If nothing was answered yet. The rest of the body is not used: the connection ends."""
        if self._status is None:
            response = JsonResponse(content, status, {"connection": "close"} | (headers or {}))
            await response(self._scope, self._receive, self.send)

    def log(self) -> None:
        if _log.isEnabledFor(logging.INFO):
            state = self._scope.get("state", {})
            gate = state.get("gate")
            entry = {
                "request_id": self._request_id,
                "tenant": gate.tenant.name if gate is not None else None,
                "user": state.get("user"),  # as the body says, if a route has read one
                "method": self._scope["method"],
                "path": self._scope["path"][:200],
                "status": self._status,
                "seconds": round(time.monotonic() - self._began, 4),
            }
            _log.info(json.dumps(entry))
