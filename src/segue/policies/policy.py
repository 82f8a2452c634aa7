"""What the scheduler asks of a policy, and all that a policy gets to see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class TurnView:
    """One sequence of one request, as far as a policy may care."""

    id: int
    job_id: str | None
    arrived_at: float
    num_prompt: int
    num_tokens: int
    num_computed: int
    num_preemptions: int
    priority: int = 0


class Policy(Protocol):
    """Returns sort keys; the scheduler is written once. Neither method mutates anything."""

    def order(self, turn: TurnView, now: float) -> tuple[Any, ...]:
        """The smallest is admitted first. Asked once each time a turn starts to wait."""
        ...

    def victim(self, turn: TurnView, now: float) -> tuple[Any, ...]:
        """The largest is preempted first, when running turns outgrow memory."""
        ...
