"""What the device is like at present, as its steps tell."""

from __future__ import annotations

_FADE = 0.1  # of an average, for each new value
_SLOW_FADE = 1 / 256  # of the line's: it needs steps of many sizes
_LEAST_SPREAD = 0.25  # of the number of rows, squared: below it, a line through the steps says nothing


class Gauge:
    """What a token of a prompt takes, how long turns without their KV queue, and how much more the device could do."""

    def __init__(self) -> None:
        self.seconds_per_token = 0.0
        self.queue_seconds = 0.0
        self._decoding = _Line()

    def step(self, seconds: float, num_tokens: int, num_rows: int) -> None:
        """Steps that are mostly prompt tell what a token takes; the others, what a step and a row in it take."""
        if num_rows <= 0 or seconds <= 0:
            return
        if num_tokens >= 4 * num_rows:
            self.seconds_per_token = _faded(self.seconds_per_token, seconds / num_tokens)
        else:
            self._decoding.add(num_rows, seconds)

    def queued(self, seconds: float) -> None:
        self.queue_seconds += (seconds - self.queue_seconds) * _FADE

    def idle_share(self, num_running: int) -> float:
        """What more turns in memory could use of the device. A step of n rows takes a + b·n: all of it as long as a is more than
        b·n, and else a / (b·n)."""
        constant, slope = self._decoding.fitted()
        rows = slope * num_running
        return min(constant / rows, 1.0) if rows > 0 else 1.0


class _Line:
    """Least squares, over the last few hundred points."""

    def __init__(self) -> None:
        self._count = 0
        self._x = self._y = self._xx = self._xy = 0.0  # means

    def add(self, x: float, y: float) -> None:
        self._count += 1
        fade = max(_SLOW_FADE, 1 / self._count)
        self._x += (x - self._x) * fade
        self._y += (y - self._y) * fade
        self._xx += (x * x - self._xx) * fade
        self._xy += (x * y - self._xy) * fade

    def fitted(self) -> tuple[float, float]:
        """The value at 0 and the slope, neither below 0; no slope as long as too little is known."""
        spread = self._xx - self._x * self._x
        slope = max((self._xy - self._x * self._y) / spread, 0.0) if spread >= _LEAST_SPREAD else 0.0
        return max(self._y - slope * self._x, 0.0), slope


def _faded(average: float, value: float) -> float:
    return value if average == 0.0 else average + (value - average) * _FADE
