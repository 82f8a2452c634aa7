"""Drawing tokens on the device: by each row's temperature, out of what top-k, top-p and min-p leave, at its own random number.

A token's weight is a whole number, exp((logit - largest) / temperature) in units of 2^-44. Such sums are the same in whatever
order they are made: what is drawn depends neither on how the work is divided nor on what else is in the step.

Nothing is sorted. As whole numbers, logits have an order; where top-k or top-p cut is found digit by digit, the highest first:

    1011 0110 …     how many, or how much together, are those whose first digit is 1111? Or above 1110? Or above 1101? …
    ^^^^            known after one reading of the logits; the next digit after the next

Of tokens that are equal to the cut, the first few stay. Then tokens stand in a line in the order of their ids, each as long as
it weighs, and the random number says at which place of it to look.

Where top-k leaves every row a few tokens only, these are found as beams' are, and all else is done with them alone: the same
tokens are drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from segue.model.cuda.choosing import best_tokens

FEW = (32, 64)  # tokens that top-k leaves, at most, for these to be found first
FIELDS = (
    6  # of a row: log2(e) / temperature, or 0 for the likeliest token; top-p; min-p; top-k; a random number of 64 bits
)
_FIELDS: tl.constexpr = tl.constexpr(FIELDS)
_UNIT: tl.constexpr = tl.constexpr(float(1 << 44))
_BITS = {torch.float32: 32, torch.float16: 19, torch.bfloat16: 16}  # in which numbers of that kind can differ
_DIGIT: tl.constexpr = tl.constexpr(4)  # bits
_VALUES: tl.constexpr = tl.constexpr(1 << 4)  # of a digit


@triton.jit
def _option(draws, row, FIELD: tl.constexpr):
    return tl.load(draws + row * _FIELDS + FIELD).to(tl.float32, bitcast=True)


@triton.jit
def _top_k(draws, row):
    return tl.load(draws + row * _FIELDS + 3)


@triton.jit
def _is_cut(draws, row, BY_COUNT: tl.constexpr):
    """By top-k, or by top-p."""
    if BY_COUNT:
        limited = _top_k(draws, row) > 0
    else:
        limited = _option(draws, row, 1) < 1.0
    return limited & (_option(draws, row, 0) > 0.0)


@triton.jit
def _keys(found, SHIFT: tl.constexpr):
    """Whole numbers without a sign, in the same order; the lowest bits, which are the same in all of them, are left out."""
    bits = (found + 0.0).to(tl.int32, bitcast=True)  # so that zeros have one sign
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """The number that has this key."""
    low: tl.constexpr = (1 << SHIFT) - 1
    ordered = (key << SHIFT).to(tl.int32, bitcast=True)
    return tl.where(ordered < 0, ordered ^ -2147483648, ~(ordered | low)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(found, top, scale):
    return (tl.exp2((found - top) * scale) * _UNIT).to(tl.int64)


@triton.jit
def _part(logits, row, part, each, vocab, BLOCK: tl.constexpr):
    """Logits, their tokens, and which of these there are."""
    within = tl.arange(0, BLOCK)
    at = part * each + within
    inside = (within < each) & (at < vocab)
    return tl.load(logits + row * vocab + at, mask=inside, other=float("-inf")).to(tl.float32), at, inside


@triton.jit
def _largest_of(tops, row, PARTS: tl.constexpr):
    return tl.max(tl.load(tops + row * PARTS + tl.arange(0, PARTS)), 0)


@triton.jit
def _is_left(tops, draws, row, part, PARTS: tl.constexpr):
    """Whether top-k may leave something of a part: not if so many parts have something larger than all that it has."""
    best, own = tl.load(tops + row * PARTS + tl.arange(0, PARTS)), tl.load(tops + row * PARTS + part)
    most = _top_k(draws, row)
    return (most <= 0) | (tl.sum((best > own).to(tl.int32), 0) < most)


@triton.jit(do_not_specialize=["below"])
def _sum_digits(
    logits, tops, draws, cuts, masses, counts, vocab, each, below,
    SHIFT: tl.constexpr, BY_COUNT: tl.constexpr, IS_FIRST: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a part's tokens whose digits above this one are those of the cut: what weight, and how many, have which digit. It has so
    many bits `below` it."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if _is_cut(draws, row, BY_COUNT):
        out = row * _VALUES * PARTS + part
        above = 0
        is_there = _is_left(tops, draws, row, part, PARTS)
        if not IS_FIRST:
            above = tl.load(cuts + row * 3).to(tl.uint32, bitcast=True)
            is_there = is_there & ((_keys(tl.load(tops + row * PARTS + part), SHIFT) >> below >> _DIGIT) >= above)
        if is_there:
            found, _, here = _part(logits, row, part, each, vocab, BLOCK)
            digits = _keys(found, SHIFT) >> below
            if not IS_FIRST:
                here = here & ((digits >> _DIGIT) == above)
            weight = _weights(found, _largest_of(tops, row, PARTS), _option(draws, row, 0))
            digit = digits & (_VALUES - 1)
            for value in tl.static_range(_VALUES):
                same = here & (digit == value)
                tl.store(masses + out + value * PARTS, tl.sum(tl.where(same, weight, 0), 0))
                if BY_COUNT:
                    tl.store(counts + out + value * PARTS, tl.sum(same.to(tl.int32), 0))
        else:
            values = out + tl.arange(0, _VALUES) * PARTS
            tl.store(masses + values, tl.zeros([_VALUES], tl.int64))
            if BY_COUNT:
                tl.store(counts + values, tl.zeros([_VALUES], tl.int32))


@triton.jit
def _narrow(
    tops, draws, cuts, sums, masses, counts,
    SHIFT: tl.constexpr, BY_COUNT: tl.constexpr, IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The cut's next digit: the highest with which there is enough. `cuts`: its digits so far, how many that are equal to it
    stay, how many are above it. `sums`: what those above it weigh, how much is enough, and what top-k left."""
    row = tl.program_id(0).to(tl.int64)
    if _is_cut(draws, row, BY_COUNT):
        digit = tl.arange(0, _VALUES)
        there = (row * _VALUES + digit)[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
        mass = tl.sum(tl.load(masses + there), 1)
        cut, above, had = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
        if not IS_FIRST:
            cut, above = tl.load(cuts + row * 3), tl.load(sums + row * 3)
        if BY_COUNT:
            amount = tl.sum(tl.load(counts + there), 1).to(tl.int64)
            if not IS_FIRST:
                had = tl.load(cuts + row * 3 + 2).to(tl.int64)
            goal = _top_k(draws, row).to(tl.int64)
        else:
            amount, had = mass, above
            if IS_FIRST:
                left = tl.sum(mass, 0)
                if _top_k(draws, row) > 0:
                    left = tl.load(sums + row * 3 + 2)
                share = _option(draws, row, 1).to(tl.float64) * left.to(tl.float64)
                goal = tl.minimum(tl.maximum(tl.ceil(share).to(tl.int64), 1), left)
                tl.store(sums + row * 3 + 1, goal)
            else:
                goal = tl.load(sums + row * 3 + 1)
        through = had + tl.sum(amount, 0) - tl.cumsum(amount, 0) + amount
        chosen = tl.max(tl.where(through >= goal, digit, 0), 0)
        above += tl.sum(tl.where(digit > chosen, mass, 0), 0)
        had += tl.sum(tl.where(digit > chosen, amount, 0), 0)
        cut = (cut << _DIGIT) | chosen
        tl.store(cuts + row * 3, cut)
        tl.store(sums + row * 3, above)
        if BY_COUNT:
            tl.store(cuts + row * 3 + 2, had.to(tl.int32))
        if IS_LAST:
            each = _weights(
                _value(cut.to(tl.uint32, bitcast=True), SHIFT), _largest_of(tops, row, PARTS), _option(draws, row, 0)
            )
            if BY_COUNT:
                stay = goal - had
                tl.store(sums + row * 3 + 2, above + stay * each)
            else:
                each = tl.maximum(each, 1)
                stay = (goal - above + each - 1) // each
            tl.store(cuts + row * 3 + 1, stay.to(tl.int32))


@triton.jit
def _cut(draws, cuts, row):
    """And how many that are equal to it stay; 0, which no number's key is, if all do."""
    key, stay = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    if _is_cut(draws, row, True) | _is_cut(draws, row, False):
        key, stay = tl.load(cuts + row * 3), tl.load(cuts + row * 3 + 1)
    return key.to(tl.uint32, bitcast=True), stay


@triton.jit
def _sum_parts(
    logits, tops, draws, cuts, masses, ties, vocab, each, SHIFT: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What a part's tokens above the cut weigh, and how many are equal to it."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    scale = _option(draws, row, 0)
    if scale > 0.0:
        mass, equal = tl.full([], 0, tl.int64), tl.full([], 0, tl.int32)
        if _is_left(tops, draws, row, part, PARTS):
            cut, _ = _cut(draws, cuts, row)
            found, _, here = _part(logits, row, part, each, vocab, BLOCK)
            key, weight = _keys(found, SHIFT), _weights(found, _largest_of(tops, row, PARTS), scale)
            here = here & (weight >= (_option(draws, row, 2) * _UNIT).to(tl.int64))
            mass = tl.sum(tl.where(here & (key > cut), weight, 0), 0)
            equal = tl.sum((here & (key == cut)).to(tl.int32), 0)
        tl.store(masses + row * PARTS + part, mass)
        tl.store(ties + row * PARTS + part, equal)


@triton.jit
def _likeliest(tops, places, row, part, PARTS: tl.constexpr):
    """A row's largest logit, and the first token that has it."""
    best = tl.load(tops + row * PARTS + part)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, tl.load(places + row * PARTS + part), 2147483647), 0)


@triton.jit
def _point(draws, row, total):
    """Of a line that is so long, where to look."""
    low = tl.load(draws + row * _FIELDS + 4).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(draws + row * _FIELDS + 5).to(tl.int64) << 32
    point = ((high | low).to(tl.float64, bitcast=True) * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(point, total - 1), 0)


@triton.jit
def _pick(
    logits, tops, places, draws, cuts, masses, ties, tokens, vocab, each, SHIFT: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    top, token = _likeliest(tops, places, row, part, PARTS)
    scale = _option(draws, row, 0)
    if scale > 0.0:
        cut, stay = _cut(draws, cuts, row)
        equal = tl.load(ties + row * PARTS + part)
        own = tl.minimum(tl.maximum(stay - (tl.cumsum(equal, 0) - equal), 0), equal)
        mass = tl.load(masses + row * PARTS + part) + own.to(tl.int64) * _weights(_value(cut, SHIFT), top, scale)
        total = tl.sum(mass, 0)
        point = _point(draws, row, total)
        chosen = tl.min(tl.where(tl.cumsum(mass, 0) > point, part, PARTS - 1), 0)
        point -= tl.sum(tl.where(part < chosen, mass, 0), 0)
        stay = tl.sum(tl.where(part == chosen, own, 0), 0)
        found, at, here = _part(logits, row, chosen, each, vocab, BLOCK)
        key, weight = _keys(found, SHIFT), _weights(found, top, scale)
        here = here & (weight >= (_option(draws, row, 2) * _UNIT).to(tl.int64))
        is_equal = (here & (key == cut)).to(tl.int32)
        stays = here & ((key > cut) | ((key == cut) & (tl.cumsum(is_equal, 0) <= stay)))
        upto = tl.cumsum(tl.where(stays, weight, 0), 0)
        token = tl.min(tl.where(stays & (upto > point), at, vocab - 1), 0)
    tl.store(tokens + row, tl.where(top == float("inf"), -1, token))


@triton.jit
def _pick_of_few(
    tops, places, draws, values, candidates, tokens, vocab, count, PARTS: tl.constexpr, MOST: tl.constexpr
):
    """Of a row's likeliest tokens, which come in order, the likeliest first. Those that stay are the first ones."""
    row = tl.program_id(0).to(tl.int64)
    top, token = _likeliest(tops, places, row, tl.arange(0, PARTS), PARTS)
    scale = _option(draws, row, 0)
    if scale > 0.0:
        at = tl.arange(0, MOST)
        here = at < tl.minimum(_top_k(draws, row), count)
        found = tl.load(values + row * count + at, mask=here, other=float("-inf"))
        name = tl.load(candidates + row * count + at, mask=here, other=2147483647)
        weight = tl.where(here, _weights(found, top, scale), 0)
        left = tl.sum(weight, 0)
        share = _option(draws, row, 1)
        goal = tl.ceil(share.to(tl.float64) * left.to(tl.float64)).to(tl.int64)
        goal = tl.where(share < 1.0, tl.minimum(tl.maximum(goal, 1), left), left + 1)
        stays = here & (tl.cumsum(weight, 0) - weight < goal)
        stays = stays & (weight >= (_option(draws, row, 2) * _UNIT).to(tl.int64))
        weight = tl.where(stays, weight, 0)
        point = _point(draws, row, tl.sum(weight, 0))
        upto = tl.sum(tl.where(name[None, :] <= name[:, None], weight[None, :], 0), 1)
        token = tl.min(tl.where(stays & (upto > point), name, vocab - 1), 0)
    tl.store(tokens + row, tl.where(top == float("inf"), -1, token))


class Cuts(NamedTuple):
    """Whether any row that draws has a top-k or a top-p; and one of `FEW`, if top-k leaves none of them more, or None."""

    there: bool
    most: int | None = None


CUTS = (Cuts(False), Cuts(True), *(Cuts(True, most) for most in FEW))  # that there are


def draw(logits: Tensor, tops: Tensor, places: Tensor, draws: Tensor, tokens: Tensor, cuts: Cuts) -> None:
    """tokens[i] is what row i draws, or its likeliest token if it has no temperature; -1 if a logit is infinite or no number.

    `tops` and `places` are what `likeliest` found of these logits; `draws`: int32 [rows, FIELDS]."""
    if cuts.most is not None:
        candidates, values = best_tokens(logits, cuts.most, as_logits=True)
        (rows, count), vocab = candidates.shape, logits.shape[1]
        _pick_of_few[(rows,)](
            tops, places, draws, values, candidates, tokens, vocab, count, PARTS=tops.shape[1], MOST=cuts.most, num_warps=4
        )  # fmt: skip
        return
    _draw_of_many(logits, tops, places, draws, tokens, is_cut=cuts.there)


def _draw_of_many(logits: Tensor, tops: Tensor, places: Tensor, draws: Tensor, tokens: Tensor, *, is_cut: bool) -> None:
    (rows, vocab), parts = logits.shape, tops.shape[1]
    bits, each, device = _BITS[logits.dtype], triton.cdiv(vocab, parts), logits.device
    cuts = torch.empty(rows, 3, dtype=torch.int32, device=device)
    sums = torch.empty(rows, 3, dtype=torch.int64, device=device)
    masses = torch.empty(rows, 1 << 4, parts, dtype=torch.int64, device=device)
    counts = torch.empty(rows, 1 << 4, parts, dtype=torch.int32, device=device)
    block = triton.next_power_of_2(each)
    shape = {"SHIFT": 32 - bits, "PARTS": parts}
    size = {"BLOCK": block, "num_warps": 4 if block <= 2048 else 8}
    last = triton.cdiv(bits, 4) - 1
    for by_count in (True, False) if is_cut else ():
        for digit in range(last, -1, -1):
            which = shape | {"BY_COUNT": by_count, "IS_FIRST": digit == last}
            _sum_digits[(rows, parts)](
                logits, tops, draws, cuts, masses, counts, vocab, each, 4 * digit, **which, **size
            )
            _narrow[(rows,)](tops, draws, cuts, sums, masses, counts, IS_LAST=digit == 0, **which, num_warps=4)
    _sum_parts[(rows, parts)](logits, tops, draws, cuts, masses, counts, vocab, each, **shape, **size)
    _pick[(rows,)](logits, tops, places, draws, cuts, masses, counts, tokens, vocab, each, **shape, **size)
