"""Trains the trees of `context_serve` on recorded tool calls. Needs xgboost: `pip install 'segue[predictors]'`."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from segue.base.errors import InvalidRequest
from segue.policies.evaluate import Recorded
from segue.policies.forecasts import FAST_SECONDS, Forecast, log_seconds
from segue.policies.trees import Node, Tree, Trees
from segue.toolcalls.features import FEATURES, features_of

NUM_TREES = 20  # each tree is half a microsecond of every decision that asks them
_SETTINGS = {
    "objective": "reg:squarederror",
    "max_depth": 4,
    "eta": 0.4,
    "subsample": 0.8,
    "min_child_weight": 8,
    "nthread": 1,  # the same trees from the same calls
}
_FOLDS = 5


@dataclass(frozen=True, slots=True)
class Trained:
    """`fast`, `slow`: of calls of runs it had not seen, how many it called so, and how many of them were."""

    trees: Trees
    num_calls: int
    num_runs: int
    fast: tuple[int, int]
    slow: tuple[int, int]


def train(records: Sequence[Recorded], seed: int = 0) -> Trained:
    """Each fifth of the runs is judged by trees that have not seen it; the model is of all."""
    runs = sorted({record.run for record in records})
    if len(runs) < _FOLDS:
        raise InvalidRequest("trace", f"{len(runs)} runs are too few to learn from: at least {_FOLDS} are needed")
    random.Random(seed).shuffle(runs)
    fold = {run: number % _FOLDS for number, run in enumerate(runs)}
    rows = [features_of(record.call.tool, record.call.key, record.call.command) for record in records]
    targets = [log_seconds(record.seconds) for record in records]
    errors = [0.0] * len(records)
    for held_out in range(_FOLDS):
        learned = [at for at, record in enumerate(records) if fold[record.run] != held_out]
        trees = _fit([rows[at] for at in learned], [targets[at] for at in learned], seed)
        for at, record in enumerate(records):
            if fold[record.run] == held_out:
                errors[at] = targets[at] - trees.base - sum(tree(rows[at]) for tree in trees.trees)
    sigma = max(math.sqrt(sum(error**2 for error in errors) / len(errors)), 1e-3)
    fitted = _fit(rows, targets, seed)
    told = [Forecast(target - error, sigma).keep_seconds() for target, error in zip(targets, errors, strict=True)]
    are_fast = [record.seconds <= FAST_SECONDS for record in records]
    fast = [is_fast for is_fast, seconds in zip(are_fast, told, strict=True) if seconds]
    slow = [not is_fast for is_fast, seconds in zip(are_fast, told, strict=True) if seconds == 0.0]
    return Trained(
        Trees(fitted.base, sigma, fitted.trees), len(records), len(runs), (len(fast), sum(fast)), (len(slow), sum(slow))
    )


def _fit(rows: list[list[int]], targets: list[float], seed: int) -> Trees:
    try:
        import xgboost
    except ImportError as error:
        raise InvalidRequest("train", f"needs xgboost: pip install 'segue[predictors]' ({error})") from error
    base = sum(targets) / len(targets)
    data = xgboost.DMatrix(rows, targets, feature_names=list(FEATURES))
    booster = xgboost.train({**_SETTINGS, "seed": seed, "base_score": base}, data, NUM_TREES)
    return Trees(base, 1.0, tuple(_tree(json.loads(dump)) for dump in booster.get_dump(dump_format="json")))


def _tree(root: dict[str, Any]) -> Tree:
    """Nodes in the order in which they are met: children come after their parent."""
    rows: list[Node] = []
    nodes = [root]
    for node in nodes:  # grows while it is walked
        if "leaf" in node:
            rows.append((-1, float(node["leaf"]), 0, 0))
            continue
        rows.append((FEATURES.index(node["split"]), float(node["split_condition"]), len(nodes), len(nodes) + 1))
        children = {child["nodeid"]: child for child in node["children"]}
        nodes += [children[node["yes"]], children[node["no"]]]
    return Tree(tuple(rows))
