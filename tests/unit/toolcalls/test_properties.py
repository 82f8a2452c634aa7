from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.toolcalls import FORMATS, ToolCall, reader
from segue.toolcalls.readers import MAX_CALL_BYTES
from segue.toolcalls.source import Source

CALL = '{"name": "f", "arguments": {"a": "é"}}'
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool_", "<", "<function=f>", "<function=", "</function>", "<parameter=k>"),
    *("</parameter>", "<|python_tag|>", "<|", "[TOOL_CALLS]", "[ARGS]", "[", "]", "f", "<think>", "</think>", ">"),
    *(CALL, '{"name": "f", ', '"parameters": {}}', "{", "}", '"', "\\", ":", ",", ";", "1", "NaN", " ", "\n", "\r\n"),
    *(f"<tool_call>{CALL}</tool_call>", f"[TOOL_CALLS][{CALL}]", f"[TOOL_CALLS]f[ARGS]{CALL}", "é", "😀", "\ud800"),
    "<function=f><parameter=k>v</parameter></function>",
]
TEXT = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join) | st.text(max_size=40)
SPACE = " \t\r\n"


def read(stream, pieces):
    got = [piece for text in pieces for piece in stream.push(text)] + stream.flush()
    joined = []
    for piece in got:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


def cut(text, places):
    places = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


@pytest.mark.parametrize("format", FORMATS)
@given(text=TEXT, places=st.lists(st.integers(0, 500), max_size=6))
def test_the_pieces_do_not_depend_on_the_cuts(format, text, places):
    whole = read(reader(format), [text])
    assert read(reader(format), list(text)) == whole
    assert read(reader(format), cut(text, places)) == whole


@pytest.mark.parametrize("format", FORMATS)
@given(text=TEXT, limit=st.integers(1, 80), places=st.lists(st.integers(0, 500), max_size=3))
def test_nor_does_giving_up_a_large_call(format, text, limit, places):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("segue.toolcalls.readers.MAX_CALL_BYTES", limit)
        whole = read(reader(format), [text])
        assert read(reader(format), list(text)) == whole
        assert read(reader(format), cut(text, places)) == whole


@pytest.mark.parametrize("format", FORMATS)
@given(text=TEXT)
def test_content_stays_in_order_and_is_everything_if_there_is_no_call(format, text):
    pieces = read(reader(format), [text])
    content = [piece for piece in pieces if isinstance(piece, str)]
    if content == pieces:
        assert "".join(content) == text
        return
    if pieces[0] in content:
        assert text.startswith(pieces[0])
    if pieces[-1] in content:
        assert text.endswith(pieces[-1])
    rest = text
    for piece in content:
        assert piece in rest
        rest = rest[rest.find(piece) + len(piece) :]


CALLS = {
    "hermes": [f"<tool_call>{CALL}</tool_call>", f"<tool_call>\n{CALL}\r\n</tool_call>"],
    "qwen-coder": [
        '<tool_call>\n<function=f>\n<parameter=a>\n"</parameter>\n</parameter>\n</function>\n</tool_call>',
        "<function=f></function>",
    ],
    "mistral": [f"[TOOL_CALLS][{CALL},{CALL}]", f"[TOOL_CALLS]f[ARGS]{CALL}"],
}
LOOKALIKES = ["<", "<tool_call", "<tool_call>{ ", "<function=", "<function=a>-", "[", "[TOOL_CALLS]f[ARGS]x", '"', "{"]
CONTENT = st.lists(st.sampled_from([*LOOKALIKES, "a", "é", "</tool_call!", *SPACE]), max_size=6).map("".join)


@pytest.mark.parametrize("format", CALLS)
@given(data=st.data())
def test_calls_between_lookalikes_are_found_and_the_rest_is_kept(format, data):
    """All of the answer is accounted for: `x` ends a content, so that no tail of it can join the call after it."""
    text, expected = "", []
    for content in data.draw(st.lists(CONTENT, max_size=4)):
        written = data.draw(st.sampled_from(CALLS[format]))
        kept = content + "x"
        text += kept + data.draw(st.text(SPACE, max_size=3)) + written + data.draw(st.text(SPACE, max_size=3))
        if expected:
            kept = kept.lstrip(SPACE)
        expected += [kept, *read(reader(format), [written])]
    assert read(reader(format), [text]) == expected


BEGINNINGS = {
    "hermes": ["<tool_call>", '<tool_call>{"', '<tool_call>{"a": "\\"', '<tool_call>{"":"<tool_call>{', "<"],
    "qwen-coder": [
        "<tool_call><function=f><parameter=k>",
        "<function=",
        "<function=f><parameter=k></parameter><parameter=",
        "<function=f><parameter=k></parameter>",
    ],
    "llama": ['{"', "<|python_tag|>{", "{"],
    "mistral": ["[TOOL_CALLS]", '[TOOL_CALLS][{"', "[TOOL_CALLS]f[ARGS]{", "["],
}


@pytest.mark.parametrize(("format", "unit"), [(format, unit) for format in FORMATS for unit in BEGINNINGS[format]])
def test_no_beginning_repeated_is_read_over_and_over(format, unit, monkeypatch):
    """Bytes looked at, counted where reading passes them, stay within a small multiple of the answer's."""
    looked_at = 0
    take_run = Source.run

    def run(self, pattern):
        nonlocal looked_at
        start = self.at
        passed = yield from take_run(self, pattern)
        looked_at += self.at - start
        return passed

    monkeypatch.setattr(Source, "run", run)
    text = unit * 3_000
    assert read(reader(format), [text]) == [text]
    assert looked_at <= 3 * len(text)


@pytest.mark.parametrize("format", FORMATS)
def test_a_long_unfinished_call_comes_in_single_characters(format):
    """Would take hours if a push cost what is held: it only has to end."""
    start = {"hermes": '<tool_call>{"a": "', "qwen-coder": "<function=f><parameter=k>", "llama": '{"a": "'}
    text = start.get(format, '[TOOL_CALLS]f[ARGS]{"a": "') + "x </p\\n" * 25_000
    assert read(reader(format), text) == [text]
    assert read(reader(format), " " * 200_000) == [" " * 200_000]


@pytest.mark.parametrize("format", FORMATS)
def test_a_call_above_the_limit_becomes_text_and_is_let_go_while_it_comes(format):
    begin, end = {
        "hermes": ('<tool_call>{"name": "f", "arguments": {"a": "', '"}}</tool_call>'),
        "qwen-coder": ("<function=f><parameter=a>", "</parameter></function>"),
        "llama": ('{"name": "f", "arguments": {"a": "', '"}}'),
        "mistral": ('[TOOL_CALLS]f[ARGS]{"a": "', '"}'),
    }[format]
    size = MAX_CALL_BYTES - 100
    (call,) = read(reader(format), [begin, "x" * size, end])
    assert isinstance(call, ToolCall)
    stream = reader(format)
    assert stream.push(begin + "x" * size) == []
    assert stream.push("x" * 200) == [begin + "x" * (size + 200)]
    assert stream.push(end) == [end]
