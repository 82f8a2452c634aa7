"""Figures of many runs: how long jobs take as more of them come, and what that is against first come, first served."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from segue.base.errors import InvalidRequest
from segue.bench.looks import Looks, Series
from segue.bench.results import Result, grouped, mean, note_of, title_of
from segue.bench.sheet import (
    BOTTOM,
    EDGE,
    LABEL_GAP,
    LEFT,
    TOP,
    WIDTH,
    End,
    Key,
    columns_for,
    drawing,
    label_ends,
    line_inches,
    new_figure,
    place,
    scale_y,
    text_inches,
    tick_loads,
)

BASE = Series("fcfs")
_NUMBERS = 0.45  # inches of its numbers alone
_JPS = "jobs a second"
_P90 = "thin dashed lines: 90th percentile"

_LEAST_SPAN = 10.0  # of an axis of percents


class Point(NamedTuple):
    jps: float
    mean: float  # seconds
    p90: float


class Gain(NamedTuple):
    jps: float
    percent: float


@drawing
def load(results: Sequence[Result]) -> dict[str, Figure]:
    """A figure for each GPU."""
    looks = Looks(each.series for each in results)
    return {f"load-{gpu}": _load(own, looks) for gpu, own in grouped(results, lambda each: each.gpu).items()}


def _load(results: Sequence[Result], looks: Looks) -> Figure:
    points = load_points(results)
    height = max(3.2, len(points) * line_inches() + 0.2)
    figure = new_figure(TOP + height + BOTTOM, f"Job time on {title_of(results)}", f"{note_of(results)}; {_P90}")
    axes = place(figure, LEFT, TOP, WIDTH - LEFT - _label_inches(points, looks), height)
    _draw_load(axes, points, looks)
    axes.set_ylabel(scale_y([axes], [_values(points)], "mean job time, s"))
    axes.set_xlabel(_JPS)
    _label(axes, {series: (many[-1].jps, many[-1].mean) for series, many in points.items()}, looks)
    return figure


@drawing
def panels(results: Sequence[Result]) -> dict[str, Figure]:
    """The same for all GPUs, side by side, with one legend."""
    looks = Looks(each.series for each in results)
    gpus = {gpu: load_points(own) for gpu, own in grouped(results, lambda each: each.gpu).items()}
    grid = _Grid(results, looks, list(gpus), in_legend=looks.ordered)
    figure, axes = grid.draw("Job time by load", f"{note_of(results)}; {_P90}")
    for one, points in zip(axes, gpus.values(), strict=True):
        _draw_load(one, points, looks)
    name = scale_y(axes, [_values(points) for points in gpus.values()], "mean job time, s")
    for one in axes[:: grid.columns]:
        one.set_ylabel(name)
    return {"panels": figure}


@drawing
def gain(results: Sequence[Result]) -> dict[str, Figure]:
    """What jobs are spared against first come, first served without tiers; GPUs without that are left out. Lines of one or two
    GPUs have their labels; more have a legend."""
    gpus = {gpu: gain_points(own) for gpu, own in grouped(results, lambda each: each.gpu).items()}
    gpus = {gpu: points for gpu, points in gpus.items() if points}
    if not gpus:
        raise InvalidRequest("results", "have no load that was run with fcfs without tiers and with something else")
    results = [each for each in results if each.gpu in gpus]
    looks = Looks(each.series for each in results)
    shown = [series for series in looks.ordered if any(series in points for points in gpus.values())]
    grid = _Grid(results, looks, list(gpus), in_legend=shown if len(gpus) > 2 else ())
    figure, axes = grid.draw("Job time saved against fcfs without tiers", note_of(results))
    for one, points in zip(axes, gpus.values(), strict=True):
        _draw_gain(one, points, looks)
        if not grid.in_legend:
            _label(one, {series: many[-1] for series, many in points.items()}, looks)
    for one in axes[:: grid.columns]:
        one.set_ylabel("mean job time saved, %")
    return {"gain": figure}


# Numbers


def load_points(results: Sequence[Result]) -> dict[Series, list[Point]]:
    """By series and load, means over seeds."""
    points: dict[Series, list[Point]] = {}
    for series, own in grouped(results, lambda each: each.series).items():
        points[series] = [
            Point(jps, mean(each.mean_seconds for each in cell), mean(each.p90_seconds for each in cell))
            for jps, cell in sorted(grouped(own, lambda each: each.jps).items())
        ]
    return points


def gain_points(results: Sequence[Result]) -> dict[Series, list[Gain]]:
    """Over the seeds that both have: seeds differ more than policies do."""
    cells = grouped(results, lambda each: (each.series, each.jps))
    points: dict[Series, list[Gain]] = {}
    for (series, jps), cell in sorted(cells.items()):
        base = cells.get((BASE, jps), [])
        seeds = {each.seed for each in base} & {each.seed for each in cell}
        if series == BASE or not seeds:
            continue
        before, after = (mean(each.mean_seconds for each in some if each.seed in seeds) for some in (base, cell))
        points.setdefault(series, []).append(Gain(jps, (before - after) / before * 100))
    return points


def _values(points: Mapping[Series, Sequence[Point]]) -> list[float]:
    return [value for many in points.values() for point in many for value in point[1:]]


# Lines and places


def _draw_load(axes: Axes, points: Mapping[Series, Sequence[Point]], looks: Looks) -> None:
    for series in looks.ordered:
        if series not in points:
            continue
        loads, means, p90s = zip(*points[series], strict=True)
        alone = "_" if len(loads) == 1 else ""
        axes.plot(loads, p90s, color=looks.colour(series), lw=0.8, ls=(0, (2, 2)), alpha=0.7, marker=alone, zorder=1.5)
        axes.plot(loads, means, **looks.line(series))
    _tick(axes, points)


def _draw_gain(axes: Axes, points: Mapping[Series, Sequence[Gain]], looks: Looks) -> None:
    axes.axhline(0, color="#333333", lw=1)
    for series in looks.ordered:
        if series in points:
            axes.plot(*zip(*points[series], strict=True), **looks.line(series))
    low, high = axes.get_ylim()
    if high - low < _LEAST_SPAN:  # else nothing at all would look like something
        axes.set_ylim(min(low, -_LEAST_SPAN / 2), max(high, _LEAST_SPAN / 2))
    _tick(axes, points)


def _tick(axes: Axes, points: Mapping[Series, Sequence[Point | Gain]]) -> None:
    axes.margins(x=0.06)
    tick_loads(axes, sorted({point.jps for many in points.values() for point in many}))


def _label(axes: Axes, ends: Mapping[Series, tuple[float, float]], looks: Looks) -> None:
    named = [series for series in looks.ordered if series in ends]
    label_ends(axes, [End(*ends[series], looks.label(series), looks.dark(series)) for series in named])


def _label_inches(series: Iterable[Series], looks: Looks) -> float:
    """What labels need right of axes."""
    return text_inches(looks.label(each) for each in series) + LABEL_GAP + EDGE


class _Grid:
    """A place for each GPU, up to three in a row. There is a legend for all, or room for labels at each."""

    def __init__(
        self, results: Sequence[Result], looks: Looks, gpus: Sequence[str], in_legend: Sequence[Series]
    ) -> None:
        self._titles = [title_of([each for each in results if each.gpu == gpu]) for gpu in gpus]
        self._looks = looks
        self._left = LEFT - _NUMBERS
        self.in_legend = in_legend
        self.columns = columns_for(self._titles, 3, WIDTH - self._left, _NUMBERS)

    def draw(self, title: str, note: str) -> tuple[Figure, list[Axes]]:
        looks, key, top = self._looks, None, TOP + 0.2
        if self.in_legend:
            handles = [Line2D([], [], **looks.line(series)) for series in self.in_legend]
            key = Key.of(handles, [looks.label(series) for series in self.in_legend])
            top += key.height
        rows = -(-len(self._titles) // self.columns)
        high = max(2.6 if rows == 1 else 1.9, 0 if key else len(looks.ordered) * line_inches())
        step = high + BOTTOM + 0.25
        figure = new_figure(top + rows * step - 0.25, title, note)
        if key is not None:
            key.put(figure, TOP - 0.05)
        wide = (WIDTH - self._left) / self.columns
        right = EDGE if key else _label_inches(looks.ordered, looks)
        axes = []
        for at, name in enumerate(self._titles):
            row, column = divmod(at, self.columns)
            left = self._left + column * wide + _NUMBERS
            axes.append(place(figure, left, top + row * step, wide - _NUMBERS - right, high))
            axes[-1].set_title(name)
            axes[-1].set_xlabel(_JPS)
        return figure, axes
