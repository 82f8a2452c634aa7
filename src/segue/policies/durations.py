"""How long tools take: what was seen of this job, this command, this tool and all of them, each level shrunk to the next.

    this job's `pytest`  ->  everybody's `pytest`  ->  the tool's  ->  all tools'  ->  a guess before anything was seen

A level that has seen n calls counts n times, the levels behind it `PRIOR` times together. All of it is kept as histograms
over a fixed grid of times, so memory is bounded, a distribution costs microseconds, and old habits fade.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

PRIOR = 4.0
PER_OCTAVE = 3
SHORTEST, LONGEST = 0.01, 4096.0  # seconds; what is shorter or longer counts as this
_STEPS = round(math.log2(LONGEST / SHORTEST) * PER_OCTAVE)
EDGES = (0.0, *(SHORTEST * 2 ** (i / PER_OCTAVE) for i in range(_STEPS + 1)))  # no time at all has a bin of its own
MOST_SEEN = 400.0  # then counts are halved: what is older weighs less
_FEW = 1e-6


class Keep(NamedTuple):
    """How long keeping pays, and what is expected of it."""

    seconds: float
    p_return: float  # that the call ends within them
    utility: float  # in seconds


_NOTHING = Keep(0.0, 0.0, 0.0)


class Histogram:
    """Counts of calls, and their seconds, by bin of the grid: bin i holds what is over EDGES[i - 1] and at most EDGES[i]."""

    __slots__ = ("counts", "seconds", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self.counts: dict[int, float] = {}
        self.seconds: dict[int, float] = {}

    def add(self, seconds: float) -> None:
        at = bin_of(seconds)
        self.total += 1.0
        self.counts[at] = self.counts.get(at, 0.0) + 1.0
        self.seconds[at] = self.seconds.get(at, 0.0) + min(max(seconds, 0.0), LONGEST)
        if self.total > MOST_SEEN:
            self._fade()

    def _fade(self) -> None:
        self.counts = {at: count / 2 for at, count in self.counts.items() if count > 0.1}
        self.seconds = {at: self.seconds[at] / 2 for at in self.counts}
        self.total = sum(self.counts.values())

    def to_json(self) -> list[list[float]]:
        return [[at, round(count, 4), round(self.seconds[at], 6)] for at, count in sorted(self.counts.items())]

    @classmethod
    def from_json(cls, data: Any) -> Histogram:
        """Raises ValueError on anything that `to_json` would not have written."""
        made = cls()
        for entry in _checked(data, list):
            at, count, seconds = _checked(entry, list, 3)
            if not (isinstance(at, int) and 0 <= at < len(EDGES) and _is_count(count) and _is_count(seconds)):
                raise ValueError(f"not a bin of a histogram: {entry!r:.60}")
            made.counts[at], made.seconds[at] = float(count), float(seconds)
        made.total = sum(made.counts.values())
        return made


def bin_of(seconds: float) -> int:
    return min(bisect_left(EDGES, seconds), len(EDGES) - 1) if seconds > 0 else 0


class Rest(NamedTuple):
    """A distribution beyond `elapsed` seconds: by each edge from the `first` on, the chance that the call has `ended`, and the
    seconds that KV was `kept` until it did, or until then. Both are parts of what is `left` of the whole."""

    elapsed: float
    first: int
    left: float
    ended: list[float]
    kept: list[float]

    def best_keep(self, benefit: float, cost: float) -> Keep:
        """The time to go on keeping that gains most: `benefit` seconds if the call ends within it, less `cost` for each second
        until then."""
        if self.left <= _FEW:
            return _NOTHING
        utilities = [benefit * chance - cost * seconds for chance, seconds in zip(self.ended, self.kept, strict=True)]
        best = max(utilities)
        at = utilities.index(best)
        utility = best + cost * self.left * self.elapsed
        seconds = EDGES[self.first + at] - self.elapsed
        if utility <= 0 or seconds <= 0:
            return _NOTHING
        return Keep(seconds, self.ended[at] / self.left, utility / self.left)

    def quantile(self, share: float) -> float:
        """Seconds from now by which the call has ended with this chance."""
        at = bisect_left(self.ended, share * self.left)
        return max(EDGES[min(self.first + at, len(EDGES) - 1)] - self.elapsed, 0.0)


class Distribution:
    """Of the time until a call ends: the chance and the mean seconds of each bin."""

    __slots__ = ("chances", "means")

    def __init__(self, chances: list[float], means: list[float]) -> None:
        self.chances, self.means = chances, means  # means are already weighed by their chance

    def best_keep(self, benefit: float, cost: float = 1.0, elapsed: float = 0.0) -> Keep:
        return self.after(elapsed).best_keep(benefit, cost)

    def after(self, elapsed: float) -> Rest:
        """What is left of it for a call that has lasted `elapsed` seconds, whose hazard decides."""
        first = bisect_left(EDGES, elapsed) if elapsed > 0 else 0
        ended = list(accumulate(self.chances[first:]))
        left = ended[-1] if ended else 0.0
        # By each edge: what has ended took `seconds`, the rest was kept until the edge; both counted from the start.
        kept = [
            seconds + (left - chance) * edge
            for chance, seconds, edge in zip(ended, accumulate(self.means[first:]), EDGES[first:], strict=True)
        ]
        return Rest(elapsed, first, left, ended, kept)

    def p_within(self, seconds: float, elapsed: float = 0.0) -> float:
        """That a call that has lasted `elapsed` ends in the next `seconds`."""
        first = bisect_left(EDGES, elapsed) if elapsed > 0 else 0
        left = sum(self.chances[first:])
        return sum(self.chances[first : bin_of(elapsed + seconds) + 1]) / left if left > _FEW else 0.0

    def quantile(self, share: float) -> float:
        total = 0.0
        for at, chance in enumerate(self.chances):
            total += chance
            if total >= share:
                return EDGES[at]
        return LONGEST


def _cold(median: float = 1.0, sigma: float = 2.0) -> Distribution:
    """Before anything was seen: log-normal, half of the calls under a second, one in six over seven."""
    below = [0.0, *(0.5 * (1 + math.erf(math.log(edge / median) / (sigma * math.sqrt(2)))) for edge in EDGES[1:])]
    below[-1] = 1.0
    chances = [below[0], *(after - before for before, after in pairwise(below))]
    middle = 2 ** (-0.5 / PER_OCTAVE)
    return Distribution(chances, [chance * edge * middle for chance, edge in zip(chances, EDGES, strict=True)])


COLD = _cold()


@dataclass(frozen=True, slots=True)
class Call:
    """What is known of a tool call when it starts."""

    tool: str
    key: str  # the command, or the tool again
    job: str | None = None
    command: str = ""  # as the model wrote it: its beginning


class Durations:
    """Bounded: the keys and jobs that were longest without a call are forgotten."""

    def __init__(self, most_keys: int = 4096, most_jobs: int = 8192) -> None:
        self.everything = Histogram()
        self.tools: OrderedDict[str, Histogram] = OrderedDict()
        self.keys: OrderedDict[tuple[str, str], Histogram] = OrderedDict()
        self._jobs: OrderedDict[tuple[str, str, str], Histogram] = OrderedDict()
        self._most_keys, self._most_jobs = most_keys, most_jobs

    def learn(self, call: Call, seconds: float) -> None:
        if not math.isfinite(seconds):
            return
        self.everything.add(seconds)
        _entry(self.tools, call.tool, self._most_keys).add(seconds)
        _entry(self.keys, (call.tool, call.key), self._most_keys).add(seconds)
        if call.job is not None:
            _entry(self._jobs, (call.job, call.tool, call.key), self._most_jobs).add(seconds)

    def of(self, call: Call | None) -> Distribution:
        """Of a call, or, with None, of one that nothing is known about."""
        levels, weight = [], 1.0
        for level in self._levels(call):
            levels.append((weight / (level.total + PRIOR), level))
            weight *= PRIOR / (level.total + PRIOR)
        if weight > _FEW:
            chances, means = [weight * cold for cold in COLD.chances], [weight * cold for cold in COLD.means]
        else:
            chances, means = [0.0] * len(EDGES), [0.0] * len(EDGES)
        for share, level in levels:
            seconds = level.seconds
            for at, count in level.counts.items():
                chances[at] += share * count
                means[at] += share * seconds[at]
        return Distribution(chances, means)

    def _levels(self, call: Call | None) -> Iterable[Histogram]:
        if call is not None:
            found = (
                self._jobs.get((call.job, call.tool, call.key)) if call.job is not None else None,
                self.keys.get((call.tool, call.key)),
                self.tools.get(call.tool),
            )
            yield from (level for level in found if level is not None)
        yield self.everything

    def num_seen(self, call: Call) -> float:
        """Of this command, by anybody; fades as old calls do."""
        level = self.keys.get((call.tool, call.key))
        return level.total if level is not None else 0.0

    # To survive a restart. Jobs do not.

    def to_json(self) -> dict[str, Any]:
        return {
            "everything": self.everything.to_json(),
            "tools": [[tool, level.to_json()] for tool, level in self.tools.items()],
            "keys": [[*key, level.to_json()] for key, level in self.keys.items()],
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Raises ValueError, and changes nothing, if this is not what `to_json` wrote."""
        try:
            everything = Histogram.from_json(data["everything"])
            tools = [(_text(tool), Histogram.from_json(level)) for tool, level in _checked(data["tools"], list)]
            keys = [
                ((_text(tool), _text(key)), Histogram.from_json(level))
                for tool, key, level in _checked(data["keys"], list)
            ]
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a record of durations: {error}") from error
        self.everything = everything
        self.tools = OrderedDict(tools[-self._most_keys :])
        self.keys = OrderedDict(keys[-self._most_keys :])


def _entry(levels: OrderedDict[Any, Histogram], key: Any, most: int) -> Histogram:
    found = levels.get(key)
    if found is None:
        found = levels[key] = Histogram()
        if len(levels) > most:
            levels.popitem(last=False)
    else:
        levels.move_to_end(key)
    return found


def _checked(value: Any, kind: type, length: int | None = None) -> Any:
    if not isinstance(value, kind) or (length is not None and len(value) != length):  # type: ignore[arg-type]
        raise ValueError(f"not what was written: {value!r:.60}")
    return value


def _text(value: Any) -> str:
    return str(_checked(value, str))


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e12
