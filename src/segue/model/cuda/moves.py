"""KV between the device and the host, on a stream of its own: while copies run, so do steps.

    device blocks ── gathered, all layers in one launch ──▶ staging ── the copy engine ──▶ page-locked memory

What a copy must wait for is said by events. Out: the last step that has been taken over, and not the one that runs, which writes
to no block that is full. In: also the one that runs, since a sequence that has ended may have a last token in it, and its blocks
may be another's by now. The caller waits for the copies alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from segue.model.cuda import kernels

_STAGED_BYTES = 64 << 20  # of the device's memory, for blocks on their way
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class CudaMoves:
    """`KVMoves` for one KV tensor."""

    def __init__(self, kv: Tensor) -> None:
        self._kv = kv.view(_BITS[kv.itemsize])
        self._block_bytes = kv[:, :, 0].numel() * kv.itemsize
        self._stream = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._written: torch.cuda.Event | None = None
        self._lock = threading.Lock()
        many = max(_STAGED_BYTES // self._block_bytes, 1)  # there from the beginning: an eviction must not fail for it
        self._staging = torch.empty(many, self._block_bytes // kv.itemsize, dtype=self._kv.dtype, device=kv.device)
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def step_ended(self) -> None:
        """All that was launched so far has been taken over: copies out wait for it, and for nothing later."""
        self._written = self._written or torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._written.record()

    @torch.inference_mode()
    def blocks_out(self, kv: Tensor, blocks: Sequence[int], slots: Sequence[int], memory: memoryview) -> None:
        held = self._slots(memory)
        with self._lock, torch.cuda.stream(self._stream):
            if self._written is not None:
                self._stream.wait_event(self._written)
            for ids, runs in self._parts(blocks, slots):
                staged = self._staging[: len(ids)]
                kernels.gather_blocks(self._kv, ids, staged)
                for first, last, slot in runs:
                    held[slot : slot + last - first].copy_(staged[first:last], non_blocking=True)
            self._wait()

    @torch.inference_mode()
    def blocks_in(self, kv: Tensor, blocks: Sequence[int], slots: Sequence[int], memory: memoryview) -> None:
        held, running = self._slots(memory), torch.cuda.current_stream(self._kv.device)
        with self._lock, torch.cuda.stream(self._stream):
            is_first = True
            for ids, runs in self._parts(blocks, slots):
                staged = self._staging[: len(ids)]
                for first, last, slot in runs:
                    staged[first:last].copy_(held[slot : slot + last - first], non_blocking=True)
                if is_first:
                    self._stream.wait_stream(running)
                    is_first = False
                kernels.scatter_blocks(self._kv, ids, staged)
            self._wait()

    @torch.inference_mode()
    def take(self, blocks: Sequence[int], start: int, stop: int, out: memoryview) -> None:
        """The KV of positions `start … stop-1`, in logical order."""
        with self._lock, torch.cuda.stream(self._stream):
            if self._written is not None:
                self._stream.wait_event(self._written)
            at, inside = self._places(blocks, start, stop)
            found = self._kv[:, :, at, :, inside].permute(1, 2, 3, 0, 4).contiguous()
            pinned = self._page_locked(found.nbytes)
            pinned.view(found.dtype).copy_(found.view(-1), non_blocking=True)
            self._wait()
            np.frombuffer(out, np.uint8)[:] = pinned.numpy()

    @torch.inference_mode()
    def place(
        self, kv: Tensor, data: memoryview, blocks: Sequence[int], start: int, stop: int, first: int, last: int
    ) -> None:
        running = torch.cuda.current_stream(self._kv.device)
        layers, two, _, heads, _, dim = self._kv.shape
        with self._lock, torch.cuda.stream(self._stream):
            pinned = self._page_locked(len(data))
            pinned.numpy()[:] = np.frombuffer(data, np.uint8)
            there = pinned.view(self._kv.dtype).to(self._kv.device, non_blocking=True)
            wanted = there.view(layers, two, heads, stop - start, dim)[:, :, :, first - start : last - start]
            at, inside = self._places(blocks, first, last)
            self._stream.wait_stream(running)
            self._kv[:, :, at, :, inside] = wanted.permute(3, 0, 1, 2, 4)
            self._wait()

    def _wait(self) -> None:
        self._done.record(self._stream)
        self._done.synchronize()

    def _places(self, blocks: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        size = self._kv.shape[4]
        positions = np.arange(start, stop)
        at = np.asarray(blocks, np.int64)[positions // size]
        places = torch.from_numpy(np.stack([at, positions % size])).to(self._kv.device)
        return places[0], places[1]

    def _parts(
        self, blocks: Sequence[int], slots: Sequence[int]
    ) -> Iterator[tuple[Tensor, list[tuple[int, int, int]]]]:
        """As many blocks as go at once, and the runs of slots that follow each other: first, last, slot."""
        many = len(self._staging)
        for at in range(0, len(blocks), many):
            part = slots[at : at + many]
            starts = [0, *(i for i in range(1, len(part)) if part[i] != part[i - 1] + 1), len(part)]
            ids = torch.tensor(blocks[at : at + many], dtype=torch.int32).to(self._kv.device)
            yield ids, [(first, last, part[first]) for first, last in pairwise(starts)]

    def _slots(self, memory: memoryview) -> Tensor:
        whole = len(memory) // self._block_bytes * self._block_bytes
        items: npt.NDArray[np.uint8] = np.frombuffer(memory[:whole], np.uint8)
        return torch.from_numpy(items).view(self._kv.dtype).view(-1, self._block_bytes // self._kv.itemsize)

    def _page_locked(self, num_bytes: int) -> Tensor:
        if len(self._pinned) < num_bytes:
            self._pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return self._pinned[:num_bytes]
