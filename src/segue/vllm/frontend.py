"""What HTTP clients see beside vLLM's own API: fields at the top of a request, states in answers, refusals with their status.

An ASGI middleware (`--middleware segue.vllm.frontend.Middleware`). Only what concerns the plugin is read: a request without any
of its fields goes through as it came.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from segue.vllm.fields import NAMES
from segue.vllm.hooks import in_server, take_refusal
from segue.vllm.versions import check_version

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_PATHS = {"/v1/completions": "cmpl-", "/v1/chat/completions": "chatcmpl-"}
_MOST_BYTES = 64 << 20
_MOST_RANKS = 100_000
_RANK_HEADER = b"x-data-parallel-rank"
_GAUGES = {
    "kv_blocks": "KV blocks there are",
    "block_size": "Tokens in a block",
    "leases": "Leases in force",
    "leased_blocks": "KV blocks under leases",
    "states": "States known by id",
}
_COUNTERS = {
    "revoked_blocks": "Leased blocks that other work needed",
    "inherited_tokens": "Tokens that requests found with KV",
    "recomputed_tokens": "Tokens whose KV was there once and lost",
}


class Middleware:
    def __init__(self, app: App) -> None:
        check_version()
        in_server()
        self._app = app
        self._ranks: OrderedDict[str, int] = OrderedDict()  # of data parallel engines: who has a state, or a job's KV

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] == "POST" and scope["path"] in _PATHS:
            await self._generate(scope, receive, send)
        elif scope["method"] == "DELETE" and scope["path"].startswith("/v1/states/"):
            await self._release(scope, send)
        elif scope["method"] == "GET" and scope["path"].rstrip("/") == "/metrics":
            await self._metrics(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    # Requests

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        fields = _lifted(scope["path"], body)
        if fields is None:
            await self._app(scope, _again(body, receive), send)
            return
        body, xargs = fields
        headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        name = next((value.decode("latin-1") for key, value in headers if key == b"x-request-id"), None)
        if name is None:
            name = uuid.uuid4().hex
            headers.append((b"x-request-id", name.encode()))
        rank = next((self._ranks[known] for known in _claims(xargs) if known in self._ranks), None)
        if rank is not None and all(key != _RANK_HEADER for key, _ in headers):
            headers.append((_RANK_HEADER, str(rank).encode()))
        headers.append((b"content-length", str(len(body)).encode()))
        answer = _Answer(send)
        await self._app({**scope, "headers": headers}, _again(body, receive), answer.send)
        if answer.start is not None:
            await answer.finish(self._told(_PATHS[scope["path"]] + name, xargs, answer))

    def _told(self, request_id: str, xargs: dict[str, Any], answer: _Answer) -> tuple[int, bytes]:
        """The answer, with what the scheduler reported in its place."""
        status = answer.status
        refusal = take_refusal(request_id) if status >= 400 else None
        if refusal is not None:
            error = {"message": refusal["error"], "type": refusal["type"], "code": refusal["status"], "param": None}
            return refusal["status"], json.dumps({"error": error}).encode()
        try:
            said = json.loads(answer.body)
            report = (said.get("kv_transfer_params") or {}).pop("segue", None)
        except (ValueError, AttributeError):
            return status, answer.body
        if report is None:
            return status, answer.body
        said["kv_transfer_params"] = said["kv_transfer_params"] or None
        rank = report.pop("rank", 0)
        state = {
            "id": report.pop("state_id", None),
            "num_tokens": report.pop("num_tokens", 0),
            "held_tokens": report.pop("held_tokens", 0),
        }
        if state["id"] is not None:
            for choice in said.get("choices", ()):
                choice["state"] = state
        said["segue"] = report
        for known in (said.get("id"), state["id"], *_claims(xargs)):
            if known is not None:
                self._ranks[known] = rank
                self._ranks.move_to_end(known)
        while len(self._ranks) > _MOST_RANKS:
            self._ranks.popitem(last=False)
        return status, json.dumps(said).encode()

    # Operation

    async def _release(self, scope: Scope, send: Send) -> None:
        """`?salt=` is the `cache_salt` that the state was made with."""
        query = dict(part.partition("=")[::2] for part in scope.get("query_string", b"").decode().split("&") if part)
        name = scope["path"].removeprefix("/v1/states/")
        found = await _ask_all(scope, "segue_release", name, query.get("salt", ""))
        if any(found):
            await _respond(send, 200, {"id": name, "released": True})
        else:
            message = f"no state {name!r:.100} is known"
            await _respond(
                send, 404, {"error": {"message": message, "type": "UnknownState", "code": 404, "param": None}}
            )

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(send)
        await self._app(scope, receive, answer.send)
        if answer.start is None:
            return
        text = _as_metrics([status for status in await _ask_all(scope, "segue_status") if status is not None])
        await answer.finish((answer.status, answer.body + text.encode()))


class _Answer:
    """A response that is held back until it is whole. One that streams, or is packed, passes at once."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.start: MutableMapping[str, Any] | None = None
        self.body = b""

    @property
    def status(self) -> int:
        assert self.start is not None
        return int(self.start["status"])

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = {key.lower(): value for key, value in message["headers"]}
            streams = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            if not streams and b"content-encoding" not in headers:
                self.start = message
                return
        elif message["type"] == "http.response.body" and self.start is not None:
            self.body += message.get("body", b"")
            return
        await self._send(message)

    async def finish(self, told: tuple[int, bytes]) -> None:
        status, body = told
        assert self.start is not None
        headers = [pair for pair in self.start["headers"] if pair[0].lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self.start, "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _lifted(path: str, body: bytes) -> tuple[bytes, dict[str, Any]] | None:
    """The body with our fields where vLLM passes them on; None if there are none."""
    try:
        asked = json.loads(body)
    except ValueError:
        return None
    if not isinstance(asked, dict):
        return None
    xargs = asked.get("vllm_xargs") or {}
    given = {name: asked.pop(name) for name in NAMES if asked.get(name) is not None}
    if not isinstance(xargs, dict) or not (given or any(name in xargs for name in NAMES)):
        return None
    xargs = xargs | {name: int(value) if isinstance(value, bool) else value for name, value in given.items()}
    asked["vllm_xargs"] = xargs
    if "continuation_of" in xargs and path == "/v1/completions":
        suffix = asked.pop("suffix", None)
        if suffix is not None and not asked.get("prompt"):
            asked["prompt"] = suffix
        asked.setdefault("add_special_tokens", False)
    return json.dumps(asked).encode(), xargs


def _claims(xargs: dict[str, Any]) -> list[str]:
    """Under which names an engine may have something for this request."""
    parent, job = xargs.get("continuation_of"), xargs.get("job_id")
    return [str(parent)] if parent is not None else [f"job {job}"] if job is not None else []


async def _ask_all(scope: Scope, method: str, *args: Any) -> list[Any]:
    """All engines that this server has; what a client cannot be asked is not known."""
    core = getattr(getattr(scope["app"].state, "engine_client", None), "engine_core", None)
    if core is None or not hasattr(core, "_call_utility_async"):
        return []
    engines = getattr(core, "core_engines", None) or [core.core_engine]
    return list(await asyncio.gather(*(core._call_utility_async(method, *args, engine=engine) for engine in engines)))


def _as_metrics(statuses: list[dict[str, Any]]) -> str:
    if not statuses:
        return ""
    lines = []
    for kind, names in (("gauge", _GAUGES), ("counter", _COUNTERS)):
        for name, text in names.items():
            value = statuses[0][name] if name == "block_size" else sum(status[name] for status in statuses)
            total = "_total" if kind == "counter" else ""
            lines += [
                f"# HELP segue:{name}{total} {text}.",
                f"# TYPE segue:{name}{total} {kind}",
                f"segue:{name}{total} {value}",
            ]
    blocks = sum(status["kv_blocks"] for status in statuses)
    used = 1 - sum(status["free_blocks"] for status in statuses) / blocks
    lines += ["# HELP segue:kv_cache_usage_perc Share of KV blocks in use.", "# TYPE segue:kv_cache_usage_perc gauge"]
    return "\n".join([*lines, f"segue:kv_cache_usage_perc {used}", ""])


async def _read(receive: Receive) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        part = message.get("body", b"")
        size += len(part)
        parts.append(part)
        if not message.get("more_body") or size > _MOST_BYTES:
            return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """The body once more; then whatever comes, such as that the client has left."""
    messages: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def first() -> MutableMapping[str, Any]:
        return messages.pop() if messages else await receive()

    return first


async def _respond(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
