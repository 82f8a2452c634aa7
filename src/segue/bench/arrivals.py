"""When jobs arrive."""

from __future__ import annotations

import random

from segue.base.errors import InvalidRequest

KINDS = ("poisson", "bursty", "even")
_BURSTINESS = 4.0  # squared coefficient of variation of the time between two jobs; 1 is Poisson's


def arrival_times(kind: str, rate: float, seconds: float, seed: int) -> list[float]:
    """Of the jobs that come within so many seconds, at `rate` a second. Poisson: as many as that makes, at any time alike, so
    that a load is what it is called. Bursty: the times between them are gamma distributed, most of them short."""
    if kind not in KINDS:
        raise InvalidRequest("arrivals", f"{kind!r:.40} is none of {', '.join(KINDS)}")
    if rate <= 0 or seconds <= 0:
        raise InvalidRequest("rate", "jobs a second and the seconds they come for must be above 0")
    randomly = random.Random(f"arrivals {seed}")
    count = max(round(rate * seconds), 1)
    if kind == "poisson":
        return sorted(randomly.uniform(0.0, seconds) for _ in range(count))
    if kind == "even":
        return [number / rate for number in range(count)]
    times, at = [], 0.0
    for _ in range(count):
        at += randomly.gammavariate(1 / _BURSTINESS, _BURSTINESS / rate)
        times.append(at)
    return times
