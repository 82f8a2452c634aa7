"""/v1/tiers: where KV is besides the device."""

from __future__ import annotations

from fastapi import APIRouter, Request

from segue.server.service import Service
from segue.server.sse import JsonResponse


def tiers(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/tiers")
    async def list_tiers() -> JsonResponse:
        """How much is in each, and how it has fared since the engine's start."""
        return JsonResponse({"object": "list", "data": await service.engine.ask("tiers")})

    @router.post("/v1/tiers/reset")
    async def reset(request: Request) -> JsonResponse:
        """Forget this tenant's KV in all tiers, the device's prefix cache included; all there is, where there are no keys."""
        tenant = None if service.tenants.open_to_all else request.state.gate.tenant.name
        return JsonResponse({"deleted_blocks": await service.engine.ask("reset_tiers", tenant=tenant)})

    return router
