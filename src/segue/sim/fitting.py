"""Coefficients from steps that were measured.

The cost is linear in what is looked for but for two maxima: products of weights are bound by computing or by reading. So each
step is taken to be on the side that the present guess says, the linear problem is solved without negative numbers, and the
sides are looked at again. Errors count relative to the step's own time: a short step is as important as a long one. In the end
all is scaled so that their sum is met. Steps that took far longer than they should have are left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segue.base.errors import InvalidRequest
from segue.sim.costs import Coefficients, StepCosts, Work
from segue.sim.hardware import Hardware
from segue.sim.shapes import ModelShape

_ROUNDS = 12
_SWEEPS = 2000
_LEAST_STEPS = 16
_LEAST = 1e-9  # a share that is next to nothing: the term costs next to nothing if it is the largest that can be said
_MOST = 1e6
_OUTLIER = 3.0  # times the fitted time: something else had the machine

Matrix = NDArray[np.float64]


class Step(NamedTuple):
    """A step of a real engine, all of its loop."""

    work: Work
    seconds: float


class Fit(NamedTuple):
    coefficients: Coefficients
    mean_error: float  # |predicted - measured| / measured, over the steps
    scaled: float  # by how much more than the fit said all steps took together, which it now says
    num_steps: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured, and what came of it: enough to simulate it."""

    hardware: Hardware
    shape: ModelShape
    coefficients: Coefficients

    def to_json(self) -> dict[str, Any]:
        return {
            "hardware": asdict(self.hardware),
            "shape": asdict(self.shape),
            "coefficients": self.coefficients.to_json(),
        }

    @classmethod
    def read(cls, path: Path) -> Calibration:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            shape = {**data["shape"], "assumed": tuple(data["shape"].get("assumed", ()))}
            hardware, coefficients = Hardware(**data["hardware"]), Coefficients.from_json(data["coefficients"])
            return cls(hardware, ModelShape(**shape), coefficients)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidRequest("calibration", f"{path} is none that `segue sim calibrate` wrote: {error}") from error


def fit(costs: StepCosts, steps: Sequence[Step]) -> Fit:
    """What makes `costs` agree best; its own coefficients are the first guess."""
    if len(steps) < _LEAST_STEPS:
        raise InvalidRequest("steps", f"{len(steps)} are too few to fit anything: {_LEAST_STEPS} at least")
    kept = list(steps)
    found = _fitted(costs, kept)
    kept = [step for step in kept if step.seconds < _OUTLIER * _with(costs, found).seconds(step.work)]
    if len(kept) >= _LEAST_STEPS:
        found = _fitted(costs, kept)
    model = _with(costs, found)
    factor = sum(step.seconds for step in kept) / sum(model.seconds(step.work) for step in kept)
    found = _scaled(found, factor)
    predicted = np.array([_with(costs, found).seconds(step.work) for step in kept])
    measured = np.array([step.seconds for step in kept])
    errors = np.abs(predicted - measured) / measured
    return Fit(found, float(errors.mean()), factor - 1, len(kept))


def _scaled(found: Coefficients, factor: float) -> Coefficients:
    """Every term takes `factor` times as long."""
    return replace(
        found,
        step_seconds=found.step_seconds * factor,
        row_seconds=found.row_seconds * factor,
        compute=_share(factor / found.compute),
        bandwidth=_share(factor / found.bandwidth),
        attention=_share(factor / found.attention),
        kv=_share(factor / found.kv),
    )


def _with(costs: StepCosts, coefficients: Coefficients) -> StepCosts:
    return StepCosts(costs.shape, costs.hardware, coefficients, dtype=costs.dtype)


def _fitted(costs: StepCosts, steps: Sequence[Step]) -> Coefficients:
    measured = np.array([step.seconds for step in steps])
    found = costs.coefficients
    for _ in range(_ROUNDS):
        rows = _terms(_with(costs, found), [step.work for step in steps]) / measured[:, None]
        step, row, compute, bandwidth, attention, kv = _without_negatives(rows, np.ones(len(steps)))
        latest = replace(
            found,
            step_seconds=step,
            row_seconds=row,
            compute=_share(compute),
            bandwidth=_share(bandwidth),
            attention=_share(attention),
            kv=_share(kv),
        )
        if latest == found:
            break
        found = latest
    return found


def _terms(costs: StepCosts, works: Sequence[Work]) -> Matrix:
    """One row a step: what each unknown is multiplied with. The shares' unknowns are their inverses."""
    peak, reads, chosen = costs.hardware.flops, costs.hardware.bytes_per_second, costs.coefficients
    rows = np.zeros((len(works), 6))
    for at, work in enumerate(works):
        rows[at, 0], rows[at, 1] = 1.0, work.num_rows
        pairs = [(work.num_tokens * costs.token_flops / peak, costs.body_bytes(work.num_tokens) / reads)]
        if work.num_sampled:
            pairs.append((work.num_sampled * costs.head_flops / peak, costs.head_bytes() / reads))
        for computing, reading in pairs:
            if computing / chosen.compute >= reading / chosen.bandwidth:
                rows[at, 2] += computing
            else:
                rows[at, 3] += reading
        rows[at, 4] = work.num_pairs * costs.pair_flops / peak
        rows[at, 5] = work.num_kv_tokens * costs.kv_bytes / reads
    return rows


def _share(inverse: float) -> float:
    return min(max(1 / inverse if inverse > 0 else _MOST, _LEAST), _MOST)


def _without_negatives(rows: Matrix, wanted: Matrix) -> list[float]:
    """Least squares with no unknown below 0, one unknown at a time: there are six, and it converges."""
    scale = np.sqrt((rows * rows).sum(axis=0))
    scale[scale == 0] = 1.0
    scaled = rows / scale
    products, right = scaled.T @ scaled, scaled.T @ wanted
    found = np.zeros(len(scale))
    for _ in range(_SWEEPS):
        before = found.copy()
        for at in range(len(found)):
            if products[at, at] > 0:
                rest = right[at] - products[at] @ found + products[at, at] * found[at]
                found[at] = max(rest / products[at, at], 0.0)
        if np.abs(found - before).max() < 1e-12:
            break
    return [float(value) for value in found / scale]
