"""/v1/chat/completions."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from segue.base.errors import ForgottenState, InvalidRequest, SegueError, StateError
from segue.base.types import SamplingParams
from segue.model.tokenized_text import common_prefix
from segue.server.failures import error_json
from segue.server.fields import ChatBody, Message, StateFields
from segue.server.generation import Generation, Piece, state_json
from segue.server.remote_engine import Call
from segue.server.reply import reply
from segue.server.service import Conversation, Service, new_id
from segue.server.sse import DONE, event
from segue.server.tenants import Gate
from segue.toolcalls import CallReader, ToolCall, format_of, reader


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation, ready for the engine.

    `messages` and `tokens` are the whole conversation up to the answer, where it is known; then `alone` is a call that needs
    no parent, for when the parent is gone.
    """

    call: Call
    messages: list[Mapping[str, Any]] | None
    tokens: array[int] | None
    alone: Call | None = None
    has_tools: bool = False


def chat(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def complete(body: ChatBody, request: Request) -> Response:
        gate: Gate = request.state.gate
        request.state.user = body.user
        service.check_model(body.model)
        answer_id = new_id("chatcmpl")
        with body.naming():
            turn = await _turn(service, gate, body, answer_id)
            format = _Format(service, body, answer_id, turn)
            return await reply(request, run_turn(service, gate, turn), format, answer_id, stream=body.stream)

    return router


async def _turn(service: Service, gate: Gate, body: ChatBody, answer_id: str) -> Turn:
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    params = body.params(wanted, (body.top_logprobs or 0) if body.logprobs else None)
    if body.messages is None:
        for name in ("tools", "tool_choice", "chat_template_kwargs"):
            if getattr(body, name):
                raise InvalidRequest(
                    name, "is for the chat template, which a suffix does not pass through: send messages"
                )
        suffix = await service.suffix_tokens(body)
        parent = {"parent": body.continuation_of, "at": body.fork_at}
        return Turn(service.call(gate, body, answer_id, suffix, params=params, **parent), None, None)
    tools = None if body.tools is None else [tool.model_dump(exclude_unset=True) for tool in body.tools]
    added = [as_template_message(message) for message in body.messages]
    return await make_turn(
        service, gate, body, answer_id, added, body.continuation_of,
        tools=None if body.tool_choice == "none" else tools, options=body.chat_template_kwargs, params=params,
    )  # fmt: skip


async def make_turn(
    service: Service,
    gate: Gate,
    fields: StateFields,
    answer_id: str,
    added: list[Mapping[str, Any]],
    parent_id: str | None,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any],
    params: SamplingParams,
    instructions: str | None = None,
) -> Turn:
    """New messages, after those of the parent if there is one. `instructions` stand before all of them, in this turn alone.

    The whole conversation is templated and tokenised anew, and as much of the parent's state is kept as the two have in
    common: a template may write an answer otherwise than it was sampled.
    """
    before = await _conversation(service, gate.tenant.salt(fields.cache_salt), parent_id)
    messages = [*(before.messages if before is not None else ()), *added]
    first = [{"role": "system", "content": instructions}] if instructions is not None else []
    tokens = array("i", await service.encode_chat([*first, *messages], tools, options))
    if not tokens:
        raise InvalidRequest("messages", "the model's chat template makes nothing of them")
    alone = service.call(gate, fields, answer_id, tokens, params=params)
    kept = common_prefix(before.tokens, tokens) if before is not None else 0
    if before is None or not kept:
        return Turn(alone, messages, tokens, has_tools=bool(tools))
    at = None if kept == len(before.tokens) else kept
    call = service.call(gate, fields, answer_id, tokens[kept:], params=params, parent=parent_id, at=at)
    return Turn(call, messages, tokens, alone, bool(tools))


async def _conversation(service: Service, salt: str, parent_id: str | None) -> Conversation | None:
    if parent_id is None:
        return None
    found = service.conversations.get(parent_id, salt)
    if found is None and service.engine.is_under_way(parent_id, salt):
        raise StateError(f"{parent_id!r} is still being answered: go on from it with a suffix, or when it has ended")
    if found is None:
        await service.engine.ask("state", state_id=parent_id, salt=salt)  # 404 or 410, if it is not there at all
        raise ForgottenState(f"what was said before {parent_id!r} is not known here: send all of it, or a suffix")
    return found


async def run_turn(service: Service, gate: Gate, turn: Turn) -> Generation:
    """If the engine has forgotten the parent, its conversation is computed again."""
    show_special = turn.has_tools and format_of(service.model.chat_template.source or "") is not None
    return await service.run(gate, [turn.call], show_special=show_special, alone=turn.alone)


def remember(service: Service, turn: Turn, generation: Generation, choice: int, answer: Mapping[str, Any]) -> None:
    """So that whoever continues this answer sends only what is new."""
    state = generation.states.get(choice)
    if state is not None and turn.messages is not None and turn.tokens is not None:
        tokens = turn.tokens + array("i", generation.output(choice))
        kept = Conversation([*turn.messages, answer], tokens)
        service.conversations.add(state.id, turn.call.salt, kept, kept.size_bytes)


def as_template_message(message: Message) -> Mapping[str, Any]:
    """Templates want text, and the arguments of calls as objects."""
    given = message.model_dump(exclude_unset=True)
    if isinstance(message.content, list):
        given["content"] = "".join(_text_of(part) for part in message.content)
    elif message.content is None:
        given["content"] = ""
    if message.tool_calls is not None:
        given["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    return given


def _text_of(part: Mapping[str, Any]) -> str:
    if part.get("type") not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
        raise InvalidRequest("messages", f"content of type {part.get('type')!r:.40} is not supported: text is")
    text: str = part["text"]
    return text


def _template_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest("messages", "a tool call needs a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


class Calls:
    """The tool calls in one answer. Without tools, everything is text."""

    def __init__(self, service: Service, wanted: bool) -> None:
        format = format_of(service.model.chat_template.source or "") if wanted else None
        self._reader: CallReader | None = None if format is None else reader(format)
        self.found: list[dict[str, Any]] = []

    def push(self, piece: Piece) -> tuple[str, list[dict[str, Any]]]:
        """Text, and the calls that are complete by now."""
        parts = self.read(piece)
        return "".join(part for part in parts if isinstance(part, str)), [
            part for part in parts if isinstance(part, dict)
        ]

    def read(self, piece: Piece) -> list[str | dict[str, Any]]:
        """The same in the order in which they stand."""
        if self._reader is None:
            return [piece.text] if piece.text else []
        parts = self._reader.push(piece.text)
        if piece.finish is not None:
            parts += self._reader.flush()
        return [self._as_json(part) if isinstance(part, ToolCall) else part for part in parts]

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self.found else reason

    def _as_json(self, call: ToolCall) -> dict[str, Any]:
        made = {
            "id": new_id("call"),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        self.found.append(made)
        return made

    def message(self, text: str) -> dict[str, Any]:
        """The answer as a message of the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not self.found else None}
        return message | ({"tool_calls": self.found} if self.found else {})


class _Format:
    """A generation as OpenAI's chat completion objects."""

    def __init__(self, service: Service, body: ChatBody, answer_id: str, turn: Turn) -> None:
        self._service = service
        self._body = body
        self._turn = turn
        self._calls = [Calls(service, turn.has_tools) for _ in range(body.n)]
        self._texts: list[list[str]] = [[] for _ in range(body.n)]
        self._head = {"id": answer_id, "created": int(time.time()), "model": service.name}

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        head = self._head | {"object": "chat.completion.chunk"}
        started: set[int] = set()
        try:
            async for pieces in generation.pieces():
                data = []
                for piece in pieces:
                    if piece.choice not in started:
                        started.add(piece.choice)
                        first = {"role": "assistant", "content": ""}
                        opening = {"index": piece.choice, "delta": first, "logprobs": None, "finish_reason": None}
                        data.append(event(head | {"choices": [opening]}))
                    if (choice := self._chunk(piece, generation)) is not None:
                        data.append(event(head | {"choices": [choice]}))
                if data:
                    yield b"".join(data)
            if self._body.stream_options is not None and self._body.stream_options.include_usage:
                yield event(head | {"choices": [], "usage": generation.usage.as_json()})
            yield DONE
        except SegueError as error:
            yield event(error_json(error))
        finally:
            generation.close()

    def _chunk(self, piece: Piece, generation: Generation) -> dict[str, Any] | None:
        text, calls = self._calls[piece.choice].push(piece)
        self._texts[piece.choice].append(text)
        known = len(self._calls[piece.choice].found) - len(calls)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": known + number} | call for number, call in enumerate(calls)]
        if not delta and piece.finish is None and not self._body.logprobs:
            return None  # half a character, or what may become a call
        choice = {
            "index": piece.choice,
            "delta": delta,
            "logprobs": self._logprobs(piece),
            "finish_reason": self._calls[piece.choice].finish_reason(piece.finish),
        }
        if piece.finish is not None:
            choice["state"] = state_json(piece)
            self._remember(piece.choice, generation)
        return choice

    async def whole(self, generation: Generation) -> dict[str, Any]:
        choices: dict[int, dict[str, Any]] = {}
        async for pieces in generation.pieces():
            for piece in pieces:
                calls = self._calls[piece.choice]
                self._texts[piece.choice].append(calls.push(piece)[0])
                choice = choices.setdefault(piece.choice, {"index": piece.choice, "logprobs": None})
                if (logprobs := self._logprobs(piece)) is not None:
                    choice["logprobs"] = choice["logprobs"] or {"content": []}
                    choice["logprobs"]["content"] += logprobs["content"]
                if piece.finish is not None:
                    choice["message"] = self._remember(piece.choice, generation)
                    choice["finish_reason"] = calls.finish_reason(piece.finish)
                    choice["state"] = state_json(piece)
        return self._head | {
            "object": "chat.completion",
            "choices": [choices[number] for number in sorted(choices)],
            "usage": generation.usage.as_json(),
        }

    def _remember(self, choice: int, generation: Generation) -> dict[str, Any]:
        message = self._calls[choice].message("".join(self._texts[choice]))
        kept = as_template_message(Message.model_validate(message))
        remember(self._service, self._turn, generation, choice, kept)
        return message

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return {
            "content": [
                self._token(token, value) | {"top_logprobs": [self._token(*entry) for entry in top]}
                for token, value, top in piece.logprobs
            ]
        }

    def _token(self, token: int, value: float) -> dict[str, Any]:
        data = self._service.model.tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": value, "bytes": list(data)}
