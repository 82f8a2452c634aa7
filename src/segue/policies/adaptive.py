"""Segue's own: one price, in seconds of job time, for keeping KV, for losing it, and for waiting.

**Keep.** While a tool runs, its job's KV is worth the time to compute it again, if the job comes back. Keeping it costs that
part of the device which lies idle with the memory: its share of the pool, as far as turns wait for memory, for E[min(gap, τ)]
and, if the job comes back, for as long as such turns wait before they run. The distribution of the gap is learned
(`durations.py`); τ is where the difference is largest. It is looked at again while the gap lasts, with the distribution of
what is left of it.

**Give way.** A pin is not a wall but a price: its value per token is what keeping it would still gain if all memory were
wanted. Turns that run and grow take pins, the cheapest first, before they preempt each other, unless the pin's job is back. Who
waits takes none while others run: the device is busy, so another turn would move the queue and not shorten it, and the pin's job
would have to compute again. When nothing runs, the first in the queue takes what it needs.

**Fetch.** With a slow tier, what the device has lost by then comes to the host's memory shortly before a tenth of such calls
have ended.

**Order.** Turns whose KV is in place, or that were preempted, go first, and of these and of the others those of the jobs that
have come furthest: they finish and give their memory back. A new job goes before one that came later. Every sixteenth
admission is for the turn that waits longest, whatever it is, so nobody waits for more than sixteen times as many admissions
as under first come, first served.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from segue.policies.durations import LONGEST, Call, Durations, Keep, Rest
from segue.policies.policy import Disposition, JobEvent, PinView, Policy, Pressure, Returned, Started, TurnEnd, TurnView

_LEAST_COST = 0.02  # of a second of keeping, when memory is plentiful: what is never asked for again ends some day
_LEAST_VALUE = 1e-9
_LEAST_BID = 1e-12
_EARLY = 0.1  # of the calls, that end before KV is back from a slow tier
_FADE = 0.05  # of the average wait, for each turn that had its KV
_FORGET = 0.02  # for each that had lost it: if nothing is kept, nobody can tell how long it would wait
_FIRST_REVIEW = 0.25  # seconds; each later one is twice as far from the start


class Adaptive(Policy):
    name = "adaptive"
    reads_calls = True
    bids = True

    fair_every = 16
    growth_bid = sys.float_info.max  # any pin, unless the job it was kept for is back

    def __init__(self, durations: Durations | None = None) -> None:
        self.durations = durations if durations is not None else Durations()
        self._kept_wait = 0.0  # seconds that turns with their KV in place waited of late

    # Who runs

    def order(self, turn: TurnView, now: float) -> tuple[Any, ...]:
        begun = turn.is_pinned or turn.num_preemptions > 0
        return (turn.priority, not begun, -turn.num_turns, turn.job_arrived_at, turn.arrived_at, turn.id)

    def victim(self, turn: TurnView, now: float) -> tuple[Any, ...]:
        return (turn.priority, not turn.is_last_step, -turn.num_turns, turn.job_arrived_at, turn.arrived_at, turn.id)

    def bid(self, turn: TurnView, pressure: Pressure, now: float) -> float:
        """Less than any pin is worth: only what clients hold without a value gives way."""
        return _LEAST_BID

    # What is kept

    def at_turn_end(self, end: TurnEnd, pressure: Pressure, now: float) -> Disposition:
        return self._disposition(end, end.num_blocks, pressure, 0.0)

    def review(self, pin: PinView, pressure: Pressure, now: float) -> Disposition:
        return self._disposition(pin.end, pin.num_blocks, pressure, max(now - pin.since, 0.0))

    def _disposition(self, end: TurnEnd, num_blocks: int, pressure: Pressure, elapsed: float) -> Disposition:
        tokens = min(end.turn.num_computed, num_blocks * pressure.block_size)
        benefit = tokens * pressure.seconds_per_token
        share = num_blocks / max(pressure.num_blocks, 1)
        gap = self.durations.of(_known(end.call, end.turn.job_id)).after(elapsed)
        price = scarcity(pressure) * share
        cost = max(price, _LEAST_COST * benefit / LONGEST)
        keep = gap.best_keep(max(benefit - price * self._kept_wait, 0.0), cost)
        prefetch = _prefetch_seconds(gap, keep, end.turn.num_computed, pressure)
        if keep.seconds <= 0 or num_blocks <= 0:
            return Disposition(
                prefetch_seconds=prefetch, benefit_seconds=benefit, p_return=keep.p_return, why="does not pay"
            )
        wanted = gap.best_keep(benefit, share)  # if others want the memory
        return Disposition(
            keep_seconds=keep.seconds,
            value=max(wanted.utility / max(tokens, 1), _LEAST_VALUE),
            review_seconds=max(elapsed, _FIRST_REVIEW),
            prefetch_seconds=prefetch,
            p_return=keep.p_return,
            benefit_seconds=benefit,
            why="pays",
        )

    # How it learns

    def observe(self, event: JobEvent) -> None:
        if isinstance(event, Returned):
            self.durations.learn(_known(event.call, event.job_id), event.seconds)
        elif isinstance(event, Started) and event.turn.num_turns > 1:
            if event.num_lost < event.num_reused:
                self._kept_wait += (event.waited_seconds - self._kept_wait) * _FADE
            else:
                self._kept_wait *= 1 - _FORGET

    def to_json(self) -> dict[str, Any]:
        return self.durations.to_json()

    def restore(self, data: Mapping[str, Any]) -> None:
        self.durations.restore(data)


def _prefetch_seconds(gap: Rest, keep: Keep, num_tokens: int, pressure: Pressure) -> float | None:
    """So that all has come when the first few calls of this kind end, and not while it is kept anyhow."""
    if pressure.slow_seconds_per_token is None:
        return None
    return max(gap.quantile(_EARLY) - num_tokens * pressure.slow_seconds_per_token, keep.seconds, 0.0)


def _known(call: Call | None, job_id: str | None) -> Call:
    """A job whose tools are not to be seen in its answers has habits all the same."""
    return call if call is not None else Call("", "", job_id)


def scarcity(pressure: Pressure) -> float:
    """How much of the device lies idle with idle memory: what those that run leave of it if turns wait for memory, none while
    there is plenty."""
    used = 1.0 - pressure.num_free / pressure.num_blocks if pressure.num_blocks else 0.0
    short = min(max((used - 0.5) * 2.5, 0.0), 1.0) if pressure.num_waiting else max(0.0, used - 0.8) * 2.5
    return short * pressure.idle_share
