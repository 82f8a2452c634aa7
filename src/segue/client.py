"""A client for Segue's server: generation, and every verb of a state. `pip install 'segue[client]'`.

    from segue.client import Client

    with Client("http://127.0.0.1:8000") as client:
        first = client.complete("Once upon a time", max_tokens=50, hold_seconds=60)
        more = client.complete(continuation_of=first.state.id, continuation_suffix=" And then", max_tokens=50)

For chats, `openai`'s own client does: what Segue adds goes into its `extra_body`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from segue.base import errors
from segue.base.errors import InvalidRequest, SegueError

_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RemoteState:
    """A state on the server. `expires_in` is seconds, None without a limit; the last three come with an answer."""

    id: str
    num_tokens: int
    num_held: int
    expires_in: float | None = None
    job_id: str | None = None
    inherited_tokens: int = 0
    recomputed_tokens: int = 0
    new_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `finish_reason` is "moved" if it goes on in another server."""

    id: str
    text: str
    finish_reason: str
    state: RemoteState | None
    usage: Mapping[str, Any]


class Client:
    """Raises the same errors as the engine itself does; `SegueError` for those that only a server has."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float | None = 600.0) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key is not None else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # Generation

    def complete(self, prompt: str | list[int] | None = None, **fields: Any) -> Completion:
        """One answer. `fields` are those of /v1/completions: `max_tokens`, `continuation_of`, `hold_seconds`, …"""
        return _completion(self._post("/v1/completions", _for_one_answer(prompt, fields)))

    def stream(self, prompt: str | list[int] | None = None, **fields: Any) -> Iterator[Completion | str]:
        """Pieces of text as they come, and last the answer as a whole. Closing the iterator ends the request."""
        body = _for_one_answer(prompt, fields) | {"stream": True, "stream_options": {"include_usage": True}}
        return self._events("/v1/completions", json=body)

    # States

    def states(self, cache_salt: str = "") -> list[RemoteState]:
        return [_state(entry) for entry in self._get("/v1/states", cache_salt=cache_salt)["data"]]

    def state(self, state_id: str, cache_salt: str = "") -> RemoteState:
        return _state(self._get(f"/v1/states/{quote(state_id)}", cache_salt=cache_salt))

    def fork(
        self, state_id: str, at: int | None = None, hold_seconds: float | None = None, **fields: Any
    ) -> RemoteState:
        return self._verb("fork", state_id, at=at, hold_seconds=hold_seconds, **fields)

    def hold(self, state_id: str, seconds: float | None = None, **fields: Any) -> RemoteState:
        return self._verb("hold", state_id, seconds=seconds, **fields)

    def release(self, state_id: str, **fields: Any) -> RemoteState:
        return self._verb("release", state_id, **fields)

    def save(self, state_id: str, name: str | None = None, **fields: Any) -> int:
        """To the server's own folder; how many bytes."""
        body = _without_none(fields | {"name": name})
        size: int = self._post(f"/v1/states/save/{quote(state_id)}", body)["size_bytes"]
        return size

    def load(self, name: str, hold_seconds: float | None = None, **fields: Any) -> RemoteState:
        body = _without_none(fields | {"name": name, "hold_seconds": hold_seconds})
        return _state(self._post("/v1/states/load", body))

    def saved(self) -> list[str]:
        return [entry["name"] for entry in self._get("/v1/states/saved")["data"]]

    # Requests under way

    def move(
        self, request_id: str, destination: Client, *, cache_salt: str = "", hold_seconds: float | None = None
    ) -> Iterator[Completion | str]:
        """Move a running request to another server, and read on there. The source goes on with it if that fails."""
        path, salt = f"/v1/requests/{quote(request_id)}/export", {"cache_salt": cache_salt}
        with self._http.stream("POST", path, params=salt) as export:
            _check(export)
            pieces = destination._events(
                "/v1/requests/import",
                params=_without_none({"stream": "true", "hold_seconds": hold_seconds, **salt}),
                content=export.iter_bytes(_COPY_BYTES),
                headers={"content-type": "application/octet-stream"},
            )
            try:
                first = next(pieces)
            except BaseException:
                self._http.post(f"{path}/abort", params=salt)
                raise
        _check(self._http.post(f"{path}/commit", params=salt))
        yield first
        yield from pieces

    def _verb(self, verb: str, state_id: str, **fields: Any) -> RemoteState:
        return _state(self._post(f"/v1/states/{verb}/{quote(state_id)}", _without_none(fields)))

    def _get(self, path: str, **params: Any) -> Any:
        response = self._http.get(path, params=params)
        _check(response)
        return response.json()

    def _post(self, path: str, body: Any) -> Any:
        response = self._http.post(path, json=body)
        _check(response)
        return response.json()

    def _events(self, path: str, **options: Any) -> Iterator[Completion | str]:
        texts: list[str] = []
        last: dict[str, Any] = {}
        usage: Mapping[str, Any] = {}
        with self._http.stream("POST", path, **options) as response:
            _check(response)
            for line in _lines(response.iter_bytes()):
                if not line.startswith(b"data: ") or line == b"data: [DONE]":
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise _error(event["error"], 500)
                usage = event.get("usage", usage)
                for choice in event["choices"]:
                    last = choice | {"id": event["id"]}
                    texts.append(choice["text"])
                    if choice["text"]:
                        yield choice["text"]
        yield _completion({"id": last["id"], "choices": [last | {"text": "".join(texts)}], "usage": usage})


def _for_one_answer(prompt: str | list[int] | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A body. More answers than one would be generated, and then there would be nowhere to put them."""
    n = fields.get("n")
    if isinstance(n, int) and n > 1:
        raise InvalidRequest("n", f"is {n}, and this client gives one answer: ask as often as you want one")
    if not isinstance(prompt, str) and any(isinstance(part, Sequence) for part in prompt or ()):
        raise InvalidRequest("prompt", "is a list of prompts, and this client gives one answer: ask for each of them")
    return _without_none({**fields, "prompt": prompt})


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Ended by a newline and nothing else: httpx's own end at U+2028 and others too, which stand in JSON as they are."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _completion(answer: Mapping[str, Any]) -> Completion:
    [choice] = answer["choices"]
    state = choice.get("state")
    made = _state(state) if state is not None else None
    return Completion(answer["id"], choice["text"], choice["finish_reason"], made, answer["usage"])


def _state(data: Mapping[str, Any]) -> RemoteState:
    return RemoteState(**{name: data[name] for name in RemoteState.__dataclass_fields__ if name in data})


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _check(response: httpx.Response) -> None:
    if response.status_code < 400:
        return
    response.read()
    try:
        problem = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        problem = {"message": f"the server answered {response.status_code}: {response.text[:200]}"}
    raise _error(problem, response.status_code)


def _error(problem: Mapping[str, Any], status: int) -> SegueError:
    kind = getattr(errors, str(problem.get("code")), None)
    message = str(problem["message"])
    if isinstance(kind, type) and issubclass(kind, InvalidRequest):
        field = str(problem.get("param") or "body")
        return kind(field, message.removeprefix(f"{field}: "))
    made = kind(message) if isinstance(kind, type) and issubclass(kind, SegueError) else SegueError(message)
    made.status = status
    return made
