"""The table of the Continuum experiments (RTX 5090, 5,402 blocks of Llama-3.1-8B), with one set of coefficients."""

from __future__ import annotations

import statistics

import pytest

from segue.bench.sweep import Cell, Load, Machine, simulate

CARD = Machine("rtx5090", num_blocks=5402, max_model_len=4096)
RUNS = {  # policy, jobs, seconds: mean and p90 of a job, as far as published
    ("fcfs", 206, 110.0): (6.65, None),
    ("continuum-released", 231, 110.0): (6.97, None),
    ("fcfs", 756, 90.0): (14.10, 17.02),
    ("continuum-released", 704, 90.0): (12.47, 14.37),
}
FCFS_TURNS = (1263, 735, 574, 1005, 749, 641, 3732, 1236)


@pytest.fixture(scope="module")
def played():
    def run(policy, jobs, seconds):
        return [simulate(Cell(Load("agents", jobs / seconds, seconds), CARD, policy, seed=seed))[1] for seed in (0, 1)]

    return {key: run(*key) for key in RUNS}


def _durations(runs):
    return [sorted(each.durations.values()) for each in runs]


def _mean(runs):
    return statistics.mean(statistics.mean(each) for each in _durations(runs))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]} {run[1]}")
def test_job_times_are_within_fifteen_percent(played, run):
    mean, p90 = RUNS[run]
    assert _mean(played[run]) == pytest.approx(mean, rel=0.15)
    if p90 is not None:
        tails = [each[int(0.9 * len(each))] for each in _durations(played[run])]
        assert statistics.mean(tails) == pytest.approx(p90, rel=0.15)


def test_the_shape_over_turns_is_the_published_one(played):
    turns = [turn for each in played["fcfs", 756, 90.0] for turn in each.turns]
    own = [1e3 * statistics.mean(turn.seconds for turn in turns if turn.turn == at) for at in range(8)]
    assert own.index(max(own)) == 6
    scale = sum(own) / sum(FCFS_TURNS)
    for ours, theirs in zip(own, FCFS_TURNS, strict=True):
        assert ours == pytest.approx(scale * theirs, rel=0.15)


def test_pinning_is_useless_at_a_low_load_and_pays_at_a_high_one():
    """With the same arrivals. Where it begins to pay is between 8 and 9 jobs a second here."""

    def gain(rate, seconds):
        cells = [Cell(Load("agents", rate, seconds), CARD, policy) for policy in ("fcfs", "continuum-released")]
        before, after = (_mean([simulate(cell)[1]]) for cell in cells)
        return 1 - after / before

    assert abs(gain(2.0, 60.0)) < 0.01
    assert gain(10.0, 60.0) > 0.1
