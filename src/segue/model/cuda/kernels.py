"""Triton kernels of a step. They run on CUDA, and, slowly, in Triton's interpreter.

All arithmetic is fp32 with one rounding at the end of each kernel. How a token's context is cut into pieces follows from its
length alone; how much of a piece is done at once, and with it the last bits, from how many rows a step has.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _begin(EARLY: tl.constexpr):
    """Where the device can, a kernel is brought there while the one before it still runs, and waits for it here: before it reads
    what that one writes, and before it writes anything. Inputs of a step may be read earlier. Each program waits, so that a
    kernel never ends before those that it follows."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _add_norm(x, residual, weight, out, eps, hidden, HAS_X: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * hidden
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    weights = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    _begin(EARLY)
    sums = tl.load(residual + row + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_X:
        sums += tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
        rounded = sums.to(residual.dtype.element_ty)
        tl.store(residual + row + at, rounded, mask=inside)
        sums = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(sums * sums) / hidden + eps)
    tl.store(out + row + at, (weights * (sums * scale)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate(gate_up, out, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    _begin(EARLY)
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rope_store(
    qkv, q_out, k_cache, v_cache, q_norm, k_norm, cos, sin, positions, slots, eps, block_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr,
    MANY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Heads `MANY` at a time: q's are normed and rotated into `q_out`, k's into the cache, v's go there as they are."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * MANY + tl.arange(0, MANY)
    at = tl.arange(0, HALF)
    total: tl.constexpr = HEADS + 2 * KV_HEADS
    is_q, is_v = head < HEADS, head >= HEADS + KV_HEADS
    is_kv = (head >= HEADS) & (head < total)
    source = qkv + (token * total + head)[:, None] * (2 * HALF) + at[None, :]
    there = (head < total)[:, None]
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    c = tl.load(cos + position * HALF + at)[None, :]
    s = tl.load(sin + position * HALF + at)[None, :]
    _begin(EARLY)
    left = tl.load(source, mask=there, other=0.0).to(tl.float32)
    right = tl.load(source + HALF, mask=there, other=0.0).to(tl.float32)
    turned = (~is_v)[:, None]
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / (2 * HALF) + eps)[:, None]
        low = tl.where(is_q[:, None], tl.load(q_norm + at)[None, :], tl.load(k_norm + at)[None, :]).to(tl.float32)
        high = tl.where(is_q[:, None], tl.load(q_norm + HALF + at)[None, :], tl.load(k_norm + HALF + at)[None, :])
        left = tl.where(turned, left * scale * low, left)
        right = tl.where(turned, right * scale * high.to(tl.float32), right)
    new_left = tl.where(turned, left * c - right * s, left)
    new_right = tl.where(turned, right * c + left * s, right)
    q_at = q_out + (token * HEADS + head)[:, None] * (2 * HALF) + at[None, :]
    tl.store(q_at, new_left.to(q_out.dtype.element_ty), mask=is_q[:, None])
    tl.store(q_at + HALF, new_right.to(q_out.dtype.element_ty), mask=is_q[:, None])
    kv_head = tl.where(is_v, head - HEADS - KV_HEADS, head - HEADS)
    place = (slot // SIZE) * block_stride + (kv_head * SIZE + slot % SIZE) * (2 * HALF)
    k_at = k_cache + place[:, None] + at[None, :]
    v_at = v_cache + place[:, None] + at[None, :]
    is_k = (is_kv & ~is_v)[:, None]
    tl.store(k_at, new_left.to(k_cache.dtype.element_ty), mask=is_k)
    tl.store(k_at + HALF, new_right.to(k_cache.dtype.element_ty), mask=is_k)
    tl.store(v_at, new_left.to(v_cache.dtype.element_ty), mask=(is_kv & is_v)[:, None])
    tl.store(v_at + HALF, new_right.to(v_cache.dtype.element_ty), mask=(is_kv & is_v)[:, None])


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
def _together(sums, logs, results, first, last, head, HEADS: tl.constexpr, DIM: tl.constexpr, MANY: tl.constexpr):
    """What the results `first … last-1` (of the list, if there is one) give for one head: peak, mass and total, as `_absorb` has
    them."""
    at = tl.arange(0, DIM)
    peak = tl.full([1], float("-inf"), tl.float32)
    mass = tl.zeros([1], tl.float32)
    total = tl.zeros([DIM], tl.float32)
    for start in range(first, last, MANY):
        index = start + tl.arange(0, MANY)
        inside = index < last
        result = index
        if results is not None:
            result = tl.load(results + index, mask=inside, other=0)
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
    """A piece is a stretch of KV and the query rows that see it: (first row, rows, table, begin, end, first result). For each of
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
                    _, weight, whole = _together(sums, logs, None, first, last, which, HEADS, DIM, 32)
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
    _begin(EARLY)
    for number in range(tl.program_id(0), num_shared + num_own, tl.num_programs(0)):
        if SHARED_ROWS > 0:  # noqa: SIM102 (what is known beforehand, and what is not)
            if number < num_shared:
                _attend_piece(
                    q, k_cache, v_cache, tables, shared + number * 6, contexts, sums, logs, starts, arrivals, out, scale,
                    table_stride, block_stride, window, head,
                    HEADS, GROUP, SIZE, DIM, SHARED_ROWS, TILE, False, HAS_WINDOW, PRECISION,
                )  # fmt: skip
        if OWN_ROWS > 0:  # noqa: SIM102
            if number >= num_shared:
                _attend_piece(
                    q, k_cache, v_cache, tables, own + (number - num_shared) * 6, contexts, sums, logs, starts, arrivals,
                    out, scale, table_stride, block_stride, window, head,
                    HEADS, GROUP, SIZE, DIM, OWN_ROWS, TILE, MERGES, HAS_WINDOW, PRECISION,
                )  # fmt: skip


@triton.jit
def _merge_pieces(
    q, k_cache, v_cache, sums, logs, results, starts, tails, tail_counts, out, scale, tail_stride, block_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, MANY: tl.constexpr, TILE: tl.constexpr,
    HAS_TAILS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What the pieces of a row's context give, together, and with them what is in the slots that a beam has for itself; a row
    without any (padding, or one of a tile) is left alone."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.arange(0, DIM)
    first, last = tl.load(starts + row), tl.load(starts + row + 1)
    _begin(EARLY)
    peak, mass, total = _together(sums, logs, results, first, last, head, HEADS, DIM, MANY)
    place = (row.to(tl.int64) * HEADS + head) * DIM + at
    if HAS_TAILS:
        count = tl.load(tail_counts + row)
        query = tl.load(q + place).to(tl.float32) * (scale * LOG2E)
        for start in range(0, count, TILE):
            token = start + tl.arange(0, TILE)
            inside = token < count
            slot = tl.load(tails + row * tail_stride + token, mask=inside, other=0)
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


@triton.jit
def _product(
    x, weight, bias, out, rows, width, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x times the transposed weight. Each sum goes over `depth` from its beginning to its end, whatever `rows` is."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, STEP)
    x_at = x + row.to(tl.int64)[:, None] * depth + at[None, :]
    weight_at = weight + column.to(tl.int64)[:, None] * depth + at[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, STEP):
        inside = (start + at < depth)[None, :]
        left = tl.load(x_at + start, mask=(row < rows)[:, None] & inside, other=0.0)
        right = tl.load(weight_at + start, mask=(column < width)[:, None] & inside, other=0.0)
        total += tl.dot(left, tl.trans(right), input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    there = (row < rows)[:, None] & (column < width)[None, :]
    target = out + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _copy_blocks(kv, pairs, count, block_elements, layer_elements, BLOCK: tl.constexpr):
    """One block of one layer's keys or values, if it is one of the first `count`."""
    stop = block_elements
    if count is not None:
        stop = tl.where(tl.program_id(0) < tl.load(count), block_elements, 0)
    source = tl.load(pairs + tl.program_id(0) * 2).to(tl.int64) * block_elements
    target = tl.load(pairs + tl.program_id(0) * 2 + 1).to(tl.int64) * block_elements
    layer = kv + tl.program_id(1).to(tl.int64) * layer_elements
    for start in range(0, stop, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < block_elements
        tl.store(layer + target + at, tl.load(layer + source + at, mask=inside), mask=inside)


@triton.jit
def _move_blocks(kv, blocks, staged, block_elements, layer_elements, OUT: tl.constexpr, BLOCK: tl.constexpr):
    """One block of one layer's keys or values, to or from where it lies beside those of the other layers."""
    block = tl.load(blocks + tl.program_id(0)).to(tl.int64)
    here = kv + tl.program_id(1).to(tl.int64) * layer_elements + block * block_elements
    part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    there = staged + part * block_elements
    for start in range(0, block_elements, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < block_elements
        if OUT:
            tl.store(there + at, tl.load(here + at, mask=inside), mask=inside)
        else:
            tl.store(here + at, tl.load(there + at, mask=inside), mask=inside)


def _precision(x: Tensor) -> str:
    """fp32 means fp32; narrower types are multiplied exactly anyhow."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _stages(x: Tensor) -> int:
    return 1 if x.dtype == torch.float32 else 3


@cache
def _is_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def early(x: Tensor) -> dict[str, bool]:
    """Options of a kernel that waits for the one before it by itself."""
    return {"EARLY": True, "launch_pdl": True} if _is_early(x.device) else {"EARLY": False}


_ROOMY = 16  # rows of a step, up to which a program has a multiprocessor for itself


# What calls them. Shapes are as the kernels say; all tensors are contiguous.


def add_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """residual += x, if there is an x; out = its norm."""
    rows, hidden = residual.shape
    block = triton.next_power_of_2(hidden)
    warps = 4 if hidden <= 2048 else 8
    _add_norm[(rows,)](
        x, residual, weight, out, eps, hidden, HAS_X=x is not None, BLOCK=block, num_warps=warps, **early(out)
    )  # fmt: skip


def gate(gate_up: Tensor, out: Tensor) -> None:
    """silu of the first half, times the second."""
    rows, width = out.shape
    block = 1024
    _gate[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block, num_warps=4, **early(out))


def rope_store(
    qkv: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    tables: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    eps: float,
) -> None:
    heads, dim = q_out.shape[1:]
    kv_heads, size = k_cache.shape[1:3]
    many = min(triton.next_power_of_2(heads + 2 * kv_heads), 8)
    q_norm, k_norm = norms if norms is not None else (qkv, qkv)
    _rope_store[(len(q_out), triton.cdiv(heads + 2 * kv_heads, many))](
        qkv, q_out, k_cache, v_cache, q_norm, k_norm, *tables, positions, slots, eps, k_cache.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, SIZE=size, HALF=dim // 2, HAS_NORM=norms is not None, MANY=many, num_warps=2,
        **early(q_out),
    )  # fmt: skip


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
        MERGES=merges, HAS_WINDOW=window is not None, PRECISION=_precision(q), num_warps=warps,
        num_stages=_stages(q) if shared is None else min(_stages(q), 2), maxnreg=registers, **early(q),
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
) -> None:
    """`tails`: [rows, tokens] slots, and how many of them each row has."""
    rows, heads, dim = out.shape
    kv_heads, size = k_cache.shape[1:3]
    slots, counts = tails if tails is not None else (starts, starts)
    _merge_pieces[(rows, heads)](
        q, k_cache, v_cache, sums, logs, results, starts, slots, counts, out, scale, slots.stride(0), k_cache.stride(0),
        HEADS=heads, GROUP=heads // kv_heads, SIZE=size, DIM=dim, MANY=32, TILE=4, HAS_TAILS=tails is not None, num_warps=1,
        **early(q),
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
        HAS_WINDOW=window is not None, PRECISION=_precision(q), num_warps=8 if wide else 4,
        num_stages=_stages(q) if dim <= 128 else min(_stages(q), 2),
    )  # fmt: skip


def product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Row by row the same bits for any number of rows. (Sums of a row are in the same order in both kinds of tiles: a test on the
    device compares them.)"""
    rows, depth = x.shape
    width = len(weight)
    if x.dtype == torch.float32:
        tile = (32, 32, 32, 4)
    else:
        tile = (64, 64, 64, 4) if rows <= 64 else (128, 128, 64, 8)
    many, columns, step, warps = tile
    _product[(triton.cdiv(rows, many), triton.cdiv(width, columns))](
        x, weight, bias, out, rows, width, depth,
        ROWS=many, COLUMNS=columns, STEP=step, HAS_BIAS=bias is not None, PRECISION=_precision(x), num_warps=warps,
        num_stages=_stages(x),
    )  # fmt: skip
    return out


def copy_blocks(kv: Tensor, pairs: Tensor, count: Tensor | None = None) -> None:
    """In all layers: `pairs[i]` is a source and a target, none of which is another's source. With `count`, only the first so
    many."""
    layers, two = kv.shape[:2]
    block = kv.stride(2)
    _copy_blocks[(len(pairs), layers * two)](kv, pairs, count, block, kv.stride(1), BLOCK=4096, num_warps=4)


def gather_blocks(kv: Tensor, blocks: Tensor, staged: Tensor) -> None:
    """staged[i] is block `blocks[i]` of all layers."""
    layers, two = kv.shape[:2]
    grid = (len(blocks), layers * two)
    _move_blocks[grid](kv, blocks, staged, kv.stride(2), kv.stride(1), OUT=True, BLOCK=2048, num_warps=4)


def scatter_blocks(kv: Tensor, blocks: Tensor, staged: Tensor) -> None:
    """The other way round."""
    layers, two = kv.shape[:2]
    grid = (len(blocks), layers * two)
    _move_blocks[grid](kv, blocks, staged, kv.stride(2), kv.stride(1), OUT=False, BLOCK=2048, num_warps=4)
