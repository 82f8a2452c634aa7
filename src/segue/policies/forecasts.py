"""How long a command will take, as three kinds of knowledge tell it: rules, what was seen of it, and what it looks like.

Each says fast, slow, or nothing. Times are log-normal throughout: what is normal is the logarithm of the seconds.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from segue.policies.durations import Call

FAST_SECONDS = 2.0  # what is over by then is fast
_SURE = 0.8  # the chance from which on a call is one or the other
_KEEP_CHANCE = 0.95  # of a fast call, that it is over while its KV is kept
_MOST_KEEP = 30.0
_SHORTEST, _LONGEST = 1e-3, 1e5  # seconds


def _keys(text: str) -> frozenset[str]:
    return frozenset(key.strip() for key in text.split(","))


SURELY_FAST = _keys(
    "ls, cat, pwd, head, tail, wc, echo, printf, cd, which, whoami, hostname, date, stat, file, basename, dirname, realpath, env,"
    "true, test, mkdir, touch, cp, mv, ln, chmod, sed, awk, cut, sort, uniq, diff, git status, git branch, git add, git show,"
    "git rev-parse, git config, git remote, git tag, read, write, edit, multiedit, glob, ls, todowrite, todoread"
)
SURELY_SLOW = _keys(
    "pytest, tox, nox, jest, vitest, make, cmake, ninja, bazel, gradle, mvn, pip install, pip download, pip wheel, npm install,"
    "npm ci, npm run build, npm test, yarn install, yarn build, pnpm install, poetry install, uv sync, uv pip install,"
    "conda install, conda create, mamba install, apt install, apt update, apt upgrade, apk add, yum install, dnf install,"
    "brew install, docker build, docker pull, docker compose up, docker compose build, git clone, git submodule, cargo build,"
    "cargo test, cargo install, go build, go test, bundle install, composer install, terraform apply, python -m unittest"
)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one call: the logarithm of its seconds is normal."""

    mean: float
    sigma: float

    def p_within(self, seconds: float) -> float:
        return 0.5 * (1.0 + math.erf((math.log(seconds) - self.mean) / (self.sigma * math.sqrt(2.0))))

    def keep_seconds(self) -> float | None:
        """As long as a fast call is to be waited for; 0 for a slow one; None if it may be either."""
        p_fast = self.p_within(FAST_SECONDS)
        if p_fast >= _SURE:
            return min(
                math.exp(min(self.mean + 1.645 * self.sigma, 50.0)), _MOST_KEEP
            )  # 1.645: _KEEP_CHANCE of a normal
        return 0.0 if p_fast <= 1.0 - _SURE else None


_LEAST_SCALE = 1e-6  # also what always took equally long may take a little longer


class Posterior:
    """Of a mean and a variance that nobody knows, after some observations: Normal-Inverse-Gamma, which stays one with each more.

    `weight` observations of the mean, `shape` half as many of the variance, whose sum of squares is twice `scale`.
    """

    __slots__ = ("mean", "scale", "shape", "weight")
    MOST = 200.0  # then what was seen is halved: what is older weighs less

    def __init__(self, mean: float = 0.0, weight: float = 1.0, shape: float = 2.0, scale: float = 2.0) -> None:
        self.mean, self.weight, self.shape, self.scale = mean, weight, shape, scale

    def add(self, value: float) -> None:
        self.scale += self.weight * (value - self.mean) ** 2 / (2.0 * (self.weight + 1.0))
        self.mean = (self.weight * self.mean + value) / (self.weight + 1.0)
        self.weight += 1.0
        self.shape += 0.5
        if self.weight > self.MOST:
            self.weight, self.shape, self.scale = self.weight / 2, self.shape / 2, max(self.scale / 2, _LEAST_SCALE)

    def draw(self, random: random.Random) -> Forecast:
        """One of the normals it might be, as likely as it is: Thompson's way to keep trying what is not settled."""
        variance = self.scale / random.gammavariate(self.shape, 1.0)
        return Forecast(random.gauss(self.mean, math.sqrt(variance / self.weight)), math.sqrt(variance))

    def to_json(self) -> list[float]:
        return [float(f"{value:.9g}") for value in (self.mean, self.weight, self.shape, self.scale)]

    @classmethod
    def from_json(cls, data: Any) -> Posterior:
        is_list = isinstance(data, list) and len(data) == 4
        if not is_list or not all(isinstance(x, (int, float)) and abs(x) < 1e9 for x in data) or min(data[1:]) <= 0:
            raise ValueError(f"not a posterior: {data!r:.60}")
        return cls(*map(float, data))


class Posteriors:
    """One for each command; it speaks once it has seen a few calls. Bounded: the longest without a call is forgotten."""

    def __init__(self, enough: int = 5, most: int = 4096, seed: int = 0) -> None:
        self._of: OrderedDict[str, Posterior] = OrderedDict()
        self._least_weight = enough + 1.0
        self._most = most
        self._random = random.Random(seed)

    def learn(self, call: Call, seconds: float) -> None:
        key = f"{call.tool} {call.key}"
        found = self._of.get(key)
        if found is None:
            found = self._of[key] = Posterior()
            if len(self._of) > self._most:
                self._of.popitem(last=False)
        self._of.move_to_end(key)
        found.add(log_seconds(seconds))

    def draw(self, call: Call) -> Forecast | None:
        found = self._of.get(f"{call.tool} {call.key}")
        return found.draw(self._random) if found is not None and found.weight >= self._least_weight else None

    def to_json(self) -> dict[str, Any]:
        return {key: posterior.to_json() for key, posterior in self._of.items()}

    def restore(self, data: Any) -> None:
        if not isinstance(data, Mapping):
            raise ValueError("not a record of commands")
        self._of = OrderedDict((str(key), Posterior.from_json(one)) for key, one in list(data.items())[-self._most :])


def log_seconds(seconds: float) -> float:
    return math.log(min(max(seconds, _SHORTEST), _LONGEST))
