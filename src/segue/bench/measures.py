"""How good recommendations are, and how long things take."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import log2


def recall(ranking: Sequence[str | None], targets: Collection[str], k: int) -> float:
    """The share of the targets among the first k."""
    return len(set(targets).intersection(ranking[:k])) / len(targets)


def hit(ranking: Sequence[str | None], targets: Collection[str], k: int) -> float:
    """1 if any target is among the first k: its mean over users is pass@k."""
    return float(any(item in targets for item in ranking[:k]))


def ndcg(ranking: Sequence[str | None], targets: Collection[str], k: int) -> float:
    """Each target found counts 1 / log2(1 + rank), as a share of what the best ranking would have."""
    gained = sum(1 / log2(rank + 1) for rank, item in enumerate(ranking[:k], 1) if item in targets)
    return gained / sum(1 / log2(rank + 1) for rank in range(1, min(len(targets), k) + 1))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many are no larger than; 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
