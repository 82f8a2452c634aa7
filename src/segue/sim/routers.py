"""Which engine a turn goes to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from segue.base.errors import InvalidRequest
from segue.sim.coarse import CoarseEngine

_FEW = 4  # turns that an engine may always have


class Router:
    """One after the other."""

    def __init__(self, engines: Sequence[CoarseEngine], choices: int, overload: float, seed: str) -> None:
        self._alive = list(engines)
        self._choices = choices
        self._overload = overload
        self._draw = random.Random(seed).random
        self._next = 0

    def choose(self, home: CoarseEngine | None) -> CoarseEngine | None:
        """For a job whose last turn was at `home`. None: no engine is alive."""
        if not self._alive:
            return None
        self._next = (self._next + 1) % len(self._alive)
        return self._alive[self._next]

    def remove(self, engine: CoarseEngine) -> None:
        self._alive.remove(engine)

    def add(self, engine: CoarseEngine) -> None:
        self._alive.append(engine)


class LeastLoaded(Router):
    """The one with the fewest turns of a few that are drawn: what two choices give is near to what all give, at no cost."""

    def choose(self, home: CoarseEngine | None) -> CoarseEngine | None:
        alive, draw = self._alive, self._draw
        if not alive:
            return None
        size = len(alive)
        best = alive[int(draw() * size)]
        for _ in range(self._choices - 1):
            other = alive[int(draw() * size)]
            if other.load < best.load:
                best = other
        return best


class Prefix(LeastLoaded):
    """Back to where the job was, unless there are many more turns than at another."""

    def choose(self, home: CoarseEngine | None) -> CoarseEngine | None:
        if home is not None and home.alive and home.load <= self._overload * _FEW:
            return home
        other = super().choose(None)
        if home is None or other is None or not home.alive:
            return other
        return other if home.load > self._overload * (other.load + _FEW) else home


ROUTERS: dict[str, Callable[[Sequence[CoarseEngine], int, float, str], Router]] = {
    "round-robin": Router,
    "least-loaded": LeastLoaded,
    "prefix": Prefix,
    "lease": Prefix,  # and what a job has is kept for it
}


def check_router(name: str) -> None:
    if name not in ROUTERS:
        raise InvalidRequest("router", f"{name!r:.40} is none of {', '.join(ROUTERS)}")
