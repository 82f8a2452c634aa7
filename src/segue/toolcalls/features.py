"""What a command looks like, in numbers: for a model that guesses how long it takes.

All are small whole numbers, so that a threshold means the same in every implementation of a tree. They are counted by
patterns and not by reading the command as a shell would: a decision that wants them has microseconds.
"""

from __future__ import annotations

import re

from segue.toolcalls.shell import key_weight

_READ_CHARS = 96  # of a command: its kind shows at the beginning

_QUOTED = re.compile(r"'[^']*+'?|\"(?:[^\"\\]++|\\.)*+\"?")
_WORD = re.compile(r"[^\s`|;&<>()$]++")
_TIME = r"(?<![\w/.-])%s\s++(?:\S++\s++){0,2}?(\d{1,7})(?:\.\d*+)?([smhd]?)(?![^\s;&|)])"
_TIMES = {name: re.compile(_TIME % name) for name in ("timeout", "sleep")}
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

FEATURES = (
    "is_shell", "weight", "log_chars", "commands", "words", "options", "paths", "path_depth", "urls", "quoted", "globs",
    "pipes", "redirections", "here_documents", "conjunctions", "sequences", "background", "substitutions", "loops",
    "conditions", "sudo", "log_timeout", "log_sleep", "network_verbs", "work_verbs",
)  # fmt: skip


def features_of(tool: str, key: str, command: str) -> list[int]:
    """In the order of `FEATURES`; `key` is the command's `command_key`. Never raises."""
    bare = _QUOTED.sub("''", command[:_READ_CHARS])
    here = bare.find("<<")
    if here >= 0:
        bare = bare[: bare.find("\n", here) % (len(bare) + 1)]  # not what is in the document
    words = _WORD.findall(bare)
    paths = [word for word in words if "/" in word and "://" not in word]
    names = {*words, *(path.rpartition("/")[2] for path in paths)}
    count = bare.count
    here_documents, conjunctions, pipes = count("<<"), count("&&") + count("||"), count("|") - 2 * count("||")
    sequences, substitutions = count(";") + count("\n"), count("$(") + count("`")
    redirections = count("<") - 2 * here_documents + count(">") - count(">>")
    background = max(count("&") - 2 * count("&&") - count(">&") - count("<&") - count("&>"), 0)
    return [
        int(tool == "bash"),
        key_weight(key) if key else 0,
        len(command).bit_length(),
        (1 + conjunctions + pipes + sequences + background + substitutions) if words else 0,
        len(words),
        count(" -"),
        len(paths),
        max([path.count("/") for path in paths], default=0),
        count("://"),
        count("''"),
        count("*") + count("?"),
        pipes,
        redirections,
        here_documents,
        conjunctions,
        sequences,
        background,
        substitutions,
        words.count("for") + words.count("while") + words.count("until"),
        words.count("if") + words.count("case") + words.count("select"),
        len(names & _SUPERUSERS),
        _log_seconds("timeout", bare),
        _log_seconds("sleep", bare),
        len(names & _NETWORK) + 2 * len(names & _INSTALLERS),
        2 * len(names & _BUILDERS) + len(names & _SEARCHERS),
    ]


def _log_seconds(name: str, text: str) -> int:
    """The exponent of the seconds that the first command of this name is given."""
    found = _TIMES[name].search(text) if name in text else None
    return (int(found[1]) * _SECONDS[found[2]]).bit_length() if found is not None else 0
