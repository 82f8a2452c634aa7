"""/v1/recommend: think, then search, in one request; and the catalogues that searches are limited to."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response

from segue.base.types import SamplingParams
from segue.server.fields import RecommendBody
from segue.server.generation import Generation, state_json
from segue.server.messages import FoundBeam
from segue.server.remote_engine import Call
from segue.server.reply import reply
from segue.server.service import Service, new_id
from segue.server.sse import JsonResponse
from segue.server.tenants import Gate


def recommend(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/recommend")
    async def find(body: RecommendBody, request: Request) -> Response:
        gate: Gate = request.state.gate
        request.state.user = body.user
        service.check_model(body.model)
        answer_id = new_id("rec")
        with body.naming():
            call = await _call(service, gate, body, answer_id)
            format = Format(service, body, answer_id)
            return await reply(request, service.run(gate, [call]), format, answer_id, stream=False)

    @router.get("/v1/catalogues")
    async def list_catalogues() -> JsonResponse:
        found = await service.engine.ask("catalogues")
        data = [{"id": name, "object": "catalogue", "num_items": count} for name, count in found.items()]
        return JsonResponse({"object": "list", "data": data})

    @router.post("/v1/catalogues/{name}/reload")
    async def reload(name: str) -> JsonResponse:
        """Read its file again; searches under way go on with what they began with."""
        count = await service.engine.ask("reload_catalogue", name=name)
        return JsonResponse({"id": name, "object": "catalogue", "num_items": count})

    return router


async def _call(service: Service, gate: Gate, body: RecommendBody, answer_id: str) -> Call:
    async def encoded(text: str | list[int], *, add_special: bool) -> list[int]:
        return await service.encode(text, add_special=add_special) if isinstance(text, str) else text

    search: dict[str, Any] = {"params": SamplingParams(), "beam": body.beam.params()}
    if body.think is not None:
        suffix = await encoded(body.suffix, add_special=False)
        params = body.think.params()
        search |= {"params": params, "thinks": True, "search_suffix": suffix}
        stops = [stop for stop in params.stop if isinstance(body.suffix, str) and body.suffix.startswith(stop)]
        if stops and isinstance(body.suffix, str):
            rest = body.suffix.removeprefix(max(stops, key=len))
            search["search_rest"] = await service.encode(rest, add_special=False)
    if body.continuation_of is not None:
        tokens = await service.suffix_tokens(body)
        return service.call(gate, body, answer_id, tokens, parent=body.continuation_of, at=body.fork_at, **search)
    return service.call(gate, body, answer_id, await encoded(body.prompt or "", add_special=True), **search)


class Format:
    def __init__(self, service: Service, body: RecommendBody, answer_id: str) -> None:
        self._thinks = body.think is not None
        self._head = {
            "id": answer_id, "object": "recommendation", "created": int(time.time()), "model": service.name,
        }  # fmt: skip

    def events(self, generation: Generation) -> AsyncIterator[bytes]:
        raise NotImplementedError("a recommendation comes whole")

    async def whole(self, generation: Generation) -> dict[str, Any]:
        thoughts: dict[int, dict[str, Any]] = {}
        found: list[FoundBeam] = []
        state = None
        async for pieces in generation.pieces():
            for piece in pieces:
                if piece.beam is not None:
                    found.append(piece.beam)
                    state = state or state_json(piece)
                    continue
                thought = thoughts.setdefault(piece.choice, {"index": piece.choice, "text": "", "num_tokens": 0})
                thought["text"] += piece.text
                thought["num_tokens"] += len(piece.tokens)
                if piece.finish is not None:
                    thought |= {"finish_reason": piece.finish, "state": state_json(piece)}
        answer = self._head | {
            "data": [_item(generation, rank, beam) for rank, beam in enumerate(found or generation.beams)],
            "usage": generation.usage.as_json() | {"search_prefill_tokens": generation.search_prefilled},
        }
        if self._thinks:
            return answer | {"thoughts": [thoughts[number] for number in sorted(thoughts)]}
        return answer | {"state": state}


def _item(generation: Generation, rank: int, beam: FoundBeam) -> dict[str, Any]:
    return {
        "rank": rank,
        "items": beam.items,
        "token_ids": beam.tokens,
        "text": generation.text_of(beam),
        "score": beam.score,
        "logprob": beam.logprob,
        "finish_reason": beam.finish,
        "thought": beam.answer,
    }
