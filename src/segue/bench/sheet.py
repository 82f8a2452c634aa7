"""What figures are drawn on: places in inches, axes, labels beside the lines they name, files that are the same again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from segue.base.errors import InvalidRequest

WIDTH = 8.0  # inches; 1200 pixels
DPI = 150
SMALL, NORMAL, LARGE = 7.5, 8.5, 11.0  # points
LABEL_GAP = 0.2  # inches from axes to the labels of their lines
EDGE, TOP = 0.15, 0.75  # inches: from the paper's edge to what is nearest; from its top to the first axes
LEFT, BOTTOM = 0.75, 0.55  # inches that an axis' numbers and name need
QUIET, FAINT = "#555555", "#b0b0b0"
STYLE: Any = {
    **{name: value for name, value in matplotlib.rcParamsDefault.items() if not name.startswith("backend")},
    "figure.dpi": DPI,
    "savefig.dpi": DPI,
    "font.size": NORMAL,
    "axes.titlesize": NORMAL,
    "axes.titlelocation": "left",
    "axes.labelcolor": QUIET,
    "axes.edgecolor": "#888888",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "text.parse_math": False,  # a name is no formula
    "svg.hashsalt": "segue",
}
_NO_NOTES: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
FORMATS = tuple(_NO_NOTES)

drawing = matplotlib.rc_context(STYLE)  # as a decorator: figures do not depend on anyone's settings


class End(NamedTuple):
    """Where a line ends, in its axes' units, and what is to be written there."""

    x: float
    y: float
    text: str
    colour: str


def new_figure(height: float, title: str, note: str) -> Figure:
    """Axes have room from `TOP` down."""
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    head = figure.text(EDGE / WIDTH, 1 - EDGE / height, title, size=LARGE, weight="bold", va="top")
    below = figure.text(EDGE / WIDTH, 1 - (EDGE + 0.23) / height, note, size=NORMAL, color=QUIET, va="top")
    for text, size in ((head, LARGE), (below, NORMAL)):
        room = (WIDTH - 2 * EDGE) * DPI / text.get_window_extent().width
        text.set_fontsize(size * min(room, 1.0))
    return figure


def place(figure: Figure, left: float, top: float, width: float, height: float, **more: Any) -> Axes:
    """New axes, in inches from the figure's upper left corner."""
    whole = figure.get_figheight()
    return figure.add_axes((left / WIDTH, 1 - (top + height) / whole, width / WIDTH, height / whole), **more)


def text_inches(texts: Iterable[str], size: float = SMALL) -> float:
    """How wide the widest of them is."""
    figure = Figure(dpi=DPI)
    FigureCanvasAgg(figure)
    return max(figure.text(0, 0, text, size=size).get_window_extent().width for text in texts) / DPI


def line_inches(size: float = SMALL) -> float:
    return size * 1.3 / 72


def columns_for(titles: Sequence[str], most: int, room: float, beside: float) -> int:
    """How many panels in a row, so that each has its title in `room` inches that they share, less those `beside` it."""
    if len(titles) == most + 1 and most > 2:
        most = -(-len(titles) // 2)  # none is left alone
    widest = text_inches(titles, NORMAL)
    return max(min(len(titles), most, int(room / (widest + beside))), 1)


# Axes


def scale_y(axes: Sequence[Axes], values: Iterable[Sequence[float]], name: str) -> str:
    """For each axes its values. Logarithmic where some differ more than twentyfold: then the name, which is returned, says so."""
    if not any(min(each) > 0 and max(each) / min(each) > 20 for each in values):
        return name
    for one in axes:
        one.set_yscale("log")
        one.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
        one.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        one.yaxis.set_minor_formatter(NullFormatter())
    return f"{name} (log scale)"


def tick_loads(axes: Axes, loads: Sequence[float]) -> None:
    """Where something was measured, less what is too close to the next."""
    width = axes.get_position().width * WIDTH
    widest = text_inches([f"{load:g}" for load in loads], NORMAL) + 0.08
    apart = (max(loads) - min(loads)) * widest / width * 1.15  # axes are wider than what they show
    kept = [max(loads)]
    for load in sorted(loads, reverse=True):
        if kept[-1] - load > apart:
            kept.append(load)
    is_enough = len(kept) >= min(len(loads), 3)
    axes.xaxis.set_major_locator(FixedLocator(kept) if is_enough else MaxNLocator(max(int(width / widest / 2), 2)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def label_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Right of axes that have all their lines; apart from each other, with a thin line to what each belongs to."""
    box = axes.get_position()
    width, height = box.width * WIDTH, axes.get_window_extent().height / DPI
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
    to_axes = axes.transData + axes.transAxes.inverted()
    wanted = [float(to_axes.transform((end.x, end.y))[1]) for end in ends]
    for end, at in zip(ends, spread(wanted, line_inches() / height), strict=True):
        axes.annotate(
            end.text,
            (end.x, end.y),
            (1 + LABEL_GAP / width, at),
            textcoords="axes fraction",
            size=SMALL,
            color=end.colour,
            va="center_baseline",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": end.colour,
                "lw": 0.5,
                "alpha": 0.6,
                "shrinkA": 1,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )


def spread(wanted: Sequence[float], apart: float) -> list[float]:
    """As near to where they want to be as goes without being nearer than `apart`, all within 0 and 1 if they fit."""
    order = sorted(range(len(wanted)), key=lambda index: (wanted[index], -index))
    groups: list[tuple[float, list[int]]] = []  # where the middle is, and who
    for index in order:
        middle, who = _middle([index], wanted, apart), [index]
        while groups and groups[-1][0] + apart * (len(groups[-1][1]) + len(who)) / 2 > middle + 1e-9:
            who = groups.pop()[1] + who
            middle = _middle(who, wanted, apart)
        groups.append((middle, who))
    places = [0.0] * len(wanted)
    for middle, who in groups:
        for at, index in enumerate(who):
            places[index] = middle + (at - (len(who) - 1) / 2) * apart
    return places


def _middle(who: Sequence[int], wanted: Sequence[float], apart: float) -> float:
    half = len(who) * apart / 2
    return max(min(sum(wanted[index] for index in who) / len(who), 1 - half), half)


class Key(NamedTuple):
    """A legend that figures share, and its size: inches."""

    handles: Sequence[Artist]
    labels: Sequence[str]
    columns: int

    @property
    def height(self) -> float:
        return -(-len(self.labels) // self.columns) * line_inches(NORMAL) * 1.25

    @staticmethod
    def of(handles: Sequence[Artist], labels: Sequence[str]) -> Key:
        fit = int((WIDTH - 2 * EDGE) / (text_inches(labels, NORMAL) + 0.6))
        rows = -(-len(labels) // max(fit, 1))
        return Key(handles, labels, -(-len(labels) // rows))

    def put(self, figure: Figure, top: float) -> None:
        """So many inches below the top."""
        figure.legend(
            self.handles,
            self.labels,
            loc="upper left",
            bbox_to_anchor=(EDGE / WIDTH, 1 - top / figure.get_figheight()),
            ncols=self.columns,
            borderpad=0,
            borderaxespad=0,
            handlelength=3.2,
            columnspacing=1.6,
            labelspacing=0.45,
            fontsize=NORMAL,
        )


# Files


@drawing
def save(figures: Mapping[str, Figure], folder: Path, formats: Sequence[str] = ("png",)) -> list[Path]:
    """The same figure gives the same bytes: nothing in them says when, or with what."""
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            for each in formats:
                drawn = BytesIO()
                figure.savefig(drawn, format=each, metadata=_NO_NOTES[each])
                paths.append(folder / f"{_safe(name)}.{each}")
                paths[-1].write_bytes(drawn.getvalue())
    except OSError as error:
        raise InvalidRequest("out", f"{folder} cannot be written: {error}") from error
    return paths


def _safe(name: str) -> str:
    """Results may come from elsewhere: a name in them must not lead out of the folder."""
    return re.sub(r"[^\w.+-]+", "_", name, flags=re.ASCII)
