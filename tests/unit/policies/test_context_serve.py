"""Fast, slow or uncertain: who is asked in which order, what each says, and a trained model from trace to server."""

import json
import math
import random
import statistics
from dataclasses import replace

import pytest

from segue.base.errors import InvalidRequest
from segue.cli import main
from segue.policies import Adaptive, Call, ContextServe, Continuum, Pressure, Returned, TurnEnd, TurnView
from segue.policies.evaluate import Recorded
from segue.policies.forecasts import Forecast, Posterior, Posteriors
from segue.policies.training import train
from segue.policies.trees import Tree, Trees
from segue.toolcalls.features import FEATURES, features_of

FULL = Pressure(1000, 0, 300, num_waiting=5, num_running=8, seconds_per_token=0.002, queue_seconds=1.0)


def end_of(call):
    return TurnEnd(TurnView(1, "j", 10.0, 400, 500, 499, 0, job_arrived_at=5.0, num_turns=2), 32, call)


def bash(key, command=""):
    return Call("bash", key, None, command or key)


def taught(policy, call, *times):
    for seconds in times:
        policy.observe(Returned("j", call, seconds))
    return policy


def decided(policy, call):
    made = policy.at_turn_end(end_of(call), FULL, 0.0)
    return made.keep_seconds, made.why


def says(seconds, sigma=0.1):
    return Trees(math.log(seconds), sigma, ())


def test_rules_come_first_whatever_was_seen():
    policy = taught(ContextServe(says(60.0)), bash("ls"), *[50.0] * 20)
    taught(policy, bash("pytest"), *[0.1] * 20)
    assert decided(policy, bash("ls")) == (3.0, "fast: rule")
    assert decided(policy, bash("pytest")) == (0.0, "slow: rule")


def test_then_what_was_seen_of_the_command():
    randomly = random.Random(1)
    policy = taught(ContextServe(says(60.0)), bash("mytool"), *[randomly.lognormvariate(-2, 0.3) for _ in range(50)])
    taught(policy, bash("mybuild"), *[randomly.lognormvariate(4, 0.3) for _ in range(50)])
    seconds, why = decided(policy, bash("mytool"))
    assert why == "fast: seen" and 0.15 < seconds < 0.5, "about what 95 % of its calls take"
    assert decided(policy, bash("mybuild")) == (0.0, "slow: seen")


def test_then_what_it_looks_like_and_without_a_model_that_is_passed_over():
    fresh = bash("mytool")
    assert decided(ContextServe(says(0.1)), fresh)[1] == "fast: trees"
    assert decided(ContextServe(says(60.0)), fresh) == (0.0, "slow: trees")
    for uncertain in (ContextServe(), ContextServe(says(2.0, sigma=2.0))):
        assert decided(uncertain, fresh) == decided(Continuum(), fresh)
    assert decided(ContextServe(says(0.1)), None) == decided(Continuum(), None), "no tool was found"


def test_a_command_that_is_now_fast_and_now_slow_is_left_to_continuum():
    policy = taught(ContextServe(), bash("odd"), *[0.1, 40.0] * 60)
    continuum = taught(Continuum(), bash("odd"), *[0.1, 40.0] * 60)
    assert decided(policy, bash("odd")) == decided(continuum, bash("odd"))


def test_little_that_was_seen_is_tried_both_ways_and_much_is_not():
    """Thompson: with few calls around the border the draws differ; with many of one kind they agree."""
    few, many = Posteriors(), Posteriors()
    for seconds in (0.8, 1.5, 0.9, 3.0, 1.2):
        few.learn(bash("x"), seconds)
    for _ in range(150):
        many.learn(bash("x"), 0.1)
    drawn = [few.draw(bash("x")).keep_seconds() for _ in range(200)]
    assert {seconds is None for seconds in drawn} == {True, False}
    assert all(0 < many.draw(bash("x")).keep_seconds() < 0.5 for _ in range(200))
    assert few.draw(bash("y")) is None


def test_the_posterior_is_that_of_the_textbook():
    """Ten values at once, by the closed form, and one by one."""
    values = [random.Random(3).gauss(1.5, 0.7) for _ in range(10)]
    posterior = Posterior()
    for value in values:
        posterior.add(value)
    n, mean, prior = len(values), statistics.fmean(values), Posterior()
    squares = sum((value - mean) ** 2 for value in values)
    assert posterior.weight == prior.weight + n and posterior.shape == prior.shape + n / 2
    assert posterior.mean == pytest.approx((prior.weight * prior.mean + n * mean) / (prior.weight + n))
    between = prior.weight * n * (mean - prior.mean) ** 2 / (2 * (prior.weight + n))
    assert posterior.scale == pytest.approx(prior.scale + squares / 2 + between)
    draws = [posterior.draw(random.Random(seed)) for seed in range(4000)]
    assert statistics.fmean(draw.mean for draw in draws) == pytest.approx(posterior.mean, abs=0.05)
    variance = statistics.fmean(draw.sigma**2 for draw in draws)
    assert variance == pytest.approx(posterior.scale / (posterior.shape - 1), rel=0.1)


def test_a_forecast_is_log_normal():
    forecast = Forecast(math.log(2.0), 1.0)
    assert forecast.p_within(2.0) == pytest.approx(0.5)
    assert forecast.p_within(2.0 * math.e) == pytest.approx(0.8413, abs=1e-3)
    assert Forecast(50.0, 1.0).keep_seconds() == 0.0 and Forecast(-3.0, 0.1).keep_seconds() == pytest.approx(
        0.0587, abs=1e-3
    )


def test_it_learns_bounded_and_over_restarts():
    policy = ContextServe()
    for number in range(5000):
        taught(policy, bash(f"c{number}"), 0.1)
    taught(policy, bash("mine"), *[0.1] * 30, math.inf, 0.0, -1.0)
    data = json.loads(json.dumps(policy.to_json()))
    assert len(data["commands"]) == 4096
    again = ContextServe()
    again.restore(data)
    assert decided(again, bash("mine"))[1] == "fast: seen"
    for broken in (
        {},
        {**data, "commands": []},
        {**data, "commands": {"x": [1, 2]}},
        {**data, "commands": {"x": [0, 0, 0, 0]}},
    ):
        with pytest.raises(ValueError):
            again.restore(broken)
    assert decided(again, bash("mine"))[1] == "fast: seen", "what was not taken changed nothing"


# ---- trees


def made_up(num_runs=20):
    """Commands with a pipe are slow, those with an option take a little longer."""
    randomly = random.Random(5)
    for run in range(num_runs):
        for _ in range(40):
            command = "tool" + randomly.choice(["", " -x", " -x -y"]) + randomly.choice(["", " | other"])
            seconds = (20.0 if "|" in command else 0.2) * (1 + command.count("-")) * randomly.lognormvariate(0, 0.2)
            yield Recorded(str(run), Call("bash", "tool", str(run), command), seconds)


def test_training_finds_what_there_is_to_find_and_our_trees_say_what_xgboosts_do():
    xgboost = pytest.importorskip("xgboost")
    records = list(made_up())
    trained = train(records)
    assert trained.fast[0] + trained.slow[0] > 0.95 * len(records)
    assert trained.fast[1] == trained.fast[0] and trained.slow[1] == trained.slow[0]
    assert trained.trees.sigma == pytest.approx(0.2, abs=0.1)
    quick, slow = (trained.trees.forecast(bash("tool", command)) for command in ("tool -x", "tool -x | other"))
    assert math.exp(quick.mean) == pytest.approx(0.4, rel=0.2) and math.exp(slow.mean) == pytest.approx(40.0, rel=0.2)
    assert train(records).trees == trained.trees, "the same calls give the same trees"
    rows = [features_of(record.call.tool, record.call.key, record.call.command) for record in records]
    targets = [math.log(record.seconds) for record in records]
    base = statistics.fmean(targets)
    data = xgboost.DMatrix(rows, targets, feature_names=list(FEATURES))
    booster = xgboost.train({"max_depth": 4, "base_score": base, "nthread": 1}, data, 20)
    from segue.policies.training import _tree

    ours = [_tree(json.loads(dump)) for dump in booster.get_dump(dump_format="json")]
    for row, theirs in zip(rows, booster.predict(data), strict=True):
        assert base + sum(tree(row) for tree in ours) == pytest.approx(theirs, abs=1e-4)


def test_too_few_runs_are_refused():
    with pytest.raises(InvalidRequest, match="runs"):
        train(list(made_up(3)))


def test_from_a_trace_to_a_file_that_only_context_serve_takes(tmp_path, capsys):
    pytest.importorskip("xgboost")
    lines = [f"{record.run},bash,{record.seconds},{record.call.command}" for record in made_up()]
    (tmp_path / "t.csv").write_text("\n".join(["run,tool,dur,cmd", *lines]))
    model = tmp_path / "new" / "model.json"
    assert main(["policies", "train", "--trace", str(tmp_path / "t.csv"), "--out", str(model)]) == 0
    assert "of them rightly" in capsys.readouterr().out
    policy = ContextServe()
    policy.use_model(model)
    assert decided(policy, bash("tool", "tool | other")) == (0.0, "slow: trees")
    assert Trees.from_json(Trees.load(model).to_json()) == Trees.load(model)
    with pytest.raises(InvalidRequest, match="adaptive"):
        Adaptive().use_model(model)
    assert main(["serve", "tiny", "--policy", "fcfs", "--policy-model", str(model)]) == 2
    assert "uses none" in capsys.readouterr().err
    assert main(["policies", "train", "--trace", str(tmp_path / "t.csv"), "--out", "/proc/no/model.json"]) == 2


LEAF = [-1, 0.5, 0, 0]


@pytest.mark.parametrize(
    "tree",
    [
        [], None, [[-1, 0.5, 0]], [[-1, "x", 0, 0]], [[-1, math.inf, 0, 0]], [[25, 1.0, 1, 2], LEAF, LEAF],
        [[0, 1.0, 0, 1], LEAF], [[0, 1.0, 1, 3], LEAF, LEAF], [[0, 1.0, 1, 2], [0, 1.0, 0, 2], LEAF], [[-2, 1.0, 1, 1], LEAF],
        [[True, 1.0, 1, 2], LEAF, LEAF],
    ],
)  # fmt: skip
def test_a_tree_that_would_not_end_well_is_refused(tree):
    with pytest.raises(ValueError):
        Tree.from_json(tree)


def test_a_file_that_is_no_model_is_refused_by_name(tmp_path):
    good = says(1.0).to_json()
    wrong = [b"", b"[]", b"\xff", b"[" * 5000]
    changes = [
        {"version": 1},
        {"kind": "x"},
        {"features": []},
        {"sigma": 0.0},
        {"base": "1"},
        {"trees": [[]]},
        {"trees": 1},
    ]
    for data in [*wrong, *(json.dumps({**good, **change}).encode() for change in changes)]:
        (tmp_path / "m").write_bytes(data)
        with pytest.raises(InvalidRequest, match="policy_model"):
            Trees.load(tmp_path / "m")
    with pytest.raises(InvalidRequest, match="policy_model"):
        Trees.load(tmp_path / "absent")
    assert replace(says(1.0), sigma=2.0) == Trees.from_json({**good, "sigma": 2.0})
