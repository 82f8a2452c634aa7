"""Attention over paged KV, in Triton: pieces of contexts that are put together afterwards, and tiles of prompts.

How a token's context is cut into pieces is said in `work.py`; how much of a piece is done at once, and with it the last
bits, from how many rows a step has.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from segue.model.cuda.kernels import LOG2E, early, precision, stages, wait_in_turn
from segue.model.cuda.work import FIELDS

_FIELDS: tl.constexpr = tl.constexpr(FIELDS)
_ROOMY = 16  # rows of a step, up to which a program has a multiprocessor for itself


@triton.jit
def _absorb(peak, mass, total, weights, values, PRECISION: tl.constexpr):
    """A softmax that goes on: more weights (logarithms to base 2, of which none, some or all may be -inf) and their values."""
    new_peak = tl.maximum(peak, tl.max(weights, 1))
    finite = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(weights - finite[:, None])
    fade = tl.exp2(peak - finite)
    mass = mass * fade + tl.sum(weights, 1)
    total = total * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
    return new_peak, mass, total


@triton.jit
def _together(
    sums, logs, results, ahead, first, last, head, HEADS: tl.constexpr, DIM: tl.constexpr, MANY: tl.constexpr
):  # fmt: skip
    """What the results `first … last-1` (of the list, if there is one) give for one head: peak, mass and total, as `_absorb` has
    them. `ahead`: the list's first `MANY`; each time, the next ones are asked for early."""
    at = tl.arange(0, DIM)
    peak = tl.full([1], float("-inf"), tl.float32)
    mass = tl.zeros([1], tl.float32)
    total = tl.zeros([DIM], tl.float32)
    for start in range(first, last, MANY):
        index = start + tl.arange(0, MANY)
        inside = index < last
        result = index
        if results is not None:
            result = ahead
            ahead = tl.load(results + index + MANY, mask=index + MANY < last, other=0)
        result = result.to(tl.int64) * HEADS + head
        peaks = tl.load(logs + result * 2, mask=inside, other=float("-inf"))
        masses = tl.load(logs + result * 2 + 1, mask=inside, other=0.0)
        parts = tl.load(sums + result[:, None] * DIM + at[None, :], mask=inside[:, None], other=0.0)
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        finite = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        fade, gains = tl.exp2(peak - finite), tl.exp2(peaks - finite)
        total = total * fade + tl.sum(parts * gains[:, None], 0)
        mass = mass * fade + tl.sum(masses * gains, 0)
        peak = new_peak
    return peak, mass, total


@triton.jit
def _attend_piece(
    q, k_cache, v_cache, tables, piece, contexts, sums, logs, starts, arrivals, out, scale, table_stride, block_stride,
    window, head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, MERGES: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A piece is a stretch of KV and the query rows that see it: (`work.py` says how it is written). For each of
    its rows and heads comes out what the stretch gives, not yet divided, and the logarithm of the weights' sum. If it `MERGES`,
    it has one row; whoever is last of that row's pieces puts them together, and leaves `arrivals` as it was."""
    lane = tl.arange(0, ROWS)
    at = tl.arange(0, DIM)
    first_row = tl.load(piece)
    num_rows = tl.load(piece + 1)
    table = tl.load(piece + 2)
    begin = tl.load(piece + 3)
    end = tl.load(piece + 4)
    result = tl.load(piece + 5)
    row = first_row + lane // GROUP
    used = lane < num_rows * GROUP
    others = 1
    if MERGES:
        first, last = tl.load(starts + first_row), tl.load(starts + first_row + 1)
        others = last - first - 1
    query = (row.to(tl.int64) * HEADS + head * GROUP + lane % GROUP) * DIM
    queries = tl.load(q + query[:, None] + at[None, :], mask=used[:, None], other=0.0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, DIM], tl.float32)
    if HAS_WINDOW:
        oldest = tl.load(contexts + row, mask=used, other=0) - window
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        inside = place < end
        block = tl.load(tables + table.to(tl.int64) * table_stride + place // SIZE, mask=inside, other=0)
        source = block.to(tl.int64) * block_stride + (head * SIZE + place % SIZE) * DIM
        keys = tl.load(k_cache + source[:, None] + at[None, :], mask=inside[:, None], other=0.0).to(queries.dtype)
        weights = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2E)
        seen = inside[None, :] & used[:, None]
        if HAS_WINDOW:
            seen = seen & (place[None, :] >= oldest[:, None])
        weights = tl.where(seen, weights, float("-inf"))
        values = tl.load(v_cache + source[:, None] + at[None, :], mask=inside[:, None], other=0.0).to(queries.dtype)
        peak, mass, total = _absorb(peak, mass, total, weights, values, PRECISION)
    if others == 0:
        tl.store(
            out + query[:, None] + at[None, :], (total / mass[:, None]).to(out.dtype.element_ty), mask=used[:, None]
        )
    else:
        target = (result + lane // GROUP).to(tl.int64) * HEADS + head * GROUP + lane % GROUP
        tl.store(sums + target[:, None] * DIM + at[None, :], total, mask=used[:, None])
        tl.store(logs + target * 2, peak, mask=used)
        tl.store(logs + target * 2 + 1, mass, mask=used)
        if MERGES:
            arrived = arrivals + first_row * (HEADS // GROUP) + head
            tl.debug_barrier()
            if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == others:
                tl.store(arrived, 0)
                for each in tl.static_range(GROUP):
                    which = head * GROUP + each
                    _, weight, whole = _together(sums, logs, None, None, first, last, which, HEADS, DIM, 32)
                    place = (first_row.to(tl.int64) * HEADS + which) * DIM
                    tl.store(out + place + at, (whole / weight).to(out.dtype.element_ty))


@triton.jit
def _attend_pieces(
    q, k_cache, v_cache, tables, own, shared, counts, contexts, sums, logs, starts, arrivals, out, scale, table_stride,
    block_stride, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, OWN_ROWS: tl.constexpr,
    SHARED_ROWS: tl.constexpr, TILE: tl.constexpr, MERGES: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The pieces that groups share, which take longest, and then those of single rows. A list that is not there has no rows."""
    head = tl.program_id(1)
    num_own = 0
    num_shared = 0
    if OWN_ROWS > 0:
        num_own = tl.load(counts)
    if SHARED_ROWS > 0:
        num_shared = tl.load(counts + 1)
    wait_in_turn(EARLY)
    for number in range(tl.program_id(0), num_shared + num_own, tl.num_programs(0)):
        if SHARED_ROWS > 0:  # noqa: SIM102 (what is known beforehand, and what is not)
            if number < num_shared:
                _attend_piece(
                    q, k_cache, v_cache, tables, shared + number * _FIELDS, contexts, sums, logs, starts, arrivals, out, scale,
                    table_stride, block_stride, window, head,
                    HEADS, GROUP, SIZE, DIM, SHARED_ROWS, TILE, False, HAS_WINDOW, PRECISION,
                )  # fmt: skip
        if OWN_ROWS > 0:  # noqa: SIM102
            if number >= num_shared:
                _attend_piece(
                    q, k_cache, v_cache, tables, own + (number - num_shared) * _FIELDS, contexts, sums, logs, starts, arrivals,
                    out, scale, table_stride, block_stride, window, head,
                    HEADS, GROUP, SIZE, DIM, OWN_ROWS, TILE, MERGES, HAS_WINDOW, PRECISION,
                )  # fmt: skip


@triton.jit
def _merge_pieces(
    q, k_cache, v_cache, sums, logs, results, starts, tails, tail_counts, out, scale, tail_stride, block_stride, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, MANY: tl.constexpr, TILE: tl.constexpr,
    HAS_TAILS: tl.constexpr, HAS_WINDOW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What the pieces of a row's context give, together, and with them what is in the slots that a beam has for itself; a row
    without any (padding, or one of a tile) is left alone."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.arange(0, DIM)
    first, last = tl.load(starts + row), tl.load(starts + row + 1)
    which = first + tl.arange(0, MANY)
    ahead = tl.load(results + which, mask=which < last, other=0)
    if HAS_TAILS:
        count = tl.load(tail_counts + row)
        begin = 0
        if HAS_WINDOW:
            begin = tl.maximum(count - window, 0)
        token = begin + tl.arange(0, TILE)
        slots_ahead = tl.load(tails + row * tail_stride + token, mask=token < count, other=0)
    wait_in_turn(EARLY)
    peak, mass, total = _together(sums, logs, results, ahead, first, last, head, HEADS, DIM, MANY)
    place = (row.to(tl.int64) * HEADS + head) * DIM + at
    if HAS_TAILS:
        query = tl.load(q + place).to(tl.float32) * (scale * LOG2E)
        for start in range(begin, count, TILE):
            token = start + tl.arange(0, TILE)
            inside = token < count
            slot = slots_ahead
            slots_ahead = tl.load(tails + row * tail_stride + token + TILE, mask=token + TILE < count, other=0)
            source = (slot // SIZE).to(tl.int64) * block_stride + ((head // GROUP) * SIZE + slot % SIZE) * DIM
            keys = tl.load(k_cache + source[:, None] + at[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
            values = tl.load(v_cache + source[:, None] + at[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
            weights = tl.where(inside, tl.sum(keys * query[None, :], 1), float("-inf"))
            new_peak = tl.maximum(peak, tl.max(weights, 0))
            weights = tl.exp2(weights - new_peak)
            fade = tl.exp2(peak - new_peak)
            mass = mass * fade + tl.sum(weights, 0)
            total = total * fade + tl.sum(weights[:, None] * values, 0)
            peak = new_peak
    divided = total / tl.where(mass > 0.0, mass, 1.0)
    tl.store(out + place, divided.to(out.dtype.element_ty), mask=(at >= 0) & (mass > 0.0))


@triton.jit
def _attend_tiles(
    q, k_cache, v_cache, tables, tiles, num_tiles, out, scale, table_stride, block_stride, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Many tokens of one sequence, each over all that came before it: (first row, rows, table, first position)."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    there = tile < tl.load(
        num_tiles
    )  # a program without a tile does nothing, though it does not end early: loops are faster so
    first_row = tl.load(tiles + tile * 4)
    num_rows = tl.where(there, tl.load(tiles + tile * 4 + 1), 0)
    table = tl.load(tiles + tile * 4 + 2).to(tl.int64) * table_stride
    first = tl.where(there, tl.load(tiles + tile * 4 + 3), 0)
    lane = tl.arange(0, ROWS)
    at = tl.arange(0, DIM)
    used = lane < num_rows
    position = first + lane
    query = ((first_row + lane).to(tl.int64) * HEADS + head) * DIM
    queries = tl.load(q + query[:, None] + at[None, :], mask=used[:, None], other=0.0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, DIM], tl.float32)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(first - window + 1, 0) // TILE * TILE
    whole = (first + 1) // TILE * TILE  # up to here every query sees every key
    if HAS_WINDOW:
        whole = begin
    for start in range(begin, whole, TILE):
        place = start + tl.arange(0, TILE)
        block = tl.load(tables + table + place // SIZE).to(tl.int64)
        source = block * block_stride + ((head // GROUP) * SIZE + place % SIZE) * DIM
        keys = tl.load(k_cache + source[:, None] + at[None, :]).to(queries.dtype)
        weights = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2E)
        values = tl.load(v_cache + source[:, None] + at[None, :]).to(queries.dtype)
        peak, mass, total = _absorb(peak, mass, total, weights, values, PRECISION)
    for start in range(whole, first + num_rows, TILE):
        place = start + tl.arange(0, TILE)
        inside = place < first + num_rows
        block = tl.load(tables + table + place // SIZE, mask=inside, other=0).to(tl.int64)
        source = block * block_stride + ((head // GROUP) * SIZE + place % SIZE) * DIM
        keys = tl.load(k_cache + source[:, None] + at[None, :], mask=inside[:, None], other=0.0).to(queries.dtype)
        weights = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2E)
        seen = place[None, :] <= position[:, None]
        if HAS_WINDOW:
            seen = seen & (place[None, :] > position[:, None] - window)
        weights = tl.where(seen, weights, float("-inf"))
        values = tl.load(v_cache + source[:, None] + at[None, :], mask=inside[:, None], other=0.0).to(queries.dtype)
        peak, mass, total = _absorb(peak, mass, total, weights, values, PRECISION)
    mass = tl.where(mass > 0.0, mass, 1.0)
    tl.store(out + query[:, None] + at[None, :], (total / mass[:, None]).to(out.dtype.element_ty), mask=used[:, None])


# What calls them. Shapes are as the kernels say; all tensors are contiguous.


def attend_pieces(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    own: Tensor | None,
    shared: Tensor | None,
    counts: Tensor,
    contexts: Tensor,
    sums: Tensor,
    logs: Tensor,
    starts: Tensor,
    arrivals: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    group_rows: int,
    programs: int,
    merges: bool,
) -> None:
    """`counts`: how many of either list are to be done; `group_rows`: the most query rows that a shared piece has. If it
    `merges`, which it cannot if there are shared ones, `out` is done, and result i is piece i's; otherwise that is for
    `merge_pieces` to do. `arrivals`: zeros, [rows, kv heads]."""
    heads, dim = q.shape[1:]
    kv_heads, size = k_cache.shape[1:3]
    group = heads // kv_heads
    own_lanes = max(triton.next_power_of_2(group), 16) if own is not None else 0
    lanes = max(triton.next_power_of_2(group_rows * group), 16) if shared is not None else 0
    tile, warps, registers = 64 if lanes <= 64 else 32, 4 if lanes <= 64 else 8, None
    is_small = q.element_size() == 2 and dim <= 128
    if own is not None and shared is not None:
        programs *= 4  # who has a shared piece has none besides, and what is short is done beside it
        if is_small and warps == 4:
            tile, registers = 32, 168  # so three programs are on a multiprocessor
    elif own is not None and is_small and len(q) <= _ROOMY:
        tile = 128  # a piece at once
    _attend_pieces[(programs, kv_heads)](
        q, k_cache, v_cache, tables, own, shared, counts, contexts, sums, logs, starts, arrivals, out, scale,
        tables.stride(0), k_cache.stride(0), window or 0,
        HEADS=heads, GROUP=group, SIZE=size, DIM=dim, OWN_ROWS=own_lanes, SHARED_ROWS=lanes, TILE=tile,
        MERGES=merges, HAS_WINDOW=window is not None, PRECISION=precision(q), num_warps=warps,
        num_stages=stages(q) if shared is None else min(stages(q), 2), maxnreg=registers, **early(q),
    )  # fmt: skip


def merge_pieces(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    sums: Tensor,
    logs: Tensor,
    results: Tensor,
    starts: Tensor,
    tails: tuple[Tensor, Tensor] | None,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
) -> None:
    """`tails`: [rows, tokens] slots, and how many of them each row has."""
    rows, heads, dim = out.shape
    kv_heads, size = k_cache.shape[1:3]
    slots, counts = tails if tails is not None else (starts, starts)
    _merge_pieces[(rows, heads)](
        q, k_cache, v_cache, sums, logs, results, starts, slots, counts, out, scale, slots.stride(0), k_cache.stride(0),
        window or 0, HEADS=heads, GROUP=heads // kv_heads, SIZE=size, DIM=dim, MANY=32, TILE=4, HAS_TAILS=tails is not None,
        HAS_WINDOW=window is not None, num_warps=1, **early(q),
    )  # fmt: skip


def attend_tiles(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    tiles: Tensor,
    num_tiles: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    rows: int,
) -> None:
    """`rows`: of a tile, at most."""
    heads, dim = q.shape[1:]
    kv_heads, size = k_cache.shape[1:3]
    wide = rows == 128  # measured best on an H200: docs/log.md
    _attend_tiles[(len(tiles), heads)](
        q, k_cache, v_cache, tables, tiles, num_tiles, out, scale, tables.stride(0), k_cache.stride(0), window or 0,
        HEADS=heads, GROUP=heads // kv_heads, SIZE=size, DIM=dim, ROWS=rows, TILE=128 if wide else 64,
        HAS_WINDOW=window is not None, PRECISION=precision(q), num_warps=8 if wide else 4,
        num_stages=stages(q) if dim <= 128 else min(stages(q), 2),
    )  # fmt: skip
