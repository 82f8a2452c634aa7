"""What the scheduler asks of a policy, and all that a policy gets to see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from segue.base.errors import InvalidRequest
from segue.policies.durations import Call


@dataclass(frozen=True, slots=True)
class TurnView:
    """One sequence of one request, as far as a policy may care. A turn without a job is a job of its own."""

    id: int
    job_id: str | None  # no two jobs share it, of whatever tenants
    arrived_at: float
    num_prompt: int
    num_tokens: int
    num_computed: int
    num_preemptions: int
    priority: int = 0
    is_last_step: bool = False
    job_arrived_at: float = 0.0
    num_turns: int = 1  # that the job has begun, this one included
    is_pinned: bool = False  # the job's KV was kept for this turn
    blocked_seconds: float = 0.0  # that it is the first in the queue and does not fit


@dataclass(frozen=True, slots=True)
class Pressure:
    """What memory and time are like at present."""

    num_blocks: int = 0
    num_free: int = 0
    num_leased: int = 0
    num_waiting: int = 0
    num_running: int = 0
    block_size: int = 16
    seconds_per_token: float = 0.0  # to compute one token of a prompt
    queue_seconds: float = 0.0  # that turns which had lost their KV waited of late, on average
    slow_seconds_per_token: float | None = None  # to bring one from a slow tier to the host; None: there is none
    idle_share: float = 1.0  # of the device, that more turns could use beside those that run


@dataclass(frozen=True, slots=True)
class Disposition:
    """What becomes of a turn's KV: kept for so long, or, with 0 seconds, left to the prefix cache, and from there to other tiers
    when its memory is wanted. `value` is per block: work that bids less does not take it. The policy is asked again after
    `review_seconds`. After `prefetch_seconds`, what only a slow tier has by then comes to the host's memory, unless the job is
    back. The rest is for the record."""

    keep_seconds: float = 0.0
    value: float = 0.0
    review_seconds: float | None = None
    prefetch_seconds: float | None = None
    p_return: float | None = None
    benefit_seconds: float = 0.0
    why: str = ""


DROP = Disposition()


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """A turn that has ended well, with KV for `num_blocks` blocks. `call` is what the job is about to do, if that was found."""

    turn: TurnView
    num_blocks: int
    call: Call | None


@dataclass(frozen=True, slots=True)
class PinView:
    """KV that was kept at `since`, and for whom."""

    end: TurnEnd
    since: float
    num_blocks: int  # what is left of it


# Events


@dataclass(frozen=True, slots=True)
class Returned:
    """A job came back with its next turn, `seconds` after the last one had ended with this call."""

    job_id: str
    call: Call | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Started:
    """A turn was admitted after it had waited; `num_lost` of its tokens had KV when the job's last turn ended."""

    turn: TurnView
    waited_seconds: float
    num_reused: int
    num_lost: int


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job said so. `num_turns` it had in all."""

    job_id: str
    num_turns: int


JobEvent = Returned | Started | JobEnded


class Policy:
    """First come, first served, and nothing is kept. Others change what they want to.

    `order`, `victim` and `bid` are asked in the middle of a plan: they compute, and mutate nothing.
    """

    name = "fcfs"
    reads_calls = False  # whether `at_turn_end` wants to know which tool a job is about to run
    fair_every: int | None = None  # of so many admissions one is for the turn that waits longest
    bids = False  # whether `bid` is asked: else kept KV gives way to any work
    growth_bid = (
        inf  # what a turn that runs and grows bids before it preempts; a pin whose job is back costs more than any
    )

    def order(self, turn: TurnView, now: float) -> tuple[Any, ...]:
        """The smallest is admitted first. Asked once each time a turn starts to wait."""
        return (turn.arrived_at, turn.id)

    def victim(self, turn: TurnView, now: float) -> tuple[Any, ...]:
        """The largest is preempted first, when running turns outgrow memory."""
        return (turn.arrived_at, turn.id)

    def bid(self, turn: TurnView, pressure: Pressure, now: float) -> float:
        """What memory is worth to this turn, per token: kept KV of a lower value gives way to it. When nothing runs, the first
        in the queue may take whatever it needs, and is not asked."""
        return inf

    def at_turn_end(self, end: TurnEnd, pressure: Pressure, now: float) -> Disposition:
        """Only for turns of a job that is to go on, and whose client did not say how long to hold them."""
        return DROP

    def review(self, pin: PinView, pressure: Pressure, now: float) -> Disposition:
        """Asked when a pin's `review_seconds` are over; what is returned counts from now."""
        return DROP

    def observe(self, event: JobEvent) -> None:
        """How it learns."""

    def use_model(self, path: Path) -> None:
        """A model that was trained beforehand. Raises InvalidRequest if it cannot be used."""
        raise InvalidRequest("policy_model", f"the policy {self.name!r} uses none")

    def to_json(self) -> dict[str, Any]:
        """What it has learned; `restore` takes it back after a restart."""
        return {}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Raises ValueError, and changes nothing, if this is not what `to_json` wrote."""
