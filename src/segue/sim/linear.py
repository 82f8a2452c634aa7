"""What steps cost, in few numbers: linear in rows and context, for models of many engines."""

from __future__ import annotations

from dataclasses import dataclass

from segue.sim.costs import StepCosts, Work

_MANY = 1 << 20


@dataclass(frozen=True, slots=True)
class CoarseCosts:
    """What `StepCosts` says, once for all steps. Seconds."""

    steps: tuple[float, ...]  # of a step with so many rows and no context
    slack: tuple[float, ...]  # of products that such a step has time for while weights are read
    context_token: float  # read and attended to, in each step
    prompt_token: float  # products of a token where they are what takes time
    pair: float  # of a new token and one before it
    token_bytes: float

    @classmethod
    def of(cls, costs: StepCosts, max_running: int) -> CoarseCosts:
        host = costs.coefficients.step_seconds + costs.coefficients.row_seconds
        empty = costs.seconds(Work(1, 1, 0, 0, 0))
        token = (costs.seconds(Work(2 * _MANY, 1, 0, 0, 0)) - costs.seconds(Work(_MANY, 1, 0, 0, 0))) / _MANY
        rows = range(max_running + 1)
        return cls(
            tuple(costs.seconds(Work(n, n, n, 0, 0)) for n in rows),
            tuple(max(costs.seconds(Work(n, 1, 0, 0, 0)) - host - n * token, 0.0) for n in rows),
            (costs.seconds(Work(1, 1, 0, _MANY, _MANY)) - empty) / _MANY,
            token,
            (costs.seconds(Work(1, 1, 0, _MANY, 0)) - empty) / _MANY,
            costs.kv_bytes,
        )
