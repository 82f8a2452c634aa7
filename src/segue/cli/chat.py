"""Talk to a model; each turn computes only what is new."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from segue.base.errors import InvalidRequest
from segue.cli.options import add_engine_options, add_sampling_options, open_engine, sampling_params
from segue.engine import Stream

if TYPE_CHECKING:
    from segue.model.engine import Engine


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    add_sampling_options(command, max_tokens=256, temperature=0.7)
    add_engine_options(command)


def run(arguments: argparse.Namespace) -> int:
    params = sampling_params(arguments)
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    with open_engine(arguments) as engine:
        print("Type a message; an empty line or Ctrl-D ends.", file=sys.stderr)
        while text := _ask():
            messages.append({"role": "user", "content": text})
            try:
                prompt = engine.chat_prompt(messages)
                stream = engine.stream(prompt, params)
            except InvalidRequest as error:
                messages.pop()
                print(f"segue: {error}", file=sys.stderr)
                continue
            messages.append({"role": "assistant", "content": _answer(stream, len(prompt), engine)})
    return 0


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return ""


def _answer(stream: Stream, num_prompt: int, engine: Engine) -> str:
    """Print an answer as it comes; Ctrl-C stops it and keeps what there is."""
    reused_before, started = engine.stats().reused_tokens, time.perf_counter()
    first_token: float | None = None
    text = ""
    try:
        for delta in stream:
            first_token = first_token or time.perf_counter() - started
            text += delta.text
            print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        stream.close()
    reused = engine.stats().reused_tokens - reused_before
    seconds = f"{first_token * 1e3:.0f} ms to the first token, " if first_token else ""
    print(f"\n  [{seconds}{num_prompt - reused} of {num_prompt} prompt tokens computed]", file=sys.stderr)
    return text
