"""Which tool an agent is about to run, told from the text of a model's answer.

    answer ──find_use──▶ ToolUse(tool="bash", command="cd repo && pytest -q", key="pytest")

Who asks wants to guess how long the tool will take, and no harm comes of a wrong guess. So this reads more kindly than
`reader` does: any format, wherever it stands, and calls that are cut off or not quite right. It never raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from segue.toolcalls.calls import Piece, ToolCall
from segue.toolcalls.readers import FORMATS, reader
from segue.toolcalls.shell import command_key, key_weight

MAX_ANSWER_CHARS = 16_000  # of an answer, its end: no more is looked at
MAX_KEY_CHARS = 64
MAX_DEPTH = 50  # of JSON that is looked at here


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`command` is as the model wrote it, or empty; `key` is what durations are kept under and is never empty."""

    tool: str
    command: str
    key: str


def find_use(text: str) -> ToolUse | None:
    """The use that the answer leads to. One in the model's thoughts counts only if there is no other.

    Agents run the last of several blocks, but all of several calls: of those the slowest is what they wait for.
    """
    answer, thoughts = _parted(text[-MAX_ANSWER_CHARS:])
    return _decisive(answer, len(text) > MAX_ANSWER_CHARS) or _decisive(thoughts, False)


def use_of_call(name: str, arguments: str | Mapping[str, object]) -> ToolUse:
    """For a call that is already read. `arguments` is JSON text, even cut off, or what it stands for."""
    members = arguments if isinstance(arguments, Mapping) else _loads(arguments)
    command = _command_in(members) if isinstance(members, Mapping) else ""
    if not _is_shell(name):
        return ToolUse(name, command, _tool_key(name))
    if isinstance(arguments, str) and members is None:  # not JSON
        command = arguments
    return _shell_use(command)


def _decisive(text: str, is_cut: bool) -> ToolUse | None:
    found = _uses(text, is_cut)
    last = found[-1] if found else None
    if not isinstance(last, ToolCall):
        return last
    calls = [use_of_call(call.name, call.arguments) for call in found if isinstance(call, ToolCall)]
    return max(reversed(calls), key=lambda use: key_weight(use.key))


# ---- names and commands

_COMMAND_MEMBERS = ("command", "cmd", "script", "code", "bash_command", "input")
_SHELL_VERBS = ("", "run", "runin", "exec", "execute", "local")
_SHELL_NOUNS = ("bash", "sh", "shell", "terminal", "cmd", "command", "bashcommand", "shellcommand", "shellcmd")
_SHELL_NAMES = frozenset(
    [verb + noun for verb in _SHELL_VERBS for noun in (*_SHELL_NOUNS, "terminalcmd", "terminalcommand")]
    + ["zsh", "console", "exec", "containerexec", "unifiedexec", "localshellcall", "bashtool", "shelltool", "shellexec"]
)
_PLAIN_WORD = re.compile(r"[\w@%+=:,./-]++")


def _shell_use(command: str) -> ToolUse:
    return ToolUse("bash", command, command_key(command) or "bash")


def _is_shell(name: str) -> bool:
    whole = _tool_key(name)
    names = (whole, whole.rpartition(".")[2])
    return any(part.replace("_", "").replace("-", "").replace(".", "") in _SHELL_NAMES for part in names)


def _tool_key(name: str) -> str:
    """One name for a tool, however a client spells the server that it belongs to."""
    key = "".join(char for char in name[: 4 * MAX_KEY_CHARS].lower() if char.isprintable()).replace(" ", "")
    key = key.removeprefix("functions.")
    if key.startswith("mcp__"):
        key = key.removeprefix("mcp__").replace("__", ".", 1)
    key = key.replace("/", ".").replace("::", ".").strip(".")
    return key[:MAX_KEY_CHARS] or "tool"


def _command_in(members: Mapping[str, object]) -> str:
    for name in _COMMAND_MEMBERS:
        value = members.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, list | tuple) and value and all(isinstance(word, str) for word in value):
            return " ".join(map(_quoted, value))
    return ""


def _quoted(word: str) -> str:
    """As a shell would have to be given it, so that the command in `["bash", "-lc", "cd x && ls"]` stays one word."""
    return word if _PLAIN_WORD.fullmatch(word) else "'" + word.replace("'", "'\\''") + "'"


# ---- thoughts

_THINK = re.compile(r"^[ \t]*+<think(?:ing)?>|</think(?:ing)?>", re.MULTILINE)


def _parted(text: str) -> tuple[str, str]:
    """The answer, and the thoughts in it. What comes before a closing tag is thought, even if the opening one is lost.

    An opening tag must begin a line: in the middle of one it is something that the answer talks about.
    """
    answer: list[str] = []
    thoughts: list[str] = []
    start, is_thought = 0, False
    for tag in _THINK.finditer(text):
        closes = tag[0].startswith("</")
        (thoughts if closes or is_thought else answer).append(text[start : tag.start()])
        start, is_thought = tag.end(), not closes
    (thoughts if is_thought else answer).append(text[start:])
    return "\n".join(answer), "\n".join(thoughts)


# ---- uses in a text


def _uses(text: str, is_cut: bool) -> list[ToolUse | ToolCall]:
    """All in order: a block as its use, a call as it is.

    Each step reads what the ones before it left as text. Values of tags may have fences in them, and fenced blocks may
    have JSON in them; the other way round hardly occurs.
    """
    pieces: list[Piece] = [text]
    for format in FORMATS:
        pieces = _each(pieces, partial(_read, format))
    pieces = _each(pieces, _tagged)
    found: list[ToolUse | ToolCall] = []
    for at, piece in enumerate(pieces):
        for part in [piece] if isinstance(piece, ToolCall) else _fenced(piece, is_cut and not at):
            if isinstance(part, str):
                found += _json_calls(part)
            else:
                found.append(part)
    return found


def _each(pieces: list[Piece], step: Callable[[str], list[Piece]]) -> list[Piece]:
    return [found for piece in pieces for found in ([piece] if isinstance(piece, ToolCall) else step(piece))]


def _read(format: str, text: str) -> list[Piece]:
    stream = reader(format)
    return stream.push(text) + stream.flush()


# ---- calls in tags

_CALL_TAG = re.compile(r"""<(?:\w++:)?(?:function=|invoke name=)["']?([^<>"'\r\n]++)["']?>\s*+(?=<|$)""")
_PARAMETER_TAG = re.compile(r"""<(?:\w++:)?parameter(?:=| name=)["']?([^<>"'\r\n]++)["']?[^<>]*+>""")
_END_TAG = re.compile(r"</(?:\w++:)?(?:parameter|invoke|function|tool_call|function_calls)>")
_CUT_TAG = re.compile(r"<(?:/[\w:]*+)?$")


def _tagged(text: str) -> list[Piece]:
    """`<invoke name="x"><parameter name="k">v</parameter></invoke>`, and the same as qwen-coder writes it, cut off."""
    heads = list(_CALL_TAG.finditer(text))
    if not heads:
        return [text]
    pieces: list[Piece] = [text[: heads[0].start()]]
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        body = text[head.end() : following.start() if following else len(text)]
        call, rest = _tagged_call(head[1].strip(), body)
        pieces += [call, rest]
    return pieces


def _tagged_call(name: str, body: str) -> tuple[ToolCall, str]:
    """The call whose parameters begin `body`, and the text behind it."""
    members: dict[str, str] = {}
    at = 0
    while parameter := _PARAMETER_TAG.match(body, at):
        end = _END_TAG.search(body, parameter.end())
        value = body[parameter.end() : end.start()] if end else _CUT_TAG.sub("", body[parameter.end() :])
        members.setdefault(parameter[1].strip(), value.strip("\r\n"))
        at = _past_space(body, end.end() if end else len(body))
    while end := _END_TAG.match(body, at):
        at = _past_space(body, end.end())
    return ToolCall(name, json.dumps(members)), body[at:]


_SPACE = re.compile(r"\s*+")


def _past_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


# ---- fenced blocks

_FENCE = re.compile(r"[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)")
_LABELS = frozenset(["bash", "sh", "shell", "zsh", "mswea_bash_command"])
_CONSOLES = frozenset(["console", "shell-session", "shellsession", "sh-session", "bash-session", "terminal"])


def _fenced(text: str, is_cut: bool) -> Iterator[ToolUse | str]:
    """The shell blocks, and the text around them. Other blocks are text: some models fence their JSON.

    In a text whose beginning `is_cut` off, a first fence without a label closes a block.
    """
    kept: list[str] = []
    fence, label, block = "", "", kept
    for line in text.splitlines(keepends=True):
        match = _FENCE.match(line)
        if match and not fence and not (is_cut and not match[2]):
            fence, label = match[1], match[2].lower().strip("{}.")
            block = [] if label in _LABELS or label in _CONSOLES else kept
        elif match and fence and match[1].startswith(fence) and not line[match.end(1) :].strip():
            if block is not kept:
                yield "".join(kept)
                yield from _block_use(label, block)
                kept = []
            fence, block = "", kept
        else:
            block.append(line)
        is_cut = is_cut and not match
    yield "".join(kept)
    if block is not kept:
        yield from _block_use(label, block[:-1] if block and fence.startswith(block[-1].strip()) else block)


def _block_use(label: str, lines: list[str]) -> Iterator[ToolUse]:
    first = next((line for line in lines if line.strip()), "")
    if label in _CONSOLES or first.lstrip().startswith("$ "):
        lines = _typed(lines)
    if command := "".join(lines).strip():
        yield _shell_use(command)


def _typed(lines: list[str]) -> list[str]:
    """What was typed at the first prompt of a session; all of it if there is no prompt.

    `# ` is the prompt only where there is no `$ `: else it begins a comment.
    """
    for prompt in ("$ ", "% ", "# "):
        for at, line in enumerate(lines):
            before, found, typed = line.partition(prompt)
            if found and (not before.strip() or "@" in before.split()[-1] or before.strip().endswith(")")):
                end = at
                while lines[end].rstrip().endswith("\\") and end + 1 < len(lines):
                    end += 1
                return [typed, *(line.removeprefix("> ") for line in lines[at + 1 : end + 1])]
    return lines


# ---- JSON, whole or cut off

_JSON_BEGINS = re.compile(
    r"(?:^[ \t]*+(?!\[TOOL_CALLS\])|<tool_call>\s*+|<\|python_tag\|>\s*+|\[TOOL_CALLS\]\s*+(?:(?P<name>[^\s\[\]{}\"\\]++)"
    r"(?:\[CALL_ID\][^\s\[\]{}\"\\]*+)?\[ARGS\]\s*+)?|\"tool_calls\"\s*+:\s*+)(?=[{\[])",
    re.MULTILINE,
)
_JSON_STEP = re.compile(r'[ \t\r\n:0-9+\-.eEtrufalsn]++|"(?:[^"\\\x00-\x1f]++|\\.)*+(?P<quote>"?)|[{}\[\],]')
_CUT_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{0,3}$")


def _json_calls(text: str) -> Iterator[ToolCall]:
    """Each place is read from once: what does not become a call is passed, so that the time stays linear."""
    at = 0
    while begin := _JSON_BEGINS.search(text, at):
        value, at = _value_at(text, begin.end())
        if begin["name"]:
            yield ToolCall(begin["name"], json.dumps(value or {}))
        else:
            yield from _calls_in(value, bool(begin[0].strip()))


def _calls_in(value: object, is_tagged: bool) -> Iterator[ToolCall]:
    """Where no tag says that a call is meant, an object that merely has a name is none."""
    if isinstance(value, list):
        for element in value:
            yield from _calls_in(element, is_tagged)
    if not isinstance(value, dict):
        return
    if isinstance(value.get("tool_calls"), list):
        yield from _calls_in(value["tool_calls"], True)
        return
    function = value.get("function")
    call = function if isinstance(function, dict) else value
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", call.get("input")))
    if isinstance(name, str) and name.strip() and (is_tagged or isinstance(arguments, dict) or call is function):
        yield ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments or {}))


def _loads(text: str) -> object:
    text = text[:MAX_ANSWER_CHARS]
    return _value_at(text, _past_space(text, 0))[0]


def _value_at(text: str, start: int) -> tuple[object, int]:
    """The JSON that begins at `start`, and where reading it ended. It is closed where it is cut off or goes wrong."""
    at = start
    brackets = ""  # that close what is open
    complete, closing = start, ""  # the last place up to which all members are complete, and what closes them
    while step := _JSON_STEP.match(text, at):
        token, at = step[0], step.end()
        if step["quote"] == "":
            cut_off = _decoded(_with_string(text[start : step.start()], token) + brackets)
            return cut_off or _decoded(text[start:complete] + closing), at
        if token in "{[":
            brackets = ("}" if token == "{" else "]") + brackets
        elif token in "}]":
            brackets = brackets[1:]
        if token in "{[}],":
            complete, closing = at - (token == ","), brackets
        if not brackets or len(brackets) > MAX_DEPTH:
            break
    return _decoded(text[start:at] + brackets) or _decoded(text[start:complete] + closing), max(at, start + 1)


def _with_string(before: str, string: str) -> str:
    """`before` with a value that is cut off. A key is worth nothing without its value, nor is half a tool's name."""
    key = before.rstrip(" \t\r\n")
    if key.endswith('"name":') or not key.endswith((":", "[", ",")):
        return ""
    return before + _CUT_ESCAPE.sub("", string) + '"'


_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)  # what numbers are worth is not asked


def _decoded(text: str) -> object:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
