"""Steps on the device: those of few tokens are graphs, recorded once for each size; the others are launched call by call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from segue.engine import Row
from segue.kv import Copy
from segue.model.batch import Batch
from segue.model.cuda import choosing, kernels, recording
from segue.model.cuda.backend import FEW_ROWS, Attention, CudaBackend, Pieces, Tiles
from segue.model.cuda.buffers import TAIL, Buffers, Fields, parts
from segue.model.cuda.fused import BeamItems
from segue.model.cuda.inputs import TILE_FIELDS, Inputs, make_inputs
from segue.model.cuda.recording import Recorded
from segue.model.cuda.sampling import Draws, draw_now, draws
from segue.model.cuda.work import FIELDS, MOST_PIECES, IntArray, most_results
from segue.model.decoder import Decoder

MOST_ROWS = 4096
_SMALL = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, FEW_ROWS)
_LARGE = (320, 384, 448, 512, *range(640, MOST_ROWS + 1, 128))  # whole tiles of prompts: few of their rows are nobody's
SIZES: tuple[int, ...] = (*_SMALL, *_LARGE)  # rows of a recorded step
_MORE_TILES = (
    4,
    12,
    28,
    60,
    124,
    252,
    MOST_ROWS,
)  # than one prompt has: of several prompts, or of rows that are tiles each
_GROUPS = (8, 32)
_ROOMIER = 4 / 3  # how many more rows a recording may have that stands in for one that is not there yet
_BUFFERED = (16, 64)  # rows, up to which a step's inputs have buffers of their own: less is to be copied
_COPYING = 16  # rows, up to which a recording copies blocks itself: a launch of its own would take longer


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


class Fed(NamedTuple):
    """What the device has and the host does not know: the rows' tokens, and, of beams, the slots of those that came before."""

    tokens: Tensor  # [rows]
    tails: Tensor | None = None  # [rows, tokens]


class Launched(NamedTuple):
    """A step under way: `arrived` holds its tokens once it is `done`."""

    tokens: Tensor  # on the device, until the next step's
    sequences: list[int]
    arrived: Tensor
    done: torch.cuda.Event


class _Kind(NamedTuple):
    """What a recorded step is made for: room for so much of everything. There are to be few, since each takes time to record."""

    rows: int
    samples: int
    has_own: bool = True
    has_many: bool = False  # of these, and no other pieces, as `Pieces` says
    group_rows: int = 0  # of a piece that a group shares, at most; 0 if there is none
    num_tiles: int = 0
    has_tails: bool = False
    merged_rows: int = 0  # of the first rows, whose pieces are to be put together
    num_items: int = 0
    each: int = 0  # of items, as `BeamItems` says
    has_head: bool = True
    num_candidates: int = 0  # of each row, that a search looks at


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
        device = backend.device
        pin = device.type == "cuda"
        rows = self._max_rows = _size(min(MOST_ROWS, max_tokens))
        few = min(FEW_ROWS, rows)
        self._buffers = {
            size: Buffers(size, min(size, few), few, max_sequences, max_blocks, device)
            for size in (*(size for size in _BUFFERED if size < rows), rows)
        }
        self._max_sequences = min(max_sequences, rows)
        results = most_results(few)
        self._sums = torch.empty(results, spec.num_heads, spec.head_dim, dtype=torch.float32, device=device)
        self._logs = torch.empty(results, spec.num_heads, 2, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(rows, spec.num_kv_heads, dtype=torch.int32, device=device)
        self._values = torch.empty(rows, choosing.PARTS, dtype=torch.float32, device=device)
        self._places = torch.empty(rows, choosing.PARTS, dtype=torch.int32, device=device)
        self._draws = Draws([size for size in _SMALL if size <= few], self._values, self._places)
        self._turn = 0  # of two that tokens arrive in: one is read while the other is written
        self._arrived = [torch.zeros(rows, dtype=torch.int32, pin_memory=pin) for _ in range(2)]
        self._done = [torch.cuda.Event() for _ in range(2)] if pin else []  # type: ignore[no-untyped-call]
        self.records = pin
        self._recorded: dict[_Kind, Recorded[Step]] = {}
        self._seen: set[_Kind] = set()
        self._unrecordable: set[_Kind] = set()
        self._pool: Any = None

    @property
    def group_rows(self) -> int:
        return self._backend.group_rows

    @property
    def item_rows(self) -> int:
        return self._backend.item_rows

    @property
    def is_exact(self) -> bool:
        return self._backend.exact

    def run(
        self,
        rows: Sequence[Row],
        copies: Sequence[Copy] = (),
        *,
        needs_head: bool,
        num_candidates: int = 0,
    ) -> Step:
        """Of the rows that are sampled from, in order. With `num_candidates`, so many of each or more, for a search."""
        inputs = self._inputs(rows)
        return self.run_inputs(inputs, copies, needs_head=needs_head, num_candidates=num_candidates)

    def run_inputs(
        self,
        inputs: Inputs,
        copies: Sequence[Copy] = (),
        fed: Fed | None = None,
        *,
        needs_head: bool,
        num_candidates: int = 0,
    ) -> Step:
        num_candidates = 1 << (num_candidates - 1).bit_length() if num_candidates else 0  # so that kinds are few
        kind = self._kind(inputs, copies, needs_head=needs_head, num_candidates=num_candidates)
        if kind is not None:
            if (ready := self._ready(kind, inputs)) is not None:
                return self._replay(*ready, inputs, copies, fed)
            self._seen.add(kind)
        hidden = self._decoder.hidden(self._batch(inputs, copies, fed), self._kv)
        if not num_candidates:
            return Step(hidden)
        return Step(hidden, best=choosing.best_tokens(self._decoder.raw_logits(hidden), num_candidates))

    def launch(self, rows: Sequence[Row], copies: Sequence[Copy], after: Launched | None) -> Launched | None:
        """Begin a step that samples tokens from logits as they are; with `after`, those of the step before are its rows'. None if
        these are too many, or cannot be recorded."""
        if len(rows) > FEW_ROWS:
            return None
        inputs = self._inputs(rows)
        kind = self._kind(inputs, copies, needs_head=True)
        assert kind is not None or after is None, "a token of each of a few sequences always fits"
        if kind is None:
            return None
        ready = self._ready(kind, inputs)
        if ready is None:
            recorded = self._recording(kind) if after is not None else None
            if recorded is None and after is not None:
                raise torch.OutOfMemoryError("there is no memory to record a step that others are fed by")
            if recorded is None:
                return None
            ready = kind, recorded
        sources = None
        if after is not None:
            places = {sequence: at for at, sequence in enumerate(after.sequences)}
            sources = np.zeros(len(inputs.tokens), np.int32)
            sources[inputs.samples] = [places[row.sequence_id] for row in rows]
        fed = Fed(after.tokens) if after is not None else None
        step = self._replay(*ready, inputs, copies, fed, sources)
        sampled = [row for row in rows if row.sampling is not None]
        tokens = self.tokens(step, sampled)
        self._turn ^= 1
        arrived = self._arrived[self._turn][: len(tokens)]
        arrived.copy_(tokens, non_blocking=True)
        done = self._done[self._turn]
        done.record()
        return Launched(tokens, [row.sequence_id for row in sampled], arrived, done)

    def tokens(self, step: Step, rows: Sequence[Row]) -> Tensor:
        """What these rows, all that the step samples, get from its logits as they are: the likeliest, or drawn ones."""
        assert step.tokens is not None and step.logits is not None
        if not any(map(draws, rows)):
            return step.tokens
        logits = self._backend.few_logits
        if logits is None or len(rows) > len(logits):
            return draw_now(step.logits, rows)
        return self._draws.tokens(logits, rows)

    def warm_up(self) -> None:
        """Record what is usual: tokens of many sequences, a prompt, and both."""
        for kind in self._usual():
            self._recording(kind)
        self._draws.warm_up(self._backend.few_logits)
        torch.cuda.synchronize(self._backend.device)

    def _usual(self) -> Iterator[_Kind]:
        backend = self._backend
        for before, rows in pairwise((0, *SIZES)):
            if rows <= min(FEW_ROWS, self._max_rows, self._max_sequences) and backend.exact:
                for room in {self._tile_room(rows), self._tile_room(rows, rows)}:
                    yield _Kind(rows, rows, has_own=False, num_tiles=room)
            elif rows <= min(FEW_ROWS, self._max_rows, self._max_sequences):
                if not backend.has_rows or before < backend.few_pieces:
                    yield _Kind(rows, rows)
                if backend.has_rows and rows * MOST_PIECES > backend.few_pieces:
                    yield _Kind(rows, rows, has_many=True)
            if 16 < rows <= self._max_rows:
                tiles, samples = self._tile_room(rows), min(rows, FEW_ROWS)
                yield _Kind(rows, 1, has_own=False, num_tiles=tiles)
                yield _Kind(rows, samples, num_tiles=tiles)

    def _inputs(self, rows: Sequence[Row]) -> Inputs:
        backend = self._backend
        return make_inputs(
            rows,
            self._block_size,
            backend.group_rows,
            backend.tile_rows,
            own_rows=backend.own_rows,
            few_pieces=backend.few_pieces,
            item_rows=backend.item_rows,
            alone=backend.exact,
        )

    def _replay(
        self,
        kind: _Kind,
        recorded: Recorded[Step],
        inputs: Inputs,
        copies: Sequence[Copy],
        fed: Fed | None,
        sources: IntArray | None = None,
    ) -> Step:
        """`sources`: which of the tokens that it is fed is each row's, if they are not in its order."""
        buffers = self._buffers_for(kind.rows)
        buffers.fill(inputs, copies, kind.rows, sources)
        if copies and not _copies_itself(kind, len(copies)):
            kernels.copy_blocks(self._kv, buffers.read.copies[: 2 * len(copies)].view(-1, 2))
        if fed is not None:
            _feed(buffers.read, fed, len(inputs.tokens), has_sources=sources is not None)
        recorded.graph.replay()
        return recorded.result.cut(len(inputs.samples))

    def _kind(
        self,
        inputs: Inputs,
        copies: Sequence[Copy],
        *,
        needs_head: bool,
        num_candidates: int = 0,
    ) -> _Kind | None:
        """None if it is too large to be recorded."""
        num_rows = len(inputs.tokens)
        if not (self.records and num_rows <= self._max_rows and self._buffers_for(num_rows).holds(inputs, copies)):
            return None
        return self._kind_of(inputs)._replace(has_head=needs_head, num_candidates=num_candidates)

    def _is_due(self, kind: _Kind) -> bool:
        """Simple ones are recorded at once, others when they come the second time."""
        is_simple = kind.rows <= FEW_ROWS and not kind.num_tiles
        return is_simple or kind in self._recorded or kind in self._seen

    def _ready(self, kind: _Kind, inputs: Inputs) -> tuple[_Kind, Recorded[Step]] | None:
        """A recording of this kind, if it is due, or else one that is there, and has some more rows."""
        if self._is_due(kind):
            recorded = self._recording(kind)
            return (kind, recorded) if recorded is not None else None
        for rows in SIZES:
            if kind.rows < rows <= min(kind.rows * _ROOMIER, self._max_rows):
                roomier = self._kind_of(inputs, rows)._replace(
                    has_head=kind.has_head, num_candidates=kind.num_candidates
                )
                if (recorded := self._recorded.get(roomier)) is not None:
                    self._seen.add(kind)
                    return roomier, recorded
        return None

    def _kind_of(self, inputs: Inputs, rows: int | None = None) -> _Kind:
        """With so many rows; if not said, with as few as there may be."""
        rows = rows or _size(len(inputs.tokens))
        num_samples, num_tiles = len(inputs.samples), len(inputs.tiles)
        has_own, group_rows, has_tails = len(inputs.own) > 0, self._group_rows(inputs), inputs.tails.size > 0
        is_mixed = (has_own or group_rows > 0) and num_tiles > 0
        merged_rows = 0
        if group_rows or (has_tails and not len(inputs.items)):
            last = int(np.diff(inputs.starts).nonzero()[0][-1])
            merged_rows = min(rows, FEW_ROWS) if last < FEW_ROWS else rows
        return _Kind(
            rows,
            1 if num_samples <= 1 and not is_mixed else rows if num_samples > FEW_ROWS else min(rows, FEW_ROWS),
            has_own,
            self._has_many(inputs),
            group_rows,
            self._tile_room(rows, num_tiles) if num_tiles else 0,
            has_tails,
            merged_rows,
            *_room_for_items(inputs),
        )

    def _has_many(self, inputs: Inputs) -> bool:
        """Whether own pieces are for warps: they are many, or were many before rows of a sequence had them together."""
        own, few = inputs.own, self._backend.few_pieces
        is_alone = not (len(inputs.shared) or len(inputs.tiles) or inputs.tails.size)
        return self._backend.has_rows and is_alone and (len(own) > few or bool((own[:, 1] > 1).any()))

    def _group_rows(self, inputs: Inputs) -> int:
        """Of a shared piece, at most: one of a few numbers. If `exact` always the same, whoever else is there."""
        if not len(inputs.shared):
            return 0
        if self._backend.exact:
            return self._backend.group_rows
        most = int(inputs.shared[:, 1].max())
        return next((size for size in _GROUPS if size >= most), 1 << (most - 1).bit_length())

    def _tile_room(self, rows: int, num_tiles: int = 1) -> int:
        """At least so many; a program without a tile costs little, but not nothing."""
        least = -(-rows // self._backend.tile_rows)
        more = _MORE_TILES if rows > FEW_ROWS else (_MORE_TILES[0], rows)
        return next(least + each for each in more if least + each >= num_tiles)

    # Recorded steps

    def _buffers_for(self, rows: int) -> Buffers:
        return next(buffers for size, buffers in self._buffers.items() if rows <= size)

    def _static(self, kind: _Kind) -> Batch:
        """The buffer's arrays, as a step of this kind sees them."""
        there, rows = self._buffers_for(kind.rows).read, kind.rows
        tables = there.tables.view(-1, self._max_blocks)
        attention = Attention(
            _pieces(kind.has_own, kind.group_rows, there, has_many=kind.has_many),
            (there.tails.view(-1, TAIL), there.tail_counts) if kind.has_tails and not kind.num_items else None,
            kind.merged_rows,
            there.results,
            there.starts,
            there.contexts,
            Tiles(there.tiles.view(-1, TILE_FIELDS)[: kind.num_tiles], there.counts[2:]) if kind.num_tiles else None,
            _items(kind.num_items, kind.each, there),
            tables,
            self._sums,
            self._logs,
            self._arrivals,
        )
        return Batch(
            there.tokens[:rows],
            there.positions[:rows],
            there.slots[:rows],
            tables,
            there.starts,
            there.contexts,
            there.samples[: kind.samples],
            (),
            attention=attention,
        )

    def _recording(self, kind: _Kind) -> Recorded[Step] | None:
        """None if there is no memory for it: then such steps are launched call by call, now and later."""
        if kind in self._unrecordable:
            return None
        try:
            return self._recorded.get(kind) or self._record(kind)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self._unrecordable.add(kind)
            return None

    def _record(self, kind: _Kind) -> Recorded[Step]:
        """With nothing to do: what it writes goes to the null block."""
        buffers = self._buffers_for(kind.rows)
        buffers.device.zero_()
        batch = self._static(kind)
        copies, num_copies = buffers.read.copies[: 2 * kind.rows].view(-1, 2), buffers.read.counts[4:]

        def run() -> Step:
            if _copies_itself(kind):
                kernels.copy_blocks(self._kv, copies, num_copies)
            hidden = self._decoder.hidden(batch, self._kv)
            if kind.num_candidates:
                return Step(hidden, best=choosing.best_tokens(self._decoder.raw_logits(hidden), kind.num_candidates))
            if not kind.has_head:
                return Step(hidden)
            logits = self._decoder.raw_logits(hidden)
            tokens = torch.empty(kind.samples, dtype=torch.int32, device=self._backend.device)
            choosing.likeliest(logits, self._values, self._places, tokens)
            return Step(hidden, logits, tokens)

        recorded = self._recorded[kind] = recording.capture(run, self._pool)
        self._pool = self._pool or recorded.graph.pool()
        return recorded

    # Steps of many tokens

    def _batch(self, inputs: Inputs, copies: Sequence[Copy], fed: Fed | None) -> Batch:
        device, spec = self._backend.device, self._decoder.spec
        given = {name: np.ascontiguousarray(each, np.int32) for name, each in inputs._asdict().items()}
        arrays = Fields(sources=_NONE, copies=np.array(copies, np.int32).reshape(-1, 2), **given)
        found = parts(Fields(*(each.size for each in arrays)))
        host = torch.empty(found.tails.stop, dtype=torch.int32, pin_memory=device.type == "cuda")
        whole: IntArray = host.numpy()
        for part, values in zip(found, arrays, strict=True):
            whole[part] = values.ravel()
        copied = host.to(device, non_blocking=True)
        there = Fields(*(copied[part].view(each.shape) for part, each in zip(found, arrays, strict=True)))
        if copies:
            kernels.copy_blocks(self._kv, there.copies)
        if fed is not None:
            there.tokens.copy_(fed.tokens)
            if fed.tails is not None:
                there.tails[:, : fed.tails.shape[1]] = fed.tails
        results = len(inputs.results)
        attention = Attention(
            _pieces(len(inputs.own) > 0, self._group_rows(inputs), there, has_many=self._has_many(inputs)),
            (there.tails, there.tail_counts) if inputs.tails.size and not len(inputs.items) else None,
            len(inputs.tokens) if len(inputs.shared) else 0,
            there.results,
            there.starts,
            there.contexts,
            Tiles(there.tiles, there.counts[2:]) if len(inputs.tiles) else None,
            _items(*_room_for_items(inputs), there),
            there.tables,
            torch.empty(results, spec.num_heads, spec.head_dim, dtype=torch.float32, device=device),
            torch.empty(results, spec.num_heads, 2, dtype=torch.float32, device=device),
            torch.zeros(len(inputs.tokens), spec.num_kv_heads, dtype=torch.int32, device=device),
        )
        return Batch(
            there.tokens,
            there.positions,
            there.slots,
            there.tables,
            there.starts,
            there.contexts,
            there.samples,
            (),
            attention=attention,
        )


_NONE = np.zeros(0, np.int32)


def _pieces(has_own: bool, group_rows: int, there: Fields[Tensor], *, has_many: bool) -> Pieces | None:
    """Of the two kinds of pieces, those that a step has."""
    if not has_own and not group_rows:
        return None
    own, shared = there.own.view(-1, FIELDS), there.shared.view(-1, FIELDS)
    return Pieces(own if has_own else None, shared if group_rows else None, there.counts, group_rows, has_many)


def _room_for_items(inputs: Inputs) -> tuple[int, int]:
    """How many, so that kinds are few, and how much of what beams have for themselves is put side by side."""
    count = len(inputs.items)
    if not count:
        return 0, 0
    return 1 << (count - 1).bit_length(), 4 if inputs.tails.shape[1] <= 4 else 16


def _items(room: int, each: int, there: Fields[Tensor]) -> BeamItems | None:
    if not room:
        return None
    tails = there.tails.view(len(there.tail_counts), -1), there.tail_counts
    return BeamItems(there.items, there.counts[3:], tails, room, each)


def _copies_itself(kind: _Kind, num_copies: int = 0) -> bool:
    """Whether a recording has so many blocks' copies in it."""
    return kind.rows <= _COPYING and num_copies <= kind.rows


def _feed(there: Fields[Tensor], fed: Fed, count: int, *, has_sources: bool) -> None:
    tokens, sources, tails = there.tokens, there.sources, there.tails
    if has_sources:
        torch.index_select(fed.tokens, 0, sources[:count], out=tokens[:count])
        tokens[:count].clamp_(min=0)  # -1: the last step failed, as this one will; it must not end the device
    else:
        tokens[:count].copy_(fed.tokens)
    if fed.tails is not None:
        tails.view(-1, TAIL)[:count, : fed.tails.shape[1]] = fed.tails


def _size(num_rows: int) -> int:
    return next(size for size in SIZES if size >= num_rows)
