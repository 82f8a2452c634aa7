"""What a command looks like, in numbers: for a model that guesses how long it takes.

All are small whole numbers, so that a threshold means the same in every implementation of a tree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import chain

from segue.toolcalls.shell import MAX_COMMAND_CHARS, command_key, key_weight, split_commands

_MOST = 64  # of anything that is counted

_QUOTED = re.compile(r"'[^']*+'?|\"(?:[^\"\\]++|\\.)*+\"?")
_SYNTAX = re.compile(r"&&|\|\||<<-?|&>>?|[<>]&|>>|\$\(|[`|;&<>\n*?]")
_KEYWORD = re.compile(r"(?<![\w/.-])(for|while|until|if|case|select)(?=\s)")
_NUMBER = re.compile(r"(\d{1,7})(?:\.\d*)?([smhd]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NETWORK = _words("curl wget ssh scp sftp rsync ping nc telnet dig clone fetch pull push download gh aws gcloud az")
_INSTALLERS = _words("install add sync update upgrade ci i restore bootstrap")
_BUILDERS = _words(
    "pytest tox nox jest vitest mocha test tests unittest build compile make cmake ninja gcc g++ clang"
) | _words("cargo go mvn gradle bazel tsc webpack mypy pylint check bench")
_SEARCHERS = _words("find fd rg ag ack grep tree du locate")
_SUPERUSERS = _words("sudo doas")


def _log2(value: int) -> int:
    return value.bit_length()


def _among(words: Iterable[str], names: frozenset[str]) -> int:
    return sum(word.rpartition("/")[2] in names for word in words)


def _value_of(name: str, commands: list[list[str]]) -> int:
    """The largest time that a command of this name is given, as the exponent of its seconds."""
    best = 0
    for words in commands:
        for at, word in enumerate(words[:-1]):
            if word == name and (number := next(filter(None, map(_NUMBER.fullmatch, words[at + 1 : at + 4])), None)):
                best = max(best, _log2(int(number[1]) * _SECONDS[number[2]]))
    return best


class _Looked:
    """A command, read once for all features."""

    def __init__(self, tool: str, command: str) -> None:
        text = command[:MAX_COMMAND_CHARS]
        bare = _QUOTED.sub("''", text)
        self.tool = tool
        self.num_chars = len(text)
        self.num_quoted = bare.count("''")
        self.syntax = _SYNTAX.findall(bare)
        self.keywords = _KEYWORD.findall(bare)
        self.commands = split_commands(text)
        self.words = list(chain.from_iterable(self.commands))
        self.paths = [word for word in self.words if "/" in word and "://" not in word]
        self.weight = key_weight(command_key(text)) if text else 0

    def syntaxes(self, *wanted: str) -> int:
        return sum(self.syntax.count(token) for token in wanted)


_FEATURES: dict[str, Callable[[_Looked], int]] = {
    "is_shell": lambda c: c.tool == "bash",
    "weight": lambda c: c.weight,
    "log_chars": lambda c: _log2(c.num_chars),
    "commands": lambda c: len(c.commands),
    "words": lambda c: len(c.words),
    "options": lambda c: sum(word.startswith("-") for word in c.words),
    "paths": lambda c: len(c.paths),
    "path_depth": lambda c: max((path.count("/") for path in c.paths), default=0),
    "urls": lambda c: sum("://" in word for word in c.words),
    "quoted": lambda c: c.num_quoted,
    "globs": lambda c: c.syntaxes("*", "?"),
    "pipes": lambda c: c.syntaxes("|"),
    "redirections": lambda c: c.syntaxes(">", ">>", "<", ">&", "<&", "&>", "&>>"),
    "here_documents": lambda c: c.syntaxes("<<", "<<-"),
    "conjunctions": lambda c: c.syntaxes("&&", "||"),
    "sequences": lambda c: c.syntaxes(";", "\n"),
    "background": lambda c: c.syntaxes("&"),
    "substitutions": lambda c: c.syntaxes("$(", "`"),
    "loops": lambda c: sum(word in ("for", "while", "until") for word in c.keywords),
    "conditions": lambda c: sum(word in ("if", "case", "select") for word in c.keywords),
    "sudo": lambda c: _among(c.words, _SUPERUSERS),
    "log_timeout": lambda c: _value_of("timeout", c.commands),
    "log_sleep": lambda c: _value_of("sleep", c.commands),
    "network_verbs": lambda c: _among(c.words, _NETWORK) + 2 * _among(c.words, _INSTALLERS),
    "work_verbs": lambda c: 2 * _among(c.words, _BUILDERS) + _among(c.words, _SEARCHERS),
}

FEATURES = tuple(_FEATURES)


def features_of(tool: str, command: str) -> list[int]:
    """In the order of `FEATURES`. Never raises."""
    looked = _Looked(tool, command)
    return [min(int(feature(looked)), _MOST) for feature in _FEATURES.values()]
