"""The same jobs on a real engine and in the simulator: what they share, and so what has to be computed, is the same."""

import pytest

from segue.bench.local import play_locally
from segue.bench.sweep import Cell, Load, Machine, simulate


@pytest.mark.parametrize("usual", [0.0, 0.8])
def test_a_real_engine_computes_what_the_simulator_does(usual):
    """A real model says what it likes, and the same to the same prompt: what is a job's own is in what it hears."""
    load = Load("agents", 20.0, 0.5, options={"usual": usual, "gap_scale": 0.01})
    real = play_locally(load.make(3), "tiny", "adaptive", num_blocks=3000, max_running=64)
    virtual = simulate(Cell(load, Machine("h100", num_blocks=3000), "adaptive", seed=3))[1]
    assert not real.failed and len(real.durations) == len(virtual.durations) == 10
    assert real.num_computed == pytest.approx(virtual.num_computed, rel=0.1)
    assert real.num_recomputed == virtual.num_recomputed == 0
