"""The best continuations of many groups of beams at once, out of whole vocabularies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from segue.engine import Candidates, SearchStep


def is_plain(step: SearchStep) -> bool:
    """Whether nothing limits or shuffles what may follow."""
    return step.constraint is None and not step.params.allowed_token_ids and step.params.temperature == 0.0


def expand(logits: Tensor, steps: Sequence[SearchStep]) -> list[Candidates]:
    """`logits` has a row for each beam, group after group. Each group's candidates are among the best of each of its beams, so
    two small choices take the place of a large one; all that comes back comes in one copy."""
    device = logits.device
    widths = [len(step.scores) for step in steps]
    before = [score for step in steps for score in step.scores]
    scores = torch.tensor(before, dtype=torch.float32).to(device, non_blocking=True)
    most = min(max(step.num_candidates for step in steps), logits.shape[1])
    top, tokens = logits.topk(most, dim=-1)
    totals = top.float() - logits.float().logsumexp(-1, keepdim=True) + scores[:, None]
    groups, widest = len(steps), max(widths)
    if min(widths) < widest:
        padded = torch.full((groups, widest, most), -torch.inf, device=device)
        places = torch.full((groups, widest, most), 0, dtype=tokens.dtype, device=device)
        at = 0
        for number, width in enumerate(widths):
            padded[number, :width], places[number, :width] = totals[at : at + width], tokens[at : at + width]
            at += width
        totals, tokens = padded, places
    count = min(most, widest * most)
    best, where = totals.view(groups, -1).topk(count, dim=-1)
    chosen = tokens.view(groups, -1).gather(1, where)
    packed = torch.stack([best.view(torch.int32), (where // most).int(), chosen.int()]).cpu()
    values, beams, ids = packed[0].view(torch.float32).tolist(), packed[1].tolist(), packed[2].tolist()
    found = []
    for number, (step, width) in enumerate(zip(steps, widths, strict=True)):
        kept = min(step.num_candidates, width * most)
        if values[number][0] != values[number][0]:
            raise ValueError("the model gave logits that are not numbers")
        nothing = [0] * kept
        found.append(
            Candidates(beams[number][:kept], ids[number][:kept], values[number][:kept], nothing, [False] * kept)
        )
    return found
