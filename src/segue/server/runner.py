"""From an application to a listening server, and down again: SIGTERM lets what runs finish."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from segue.base.errors import InvalidRequest
from segue.server.protocol import limited
from segue.server.service import Service

_BACKLOG = 1024


class Server(uvicorn.Server):
    """Calls `on_ready` with its port when it listens. It drains: new requests are refused while those under way finish."""

    def __init__(self, app: FastAPI, service: Service, host: str, port: int, on_ready: Callable[[int], None]) -> None:
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=limited(service.limits),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=int(service.limits.drain_seconds),
            backlog=_BACKLOG,
        )
        super().__init__(config)
        self._service = service
        self._host, self._port = host, port
        self._on_ready = on_ready

    def run(self, sockets: list[socket.socket] | None = None) -> int:  # type: ignore[override]
        """Exit status: 1 if it could not be started."""
        with _listen(self._host, self._port) as sock:
            self._port = sock.getsockname()[1]
            super().run([sock])
        return 0 if self.started else 1

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready(self._port)

    def handle_exit(self, sig: int, frame: object) -> None:
        self._service.draining = True
        super().handle_exit(sig, frame)  # type: ignore[arg-type]


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise InvalidRequest("port", f"{host}:{port} cannot be listened at: {error}") from error
    return sock
