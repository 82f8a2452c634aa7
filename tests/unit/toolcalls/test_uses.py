import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.toolcalls.uses import MAX_ANSWER_CHARS, MAX_KEY_CHARS, ToolUse, find_use, use_of_call

PYTEST = "cd repo && pytest -q"
USE = ToolUse("bash", PYTEST, "pytest")
ARGUMENTS = json.dumps({"command": PYTEST})
CALL = '{"name": "bash", "arguments": %s}' % ARGUMENTS  # noqa: UP031
OPENAI = json.dumps({"id": "1", "type": "function", "function": {"name": "bash", "arguments": ARGUMENTS}})
# The same use, as models write it.
WRITTEN = {
    "bash": f"```bash\n{PYTEST}\n```",
    "sh, tildes": f"~~~~ sh\n{PYTEST}\n~~~~\n",
    "indented": f"1. Run\n   ```shell\n   {PYTEST}\n   ```",
    "unclosed": f"```zsh\n{PYTEST}",
    "console": f"```console\n$ {PYTEST}\n===== 3 passed =====\n$ ls\n```",
    "root console": f"```shell-session\n# {PYTEST}\nok\n```",
    "console with host": f"```console\nme@host:~$ {PYTEST}\nok\n```",
    "prompt in bash": f"```bash\n$ {PYTEST}\n```",
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "hermes, a bracket missing": f"<tool_call>{CALL[:-1]}</tool_call>",
    "qwen-coder": f"<tool_call>\n<function=bash>\n<parameter=command>\n{PYTEST}\n</parameter>\n</function>\n</tool_call>",
    "llama": f"<|python_tag|>{CALL}",
    "llama, in the middle": f"So: <|python_tag|>{CALL}",
    "bare": CALL.replace("arguments", "parameters"),
    "bare, in the middle": f"So:\n{CALL}\nThat is it.",
    "bare, fenced": f"```json\n{CALL}\n```",
    "mistral": f"[TOOL_CALLS][{CALL}]",
    "mistral, name first": f"[TOOL_CALLS]bash[ARGS]{ARGUMENTS}",
    "openai": f'{{"role": "assistant", "content": null, "tool_calls": [{OPENAI}]}}',
    "openai, a list": f"[{OPENAI}]",
    "openai, in the middle": f'x "tool_calls": [{OPENAI}]',
    "invoke": f'<function_calls>\n<invoke name="bash">\n<parameter name="command">{PYTEST}</parameter>\n</invoke>\n'
    "</function_calls>",
    "invoke with a prefix": f'<ns:invoke name="Bash"><ns:parameter name="command">{PYTEST}</ns:parameter></ns:invoke>',
}
THOUGHT = "<think>\nMaybe:\n```bash\nmake\n```\nor not.\n</think>\n"


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
def test_a_use_is_found_in_every_format(written):
    assert find_use(written) == USE
    assert find_use(f"I will run the tests.\n\n{written}\n") == USE


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
def test_thoughts_count_only_if_there_is_nothing_else(written):
    assert find_use(THOUGHT + written) == USE
    assert find_use(f"<think>\n{written}\n</think>\nDone.") == USE
    assert find_use(f"<think>\n{written}") == USE
    assert find_use(f"{THOUGHT.removeprefix('<think>')}{written}") == USE
    assert find_use(f"{written}\n{THOUGHT}") == USE


@pytest.mark.parametrize("format", WRITTEN)
def test_a_command_that_is_cut_off_counts_as_far_as_it_came(format):
    written = WRITTEN[format]
    uses = [find_use(written[:size]) for size in range(len(written) + 1)]
    found = [use for use in uses if use is not None]
    assert uses[-len(found) :] == found, "once found, it is not lost again"
    assert {use.tool for use in found} == {"bash"}
    commands = {use.command for use in found}
    beginnings = {command for command in commands if PYTEST.startswith(command)}
    assert len(beginnings) >= len(PYTEST.replace(" ", ""))
    # While a prompt is cut off, it is taken for a command.
    assert beginnings == commands or "console" in format or "prompt" in format


def test_the_answers_of_two_jobs_of_five_turns_are_all_found():
    commands = ["ls", "cat main.py", "grep -r 'TODO' .", "git status", "pytest"] * 2
    keys = ["ls", "cat", "grep -r", "git status", "pytest"] * 2
    plain = [find_use(f"```bash\n{command}\n```") for command in commands]
    thoughtful = [
        find_use(f"<think>\nWhat is there? Perhaps `make`.\n</think>\n\nLet me see.\n```bash\n{command}\n```\n")
        for command in commands
    ]
    inside = [find_use(f"<think>\nLet me see.\n```bash\n{command}\n```\n") for command in commands]
    assert plain == thoughtful == inside
    assert plain == [ToolUse("bash", command, key) for command, key in zip(commands, keys, strict=True)]


def test_the_last_block_is_run_but_the_slowest_of_several_calls_matters():
    def call(command):
        return f'<tool_call>{{"name": "bash", "arguments": {{"command": "{command}"}}}}</tool_call>'

    assert find_use("```bash\nmake\n```\nthen\n```bash\nls\n```").key == "ls"
    assert find_use(call("ls") + call("make") + call("cat x")).key == "make"
    assert find_use(call("ls") + call("cat x")).key == "cat"
    assert find_use("```bash\nmake\n```\n" + call("ls")).key == "ls"
    assert find_use("```bash\nls\n```\n```python\nprint()\n```\n```\ntext\n```").key == "ls"


def test_what_is_written_into_a_file_is_not_run():
    content = "# Title\n```bash\nmake\n```\n"
    written = f"<function=write><parameter=path>a.md</parameter><parameter=content>{content}</parameter></function>"
    assert find_use(written) == ToolUse("write", "", "write")
    assert find_use(written.replace("<function=write>", '<invoke name="write">')).tool == "write"
    assert find_use(f"<function=write><parameter=content>{content}").tool == "write"
    block = '```bash\ncat > a.json <<EOF\n{"name": "x", "parameters": {}}\nEOF\n```'
    assert find_use(block).key == "cat"


@pytest.mark.parametrize(
    "text",
    [
        *("", "Hello.", "```python\nprint()\n```", "```\nls\n```", "```bash\n```", "[1, 2]", "<", "<tool_call>"),
        *('{"name": "Ada", "age": 36}', '<tool_call>{"name": "ba', "use `<function=f>` so", "[TOOL_CALLS]", "<think>"),
        *('{"tool_calls": [', '{"name": "f", "arguments": ', "[TOOL_CALLS]f[AR"),
    ],
)
def test_what_is_no_use_is_none(text):
    assert find_use(text) is None


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("Bash", {"command": "ls"}, ToolUse("bash", "ls", "ls")),
        ("functions.shell", '{"command": ["bash", "-lc", "ls"]}', ToolUse("bash", "bash -lc ls", "ls")),
        (
            "container.exec",
            {"cmd": ["bash", "-lc", "pip install x"]},
            ToolUse("bash", "bash -lc 'pip install x'", "pip install"),
        ),
        ("run_terminal_cmd", {"timeout": 5, "command": "make"}, ToolUse("bash", "make", "make")),
        ("execute_bash", '{"command": "pytest -q tes', ToolUse("bash", "pytest -q tes", "pytest")),
        ("local_shell", "git status", ToolUse("bash", "git status", "git status")),
        ("mcp__desk__execute_command", {"command": "ls"}, ToolUse("bash", "ls", "ls")),
        ("runCommand", {}, ToolUse("bash", "", "bash")),
        ("execute-command", {"command": "# none"}, ToolUse("bash", "# none", "bash")),
        ("mcp__github__search_issues", "{}", ToolUse("mcp__github__search_issues", "", "github.search_issues")),
        ("github/search_issues", "", ToolUse("github/search_issues", "", "github.search_issues")),
        ("functions.Read", {"path": "x"}, ToolUse("functions.Read", "", "read")),
        ("python", {"code": "1 + 1"}, ToolUse("python", "1 + 1", "python")),
        ("edit", {"command": 5, "input": "x"}, ToolUse("edit", "x", "edit")),
        ("", "[1]", ToolUse("", "", "tool")),
    ],
)
def test_calls_that_are_already_read(name, arguments, expected):
    assert use_of_call(name, arguments) == expected


FRAGMENTS = [
    *(
        "```bash\n",
        "```",
        "~~~",
        "\n",
        "```console\n$ ",
        "$ ",
        "ls",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
    ),
    *(
        "<function=f>",
        "</function>",
        "<parameter=command>",
        "</parameter>",
        '<invoke name="x">',
        '<parameter name="cmd">',
    ),
    *("</invoke>", "<|python_tag|>", "[TOOL_CALLS]", "bash[ARGS]", '"tool_calls": [', CALL, '{"name": "f", ', "{", "}"),
    *(
        "[",
        "]",
        '"',
        "\\",
        "\\u00",
        "\\ud800",
        ":",
        ",",
        "1",
        "NaN",
        " ",
        "é",
        "\ud800",
        "\x00",
        "<",
        '{"arguments": "{',
    ),
]
TEXT = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join) | st.text(max_size=60)


@given(TEXT)
def test_no_text_is_refused(text):
    use = find_use(text)
    if use is not None:
        assert 0 < len(use.key) <= MAX_KEY_CHARS
        use.key.encode()


@given(TEXT, TEXT | st.dictionaries(st.sampled_from(["command", "cmd", "x"]), TEXT | st.none() | st.lists(TEXT)))
def test_no_call_is_refused(name, arguments):
    use = use_of_call(name, arguments)
    assert 0 < len(use.key) <= MAX_KEY_CHARS
    use.key.encode()


@pytest.mark.parametrize(
    "unit", [*FRAGMENTS, '{"a":[', "[1,", '<invoke name="x"><parameter name="a">', "```a\n```bash\n"]
)
def test_only_the_end_is_looked_at(unit):
    text = unit * (1_000_000 // len(unit))
    find_use(text)
    use_of_call("bash", text)
    assert find_use(f"{text}\n{'x' * MAX_ANSWER_CHARS}") is None


def test_a_block_is_found_though_the_beginning_of_the_answer_is_not_looked_at():
    listing = "```python\n" + "x = 1\n" * MAX_ANSWER_CHARS + "```\n"
    assert find_use(f"{listing}\n{WRITTEN['bash']}\n") == USE
