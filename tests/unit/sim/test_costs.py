"""What a step costs: the roofline's promises, and coefficients that are found again in steps made with them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.base.errors import InvalidRequest
from segue.sim.costs import Coefficients, StepCosts, Work
from segue.sim.fitting import Calibration, Step, fit
from segue.sim.hardware import find_hardware
from segue.sim.shapes import find_shape

COSTS = StepCosts(find_shape("llama-3.1-8b"), find_hardware("h200"))


def test_floors_are_the_hardwares():
    """Weights read once at the coefficients' bandwidth; 2 FLOP for each weight and token."""
    chosen = COSTS.coefficients
    read = COSTS.shape.num_active * 2 + COSTS.shape.num_head_params * 2
    least = read / (4800e9 * chosen.bandwidth)
    assert least < COSTS.decode_seconds(1, 1) < least + chosen.step_seconds + chosen.row_seconds + 1e-5
    flops = 2 * COSTS.shape.num_active * 1024 / (989e12 * chosen.compute)
    assert COSTS.prefill_seconds(1024) == pytest.approx(flops, rel=0.2)


@given(st.integers(1, 256), st.integers(1, 8000))
def test_more_work_never_costs_less_and_batching_never_costs_more(rows, context):
    one, many = COSTS.decode_seconds(1, context), COSTS.decode_seconds(rows, context)
    assert one <= many <= rows * one + 1e-12
    assert COSTS.decode_seconds(rows, context + 1) >= many
    assert COSTS.prefill_seconds(context) <= COSTS.prefill_seconds(context + 1)


def test_prefill_in_two_parts_costs_what_the_whole_does_and_one_step_more():
    whole = COSTS.prefill_seconds(6000)
    parts = COSTS.prefill_seconds(3000) + COSTS.prefill_seconds(3000, 3000)
    assert whole < parts < whole * 1.1


def _steps(costs: StepCosts, count: int, noise: float, seed: int = 0) -> list[Step]:
    randomly = random.Random(seed)
    steps = []
    for _ in range(count):
        rows, context = randomly.randint(1, 64), randomly.randint(10, 3000)
        tokens = rows + (randomly.randint(0, 2000) if randomly.random() < 0.5 else 0)
        work = Work(tokens, rows, rows, float(tokens * context), rows * context)
        steps.append(Step(work, costs.seconds(work) * randomly.lognormvariate(0.0, noise)))
    return steps


def test_coefficients_are_found_again():
    truth = Coefficients(compute=0.5, bandwidth=0.7, attention=0.2, kv=0.6, step_seconds=0.002, row_seconds=4e-5)
    found = fit(COSTS, _steps(StepCosts(COSTS.shape, COSTS.hardware, truth), 300, 0.0))
    assert found.mean_error < 1e-3
    for name in ("compute", "bandwidth", "attention", "kv", "step_seconds", "row_seconds"):
        assert getattr(found.coefficients, name) == pytest.approx(getattr(truth, name), rel=0.02), name


def test_noise_and_steps_that_something_else_held_up_do_little_harm():
    truth = Coefficients(compute=0.5, bandwidth=0.7, step_seconds=0.002)
    costs = StepCosts(COSTS.shape, COSTS.hardware, truth)
    steps = _steps(costs, 400, 0.05)
    late = [Step(step.work, step.seconds * 20) if number % 40 == 0 else step for number, step in enumerate(steps)]
    found = fit(COSTS, late)
    fitted = StepCosts(COSTS.shape, COSTS.hardware, found.coefficients)
    for step in _steps(costs, 50, 0.0, seed=1):
        assert fitted.seconds(step.work) == pytest.approx(step.seconds, rel=0.15)


def test_too_few_steps_and_wrong_coefficients_are_refused():
    with pytest.raises(InvalidRequest, match="too few"):
        fit(COSTS, _steps(COSTS, 5, 0.0))
    for wrong in ({"compute": 0.0}, {"step_seconds": -1.0}, {"kv": float("nan")}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            Coefficients(**wrong)
    with pytest.raises(InvalidRequest, match="coefficients"):
        Coefficients.from_json({"speed": 1})


def test_a_calibration_survives_its_file(tmp_path):
    import json

    path = tmp_path / "found.json"
    kept = Calibration(COSTS.hardware, COSTS.shape, Coefficients(compute=0.4))
    path.write_text(json.dumps(kept.to_json()))
    assert Calibration.read(path) == kept
    for text in ("", "[]", '{"hardware": {}}', json.dumps(kept.to_json() | {"coefficients": {"compute": -1}})):
        path.write_text(text)
        with pytest.raises(InvalidRequest):
            Calibration.read(path)
