"""First come, first served."""

from __future__ import annotations

from typing import Any

from segue.policies.policy import TurnView


class FirstComeFirstServed:
    """By arrival; whoever came last yields. A preempted turn keeps its arrival, and so its place in front."""

    def order(self, turn: TurnView, now: float) -> tuple[Any, ...]:
        return (turn.arrived_at, turn.id)

    def victim(self, turn: TurnView, now: float) -> tuple[Any, ...]:
        return (turn.arrived_at, turn.id)
