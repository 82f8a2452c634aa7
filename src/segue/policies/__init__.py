"""Who runs first and who yields. Policies see small frozen views, never an engine class."""

from segue.policies.fcfs import FirstComeFirstServed
from segue.policies.policy import Policy, TurnView
from segue.policies.priority import Priority

__all__ = ["FirstComeFirstServed", "Policy", "Priority", "TurnView"]
