"""How well each rule chooses how long to keep KV, judged on recorded tool calls.

A call of d seconds, kept for τ with benefit B, is worth B·1[d ≤ τ] − min(d, τ); an oracle gets max(0, B − d). Runs are dealt
into folds: a rule learns from the other folds, then from each call of its own fold after it was judged on it.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from segue.base.errors import InvalidRequest
from segue.policies.context_serve import ContextServe
from segue.policies.continuum import RELEASED_SECONDS, Continuum, ContinuumReleased
from segue.policies.durations import Call, Durations
from segue.policies.policy import Policy, Pressure, Returned, TurnEnd, TurnView
from segue.toolcalls.shell import MAX_COMMAND_CHARS
from segue.toolcalls.uses import use_of_call

BENEFITS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
_FOLDS = 5
_RUN, _TOOL, _SECONDS, _COMMAND = (
    ("run", "job", "session"),
    ("tool", "name"),
    ("dur", "seconds", "duration"),
    ("cmd", "command"),
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A tool call that was seen: of which run, what, and how long it took."""

    run: str
    call: Call
    seconds: float


class Rule(Protocol):
    def keep(self, call: Call, benefit: float) -> float: ...

    def learn(self, call: Call, seconds: float) -> None: ...


class FixedRule:
    """The same for all: two seconds, or the benefit itself."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds

    def keep(self, call: Call, benefit: float) -> float:
        return benefit if self._seconds is None else self._seconds

    def learn(self, call: Call, seconds: float) -> None:
        """It never does."""


class PolicyRule:
    """What a policy says when KV is worth so much: `keep` asks it, and it hears of every call."""

    def __init__(self, policy: Policy, keep: Callable[[Call, float], float]) -> None:
        self._policy = policy
        self.keep = keep

    def learn(self, call: Call, seconds: float) -> None:
        self._policy.observe(Returned("", call, seconds))


def _continuum() -> Rule:
    policy = Continuum()
    return PolicyRule(policy, policy.keep_seconds)


def _released() -> Rule:
    policy = ContinuumReleased()
    turn = TurnView(1, "", 0.0, 1, 1, 1, 0)
    return PolicyRule(policy, lambda call, _: policy.at_turn_end(TurnEnd(turn, 1, call), Pressure(), 0.0).keep_seconds)


def _context_serve() -> Rule:
    policy = ContextServe()

    def keep(call: Call, benefit: float) -> float:
        seconds, _ = policy.told(call)
        return policy.keep_seconds(call, benefit) if seconds is None else seconds

    return PolicyRule(policy, keep)


class AdaptiveRule:
    def __init__(self) -> None:
        self._durations = Durations()

    def keep(self, call: Call, benefit: float) -> float:
        return self._durations.of(call).best_keep(benefit).seconds

    def learn(self, call: Call, seconds: float) -> None:
        self._durations.learn(call, seconds)


RULES: dict[str, Callable[[], Rule]] = {
    "fixed 2 s": lambda: FixedRule(RELEASED_SECONDS),
    "tau = B": lambda: FixedRule(None),
    "continuum-released": _released,
    "continuum": _continuum,
    "context_serve": _context_serve,
    "adaptive": AdaptiveRule,
}


def utility(seconds: float, kept: float, benefit: float) -> float:
    return (benefit if seconds <= kept else 0.0) - min(seconds, kept)


def judge(records: Sequence[Recorded], benefits: Sequence[float] = BENEFITS, seed: int = 0) -> dict[str, list[float]]:
    """Each rule's share of the oracle's utility, by benefit."""
    runs = sorted({record.run for record in records})
    random.Random(seed).shuffle(runs)
    fold = {run: number % _FOLDS for number, run in enumerate(runs)}
    best = [sum(max(0.0, benefit - record.seconds) for record in records) for benefit in benefits]
    shares = {}
    for name, make in RULES.items():
        gained = [0.0] * len(benefits)
        for held_out in range(min(_FOLDS, len(runs))):
            rule = make()
            for record in records:
                if fold[record.run] != held_out:
                    rule.learn(record.call, record.seconds)
            for record in records:
                if fold[record.run] == held_out:
                    for at, benefit in enumerate(benefits):
                        gained[at] += utility(record.seconds, rule.keep(record.call, benefit), benefit)
                    rule.learn(record.call, record.seconds)
        shares[name] = [mine / most if most else 0.0 for mine, most in zip(gained, best, strict=True)]
    return shares


# Traces


def read_trace(path: Path) -> list[Recorded]:
    """Of a CSV, or of JSON lines with programs' turns or sessions' requests; either may be gzipped. Calls without a time are
    left out."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidRequest("trace", f"{path} cannot be read: {error}") from error
    first = text.lstrip()[:1]
    try:
        found = list(_json_calls(text) if first in ("{", "[") else _csv_calls(text))
    except (ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
        raise InvalidRequest("trace", f"{path}: {error}") from error
    if not found:
        raise InvalidRequest("trace", f"{path} has no tool calls with a time")
    return found


def _recorded(run: str, tool: str, command: str, seconds: Any) -> Recorded:
    use = use_of_call(tool, {"command": command})
    return Recorded(run, Call(use.tool, use.key, run, use.command[:MAX_COMMAND_CHARS]), max(float(seconds), 0.0))


def _csv_calls(text: str) -> Iterator[Recorded]:
    """Columns: run (or job, session), tool (or name), dur (or seconds, duration), and, if there is one, cmd (or command)."""
    rows = csv.DictReader(io.StringIO(text))
    names = rows.fieldnames or []
    columns = [next((name for name in wanted if name in names), None) for wanted in (_RUN, _TOOL, _SECONDS, _COMMAND)]
    run, tool, seconds, command = columns
    if run is None or tool is None or seconds is None:
        raise ValueError(f"its columns are {', '.join(names)[:200]}; needed are run, tool and dur, and cmd helps")
    for row in rows:
        if row[seconds]:
            yield _recorded(row[run], row[tool], row[command] or "" if command is not None else "", row[seconds])


def _json_calls(text: str) -> Iterator[Recorded]:
    for number, line in enumerate(text.splitlines()):
        if line.strip():
            entry = json.loads(line)
            yield from _program(entry) if "turns" in entry else _session(entry, str(number))


def _program(entry: dict[str, Any]) -> Iterator[Recorded]:
    """A program's turns, each with its tools and their times."""
    for turn in entry["turns"]:
        for tool in turn.get("tools", ()):
            if tool.get("dur") is not None:
                yield _recorded(str(entry.get("run", "")), tool["name"], tool.get("cmd") or "", tool["dur"])


def _session(entry: dict[str, Any], number: str) -> Iterator[Recorded]:
    """A session's requests: the time between one that ended with a tool call and the next."""
    if "requests" not in entry:
        raise ValueError("it has neither turns with tools nor requests with times between them")
    yield from _gaps(entry["requests"], str(entry.get("id", number)))


def _gaps(requests: Iterable[dict[str, Any]], run: str) -> Iterator[Recorded]:
    calls = False
    for request in requests:
        if "requests" in request:  # a helper's own
            yield from _gaps(request["requests"], run)
        elif calls and request.get("think_time") is not None:
            yield _recorded(run, "tool", "", request["think_time"])
        calls = request.get("stop") == "tool_use"
