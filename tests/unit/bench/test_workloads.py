"""Workloads are data: the same seed, the same jobs; and what the published one says of itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.base.errors import InvalidRequest
from segue.bench.arrivals import KINDS, arrival_times
from segue.bench.generated import GENERATED, AgentJob, agents, chat, closed, shared_prefix, two_stage
from segue.bench.workload import Job, Run, Texts, Turn, Workload


@given(st.sampled_from(KINDS), st.floats(0.5, 20), st.floats(1, 60), st.integers(0, 5))
def test_arrivals_are_as_many_as_the_load_says_and_in_order(kind, rate, seconds, seed):
    times = arrival_times(kind, rate, seconds, seed)
    assert len(times) == max(round(rate * seconds), 1)
    assert times == sorted(times)
    assert times[0] >= 0
    assert times == arrival_times(kind, rate, seconds, seed)


def test_bursts_are_burstier_than_chance():
    def spread(kind):
        times = arrival_times(kind, 5, 2000, 1)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        return sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2

    assert spread("even") < 0.01
    assert spread("poisson") == pytest.approx(1.0, abs=0.15)
    assert spread("bursty") == pytest.approx(4.0, abs=1.0)


@pytest.mark.parametrize("make", GENERATED.values(), ids=GENERATED)
def test_a_seed_makes_the_same_jobs(make):
    times = arrival_times("poisson", 2, 20, 0)
    assert make(times, 3) == make(times, 3)
    if make is not two_stage:
        assert make(times, 3) != make(times, 4)


def test_the_agents_job_is_the_published_one():
    job = agents([0.0], 0).jobs[0]
    assert job.prompt_lengths() == [92, 469, 811, 1343, 1655, 2241, 2665, 2915]
    gaps = [sum(turn.gap_seconds for turn in each.turns) for each in agents([0.0] * 2000, 0).jobs]
    assert sum(gaps) / len(gaps) == pytest.approx(4.17, abs=0.1)
    assert [turn.command for turn in job.turns][4] == "pytest"
    assert all(turn.num_output <= 150 for turn in job.turns)


def test_jobs_share_their_text_until_an_answer_is_unusual():
    texts = Texts(32_000)

    def prompt(job, turn):
        said = texts.tokens(Run(0, 0, 0))
        for each in job.turns[: turn + 1]:
            texts.append(said, each.added)
            if each is not job.turns[turn]:
                texts.append(said, [each.answer])
        return said

    same = agents([0.0] * 2, 0, AgentJob(usual=1.0)).jobs
    assert prompt(same[0], 7) == prompt(same[1], 7)
    own = agents([0.0] * 2, 0, AgentJob(usual=0.0)).jobs
    assert prompt(own[0], 0) == prompt(own[1], 0)
    assert prompt(own[0], 7) != prompt(own[1], 7)
    assert len(prompt(own[0], 7)) == 2915


@given(st.integers(0, 2**62), st.integers(0, 500), st.integers(1, 200), st.integers(11, 200_000))
def test_a_text_is_the_same_wherever_it_is_begun(text, start, length, vocab):
    texts = Texts(vocab)
    whole = texts.tokens(Run(text, 0, start + length))
    assert texts.tokens(Run(text, start, length)) == whole[start:]
    assert all(10 <= token < vocab for token in whole)


@pytest.mark.parametrize(
    ("jobs", "match"),
    [
        ((), "no jobs"),
        ((Job("a", ()),), "without a prompt"),
        ((Job("a", (Turn((), 1),)),), "without a prompt"),
        ((Job("a", (Turn((Run(1, 0, 5),), 0),)),), "without an answer"),
        ((Job("a", (Turn((Run(1, 0, 5),), 1, -1.0),)),), "before it began"),
        ((Job("a", (Turn((Run(1, 0, 5),), 1),), 2.0), Job("b", (Turn((Run(1, 0, 5),), 1),), 1.0)), "order"),
    ],
)
def test_a_workload_that_cannot_be_played_is_refused(jobs, match):
    with pytest.raises(InvalidRequest, match=match):
        Workload("w", jobs)


def test_other_refusals():
    with pytest.raises(InvalidRequest, match="arrivals"):
        arrival_times("never", 1, 1, 0)
    with pytest.raises(InvalidRequest, match="rate"):
        arrival_times("poisson", 0, 1, 0)
    with pytest.raises(InvalidRequest, match="turn 2"):
        AgentJob(output_tokens=(400, 12, 9, 16, 13, 10, 63, 21))
    with pytest.raises(InvalidRequest, match="concurrency"):
        closed(shared_prefix([0.0]), 0)
    assert replace(closed(chat([1.0, 2.0]), 2)).rate is None
