"""Policies for a comparison: those of the registry, and two that only a comparison can have."""

from __future__ import annotations

import re
from typing import Any

from segue.base.errors import InvalidRequest
from segue.bench.told import Told
from segue.bench.workload import Workload
from segue.policies import Adaptive, Disposition, PinView, Policy, Pressure, TurnEnd, TurnView, make_policy
from segue.policies.adaptive import scarcity
from segue.policies.continuum import JobOrder

_FIXED = re.compile(r"fixed-(\d+(?:\.\d+)?)s?")


class FixedTime(JobOrder):
    """Keeps everything for the same time, whatever runs; in continuum's order."""

    reads_calls = False

    def __init__(self, seconds: float) -> None:
        self.name = f"fixed-{seconds:g}s"
        self._seconds = seconds

    def at_turn_end(self, end: TurnEnd, pressure: Pressure, now: float) -> Disposition:
        return self._pin(end.turn, self._seconds, why="always")


class Oracle(Adaptive):
    """`adaptive`, but it knows when each job will be back: keeps what it is worth to keep until then, and nothing else."""

    name = "oracle"
    reads_calls = False

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self._gaps = {job.id: [turn.gap_seconds for turn in job.turns] for job in workload.jobs}

    def at_turn_end(self, end: TurnEnd, pressure: Pressure, now: float) -> Disposition:
        return self._decide(end, end.num_blocks, pressure, 0.0)

    def review(self, pin: PinView, pressure: Pressure, now: float) -> Disposition:
        return self._decide(pin.end, pin.num_blocks, pressure, max(now - pin.since, 0.0))

    def _decide(self, end: TurnEnd, num_blocks: int, pressure: Pressure, elapsed: float) -> Disposition:
        gap = max(self._gap(end.turn) - elapsed, 0.0)
        tokens = min(end.turn.num_computed, num_blocks * pressure.block_size)
        benefit = tokens * pressure.seconds_per_token
        cost = scarcity(pressure) * num_blocks / max(pressure.num_blocks, 1) * gap
        if cost >= benefit > 0:
            return Disposition(benefit_seconds=benefit, p_return=1.0, why="does not pay")
        value = max(benefit - num_blocks / max(pressure.num_blocks, 1) * gap, 0.0) / max(tokens, 1)
        return Disposition(gap + 0.5, max(value, 1e-9), review_seconds=max(elapsed, 0.25), p_return=1.0, why="pays")

    def _gap(self, turn: TurnView) -> float:
        gaps = self._gaps.get((turn.job_id or "").rpartition("\0")[2], [])
        return gaps[turn.num_turns - 1] if turn.num_turns <= len(gaps) else 0.0

    def to_json(self) -> dict[str, Any]:
        return {}


def make_contestant(name: str, workload: Workload) -> Policy:
    """By name; told what the workload knows of the tools that jobs use."""
    if name == Oracle.name:
        return Oracle(workload)
    if name.startswith("fixed-"):
        found = _FIXED.fullmatch(name)
        if found is None or float(found[1]) <= 0:
            raise InvalidRequest("policy", f"{name!r:.40}: write fixed-2s for two seconds")
        return FixedTime(float(found[1]))
    return Told(make_policy(name), workload)
