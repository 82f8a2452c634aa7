"""/v1/requests: a running request as bytes, from one server to another, in two phases.

export            the request stands still at its source, and its bytes come, as of a saved state
import            the destination takes them and goes on with the answer; its reply begins with the next token
export/commit     the source frees everything, and its own stream ends with the reason "moved"
export/abort      the source goes on instead; so it does by itself if nothing is said for a while
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from starlette.requests import ClientDisconnect

from segue.base.errors import InvalidRequest, SegueError
from segue.base.types import SamplingParams
from segue.server.completions import Format
from segue.server.fields import CompletionBody
from segue.server.generation import Generation
from segue.server.remote_engine import Answering, Call
from segue.server.reply import CLIENT_LEFT, reply
from segue.server.scope import QueriedSalt
from segue.server.service import Service, new_id
from segue.server.sse import ByteStream, JsonResponse
from segue.server.tenants import Gate

_READ_BYTES = 1 << 20


class Exports:
    """Requests that wait at their source. One that nobody commits goes on after `patience` seconds."""

    def __init__(self, service: Service, patience: float) -> None:
        self._service = service
        self._patience = patience
        self._waiting: dict[str, tuple[str, asyncio.TimerHandle]] = {}  # salt, and when to give up
        self._tasks: set[asyncio.Task[Any]] = set()

    def add(self, request_id: str, salt: str) -> None:
        timer = asyncio.get_running_loop().call_later(self._patience, self.abort, request_id)
        self._waiting[request_id] = salt, timer

    def abort(self, request_id: str) -> None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting[1].cancel()
            task = asyncio.ensure_future(self._abort(request_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _abort(self, request_id: str) -> None:
        try:
            await self._service.engine.ask("abort_export", request_id=request_id)
        except SegueError:
            return  # the engine is gone, and the request with it

    async def end(self, request_id: str, salt: str, verb: str) -> None:
        owner, timer = self._waiting.get(request_id, (None, None))
        if timer is None or owner != salt:
            raise InvalidRequest("request_id", f"{request_id!r:.100} is not on its way to another engine")
        del self._waiting[request_id]
        timer.cancel()
        await self._service.engine.ask(verb, request_id=request_id)


def requests(service: Service) -> APIRouter:
    router = APIRouter()
    exports = Exports(service, service.limits.export_seconds)

    @router.post("/v1/requests/{request_id}/export")
    async def export(request_id: str, salt: QueriedSalt) -> Response:
        return await _export(service, exports, request_id, salt)

    @router.post("/v1/requests/{request_id}/export/commit")
    async def commit(request_id: str, salt: QueriedSalt) -> Response:
        await exports.end(request_id, salt, "commit_export")
        return JsonResponse({"id": request_id, "moved": True})

    @router.post("/v1/requests/{request_id}/export/abort")
    async def abort(request_id: str, salt: QueriedSalt) -> Response:
        await exports.end(request_id, salt, "abort_export")
        return JsonResponse({"id": request_id, "moved": False})

    @router.post("/v1/requests/import")
    async def import_(
        request: Request,
        salt: QueriedSalt,
        stream: bool = False,
        hold_seconds: Annotated[float | None, Query(ge=0, le=1e9, allow_inf_nan=False)] = None,
    ) -> Response:
        """The rest of the answer, as of /v1/completions."""
        answer_id = new_id("cmpl")
        with tempfile.TemporaryDirectory(prefix="segue-import-") as folder:
            path = Path(folder, "request.segue")
            try:
                await _receive(request, path)
            except ClientDisconnect:
                return Response(status_code=CLIENT_LEFT)
            call = Call(answer_id, [], SamplingParams(), salt, hold=hold_seconds or False, imported=True)
            format = Format(service, CompletionBody.model_validate({"prompt": "-"}), answer_id, [""])
            running = _run(service, request.state.gate, call, path)
            return await reply(request, running, format, answer_id, stream=stream)

    return router


async def _export(service: Service, exports: Exports, request_id: str, salt: str) -> Response:
    folder = tempfile.TemporaryDirectory(prefix="segue-export-")
    path = Path(folder.name, "request.segue")
    try:
        size = await service.engine.ask("export", request_id=request_id, salt=salt, path=str(path))
    except BaseException:
        folder.cleanup()
        raise
    exports.add(request_id, salt)
    num_sent = 0

    async def content() -> AsyncIterator[bytes]:
        nonlocal num_sent
        with open(path, "rb") as file:
            while data := await asyncio.to_thread(file.read, _READ_BYTES):
                num_sent += len(data)
                yield data

    def close() -> None:
        """A client that has it all may leave before we see the end of the file: it will commit."""
        folder.cleanup()
        if num_sent < size:
            exports.abort(request_id)

    return ByteStream(content(), close, size)


async def _receive(request: Request, path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        async for data in request.stream():
            await asyncio.to_thread(file.write, data)


async def _run(service: Service, gate: Gate, call: Call, path: Path) -> Generation:
    """What arrives is expected before it is let in, so that no token of it is missed."""

    async def arrive(answering: Answering) -> None:
        try:
            await service.engine.ask(
                "import", path=str(path), salt=call.salt, request_id=call.request_id, hold=call.hold
            )
        except SegueError as error:
            answering.fail(type(error)(*_args(error, path)))

    arriving: list[asyncio.Future[None]] = []

    def submit(calls: Any) -> Answering:
        answering = service.engine.expect(call)
        arriving.append(asyncio.ensure_future(arrive(answering)))
        return answering

    generation: Generation | None = None
    try:
        generation = await service.run(gate, [call], submit=submit)
        await asyncio.wait(arriving)  # the file is needed until then
        return generation
    except BaseException:  # also: the client left
        if generation is not None:
            generation.close()
        if arriving:
            await asyncio.wait(arriving)
            service.engine.abort_arrived(call.request_id)
        raise


def _args(error: SegueError, path: Path) -> tuple[str, ...]:
    message = str(error).replace(str(path), "the request")
    if isinstance(error, InvalidRequest):
        return error.field, message.removeprefix(f"{error.field}: ")
    return (message,)
