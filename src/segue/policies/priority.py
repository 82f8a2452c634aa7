"""By the priority that callers give."""

from __future__ import annotations

from typing import Any

from segue.policies.policy import Policy, TurnView


class Priority(Policy):
    """The smallest number runs first; among equals, whoever came first. The last of these yields first. One admission in sixteen
    is for whoever waits longest, so that nobody starves."""

    name = "priority"
    fair_every = 16

    def order(self, turn: TurnView, now: float) -> tuple[Any, ...]:
        return (turn.priority, turn.arrived_at, turn.id)

    def victim(self, turn: TurnView, now: float) -> tuple[Any, ...]:
        return (turn.priority, turn.arrived_at, turn.id)
