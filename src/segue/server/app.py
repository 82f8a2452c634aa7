"""The application: all routes, behind one door."""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Response

import segue
from segue.server import failures
from segue.server.chat import as_template_message, chat
from segue.server.completions import completions
from segue.server.door import Door
from segue.server.fields import DetokenizeBody, TokenizeBody
from segue.server.metrics import CONTENT_TYPE
from segue.server.recommend import recommend
from segue.server.requests import requests
from segue.server.responses import responses
from segue.server.service import Service
from segue.server.sse import JsonResponse
from segue.server.states import states
from segue.server.tiers import tiers


def create_app(service: Service) -> FastAPI:
    """The engine is started with the application, and stopped with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.engine.start()
        for tenant in service.tenants if not service.tenants.open_to_all else ():
            service.engine.greet("quota", tenant=tenant.name, num_blocks=tenant.lease_quota)
        try:
            yield
        finally:
            await service.engine.close()

    silent = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
    known = inspect.signature(FastAPI).parameters
    options: dict[str, Any] = {"telemetry": silent} if "telemetry" in known else {}  # ours has no texts in it
    app = FastAPI(title="Segue", version=segue.__version__, lifespan=lifespan, redoc_url=None, **options)
    failures.install(app)
    _information(app, service)
    _text(app, service)
    for routes in (completions, chat, responses, recommend, requests, states, tiers):
        app.include_router(routes(service))
    app.add_middleware(Door, tenants=service.tenants, limits=service.limits)
    return app


def _information(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    @app.get("/health")
    async def health() -> Response:
        """200 if requests are served; 503 says why not."""
        engine = service.engine
        if engine.ready is None or service.draining:
            why = "shutting down" if service.draining else engine.failure or "the engine is starting"
            return JsonResponse({"status": why, "restarts": engine.num_restarts}, 503, {"retry-after": "1"})
        return JsonResponse({"status": "ok", "restarts": engine.num_restarts})

    @app.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": segue.__version__})

    @app.get("/v1/models")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [_model(service, created)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JsonResponse(_model(service, created))

    @app.post("/v1/check")
    async def check() -> Response:
        """Verify every promise of the KV core, between two steps; 500 says which is broken."""
        await service.engine.ask("check")
        return JsonResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        stats = {}
        if service.engine.ready is not None:
            stats = await service.engine.ask("stats")
        stats["restarts"] = service.engine.num_restarts
        return Response(service.metrics.render(stats), media_type=CONTENT_TYPE)


def _model(service: Service, created: int) -> dict[str, object]:
    ready = service.engine.ready
    length = ready.max_len if ready is not None else None
    return {"id": service.name, "object": "model", "created": created, "owned_by": "segue", "max_model_len": length}


def _text(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        service.check_model(body.model)
        if body.prompt is not None:
            tokens = await service.encode(body.prompt, add_special=body.add_special_tokens)
        else:
            messages = [as_template_message(message) for message in body.messages or ()]
            text = service.model.chat_template.render(messages, add_generation_prompt=body.add_generation_prompt)
            tokens = await service.encode(text, add_special=False)
        ready = service.engine.ready
        return JsonResponse(
            {"count": len(tokens), "max_model_len": ready.max_len if ready is not None else None, "tokens": tokens}
        )

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        service.check_model(body.model)
        return JsonResponse({"prompt": service.model.tokenizer.decode(body.tokens, skip_special=False)})
