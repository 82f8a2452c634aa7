"""From logits to tokens. Each row is decided by its own logits, parameters, seed and position, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from segue.base.types import SamplingParams
from segue.engine import Row, Sampling, StepResult, TokenLogprobs

_FIRST_CANDIDATES = 256
_LOW_64_BITS = 2**64 - 1


def sample(logits: Tensor, rows: Sequence[Row]) -> StepResult:
    """`logits[i]` belongs to `rows[i]`, each of which samples. May overwrite `logits`."""
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
        tokens[drawn] = _draw(logits, rows, drawn)
    chosen = tokens.tolist()
    if raw is None:
        return StepResult(chosen)
    tops = [samplings[i].params.logprobs or 0 for i in wanted]
    return StepResult(chosen, dict(zip(wanted, _logprobs(raw, [chosen[i] for i in wanted], tops), strict=True)))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that belongs to this seed and to the position of the token to sample: the whole of a request's
    random state. The position counts from the sequence's first token, so that a continuation with its parent's seed
    draws what the parent would have drawn."""
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & _LOW_64_BITS
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 0xD6E8FEB86659FD93)):
        x = ((x ^ (x >> shift)) * factor) & _LOW_64_BITS
    return (x >> 11) / 2**53


def is_plain(row: Row) -> bool:
    """Whether the likeliest token, as the model gives it, is all that is wanted."""
    sampling = _sampling(row)
    return sampling.params.greedy and sampling.params.logprobs is None and not _adjusts(row, sampling)


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


def _draw(logits: Tensor, rows: Sequence[Row], drawn: Sequence[int]) -> Tensor:
    """One token for each row in `drawn`, by inverting the distribution at the row's own uniform number.

    Rows are grouped by how many candidates they look at, which depends on the row alone.
    """
    result = torch.empty(len(drawn), dtype=torch.long, device=logits.device)
    groups: dict[int, list[int]] = {}
    for at, i in enumerate(drawn):
        groups.setdefault(_num_candidates(_sampling(rows[i]).params, logits.shape[-1]), []).append(at)
    if unfiltered := groups.pop(0, None):
        result[unfiltered] = _draw_unfiltered(logits, rows, [drawn[at] for at in unfiltered])
    while groups:
        count, members = groups.popitem()
        picked, enough = _draw_group(logits, rows, [drawn[at] for at in members], count)
        result[members] = picked
        if short := [at for at, ok in zip(members, enough, strict=True) if not ok]:
            groups.setdefault(min(count * 16, logits.shape[-1]), []).extend(short)
    return result


def _num_candidates(params: SamplingParams, vocab_size: int) -> int:
    """How many of the likeliest tokens to sort, 0 for none; top-p alone starts small and asks for more if they do
    not suffice."""
    if params.top_k:
        return min(params.top_k, vocab_size)
    return 0 if params.top_p >= 1.0 else min(_FIRST_CANDIDATES, vocab_size)


def _draw_group(logits: Tensor, rows: Sequence[Row], members: Sequence[int], count: int) -> tuple[Tensor, list[bool]]:
    """Tokens, and for each whether `count` candidates were enough to know it. Temperature, top-k, top-p, min-p, in
    this order, each on what the one before left."""
    options = _Columns(rows, members, logits.device)
    whole = _probabilities(logits, members, options.temperature)
    kept, ids = (
        whole.topk(count, dim=-1) if count < whole.shape[-1] else whole.sort(dim=-1, descending=True, stable=True)
    )
    upto = kept.cumsum(-1)
    mass = torch.where(options.top_k > 0, upto[:, -1:], 1.0)  # top-p and min-p are shares of what top-k left
    keep = (upto - kept < options.top_p * mass) & (kept >= options.min_p * kept[:, :1])
    keep[:, 0] = True
    enough = (upto[:, -1:] >= options.top_p * mass)[:, 0]
    picked = ids.gather(-1, _invert(kept * keep, options.points))[:, 0]
    return picked, [ok or count == whole.shape[-1] for ok in enough.tolist()]


def _draw_unfiltered(logits: Tensor, rows: Sequence[Row], members: Sequence[int]) -> Tensor:
    """Temperature alone, or with min-p: no order is needed, so nothing is sorted."""
    options = _Columns(rows, members, logits.device)
    whole = _probabilities(logits, members, options.temperature)
    keep = whole >= options.min_p * whole.amax(-1, keepdim=True)
    return _invert(whole * keep, options.points)[:, 0]


class _Columns:
    """Parameters of several rows, each as a column [rows, 1] that broadcasts over candidates."""

    def __init__(self, rows: Sequence[Row], members: Sequence[int], device: torch.device) -> None:
        params = [_sampling(rows[i]).params for i in members]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

        self.temperature = column([p.temperature for p in params])
        self.top_k = column([float(p.top_k) for p in params])
        self.top_p = column([p.top_p for p in params])
        self.min_p = column([p.min_p for p in params])
        self.points = column([_point(rows[i]) for i in members])


def _probabilities(logits: Tensor, members: Sequence[int], temperature: Tensor) -> Tensor:
    """Shifted before it is divided: a temperature near zero then gives the likeliest token, not an overflow."""
    chosen = logits[list(members)].double()
    return ((chosen - chosen.amax(-1, keepdim=True)) / temperature).softmax(-1)


def _invert(weights: Tensor, points: Tensor) -> Tensor:
    """The index whose share of the line [0, sum) holds the point; `points` are in [0, 1)."""
    cumulative = weights.cumsum(-1)
    return torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True).clamp_(max=weights.shape[-1] - 1)


def _point(row: Row) -> float:
    sampling = _sampling(row)
    return uniform(sampling.seed, len(row.tokens))


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
