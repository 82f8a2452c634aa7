"""/v1/responses: conversations that the server remembers, so that a follow-up sends only what is new."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field, model_validator

from segue.base.errors import InvalidRequest, SegueError, UnknownState
from segue.base.types import SamplingParams
from segue.server.chat import Calls, Turn, as_template_message, make_turn, remember, run_turn
from segue.server.failures import error_json
from segue.server.fields import MAX_MESSAGES, Body, Listed, Message, OrNull, StateFields, at_most
from segue.server.generation import Generation, Piece, state_json
from segue.server.reply import reply
from segue.server.scope import QueriedSalt
from segue.server.service import Service, new_id
from segue.server.sse import JsonResponse, event
from segue.server.tenants import Gate

Item = dict[str, Any]


class TextFormat(Body):
    type: Literal["text"] = "text"


class TextOptions(Body):
    format: TextFormat = Field(default_factory=TextFormat)


class ResponseTool(Body):
    """A function, as this API writes it: its fields beside its type."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = Field(None, description="arguments are not constrained here")


class ResponsesBody(StateFields):
    model: str | None = None
    input: str | Annotated[Listed[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: Annotated[bool, OrNull] = True
    stream: Annotated[bool, OrNull] = False
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    tools: Listed[ResponseTool] | None = Field(None, max_length=512)
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    metadata: Annotated[dict[str, str] | None, at_most(16)] = Field(None, max_length=16)
    user: str | None = Field(None, description="who it is for; appears in the log", max_length=256)

    @model_validator(mode="after")
    def _check_parent(self) -> ResponsesBody:
        if self.continuation_of is not None:
            raise ValueError("continuation_of: is called previous_response_id here")
        return self


def responses(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses")
    async def respond(body: ResponsesBody, request: Request) -> Response:
        gate: Gate = request.state.gate
        request.state.user = body.user
        service.check_model(body.model)
        answer_id = new_id("resp")
        with body.naming():
            turn = await _turn(service, gate, body, answer_id)
            format = _Format(service, body, answer_id, turn)
            return await reply(request, run_turn(service, gate, turn), format, answer_id, stream=body.stream)

    @router.get("/v1/responses/{response_id}")
    async def show(response_id: str, salt: QueriedSalt) -> Response:
        found = service.responses.get(response_id, salt)
        if found is None:
            raise _unknown(response_id)
        return JsonResponse(found)

    @router.delete("/v1/responses/{response_id}")
    async def remove(response_id: str, salt: QueriedSalt) -> Response:
        """The conversation is forgotten as well, and its KV released."""
        if service.responses.get(response_id, salt) is None:
            raise _unknown(response_id)
        service.responses.remove(response_id)
        if service.conversations.get(response_id, salt) is not None:
            service.conversations.remove(response_id)
        try:
            await service.engine.ask("release", state_id=response_id, salt=salt)
        except SegueError as error:
            if error.status not in (404, 410):
                raise
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})

    return router


def _unknown(response_id: str) -> UnknownState:
    return UnknownState(f"no response {response_id!r:.100} is known")


async def _turn(service: Service, gate: Gate, body: ResponsesBody, answer_id: str) -> Turn:
    added: list[Mapping[str, Any]] = []
    items: list[Item] = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for item in items:
        _add_message(added, item)
    tools = None
    if body.tools and body.tool_choice != "none":
        tools = [
            {"type": "function", "function": tool.model_dump(include={"name", "description", "parameters"}, exclude_none=True)}
            for tool in body.tools
        ]  # fmt: skip
    params = SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        max_tokens=body.max_output_tokens,
    )
    return await make_turn(
        service, gate, body, answer_id, added, body.previous_response_id,
        tools=tools, options={}, params=params, instructions=body.instructions,
    )  # fmt: skip


def _add_message(messages: list[Mapping[str, Any]], item: Item) -> None:
    """An input item as a message of the chat template; the calls of one answer become one message."""
    kind = item.get("type", "message")
    if kind == "message":
        try:
            message = Message.model_validate({name: item[name] for name in ("role", "content") if name in item})
        except ValueError as error:
            raise InvalidRequest("input", "a message needs a role and content") from error
        messages.append(as_template_message(message))
    elif kind == "function_call_output":
        if not isinstance(item.get("output"), str) or not isinstance(item.get("call_id"), str):
            raise InvalidRequest("input", "a function_call_output needs a call_id and an output, both text")
        messages.append({"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]})
    elif kind == "function_call":
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments")},
        }
        message = Message.model_validate({"role": "assistant", "content": "", "tool_calls": [call]})
        made = as_template_message(message)
        last = messages[-1] if messages else None
        if last is not None and last.get("role") == "assistant" and last.get("tool_calls"):
            messages[-1] = {**last, "tool_calls": [*last["tool_calls"], *made["tool_calls"]]}
        else:
            messages.append(made)
    else:
        raise InvalidRequest("input", f"items of type {kind!r:.40} are not supported")


class _Format:
    """A generation as a response object, and as the events that build it."""

    def __init__(self, service: Service, body: ResponsesBody, answer_id: str, turn: Turn) -> None:
        self._service = service
        self._body = body
        self._turn = turn
        self._calls = Calls(service, turn.has_tools)
        self._text: list[str] = []
        self._order: list[Item | None] = []  # calls, and where the message stands among them
        self._message_id = new_id("msg")
        self._sequence = 0
        self._response: Item = {
            "id": answer_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": service.name,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "store": body.store,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    async def whole(self, generation: Generation) -> Item:
        async for pieces in generation.pieces():
            for piece in pieces:
                for part in self._calls.read(piece):
                    self._take(part)
                if piece.finish is not None:
                    self._complete(piece)
        return self._finish(generation)

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        try:
            yield self._event("response.created", response=self._response) + self._event(
                "response.in_progress", response=self._response
            )
            async for pieces in generation.pieces():
                if data := b"".join(self._piece_events(piece) for piece in pieces):
                    yield data
            finished = self._finish(generation)
            yield self._event(f"response.{finished['status']}", response=finished)
        except SegueError as error:
            told = error_json(error)["error"]
            yield self._event("error", **{name: told[name] for name in ("message", "code", "param")})
        finally:
            generation.close()

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return event({"type": kind, "sequence_number": self._sequence - 1, **fields}, kind)

    def _piece_events(self, piece: Piece) -> bytes:
        data = b"".join([self._part_events(part) for part in self._calls.read(piece)])
        if piece.finish is None:
            return data
        self._complete(piece)
        if self._text:
            whole, place = "".join(self._text), self._place()
            data += self._event("response.output_text.done", **place, text=whole, logprobs=[])
            data += self._event("response.content_part.done", **place, part=_part(whole))
            data += self._event(
                "response.output_item.done", output_index=place["output_index"], item=self._message("completed")
            )
        return data

    def _part_events(self, part: str | Item) -> bytes:
        """The message is opened with its first text, so that an answer that is all calls has none."""
        opened = bool(self._text)
        self._take(part)
        if not isinstance(part, str):
            return self._call_events(len(self._order) - 1, part)
        place, data = self._place(), b""
        if not opened:
            empty = self._message("in_progress") | {"content": []}
            data += self._event("response.output_item.added", output_index=place["output_index"], item=empty)
            data += self._event("response.content_part.added", **place, part=_part(""))
        return data + self._event("response.output_text.delta", **place, delta=part, logprobs=[])

    def _take(self, part: str | Item) -> None:
        if not isinstance(part, str):
            self._order.append(part)
            return
        if not self._text:
            self._order.append(None)
        self._text.append(part)

    def _place(self) -> Item:
        return {"output_index": self._order.index(None), "item_id": self._message_id, "content_index": 0}

    def _call_events(self, index: int, call: Item) -> bytes:
        item, arguments = _call_item(call), call["function"]["arguments"]
        place = {"output_index": index, "item_id": item["id"]}
        return (
            self._event("response.output_item.added", output_index=index, item=item | {"arguments": "", "status": "in_progress"})
            + self._event("response.function_call_arguments.delta", **place, delta=arguments)
            + self._event("response.function_call_arguments.done", **place, arguments=arguments)
            + self._event("response.output_item.done", output_index=index, item=item)
        )  # fmt: skip

    def _message(self, status: str) -> Item:
        content = [_part("".join(self._text))]
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _complete(self, piece: Piece) -> None:
        length = piece.finish == "length"
        self._response["status"] = "incomplete" if length else "completed"
        self._response["incomplete_details"] = {"reason": "max_output_tokens"} if length else None
        self._response["state"] = state_json(piece)

    def _finish(self, generation: Generation) -> Item:
        usage = generation.usage
        text = "".join(self._text)
        items = self._order or [None]
        self._response["output"] = [self._message("completed") if call is None else _call_item(call) for call in items]
        self._response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.inherited_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        if self._body.store:
            kept = as_template_message(Message.model_validate(self._calls.message(text)))
            remember(self._service, self._turn, generation, 0, kept)
            size = len(msgspec.json.encode(self._response))
            self._service.responses.add(self._response["id"], self._turn.call.salt, self._response, size)
        return self._response


def _part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call: Item) -> Item:
    return {
        "id": call["id"].replace("call-", "fc-"),
        "type": "function_call",
        "status": "completed",
        "call_id": call["id"],
        **call["function"],
    }
