"""A command in numbers: each name counts what it says, and no text is too strange."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.toolcalls.features import FEATURES, features_of
from segue.toolcalls.shell import command_key


def of(command, tool="bash"):
    return dict(zip(FEATURES, features_of(tool, command_key(command), command), strict=True))


def test_there_are_twenty_five_with_different_names():
    assert len(FEATURES) == len(set(FEATURES)) == 25


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("ls -la | grep x > out.txt", {"pipes": 1, "redirections": 1, "commands": 2, "options": 1, "conjunctions": 0}),
        ("a && b || c; d & e", {"conjunctions": 2, "sequences": 1, "background": 1, "commands": 5, "pipes": 0}),
        ("for i in 1 2; do echo $(cat f); done", {"loops": 1, "substitutions": 1, "conditions": 0}),
        ("if test -f x; then while read l; do :; done; fi", {"conditions": 1, "loops": 1}),
        ("grep 'a | b && c' file", {"pipes": 0, "conjunctions": 0, "quoted": 1, "work_verbs": 1}),
        ("sudo apt-get install -y curl", {"sudo": 1, "network_verbs": 3}),
        ("timeout 60 pytest -q", {"log_timeout": 6, "log_sleep": 0, "work_verbs": 2}),
        ("timeout -k 5 2m make", {"log_timeout": 3, "work_verbs": 2}),
        ("sleep 1h", {"log_sleep": 12}),
        ("cat /usr/lib/a/b.py *.txt", {"paths": 1, "path_depth": 4, "globs": 1}),
        ("curl https://example.org/x", {"urls": 1, "paths": 0, "network_verbs": 1}),
        ("cat <<EOF\nhi\nEOF", {"here_documents": 1, "commands": 1}),
        ("", {"commands": 0, "log_chars": 0, "weight": 0, "is_shell": 1}),
    ],
)
def test_what_each_counts(command, expected):
    found = of(command)
    assert {name: found[name] for name in expected} == expected


def test_a_tool_that_is_no_shell_is_told_apart():
    assert of("", tool="Read")["is_shell"] == 0


@given(st.text(max_size=300) | st.text(alphabet="|&;<>$(`'\"\\ \nab*?", max_size=3000))
def test_any_text_gives_small_whole_numbers(command):
    found = features_of("bash", command_key(command), command)
    assert all(type(value) is int and 0 <= value < 100 for value in found)
