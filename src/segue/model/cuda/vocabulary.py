"""Out of whole vocabularies: the likeliest tokens of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from segue.model.cuda import kernels


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
