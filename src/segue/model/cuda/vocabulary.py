"""Out of whole vocabularies: the likeliest tokens of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from segue.model.cuda import kernels


def largest(values: Tensor, count: int) -> Tensor:
    """Where each row's largest numbers are, in order; of equal ones the first (`topk` takes any, and half precision has many)."""
    bits = values.float().view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32  # as whole numbers they have the same order
    return (order - torch.arange(values.shape[-1], device=values.device)).topk(count, dim=-1).indices


def best_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, and their log-probabilities. The n largest numbers are in the n runs with the largest
    maxima, so only these are looked through. Of equal ones the first come first."""
    rows, vocab = logits.shape
    count = min(count, vocab)
    maxima, total = kernels.survey(logits)
    if maxima.shape[1] <= count:
        tokens = largest(logits, count)
        return tokens, logits.gather(1, tokens).float() - total[:, None]
    runs = largest(maxima, count).sort(dim=-1).values
    places = runs[:, :, None] * kernels.CHUNK + torch.arange(kernels.CHUNK, device=logits.device)
    places = places.view(rows, -1)
    found = logits.gather(1, places.clamp(max=vocab - 1)).float().masked_fill_(places >= vocab, -torch.inf)
    at = largest(found, count)
    return places.gather(1, at), found.gather(1, at) - total[:, None]
