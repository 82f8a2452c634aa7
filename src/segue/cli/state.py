"""Save the state that an answer leaves, and go on from it later, in another process."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from segue.base.config import Environment
from segue.base.errors import InvalidRequest, SnapshotError
from segue.base.types import SamplingParams
from segue.cli.options import add_engine_options, add_sampling_options, open_engine, sampling_params
from segue.engine import Request, Stream
from segue.state import Snapshot, State
from segue.state.store import SUFFIX, SavedState, StateStore

if TYPE_CHECKING:
    from segue.model.engine import Engine

_MAX_TOKENS = 16
_SHOWN_IDS = 6  # at each end
_SHOWN_LETTERS = 16  # of a model's name or fingerprint
_NAME: dict[str, Any] = {
    "metavar": "NAME",
    "help": f"of a saved state; with a {os.sep} in it, or {SUFFIX} behind, it is a path",
}
_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def add_arguments(command: argparse.ArgumentParser) -> None:
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, work: Callable[[argparse.Namespace], None], summary: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = actions.add_parser(name, help=summary, description=summary)
        parser.set_defaults(work=work)
        return parser

    save = action("save", _save, "Answer a prompt, and save the state this leaves.")
    save.add_argument("name", **_NAME)
    save.add_argument("prompt", metavar="PROMPT", help="text to continue")
    save.add_argument("--chat", action="store_true", help="treat the prompt as a user's message")
    load = action("load", _load, "Go on from a saved state; an unfinished answer without a SUFFIX goes on as it began.")
    load.add_argument("name", **_NAME)
    load.add_argument("suffix", nargs="?", default="", metavar="SUFFIX", help="text that comes first (default: none)")
    for parser in (save, load):
        add_sampling_options(parser, max_tokens=_MAX_TOKENS, temperature=0.0)
        add_engine_options(parser)
    action("ls", _list, "List the saved states.")
    show = action("show", _show, "Say what is in a saved state.")
    show.add_argument("name", **_NAME)
    show.add_argument("--tokens", action="store_true", help="print all token ids, and nothing else")
    action("rm", _remove, "Remove saved states.").add_argument("names", nargs="+", **_NAME)


def run(arguments: argparse.Namespace) -> int:
    arguments.work(arguments)
    return 0


# With a model


def _save(arguments: argparse.Namespace) -> None:
    params = sampling_params(arguments)
    _path(arguments.name)  # refused before anything is computed
    with open_engine(arguments) as engine:
        message = [{"role": "user", "content": arguments.prompt}]
        prompt = engine.chat_prompt(message) if arguments.chat else arguments.prompt
        stream = engine.stream(prompt, params, hold=True)
        _print_answer(stream)
        state = stream.result.state
        assert state is not None, "it ended well, or there would have been an error"
        size = _write(engine, state, arguments.name)
    print(f"{arguments.name}: {state.num_tokens} tokens, {_size(size)}", file=sys.stderr)


def _write(engine: Engine, state: State, name: str) -> int:
    note = {"model": engine.model.name}
    if _is_path(name):
        return engine.save(state, name, note=note)
    outgoing, done = engine.begin_save(state, note=note)
    try:
        return _store().save(name, outgoing.snapshot, outgoing.read)
    finally:
        done()


def _load(arguments: argparse.Namespace) -> None:
    params = sampling_params(arguments)
    path = _path(arguments.name)
    with SavedState.open(path) as saved:  # before a model is opened in vain
        snapshot = saved.snapshot
    resumed = snapshot.progress is not None and not arguments.suffix
    if resumed:
        _refuse_options(params)
    with open_engine(arguments) as engine:
        state = _read(engine, path, snapshot)
        if resumed:
            stream = engine.follow(engine.resume(state, consume=True))
        else:
            stream = engine.stream(Request(parent=state, suffix=arguments.suffix, params=params, consume=True))
        _print_answer(stream)
    reuse, seconds = stream.result.reuse, stream.result.first_token_seconds
    counts = f"{reuse.inherited} tokens inherited, {reuse.recomputed} recomputed, {reuse.new} new"
    print(f"{counts}; {(seconds or 0.0) * 1e3:.0f} ms to the first token", file=sys.stderr)


def _read(engine: Engine, path: Path, snapshot: Snapshot) -> State:
    try:
        return engine.load(path)
    except SnapshotError as error:
        if (name := _model(snapshot)) == engine.model.name:
            raise
        raise SnapshotError(f"{error}; it was saved with model {name}") from error


def _refuse_options(params: SamplingParams) -> None:
    """An unfinished answer has its own parameters: none that is asked for here is ignored in silence."""
    usual = SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0)
    for field in fields(params):
        if getattr(params, field.name) != getattr(usual, field.name):
            raise InvalidRequest(field.name, "the saved answer is unfinished and goes on as it began; add a SUFFIX")


def _print_answer(stream: Stream) -> None:
    for delta in stream:
        print(delta.text, end="", flush=True)
    print()


# Without one


def _list(arguments: argparse.Namespace) -> None:
    table = Table("name", "model")
    for column in ("tokens", "size", "age"):
        table.add_column(column, justify="right")
    for info in _store().list():
        snapshot, size = info.snapshot, _size(info.size_bytes)
        if snapshot is None:
            table.add_row(info.name, Text("damaged", "red"), "", size, "")
        else:
            table.add_row(
                info.name, Text(_model(snapshot)[:_SHOWN_LETTERS]), f"{len(snapshot.tokens):,}", size, _age(snapshot)
            )
    Console().print(table)


def _show(arguments: argparse.Namespace) -> None:
    path = _path(arguments.name)
    with SavedState.open(path) as saved:
        snapshot, size = saved.snapshot, saved.size_bytes
    if arguments.tokens:
        print(*snapshot.tokens)
        return
    progress, layout = snapshot.progress, snapshot.layout
    done = (
        f"no: {len(snapshot.tokens) - progress.num_prompt} of {progress.params.max_tokens} tokens"
        if progress
        else "yes"
    )
    lines = {
        "file": f"{path}, {_size(size)}",
        "model": f"{_model(snapshot)}, {_printable(snapshot.model)}",
        "tokens": f"{len(snapshot.tokens):,}: {_ends(snapshot.tokens.tolist())}",
        "KV": f"of {snapshot.num_computed:,} tokens, {layout.dtype} x {layout.shape}, {snapshot.num_chunks} chunks",
        "finished": done,
        "age": _age(snapshot),
        "note": ", ".join(map(_printable, snapshot.note)) or "-",
    }
    for name, value in lines.items():
        print(f"{name:<9} {value}")


def _remove(arguments: argparse.Namespace) -> None:
    for name in arguments.names:
        if not _is_path(name):
            _store().remove(name)
        elif name.endswith(SUFFIX):
            StateStore(Path(name).parent).remove(Path(name).name.removesuffix(SUFFIX))
        else:
            raise InvalidRequest("name", f"{name} does not end in {SUFFIX}: remove it by other means, if it is to go")


def _store() -> StateStore:
    return StateStore(Environment.read().cache_dir / "states")


def _is_path(name: str) -> bool:
    return os.sep in name or name.endswith(SUFFIX)


def _path(name: str) -> Path:
    return Path(name) if _is_path(name) else _store().path(name)


def _model(snapshot: Snapshot) -> str:
    """The name it was opened by, if that was noted; else its fingerprint."""
    name = snapshot.note.get("model")
    return _printable(name if isinstance(name, str) else snapshot.model)


def _printable(text: str) -> str:
    """A file may say anything; a terminal must not be told what to do."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _ends(ids: list[int]) -> str:
    if len(ids) <= 2 * _SHOWN_IDS:
        return " ".join(map(str, ids))
    return " ".join([*map(str, ids[:_SHOWN_IDS]), "…", *map(str, ids[-_SHOWN_IDS:])])


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:,.1f} KiB"


def _age(snapshot: Snapshot) -> str:
    seconds = max(time.time() - snapshot.created_at, 0.0)
    unit, length = next((pair for pair in _UNITS if seconds >= pair[1]), _UNITS[-1])
    return f"{seconds / length:,.0f} {unit}"
