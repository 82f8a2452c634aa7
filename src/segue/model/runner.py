"""The executor that runs a decoder: plans in, tokens out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segue.base.config import EngineConfig
from segue.engine import StepPlan, StepResult
from segue.kv import Copy, KVLayout
from segue.model.backend import Backend
from segue.model.batch import BatchBuilder
from segue.model.decoder import Decoder
from segue.model.sampler import sample

_WHOLE_NUMBERS = {2: torch.int16, 4: torch.int32}  # KV is copied as bits: numpy has no bf16


class ModelRunner:
    """Owns the KV memory of every layer in one tensor, [layers, 2, blocks, kv_heads, block_size, head_dim]."""

    def __init__(self, decoder: Decoder, backend: Backend, config: EngineConfig) -> None:
        spec, size = decoder.spec, config.block_size
        shape = (spec.num_layers, 2, config.num_blocks, spec.num_kv_heads, size, spec.head_dim)
        self.kv = torch.empty(shape, dtype=backend.kv_dtype, device=backend.device)
        self._layout = KVLayout(
            str(backend.kv_dtype).removeprefix("torch."), (spec.num_layers, 2, spec.num_kv_heads, spec.head_dim)
        )
        whole = _WHOLE_NUMBERS[self.kv.itemsize]
        self._items = np.dtype(f"i{self.kv.itemsize}")
        as_numbers = self.kv.view(whole)
        # On the CPU one thread copies, beside the one that reads or writes a file: torch would start more than there are cores.
        self._memory: Any = as_numbers.numpy() if self.kv.device.type == "cpu" else as_numbers
        self._decoder = decoder
        blocks = -(-config.max_sequence_len // size)
        self._batches = BatchBuilder(config.max_step_tokens, config.max_running, blocks, size, backend.device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        if plan.copies:
            self._copy(plan.copies)
        logits = self.forward(plan)
        rows = [row for row in plan.rows if row.sampling is not None]
        return sample(logits, rows) if rows else StepResult(())

    def forward(self, plan: StepPlan) -> Tensor:
        """Logits of the rows that sample; the KV of every row is written."""
        return self._decoder.forward(self._batches.build(plan.rows), self.kv)

    @property
    def kv_layout(self) -> KVLayout:
        return self._layout

    @torch.inference_mode()
    def read_kv(self, blocks: Sequence[int], start: int, stop: int, out: memoryview) -> None:
        chunk = np.frombuffer(out, self._items).reshape(self._chunk_shape(stop - start))
        if isinstance(self._memory, np.ndarray):
            for block, inside, place in self._pieces(blocks, start, start, stop):
                chunk[..., place, :] = self._memory[:, :, block, :, inside]
            return
        staged = torch.empty(chunk.shape, dtype=self._memory.dtype, device=self._memory.device)
        for block, inside, place in self._pieces(blocks, start, start, stop):
            staged[..., place, :] = self._memory[:, :, block, :, inside]
        torch.from_numpy(chunk).copy_(staged)

    @torch.inference_mode()
    def write_kv(self, blocks: Sequence[int], start: int, stop: int, data: memoryview, first: int, last: int) -> None:
        chunk = np.frombuffer(data, self._items).reshape(self._chunk_shape(stop - start))
        staged = chunk if isinstance(self._memory, np.ndarray) else torch.from_numpy(chunk.copy()).to(self.kv.device)
        for block, inside, place in self._pieces(blocks, start, first, last):
            self._memory[:, :, block, :, inside] = staged[..., place, :]

    def _chunk_shape(self, num_tokens: int) -> tuple[int, ...]:
        *outer, head_dim = self._layout.shape
        return (*outer, num_tokens, head_dim)

    def _pieces(self, blocks: Sequence[int], start: int, first: int, last: int) -> Iterator[tuple[int, slice, slice]]:
        """For each block that positions `first … last-1` lie in: its id, where in the block, where in a chunk from `start`."""
        size = self.kv.shape[4]
        while first < last:
            upto = min((first // size + 1) * size, last)
            inside = slice(first % size, first % size + upto - first)
            yield blocks[first // size], inside, slice(first - start, upto - start)
            first = upto

    def close(self) -> None:
        """Lets go of KV memory; the runner is of no use afterwards."""
        self.kv = torch.empty(0)
        self._memory = self.kv

    def _copy(self, copies: Sequence[Copy]) -> None:
        sources = torch.tensor([copy.src for copy in copies], device=self.kv.device)
        targets = torch.tensor([copy.dst for copy in copies], device=self.kv.device)
        self.kv[:, :, targets] = self.kv[:, :, sources]
