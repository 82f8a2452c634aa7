"""/v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response

from segue.base.errors import SegueError
from segue.base.types import SamplingParams
from segue.server.failures import error_json
from segue.server.fields import CompletionBody
from segue.server.generation import Generation, Piece, state_json
from segue.server.remote_engine import Call
from segue.server.reply import reply
from segue.server.service import Service, new_id
from segue.server.sse import DONE, event
from segue.server.tenants import Gate


def completions(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def complete(body: CompletionBody, request: Request) -> Response:
        gate: Gate = request.state.gate
        request.state.user = body.user
        service.check_model(body.model)
        answer_id = new_id("cmpl")
        with body.naming():
            calls, echoes = await _calls(service, gate, body, answer_id)
            format = Format(service, body, answer_id, echoes)
            return await reply(request, service.run(gate, calls), format, answer_id, stream=body.stream)

    return router


async def _calls(service: Service, gate: Gate, body: CompletionBody, answer_id: str) -> tuple[list[Call], list[str]]:
    """One call for each prompt, and what `echo` puts before its answers."""
    params = body.params(body.max_tokens, body.logprobs)
    search: dict[str, Any] = {}
    if body.use_beam_search:
        params, search = SamplingParams(), {"beam": body.search()}
    if body.continuation_of is not None:
        suffix = await service.suffix_tokens(body)
        echo = service.model.tokenizer.decode(suffix) if body.echo else ""
        parent = {"parent": body.continuation_of, "at": body.fork_at}
        return [service.call(gate, body, answer_id, suffix, params=params, **parent, **search)], [echo]
    prompts = _as_prompts(body.prompt)
    calls, echoes = [], []
    for number, prompt in enumerate(prompts):
        tokens = await service.encode(prompt, add_special=True) if isinstance(prompt, str) else prompt
        request_id = answer_id if len(prompts) == 1 else f"{answer_id}.{number}"
        calls.append(service.call(gate, body, request_id, tokens, params=params, **search))
        text = prompt if isinstance(prompt, str) else service.model.tokenizer.decode(prompt) if body.echo else ""
        echoes.append(text if body.echo else "")
    return calls, echoes


def _as_prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return list(prompt)


class Format:
    """A generation as OpenAI's completion objects."""

    def __init__(self, service: Service, body: CompletionBody, answer_id: str, echoes: list[str]) -> None:
        self._service = service
        self._body = body
        self._echoes = echoes
        self._head = {
            "id": answer_id, "object": "text_completion", "created": int(time.time()), "model": service.name,
        }  # fmt: skip
        self._lengths: dict[int, int] = {}  # of a choice's text so far, for offsets

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        started: set[int] = set()
        try:
            async for pieces in generation.pieces():
                data = []
                for piece in pieces:
                    choice = self._choice(piece)
                    if piece.choice not in started:
                        started.add(piece.choice)
                        choice["text"] = self._echo(piece.choice) + choice["text"]
                    data.append(event(self._head | {"choices": [choice]}))
                yield b"".join(data)
            if self._body.stream_options is not None and self._body.stream_options.include_usage:
                yield event(self._head | {"choices": [], "usage": generation.usage.as_json()})
            yield DONE
        except SegueError as error:
            yield event(error_json(error))
        finally:
            generation.close()

    async def whole(self, generation: Generation) -> dict[str, Any]:
        choices: dict[int, dict[str, Any]] = {}
        async for pieces in generation.pieces():
            for piece in pieces:
                added = self._choice(piece)
                known = choices.get(piece.choice)
                if known is None:
                    choices[piece.choice] = added | {"text": self._echo(piece.choice) + added["text"]}
                    continue
                known["text"] += added["text"]
                if added["logprobs"] is not None:
                    for name, values in added["logprobs"].items():
                        known["logprobs"][name] += values
                known |= {name: added[name] for name in ("finish_reason", "state") if name in added}
        return self._head | {
            "choices": [choices[number] for number in sorted(choices)],
            "usage": generation.usage.as_json(),
        }

    def _echo(self, choice: int) -> str:
        return self._echoes[choice // self._body.n]

    def _choice(self, piece: Piece) -> dict[str, Any]:
        choice = {"index": piece.choice, "text": piece.text, "logprobs": None, "finish_reason": piece.finish}
        if self._body.logprobs is not None:
            choice["logprobs"] = self._logprobs(piece)
        if piece.finish is not None:
            choice["state"] = state_json(piece)
        if piece.beam is not None:
            choice |= {"score": piece.beam.score, "cumulative_logprob": piece.beam.logprob, "items": piece.beam.items}
        return choice

    def _logprobs(self, piece: Piece) -> dict[str, list[Any]]:
        start = self._lengths.get(piece.choice, 0)
        offsets = []
        for token in piece.tokens:
            offsets.append(start)
            start += len(self._service.token_text(token))
        self._lengths[piece.choice] = start
        return {
            "tokens": [self._spelled(token) for token in piece.tokens],
            "token_logprobs": [value for _, value, _ in piece.logprobs],
            "top_logprobs": [self._top([*top, (token, value)]) for token, value, top in piece.logprobs],
            "text_offset": offsets,
        }

    def _top(self, entries: list[tuple[int, float]]) -> dict[str, float]:
        """Of tokens that are spelled alike, the first, which is the likeliest."""
        found: dict[str, float] = {}
        for token, value in entries:
            found.setdefault(self._spelled(token), value)
        return found

    def _spelled(self, token: int) -> str:
        """Part of a character is written as OpenAI did, since all of these would be the same text."""
        data = self._service.model.tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
