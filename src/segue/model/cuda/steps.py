"""Steps on the device: those of few tokens are graphs, recorded once for each size; the others are launched call by call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from segue.engine import Row
from segue.model.batch import Batch
from segue.model.cuda import kernels
from segue.model.cuda.backend import Attention, CudaBackend, Pieces
from segue.model.cuda.inputs import Inputs, make_inputs
from segue.model.cuda.search import best_tokens
from segue.model.cuda.work import FIELDS, MOST_PIECES, IntArray, most_results
from segue.model.decoder import Decoder

SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)  # rows of a recorded step
MOST_ROWS = SIZES[-1]
_TAIL = 64  # tokens that a beam of a recorded step has for itself, at most


class Step(NamedTuple):
    """What came of a step: valid until the next one. `tokens` are the likeliest of each row, where the head was asked for; for
    a search, `best` are those that it looks at, and their log-probabilities."""

    hidden: Tensor
    logits: Tensor | None = None
    tokens: Tensor | None = None
    best: tuple[Tensor, Tensor] | None = None

    def cut(self, count: int) -> Step:
        """The first rows."""
        best = (self.best[0][:count], self.best[1][:count]) if self.best is not None else None
        logits, tokens = (each[:count] if each is not None else None for each in (self.logits, self.tokens))
        return Step(self.hidden[:count], logits, tokens, best)


class Launched(NamedTuple):
    """A step under way: `arrived` holds its tokens once it is `done`."""

    tokens: Tensor  # on the device, until the next step's
    sequences: list[int]
    arrived: Tensor
    done: torch.cuda.Event


class _Views(NamedTuple):
    """`Inputs` on the device."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    contexts: Tensor
    samples: Tensor
    starts: Tensor
    counts: Tensor
    own: Tensor
    shared: Tensor
    last: Tensor
    results: Tensor
    tables: Tensor
    tails: Tensor
    tiles: Tensor


class _Kind(NamedTuple):
    """What a recorded step is made for."""

    rows: int
    has_own: bool
    has_shared: bool
    has_tails: bool
    has_head: bool
    num_candidates: int = 0  # of each row, that a search looks at


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    step: Step


class _Layout:
    """Where in one buffer each of a step's arrays lies: with room for any step of few rows, or as large as a step needs."""

    def __init__(self, sizes: Sequence[int]) -> None:
        ends = np.cumsum(sizes)
        self.slices = [slice(end - size, end) for end, size in zip(ends.tolist(), sizes, strict=True)]


class CudaSteps:
    def __init__(
        self, decoder: Decoder, backend: CudaBackend, kv: Tensor, max_sequences: int, max_blocks: int, max_tokens: int
    ) -> None:
        spec = decoder.spec
        self._decoder = decoder
        self._backend = backend
        self._kv = kv
        self._block_size = kv.shape[4]
        self._max_blocks = max_blocks
        rows = min(MOST_ROWS, max_tokens)
        sequences = min(max_sequences, rows)
        self._fixed = _Layout(
            (
                *(rows,) * 6,
                rows + 1,
                3,
                rows * MOST_PIECES * FIELDS,
                rows * MOST_PIECES * FIELDS,
                rows * FIELDS,
                most_results(rows),
                rows * _TAIL,
                sequences * max_blocks,
            )
        )
        self._max_rows, self._max_sequences = rows, sequences
        device = backend.device
        self._host = torch.zeros(self._fixed.slices[-1].stop, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros_like(self._host, device=device)
        results = most_results(rows)
        self._sums = torch.empty(results, spec.num_heads, spec.head_dim, dtype=torch.float32, device=device)
        self._logs = torch.empty(results, spec.num_heads, 2, dtype=torch.float32, device=device)
        self._values = torch.empty(rows, kernels.PARTS, dtype=torch.float32, device=device)
        self._places = torch.empty(rows, kernels.PARTS, dtype=torch.int32, device=device)
        self._copied: torch.cuda.Event | None = None
        self._turn = 0  # of two that tokens arrive in: one is read while the other is written
        pin = device.type == "cuda"
        self._arrived = [torch.zeros(rows, dtype=torch.int32, pin_memory=pin) for _ in range(2)]
        self._done = [torch.cuda.Event() for _ in range(2)] if pin else []  # type: ignore[no-untyped-call]
        self._recorded: dict[_Kind, _Recorded] = {}
        self._pool: Any = None

    def run(self, rows: Sequence[Row], *, needs_head: bool, num_candidates: int = 0) -> Step:
        """Of the rows that are sampled from, in order. With `num_candidates`, so many of each, for a search."""
        inputs = self._inputs(rows)
        if not self._fits(inputs):
            hidden = self._decoder.hidden(self._batch(inputs), self._kv)
            if not num_candidates:
                return Step(hidden)
            return Step(hidden, best=best_tokens(self._decoder.raw_logits(hidden), num_candidates))
        return self._replay(inputs, needs_head=needs_head, num_candidates=num_candidates)

    def fit(self, rows: Sequence[Row]) -> Inputs | None:
        """For `launch`; None if these are too many."""
        inputs = self._inputs(rows)
        return inputs if self._fits(inputs) else None

    def launch(self, inputs: Inputs, rows: Sequence[Row], after: Launched | None) -> Launched:
        """Begin a step that samples the likeliest tokens; with `after`, those of the step before are its rows'."""
        sources = None
        if after is not None:
            places = {sequence: at for at, sequence in enumerate(after.sequences)}
            sources = np.zeros(len(inputs.tokens), np.int32)
            sources[inputs.samples] = [places[row.sequence_id] for row in rows]
        step = self._replay(inputs, sources, after.tokens if after is not None else None, needs_head=True)
        assert step.tokens is not None
        self._turn ^= 1
        arrived = self._arrived[self._turn][: len(step.tokens)]
        arrived.copy_(step.tokens, non_blocking=True)
        done = self._done[self._turn]
        done.record()
        sequences = [row.sequence_id for row in rows if row.sampling is not None]
        return Launched(step.tokens, sequences, arrived, done)

    def _inputs(self, rows: Sequence[Row]) -> Inputs:
        return make_inputs(rows, self._block_size, self._backend.group_rows, self._backend.tile_rows)

    def _replay(
        self,
        inputs: Inputs,
        sources: IntArray | None = None,
        fed: Tensor | None = None,
        *,
        needs_head: bool,
        num_candidates: int = 0,
    ) -> Step:
        own, shared, last = inputs.counts.tolist()
        kind = _Kind(_size(len(inputs.tokens)), own > 0, shared > 0, last > 0, needs_head, num_candidates)
        recorded = self._recorded.get(kind)
        if recorded is None:
            self._fill(inputs, kind.rows)
            recorded = self._record(kind)
        self._fill(inputs, kind.rows, sources)
        if sources is not None and fed is not None:
            count = len(sources)
            tokens, places = self._device[self._fixed.slices[0]], self._device[self._fixed.slices[5]]
            torch.index_select(fed, 0, places[:count], out=tokens[:count])
            tokens[:count].clamp_(
                min=0
            )  # -1 says that the last step failed, as this one will: it must not end the device
        recorded.graph.replay()
        return recorded.step.cut(len(inputs.samples))

    def _fits(self, inputs: Inputs) -> bool:
        return (
            self._backend.device.type == "cuda"
            and len(inputs.tokens) <= self._max_rows
            and len(inputs.tables) <= self._max_sequences
            and not len(inputs.tiles)
            and inputs.tails.shape[1] <= _TAIL
            and len(inputs.own) <= self._max_rows * MOST_PIECES
            and len(inputs.shared) <= self._max_rows * MOST_PIECES
            and len(inputs.results) <= most_results(self._max_rows)
        )

    # Recorded steps

    def _fill(self, inputs: Inputs, size: int, from_rows: IntArray | None = None) -> None:
        """Into the buffer that graphs read. Rows beyond the step's own write to the null block, and attend to nothing."""
        if self._copied is not None:
            self._copied.synchronize()
        array: IntArray = self._host.numpy()
        (
            tokens,
            positions,
            slots,
            contexts,
            samples,
            sources,
            starts,
            counts,
            own,
            shared,
            last,
            results,
            tails,
            tables,
        ) = (array[part] for part in self._fixed.slices)
        count = len(inputs.tokens)
        for field, values in (
            (tokens, inputs.tokens),
            (positions, inputs.positions),
            (slots, inputs.slots),
            (contexts, inputs.contexts),
            (samples, inputs.samples),
        ):
            field[: len(values)] = values
            field[len(values) : size] = 0
        if from_rows is not None:
            sources[: len(from_rows)] = from_rows
        starts[: count + 1] = inputs.starts
        starts[count + 1 : size + 1] = inputs.starts[-1]
        counts[:] = inputs.counts
        for field, made in ((own, inputs.own), (shared, inputs.shared), (last, inputs.last), (results, inputs.results)):
            field[: made.size] = made.ravel()
        if inputs.tails.size:
            tails.reshape(-1, _TAIL)[: len(inputs.tails), : inputs.tails.shape[1]] = inputs.tails
        used, width = inputs.tables.shape
        tables.reshape(-1, self._max_blocks)[:used, :width] = inputs.tables
        upto = self._fixed.slices[-1].start + used * self._max_blocks
        self._device[:upto].copy_(self._host[:upto], non_blocking=True)
        self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def _static(self, kind: _Kind) -> Batch:
        """The buffer's arrays, as a step of this kind sees them."""
        tokens, positions, slots, contexts, samples, _, starts, counts, own, shared, last, results, tails, tables = (
            self._device[part] for part in self._fixed.slices
        )
        by_block, by_slot = tables.view(-1, self._max_blocks), tails.view(-1, _TAIL)
        lists = []
        if kind.has_own:
            lists.append(Pieces(own.view(-1, FIELDS), counts[:1], by_block))
        if kind.has_shared:
            lists.append(Pieces(shared.view(-1, FIELDS), counts[1:2], by_block, self._backend.group_rows))
        if kind.has_tails:
            lists.append(Pieces(last.view(-1, FIELDS), counts[2:3], by_slot, by_slot=True))
        attention = Attention(lists, results, starts, contexts, None, by_block, self._sums, self._logs)
        rows = kind.rows
        return Batch(
            tokens[:rows],
            positions[:rows],
            slots[:rows],
            by_block,
            starts,
            contexts,
            samples[:rows],
            (),
            attention=attention,
        )

    def _record(self, kind: _Kind) -> _Recorded:
        batch = self._static(kind)

        def run() -> Step:
            hidden = self._decoder.hidden(batch, self._kv)
            if kind.num_candidates:
                return Step(hidden, best=best_tokens(self._decoder.raw_logits(hidden), kind.num_candidates))
            if not kind.has_head:
                return Step(hidden)
            logits = self._decoder.raw_logits(hidden)
            tokens = torch.empty(kind.rows, dtype=torch.int32, device=self._backend.device)
            kernels.largest(logits, self._values, self._places, tokens)
            return Step(hidden, logits, tokens)

        recorded = self._recorded[kind] = _capture(run, self._pool)
        self._pool = self._pool or recorded.graph.pool()
        return recorded

    # Steps of many tokens

    def _batch(self, inputs: Inputs) -> Batch:
        device, spec = self._backend.device, self._decoder.spec
        arrays = [np.ascontiguousarray(array, np.int32) for array in inputs]
        layout = _Layout([array.size for array in arrays])
        host = torch.empty(layout.slices[-1].stop, dtype=torch.int32, pin_memory=device.type == "cuda")
        whole: IntArray = host.numpy()
        for part, array in zip(layout.slices, arrays, strict=True):
            whole[part] = array.ravel()
        there = host.to(device, non_blocking=True)
        found = _Views(*(there[part].view(array.shape) for part, array in zip(layout.slices, arrays, strict=True)))
        lists = [
            Pieces(made, found.counts[at : at + 1], table, rows, by_slot=at == 2)
            for at, (made, table, rows) in enumerate(
                (
                    (found.own, found.tables, 1),
                    (found.shared, found.tables, self._backend.group_rows),
                    (found.last, found.tails, 1),
                )
            )
            if len(made)
        ]
        results = len(inputs.results)
        sums = torch.empty(results, spec.num_heads, spec.head_dim, dtype=torch.float32, device=device)
        logs = torch.empty(results, spec.num_heads, 2, dtype=torch.float32, device=device)
        tiles = found.tiles if len(inputs.tiles) else None
        attention = Attention(lists, found.results, found.starts, found.contexts, tiles, found.tables, sums, logs)
        return Batch(
            found.tokens,
            found.positions,
            found.slots,
            found.tables,
            found.starts,
            found.contexts,
            found.samples,
            (),
            attention=attention,
        )


def _size(num_rows: int) -> int:
    return next(size for size in SIZES if size >= num_rows)


def _capture(run: Callable[[], Step], pool: Any) -> _Recorded:
    """Once as it is, so that nothing is compiled or set up while it is recorded."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step = run()
    return _Recorded(graph, step)
