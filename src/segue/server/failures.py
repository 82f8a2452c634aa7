"""Errors as OpenAI's clients expect them: a status, and an object with a sentence in it."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from segue.base.errors import InvalidRequest, SegueError
from segue.server.sse import JsonResponse
from segue.server.tenants import TooMany

_log = logging.getLogger(__name__)
_KIND = re.compile(r"str|int|float|bool|constrained-\w+|[\w-]+\[.*\]")  # which of several that a value may be of
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_json(error: SegueError) -> dict[str, Any]:
    return failure(error.status, str(error), getattr(error, "field", None), type(error).__name__)


def failure(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    name = None if param is None else _writable(param)
    return {"error": {"message": _writable(message), "type": kind, "param": name, "code": code}}


def _writable(text: str) -> str:
    """An error may quote what was sent, and half of a surrogate pair cannot be sent back."""
    return text.encode("utf-8", "backslashreplace").decode()


def install(app: FastAPI) -> None:
    @app.exception_handler(SegueError)
    async def ours(request: Request, error: SegueError) -> Response:
        headers = {}
        if isinstance(error, TooMany):
            headers["retry-after"] = str(error.retry_after)
        elif error.status == 503:
            headers["retry-after"] = "1"
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JsonResponse(error_json(error), error.status, headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        return JsonResponse(error_json(_first(error)), 400)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        return JsonResponse(failure(error.status_code, str(error.detail)), error.status_code, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        _log.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
        return JsonResponse(failure(500, "something went wrong here; it is in the server's log"), 500)


def _first(error: RequestValidationError) -> InvalidRequest:
    """The first thing that is wrong, by the field's name. The value is left out: it may be secret, or huge."""
    problem = _most_telling(error.errors())
    path = _path(problem)
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "json_invalid":
        return InvalidRequest("body", f"is not JSON: {problem.get('ctx', {}).get('error', message)}")
    if problem["type"] == "extra_forbidden":
        return InvalidRequest(path, "is not a field of this request")
    if problem["type"] == "value_error" and not path:
        field, _, rest = message.partition(": ")
        return InvalidRequest(field, rest) if rest else InvalidRequest("body", message)
    return InvalidRequest(path or "body", message[:1].lower() + message[1:])


def _most_telling(problems: Sequence[Any]) -> Any:
    """What is wrong with the first wrong field. One that may be of several kinds is reported once for each: the kind that fits,
    or fits furthest into a list, is the one that was meant."""
    top = problems[0]["loc"][:2]

    def fit(problem: Any) -> Any:
        wrong_kind = problem["type"].endswith("_type") or problem["type"] == "literal_error"
        return not wrong_kind, len(problem["loc"]), [part for part in problem["loc"] if isinstance(part, int)]

    return max((problem for problem in problems if problem["loc"][:2] == top), key=fit)


def _path(problem: Any) -> str:
    """Where it stands in the request, without the kinds that were tried there."""
    _, *parts = problem["loc"]
    last = len(parts) - 1 if problem["type"] == "extra_forbidden" else 0  # that is a name, whatever it looks like
    return ".".join(str(part) for at, part in enumerate(parts) if at in (0, last) or not _KIND.fullmatch(str(part)))
