"""Results as JSON lines: one `run` for each cell of a sweep, with everything needed to make it again; and, where asked for, its
turns and what blocks were for over time."""

from __future__ import annotations

import json
import platform
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from segue import __version__
from segue.base.errors import InvalidRequest
from segue.bench.measures import percentile
from segue.bench.play import Played
from segue.bench.workload import Workload

_SAME = ("policy", "tiers", "jps", "gpu", "seed")  # of a run, in the records of its turns


def run_record(workload: Workload, played: Played, settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` has what was chosen: policy, jps, gpu, blocks, tiers, seed and so on. Names of the seed's schema where it has
    one; seconds are the workload's own, so the same settings give the same bytes."""
    if not played.durations:
        raise InvalidRequest("workload", f"no job of {workload.name} ended: {next(iter(played.failed.values()), '')}")
    durations = [played.durations[job.id] for job in workload.jobs if job.id in played.durations]
    first = [turn.first_token_at - turn.asked_at for turn in played.turns]
    by_turn = defaultdict(list)
    for turn in played.turns:
        by_turn[turn.turn + 1].append(turn)
    output = sum(turn.num_output for turn in played.turns)
    return {
        "kind": "run",
        "workload": workload.name,
        **settings,
        "jobs": len(durations),
        "failed_jobs": len(played.failed),
        "avg_duration_s": _round(sum(durations) / len(durations)),
        "p50_duration_s": _round(percentile(durations, 0.5)),
        "p90_duration_s": _round(percentile(durations, 0.9)),
        "p95_duration_s": _round(percentile(durations, 0.95)),
        "p99_duration_s": _round(percentile(durations, 0.99)),
        "ttft_avg_s": _round(sum(first) / len(first)),
        "ttft_p50_s": _round(percentile(first, 0.5)),
        "ttft_p99_s": _round(percentile(first, 0.99)),
        "jobs_per_second": _round(len(durations) / played.wall_seconds) if played.wall_seconds else 0.0,
        "output_tokens_per_second": _round(output / played.wall_seconds) if played.wall_seconds else 0.0,
        "computed_tokens": played.num_computed,
        "recompute_ratio": _round(played.num_computed / max(played.num_computed - played.num_recomputed, 1)),
        "preemptions": played.num_preemptions,
        "wasted_pin_block_seconds": _round(played.wasted_pin_block_seconds),
        "used_pin_block_seconds": _round(played.used_pin_block_seconds),
        "per_turn_avg_latency_ms": {
            str(turn): _round(1e3 * sum(each.seconds for each in many) / len(many))
            for turn, many in sorted(by_turn.items())
        },
        "per_turn_avg_prompt_tokens": {
            str(turn): _round(sum(each.num_prompt for each in many) / len(many))
            for turn, many in sorted(by_turn.items())
        },
        "job_durations": [_round(duration) for duration in durations],
    }


def trace_records(played: Played, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A `turn` for each request, and `blocks` for each count of them; for pictures of one run."""
    same: dict[str, Any] = {name: settings[name] for name in _SAME if name in settings}
    for kind, many in (("turn", played.turns), ("blocks", played.occupancy)):
        for each in many:
            record = {"kind": kind, **same}
            for name, value in each._asdict().items():
                record[name] = _round(value) if isinstance(value, float) else value
            yield record


def provenance() -> dict[str, Any]:
    """What a result was made with."""
    packages = {"segue": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "vllm"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"versions": packages, "commit": _commit()}


def _commit() -> str | None:
    """Of the checkout that this package lies in, if it does."""
    folder = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise InvalidRequest("out", f"{path} cannot be written: {error}") from error


def read_lines(paths: Iterable[Path], kind: str = "run") -> list[dict[str, Any]]:
    """All records of this kind in files, or in the `.jsonl` files of folders."""
    found = []
    for path in paths:
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        for file in files:
            found += [record for record in _parsed(file) if record.get("kind") == kind]
    if not found:
        raise InvalidRequest("results", f"no {kind!r} records in {', '.join(str(path) for path in paths)}")
    return found


def _parsed(file: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest("results", f"{file} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InvalidRequest("results", f"line {number} of {file} is no JSON: {error}") from error
        if isinstance(record, dict):
            yield record


def _round(value: float) -> float:
    return round(value, 6)
