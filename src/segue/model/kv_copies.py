"""KV between an engine's blocks and plain memory, in logical order."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from segue.kv import KVLayout

_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # KV is copied as bits: numpy has no bf16
_STAGED_BYTES = 64 << 20  # of a device's memory, for blocks on their way


class KVMoves(Protocol):
    """What `KVCopies` does, into and out of a tensor of the CPU, by faster means."""

    def place(
        self, kv: Tensor, data: memoryview, blocks: Sequence[int], start: int, stop: int, first: int, last: int
    ) -> None: ...
    def blocks_out(self, kv: Tensor, blocks: Sequence[int], slots: Sequence[int], memory: memoryview) -> None: ...
    def blocks_in(self, kv: Tensor, blocks: Sequence[int], slots: Sequence[int], memory: memoryview) -> None: ...


class KVCopies:
    """Copies out of and into `kv`, [layers, 2, blocks, kv_heads, block_size, head_dim].

    On the CPU the calling thread alone copies, by numpy or by `moves`: torch would start more threads than there are
    cores, beside those that read or write a file.
    """

    def __init__(self, kv: Tensor, moves: KVMoves | None = None) -> None:
        layers, two, _, heads, self._block_size, head_dim = kv.shape
        self.layout = KVLayout(str(kv.dtype).removeprefix("torch."), (layers, two, heads, head_dim))
        self._kv = kv
        self._moves = moves
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
        if self._moves is not None:
            self._moves.place(self._kv, data, blocks, start, stop, first, last)
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

    # Whole blocks, to and from slots

    def host_memory(self, num_bytes: int) -> memoryview:
        if self._kv.device.type != "cuda":
            return memoryview(
                mmap.mmap(-1, num_bytes, access=mmap.ACCESS_COPY)
            )  # of this process alone: its pages come faster
        pinned: Any = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return memoryview(pinned)

    def blocks_out(self, blocks: Sequence[int], slots: Sequence[int], memory: memoryview) -> None:
        if self._moves is not None:
            self._moves.blocks_out(self._kv, blocks, slots, memory)
            return
        held = self._slots(memory)
        if isinstance(self._memory, np.ndarray):
            for block, slot in zip(blocks, slots, strict=True):
                held[slot] = self._memory[:, :, block]
            return
        with torch.inference_mode():
            for ids, run in self._staged(blocks, slots):
                staged = self._memory.index_select(2, ids).movedim(2, 0).contiguous()
                for first, last, slot in run:
                    to = torch.from_numpy(held[slot : slot + last - first])
                    to.copy_(staged[first:last], non_blocking=True)
                torch.cuda.synchronize(self._kv.device)

    def blocks_in(self, blocks: Sequence[int], slots: Sequence[int], memory: memoryview) -> None:
        if self._moves is not None:
            self._moves.blocks_in(self._kv, blocks, slots, memory)
            return
        held = self._slots(memory)
        if isinstance(self._memory, np.ndarray):
            for block, slot in zip(blocks, slots, strict=True):
                self._memory[:, :, block] = held[slot]
            return
        with torch.inference_mode():
            for ids, run in self._staged(blocks, slots):
                shape = (len(ids), *held.shape[1:])
                staged = torch.empty(shape, dtype=self._memory.dtype, device=self._memory.device)
                for first, last, slot in run:
                    staged[first:last].copy_(torch.from_numpy(held[slot : slot + last - first]), non_blocking=True)
                self._memory.index_copy_(2, ids, staged.movedim(0, 2))
                torch.cuda.synchronize(self._kv.device)

    def _slots(self, memory: memoryview) -> Any:
        """[slots, layers, 2, kv_heads, block_size, head_dim]"""
        shape = self._shape(self._block_size)
        whole = len(memory) // (self._block_size * self.layout.token_bytes) * self._block_size * self.layout.token_bytes
        return np.frombuffer(memory[:whole], self._items).reshape(-1, *shape)

    def _staged(
        self, blocks: Sequence[int], slots: Sequence[int]
    ) -> Iterator[tuple[Tensor, list[tuple[int, int, int]]]]:
        """As many blocks as go at once, on the device, and the runs of slots that follow each other: first, last, slot."""
        many = max(_STAGED_BYTES // (self._block_size * self.layout.token_bytes), 1)
        for at in range(0, len(blocks), many):
            part = slots[at : at + many]
            starts = [0, *(i for i in range(1, len(part)) if part[i] != part[i - 1] + 1), len(part)]
            ids = torch.tensor(blocks[at : at + many], device=self._kv.device)
            yield ids, [(first, last, part[first]) for first, last in pairwise(starts)]

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
