"""Turns a plan's rows into the arrays a forward pass reads, without per-token Python work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from segue.engine import Row

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's query rows `start … stop-1` of the batch, the last `stop - start` of its `context` tokens."""

    start: int
    stop: int
    context: int


@dataclass(frozen=True, slots=True)
class Beams:
    """Rows `start … stop-1` are beams of the batch's i-th sequence: all see the first `num_shared` tokens of its table, and each
    behind them the slots of its own tail, the last of which is where its own KV goes."""

    sequence: int
    start: int
    stop: int
    num_shared: int
    tails: Tensor  # [beams, tokens] int32: block * block_size + offset


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one step, on the device. Valid until the next batch is built: the buffers are reused."""

    tokens: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens] int64: block * block_size + offset, where each token's KV goes
    tables: Tensor  # [sequences, max_blocks]
    starts: Tensor  # [sequences + 1]: where each sequence's rows begin
    contexts: Tensor  # [sequences]: tokens with KV, this step's included
    sample_rows: Tensor  # [samples] int64: which rows to sample from
    spans: Sequence[Span]
    groups: Sequence[Beams] = ()  # of those sequences that are beams
    attention: object = None  # what a backend that is given its own kind of batch needs besides


class BatchBuilder:
    """Owns one int32 buffer, laid out for the largest step; a CUDA device gets it in a single copy."""

    def __init__(
        self, max_tokens: int, max_sequences: int, max_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._max_blocks = max_blocks
        sizes = (4 * max_tokens, 2 * max_sequences + 1, max_sequences * max_blocks)
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device_buffer = torch.zeros_like(self._host, device=device) if device.type == "cuda" else self._host
        self._array: IntArray = self._host.numpy()
        self._copied: torch.cuda.Event | None = None  # the last copy out of the host buffer has been made

    def build(self, rows: Sequence[Row]) -> Batch:
        if self._copied is not None:
            self._copied.synchronize()  # a step that samples nothing gives no other reason to have waited
        counts = np.array([row.stop - row.start for row in rows], dtype=np.int32)
        contexts = np.array([_context(row) for row in rows], dtype=np.int32)
        num_tokens, num_rows = int(counts.sum()), len(rows)
        width = max(self._num_blocks(row) for row in rows)
        lengths = (num_tokens, num_tokens, num_tokens, num_rows + 1, num_rows, num_tokens, num_rows * width)
        ends = np.cumsum(lengths)
        cut = [slice(end - length, end) for end, length in zip(ends.tolist(), lengths, strict=True)]
        tokens, positions, slots, starts, context, samples, tables = (self._array[part] for part in cut)
        tables = tables.reshape(num_rows, width)

        starts[0] = 0
        np.cumsum(counts, out=starts[1:])
        context[:] = contexts
        self._copy_rows(rows, starts, tokens, tables)
        first_positions = contexts - counts
        positions[:] = np.arange(num_tokens, dtype=np.int32) - np.repeat(starts[:-1] - first_positions, counts)
        sequence_of = np.repeat(np.arange(num_rows), counts)
        size = self._block_size
        slots[:] = tables[sequence_of, np.clip(positions // size, 0, width - 1)] * size + positions % size
        offsets = starts.tolist()
        groups = [self._group(i, row, offsets, positions, slots) for i, row in enumerate(rows) if _is_group(row)]
        if groups:
            wanted = [np.arange(*_sampled(row, offsets[i : i + 2]), dtype=np.int32) for i, row in enumerate(rows)]
            chosen = np.concatenate(wanted)
        else:
            chosen = starts[1:][[i for i, row in enumerate(rows) if row.sampling or row.search]] - 1
        samples[: len(chosen)] = chosen
        return self._on_device(cut, width, num_rows, len(chosen), offsets, contexts.tolist(), groups)

    def _group(self, i: int, row: Row, offsets: list[int], positions: IntArray, slots: IntArray) -> Beams:
        """Beams are side by side in memory, and all at one position of their lines."""
        assert row.search is not None
        begin, end = offsets[i], offsets[i + 1]
        blocks = np.frombuffer(row.blocks, np.int32)
        tails = np.array(row.search.tails, np.int32)
        tails = blocks[tails // self._block_size] * self._block_size + tails % self._block_size
        positions[begin:end] = _context(row) - 1
        slots[begin:end] = tails[:, -1]
        return Beams(i, begin, end, row.search.num_shared, torch.from_numpy(tails).to(self._device))

    def _num_blocks(self, row: Row) -> int:
        """That a batch's table needs: beams' own tokens are found by their slots."""
        if row.search is not None and row.search.tails:
            return -(-row.search.num_shared // self._block_size)
        return len(row.blocks)

    def _copy_rows(self, rows: Sequence[Row], starts: IntArray, tokens: IntArray, tables: IntArray) -> None:
        offsets = starts.tolist()
        for i, row in enumerate(rows):
            tokens[offsets[i] : offsets[i + 1]] = row.tokens if _is_group(row) else row.tokens[row.start : row.stop]
            blocks = row.blocks[: self._num_blocks(row)]
            tables[i, : len(blocks)] = blocks

    def _on_device(
        self,
        cut: list[slice],
        width: int,
        num_rows: int,
        num_samples: int,
        starts: list[int],
        contexts: list[int],
        groups: Sequence[Beams],
    ) -> Batch:
        buffer = self._device_buffer
        if buffer is not self._host:
            used = cut[-1].stop
            buffer[:used].copy_(self._host[:used], non_blocking=True)
            self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        tokens, positions, slots, starts_, context, samples, tables = (buffer[part] for part in cut)
        spans = [Span(a, b, c) for a, b, c in zip(starts, starts[1:], contexts, strict=False)]
        return Batch(
            tokens,
            positions,
            slots.long(),
            tables.view(num_rows, width),
            starts_,
            context,
            samples[:num_samples].long(),
            spans,
            groups,
        )


def _is_group(row: Row) -> bool:
    return row.search is not None and bool(row.search.tails)


def _context(row: Row) -> int:
    """Tokens that the row's last query sees, itself among them."""
    return row.search.num_shared + len(row.search.tails[0]) if row.search is not None and row.search.tails else row.stop


def _sampled(row: Row, extent: list[int]) -> tuple[int, int]:
    """Which of its rows are sampled from: all beams, or the last token, or none."""
    begin, end = extent
    if _is_group(row):
        return begin, end
    return (end - 1, end) if row.sampling is not None or row.search is not None else (end, end)
