"""The executor that runs a decoder: plans in, tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from segue.base.config import EngineConfig
from segue.base.errors import InvalidRequest
from segue.engine import Candidates, Row, SearchStep, StepPlan, StepResult
from segue.kv import Copy
from segue.model.backend import Backend
from segue.model.batch import BatchBuilder
from segue.model.decoder import Decoder
from segue.model.kv_codec import Int8Codec
from segue.model.kv_copies import KVCopies
from segue.model.sampler import Draw, sample
from segue.model.searcher import Searcher

_TOUCHED_BYTES = 512 << 20


class ModelRunner:
    """Owns the KV memory of every layer in one tensor, [layers, 2, blocks, kv_heads, block_size, head_dim]."""

    _draw: Draw | None = None  # if not as the sampler does

    def __init__(self, decoder: Decoder, backend: Backend, config: EngineConfig) -> None:
        spec, size = decoder.spec, config.block_size
        shape = (spec.num_layers, 2, config.num_blocks, spec.num_kv_heads, size, spec.head_dim)
        self.kv = torch.empty(shape, dtype=backend.kv_dtype, device=backend.device)
        self._copies = KVCopies(self.kv, backend.kv_moves)
        self.kv_layout = self._copies.layout
        self._decoder = decoder
        self._searcher = Searcher(decoder)
        self._config = config

    @cached_property
    def _batches(self) -> BatchBuilder:
        config, size = self._config, self._config.block_size
        blocks = -(-config.max_sequence_len // size)
        return BatchBuilder(config.max_step_tokens, config.max_running, blocks, size, self.kv.device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        if plan.copies:
            self._copy(plan.copies)
        batch = self._batches.build(plan.rows)
        x = self._decoder.hidden(batch, self.kv)
        if not any(row.search is not None for row in plan.rows):
            rows = [row for row in plan.rows if row.sampling is not None]
            return sample(self._decoder.logits(x), rows, self._draw) if rows else StepResult(())
        return self._choose(x, plan.rows)

    def _choose(self, x: Tensor, rows: Sequence[Row]) -> StepResult:
        """Sample for some, search for others: `x` has a row for each token to sample, and one for each beam."""
        at, sampled, searches = 0, [], []
        for row in rows:
            if row.search is not None:
                count = max(len(row.search.tails), 1)
                searches.append((slice(at, at + count), row.search))
                at += count
            elif row.sampling is not None:
                sampled.append((at, row))
                at += 1
        result = StepResult(())
        if sampled:
            logits = self._decoder.logits(x[[at for at, _ in sampled]])
            result = sample(logits, [row for _, row in sampled], self._draw)
        return replace(result, candidates=[self._expand(x[part], step) for part, step in searches])

    def _expand(self, x: Tensor, step: SearchStep) -> Candidates:
        return self._searcher.expand(x, step)

    def forward(self, plan: StepPlan) -> Tensor:
        """Logits of the rows that sample; the KV of every row is written."""
        return self._decoder.logits(self._decoder.hidden(self._batches.build(plan.rows), self.kv))

    def read_kv(self, blocks: Sequence[int], start: int, stop: int, out: memoryview) -> None:
        self._copies.read(blocks, start, stop, out)

    def write_kv(self, blocks: Sequence[int], start: int, stop: int, data: memoryview, first: int, last: int) -> None:
        self._copies.write(blocks, start, stop, data, first, last)

    def host_memory(self, num_bytes: int) -> memoryview:
        return self._copies.host_memory(num_bytes)

    def blocks_out(self, blocks: Sequence[int], slots: Sequence[int], memory: memoryview) -> None:
        self._copies.blocks_out(blocks, slots, memory)

    def blocks_in(self, blocks: Sequence[int], slots: Sequence[int], memory: memoryview) -> None:
        self._copies.blocks_in(blocks, slots, memory)

    def codec(self) -> Int8Codec:
        if self.kv.dtype.itemsize < 2:
            raise InvalidRequest("tiers", "int8 makes nothing smaller of KV in fp8: leave it out")
        return Int8Codec(self.kv_layout, self.kv.shape[4])

    def warm_up(self) -> None:
        """Do what is slow only once, while nobody waits: a page's first write is, of the blocks that are handed out first."""
        if self.kv.device.type == "cpu":
            num_blocks = _TOUCHED_BYTES * self.kv.shape[2] // max(self.kv.nbytes, 1)
            self.kv[:, :, :num_blocks].zero_()

    def close(self) -> None:
        """Lets go of KV memory; the runner is of no use afterwards."""
        self.kv = torch.empty(0)
        self._copies = KVCopies(torch.empty(1, 1, 0, 1, 1, 1))

    def _copy(self, copies: Sequence[Copy]) -> None:
        sources = torch.tensor([copy.src for copy in copies], device=self.kv.device)
        targets = torch.tensor([copy.dst for copy in copies], device=self.kv.device)
        self.kv[:, :, targets] = self.kv[:, :, sources]
