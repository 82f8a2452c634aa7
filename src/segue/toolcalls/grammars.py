"""What a call looks like in each format, read from behind the tag that opens it.

Each grammar returns the calls it passed, or raises `NotACall` as soon as that is certain.
"""

from __future__ import annotations

import json
import re

from segue.toolcalls.calls import NotACall, ToolCall, call_of_object, calls_of_list, json_of_value, named_call
from segue.toolcalls.source import Source, Wait, as_text

TOOL_CALL = b"<tool_call>"
END_TOOL_CALL = b"</tool_call>"
FUNCTION = b"<function="
END_FUNCTION = b"</function>"
PARAMETER = b"<parameter="
END_PARAMETER = b"</parameter>"
PYTHON_TAG = b"<|python_tag|>"
TOOL_CALLS = b"[TOOL_CALLS]"

_XML_NAME = re.compile(rb"[^<>\r\n]*+")
_MISTRAL_NAME = re.compile(rb'[^\s\[\]{}"\\]*+')


def hermes(source: Source, _tag: bytes) -> Wait[list[ToolCall]]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`; the answer may end before the closing tag does."""
    yield from source.skip_space()
    call = call_of_object((yield from source.json_text(b"{")))
    yield from source.skip_space()
    if not (yield from source.accept_last(END_TOOL_CALL)):
        raise NotACall
    return [call]


def qwen_coder(source: Source, tag: bytes) -> Wait[list[ToolCall]]:
    """`<function=NAME><parameter=KEY>VALUE</parameter>…</function>`, with or without `<tool_call>` around it.

    Models leave out the opening tag and yet write the closing one, so that belongs to the call in any case.

    A `</parameter>` that neither another parameter nor the function's end follows belongs to the value. So nothing
    fails once the first value has begun, and a call is never read twice.
    """
    if tag == TOOL_CALL:
        yield from source.skip_space()
        yield from source.expect(FUNCTION)
    name = yield from _xml_name(source)
    arguments: dict[str, str] = {}
    key = yield from _next_parameter(source)
    while key is not None:
        start = source.at
        while True:
            yield from source.pass_until(END_PARAMETER)
            end = source.at
            try:
                following = yield from _next_parameter(source)
                break
            except NotACall:
                source.at = end
        arguments[key] = json_of_value(as_text(source.data[start : end - len(END_PARAMETER)]))
        key = following
    yield from source.skip_space()
    yield from source.accept_last(END_TOOL_CALL)
    members = (f"{json.dumps(key, ensure_ascii=False)}:{value}" for key, value in arguments.items())
    return [ToolCall(name, "{" + ",".join(members) + "}")]


def _next_parameter(source: Source) -> Wait[str | None]:
    """The key of the parameter that begins here; None if the function ends here."""
    yield from source.skip_space()
    if (yield from source.accept(END_FUNCTION)):
        return None
    yield from source.expect(PARAMETER)
    return (yield from _xml_name(source))


def _xml_name(source: Source) -> Wait[str]:
    name = yield from source.run(_XML_NAME)
    yield from source.expect(b">")
    if not name.strip():
        raise NotACall
    return as_text(name.strip())


def mistral(source: Source, _tag: bytes) -> Wait[list[ToolCall]]:
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]NAME[ARGS]{…}` for one call.

    Some models write `[CALL_ID]…` between name and arguments; ids are the server's to make, so it is ignored.
    """
    yield from source.skip_space()
    if (yield from source.peek()) == b"[":
        return calls_of_list((yield from source.json_text(b"[")))
    name = yield from source.run(_MISTRAL_NAME)
    if (yield from source.accept(b"[CALL_ID]")):
        yield from source.run(_MISTRAL_NAME)
    yield from source.expect(b"[ARGS]")
    yield from source.skip_space()
    return [named_call(as_text(name), (yield from source.json_text(b"{")))]


def llama_first(source: Source) -> Wait[list[ToolCall]]:
    """The JSON object behind `<|python_tag|>`."""
    yield from source.skip_space()
    return [call_of_object((yield from source.json_text(b"{")))]


def llama_next(source: Source) -> Wait[list[ToolCall]]:
    """A further object behind `<|python_tag|>`, or no call if nothing but `;` and whitespace is left."""
    yield from source.accept(b";")
    yield from source.skip_space()
    if not (yield from source.peek()):
        return []
    return (yield from llama_first(source))


def llama_whole(source: Source) -> Wait[list[ToolCall]]:
    """An answer that is calls and nothing else: certain only when it has ended."""
    calls: list[ToolCall] = []
    while True:
        calls.append(call_of_object((yield from source.json_text(b"{")), need_arguments=True))
        yield from source.skip_space()
        yield from source.accept(b";")
        yield from source.skip_space()
        if not (yield from source.peek()):
            return calls
