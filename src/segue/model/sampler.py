"""From logits to tokens. Each row is decided by its own logits, parameters, seed and position, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from segue.base.types import SamplingParams
from segue.engine import Row, Sampling, StepResult, TokenLogprobs

_FIRST_CANDIDATES = 256
_RUN = 64
_LOW_64_BITS = 2**64 - 1

Draw = Callable[[Tensor, Sequence[Row]], Tensor]
"""One token of each row, which has logits and a temperature. Of the tokens that top-k, top-p and min-p leave, in the order of
their ids, it is the one whose share of their sum holds the row's own random number."""


def sample(logits: Tensor, rows: Sequence[Row], draw: Draw | None = None) -> StepResult:
    """`logits[i]` belongs to `rows[i]`, each of which samples. May overwrite `logits`. A device may have a way of its own to
    `draw`."""
    samplings = [_sampling(row) for row in rows]
    wanted = [i for i, sampling in enumerate(samplings) if sampling.params.logprobs is not None]
    raw = logits[wanted] if wanted else None
    for i, (row, sampling) in enumerate(zip(rows, samplings, strict=True)):
        if _adjusts(row, sampling):
            _adjust(logits[i], row, sampling)
    if bool(logits.amax(-1).isnan().any()):
        raise ValueError("the model gave logits that are not numbers")
    tokens = logits.argmax(-1)
    drawn = [i for i, sampling in enumerate(samplings) if not sampling.params.greedy]
    if drawn:
        tokens[drawn] = (draw or _draw)(_some(logits, drawn), [rows[i] for i in drawn]).to(tokens.dtype)
    chosen = tokens.tolist()
    if raw is None:
        return StepResult(chosen)
    tops = [samplings[i].params.logprobs or 0 for i in wanted]
    return StepResult(chosen, dict(zip(wanted, _logprobs(raw, [chosen[i] for i in wanted], tops), strict=True)))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1), one for each seed and position of the token to sample: the whole of a request's random state. The
    position counts from the sequence's first token, so that a continuation with its parent's seed draws what the parent would
    have drawn."""
    x = np.array([seed & _LOW_64_BITS for seed in seeds], np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x += np.array(positions, np.uint64) * np.uint64(0xD1B54A32D192ED03) + np.uint64(0x8CB92BA72F3D8DD7)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 0xD6E8FEB86659FD93)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x >> np.uint64(11)) / 2.0**53


def points(rows: Sequence[Row]) -> npt.NDArray[np.float64]:
    """The random number that each row draws by. A row's last token may not be known yet, but where it stops is."""
    return uniforms([_sampling(row).seed for row in rows], [row.stop for row in rows])


def is_plain(row: Row) -> bool:
    """Whether a token is all that is wanted, and the logits are taken as the model gives them."""
    sampling = _sampling(row)
    return sampling.params.logprobs is None and not _adjusts(row, sampling)


def largest(values: Tensor, count: int) -> Tensor:
    """Where each row's largest numbers are, in order, of equal ones the first (`topk` takes any of them). On a CPU they are
    sought in runs: the n largest are in the n runs with the largest maxima, and a run's maximum is found many times faster than
    a number's rank."""
    length = values.shape[-1]
    if values.device.type != "cpu" or length % _RUN or length < 2 * _RUN * count:
        return _ranked(values).topk(count, dim=-1).indices
    runs = values.reshape(len(values), -1, _RUN)
    chosen = _ranked(runs.amax(-1)).topk(count, dim=-1).indices.sort(dim=-1).values
    found = runs.gather(1, chosen[:, :, None].expand(-1, -1, _RUN)).reshape(len(values), -1)
    at = _ranked(found).topk(count, dim=-1).indices
    return chosen.gather(-1, at // _RUN) * _RUN + at % _RUN


def _ranked(values: Tensor) -> Tensor:
    """Whole numbers that have the order which is wanted: each is a number and its place. Zeros are equal, whatever their sign."""
    bits = (values.float() + 0.0).view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    return order - torch.arange(values.shape[-1], device=values.device)


def _some(values: Tensor, places: Sequence[int]) -> Tensor:
    return values if len(places) == len(values) else values[list(places)]


def _sampling(row: Row) -> Sampling:
    assert row.sampling is not None
    return row.sampling


# Penalties, bias, minimum length


def _adjusts(row: Row, sampling: Sampling) -> bool:
    params = sampling.params
    return bool(
        params.logit_bias
        or params.allowed_token_ids
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or _too_short(row, sampling)
    )


def _too_short(row: Row, sampling: Sampling) -> bool:
    return len(row.tokens) - sampling.num_prompt < sampling.params.min_tokens


def _adjust(logits: Tensor, row: Row, sampling: Sampling) -> None:
    """In place, on one row. Repetition counts the prompt too; presence and frequency count the answer only."""
    params = sampling.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.tokens)), device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(row.tokens[sampling.num_prompt :])
        if counts:
            ids = torch.tensor(list(counts), device=logits.device)
            times = torch.tensor(list(counts.values()), device=logits.device, dtype=logits.dtype)
            logits[ids] -= params.presence_penalty + params.frequency_penalty * times
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device, dtype=logits.dtype)
    if params.allowed_token_ids:
        allowed = torch.tensor(params.allowed_token_ids, device=logits.device)
        kept = logits[allowed]
        logits.fill_(-torch.inf)
        logits[allowed] = kept
    if _too_short(row, sampling) and sampling.stop_ids and not _allows_only(params, sampling.stop_ids):
        logits[torch.tensor(sorted(sampling.stop_ids), device=logits.device)] = -torch.inf


def _allows_only(params: SamplingParams, ids: frozenset[int]) -> bool:
    return bool(params.allowed_token_ids) and ids.issuperset(params.allowed_token_ids)


# Drawing


def _draw(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Rows are grouped by how many candidates they look at, which depends on the row alone."""
    result = torch.empty(len(rows), dtype=torch.long, device=logits.device)
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(_num_candidates(_sampling(row).params, logits.shape[-1]), []).append(i)
    if unfiltered := groups.pop(0, None):
        result[unfiltered] = _draw_unfiltered(_some(logits, unfiltered), [rows[i] for i in unfiltered])
    while groups:
        count, members = groups.popitem()
        picked, enough = _draw_group(_some(logits, members), [rows[i] for i in members], count)
        result[members] = picked
        if short := [i for i, ok in zip(members, enough, strict=True) if not ok]:
            groups.setdefault(min(count * 16, logits.shape[-1]), []).extend(short)
    return result


def _num_candidates(params: SamplingParams, vocab_size: int) -> int:
    """How many of the likeliest tokens to sort, 0 for none; top-p alone starts small and asks for more if they do
    not suffice."""
    if params.top_k:
        return min(params.top_k, vocab_size)
    return 0 if params.top_p >= 1.0 else min(_FIRST_CANDIDATES, vocab_size)


def _draw_group(logits: Tensor, rows: Sequence[Row], count: int) -> tuple[Tensor, list[bool]]:
    """Tokens, and for each whether `count` candidates were enough to know it. Temperature, top-k, top-p, min-p, in
    this order, each on what the one before left."""
    options = _Columns(rows, logits.device)
    whole, ids = _probabilities(logits, options.temperature), largest(logits, count)
    kept = whole.gather(-1, ids)
    upto = kept.cumsum(-1)
    mass = torch.where(options.top_k > 0, upto[:, -1:], 1.0)  # top-p and min-p are shares of what top-k left
    keep = (upto - kept < options.top_p * mass) & (kept >= options.min_p * kept[:, :1])
    keep[:, 0] = True
    enough = (upto[:, -1:] >= options.top_p * mass)[:, 0]
    ids, order = ids.sort(dim=-1)
    picked = ids.gather(-1, _invert((kept * keep).gather(-1, order), options.points))[:, 0]
    return picked, [ok or count == whole.shape[-1] for ok in enough.tolist()]


def _draw_unfiltered(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Temperature alone, or with min-p: no order is needed, so nothing is sorted."""
    options = _Columns(rows, logits.device)
    whole = _probabilities(logits, options.temperature)
    keep = whole >= options.min_p * whole.amax(-1, keepdim=True)
    return _invert(whole * keep, options.points)[:, 0]


class _Columns:
    """Parameters of several rows, each as a column [rows, 1] that broadcasts over candidates."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        params = [_sampling(row).params for row in rows]

        def column(values: Sequence[float] | npt.NDArray[np.float64]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

        self.temperature = column([p.temperature for p in params])
        self.top_k = column([float(p.top_k) for p in params])
        self.top_p = column([p.top_p for p in params])
        self.min_p = column([p.min_p for p in params])
        self.points = column(points(rows))


def _probabilities(logits: Tensor, temperature: Tensor) -> Tensor:
    """Shifted before it is divided: a temperature near zero then gives the likeliest token, not an overflow."""
    chosen = logits.double()
    return ((chosen - chosen.amax(-1, keepdim=True)) / temperature).softmax(-1)


def _invert(weights: Tensor, points: Tensor) -> Tensor:
    """The index whose share of the line [0, sum) holds the point; `points` are in [0, 1)."""
    cumulative = weights.cumsum(-1)
    return torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True).clamp_(max=weights.shape[-1] - 1)


# Log-probabilities


def _logprobs(raw: Tensor, chosen: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    logprobs = raw.log_softmax(-1)
    picked = logprobs.gather(-1, torch.tensor(chosen, device=raw.device)[:, None])
    ranks = (logprobs > picked).sum(-1).add_(1).tolist()
    values, ids = logprobs.topk(min(max(tops), raw.shape[-1]), dim=-1) if max(tops) else (logprobs[:, :0], raw[:, :0])
    return [
        TokenLogprobs(value, rank, tuple(zip(top_ids[:top], top_values[:top], strict=True)))
        for value, rank, top_ids, top_values, top in zip(
            picked[:, 0].tolist(), ranks, ids.tolist(), values.tolist(), tops, strict=True
        )
    ]
