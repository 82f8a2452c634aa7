"""How long a tool will take: shrinkage, forgetting, and the time that pays."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.policies.durations import EDGES, LONGEST, MOST_SEEN, Call, Durations, Histogram

LS, PYTEST = Call("bash", "ls"), Call("bash", "pytest")


def seen(**times):
    durations = Durations()
    for key, values in times.items():
        for seconds in values:
            durations.learn(Call("bash", key), seconds)
    return durations


def worth(samples, kept, benefit, cost=1.0):
    """What keeping for so long would have gained on these."""
    return sum((benefit if x <= kept else 0) - cost * min(x, kept) for x in samples) / len(samples)


@given(
    samples=st.lists(st.floats(0, 500), min_size=40, max_size=200),
    benefit=st.floats(0.1, 50),
    cost=st.floats(0.05, 3),
)
def test_keeping_for_the_best_time_is_nearly_as_good_as_the_best_of_hindsight(samples, benefit, cost):
    """Off by the grid (a fifth of the time) and by the few calls that the levels behind count for."""
    durations = seen(x=samples)
    kept = durations.of(Call("bash", "x")).best_keep(benefit, cost).seconds
    best = max(worth(samples, tau, benefit, cost) for tau in (0.0, *samples))
    prior = 12 / len(samples)  # three levels of four calls, at the worst
    slack = benefit * prior + cost * (0.2 * min(kept, 500) + prior * min(kept, 500)) + cost * 0.02
    assert worth(samples, kept, benefit, cost) >= best - slack - 1e-9


def test_a_command_that_was_never_seen_is_like_its_tool_and_a_tool_like_all():
    durations = seen(ls=[0.02] * 50, pytest=[30.0] * 5)
    assert durations.of(Call("bash", "new")).quantile(0.5) < 0.1
    assert durations.of(Call("other", "x")).quantile(0.5) < 0.1
    assert durations.of(PYTEST).quantile(0.5) > 20
    assert Durations().of(None).quantile(0.5) == pytest.approx(1.0, rel=0.2)


def test_what_this_job_did_counts_before_what_others_did():
    durations = seen(pytest=[60.0] * 100)
    for _ in range(6):
        durations.learn(Call("bash", "pytest", "job"), 0.5)
    assert durations.of(Call("bash", "pytest", "job")).best_keep(5.0).seconds < 1
    assert durations.of(Call("bash", "pytest", "another")).best_keep(5.0).seconds == 0


def test_after_a_while_without_return_the_rest_is_judged_anew():
    durations = seen(x=[0.1] * 80 + [100.0] * 20)
    distribution = durations.of(Call("bash", "x"))
    at_first = distribution.best_keep(2.0)
    assert 0.1 <= at_first.seconds < 0.2 and at_first.p_return > 0.7
    assert distribution.best_keep(2.0, elapsed=1.0).seconds == 0, "it is one of the long ones"
    assert distribution.best_keep(200.0, elapsed=1.0).seconds > 90
    assert distribution.p_within(0.5, elapsed=1.0) < 0.2 < distribution.p_within(0.5)


def test_habits_that_change_are_followed():
    durations = seen(x=[0.1] * 1000 + [50.0] * 400)
    assert durations.of(Call("bash", "x")).quantile(0.5) > 40


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(-1e300, 1e300) | st.just(float("nan"))), max_size=60))
def test_memory_is_bounded_whatever_comes(calls):
    durations = Durations(most_keys=3, most_jobs=2)
    for key, seconds in calls:
        durations.learn(Call(key, key, key), seconds)
    assert len(durations.keys) <= 3 and len(durations.tools) <= 3
    distribution = durations.of(Call("a", "a", "a"))
    assert sum(distribution.chances) == pytest.approx(1, abs=1e-3)
    assert 0 <= distribution.best_keep(3.0).seconds <= LONGEST


def test_a_histogram_is_bounded_in_count():
    histogram = Histogram()
    for number in range(5000):
        histogram.add(number % 7)
    assert histogram.total <= MOST_SEEN and len(histogram.counts) <= len(EDGES)


def test_what_was_learned_comes_back():
    randomly = random.Random(1)
    durations = seen(**{key: [randomly.expovariate(1) for _ in range(30)] for key in "abc"})
    again = Durations()
    again.restore(durations.to_json())
    for key in "abcd":
        before, after = durations.of(Call("bash", key)), again.of(Call("bash", key))
        assert after.chances == pytest.approx(before.chances, abs=1e-6)


@pytest.mark.parametrize(
    "damage",
    [{}, {"everything": 3}, {"everything": [[1, 2]]}, {"everything": [], "tools": [["x"]], "keys": []},
     {"everything": [[9999, 1, 1]], "tools": [], "keys": []}, {"everything": [[1, -1, 1]], "tools": [], "keys": []}],
)  # fmt: skip
def test_what_is_damaged_changes_nothing(damage):
    durations = seen(x=[1.0] * 10)
    before = durations.to_json()
    with pytest.raises(ValueError, match="not "):
        durations.restore(damage)
    assert durations.to_json() == before
