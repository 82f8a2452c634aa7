"""How much of a device's memory a step takes besides weights and KV: by carrying one out."""

from __future__ import annotations

from array import array

import torch

from segue.base.types import SamplingParams
from segue.engine import Row, Sampling
from segue.model.cuda.backend import CudaBackend
from segue.model.cuda.choosing import best_tokens
from segue.model.cuda.steps import CudaSteps
from segue.model.decoder import Decoder

_CANDIDATES = 64


@torch.inference_mode()
def step_bytes(
    decoder: Decoder, backend: CudaBackend, block_size: int, max_tokens: int, max_running: int, max_len: int
) -> int:
    """Of the largest step there can be: `max_tokens` tokens of prompts, and as many rows of logits, as a search has them."""
    spec, device = decoder.spec, backend.device
    length = min(max_tokens, max_len)
    blocks = -(-length // block_size)
    shape = (spec.num_layers, 2, blocks + 1, spec.num_kv_heads, block_size, spec.head_dim)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kv = torch.zeros(shape, dtype=backend.kv_dtype, device=device)
    steps = CudaSteps(decoder, backend, kv, max_running, -(-max_len // block_size), max_tokens)
    table, tokens = array("i", range(1, blocks + 1)), array("i", bytes(4 * length))
    sampling = Sampling(SamplingParams(), 0, 1, frozenset())
    rows: list[Row] = []
    left = max_tokens
    while left > 0 and len(rows) < max_running:
        count = min(left, length)
        rows.append(Row(len(rows), tokens, 0, count, table, sampling))
        left -= count
    hidden = steps.run(rows, needs_head=False).hidden
    logits = decoder.raw_logits(hidden[:1].expand(max_tokens, -1).contiguous())
    best_tokens(logits, _CANDIDATES)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before - kv.nbytes
    del kv, steps, hidden, logits
    torch.cuda.empty_cache()
    return peak
