"""The best continuations of many groups of beams at once, out of whole vocabularies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from segue.engine import Candidates, SearchStep
from segue.model.cuda import kernels


def is_plain(step: SearchStep) -> bool:
    """Whether nothing limits or shuffles what may follow."""
    return step.constraint is None and not step.params.allowed_token_ids and step.params.temperature == 0.0


def best_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, and their log-probabilities. The n largest numbers are in the n runs with the largest
    maxima, so only these are looked through."""
    rows, vocab = logits.shape
    count = min(count, vocab)
    maxima, total = kernels.survey(logits)
    if maxima.shape[1] <= count:
        top, tokens = logits.float().topk(count, dim=-1)
        return tokens, top - total[:, None]
    runs = maxima.topk(count, dim=-1, sorted=False).indices
    places = runs[:, :, None] * kernels.CHUNK + torch.arange(kernels.CHUNK, device=logits.device)
    places = places.view(rows, -1)
    found = logits.gather(1, places.clamp(max=vocab - 1)).float().masked_fill_(places >= vocab, -torch.inf)
    top, at = found.topk(count, dim=-1)
    return places.gather(1, at), top - total[:, None]


def expand(best: tuple[Tensor, Tensor], steps: Sequence[SearchStep]) -> list[Candidates]:
    """`best` has a row for each beam, group after group. A group's candidates are among the best of each of its beams, so two
    small choices take the place of a large one; all that comes back comes in one copy."""
    tokens, logprobs = best
    device, most, groups = tokens.device, tokens.shape[1], len(steps)
    widths = [len(step.scores) for step in steps]
    widest = max(widths)
    before = torch.full((groups, widest), -torch.inf)
    for number, step in enumerate(steps):
        before[number, : widths[number]] = torch.tensor(step.scores)
    scores = before.to(device, non_blocking=True)
    if min(widths) < widest:
        place = torch.zeros((groups, widest), dtype=torch.long)
        at = 0
        for number, width in enumerate(widths):
            place[number, :width] = torch.arange(at, at + width)
            at += width
        rows = place.flatten().to(device)
        tokens, logprobs = tokens[rows], logprobs[rows]
    totals = logprobs.view(groups, widest, most) + scores[:, :, None]
    values, where = totals.view(groups, -1).topk(most, dim=-1)
    chosen = tokens.reshape(groups, -1).gather(1, where)
    packed = torch.stack([values.view(torch.int32), where.int(), chosen.int()]).cpu()
    numbers, places, ids = packed[0].view(torch.float32).tolist(), packed[1].tolist(), packed[2].tolist()
    found = []
    for number, (step, width) in enumerate(zip(steps, widths, strict=True)):
        kept = min(step.num_candidates, width * most)
        if numbers[number][0] != numbers[number][0]:
            raise ValueError("the model gave logits that are not numbers")
        beams = [place // most for place in places[number][:kept]]
        found.append(Candidates(beams, ids[number][:kept], numbers[number][:kept], [0] * kept, [False] * kept))
    return found
