"""Continuum: keep a job's KV through a tool call for the time that pays, and let jobs that came first finish first.

The rule as published: τ* = argmax over τ of P(τ, tool) · (T · η + reload) − τ, where P is the share of the tool's calls that
took at most τ, T the queueing delay that turns without KV met of late, η = −Corr(turns served, turns left), and reload the
time to compute the context again. As released it is simpler: two seconds if the tool's mean is at most two, else nothing.
"""

from __future__ import annotations

import math
from bisect import bisect, insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from segue.policies.durations import Call
from segue.policies.policy import Disposition, JobEnded, JobEvent, Policy, Pressure, Returned, TurnEnd, TurnView

ENOUGH = 100  # calls, before a distribution is trusted
_WINDOW = 200  # of a tool's calls that are remembered
_MOST_TOOLS = 1024
_LEAST_BID = 1e-12  # takes what clients hold without a value, and no pin
RELEASED_SECONDS = 2.0


class Samples:
    """The last calls of one tool, in order of time and of length."""

    __slots__ = ("_recent", "sorted")

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._recent = deque(values, _WINDOW)
        self.sorted = sorted(self._recent)

    def __len__(self) -> int:
        return len(self.sorted)

    def add(self, seconds: float) -> None:
        if not 0 <= seconds < math.inf:
            return
        if len(self._recent) == _WINDOW:
            self.sorted.remove(self._recent[0])
        self._recent.append(seconds)
        insort(self.sorted, seconds)

    @property
    def mean(self) -> float:
        return sum(self.sorted) / len(self.sorted)

    def to_json(self) -> list[float]:
        return [round(seconds, 4) for seconds in self._recent]

    @classmethod
    def from_json(cls, data: Any) -> Samples:
        if not isinstance(data, list) or not all(isinstance(x, (int, float)) and 0 <= x < math.inf for x in data):
            raise ValueError(f"not a list of seconds: {data!r:.60}")
        return cls(float(seconds) for seconds in data)


class TurnCorrelation:
    """η: how well the turns a job has had tell how few it has left. Of finished jobs: i turns served, n − i left."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._yy = self._xy = 0.0

    def add(self, num_turns: int) -> None:
        n = min(num_turns, 10_000)
        total, squares = n * (n + 1) / 2, n * (n + 1) * (2 * n + 1) / 6
        self._n += n
        self._x += total
        self._y += n * n - total
        self._xx += squares
        self._yy += n * n * n - 2 * n * total + squares
        self._xy += n * total - squares

    @property
    def value(self) -> float:
        """1, as for jobs that are all of one length, until there is something to go by."""
        if self._n < ENOUGH:
            return 1.0
        across = self._n * self._xy - self._x * self._y
        along = (self._n * self._xx - self._x**2) * (self._n * self._yy - self._y**2)
        return max(0.0, min(1.0, -across / math.sqrt(along))) if along > 0 else 1.0


class JobOrder(Policy):
    """What both variants share: a job that waits with its KV in place goes first, then the job that came first. A turn that was
    preempted comes before all. Of those that run, the newest job yields, but for last steps. Added: one admission in sixteen is
    for whoever waits longest, since a job that never ends would otherwise always go first."""

    reads_calls = True
    fair_every = 16
    growth_bid = _LEAST_BID
    bids = True

    def order(self, turn: TurnView, now: float) -> tuple[Any, ...]:
        return (turn.num_preemptions == 0, not turn.is_pinned, turn.job_arrived_at, turn.arrived_at, turn.id)

    def victim(self, turn: TurnView, now: float) -> tuple[Any, ...]:
        return (not turn.is_last_step, turn.job_arrived_at, turn.arrived_at, turn.id)

    def bid(self, turn: TurnView, pressure: Pressure, now: float) -> float:
        return _LEAST_BID

    def _pin(self, turn: TurnView, seconds: float, **record: Any) -> Disposition:
        """If all else fails, the pinned job that came last is the first to lose."""
        return Disposition(seconds, 1.0 / (2.0 + max(turn.job_arrived_at, 0.0)), **record)


class ContinuumReleased(JobOrder):
    """Two seconds or nothing, by the mean of the tool's calls. A tool that was never seen is taken for a fast one."""

    name = "continuum-released"

    def __init__(self) -> None:
        self._tools: OrderedDict[str, Samples] = OrderedDict()

    def at_turn_end(self, end: TurnEnd, pressure: Pressure, now: float) -> Disposition:
        if end.call is None:
            return Disposition(why="no tool")
        seen = self._tools.get(end.call.key)
        if seen is not None and seen.mean > RELEASED_SECONDS:
            return Disposition(why="slow tool")
        return self._pin(end.turn, RELEASED_SECONDS, why="fast tool" if seen is not None else "new tool")

    def observe(self, event: JobEvent) -> None:
        if isinstance(event, Returned) and event.call is not None:
            _samples(self._tools, event.call.key).add(event.seconds)

    def to_json(self) -> dict[str, Any]:
        return {"tools": {key: seen.to_json() for key, seen in self._tools.items()}}

    def restore(self, data: Mapping[str, Any]) -> None:
        self._tools = _restored(data)


class Continuum(JobOrder):
    """As published, with its cold start: Exp(1) until a hundred calls were seen, then all tools' calls, then the tool's own.

    One thing is added. Under Exp(1), KV that takes less than a second to compute again is never kept; so until there is
    something to go by, the two seconds of the released code are the least.
    """

    name = "continuum"

    def __init__(self) -> None:
        self._tools: OrderedDict[str, Samples] = OrderedDict()
        self._all = Samples()
        self._eta = TurnCorrelation()

    def at_turn_end(self, end: TurnEnd, pressure: Pressure, now: float) -> Disposition:
        reload = end.turn.num_computed * pressure.seconds_per_token
        benefit = pressure.queue_seconds * self._eta.value + reload
        seconds = self.keep_seconds(end.call, benefit)
        if seconds <= 0:
            return Disposition(benefit_seconds=benefit, why="does not pay")
        return self._pin(end.turn, seconds, benefit_seconds=benefit, why="pays")

    def keep_seconds(self, call: Call | None, benefit: float) -> float:
        """τ*. P counts an observation of 0, so that a single call does not make a tool certain."""
        if len(self._all) < ENOUGH:  # Exp(1): (1 - e^-τ) · benefit − τ is largest at ln(benefit)
            return max(RELEASED_SECONDS, math.log(benefit) if benefit > 1 else 0.0)
        own = self._tools.get(call.key) if call is not None else None
        seen = own if own is not None and len(own) >= ENOUGH else self._all
        share = benefit / (len(seen) + 1)
        best, best_seconds = share, 0.0
        for rank, seconds in enumerate(
            islice(seen.sorted, bisect(seen.sorted, benefit)), 2
        ):  # a longer wait never pays
            if (utility := rank * share - seconds) > best:
                best, best_seconds = utility, seconds
        return best_seconds

    def observe(self, event: JobEvent) -> None:
        if isinstance(event, Returned):
            self._all.add(event.seconds)
            if event.call is not None:
                _samples(self._tools, event.call.key).add(event.seconds)
        elif isinstance(event, JobEnded):
            self._eta.add(event.num_turns)

    def to_json(self) -> dict[str, Any]:
        return {"tools": {key: seen.to_json() for key, seen in self._tools.items()}, "all": self._all.to_json()}

    def restore(self, data: Mapping[str, Any]) -> None:
        tools, everything = _restored(data), Samples.from_json(data.get("all"))
        self._tools, self._all = tools, everything


def _samples(tools: OrderedDict[str, Samples], key: str) -> Samples:
    found = tools.get(key)
    if found is None:
        found = tools[key] = Samples()
        if len(tools) > _MOST_TOOLS:
            tools.popitem(last=False)
    tools.move_to_end(key)
    return found


def _restored(data: Mapping[str, Any]) -> OrderedDict[str, Samples]:
    tools = data.get("tools")
    if not isinstance(tools, dict):
        raise ValueError("not a record of tools")
    return OrderedDict((str(key), Samples.from_json(seen)) for key, seen in list(tools.items())[-_MOST_TOOLS:])
