"""A tool call, and how one is made from the JSON that a model wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is JSON text of an object, in the model's own characters where those are JSON."""

    name: str
    arguments: str


Piece = str | ToolCall


class NotACall(Exception):
    """What looked like a call is none: it is content."""


def call_of_object(text: str, need_arguments: bool = False) -> ToolCall:
    """From `{"name": …, "arguments" or "parameters": …}`; other members are ignored.

    `need_arguments` asks for an arguments object to be there: where no tag says that a call is meant, an object that
    merely has a name is not enough.
    """
    if not isinstance(_decode(text), dict):
        raise NotACall
    parts = list(_parts(text))
    members = dict(zip((key for key, _ in parts[::2]), parts[1::2], strict=True))
    name, _ = members.get("name", (None, ""))
    value, written = members.get("arguments") or members.get("parameters") or (None, "")
    if not isinstance(name, str) or (need_arguments and not isinstance(value, dict)):
        raise NotACall
    if value is None:
        return named_call(name, "{}")
    return named_call(name, value if isinstance(value, str) else written)


def calls_of_list(text: str) -> list[ToolCall]:
    """All or none: a list with one element that is no call is content as a whole."""
    if not isinstance(_decode(text), list):
        raise NotACall
    calls = [call_of_object(element) for _, element in _parts(text)]
    if not calls:
        raise NotACall
    return calls


def named_call(name: str, arguments: str) -> ToolCall:
    if not name or not isinstance(_decode(arguments), dict):
        raise NotACall
    try:
        (name + arguments).encode()
    except UnicodeEncodeError:  # half a surrogate pair, which no client could be sent
        raise NotACall from None
    return ToolCall(name, arguments)


def json_of_value(text: str) -> str:
    """JSON for a value written without quotes: itself if it is JSON (but a string), else a string of its characters.

    Such a value stands on lines of its own, so one newline at either end is not part of the string.
    """
    try:
        if not isinstance(_decode(text), str):
            return text.strip(" \t\r\n")
    except NotACall:
        pass
    return json.dumps(text.removeprefix("\n").removesuffix("\n"), ensure_ascii=False)


def _zero(_: str) -> int:
    return 0


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")


# What a number is worth is never asked here, and finding it out takes more than linear time if it is long.
_DECODER = json.JSONDecoder(parse_int=_zero, parse_float=_zero, parse_constant=_refuse)
_BETWEEN = re.compile(r"[ \t\r\n,:]*+")


def _decode(text: str) -> object:
    """For its shape: all numbers are 0."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        raise NotACall from None


def _parts(text: str) -> Iterator[tuple[object, str]]:
    """A list's elements, or an object's keys and values in turn, each with the characters it is written in.

    `text` must be valid JSON, so whatever lies between two parts need not be looked at.
    """
    at = _past(text, 1)
    while at < len(text) - 1:
        value, end = _DECODER.raw_decode(text, at)
        yield value, text[at:end]
        at = _past(text, end)


def _past(text: str, at: int) -> int:
    match = _BETWEEN.match(text, at)
    return match.end() if match else at
