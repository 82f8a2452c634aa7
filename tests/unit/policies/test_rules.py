"""What each policy decides, one promise a test; and that it does not take long to."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from segue.base.errors import InvalidRequest
from segue.policies import (
    Adaptive,
    Call,
    Continuum,
    ContinuumReleased,
    Policy,
    Pressure,
    Returned,
    TurnEnd,
    TurnView,
    load_learned,
    make_policy,
    policy_names,
    save_learned,
)
from segue.policies.continuum import TurnCorrelation
from segue.policies.policy import JobEnded, PinView, Started

TURN = TurnView(1, "j", 10.0, 400, 500, 499, 0, job_arrived_at=5.0, num_turns=2)
FULL = Pressure(1000, 0, 300, num_waiting=5, num_running=8, seconds_per_token=0.002, queue_seconds=1.0)
EMPTY = replace(FULL, num_free=990, num_waiting=0, num_running=1)
LS, MAKE = Call("bash", "ls"), Call("bash", "make")


def end_of(call, **changes):
    return TurnEnd(replace(TURN, **changes), 32, call)


def taught(policy, times):
    for call, seconds in times:
        policy.observe(Returned("j", call, seconds))
    return policy


def test_continuum_keeps_as_published():
    policy = taught(Continuum(), [(LS, 0.1)] * 120 + [(MAKE, 30.0)] * 120)
    assert policy.keep_seconds(LS, 2.0) == 0.1
    assert policy.keep_seconds(MAKE, 2.0) == 0 and policy.keep_seconds(MAKE, 60.0) == 30.0
    assert policy.keep_seconds(Call("bash", "new"), 2.0) == 0.1, "a new tool is like all of them"
    assert Continuum().keep_seconds(None, 100.0) == pytest.approx(4.6, abs=0.1), "before that, Exp(1)"
    assert Continuum().at_turn_end(end_of(LS), EMPTY, 0.0).keep_seconds == 2.0


def test_as_released_it_is_two_seconds_or_nothing():
    policy = taught(ContinuumReleased(), [(LS, 0.1), (MAKE, 1.0), (MAKE, 4.0)])
    kept = [policy.at_turn_end(end_of(call), FULL, 0.0).keep_seconds for call in (LS, MAKE, Call("x", "x"), None)]
    assert kept == [2.0, 0.0, 2.0, 0.0]


def test_eta_is_one_for_jobs_of_one_length_and_less_for_mixed_ones():
    same, mixed = TurnCorrelation(), TurnCorrelation()
    for number in range(100):
        same.add(8)
        mixed.add([1, 40][number % 2])
    assert same.value == pytest.approx(1.0) and 0 <= mixed.value < 0.9
    policy = Continuum()
    policy.observe(JobEnded("j", 3))


def test_jobs_that_came_first_go_first_and_yield_last():
    for policy in (Continuum(), Adaptive()):
        old, new = replace(TURN, id=2, num_turns=5), replace(TURN, id=3, job_arrived_at=9.0, num_turns=1)
        assert policy.order(old, 20.0) < policy.order(new, 20.0)
        assert policy.victim(old, 20.0) < policy.victim(new, 20.0)
        assert policy.order(replace(new, is_pinned=True), 20.0) < policy.order(old, 20.0)
        assert policy.victim(replace(new, is_last_step=True), 20.0) < policy.victim(old, 20.0)


def test_adaptive_keeps_fast_tools_and_gives_slow_ones_up_only_under_pressure():
    policy = taught(Adaptive(), [(LS, 0.1)] * 30 + [(MAKE, 60.0)] * 30)
    fast, slow = policy.at_turn_end(end_of(LS), FULL, 0.0), policy.at_turn_end(end_of(MAKE), FULL, 0.0)
    assert fast.keep_seconds >= 0.1 and fast.p_return > 0.8 and slow.keep_seconds < 30
    idle = policy.at_turn_end(end_of(MAKE), EMPTY, 0.0)
    assert idle.keep_seconds > 60 and 0 < idle.value < fast.value * 10
    assert policy.at_turn_end(end_of(LS), replace(FULL, seconds_per_token=0.0), 0.0).keep_seconds == 0, "worth nothing"


def test_adaptive_counts_the_wait_of_those_that_are_back():
    """KV is kept until its turn runs: where such turns wait long for memory, keeping it does not pay, as long as they do."""
    policy = taught(Adaptive(), [(LS, 0.1)] * 30)
    assert policy.at_turn_end(end_of(LS), FULL, 0.0).keep_seconds > 0
    for _ in range(100):
        policy.observe(Started(TURN, waited_seconds=60.0, num_reused=499, num_lost=0))
    assert policy.at_turn_end(end_of(LS), FULL, 0.0).keep_seconds == 0
    assert policy.at_turn_end(end_of(LS), EMPTY, 0.0).keep_seconds > 0, "nobody wants the memory"
    for _ in range(300):
        policy.observe(Started(TURN, waited_seconds=60.0, num_reused=0, num_lost=499))
    assert policy.at_turn_end(end_of(LS), FULL, 0.0).keep_seconds > 0, "it is tried again"


def test_adaptive_thinks_again_while_the_gap_lasts():
    policy = taught(Adaptive(), [(LS, 0.1)] * 95 + [(LS, 200.0)] * 5)
    pin = PinView(end_of(LS), since=0.0, num_blocks=32)
    assert policy.review(pin, FULL, 0.05).keep_seconds > 0
    assert policy.review(pin, FULL, 20.0).keep_seconds == 0, "one of the long ones, and others want the memory"


def test_a_pin_gives_way_to_those_that_run_and_not_to_those_that_wait():
    policy = taught(Adaptive(), [(LS, 0.1)] * 30)
    value = policy.at_turn_end(end_of(LS), FULL, 0.0).value
    assert 0 < policy.bid(replace(TURN, blocked_seconds=100.0), FULL, 0.0) < value < policy.growth_bid


@pytest.mark.parametrize("name", policy_names())
def test_a_policy_is_made_by_name_and_remembers_what_it_learned(name, tmp_path):
    policy = taught(make_policy(name), [(LS, 0.1)] * 150)
    assert policy.name == name and isinstance(policy, Policy)
    path = tmp_path / "folder" / "learned.json"
    assert not load_learned(path, make_policy(name))
    save_learned(path, policy)
    again = make_policy(name)
    assert load_learned(path, again) and os.listdir(path.parent) == ["learned.json"]
    kept = [one.at_turn_end(end_of(LS), FULL, 0.0).keep_seconds for one in (policy, again)]
    assert kept[0] == pytest.approx(kept[1], rel=1e-3)
    other = make_policy("fcfs" if name != "fcfs" else "adaptive")
    assert not load_learned(path, other), "another policy's"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2, "policy": "adaptive", "learned": {}}', "[" * 100_000,
                                  '{"version": 1, "policy": "adaptive", "learned": {"everything": 1}}'])  # fmt: skip
def test_a_damaged_file_is_refused_by_name(tmp_path, text):
    path = tmp_path / "learned.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=r"policy_state.*learned\.json"):
        load_learned(path, Adaptive())


def test_what_cannot_be_written_leaves_the_old_file(tmp_path):
    path = tmp_path / "learned.json"
    save_learned(path, Adaptive())
    before = path.read_text()

    class Broken(Adaptive):
        def to_json(self):
            return {"not": {1, 2}}

    with pytest.raises(TypeError):
        save_learned(path, Broken())
    assert path.read_text() == before and json.loads(before)["version"] == 1


def test_an_unknown_name_is_refused_and_says_which_there_are():
    with pytest.raises(InvalidRequest, match="adaptive"):
        make_policy("nonsense")


def test_installed_packages_bring_their_own(tmp_path):
    """A distribution with an entry point, found as any other."""
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[segue.policies]\nmine = mine:Mine\nbad = mine:Bad\n")
    (tmp_path / "mine.py").write_text(
        "from segue.policies import Policy\nclass Mine(Policy):\n    name = 'mine'\nclass Bad: pass\n"
    )
    code = (
        "from segue.policies import make_policy, policy_names\n"
        "assert 'mine' in policy_names() and make_policy('mine').name == 'mine'\n"
        "try:\n    make_policy('bad')\nexcept Exception as error:\n    print(error)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": path}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert "not a segue.policies.Policy" in ran.stdout, ran.stderr
