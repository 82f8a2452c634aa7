"""context_serve: Continuum with a look at the command first. Surely fast: pinned until it is over; surely slow: let go at once.

    rules  ->  what was seen of the command (Bayesian)  ->  what it looks like (trees)  ->  uncertain: Continuum's own rule

Each asks the next if it cannot tell. Without a trained model the trees are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from segue.policies.continuum import Continuum
from segue.policies.durations import Call
from segue.policies.forecasts import SURELY_FAST, SURELY_SLOW, Posteriors
from segue.policies.policy import Disposition, JobEvent, Pressure, Returned, TurnEnd
from segue.policies.trees import Trees

RULE_SECONDS = 3.0  # that a surely fast command is waited for


class ContextServe(Continuum):
    name = "context_serve"

    def __init__(self, trees: Trees | None = None) -> None:
        super().__init__()
        self._posteriors = Posteriors()
        self._trees = trees

    def use_model(self, path: Path) -> None:
        self._trees = Trees.load(path)

    def at_turn_end(self, end: TurnEnd, pressure: Pressure, now: float) -> Disposition:
        seconds, why = self.told(end.call)
        if seconds is None:
            return super().at_turn_end(end, pressure, now)
        benefit = end.turn.num_computed * pressure.seconds_per_token
        if not seconds:
            return Disposition(benefit_seconds=benefit, why=f"slow: {why}")
        return self._pin(end.turn, seconds, benefit_seconds=benefit, why=f"fast: {why}")

    def told(self, call: Call | None) -> tuple[float | None, str]:
        """How long to keep the KV, and who says so; None if nobody can tell."""
        if call is None:
            return None, ""
        if call.key in SURELY_FAST:
            return RULE_SECONDS, "rule"
        if call.key in SURELY_SLOW:
            return 0.0, "rule"
        seen = self._posteriors.draw(call)
        if seen is not None and (seconds := seen.keep_seconds()) is not None:
            return seconds, "seen"
        if self._trees is not None and (seconds := self._trees.forecast(call).keep_seconds()) is not None:
            return seconds, "trees"
        return None, ""

    def observe(self, event: JobEvent) -> None:
        super().observe(event)
        if isinstance(event, Returned) and event.call is not None:
            self._posteriors.learn(event.call, event.seconds)

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "commands": self._posteriors.to_json()}

    def restore(self, data: Mapping[str, Any]) -> None:
        posteriors = Posteriors()
        posteriors.restore(data.get("commands"))
        super().restore(data)
        self._posteriors = posteriors
