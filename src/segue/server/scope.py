"""Which scope of the engine a request is about: its tenant's own, and of that the part with its `cache_salt`."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Request

from segue.server.tenants import Gate


def salt_of(request: Request, cache_salt: str) -> str:
    gate: Gate = request.state.gate
    return gate.tenant.salt(cache_salt)


async def _queried(request: Request, cache_salt: Annotated[str, Query(max_length=256)] = "") -> str:
    return salt_of(request, cache_salt)


QueriedSalt = Annotated[str, Depends(_queried)]  # of a route that has `?cache_salt=…`
