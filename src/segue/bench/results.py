"""Results as figures need them: read from records, which may come from anywhere, and checked."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from segue.base.errors import InvalidRequest
from segue.bench.looks import Series, shorten
from segue.bench.records import read_lines
from segue.sim.hardware import HARDWARE

_SAME = ("workload", "model", "block_size", "arrivals")  # in all runs of a figure


class Result(NamedTuple):
    """A run."""

    series: Series
    gpu: str
    title: str  # of the GPU
    blocks: int | None
    setting: dict[str, str]  # what else was chosen, and must be the same for all that is compared
    jps: float
    seed: int
    mean_seconds: float  # of jobs
    p90_seconds: float
    turn_ms: dict[int, float]  # mean latency, by turn, from 1


class TracedTurn(NamedTuple):
    """A turn of a job: asked, answered from then on, and done; seconds."""

    series: Series
    gpu: str
    jps: float
    seed: int
    job: str
    turn: int
    asked_at: float
    first_token_at: float
    ended_at: float


class Count(NamedTuple):
    """Blocks by what they are for, at some second."""

    series: Series
    gpu: str
    jps: float
    seed: int
    at: float
    running: int
    leased: int
    cached: int
    free: int


class Choice(NamedTuple):
    """Which of the results; None: the first GPU, or the highest load it has."""

    gpu: str | None = None
    jps: float | None = None


class _Chosen(Protocol):
    @property
    def gpu(self) -> str: ...
    @property
    def jps(self) -> float: ...
    @property
    def seed(self) -> int: ...


Each = TypeVar("Each")
Some = TypeVar("Some", bound=_Chosen)


def read_results(paths: Iterable[Path], gpu: str | None = None) -> list[Result]:
    """Refuses what cannot be compared: lines must not join runs that differ in more than load."""
    results = _read(paths, "run", _result)
    if gpu is not None:
        results = _of_gpu(results, gpu)
    for name in _SAME:
        _check_alike({each.setting.get(name, "") for each in results}, name)
    for gpu, own in grouped(results, lambda each: each.gpu).items():
        _check_alike({str(each.blocks) for each in own}, f"blocks of {gpu}")
        _check_alike({each.setting.get("coefficients", "") for each in own}, f"coefficients of {gpu}")
    return results


def read_turns(paths: Iterable[Path]) -> list[TracedTurn]:
    return _read(paths, "turn", _turn)


def read_counts(paths: Iterable[Path]) -> list[Count]:
    return _read(paths, "blocks", _count)


def choose(every: Sequence[Some], choice: Choice | None = None) -> list[Some]:
    """Those of one GPU and one load."""
    choice = choice or Choice()
    some = _of_gpu(every, every[0].gpu if choice.gpu is None else choice.gpu)
    loads = sorted({each.jps for each in some})
    jps = loads[-1] if choice.jps is None else choice.jps
    if jps not in loads:
        has = ", ".join(f"{load:g}" for load in loads)
        raise InvalidRequest("jps", f"nothing at {jps:g} jobs a second on {some[0].gpu}: there is {has}")
    return [each for each in some if each.jps == jps]


def first_seed(every: Sequence[Some]) -> list[Some]:
    """One run can be drawn, not a mean of some."""
    seed = min(each.seed for each in every)
    return [each for each in every if each.seed == seed]


def grouped(every: Iterable[Each], key: Callable[[Each], Any]) -> dict[Any, list[Each]]:
    """In the order in which keys are met."""
    groups: dict[Any, list[Each]] = defaultdict(list)
    for each in every:
        groups[key(each)].append(each)
    return dict(groups)


def mean(values: Iterable[float]) -> float:
    many = list(values)
    return math.fsum(many) / len(many)


def gpu_title(gpu: str) -> str:
    return HARDWARE[gpu].title if gpu in HARDWARE else shorten(gpu)


def title_of(results: Sequence[Result]) -> str:
    """A GPU and how many blocks it has."""
    blocks = results[0].blocks
    return results[0].title + (f", {blocks:,} blocks" if blocks is not None else "")


def note_of(results: Sequence[Result]) -> str:
    """What one has to know of the numbers."""
    cells = grouped(results, lambda each: (each.gpu, each.series, each.jps)).values()
    counts = sorted({len({each.seed for each in cell}) for cell in cells})
    seeds = (
        "one seed"
        if counts == [1]
        else f"means of {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds"
    )
    return "; ".join(
        [*(shorten(results[0].setting[name]) for name in ("workload", "model") if name in results[0].setting), seeds]
    )


# Records


def _read(paths: Iterable[Path], kind: str, parse: Callable[[Mapping[str, Any]], Each]) -> list[Each]:
    found = []
    for record in read_lines(list(paths), kind):
        try:
            found.append(parse(record))
        except KeyError as error:
            raise InvalidRequest("results", f"have a {kind!r} record without {error}") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidRequest("results", f"have a {kind!r} record with a wrong value: {error}") from error
    return found


def _result(record: Mapping[str, Any]) -> Result:
    gpu = str(record["gpu"])
    blocks = record.get("blocks")
    return Result(
        _series(record),
        gpu,
        shorten(str(record.get("gpu_title") or gpu_title(gpu))),
        None if blocks is None else int(blocks),
        {name: str(record[name]) for name in (*_SAME, "coefficients") if record.get(name) is not None},
        _number(record["jps"]),
        int(record.get("seed", 0)),
        _number(record["avg_duration_s"]),
        _number(record["p90_duration_s"]),
        {int(turn): _number(value) for turn, value in record.get("per_turn_avg_latency_ms", {}).items()},
    )


def _turn(record: Mapping[str, Any]) -> TracedTurn:
    asked, first, ended = (_number(record[name]) for name in ("asked_at", "first_token_at", "ended_at"))
    return TracedTurn(*_which(record), str(record["job"]), int(record["turn"]), asked, first, ended)


def _count(record: Mapping[str, Any]) -> Count:
    running, leased, cached, free = (int(record[name]) for name in ("running", "leased", "cached", "free"))
    return Count(*_which(record), _number(record["at"]), running, leased, cached, free)


def _which(record: Mapping[str, Any]) -> tuple[Series, str, float, int]:
    return _series(record), str(record["gpu"]), _number(record["jps"]), int(record.get("seed", 0))


def _series(record: Mapping[str, Any]) -> Series:
    return Series(str(record["policy"]), tuple(str(tier) for tier in record.get("tiers") or ()))


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is no finite number")
    return number


def _of_gpu(every: Sequence[Some], gpu: str) -> list[Some]:
    some = [each for each in every if each.gpu == gpu]
    if not some:
        has = ", ".join(dict.fromkeys(each.gpu for each in every))
        raise InvalidRequest("gpu", f"nothing on {gpu!r:.40}: there is {has}")
    return some


def _check_alike(values: set[str], what: str) -> None:
    if len(values) > 1:
        found = " and ".join(f"{value or 'none'!r:.40}" for value in sorted(values))
        raise InvalidRequest("results", f"differ in {what}, which no figure shows: {found}")
