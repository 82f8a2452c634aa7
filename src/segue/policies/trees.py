"""Gradient-boosted trees over a command's features, read from a file of our own and evaluated here: serving needs no library.

`segue policies train` writes the file (`training.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.base.errors import InvalidRequest
from segue.policies.durations import Call
from segue.policies.forecasts import Forecast
from segue.toolcalls.features import FEATURES, features_of

KIND, VERSION = "segue command durations", 2
_MOST_BYTES = 16 << 20
_MOST_TREES, _MOST_NODES = 1000, 4096


Node = tuple[int, float, int, int]
"""(feature, threshold, left, right): on to node `left` if the feature is below the threshold, else to `right`, both of which
come after this one. In a leaf the feature is -1 and the threshold its value."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The first node is the root."""

    nodes: Sequence[Node]

    def __call__(self, features: Sequence[float]) -> float:
        nodes = self.nodes
        feature, threshold, left, right = nodes[0]
        while feature >= 0:
            feature, threshold, left, right = nodes[left if features[feature] < threshold else right]
        return threshold

    def to_json(self) -> list[list[float]]:
        return [list(node) for node in self.nodes]

    @classmethod
    def from_json(cls, data: Any) -> Tree:
        """Raises ValueError if a walk through it could leave it, or never end."""
        if not isinstance(data, list) or not 0 < len(data) <= _MOST_NODES:
            raise ValueError("not a tree")
        for at, row in enumerate(data):
            if not isinstance(row, list) or [type(value) for value in row] != [int, float, int, int]:
                raise ValueError(f"not a node: {row!r:.60}")
            feature, threshold, left, right = row
            is_inner = 0 <= feature < len(FEATURES) and at < left < len(data) and at < right < len(data)
            if not (is_inner or feature == -1) or not math.isfinite(threshold):
                raise ValueError(f"a node that leads nowhere: {row!r:.60}")
        return cls(tuple((feature, threshold, left, right) for feature, threshold, left, right in data))


@dataclass(frozen=True, slots=True)
class Trees:
    """The mean of a call's log seconds is `base` and what the trees add; `sigma` is how far off that was on runs it had not
    seen."""

    base: float
    sigma: float
    trees: Sequence[Tree]

    def forecast(self, call: Call) -> Forecast:
        features = features_of(call.tool, call.key, call.command)
        return Forecast(self.base + sum([tree(features) for tree in self.trees]), self.sigma)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "version": VERSION,
            "features": list(FEATURES),
            "base": self.base,
            "sigma": self.sigma,
            "trees": [tree.to_json() for tree in self.trees],
        }

    @classmethod
    def from_json(cls, data: Any) -> Trees:
        if not isinstance(data, Mapping) or data.get("kind") != KIND or data.get("version") != VERSION:
            raise ValueError(f"it is not a model of {KIND}, version {VERSION}")
        if data.get("features") != list(FEATURES):
            raise ValueError("it was trained on other features: train it again")
        base, sigma, trees = data.get("base"), data.get("sigma"), data.get("trees")
        if not isinstance(base, float) or not isinstance(sigma, float) or not (abs(base) < 100 and 0 < sigma < 100):
            raise ValueError("its base or sigma is no such number")
        if not isinstance(trees, list) or len(trees) > _MOST_TREES:
            raise ValueError(f"it must have a list of at most {_MOST_TREES} trees")
        return cls(base, sigma, tuple(Tree.from_json(tree) for tree in trees))

    @classmethod
    def load(cls, path: Path) -> Trees:
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise ValueError("it is too large")
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidRequest("policy_model", f"{path} cannot be used: {error}") from error
