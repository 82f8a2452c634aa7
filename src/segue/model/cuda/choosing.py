"""Out of many numbers the largest: tokens of whole vocabularies, and continuations of beams. Of equal ones the first come first,
since half precision has many, and an answer must not depend on who looked first.

A number and its place make one whole number of 64 bits, whose order is the one that is wanted; so to sort these is all there is
to it. Numbers that are none come before all others, for the host to find.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from segue.model.cuda.kernels import LOG2E
from segue.model.sampler import largest

PARTS = 64  # of a row of logits, whose largest are looked for at the same time
_SURVEYED = 2048  # logits, by one program
_RUN = 16  # continuations of beams that their largest stands for
_MOST_SORTED = 1 << 11  # by one program
MOST_LEGAL = 1 << 12  # continuations of a beam that `legal_tokens` is for
_NOTHING: tl.constexpr = tl.constexpr(-(1 << 63))


@triton.jit
def _ranked(values, places, inside):
    bits = (values.to(tl.float32) + 0.0).to(tl.int32, bitcast=True)  # so that zeros have one sign
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)  # as whole numbers they have the same order
    return tl.where(inside, (order << 32) - places, _NOTHING)


@triton.jit
def _places(ranked):
    return ((-ranked) & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _values(ranked):
    order = ((ranked + 0xFFFFFFFF) >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _survey(logits, eights, chunks, tops, logs, vocab, num_eights, num_chunks, num_tops, EIGHTS: tl.constexpr):
    """The largest of each 8, 64 and 512 logits, and of all that a program sees, the logarithm of the exponentials' sum."""
    row = tl.program_id(0).to(tl.int64)
    eight = tl.program_id(1) * EIGHTS + tl.arange(0, EIGHTS)
    at = eight[:, None] * 8 + tl.arange(0, 8)[None, :]
    found = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    best = tl.max(found, 1)
    tl.store(eights + row * num_eights + eight, best, mask=eight < num_eights)
    best = tl.max(tl.reshape(best, [EIGHTS // 8, 8]), 1)
    chunk = tl.program_id(1) * (EIGHTS // 8) + tl.arange(0, EIGHTS // 8)
    tl.store(chunks + row * num_chunks + chunk, best, mask=chunk < num_chunks)
    best = tl.max(tl.reshape(best, [EIGHTS // 64, 8]), 1)
    top = tl.program_id(1) * (EIGHTS // 64) + tl.arange(0, EIGHTS // 64)
    tl.store(tops + row * num_tops + top, best, mask=top < num_tops)
    most = tl.max(best, 0)
    most = tl.where(most == float("-inf"), 0.0, most)
    mass = tl.sum(tl.sum(tl.exp2((found - most) * LOG2E), 1), 0)
    tl.store(logs + row * tl.num_programs(1) + tl.program_id(1), most + tl.log2(mass) / LOG2E)


@triton.jit
def _log_total(logs, row, num_logs, LOGS: tl.constexpr):
    """Of a whole row, by what `_survey` found of its parts."""
    at = tl.arange(0, LOGS)
    parts = tl.load(logs + row * num_logs + at, mask=at < num_logs, other=float("-inf"))
    top = tl.max(parts, 0)
    return top + tl.log2(tl.sum(tl.exp2((parts - top) * LOG2E), 0)) / LOG2E


@triton.jit
def _log_totals(logs, totals, num_logs, LOGS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(totals + row, _log_total(logs, row, num_logs, LOGS))


@triton.jit
def _best_below(best, values, row, count, BEST: tl.constexpr):
    """Each of the `best` stands for eight: of all these, the best."""
    place = _places(best)[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = (best != _NOTHING)[:, None] & (place < count)
    found = tl.load(values + row * count + place, mask=inside, other=0.0)
    return tl.topk(tl.reshape(_ranked(found, place, inside), [BEST * 8]), BEST)


@triton.jit
def _best_tokens(
    logits, eights, chunks, tops, logs, tokens, values, vocab, num_eights, num_chunks, num_tops, num_logs, count,
    TOPS: tl.constexpr, LOGS: tl.constexpr, BEST: tl.constexpr, AS_LOGITS: tl.constexpr,
):  # fmt: skip
    """Of one row, with their logits or their log-probabilities. The n largest of all are among those that the n largest maxima
    stand for."""
    row = tl.program_id(0).to(tl.int64)
    total = 0.0
    if not AS_LOGITS:
        total = _log_total(logs, row, num_logs, LOGS)
    at = tl.arange(0, TOPS)
    best = tl.topk(_ranked(tl.load(tops + row * num_tops + at, mask=at < num_tops, other=0.0), at, at < num_tops), BEST)
    best = _best_below(best, chunks, row, num_chunks, BEST)
    best = _best_below(best, eights, row, num_eights, BEST)
    best = _best_below(best, logits, row, vocab, BEST)
    out = row * count + tl.arange(0, BEST)
    wanted = tl.arange(0, BEST) < count
    tl.store(tokens + out, _places(best), mask=wanted)
    found = _values(best)
    if not AS_LOGITS:
        found -= total
    tl.store(values + out, found, mask=wanted)


@triton.jit
def _legal_tokens(
    logits, level, children, parents, logs, tokens, logprobs, nodes, vocab, count, num_logs,
    COUNT: tl.constexpr, LOGS: tl.constexpr, IS_FIRST: tl.constexpr, OF_ALL: tl.constexpr,
):  # fmt: skip
    """Of one beam. Log-probabilities are those of all tokens, or among these alone."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, COUNT)
    inside = at < count
    begin = 0
    end = count
    if not IS_FIRST:
        parent = tl.load(parents + row)
        begin, end = tl.load(children + parent), tl.load(children + parent + 1)
    is_legal = inside & (begin + at < end)
    token = tl.load(level + begin + at, mask=is_legal, other=0)
    found = tl.load(logits + row * vocab + token, mask=is_legal, other=float("-inf")).to(tl.float32)
    if OF_ALL:
        total = _log_total(logs, row, num_logs, LOGS)
    else:
        top = tl.max(found, 0)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = top + tl.log2(tl.sum(tl.exp2((found - top) * LOG2E), 0)) / LOG2E
    out = row * count + at
    tl.store(tokens + out, token, mask=inside)
    tl.store(nodes + out, begin + at, mask=inside)
    tl.store(logprobs + out, tl.where(is_legal, found - total, float("-inf")), mask=inside)


@triton.jit
def _ranked_totals(logprobs, scores, group, at, beams, count, HAS_SCORES: tl.constexpr):
    """Of a group's continuations, with what their beams have."""
    inside = at < beams * count
    totals = tl.load(logprobs + group * beams * count + at, mask=inside, other=0.0)
    if HAS_SCORES:
        before = tl.load(scores + group * beams + at // count, mask=inside, other=0.0)
        totals = tl.where(before == float("-inf"), before, totals + before)
    return _ranked(totals, at, inside)


@triton.jit
def _best_of_group(
    logprobs, tokens, nodes, scores, chosen, beams, count, width,
    RUN: tl.constexpr, RUNS: tl.constexpr, BEST: tl.constexpr, HAS_SCORES: tl.constexpr, HAS_NODES: tl.constexpr,
):  # fmt: skip
    """A group's `beams` have `count` continuations each. `chosen`: scores, parents, tokens and nodes, [4, groups, width]."""
    group = tl.program_id(0).to(tl.int64)
    first = group * beams * count
    at = tl.arange(0, RUNS)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    runs = tl.topk(tl.max(_ranked_totals(logprobs, scores, group, at, beams, count, HAS_SCORES), 1), BEST)
    none = beams * count
    run = tl.where(runs != _NOTHING, _places(runs) // RUN * RUN, none)
    at = run[:, None] + tl.arange(0, RUN)[None, :]
    found = tl.reshape(_ranked_totals(logprobs, scores, group, at, beams, count, HAS_SCORES), [BEST * RUN])
    found = tl.topk(found, BEST)
    there = found != _NOTHING
    place = tl.where(there, _places(found), 0)
    number = tl.arange(0, BEST)
    wanted = number < width
    out = chosen + group * width + number
    each = tl.num_programs(0).to(tl.int64) * width
    score = tl.where(there, _values(found), float("-inf"))
    tl.store(out, score.to(tl.int32, bitcast=True), mask=wanted)
    tl.store(out + each, place // count, mask=wanted)
    tl.store(out + 2 * each, tl.load(tokens + first + place, mask=there, other=0).to(tl.int32), mask=wanted)
    node = tl.zeros([BEST], tl.int32)
    if HAS_NODES:
        node = tl.load(nodes + first + place, mask=there, other=0).to(tl.int32)
    tl.store(out + 3 * each, node, mask=wanted)


@triton.jit
def _largest_parts(logits, values, places, vocab, each, BLOCK: tl.constexpr):
    """The first of a part's largest numbers, and where it is; a NaN is larger than all."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    best = float("-inf")
    where = 0
    for start in range(part * each, tl.minimum((part + 1) * each, vocab), BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < tl.minimum((part + 1) * each, vocab)
        found = tl.load(logits + row * vocab + at, mask=inside, other=float("-inf")).to(tl.float32)
        found = tl.where(found != found, float("inf"), found)
        top = tl.max(found, 0)
        first = tl.min(tl.where(found == top, at, vocab), 0)
        where = tl.where(top > best, first, where)
        best = tl.maximum(best, top)
    tl.store(values + row * tl.num_programs(1) + part, best)
    tl.store(places + row * tl.num_programs(1) + part, where)


@triton.jit
def _largest_of_parts(values, places, tokens, PARTS: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, PARTS)
    found = tl.load(values + row * PARTS + at)
    top = tl.max(found, 0)
    token = tl.min(tl.where(found == top, tl.load(places + row * PARTS + at), 2147483647), 0)
    tl.store(tokens + row, tl.where(top == float("inf"), -1, token))


class _Survey(NamedTuple):
    """What one reading of logits tells of each row: the largest of each 8, 64 and 512, and of each `_SURVEYED` the logarithm of
    the exponentials' sum."""

    eights: Tensor
    chunks: Tensor
    tops: Tensor
    logs: Tensor


def likeliest(logits: Tensor, values: Tensor, places: Tensor, tokens: Tensor) -> None:
    """tokens[i] is where row i's largest logit is; -1 if one is infinite or no number. `values` and `places`: room for
    [rows, parts] fp32 and int32, for as many parts as rows are looked at in."""
    (rows, vocab), parts = logits.shape, values.shape[1]
    _largest_parts[(rows, parts)](logits, values, places, vocab, triton.cdiv(vocab, parts), BLOCK=1024, num_warps=4)
    _largest_of_parts[(rows,)](values, places, tokens, PARTS=parts, num_warps=1)


def log_totals(logits: Tensor) -> Tensor:
    """Each row's logarithm of the sum of exponentials."""
    return _totals_of(_surveyed(logits))


def best_tokens(logits: Tensor, count: int, *, as_logits: bool = False) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, and their log-probabilities, or logits, [rows, count] or as many as there are tokens."""
    rows, vocab = logits.shape
    count = min(count, vocab)
    survey = _surveyed(logits)
    best = max(triton.next_power_of_2(count), 8)
    tops = max(triton.next_power_of_2(survey.tops.shape[1]), best)
    if max(tops, best * 8) > _MOST_SORTED:
        return _best_of_very_many(logits, survey, count, as_logits=as_logits)
    tokens = torch.empty(rows, count, dtype=torch.int32, device=logits.device)
    values = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    _best_tokens[(rows,)](
        logits, *survey, tokens, values, vocab, *(each.shape[1] for each in survey), count,
        TOPS=tops, LOGS=triton.next_power_of_2(survey.logs.shape[1]), BEST=best, AS_LOGITS=as_logits, num_warps=4,
    )  # fmt: skip
    return tokens, values


def _best_of_very_many(logits: Tensor, survey: _Survey, count: int, *, as_logits: bool) -> tuple[Tensor, Tensor]:
    """The same, for more than one program sorts."""
    vocab = logits.shape[1]
    chunks = largest(survey.chunks, min(count, survey.chunks.shape[1])).sort(dim=-1).values
    places = (chunks[:, :, None] * 64 + torch.arange(64, device=logits.device)).flatten(1)
    found = logits.gather(1, places.clamp(max=vocab - 1)).float().masked_fill_(places >= vocab, -torch.inf)
    at = largest(found, count)
    values = found.gather(1, at)
    return places.gather(1, at).int(), values if as_logits else values - _totals_of(survey)[:, None]


def legal_tokens(
    logits: Tensor, level: Tensor, children: Tensor | None, parents: Tensor | None, count: int, *, of_all: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What may follow each beam: log-probabilities (`of_all` tokens, or among these), tokens and nodes, [beams, count]. `level`:
    all nodes' tokens. Node p of `parents` has those from `children[p]` to `children[p + 1]`; without them, each beam has all."""
    rows, vocab = logits.shape
    tokens, nodes = (torch.empty(rows, count, dtype=torch.int32, device=logits.device) for _ in range(2))
    logprobs = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    logs = _surveyed(logits).logs if of_all else logprobs
    _legal_tokens[(rows,)](
        logits, level, children, parents, logs, tokens, logprobs, nodes, vocab, count, logs.shape[1],
        COUNT=triton.next_power_of_2(count), LOGS=triton.next_power_of_2(logs.shape[1]), IS_FIRST=parents is None, OF_ALL=of_all,
        num_warps=4,
    )  # fmt: skip
    return logprobs, tokens, nodes


def best_of_groups(
    logprobs: Tensor, tokens: Tensor, nodes: Tensor | None, scores: Tensor | None, chosen: Tensor
) -> None:
    """Out of each beam's continuations, [beams, count], those of each group that are best with the `scores` that its beams have,
    [groups, beams]. `chosen`: where their scores (as bits), parents, tokens and nodes go, int32 [4, groups, width]; if there are
    fewer than that, the others' scores are -inf."""
    _, groups, width = chosen.shape
    count = logprobs.shape[1]
    beams = len(logprobs) // groups
    best = max(triton.next_power_of_2(width), 8)
    runs = max(triton.next_power_of_2(triton.cdiv(beams * count, _RUN)), best)
    if max(runs, best * _RUN) <= _MOST_SORTED:
        _best_of_group[(groups,)](
            logprobs.contiguous(), tokens.contiguous(), nodes.contiguous() if nodes is not None else None, scores, chosen,
            beams, count, width,
            RUN=_RUN, RUNS=runs, BEST=best, HAS_SCORES=scores is not None, HAS_NODES=nodes is not None, num_warps=4,
        )  # fmt: skip
        return
    totals = logprobs.reshape(groups, beams, count)
    if scores is not None:
        totals = torch.where(scores[:, :, None] == -torch.inf, -torch.inf, totals + scores[:, :, None])
    totals = totals.reshape(groups, -1)
    found = min(width, totals.shape[1])
    where = largest(totals, found)
    chosen.zero_()
    chosen[0] = torch.full((), -torch.inf).view(torch.int32)
    chosen[0, :, :found] = totals.gather(1, where).view(torch.int32)
    chosen[1, :, :found] = where // count
    chosen[2, :, :found] = tokens.reshape(groups, -1).gather(1, where)
    if nodes is not None:
        chosen[3, :, :found] = nodes.reshape(groups, -1).gather(1, where)


def _totals_of(survey: _Survey) -> Tensor:
    """To the last bit as `best_tokens` has them."""
    rows, count = survey.logs.shape
    totals = torch.empty(rows, dtype=torch.float32, device=survey.logs.device)
    _log_totals[(rows,)](survey.logs, totals, count, LOGS=triton.next_power_of_2(count), num_warps=4)
    return totals


def _surveyed(logits: Tensor) -> _Survey:
    rows, vocab = logits.shape
    sizes = [triton.cdiv(vocab, each) for each in (8, 64, 512, _SURVEYED)]
    found = _Survey(*(torch.empty(rows, size, dtype=torch.float32, device=logits.device) for size in sizes))
    _survey[(rows, sizes[-1])](logits, *found, vocab, *sizes[:-1], EIGHTS=_SURVEYED // 8, num_warps=4)
    return found
