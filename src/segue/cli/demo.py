"""A growing conversation, with state kept and from cold: what each turn computes, and how soon it answers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from segue.base.errors import InvalidRequest
from segue.base.types import SamplingParams
from segue.cli import handoff
from segue.cli.options import add_engine_options, open_engine

if TYPE_CHECKING:
    from segue.model.engine import Engine
    from segue.state import State

SYSTEM = (
    "You are the guide of a small maritime museum in an old harbour town. Visitors ask about ships, tides, lighthouses, "
    "trade routes and the people who worked here. You answer in one or two short sentences, in plain words, without lists. "
    "You know that the museum opens at nine and closes at six, that the lighthouse was built in 1857 and is 41 metres high, "
    "that the largest model in the collection is the four-masted barque Aurora, and that the tide in the harbour rises by "
    "about three metres. When you do not know something, you say so and suggest asking at the front desk."
)
QUESTIONS = (
    "Hello! When was the lighthouse built, and how high is it?",
    "And which model ship should my children not miss?",
    "Thank you. Until when can we stay today?",
)


@dataclass(frozen=True, slots=True)
class Turn:
    num_prompt: int
    num_prefilled: int
    first_token_seconds: float
    text: str


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "what",
        nargs="?",
        choices=("conversation", "handoff"),
        default="conversation",
        help="handoff: a request moves to another engine while it is being answered (default: conversation)",
    )
    command.add_argument("--max-tokens", type=int, default=48, metavar="N", help="per answer (default: 48)")
    command.add_argument(
        "--processes", type=int, choices=(1, 2), help="for handoff: both engines in one, or each in its own"
    )
    command.add_argument("--join", metavar="HOST:PORT", help=argparse.SUPPRESS)
    add_engine_options(command)


def run(arguments: argparse.Namespace) -> int:
    if arguments.what == "handoff":
        return handoff.run(arguments, SYSTEM, QUESTIONS[:2])
    if arguments.processes is not None:
        raise InvalidRequest("processes", "is for `segue demo handoff`")
    with open_engine(arguments) as engine:
        engine.generate(
            [1, 2, 3], SamplingParams(max_tokens=2)
        )  # the first step of a process pays for pages and threads
        kept = converse(engine, arguments.max_tokens, keep_state=True)
        cold = converse(engine, arguments.max_tokens, keep_state=False)
    _show(kept, cold)
    return 0 if [turn.text for turn in kept] == [turn.text for turn in cold] else 1


def converse(engine: Engine, max_tokens: int, *, keep_state: bool) -> list[Turn]:
    """The same three questions. Without kept state, everything computed is forgotten before each turn."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    messages = [{"role": "system", "content": SYSTEM}]
    turns: list[Turn] = []
    state: State | None = None
    engine.forget()
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        if not keep_state:
            engine.forget()
        result = engine.generate(engine.chat_prompt(messages), params, hold=keep_state)[0]
        if state is not None:
            engine.release(state)
        state = result.state
        messages.append({"role": "assistant", "content": result.text})
        seconds = result.first_token_seconds or 0.0
        turns.append(Turn(len(result.prompt_token_ids), result.num_prefilled, seconds, result.text))
    if state is not None:
        engine.release(state)
    return turns


def _show(kept: list[Turn], cold: list[Turn]) -> None:
    table = Table(title="Three turns of one conversation")
    table.add_column("turn")
    table.add_column("state")
    for name in ("prompt tokens", "prefilled", "first token"):
        table.add_column(name, justify="right")
    table.add_column("answer", overflow="fold")
    for number, (warm, fresh) in enumerate(zip(kept, cold, strict=True), 1):
        for label, turn in (("kept", warm), ("cold", fresh)):
            milliseconds = f"{turn.first_token_seconds * 1e3:,.0f} ms"
            cells = (str(turn.num_prompt), str(turn.num_prefilled), milliseconds, turn.text.strip())
            table.add_row(str(number), label, *cells, end_section=label == "cold")
    console = Console()
    console.print(table)
    saved = 1 - sum(turn.num_prefilled for turn in kept[1:]) / sum(turn.num_prefilled for turn in cold[1:])
    same = "identical" if [turn.text for turn in kept] == [turn.text for turn in cold] else "DIFFERENT"
    console.print(f"The answers are {same}; after the first turn, keeping state saved {saved:.0%} of the prefill.")
