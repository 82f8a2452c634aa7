import json

import pytest

from segue.toolcalls import FORMATS, ToolCall, reader


def read(format, *pieces):
    stream = reader(format)
    got = [piece for text in pieces for piece in stream.push(text)] + stream.flush()
    joined = []
    for piece in got:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


F = ToolCall("f", '{"a": 1}')
F_JSON = '{"name": "f", "arguments": {"a": 1}}'
# One call of `f` in each format, as the model writes it.
WRITTEN = {
    "hermes": f"<tool_call>\n{F_JSON}\n</tool_call>",
    "qwen-coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "llama": f"<|python_tag|>{F_JSON}",
    "mistral": f"[TOOL_CALLS][{F_JSON}]",
}


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="hermes, qwen-coder, llama, mistral"):
        reader("xml")


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        ("hermes", WRITTEN["hermes"], [F]),
        ("hermes", f"<tool_call>{F_JSON}</tool_call><tool_call>{F_JSON}</tool_call>", [F, F]),
        ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', [F]),
        ("hermes", '<tool_call>{"arguments": "{\\"a\\": 1}", "id": 7, "name": "f"}</tool_call>', [F]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [ToolCall("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [ToolCall("f", "{}")]),
        ("hermes", f"Sure.<tool_call>{F_JSON}", ["Sure.", F]),
        ("hermes", f"<tool_call>{F_JSON}\n</tool_", [F]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"t": "</tool_call> \\"é\\" \\\\"}}</tool_call>',
            [ToolCall("f", '{"t": "</tool_call> \\"é\\" \\\\"}')],
        ),
        ("hermes", f'<tool_call>{{"name": </tool_call>\n{WRITTEN["hermes"]}', ['<tool_call>{"name": </tool_call>', F]),
        ("qwen-coder", WRITTEN["qwen-coder"], [ToolCall("f", '{"a":1}')]),
        ("qwen-coder", "<function=f>\n</function>\n</tool_call>\n", [ToolCall("f", "{}")]),
        (
            "qwen-coder",
            "ok <function=f><parameter=a>[1, 2]</parameter></function> <function=g></function>",
            ["ok", ToolCall("f", '{"a":[1, 2]}'), ToolCall("g", "{}")],
        ),
        ("llama", WRITTEN["llama"], [F]),
        ("llama", f"\n{F_JSON}\n", [F]),
        ("llama", '{"name": "f", "parameters": {"a": 1}}', [F]),
        ("llama", f"{F_JSON}; {F_JSON}\n{F_JSON};", [F, F, F]),
        ("llama", f"<|python_tag|> {F_JSON};{F_JSON} \n{F_JSON}; ", [F, F, F]),
        ("llama", '<|python_tag|>{"name": "f"}', [ToolCall("f", "{}")]),
        ("llama", f"<|python_tag|>{F_JSON}\n; and so on", [F, "; and so on"]),
        ("mistral", WRITTEN["mistral"], [F]),
        ("mistral", f"[TOOL_CALLS] [{F_JSON}, {F_JSON}]", [F, F]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[CALL_ID]x1[ARGS] {"a": 1}', [F, F]),
        ("mistral", f"[TOOL_CALLS]a b [TOOL_CALLS][{F_JSON}]", ["[TOOL_CALLS]a b", F]),
    ],
)
def test_calls_as_models_write_them(format, text, expected):
    assert read(format, text) == expected
    assert read(format, *text) == expected


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("\n-1.50\n", -1.5),
        ("true", True),
        ("\nnull\n", None),
        ('\n{"k": ["v"]}\n', {"k": ["v"]}),
        ("\nSan Francisco\n", "San Francisco"),
        ("\n\n  two\nlines\n\n", "\n  two\nlines\n"),
        ('\n"quoted"\n', '"quoted"'),
        ("NaN", "NaN"),
        ("", ""),
        ("\na </parameter> b <parameter=x> c\n", "a </parameter> b <parameter=x> c"),
        ("[" * 100_000, "[" * 100_000),
        ("9" * 5_000, None),
    ],
)
def test_values_of_qwen_coder(written, value):
    (call,) = read("qwen-coder", f"<function=f><parameter=k>{written}</parameter></function>")
    if value is None:
        assert call.arguments == f'{{"k":{written.strip()}}}'
    else:
        assert json.loads(call.arguments) == {"k": value}


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>not JSON</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1'),
        ("hermes", f"<tool_call>{F_JSON} and more</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": -Infinity}"}</tool_call>'),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 9000}{"]" * 9000}}}}}</tool_call>'),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": "{"[" * 90000}"}}</tool_call>'),
        ("qwen-coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n"),
        ("qwen-coder", "<function=f>() is how <function= is written, <function=>"),
        ("qwen-coder", WRITTEN["hermes"]),
        ("llama", '<|python_tag|>brave_search.call(query="x")'),
        ("llama", '<|python_tag|>{"query": "x"}'),
        ("llama", f"Here: <|python_tag|>{F_JSON}"),
        ("llama", f"{F_JSON} is the call"),
        ("llama", '{"name": "Ada", "age": 36}'),
        ("llama", '{"name": "f", "arguments": "{}"}'),
        ("llama", '{"parameters": {}}'),
        ("llama", f"[{F_JSON}]"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", f'[TOOL_CALLS][{F_JSON}, {{"name": 1}}]'),
        ("mistral", f"[TOOL_CALLS][{F_JSON}"),
        ("mistral", "[TOOL_CALLS]f[ARGS][1]"),
        ("mistral", '[TOOL_CALLS][ARGS]{"a": 1}'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": Infinity}'),
    ],
)
def test_what_only_looks_like_a_call_is_text_to_the_character(format, text):
    text = f"{text} \n"
    assert read(format, text) == [text]


@pytest.mark.parametrize("format", FORMATS)
def test_thoughts_are_text_and_the_answer_begins_behind_them(format):
    (call,) = read(format, WRITTEN[format])
    thought = f"\n<think>\n{WRITTEN[format]}\n\n</think>"
    assert read(format, f"{thought}\n\n{WRITTEN[format]}") == [thought, call]
    assert read(format, f"{thought}\n\nHello ") == [f"{thought}\n\nHello "]
    unclosed = thought.removesuffix(">") + f"\n{WRITTEN[format]}\n"
    assert read(format, unclosed) == [unclosed]


@pytest.mark.parametrize("format", ["hermes", "qwen-coder", "mistral"])
def test_only_whitespace_that_touches_a_complete_call_is_dropped(format):
    written = WRITTEN[format]
    (call,) = read(format, written)
    assert read(format, f" \n a b \n\t{written}\r\n\n{written} \n c \n") == [" \n a b", call, call, "c \n"]
    assert read(format, f"\n {written}\n ") == [call]
    cut_off = written[: len(written) // 2]
    assert read(format, f"a \n{cut_off}\n") == [f"a \n{cut_off}\n"]


def test_text_is_held_back_only_while_it_may_become_a_call():
    stream = reader("hermes")
    assert stream.push("a <tool") == ["a"]
    assert stream.push("x") == [" <toolx"]
    assert stream.push(" <tool_call>\n") == []
    assert stream.push("s") == [" <tool_call>\ns"]
    assert stream.push(WRITTEN["hermes"]) == [F]
    assert stream.push("\n ") == []
    assert stream.push("b") == ["b"]
    assert stream.flush() == []
    assert stream.flush() == []

    stream = reader("llama")
    assert stream.push("\n{") == []
    assert stream.push("x") == ["\n{x"]
    assert stream.push(WRITTEN["llama"] + " ") == [WRITTEN["llama"] + " "]


def test_calls_come_as_soon_as_they_are_complete():
    for format in ("hermes", "qwen-coder", "mistral", "llama"):
        assert len(reader(format).push(WRITTEN[format])) == 1
