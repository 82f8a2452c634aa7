import csv
import gzip
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.toolcalls.shell import MAX_COMMAND_CHARS, MAX_KEY_CHARS, command_key, key_weight, split_commands

KEYS = [
    ("ls", "ls"),
    ("cat main.py", "cat"),
    ("grep -r 'TODO' .", "grep -r"),
    ("grep -n foo x.py", "grep"),
    ("grep foo -Rn src", "grep -r"),
    ("git status", "git status"),
    ("pytest", "pytest"),
    ("sleep 30", "sleep"),
    # before the command
    ("cd /repo && pytest -q", "pytest"),
    ("cd /repo; ls -la", "ls"),
    ("cd 'a dir' && FOO=1 BAR='x y' pytest", "pytest"),
    ("env -u X FOO=bar python app.py", "python"),
    ("export X=y; set -e; make -j8", "make"),
    ("set -euo pipefail\ncargo +nightly test --all", "cargo test"),
    ("source .venv/bin/activate && python -m pytest", "pytest"),
    ("sudo -E -u root apt-get -y install curl", "apt install"),
    ("timeout -k 5 --signal=KILL 60 pytest", "pytest"),
    ("time nohup nice -n 5 stdbuf -oL python3 train.py &", "python"),
    ("stdbuf -o L python x.py", "python"),
    ("exec command /usr/bin/python3.11 x.py", "python"),
    ("FOO=bar", ""),
    ("sudo", "sudo"),
    ("timeout 60", "timeout"),
    ("command -v python3", "command -v"),
    # the name
    ("/usr/bin/python3 x.py", "python"),
    ("python3.11 -u x.py", "python"),
    ("python3 -c 'print(1)'", "python -c"),
    ("python -Wignore::DeprecationWarning x.py", "python"),
    ("python -W ignore -uc 'import m'", "python -c"),
    ("python -um pytest tests", "pytest"),
    ("python -mpytest", "pytest"),
    ("python -m pip install -U x", "pip install"),
    ("python -m unittest -v", "python -m unittest"),
    ("python -m http.server", "python -m http.server"),
    ("python -m coverage run -m pytest", "pytest"),
    ("coverage run --branch -m pytest", "pytest"),
    ("./manage.py migrate", "python"),
    ("./run_tests.sh", "bash"),
    ("./gradlew test", "gradle"),
    ("PIP3 INSTALL x", "pip install"),
    ("pip3.11 --no-input --log x.txt install y", "pip install"),
    ("node -e '1'", "node -e"),
    ("$(which python) x.py", "python"),
    ('"$VENV/bin/pytest" -q', "pytest"),
    # inside another
    ("bash -c 'cd x && pytest'", "pytest"),
    ('sh -lc "pip install x"', "pip install"),
    ("bash -o pipefail -c 'sudo sh -c \"make all\"'", "make"),
    ("eval 'git clone x'", "git clone"),
    ("bash run.sh", "bash"),
    ("uv run --with x pytest -q", "pytest"),
    ("uv run -m pytest", "pytest"),
    ("poetry run python -m pytest", "pytest"),
    ("npx --yes jest@29 --ci", "jest"),
    ("conda run -n env --no-capture-output python x.py", "python"),
    ("find . -name '*.py' | xargs -n 1 grep -l foo", "find"),
    ("bundle exec rspec", "rspec"),
    # sub-commands
    ("git -C dir -c a=b --no-pager status", "git status"),
    ("git", "git"),
    ("git --version", "git"),
    ("docker --context x build .", "docker build"),
    ("docker compose -f a.yml --profile p up -d", "docker compose up"),
    ("docker-compose up", "docker compose up"),
    ("kubectl -n prod get pods", "kubectl get"),
    ("npm run build", "npm run build"),
    ("npm --prefix web test", "npm test"),
    ("npm ci", "npm ci"),
    ("uv pip install x", "uv pip install"),
    ("go test ./...", "go test"),
    ("go mod tidy", "go mod tidy"),
    ("gh pr create --title x", "gh pr create"),
    ("systemctl --user restart x", "systemctl restart"),
    ("tox -e py311", "tox"),
    ("aws --region us s3 cp a b", "aws s3 cp"),
    ("terraform apply", "terraform apply"),
    ("make -C dir test", "make"),
    # the longest of several
    ("ls | wc -l", "ls"),
    ("echo start; ls", "ls"),
    ("cat x | python -", "python"),
    ("python x.py; pytest", "pytest"),
    ("pip install x && pytest", "pip install"),
    ("[ -f x ] && cat x || exit 1", "cat"),
    ("[[ -f x && -d y ]] && ls", "ls"),
    ("# first\n\n  # second\nls # pytest", "ls"),
    ("for f in *.py; do python $f; done", "python"),
    ("while ! curl -s localhost; do sleep 1; done", "curl"),
    ("for ((i=0; i<3; i++)); do ls; done", "ls"),
    ("if true; then make; else ls; fi", "make"),
    ("build() { make all; }\nbuild", "make"),
    ("(cd x && cargo build) 2>&1 | tee log", "cargo build"),
    ("x=$(pip install y)", "pip install"),
    ('echo "`curl x`"', "curl"),
    ("echo $((1 + 2)); ls", "ls"),
    ("A=(pytest make); ls", "ls"),
    ("diff <(git fetch) b", "git fetch"),
    # quotes, redirections, here-documents
    ("echo 'pytest && make'", "echo"),
    ("cat > t.py <<'EOF'\npytest\nmake\nEOF\npython t.py", "python"),
    ("cat <<-EOF > x\n\tmake\n\tEOF\nls", "cat"),
    ("cat <<< pytest", "cat"),
    ("python <<EOF\nimport x", "python"),
    ("ls 2>&1 >/dev/null &> make", "ls"),
    ("> make ls", "ls"),
    ("pip \\\n  install \\\n x", "pip install"),
    ("py'te'st", "pytest"),
    ("git 'sta", "git sta"),
    ('echo "unclosed && pytest', "echo"),
    ("ls \x00 -l", "ls"),
    ("l\x00s", "ls"),
    # nothing
    ("", ""),
    (" \n\t;;&& || | &", ""),
    ("# only a comment", ""),
    ("''", ""),
    ("done", ""),
]


@pytest.mark.parametrize(("command", "key"), KEYS)
def test_a_command_has_the_key_of_its_longest_part(command, key):
    assert command_key(command) == key


@pytest.mark.parametrize("key", sorted({key for _, key in KEYS}))
def test_a_key_is_its_own_key(key):
    assert command_key(key) == key


def test_words_are_split_as_a_shell_would():
    assert split_commands("a 'b c'\"d\" >x | e\\ f && g $h # i\nj") == [["a", "b cd"], ["e f"], ["g", "$h"], ["j"]]
    assert split_commands("a $(b c) d; e") == [["a", "$()", "d"], ["b", "c"], ["e"]]


def test_weights_are_in_order():
    keys = ["echo", "ls", "grep -r", "python", "pytest"]
    assert sorted(keys, key=key_weight) == keys
    assert len({key_weight(key) for key in keys}) == len(keys)
    assert key_weight("git clone") > key_weight("git status") == key_weight("no such command")


FRAGMENTS = [
    *("ls", "pytest", "bash -c ", "eval ", "sudo ", "env ", "timeout ", "git ", "-C ", "python ", "-m ", "-c", "for "),
    *("'", '"', "\\", "$(", ")", "(", "((", "`", "${", "}", "<<EOF", "EOF", "<(", ">", "&", "|", ";", "#", "=", "x="),
    *(" ", "\n", "\x00", "é", "\ud800", "İ" * 50, "do ", "done", "--", "2>&1", "$", "{ ", "[[ "),
]
COMMANDS = st.lists(st.sampled_from(FRAGMENTS), max_size=20).map("".join) | st.text(max_size=80)


@given(COMMANDS)
def test_every_text_has_a_key_that_can_be_shown(command):
    key = command_key(command)
    assert len(key) <= MAX_KEY_CHARS
    assert key == key.strip()
    assert key.isprintable()
    key.encode()
    assert all(words for words in split_commands(command))


@given(COMMANDS)
def test_what_comes_after_a_newline_does_not_change_the_lines_before(command):
    """A key of more commands weighs no less, wherever the text is whole."""
    assert key_weight(command_key(f"pytest\n{command}")) == key_weight("pytest")


@pytest.mark.parametrize("unit", [*FRAGMENTS, 'bash -c "', "$(bash -c '", "python -m coverage run ", '"$(', "a=1 "])
def test_only_the_beginning_is_looked_at(unit):
    """A megabyte of anything takes no longer than its beginning, and recursion stays shallow."""
    text = unit * (1_000_000 // len(unit))
    assert command_key(text) == command_key(text[:MAX_COMMAND_CHARS])


def test_commands_that_agents_ran_have_keys():
    root = os.environ.get("SEGUE_TEST_DATA")
    path = Path(root or "") / "agents" / "tool_durations.csv.gz"
    if not root or not path.exists():
        pytest.skip("SEGUE_TEST_DATA has no agents/tool_durations.csv.gz")
    with gzip.open(path, "rt", newline="") as file:
        keys = [command_key(row["cmd"]) for row in csv.DictReader(file) if row["cmd"].strip()]
    assert sum(map(bool, keys)) >= 0.99 * len(keys)
    assert len(set(keys)) < 0.1 * len(keys)
