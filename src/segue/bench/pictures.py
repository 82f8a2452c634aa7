"""Pictures of single cells and runs, a panel for each policy: how long turns take, what blocks are for, when jobs wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, MaxNLocator, StrMethodFormatter

from segue.base.errors import InvalidRequest
from segue.bench.looks import Looks, Series, blend
from segue.bench.plots import BASE
from segue.bench.results import (
    Choice,
    Count,
    Result,
    TracedTurn,
    choose,
    first_seed,
    gpu_title,
    grouped,
    mean,
    note_of,
    title_of,
)
from segue.bench.sheet import BOTTOM, EDGE, FAINT, LEFT, QUIET, TOP, WIDTH, Key, columns_for, drawing, new_figure, place

STATES = {"running": "#44546a", "leased": "#c2527a", "cached": "#ccd5a4", "free": "#f4f4f4"}  # from the bottom
NUM_JOBS = 30
_LIGHT = 0.65  # of the way to white: a light shade


# Turns


@drawing
def turns(results: Sequence[Result], choice: Choice | None = None) -> dict[str, Figure]:
    """Bars of one policy stand together, all panels have one scale, and an outline shows first come, first served."""
    timed = [each for each in results if each.turn_ms]
    if not timed:
        raise InvalidRequest("results", "have no latencies of turns")
    chosen = choose(timed, choice)
    looks = Looks(each.series for each in results)
    seconds = turn_seconds(chosen)
    shown = [series for series in looks.ordered if series in seconds]
    note = f"{chosen[0].jps:g} jobs a second; {note_of(chosen)}"
    if BASE in seconds and len(shown) > 1:
        note += "; outlines: fcfs without tiers"
    figure, panels = _columns(f"Turns on {title_of(chosen)}", note, [looks.label(series) for series in shown])
    top = max(max(each.values()) for each in seconds.values()) * 1.05
    for axes, series in zip(panels, shown, strict=True):
        _draw_turns(axes, seconds[series], looks, series)
        if series != BASE and BASE in seconds:
            _outline(axes, seconds[BASE])
        axes.set_ylim(0, top)
    return {f"turns-{chosen[0].gpu}-{chosen[0].jps:g}": figure}


def turn_seconds(results: Sequence[Result]) -> dict[Series, dict[int, float]]:
    """Latency of each turn from 1, means over seeds."""
    found: dict[Series, dict[int, float]] = {}
    for series, own in grouped(results, lambda each: each.series).items():
        numbers = sorted({turn for each in own for turn in each.turn_ms})
        found[series] = {
            turn: mean(each.turn_ms[turn] for each in own if turn in each.turn_ms) / 1e3 for turn in numbers
        }
    return found


def _draw_turns(axes: Axes, seconds: Mapping[int, float], looks: Looks, series: Series) -> None:
    colour, hatch = looks.colour(series), looks.hatch(series)
    axes.bar(list(seconds), list(seconds.values()), 0.75, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
    axes.set_title(looks.label(series), color=looks.dark(series))
    axes.xaxis.set_major_locator(FixedLocator(list(seconds)) if len(seconds) <= 8 else MaxNLocator(8, integer=True))
    axes.grid(visible=False, axis="x")


def _outline(axes: Axes, seconds: Mapping[int, float]) -> None:
    axes.bar(list(seconds), list(seconds.values()), 0.75, fill=False, edgecolor="#333333", linewidth=0.7)


def _columns(title: str, note: str, names: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """Up to four in a row; only those at the left and at the bottom have names on their axes."""
    count, between = len(names), 0.15
    columns = columns_for(names, 4, WIDTH - LEFT, 0.05)
    rows = -(-count // columns)
    high, wide = 2.4 if rows == 1 else 1.5, (WIDTH - LEFT - EDGE + between) / columns
    top, step = TOP + 0.2, high + 0.55
    figure = new_figure(top + rows * step - 0.55 + BOTTOM, title, note)
    panels = []
    for at in range(count):
        row, column = divmod(at, columns)
        axes = place(figure, LEFT + column * wide, top + row * step, wide - between, high)
        if at + columns >= count:
            axes.set_xlabel("turn")
        if column == 0:
            axes.set_ylabel("mean latency, s")
        else:
            axes.tick_params(left=False, labelleft=False)
        panels.append(axes)
    return figure, panels


# Blocks


@drawing
def blocks(counts: Sequence[Count], choice: Choice | None = None) -> dict[str, Figure]:
    """What blocks are for, over time."""
    chosen = first_seed(choose(counts, choice))
    looks = Looks(each.series for each in counts)
    runs = grouped(chosen, lambda each: each.series)
    total = max(each.running + each.leased + each.cached + each.free for each in chosen)
    key = Key.of([Patch(facecolor=colour, edgecolor=FAINT, lw=0.5) for colour in STATES.values()], list(STATES))
    title = f"What blocks are for on {gpu_title(chosen[0].gpu)}, {total:,} blocks"
    figure, panels = _rows(title, _which(chosen[0]), key, [1.15] * len(runs))
    end = max(each.at for each in chosen)
    for axes, series in zip(panels, (series for series in looks.ordered if series in runs), strict=True):
        own = runs[series]
        if any(after.at < before.at for before, after in pairwise(own)):
            raise _twice(series)
        levels = [[getattr(each, state) for each in own] for state in STATES]
        axes.stackplot([each.at for each in own], levels, colors=list(STATES.values()), step="post", lw=0)
        axes.set_title(looks.label(series), color=looks.dark(series))
        axes.set(xlim=(0, end or 1), ylim=(0, total), ylabel="blocks")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.yaxis.set_major_locator(FixedLocator([0, total // 2, total]))
        axes.grid(visible=False)
    return {"blocks": figure}


# Jobs


@drawing
def jobs(turns: Sequence[TracedTurn], choice: Choice | None = None, num_jobs: int = NUM_JOBS) -> dict[str, Figure]:
    """Each job is a row: it waits for a first token, is answered, and its tool runs."""
    chosen = first_seed(choose(turns, choice))
    looks = Looks(each.series for each in turns)
    runs = {series: first_jobs(own, num_jobs) for series, own in grouped(chosen, lambda each: each.series).items()}
    shown = [series for series in looks.ordered if series in runs]
    key = Key.of(
        [Patch(facecolor=blend(QUIET, "#ffffff", _LIGHT)), Patch(facecolor=QUIET), Line2D([], [], color=FAINT, lw=0.8)],
        ["waits for the first token", "is answered", "runs a tool"],
    )
    most = max(len(own) for own in runs.values())
    title = f"The first {most} jobs on {gpu_title(chosen[0].gpu)}"
    figure, panels = _rows(title, _which(chosen[0]), key, [max(len(runs[series]) * 0.06, 0.6) for series in shown])
    every = [turn for own in runs.values() for many in own.values() for turn in many]
    for axes, series in zip(panels, shown, strict=True):
        _draw_jobs(axes, list(runs[series].values()), looks.colour(series))
        axes.set_title(looks.label(series), color=looks.dark(series))
        axes.set_xlim(min(turn.asked_at for turn in every), max(turn.ended_at for turn in every))
    return {"jobs": figure}


def first_jobs(turns: Sequence[TracedTurn], num_jobs: int) -> dict[str, list[TracedTurn]]:
    """In the order in which they came, each with its turns in order."""
    by_job = grouped(sorted(turns, key=lambda each: (each.asked_at, each.job, each.turn)), lambda each: each.job)
    if len({(each.job, each.turn) for each in turns}) < len(turns):
        raise _twice(turns[0].series)
    return dict(list(by_job.items())[:num_jobs])


def _draw_jobs(axes: Axes, jobs: Sequence[Sequence[TracedTurn]], colour: str) -> None:
    rows = [row for row, turns in enumerate(jobs, 1) for _ in turns]
    every = [turn for turns in jobs for turn in turns]
    asked, first = [turn.asked_at for turn in every], [turn.first_token_at for turn in every]
    waits = [turn.first_token_at - turn.asked_at for turn in every]
    answers = [turn.ended_at - turn.first_token_at for turn in every]
    gaps = [(row, *pair) for row, turns in enumerate(jobs, 1) for pair in pairwise(turns)]
    if gaps:
        places, before, after = zip(*gaps, strict=True)
        axes.hlines(places, [turn.ended_at for turn in before], [turn.asked_at for turn in after], color=FAINT, lw=0.8)
    axes.barh(rows, waits, 0.8, asked, color=blend(colour, "#ffffff", _LIGHT), linewidth=0)
    axes.barh(rows, answers, 0.8, first, color=colour, linewidth=0)
    axes.set(ylim=(len(jobs) + 0.6, 0.4), ylabel="job")
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 5, 10], integer=True, min_n_ticks=1))
    axes.grid(visible=False, axis="y")


# Both


def _rows(title: str, note: str, key: Key, heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Panels below each other, with one axis of time."""
    at, between = TOP + key.height + 0.2, 0.32
    figure = new_figure(at + sum(heights) + between * (len(heights) - 1) + BOTTOM, title, note)
    key.put(figure, TOP - 0.05)
    panels = []
    for height in heights:
        panels.append(place(figure, LEFT, at, WIDTH - LEFT - EDGE, height))
        panels[-1].tick_params(labelbottom=len(panels) == len(heights))
        at += height + between
    panels[-1].set_xlabel("time, s")
    return figure, panels


def _which(each: Count | TracedTurn) -> str:
    return f"{each.jps:g} jobs a second, seed {each.seed}"


def _twice(series: Series) -> InvalidRequest:
    return InvalidRequest("results", f"have two runs with {series.policy} that look alike, and a picture is of one")
