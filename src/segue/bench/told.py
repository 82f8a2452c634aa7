"""Policies that are told which tool a job runs next: forced answers do not say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from segue.bench.workload import Workload
from segue.policies import Call, Disposition, JobEnded, JobEvent, PinView, Policy, Pressure, Returned, TurnEnd, TurnView
from segue.toolcalls.uses import use_of_call


class Told(Policy):
    """Another policy, which sees the call that the workload has at this place, as it would have found it in the answer."""

    reads_calls = False  # nothing is looked for in the text

    def __init__(self, policy: Policy, workload: Workload) -> None:
        self.inner = policy
        self.name = policy.name
        self.fair_every = policy.fair_every
        self.bids = policy.bids
        self.growth_bid = policy.growth_bid
        self.order, self.victim, self.bid = policy.order, policy.victim, policy.bid  # type: ignore[method-assign]
        self._turns = {job.id: [(turn.tool, turn.command) for turn in job.turns] for job in workload.jobs}
        self._calls: dict[tuple[str, str], Call] = {}
        self._last: dict[str, Call] = {}  # of each job that is away

    def at_turn_end(self, end: TurnEnd, pressure: Pressure, now: float) -> Disposition:
        call = self._call(end.turn)
        if call is not None and end.turn.job_id is not None:
            self._last[end.turn.job_id] = call
        return self.inner.at_turn_end(replace(end, call=call), pressure, now)

    def review(self, pin: PinView, pressure: Pressure, now: float) -> Disposition:
        return self.inner.review(replace(pin, end=replace(pin.end, call=self._call(pin.end.turn))), pressure, now)

    def observe(self, event: JobEvent) -> None:
        if isinstance(event, Returned):
            event = replace(event, call=self._last.pop(event.job_id, None))
        elif isinstance(event, JobEnded):
            self._last.pop(event.job_id, None)
        self.inner.observe(event)

    def to_json(self) -> dict[str, Any]:
        return self.inner.to_json()

    def restore(self, data: Mapping[str, Any]) -> None:
        self.inner.restore(data)

    def _call(self, turn: TurnView) -> Call | None:
        """A job's key ends with the id that the client gave it."""
        turns = self._turns.get((turn.job_id or "").rpartition("\0")[2], ())
        if turn.num_turns > len(turns):
            return None
        tool, command = turns[turn.num_turns - 1]
        if not tool:
            return None
        call = self._calls.get((tool, command))
        if call is None:
            use = use_of_call(tool, {"command": command})
            call = self._calls[tool, command] = Call(use.tool, use.key, None, use.command)
        return replace(call, job=turn.job_id)
