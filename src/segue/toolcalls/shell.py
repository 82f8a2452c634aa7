"""A short key for a shell command, so that how long commands like it took can be kept under one name.

    cd repo && FOO=1 timeout 60 python3 -m pytest -q | tail -5   ──command_key──▶   pytest

Agents write commands of any kind and length, and answers come cut off. So nothing here raises, an open quote ends where
the text does, and only the beginning of a command is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_COMMAND_CHARS = 2_000
MAX_KEY_CHARS = 40
MAX_NESTING = 4  # of commands in `$(…)`, `bash -c '…'` and `eval`: deeper ones are not looked at

TRIVIAL, PLAIN, SEARCH, INTERPRETER, SLOW = range(5)


def command_key(command: str) -> str:
    """The one simple command in `command` that is likely to take longest; empty if there is none.

    Its options and operands are left out, but for those that make it another kind of work: `git clone`, `python -c`.
    """
    return _heaviest(split_commands(command), MAX_NESTING)


def key_weight(key: str) -> int:
    """How long a command with this key is likely to take, as a rank: only the order means anything."""
    words = key.split(" ")
    for size in range(min(len(words), 3), 0, -1):
        weight = _WEIGHTS.get(" ".join(words[:size]))
        if weight is not None:
            return weight
    return PLAIN


def split_commands(command: str) -> list[list[str]]:
    """The words of each simple command, in order and without quotes, redirections, comments and here-documents.

    Commands in `$(…)` follow the command that they stand in. Words of the shell's own grammar (`if`, `do`) stay.
    """
    return _split(command[:MAX_COMMAND_CHARS], MAX_NESTING)


# ---- what there is to know about commands


def _table(*entries: tuple[int, str]) -> dict[str, int]:
    return {key.strip(): weight for weight, keys in entries for key in keys.split(",")}


_WEIGHTS = _table(
    (TRIVIAL, "cd, echo, printf, true, false, :, test, [, [[, export, set, unset, source, ., pwd, shopt, trap, umask"),
    (TRIVIAL, "alias, exit, return, break, continue, local, declare, readonly, shift, read, pushd, popd, hash, which"),
    (TRIVIAL, "mkdir, touch, command -v, type, ulimit, conda activate, conda deactivate, let, typeset, clear, date"),
    (SEARCH, "find, fd, fdfind, rg, ag, ack, grep -r, git grep, tree, du, locate, tar, zip, unzip, gzip, gunzip, xz"),
    (SEARCH, "zstd, 7z, rsync, git log, git blame, git checkout, git stash, git gc, git diff, pip list, pip check"),
    (INTERPRETER, "python, ipython, pypy, node, deno, bun, ruby, perl, php, java, rscript, r, julia, lua, bash, sh"),
    (INTERPRETER, "zsh, dash, ksh, fish, ghc, runghc, swift, dotnet, scala, clojure, elixir, groovy, octave, go tool"),
    (INTERPRETER, "psql, mysql, sqlite3, mongosh, redis-cli, docker exec, docker compose exec, kubectl exec, uvicorn"),
    (SLOW, "sleep, wait, watch, curl, wget, ssh, scp, sftp, ping, git clone, git fetch, git pull, git push, git lfs"),
    (SLOW, "git submodule, git bisect, pytest, tox, nox, jest, vitest, mocha, ava, karma, cypress, playwright, rspec"),
    (SLOW, "phpunit, ctest, bats, behave, nosetests, trial, ginkgo, coverage, hypothesis, make, cmake, ninja, meson"),
    (SLOW, "bazel, bazelisk, buck, scons, gradle, mvn, ant, sbt, lein, mix, rake, gcc, g++, cc, c++, clang, clang++"),
    (SLOW, "rustc, nvcc, javac, tsc, kotlinc, swiftc, webpack, vite, rollup, esbuild, next, ng, turbo, nx, gulp"),
    (SLOW, "grunt, mypy, pyright, pylint, flake8, ruff, black, isort, eslint, prettier, bandit, pre-commit, cargo"),
    (SLOW, "go, npm, yarn, pnpm, composer, bundle, gem, brew, cabal, stack, opam, zig, nix, nix-build, nix-shell"),
    (SLOW, "pip install, pip download, pip wheel, pip uninstall, pipx, easy_install, poetry, pipenv, pdm, hatch, uv"),
    (SLOW, "conda, mamba, micromamba, apt, apk, yum, dnf, pacman, rpm, snap, docker build, docker pull, dvc"),
    (SLOW, "docker run, docker push, docker buildx, docker compose, docker start, docker stop, docker restart, podman"),
    (SLOW, "docker load, docker save, docker logs, kubectl apply, kubectl wait, kubectl rollout, kubectl logs, helm"),
    (SLOW, "kubectl delete, terraform, ansible-playbook, vagrant, aws, gcloud, az, gsutil, gh, huggingface-cli, hf"),
    (SLOW, "torchrun, accelerate, deepspeed, jupyter, vllm, python -m unittest, python -m venv, virtualenv, strace"),
    (SLOW, "python -m build, systemctl restart, systemctl start, systemctl stop, dd, sha256sum, ffmpeg"),
    (PLAIN, "go version, go env, go fmt, npm config, npm ls, npm list, conda env, conda info, conda list, apt list"),
    (PLAIN, "docker compose ps, gh auth, uv venv, terraform fmt, aws configure, dpkg"),
)


def _options(table: str) -> dict[str, frozenset[str]]:
    """From lines of `command, command: options`."""
    lines = (line.partition(":") for line in table.strip().splitlines())
    return {key.strip(): frozenset(options.split()) for keys, _, options in lines for key in keys.split(",")}


# Commands that have sub-commands, each with the options before the sub-command that take a value of their own.
_SUBCOMMANDS = _options("""
git: -C -c --git-dir --work-tree --namespace --exec-path --config-env --super-prefix
pip: --python --log --proxy --timeout --retries --cache-dir --cert --client-cert --trusted-host --exists-action
npm, npm run: --prefix -C --workspace -w --registry --loglevel --userconfig --cache
yarn, yarn run, yarn workspace, bun, bun run: --cwd --registry --cache-folder --modules-folder
pnpm, pnpm run: -C --dir --filter -F --reporter --loglevel
cargo: -C -Z --color --config --manifest-path --target-dir
go, go mod: -C
docker: --context -c --host -H --log-level -l --config --tlscacert --tlscert --tlskey
docker compose: -f --file -p --project-name --profile --env-file --project-directory --parallel --progress --ansi
docker buildx, docker image, docker container, docker volume, docker network, docker system: --builder
podman: --connection -c --log-level --root --url
kubectl: -n --namespace --context --kubeconfig --cluster -s --server --token --user --as -v --request-timeout
helm: -n --namespace --kube-context --kubeconfig
apt: -o --option -c --config-file -t --target-release
apk: -X --repository -p --root
yum, dnf: -c --config -x --exclude --enablerepo --disablerepo
conda, conda env, mamba, micromamba: -r --root-prefix
uv, uv pip, uv tool, uv python: --directory --project --color --config-file --cache-dir --python -p
poetry: -C --directory -P --project
pipenv: --python
pdm: -p --project -c --config
hatch: -e --env -p --project --data-dir --cache-dir --config
pixi: --manifest-path --color
composer: -d --working-dir
gh, gh pr, gh issue, gh run, gh repo: -R --repo
systemctl: -H --host -M --machine -p --property -t --type -n --lines -o --output
tox: -e -c --conf --workdir --root -x --override --colored --result-json
aws, aws s3, aws ec2: --profile --region --output --endpoint-url --query --color --ca-bundle
gcloud: --project --account --configuration --format --verbosity
coverage: --rcfile
rye, pipx, brew, gem, bundle, dotnet, terraform, az, vagrant, dvc, mix, nix, jupyter, dotenv:
""")


# Commands that run another one, each with its options that take a value.
_WRAPPERS = _options("""
sudo: -u --user -g --group -h --host -p --prompt -C -r --role -t --type -U -D --chdir -R --chroot -T
doas: -u -C
env: -u --unset -C --chdir -S --split-string
timeout: -k --kill-after -s --signal
time: -f --format -o --output
nice: -n --adjustment
ionice: -c --class -n --classdata
stdbuf: -i -o -e --input --output --error
flock: -w --timeout -E
exec: -a
nohup, setsid, unbuffer, command, builtin, chroot, taskset, bunx, bundle exec, poetry run, pipenv run, rye run:
xargs: -n --max-args -P --max-procs -I -L --max-lines -d --delimiter -s --max-chars -a --arg-file -E
xvfb-run: -s --server-args -n --server-num -e --error-file -f --auth-file
npx, npm exec, pnpm exec, pnpm dlx, yarn exec, yarn dlx: -p --package -w --workspace
uvx, pipx run: --from --with --spec --python -p
uv run: --with --with-editable --with-requirements --extra --group --only-group --package --env-file --python -p
conda run, mamba run, micromamba run: -n --name -p --prefix --cwd
pdm run, hatch run: -p --project
pixi run: -e --environment --manifest-path
dotenv run: -f --file
""")
_WITH_OPERAND = frozenset(["timeout", "chroot", "flock", "taskset"])  # wrappers whose first operand is not the command

_SHELLS = frozenset(["bash", "sh", "zsh", "dash", "ash", "ksh", "fish", "su"])
_MODES = {"python": "c", "node": "ep", "perl": "eE", "ruby": "e", "php": "r", "grep": "rR"}
_VALUE_OPTIONS = {"python": frozenset(["-W", "-X"]), "node": frozenset(["-r", "--require"]), "ruby": frozenset(["-I"])}
_ALIASES = {"py.test": "pytest", "pytest-3": "pytest", "apt-get": "apt", "nodejs": "node", "gmake": "make", "[[": "["}
_ALIASES |= {"gradlew": "gradle", "mvnw": "mvn", "gtimeout": "timeout", "egrep": "grep", "fgrep": "grep"}
_BY_SUFFIX = {"py": "python", "sh": "bash", "bash": "bash", "js": "node", "mjs": "node", "rb": "ruby", "pl": "perl"}
_MODULES = frozenset(key.partition(" ")[0] for key, weight in _WEIGHTS.items() if weight == SLOW)
_GRAMMAR = frozenset(["if", "then", "else", "elif", "fi", "while", "until", "do", "done", "esac", "{", "}", "!"])
_HEADERS = frozenset(["for", "select", "case", "function"])  # what follows on the same line is no command
_VERSIONED = re.compile(r"(python|pip|pypy|ruby|php|perl|lua)[0-9][0-9.]*+")
_SUBCOMMAND = re.compile(r"[A-Za-z0-9][\w.:-]*+")


# ---- from words to a key


def _heaviest(commands: Iterable[list[str]], nesting: int) -> str:
    best, best_weight = "", -1
    for words in commands:
        key = _key_of(words, nesting)
        if key and (weight := key_weight(key)) > best_weight:
            best, best_weight = key, weight
    return best


def _key_of(words: list[str], nesting: int) -> str:
    """The key of one simple command; empty if it only assigns, or is a part of the shell's grammar."""
    name = ""
    words = _from_program(words)
    while words:
        name, words = _with_subcommands(_program(words[0]), words[1:])
        if name == "command" and words[:1] in (["-v"], ["-V"]):
            return "command -v"
        inner = _from_program(_wrapped(name, words))
        if not inner:
            break
        words = inner
    if nesting and (script := _script(name, words)):
        return _heaviest(_split(script, nesting - 1), nesting - 1) or _short(name)
    return _short(_with_mode(name, words))


def _from_program(words: list[str]) -> list[str]:
    """`words` from the program's name on: without the shell's grammar and assignments before it.

    `name()` begins a function, and `$()` stands for what a command wrote: who knows what.
    """
    for at, word in enumerate(words):
        if word in _HEADERS or word.startswith("-"):
            return []
        if word and word not in _GRAMMAR and not word.endswith("()") and not _is_assignment(word):
            return words[at:]
    return []


def _is_assignment(word: str) -> bool:
    name, equals, _ = word.partition("=")
    return bool(equals) and name.partition("[")[0].removesuffix("+").isidentifier()


def _program(word: str) -> str:
    """The name that a program goes by, however it is called: `/usr/bin/python3.11` is python."""
    name = word.rstrip("/").rpartition("/")[2].lower().removesuffix(".exe")
    name = name[:1] + name[1:].partition("@")[0]  # npx jest@29
    if versioned := _VERSIONED.fullmatch(name):
        name = versioned[1]
    name = _ALIASES.get(name, name)
    stem, _, suffix = name.rpartition(".")
    return _BY_SUFFIX.get(suffix, name) if stem else name


def _with_subcommands(name: str, words: list[str]) -> tuple[str, list[str]]:
    """`name` with its sub-command, and the words behind that. A word that cannot be one is left where it is."""
    if name == "docker-compose":
        name = "docker compose"
    while name in _SUBCOMMANDS:
        at = _operand(words, _SUBCOMMANDS[name])
        if at == len(words) or not _SUBCOMMAND.fullmatch(words[at]):
            break
        name, words = f"{name} {words[at].lower()}", words[at + 1 :]
    return name, words


def _operand(words: list[str], value_options: frozenset[str]) -> int:
    """Where the first word is that is neither an option nor an option's value; the number of words if there is none."""
    at = 0
    while at < len(words):
        word = words[at]
        if word == "--":
            return at + 1
        if not word.startswith(("-", "+")):
            return at
        at += 2 if word in value_options else 1
    return len(words)


def _wrapped(name: str, words: list[str]) -> list[str]:
    """The command that `name` runs; empty if it runs none. `python -m pytest` runs pytest."""
    if name in ("python", "coverage run"):
        module = _module(words)
        return module if module and _program(module[0]) in _MODULES else []
    if name not in _WRAPPERS:
        return []
    return words[_operand(words, _WRAPPERS[name]) + (name in _WITH_OPERAND) :]


def _module(words: list[str]) -> list[str]:
    """From the name of the module on that Python is to run: `-m name …`, `-um name …`, `-mname …`."""
    for at in _clusters("python", words):
        before, found, attached = words[at].partition("m")
        if found and "c" not in before:
            return [attached, *words[at + 1 :]] if attached else words[at + 1 :]
    return []


def _script(name: str, words: list[str]) -> str:
    """The commands that a shell is given as an argument, if it is."""
    if name == "eval":
        return " ".join(words)
    if name not in _SHELLS:
        return ""
    for at, word in enumerate(words[:-1]):
        if word.startswith("-") and not word.startswith("--") and word.endswith("c"):
            return words[at + 1]
    return ""


def _with_mode(name: str, words: list[str]) -> str:
    """`name` with the option that makes it another kind of work, or the module that Python is to run."""
    if name == "python" and (module := _module(words)):
        return f"python -m {module[0]}"
    if name == "grep" and "--recursive" in words:
        return "grep -r"
    letters = _MODES.get(name, "")
    clusters = _clusters(name, words) if letters else []
    return f"{name} -{letters[0]}" if any(letter in words[at] for at in clusters for letter in letters) else name


def _clusters(name: str, words: list[str]) -> list[int]:
    """Where the one-letter options are: before the first operand, but for grep, which takes them anywhere."""
    values = _VALUE_OPTIONS.get(name, frozenset())
    end = len(words) if name == "grep" else _operand(words, values)
    options = (at for at in range(end) if words[at][:1] == "-" and words[at][:2] != "--")
    return [at for at in options if words[at][:2] not in values and (not at or words[at - 1] not in values)]


def _short(key: str) -> str:
    """Printable, so that it can go into a log or a metric; cut last, since lower case can be longer."""
    printable = "".join(char for char in key.lower() if char.isprintable())
    return " ".join(printable.split())[:MAX_KEY_CHARS].rstrip()


# ---- from text to words

_PLAIN_RUN = re.compile(r"""[^\s'"\\$`()<>;&|#]++""")
_REDIRECTION = re.compile(r"&?[<>]++[&|]?[ \t]*+")


def _split(text: str, nesting: int) -> list[list[str]]:
    lexer = _Lexer(text, nesting)
    lexer.read()
    return lexer.commands


class _Lexer:
    """One pass over a text; every step moves on by a character or more, whatever comes."""

    def __init__(self, text: str, nesting: int) -> None:
        self.commands: list[list[str]] = []
        self._text = text
        self._nesting = nesting
        self._at = 0
        self._words: list[str] = []
        self._word: str | None = None  # the word being read; a quoted one may be empty
        self._dropped = False  # the word being read, or the next one, is a redirection's
        self._inner: list[list[str]] = []  # commands substituted into the one being read
        self._delimiters: list[str] = []  # of here-documents that begin on the next line
        self._awaits_delimiter = False

    def read(self) -> None:
        while self._at < len(self._text):
            if run := _PLAIN_RUN.match(self._text, self._at):
                self._add(run[0])
                self._at = run.end()
            else:
                self._special(self._text[self._at])
        self._end_command()

    def _special(self, char: str) -> None:
        if char in "<>" or (char == "&" and self._text[self._at + 1 : self._at + 2] == ">"):
            self._redirection()
        elif char == "#":
            self._hash()
        elif char in _STEPS:
            self._at += 1
            _STEPS[char](self)
        else:  # whitespace
            self._at += 1
            self._end_word()

    def _add(self, text: str) -> None:
        self._word = (self._word or "") + text

    def _end_word(self) -> None:
        if self._word is None:
            return
        if self._awaits_delimiter:
            self._delimiters.append(self._word)
        elif not self._dropped:
            self._words.append(self._word)
        self._word, self._dropped, self._awaits_delimiter = None, False, False

    def _end_command(self) -> None:
        self._end_word()
        self._dropped = self._awaits_delimiter = False
        if self._words:
            self.commands.append(self._words)
        self.commands += self._inner
        self._words, self._inner = [], []

    def _newline(self) -> None:
        self._end_command()
        for delimiter in self._delimiters:
            while self._at < len(self._text):
                if self._rest_of_line().strip() == delimiter:
                    break
        self._delimiters = []

    def _rest_of_line(self) -> str:
        start = self._at
        end = self._text.find("\n", start)
        self._at = end + 1 if end >= 0 else len(self._text)
        return self._text[start : self._at]

    def _hash(self) -> None:
        if self._word is not None:
            self._add("#")
            self._at += 1
            return
        self._rest_of_line()
        if self._text[self._at - 1] == "\n":
            self._at -= 1

    def _backslash(self) -> None:
        following = self._text[self._at : self._at + 1]
        self._at += 1
        if following != "\n":
            self._add(following)

    def _single_quote(self) -> None:
        self._add(self._until("'"))

    def _until(self, closing: str) -> str:
        """The text before `closing`, which is passed too."""
        start = self._at
        end = self._text.find(closing, start)
        end = end if end >= 0 else len(self._text)
        self._at = end + 1
        return self._text[start:end]

    def _double_quote(self) -> None:
        self._add("")
        while self._at < len(self._text):
            char = self._text[self._at]
            self._at += 1
            if char == '"':
                return
            if char in "\\$`":
                _STEPS[char](self)
            else:
                self._add(char)

    def _dollar(self) -> None:
        following = self._text[self._at : self._at + 1]
        if following == "(":
            self._at += 1
            self._substitute(self._until_parenthesis())
            self._add("$()")
        elif following == "{":
            self._add("$" + self._until("}") + "}")
        else:
            self._add("$")

    def _backtick(self) -> None:
        self._substitute(self._until("`"))
        self._add("$()")

    def _substitute(self, text: str) -> None:
        if self._nesting and not text.startswith("("):  # $((1 + 2)) has no commands
            self._inner += _split(text, self._nesting - 1)

    def _parenthesis(self) -> None:
        if self._word is not None:  # an array, a function's name, a pattern
            self._add(f"({self._until_parenthesis()})")
        elif self._text.startswith("(", self._at):  # arithmetic
            self._until_parenthesis()
        elif self._text.startswith(")", self._at) and self._words:
            self._words = []  # `name () {`
        else:
            self._end_command()

    def _until_parenthesis(self) -> str:
        """The text before the `)` that closes what was opened, which is passed too. Quotes are looked at flatly."""
        start, depth = self._at, 1
        while self._at < len(self._text) and depth:
            char = self._text[self._at]
            self._at += 1
            if char == "\\":
                self._at += 1
            elif char in "'\"":
                self._until(char)
            else:
                depth += (char == "(") - (char == ")")
        return self._text[start : self._at - (not depth)]

    def _redirection(self) -> None:
        if self._word is not None and self._word.isdecimal():  # 2>&1
            self._word = None
        self._end_word()
        match = _REDIRECTION.match(self._text, self._at)
        operator = match[0].strip() if match else ""
        self._at += len(match[0]) if match else 1
        if operator in ("<", ">") and self._text.startswith("(", self._at):  # a command in place of a file
            self._at += 1
            self._substitute(self._until_parenthesis())
            return
        if operator == "<<":
            self._awaits_delimiter = True
            self._at += self._text.startswith("-", self._at)
        self._dropped = True


_STEPS = {
    "\n": _Lexer._newline,
    "\\": _Lexer._backslash,
    "'": _Lexer._single_quote,
    '"': _Lexer._double_quote,
    "$": _Lexer._dollar,
    "`": _Lexer._backtick,
    "(": _Lexer._parenthesis,
    **dict.fromkeys(");&|", _Lexer._end_command),
}
