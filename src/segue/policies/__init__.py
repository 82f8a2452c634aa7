"""Who runs first, who yields, and what is kept between a job's turns. Policies see small frozen views, never an engine class."""

from segue.policies.adaptive import Adaptive
from segue.policies.context_serve import ContextServe
from segue.policies.continuum import Continuum, ContinuumReleased
from segue.policies.decisions import Decision, Decisions, Sums
from segue.policies.durations import Call, Durations
from segue.policies.fcfs import FirstComeFirstServed
from segue.policies.jobs import Job, JobBook
from segue.policies.learned import load_learned, save_learned
from segue.policies.policy import (
    DROP,
    Disposition,
    JobEnded,
    JobEvent,
    PinView,
    Policy,
    Pressure,
    Returned,
    Started,
    TurnEnd,
    TurnView,
)
from segue.policies.priority import Priority
from segue.policies.registry import make_policy, policy_names

__all__ = [
    "DROP",
    "Adaptive",
    "Call",
    "ContextServe",
    "Continuum",
    "ContinuumReleased",
    "Decision",
    "Decisions",
    "Disposition",
    "Durations",
    "FirstComeFirstServed",
    "Job",
    "JobBook",
    "JobEnded",
    "JobEvent",
    "PinView",
    "Policy",
    "Pressure",
    "Priority",
    "Returned",
    "Started",
    "Sums",
    "TurnEnd",
    "TurnView",
    "load_learned",
    "make_policy",
    "policy_names",
    "save_learned",
]
