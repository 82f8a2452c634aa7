"""From a generation to the response of its request, whole or as it comes, and nothing left of it if the client goes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any, Protocol

from fastapi import Request, Response

from segue.server.generation import Generation
from segue.server.sse import EventStream, JsonResponse, unless_disconnected

CLIENT_LEFT = 499  # nobody hears it; it is for the log


class Format(Protocol):
    def events(self, generation: Generation) -> AsyncIterator[bytes]: ...

    async def whole(self, generation: Generation) -> dict[str, Any]: ...


async def reply(
    request: Request, run: Awaitable[Generation], format: Format, answer_id: str, *, stream: bool
) -> Response:
    """`run` ends with the first token, so that whatever refuses the request becomes a status."""
    generation = await unless_disconnected(request, run)
    if generation is None:
        return Response(status_code=CLIENT_LEFT)
    headers = {"x-request-id": answer_id}
    if stream:
        return EventStream(format.events(generation), generation.close, headers)
    try:
        whole = await unless_disconnected(request, format.whole(generation))
    finally:
        generation.close()
    return Response(status_code=CLIENT_LEFT) if whole is None else JsonResponse(whole, headers=headers)
