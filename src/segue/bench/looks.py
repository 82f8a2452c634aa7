"""How policies and tiers look in figures: the same in all of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import cycle
from typing import Any, NamedTuple

from matplotlib.colors import to_hex, to_rgb

# After Okabe and Ito: most people who see colours differently can tell these apart.
_COLOURS = {
    "fcfs": "#6e6e6e",
    "priority": "#e69f00",
    "continuum": "#56b4e9",
    "continuum-released": "#0072b2",
    "context_serve": "#009e73",
    "adaptive": "#d55e00",
    "oracle": "#000000",
}
_FIXED = ("#e3b5cf", "#8a3a68")  # of `fixed-` policies: from a tenth of a second to a hundred
_OTHERS = ("#332288", "#999933", "#882255", "#44aa99", "#661100", "#6699cc")


class _Stroke(NamedTuple):
    """What says which tiers there are: dashes and a marker for lines, a hatch for bars."""

    dashes: tuple[float, ...] | None  # in line widths; None: there are no gaps
    marker: str
    hatch: str


_STROKES = {
    (): _Stroke(None, "o", ""),
    ("host",): _Stroke((4, 1.5), "s", "////"),
    ("disk",): _Stroke((1, 1), "v", "...."),
    ("remote",): _Stroke((3, 1.5), "P", "++++"),
    ("host", "disk"): _Stroke((6, 1.5, 1, 1.5), "^", "xxxx"),
    ("host", "remote"): _Stroke((6, 1.5, 1, 1.5, 1, 1.5), "X", "\\\\\\\\"),
    ("host", "disk", "remote"): _Stroke((9, 1.5, 2, 1.5), "*", "oooo"),
}
_MORE_STROKES = (_Stroke((4, 1, 1, 1), "D", "--"), _Stroke((8, 3), "h", "||"), _Stroke((2, 2), ">", "**"))
_SIZE = re.compile(r"[\d.]+ ?[KMGT]i?B\b|\bint8\b")


class Series(NamedTuple):
    """What a line or a panel is of. Tiers as they were asked for."""

    policy: str
    tiers: tuple[str, ...] = ()


class Looks:
    """Of all series in some results. Colours say the policy; lines, markers and hatches say the tiers."""

    def __init__(self, series: Iterable[Series]) -> None:
        every = set(series)
        self._colours = _COLOURS | _more_colours({each.policy for each in every} - set(_COLOURS))
        self._tiers = _tier_labels({each.tiers for each in every})
        self._strokes = _strokes(self._tiers)
        policies, tiers = list(self._colours), list(self._tiers)
        self.ordered = sorted(every, key=lambda each: (policies.index(each.policy), tiers.index(each.tiers)))

    def label(self, series: Series) -> str:
        return shorten(series.policy) + self._tiers[series.tiers]

    def colour(self, series: Series) -> str:
        return self._colours[series.policy]

    def dark(self, series: Series) -> str:
        """For text, which is hard to read in a light colour."""
        return blend(self.colour(series), "#000000", 0.25)

    def hatch(self, series: Series) -> str:
        return self._strokes[series.tiers].hatch

    def line(self, series: Series) -> dict[str, Any]:
        dashes, marker, _ = self._strokes[series.tiers]
        return {
            "label": self.label(series),
            "color": self.colour(series),
            "linestyle": "-" if dashes is None else (0, dashes),
            "linewidth": 3.0 if series.policy == "fcfs" else 1.5,  # what others are compared with is seen below them
            "marker": marker,
            "markersize": 4.5,
            "markerfacecolor": "white" if series.tiers else self.colour(series),
        }


def _more_colours(policies: set[str]) -> dict[str, str]:
    found, others = {}, cycle(_OTHERS)
    for policy in sorted(policies, key=_natural):
        seconds = re.fullmatch(r"fixed-(\d+\.?\d*)\w*", policy)
        if seconds is not None:
            share = (math.log10(max(float(seconds[1]), 0.1)) + 1) / 3
            found[policy] = blend(*_FIXED, min(share, 1.0))
        else:
            found[policy] = _FIXED[1] if policy.startswith("fixed") else next(others)
    return found


def _tier_labels(every: set[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """Kinds, with sizes where kinds do not tell them apart. Never a path or an address, which may have a password."""
    kinds = [_kinds(tiers) for tiers in every]
    labels: dict[tuple[str, ...], str] = {}
    seen: list[str] = []
    for tiers in sorted(every, key=lambda each: (len(each), [_natural(tier) for tier in each])):
        is_clear = kinds.count(_kinds(tiers)) == 1
        parts = [
            [kind] if is_clear else [kind, *_SIZE.findall(tier)]
            for kind, tier in zip(_kinds(tiers), tiers, strict=True)
        ]
        seen.append("".join(f" + {' '.join(part)}" for part in parts))
        labels[tiers] = seen[-1] + (f" ({seen.count(seen[-1])})" if seen.count(seen[-1]) > 1 else "")
    return labels


def _strokes(every: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], _Stroke]:
    """Usually that of their kinds; one of a few others if that is taken."""
    more, left = cycle(_MORE_STROKES), dict(_STROKES)
    return {tiers: left.pop(kinds) if (kinds := _kinds(tiers)) in left else next(more) for tiers in every}


def _kinds(tiers: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(tier.partition("=")[0] for tier in tiers)


def _natural(text: str) -> list[tuple[float, str]]:
    """Numbers in a name count as such: fixed-2 is before fixed-10."""
    return [(float(part), "") if part.isdecimal() else (math.inf, part) for part in re.split(r"(\d+)", text)]


def blend(one: str, other: str, share: float) -> str:
    red, green, blue = (a + (b - a) * share for a, b in zip(to_rgb(one), to_rgb(other), strict=True))
    return to_hex((red, green, blue))


def shorten(name: str, most: int = 24) -> str:
    """Names may come from elsewhere, and have to leave room for what they are written on."""
    return name if len(name) <= most else f"{name[: most - 1]}…"
