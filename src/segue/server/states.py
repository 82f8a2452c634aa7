"""/v1/states: what a tenant's requests have left, and the verbs for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request

from segue.base.errors import StateError
from segue.server.fields import ForkBody, HoldBody, LoadBody, SaltBody, SaveBody
from segue.server.generation import info_json
from segue.server.messages import StateInfo
from segue.server.scope import QueriedSalt, salt_of
from segue.server.service import Service, new_id
from segue.server.sse import JsonResponse


def states(service: Service) -> APIRouter:
    """Ids may have a slash in them (`request/0`), so verbs come before them."""
    router = APIRouter()
    ask = service.engine.ask

    @router.get("/v1/states")
    async def list_states(salt: QueriedSalt) -> JsonResponse:
        found = await ask("states", salt=salt)
        return JsonResponse({"object": "list", "data": [_json(entry) for entry in found]})

    @router.post("/v1/states/fork/{state_id:path}")
    async def fork(state_id: str, body: ForkBody, request: Request) -> JsonResponse:
        hold = True if body.hold_seconds is None else body.hold_seconds
        salt = salt_of(request, body.cache_salt)
        return JsonResponse(
            _json(await ask("fork", state_id=state_id, salt=salt, at=body.at, new_id=new_id("state"), hold=hold))
        )

    @router.post("/v1/states/hold/{state_id:path}")
    async def hold(state_id: str, body: HoldBody, request: Request) -> JsonResponse:
        salt = salt_of(request, body.cache_salt)
        return JsonResponse(_json(await ask("hold", state_id=state_id, salt=salt, seconds=body.seconds)))

    @router.post("/v1/states/release/{state_id:path}")
    async def release(state_id: str, body: SaltBody, request: Request) -> JsonResponse:
        return JsonResponse(_json(await ask("release", state_id=state_id, salt=salt_of(request, body.cache_salt))))

    @router.post("/v1/states/save/{state_id:path}")
    async def save(state_id: str, body: SaveBody, request: Request) -> JsonResponse:
        salt = salt_of(request, body.cache_salt)
        store = service.store(request.state.gate)
        name = body.name if body.name is not None else state_id.replace("/", "_")
        path = store.path(name)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _named(path, name):
            size = await ask("save", state_id=state_id, salt=salt, path=str(path), note={})
        return JsonResponse({"id": state_id, "name": name, "size_bytes": size})

    @router.post("/v1/states/load")
    async def load(body: LoadBody, request: Request) -> JsonResponse:
        path: Path = service.store(request.state.gate).path(body.name)
        salt = salt_of(request, body.cache_salt)
        hold = True if body.hold_seconds is None else body.hold_seconds
        with _named(path, body.name):
            return JsonResponse(_json(await ask("load", path=str(path), salt=salt, state_id=None, hold=hold)))

    @router.get("/v1/decisions")
    async def list_decisions(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=4096)] = 100,
        job_id: Annotated[str | None, Query(min_length=1, max_length=256)] = None,
    ) -> JsonResponse:
        """What the policy did with the KV of this tenant's jobs, the newest first."""
        tenant: str = request.state.gate.tenant.name
        found = await ask("decisions", tenant=tenant, limit=limit, job_id=job_id)
        return JsonResponse({"object": "list", "data": found})

    @router.get("/v1/states/saved")
    async def list_saved(request: Request) -> JsonResponse:
        found = service.store(request.state.gate).list()
        data = [{"name": info.name, "size_bytes": info.size_bytes, "error": info.error} for info in found]
        return JsonResponse({"object": "list", "data": data})

    @router.get("/v1/states/{state_id:path}")
    async def show(state_id: str, salt: QueriedSalt) -> JsonResponse:
        return JsonResponse(_json(await ask("state", state_id=state_id, salt=salt)))

    return router


@contextmanager
def _named(path: Path, name: str) -> Iterator[None]:
    """A client knows a saved state by its name; where it lies is our own business."""
    try:
        yield
    except StateError as error:
        raise type(error)(str(error).replace(str(path), repr(name))) from error


def _json(info: Any) -> dict[str, Any]:
    return {"object": "state"} | info_json(msgspec.convert(info, StateInfo))
