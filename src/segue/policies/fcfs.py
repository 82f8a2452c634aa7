"""First come, first served."""

from __future__ import annotations

from segue.policies.policy import Policy


class FirstComeFirstServed(Policy):
    """By arrival; whoever came last yields. A preempted turn keeps its arrival, and so its place in front."""
