"""All policies over many traces and devices: one table, so that anyone can see where a policy stands.

A policy's score on a cell is its mean job time as a share of fcfs's on the same jobs; its standing is the geometric mean over
the cells. The interval is a bootstrap: jobs are drawn again, the same ones for the policy and for fcfs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segue.base.errors import InvalidRequest

BASE = "fcfs"
_DRAWS = 1000
_LOW, _HIGH = 2.5, 97.5  # percentiles
CONTESTANTS = (
    "fcfs",
    "continuum-released",
    "continuum",
    "context_serve",
    "fixed-2s",
    "fixed-10s",
    "adaptive",
    "oracle",
    "fcfs+tiers",
    "continuum+tiers",
    "adaptive+tiers",
)


@dataclass(frozen=True, slots=True)
class Standing:
    """`share` of the base's job time; by cell too, with the seconds."""

    name: str
    share: float
    low: float
    high: float
    recompute_ratio: float
    by_cell: dict[str, float]


def label(record: dict[str, Any]) -> str:
    return f"{record['policy']}{'+tiers' if record['tiers'] else ''}"


def cell_name(record: dict[str, Any]) -> str:
    return f"{record['workload']} · {record['gpu']}" + (f" · {record['jps']:g}/s" if record.get("jps") else "")


def standings(records: Sequence[dict[str, Any]], seed: int = 0) -> list[Standing]:
    """The best first. Each needs the base's run on every cell that it has."""
    by_cell: dict[str, dict[str, dict[str, Any]]] = {}
    for record in records:
        by_cell.setdefault(f"{cell_name(record)} · seed {record['seed']}", {})[label(record)] = record
    missing = [cell for cell, runs in by_cell.items() if BASE not in runs]
    if missing:
        raise InvalidRequest("results", f"{BASE} was not run on {missing[0]}: all others are measured by it")
    names = dict.fromkeys(name for runs in by_cell.values() for name in runs)
    found = [_standing(name, by_cell, seed) for name in names]
    return sorted(found, key=lambda each: (each.share, each.name))


def _standing(name: str, by_cell: dict[str, dict[str, dict[str, Any]]], seed: int) -> Standing:
    shares, draws, ratios = {}, [], []
    for cell, runs in by_cell.items():
        if name not in runs:
            continue
        own, base = _durations(runs[name]), _durations(runs[BASE])
        if len(own) != len(base):
            raise InvalidRequest("results", f"{name} and {BASE} did not end the same jobs on {cell}")
        shares[cell] = float(own.mean() / base.mean())
        draws.append(_drawn(own, base, seed))
        ratios.append(float(runs[name]["recompute_ratio"]))
    together = np.exp(np.mean(np.log(np.stack(draws)), axis=0))
    low, high = np.percentile(together, [_LOW, _HIGH])
    share = float(np.exp(np.mean(np.log(list(shares.values())))))
    return Standing(name, share, float(low), float(high), float(np.mean(ratios)), shares)


def _durations(record: dict[str, Any]) -> NDArray[np.float64]:
    return np.asarray(record["job_durations"], dtype=np.float64)


def _drawn(own: NDArray[np.float64], base: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    chosen = np.random.default_rng(seed).integers(0, len(own), (_DRAWS, len(own)))
    shares: NDArray[np.float64] = own[chosen].mean(axis=1) / base[chosen].mean(axis=1)
    return shares
