"""The `segue` command."""

from __future__ import annotations

import argparse
import sys

from segue import __version__
from segue.base.errors import SegueError
from segue.cli import (
    bench,
    budget,
    catalogue,
    chat,
    decisions,
    demo,
    generate,
    leaderboard,
    models,
    plot,
    policies,
    remote,
    serve,
    sim,
    state,
    tiers,
    verify_pins,
    vllm,
)

COMMANDS = {
    "serve": serve,
    "generate": generate,
    "chat": chat,
    "state": state,
    "remote": remote,
    "verify-pins": verify_pins,
    "decisions": decisions,
    "tiers": tiers,
    "policies": policies,
    "catalogue": catalogue,
    "bench": bench,
    "plot": plot,
    "leaderboard": leaderboard,
    "budget": budget,
    "sim": sim,
    "models": models,
    "demo": demo,
    "vllm": vllm,
}


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 something failed, 2 wrong use, 130 interrupted."""
    words = sys.argv[1:] if argv is None else argv
    arguments = parser().parse_args(words)
    arguments.words = words[1:]  # of the command: they tell what was given from what is the default
    try:
        status: int = arguments.run(arguments)
    except SegueError as error:
        print(f"segue: {error}", file=sys.stderr)
        return 2 if error.status < 500 else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    return status


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="segue", description="LLM serving in which a request's state is a thing you can hold."
    )
    root.add_argument("--version", action="version", version=f"segue {__version__}")
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").strip().splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return root
