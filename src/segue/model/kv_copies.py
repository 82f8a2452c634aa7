"""KV between an engine's blocks and plain memory, in logical order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segue.kv import KVLayout

_WHOLE_NUMBERS = {2: torch.int16, 4: torch.int32}  # KV is copied as bits: numpy has no bf16
Place = Callable[[Tensor, memoryview, Sequence[int], int, int, int, int], None]  # as `KVCopies.write`, into a tensor


class KVCopies:
    """Copies out of and into `kv`, [layers, 2, blocks, kv_heads, block_size, head_dim].

    On the CPU the calling thread alone copies, by numpy or by `place`: torch would start more threads than there are
    cores, beside those that read or write a file.
    """

    def __init__(self, kv: Tensor, place: Place | None = None) -> None:
        layers, two, _, heads, self._block_size, head_dim = kv.shape
        self.layout = KVLayout(str(kv.dtype).removeprefix("torch."), (layers, two, heads, head_dim))
        self._kv = kv
        self._place = place
        self._items = np.dtype(f"i{kv.itemsize}")
        as_numbers = kv.view(_WHOLE_NUMBERS[kv.itemsize])
        self._memory: Any = as_numbers.numpy() if kv.device.type == "cpu" else as_numbers

    def read(self, blocks: Sequence[int], start: int, stop: int, out: memoryview) -> None:
        chunk = np.frombuffer(out, self._items).reshape(self._shape(stop - start))
        if isinstance(self._memory, np.ndarray):
            for block, inside, place in self._pieces(blocks, start, start, stop):
                chunk[..., place, :] = self._memory[:, :, block, :, inside]
            return
        with torch.inference_mode():
            staged = torch.empty(chunk.shape, dtype=self._memory.dtype, device=self._memory.device)
            for block, inside, place in self._pieces(blocks, start, start, stop):
                staged[..., place, :] = self._memory[:, :, block, :, inside]
            torch.from_numpy(chunk).copy_(staged)

    def write(self, blocks: Sequence[int], start: int, stop: int, data: memoryview, first: int, last: int) -> None:
        if self._place is not None:
            self._place(self._kv, data, blocks, start, stop, first, last)
            return
        chunk = np.frombuffer(data, self._items).reshape(self._shape(stop - start))
        if isinstance(self._memory, np.ndarray):
            for block, inside, place in self._pieces(blocks, start, first, last):
                self._memory[:, :, block, :, inside] = chunk[..., place, :]
            return
        with torch.inference_mode():
            staged = torch.from_numpy(chunk.copy()).to(self._kv.device)
            for block, inside, place in self._pieces(blocks, start, first, last):
                self._memory[:, :, block, :, inside] = staged[..., place, :]

    def _shape(self, num_tokens: int) -> tuple[int, ...]:
        *outer, head_dim = self.layout.shape
        return (*outer, num_tokens, head_dim)

    def _pieces(self, blocks: Sequence[int], start: int, first: int, last: int) -> Iterator[tuple[int, slice, slice]]:
        """For each block that positions `first … last-1` lie in: its id, where in the block, where in a chunk from `start`."""
        size = self._block_size
        while first < last:
            upto = min((first // size + 1) * size, last)
            inside = slice(first % size, first % size + upto - first)
            yield blocks[first // size], inside, slice(first - start, upto - start)
            first = upto
