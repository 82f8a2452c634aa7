"""Policies by name: ours, and those that installed packages bring with an entry point in the group `segue.policies`."""

from __future__ import annotations

from importlib.metadata import entry_points

from segue.base.errors import InvalidRequest
from segue.policies.adaptive import Adaptive
from segue.policies.context_serve import ContextServe
from segue.policies.continuum import Continuum, ContinuumReleased
from segue.policies.fcfs import FirstComeFirstServed
from segue.policies.policy import Policy
from segue.policies.priority import Priority

GROUP = "segue.policies"
DEFAULT = Adaptive.name
_OURS: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (FirstComeFirstServed, Priority, Continuum, ContinuumReleased, ContextServe, Adaptive)
}


def policy_names() -> list[str]:
    return [*_OURS, *sorted({point.name for point in entry_points(group=GROUP)} - set(_OURS))]


def make_policy(policy: str | Policy | None = None) -> Policy:
    """A new policy of this name, the default one if there is none; one that is made already is passed through."""
    if isinstance(policy, Policy):
        return policy
    name = DEFAULT if policy is None else policy
    if name in _OURS:
        return _OURS[name]()
    for point in entry_points(group=GROUP):
        if point.name == name:
            made = point.load()()
            if not isinstance(made, Policy):
                raise InvalidRequest("policy", f"{name!r} ({point.value}) is not a segue.policies.Policy")
            return made
    raise InvalidRequest("policy", f"{name!r:.60} is not known: there are {', '.join(policy_names())}")
