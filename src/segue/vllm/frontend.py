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
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs

from segue.base.errors import InvalidRequest
from segue.vllm.fields import NAMES
from segue.vllm.hooks import in_server, reports
from segue.vllm.reports import Hearing, hearing
from segue.vllm.searches import Search, searching
from segue.vllm.told import Answer, Send, Told, refuse, respond
from segue.vllm.versions import check_version

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_PATHS = {"/v1/completions": "cmpl-", "/v1/chat/completions": "chatcmpl-"}
_MOST_BYTES = 64 << 20
_MOST_RANKS = 100_000
_MOST_DECISIONS = 4096
_PATIENCE = 2.0  # seconds, with engines that are asked how they are
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
        self._ranks: OrderedDict[tuple[str, str], int] = OrderedDict()  # who has a tenant's state, or a job's KV

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] == "POST" and scope["path"] in _PATHS:
            await self._generate(scope, receive, send)
        elif scope["method"] == "DELETE" and scope["path"].startswith("/v1/states/"):
            await self._if_allowed(self._release, scope, receive, send)
        elif scope["method"] == "GET" and scope["path"] == "/v1/decisions":
            await self._if_allowed(self._decisions, scope, receive, send)
        elif scope["method"] == "GET" and scope["path"].rstrip("/") == "/metrics":
            await self._metrics(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    # Requests

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, is_whole = await _read(receive)
        lifted = _lifted(scope["path"], body) if is_whole else None
        if lifted is None:
            await self._app(scope, _again(body, receive, more=not is_whole), send)
            return
        asked, fields = lifted
        headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        name = next((value.decode("latin-1") for key, value in headers if key == b"x-request-id"), None)
        if name is None:
            given = asked.get("request_id")
            name = given if isinstance(given, str) and given.isascii() and given.isprintable() else uuid.uuid4().hex
            headers.append((b"x-request-id", name.encode()))
        salt = str(asked.get("cache_salt") or "")
        claims = [(salt, claim) for claim in _claims(fields)]
        rank = _route(scope, next((self._ranks[claim] for claim in claims if claim in self._ranks), None))
        if rank is not None and all(key != _RANK_HEADER for key, _ in headers):
            headers.append((_RANK_HEADER, str(rank).encode()))
        body = json.dumps(asked).encode()
        headers.append((b"content-length", str(len(body)).encode()))
        here = Hearing(_PATHS[scope["path"]] + name)
        answer = Told(send, here)
        hearing.set(here)
        try:
            searches = str(asked.get("use_beam_search")).lower() in ("true", "1")
            searching.set(Search(fields, rank) if searches else None)
            await self._app({**scope, "headers": headers}, _again(body, receive), answer.send)
            await answer.finish()
        except InvalidRequest as error:
            await refuse(send, error.status, str(error), type(error).__name__)
        finally:
            reports.forget(here)
        if here.found and here.refusal is None:
            first = here.found[min(here.found)].get("rank", 0)
            named = {(salt, name): rank for name, rank in answer.ranks.items()}
            self._remember({(salt, here.response_id): first} | dict.fromkeys(claims, first) | named)

    def _remember(self, ranks: dict[tuple[str, str], int]) -> None:
        for name, rank in ranks.items():
            self._ranks[name] = rank
            self._ranks.move_to_end(name)
        while len(self._ranks) > _MOST_RANKS:
            self._ranks.popitem(last=False)

    # Operation

    async def _if_allowed(
        self, act: Callable[[Scope, dict[str, str], Send], Awaitable[None]], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """vLLM has no such path, and says so to whoever may ask."""
        answer = Answer(send)
        await self._app(scope, receive, answer.send)
        if answer.start is None:
            return
        if answer.status not in (404, 405):
            await answer.respond(answer.status, answer.body)
            return
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        await act(scope, {name: values[-1] for name, values in query.items()}, send)

    async def _release(self, scope: Scope, query: dict[str, str], send: Send) -> None:
        """`?salt=` is the `cache_salt` that the state was made with."""
        name = scope["path"].removeprefix("/v1/states/")
        found = await _ask_all(scope, "segue_release", name, query.get("salt", ""))
        if any(found):
            await respond(send, 200, json.dumps({"id": name, "released": True}).encode())
        else:
            await refuse(send, 404, f"no state {name!r:.100} is known", "UnknownState")

    async def _decisions(self, scope: Scope, query: dict[str, str], send: Send) -> None:
        """`?salt=`: whose; `?job_id=`, `?limit=`. All engines', the newest first."""
        limit = query.get("limit", "100")
        if not limit.isdecimal() or not 1 <= int(limit) <= _MOST_DECISIONS:
            await refuse(send, 400, f"limit: must be from 1 to {_MOST_DECISIONS}", "InvalidRequest")
            return
        asked = query.get("salt", ""), query.get("job_id"), int(limit)
        found = [decision for each in await _ask_all(scope, "segue_decisions", *asked) for decision in each]
        newest = sorted(found, key=lambda decision: decision["seconds_ago"])[: int(limit)]
        await respond(send, 200, json.dumps({"object": "list", "data": newest}).encode())

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Without ours, if an engine does not answer: then vLLM's own are needed most."""
        answer = Answer(send)
        await self._app(scope, receive, answer.send)
        if answer.start is None:
            return
        text = ""
        with suppress(Exception):
            statuses = await asyncio.wait_for(_ask_all(scope, "segue_status"), _PATIENCE)
            text = _as_metrics([status for status in statuses if status is not None])
        await answer.respond(answer.status, answer.body + text.encode())


def _lifted(path: str, body: bytes) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The request with our fields where vLLM passes them on, and these; None if there are none."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
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
    return asked, {name: xargs[name] for name in NAMES if name in xargs}


def _claims(fields: dict[str, Any]) -> list[str]:
    """Under which names an engine may have something for this request."""
    parent, job = fields.get("continuation_of"), fields.get("job_id")
    return [str(parent)] if parent is not None else [f"job {job}"] if job is not None else []


def _core(scope: Scope) -> Any:
    """vLLM's client of its engines, in a server."""
    return getattr(getattr(scope["app"].state, "engine_client", None), "engine_core", None)


def _route(scope: Scope, rank: int | None) -> int | None:
    """Which of a server's engines has this rank: it may have some of them only, and one needs no choice."""
    ranks = getattr(_core(scope), "engine_ranks_managed", ())
    return ranks.index(rank) if len(ranks) > 1 and rank in ranks else None


async def _ask_all(scope: Scope, method: str, *args: Any) -> list[Any]:
    """All engines that this server has; what a client cannot be asked is not known."""
    core = _core(scope)
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


async def _read(receive: Receive) -> tuple[bytes, bool]:
    """The body, and whether that is all: of a very long one, the beginning."""
    parts, size = [], 0
    while True:
        message = await receive()
        part = message.get("body", b"")
        size += len(part)
        parts.append(part)
        if not message.get("more_body") or size > _MOST_BYTES:
            return b"".join(parts), not message.get("more_body")


def _again(body: bytes, receive: Receive, *, more: bool = False) -> Receive:
    """The body once more; then whatever comes: the rest of it, or that the client has left."""
    messages: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": body, "more_body": more}]

    async def first() -> MutableMapping[str, Any]:
        return messages.pop() if messages else await receive()

    return first
