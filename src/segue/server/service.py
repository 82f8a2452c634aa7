"""What the routes share: the model's text side, the engine, the tenants, and the conversations that can be gone on with."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.base.errors import ForgottenState, InvalidRequest, SegueError, UnknownModel, UnknownState
from segue.model.loading import LoadedModel
from segue.server.fields import StateFields
from segue.server.generation import Generation
from segue.server.kept import Kept
from segue.server.metrics import Metrics
from segue.server.remote_engine import Answering, Call, RemoteEngine
from segue.server.tenants import Gate, Tenants, TooMany
from segue.server.tracing import current_span
from segue.state.store import StateStore

_RESTORED_SECONDS = 60.0  # a state brought back from disk is held so long: enough to be continued
_LONG_NAME = 124  # bytes of a tenant's name; as hexadecimal digits, more would not fit into a file's name
_LONG_TEXT = 20_000  # characters that are worth a thread of their own to tokenise


@dataclass(frozen=True, slots=True)
class Limits:
    """Beyond these a request is refused at the door."""

    max_requests: int = 1024  # sequences running and waiting, over all tenants
    max_body_bytes: int = 32 << 20
    max_head_bytes: int = 64 << 10
    max_connections: int = 4096  # one more is closed at once
    head_seconds: float = 10.0  # for the head of a request to arrive whole
    body_seconds: float = 30.0  # for the rest of it
    max_import_bytes: int = 64 << 30  # of a request that comes from another server
    export_seconds: float = 60.0  # for a request that was sent out to be committed; then it goes on here
    stall_seconds: float = 60.0  # for a client to read some of what waits for it
    drain_seconds: float = 30.0  # for what runs to finish after SIGTERM
    max_conversations: int = 1024
    max_conversation_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat answer was an answer to, and the tokens it left: enough for the next turn to send only what is new."""

    messages: list[Mapping[str, Any]]
    tokens: array[int]

    @property
    def size_bytes(self) -> int:
        return len(self.tokens) * self.tokens.itemsize + sum(len(repr(message)) for message in self.messages)


class Service:
    def __init__(
        self,
        model: LoadedModel,
        engine: RemoteEngine,
        tenants: Tenants,
        metrics: Metrics,
        *,
        limits: Limits | None = None,
        served_name: str | None = None,
        state_dir: Path | None = None,
    ) -> None:
        self.model = model
        self.name = served_name or model.name
        self.engine = engine
        self.tenants = tenants
        self.metrics = metrics
        self.limits = limits or Limits()
        self.state_dir = state_dir
        most, most_bytes = self.limits.max_conversations, self.limits.max_conversation_bytes
        self.conversations: Kept[Conversation] = Kept(most, most_bytes)  # by the id of the state they left
        self.responses: Kept[dict[str, Any]] = Kept(most, most_bytes)
        self.num_sequences = 0
        self.draining = False

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise UnknownModel(f"the model {name!r:.100} does not exist here: {self.name!r} does")

    async def run(
        self,
        gate: Gate,
        calls: Sequence[Call],
        *,
        show_special: bool = False,
        submit: Callable[[Sequence[Call]], Answering] | None = None,
        alone: Call | None = None,
    ) -> Generation:
        """Begin to generate; returns once there is a first token, or raises what refused it. A parent that the engine does
        not know, because it was restarted perhaps, is brought back if it was saved; if not, `alone`, which needs none, takes the
        call's place. However often it is tried, it is one request."""
        span = current_span()
        span.start(self.name, gate.tenant.name)
        resources = ExitStack()
        try:
            count = sum(call.params.n for call in calls)
            if self.draining:
                raise TooMany("the server is shutting down", 5, status=503)
            if count > self.limits.max_requests:
                raise InvalidRequest(
                    "n", f"{count} answers at once; this server takes at most {self.limits.max_requests}"
                )
            if self.num_sequences + count > self.limits.max_requests:
                raise TooMany(
                    f"{self.num_sequences} of at most {self.limits.max_requests} are under way", 1, status=503
                )
            resources.enter_context(gate.entry(len(calls)))
            self.num_sequences += count
            resources.callback(self._leave, count)
            tokenizer, tenant = self.model.tokenizer, gate.tenant.name
            generation = Generation(calls, tokenizer, self.metrics, tenant, span, resources, show_special=show_special)
        except BaseException:
            resources.close()
            raise
        try:
            await self._start(generation, gate, calls, submit or self.engine.submit, alone)
        except BaseException as error:
            generation.fail(error)
            raise
        return generation

    async def _start(
        self,
        generation: Generation,
        gate: Gate,
        calls: Sequence[Call],
        submit: Callable[[Sequence[Call]], Answering],
        alone: Call | None,
    ) -> None:
        try:
            return await generation.start(submit, calls)
        except (UnknownState, ForgottenState):
            is_back = await self._restore(gate, calls)
            if not is_back and alone is None:
                raise
        try:
            if is_back or alone is None:
                return await generation.start(submit, calls)
        except (UnknownState, ForgottenState):
            if alone is None:
                raise
        return await generation.start(submit, [alone])

    async def _restore(self, gate: Gate, calls: Sequence[Call]) -> bool:
        [parent, salt] = calls[0].parent, calls[0].salt
        if parent is None or self.state_dir is None:
            return False
        try:
            path = self.store(gate).path(parent.replace("/", "_"))
            await self.engine.ask("load", path=str(path), salt=salt, state_id=parent, hold=_RESTORED_SECONDS)
        except SegueError:
            return False  # not saved, or not to be had now: the caller hears that it is not known
        return True

    def _leave(self, count: int) -> None:
        self.num_sequences -= count

    def call(
        self, gate: Gate, fields: StateFields, request_id: str, tokens: list[int] | array[int], **more: Any
    ) -> Call:
        return Call(
            request_id,
            tokens,
            salt=gate.tenant.salt(fields.cache_salt),
            job_id=fields.job_id,
            hold=fields.hold_seconds or False,
            priority=fields.priority,
            is_last_step=fields.is_last_step,
            **more,
        )

    async def suffix_tokens(self, fields: StateFields) -> list[int]:
        if fields.continuation_token_ids is not None:
            return fields.continuation_token_ids
        return await self.encode(fields.continuation_suffix or "", add_special=False)

    async def encode(self, text: str, *, add_special: bool) -> list[int]:
        if not text:
            return []
        if not text.isascii():
            _check_unicode(text)
        if len(text) < _LONG_TEXT:
            return self.model.tokenizer.encode(text, add_special)
        return await asyncio.to_thread(self.model.tokenizer.encode, text, add_special)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> list[int]:
        for name in options:
            if name in ("messages", "tools", "add_generation_prompt", "self"):
                raise InvalidRequest("chat_template_kwargs", f"{name} is not an option of the template")
        template = self.model.chat_template
        if "developer" not in (template.source or ""):  # the newer name of what it calls the system
            messages = [{**each, "role": "system"} if each.get("role") == "developer" else each for each in messages]
        text = template.render(messages, tools=tools, **options)
        return await self.encode(text, add_special=False)

    def token_text(self, token: int) -> str:
        return self.model.tokenizer.token_bytes(token).decode("utf-8", "replace")

    def store(self, gate: Gate) -> StateStore:
        """A tenant's saved states; a folder of its own, since names are its own."""
        if self.state_dir is None:
            raise InvalidRequest("name", "this server saves no states: start it with --state-dir")
        return StateStore(self.state_dir / _folder(gate.tenant.name))


def _folder(tenant: str) -> str:
    """A name that any file system takes: a long one by its digest, which no short one is written like."""
    if not tenant:
        return "all"
    name = tenant.encode()
    return f"tenant-{name.hex()}" if len(name) <= _LONG_NAME else f"tenant-sha256-{hashlib.sha256(name).hexdigest()}"


def _check_unicode(text: str) -> None:
    """Half of a surrogate pair, which JSON can carry inside a string inside a string, is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("messages", "it has half a surrogate pair in it, which is no text") from error


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"
