"""Talk to a model; each turn computes only what is new."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from segue.base.errors import InvalidRequest, StateError, StepFailed
from segue.cli.options import add_engine_options, add_sampling_options, open_engine, sampling_params

if TYPE_CHECKING:
    from segue.model.engine import Engine
    from segue.model.session import Session


def add_arguments(command: argparse.ArgumentParser) -> None:
    start = command.add_mutually_exclusive_group()
    start.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    start.add_argument("--resume", type=Path, metavar="FILE", help="go on with a conversation that /save wrote")
    add_sampling_options(command, max_tokens=256, temperature=0.7)
    add_engine_options(command)


def run(arguments: argparse.Namespace) -> int:
    params = sampling_params(arguments)
    with open_engine(arguments) as engine:
        if arguments.resume:
            session = engine.load_session(arguments.resume, params=params)
        else:
            session = engine.session(arguments.system or None, params=params)
        print("Type a message, /undo or /save FILE; an empty line or Ctrl-D ends.", file=sys.stderr)
        while line := _ask():
            try:
                _obey(line, session, engine)
            except (InvalidRequest, StateError, StepFailed) as error:
                print(f"segue: {error}", file=sys.stderr)
    return 0


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return ""


def _obey(line: str, session: Session, engine: Engine) -> None:
    word, _, rest = line.partition(" ")
    if line == "/undo":
        session.undo()
        print(f"  [undone; {len(session.messages)} messages are left]", file=sys.stderr)
    elif word == "/save":
        if not rest:
            raise InvalidRequest("/save", "name a file to write to")
        print(f"  [{session.save(Path(rest.strip()).expanduser()):,} bytes saved]", file=sys.stderr)
    else:
        _answer(line, session, engine)


def _answer(text: str, session: Session, engine: Engine) -> None:
    """Print an answer as it comes; Ctrl-C stops it and keeps what there is."""
    reused_before = engine.stats().reused_tokens
    reply = session.stream(text)
    try:
        for delta in reply:
            print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        reply.close()
    reused, seconds = engine.stats().reused_tokens - reused_before, reply.result.first_token_seconds
    first_token = f"{seconds * 1e3:.0f} ms to the first token, " if seconds is not None else ""
    num_prompt = reply.result.num_prompt
    print(f"\n  [{first_token}{num_prompt - reused} of {num_prompt} prompt tokens computed]", file=sys.stderr)
