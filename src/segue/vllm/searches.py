"""vLLM's own beam search over HTTP, as a continuation: every beam goes on from the parent's KV."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from segue.base.errors import InvalidRequest
from segue.vllm.reports import Report, hearing


@dataclass(frozen=True)
class Search:
    """What an HTTP request that searches asked of the plugin, and the data parallel engine that has its parent, if known."""

    fields: Mapping[str, Any]
    rank: int | None

    def __post_init__(self) -> None:
        for name in ("hold_seconds", "state_id"):
            if name in self.fields:
                raise InvalidRequest(name, "a search leaves many lines and no state: hold what it continues")


searching: ContextVar[Search | None] = ContextVar("searching", default=None)


def continuing(search: Callable[..., Any]) -> Callable[..., Any]:
    """`search`, with what the request asked of the plugin passed on to the requests that it makes of it."""

    async def beam_search(self: Any, prompt: Any, request_id: str, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        asked = searching.get()
        if asked is None:
            async for output in search(self, prompt, request_id, *args, **kwargs):
                yield output
            return
        serving, here = copy.copy(self), hearing.get()
        client = serving.engine_client = _Client(self.engine_client, asked)
        hearing.set(None)  # of all its requests the first, or one that was refused, is the answer's
        async for output in search(serving, prompt, request_id, *args, **kwargs):
            if client.report is not None and here is not None:
                here.found[0] = client.report
            yield output

    return beam_search


class _Client:
    """vLLM's engine client, for one search. Its first request is the job's turn; all of them go on from the parent."""

    def __init__(self, client: Any, asked: Search) -> None:
        self._client = client
        self._fields = dict(asked.fields)
        self._route = {"data_parallel_rank": asked.rank} if asked.rank is not None else {}
        self.report: Report | None = None  # of the first, or of one that was refused

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, prompt: Any, params: Any, request_id: str, **kwargs: Any) -> AsyncIterator[Any]:
        params = copy.copy(params)
        params.extra_args = self._fields
        self._fields = {name: value for name, value in self._fields.items() if name == "continuation_of"}
        async for output in self._client.generate(prompt, params, request_id, **self._route, **kwargs):
            report = (output.kv_transfer_params or {}).get("segue")
            if report is not None and (self.report is None or "error" in report):
                self.report = report
            yield output
