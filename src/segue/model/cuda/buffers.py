"""Where recorded steps read their inputs: one array of the device, and those of the host that it is copied from."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from segue.kv import Copy
from segue.model.cuda.inputs import TILE_FIELDS, Inputs
from segue.model.cuda.work import FIELDS, MOST_PIECES, IntArray, most_results

TAIL = 64  # tokens that a beam of a recorded step has for itself, at most
_BUFFERS = 8  # of the host, that steps which have not begun yet read from
T = TypeVar("T")


class Fields(NamedTuple, Generic[T]):
    """`Inputs`, and besides which of the device's tokens is each row's, and the blocks to copy: parts of one array."""

    tokens: T
    positions: T
    slots: T
    contexts: T
    samples: T
    sources: T
    copies: T
    starts: T
    tail_counts: T
    counts: T  # how many pieces of own, of shared, tiles, items, copies
    own: T
    shared: T
    results: T
    tiles: T
    tables: T
    items: T
    tails: T


def parts(sizes: Fields[int]) -> Fields[slice]:
    """One after the other."""
    ends = np.cumsum(sizes).tolist()
    return Fields(*(slice(end - size, end) for end, size in zip(ends, sizes, strict=True)))


class _Buffer(NamedTuple):
    """Memory of the host that a step's inputs are written to, and the last copy out of it."""

    memory: Tensor
    fields: Fields[IntArray]
    copied: torch.cuda.Event | None = None


class Buffers:
    """For steps of up to `rows` rows, of which the first `few` may be of more than one piece, or fed."""

    def __init__(
        self, rows: int, few: int, max_copies: int, max_sequences: int, max_blocks: int, device: torch.device
    ) -> None:
        self.max_sequences, self.max_pieces, self.max_copies = min(max_sequences, rows), few * MOST_PIECES, max_copies
        self.max_results, self._max_blocks = most_results(few), max_blocks
        sizes = Fields(
            tokens=rows,
            positions=rows,
            slots=rows,
            contexts=rows,
            samples=rows,
            sources=few,
            copies=2 * max_copies,
            starts=rows + 1,
            tail_counts=rows,
            counts=5,
            own=self.max_pieces * FIELDS,
            shared=self.max_pieces * FIELDS,
            results=self.max_results,
            tiles=rows * TILE_FIELDS,
            tables=self.max_sequences * max_blocks,
            items=rows * FIELDS,
            tails=rows * TAIL,
        )
        found, pin = parts(sizes), device.type == "cuda"
        self._tables_at, self._tails_at = found.tables.start, found.tails.start
        hosts = [
            torch.zeros(found.tails.stop, dtype=torch.int32, pin_memory=pin) for _ in range(_BUFFERS if pin else 1)
        ]
        self.device = torch.zeros_like(hosts[0], device=device)
        self.read = Fields(*(self.device[part] for part in found))
        self._written = deque(_Buffer(host, Fields(*(host.numpy()[part] for part in found))) for host in hosts)

    def holds(self, inputs: Inputs, copies: Sequence[Copy]) -> bool:
        return (
            len(inputs.tables) <= self.max_sequences
            and inputs.tables.shape[1] <= self._max_blocks
            and inputs.tails.shape[1] <= TAIL
            and len(copies) <= self.max_copies
            and len(inputs.own) <= self.max_pieces
            and len(inputs.shared) <= self.max_pieces
            and len(inputs.results) <= self.max_results
        )

    def fill(self, inputs: Inputs, copies: Sequence[Copy], size: int, sources: IntArray | None = None) -> None:
        """Rows beyond the step's own, up to `size`, write to the null block, and attend to nothing."""
        buffer = self._written[0]
        if buffer.copied is not None:
            buffer.copied.synchronize()
        there, count = buffer.fields, len(inputs.tokens)
        for field, values in zip(there[:5], inputs[:5], strict=True):  # from tokens to samples
            field[: len(values)] = values
            if len(values) < size:
                field[len(values) : size] = 0
        if sources is not None:
            there.sources[: len(sources)] = sources
        if copies:
            there.copies[: 2 * len(copies)] = np.array(copies, np.int32).ravel()
        there.starts[: count + 1] = inputs.starts
        if count < size:
            there.starts[count + 1 : size + 1] = inputs.starts[-1]
        there.counts[:4], there.counts[4] = inputs.counts, len(copies)
        for field, values in zip(there[10:14], inputs[8:12], strict=True):  # from own to tiles
            if values.size:
                field[: values.size] = values.ravel()
        used, width = inputs.tables.shape
        there.tables.reshape(-1, self._max_blocks)[:used, :width] = inputs.tables
        upto = self._tables_at + used * self._max_blocks
        if inputs.tails.size:
            there.items[: inputs.items.size] = inputs.items.ravel()
            there.tail_counts[:count] = inputs.tail_counts
            there.tail_counts[count:size] = 0
            there.tails.reshape(-1, TAIL)[: len(inputs.tails), : inputs.tails.shape[1]] = inputs.tails
            upto = self._tails_at + len(inputs.tails) * TAIL
        self.device[:upto].copy_(buffer.memory[:upto], non_blocking=True)
        if self.device.is_cuda:
            copied = buffer.copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            buffer = buffer._replace(copied=copied)
        self._written.popleft()
        self._written.append(buffer)
