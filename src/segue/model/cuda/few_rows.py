"""For a few rows: all of a layer that lies between two attentions, in one kernel.

A step of few rows is as long as it takes to read the weights, and to begin and end each kernel that does. So here is one program
for each multiprocessor, that reads its share of four matrices without a pause, and waits for the others where it must:

    weights   o ─▶ gate and up ─▶ down ─▶ the next layer's q, k, v       asked for ahead, through a ring in shared memory
    rows      o ─┼─ norm · gate and up · silu ─┼─ down ─┼─ norm · q, k, v
                 └ all programs meet ──────────┴────────┘

A program's share are tiles of sixteen columns; a tile's warps have an equal part of its depth each, and their sums are put
together at its end. Each lane has eight neighbouring numbers of a row: which of a product's terms are multiplied together in one
instruction does not matter, as long as it is the same on both sides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from segue.model.cuda import kernels
from segue.model.spec import ModelSpec

MOST_ROWS = 16
_WARPS = 8
_RING = 4  # chunks: so many that a multiprocessor has room for one program only, and each has its own
_FASTER = ((2048, MOST_ROWS), (4096, 8))  # by hidden size: rows up to which it was measured to be (docs/log.md)
_COLUMNS: gl.constexpr = gl.constexpr(16)  # of a tile
_wait_for_warps = getattr(gl, "barrier", None) or gl.thread_barrier  # its name changed between Triton 3.6 and 3.7


@gluon.jit
def _meet(counter, target):
    """Wait until all programs are here, and see what they have written."""
    _wait_for_warps()
    gl.atomic_add(counter, 1, sem="release", scope="gpu")
    while gl.atomic_add(counter, 0, sem="acquire", scope="gpu") < target:
        pass
    _wait_for_warps()


@gluon.jit
def _along(AXIS: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """0, 1, 2 … along one of three axes."""
    if AXIS == 0:
        return gl.arange(0, COUNT, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None][:, :, None]
    elif AXIS == 1:  # noqa: RET505 (what is not taken must not be compiled)
        return gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :][:, :, None]
    else:
        return gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, :][:, None, :]


@gluon.constexpr_function
def _by_sum(warps):
    """A layout in which each thread has what all warps have of one sum."""
    return gl.BlockedLayout([warps, 1, 1], [1, 16, 2], [1, 1, warps], [1, 2, 0])


@gluon.constexpr_function
def _sums_layout(warps):
    """Of what a tile's warps have, [warps, columns, rows]."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.jit
def _num_tiles(me, programs, WIDTH: gl.constexpr):
    """That are mine: every `programs`-th."""
    return (WIDTH // _COLUMNS - me + programs - 1) // programs


@gluon.jit
def _chunk_at(number, me, programs, DEPTH: gl.constexpr, STEP: gl.constexpr):
    """Where in its matrix my chunk with this number begins."""
    each: gl.constexpr = DEPTH // STEP
    return (me + number // each * programs) * (_COLUMNS * DEPTH) + number % each * STEP


@gluon.jit
def _ask(
    number, ring, matrices, counts, me, programs,
    HIDDEN: gl.constexpr, MIXED: gl.constexpr, INNER: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """For one of the chunks that I multiply, [warps, columns, depth], counted through all four matrices; chunks of gate and of up
    take turns. It is on its way then, and goes where the one `RING` before it was."""
    o, gate_up, down, qkv = matrices
    num_o, num_gate_up, num_down, num_qkv = counts
    of_gate_up = number - num_o
    of_down = of_gate_up - num_gate_up
    of_qkv = of_down - num_down
    zero = me * 0
    matrix = qkv
    offset = _chunk_at(of_qkv, me, programs, HIDDEN, STEP)
    depth = zero + HIDDEN
    if of_down < num_down:
        matrix = down
        offset = _chunk_at(of_down, me, programs, INNER, STEP)
        depth = zero + INNER
    if of_gate_up < num_gate_up:
        matrix = gate_up
        offset = _chunk_at(of_gate_up // 2, me, programs, HIDDEN, STEP) + of_gate_up % 2 * (INNER * HIDDEN)
        depth = zero + HIDDEN
    if number < num_o:
        matrix = o
        offset = _chunk_at(number, me, programs, MIXED, STEP)
        depth = zero + MIXED
    if of_qkv < num_qkv:
        part: gl.constexpr = STEP // WARPS
        lanes: gl.constexpr = part // 8
        layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // lanes, lanes], [WARPS, 1, 1], [2, 1, 0])
        column, at = _along(1, _COLUMNS, layout), _along(0, WARPS, layout) * part + _along(2, part, layout)
        source = matrix + gl.multiple_of(offset, 64) + column * gl.multiple_of(depth, 64) + at
        async_copy.async_copy_global_to_shared(ring.index(number % RING), source)
    async_copy.commit_group()


@gluon.jit
def _take(
    number, ring, matrices, counts, me, programs,
    LAYOUT: gl.constexpr, HIDDEN: gl.constexpr, MIXED: gl.constexpr, INNER: gl.constexpr, STEP: gl.constexpr,
    WARPS: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """The chunk with this number, once it is here; and ask for one that comes later."""
    async_copy.wait_group(RING - 2)
    _ask(number + RING - 1, ring, matrices, counts, me, programs, HIDDEN, MIXED, INNER, STEP, WARPS, RING)
    return ring.index(number % RING).load(LAYOUT)


@gluon.jit
def _rows_of(
    x, rows, first,
    DEPTH: gl.constexpr, PART: gl.constexpr, LAYOUT: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Of each row what belongs to a chunk that begins at `first`: [warps, depth, rows]."""
    row = _along(2, ROWS, LAYOUT)
    at = first + _along(0, WARPS, LAYOUT) * PART + _along(1, PART, LAYOUT)
    return gl.load(x + row * DEPTH + at, mask=(row + at * 0) < rows, other=0.0)


@gluon.jit
def _of_warps(total, room, WARPS: gl.constexpr):
    """The sum of what the warps have, [columns, rows]."""
    room.store(total)
    _wait_for_warps()
    return gl.sum(room.load(_by_sum(WARPS)), 0)


@gluon.jit
def _finish(
    total, other, shrink, bias, out, tile, rows, room,
    WIDTH: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, IS_NORMED: gl.constexpr, IS_GATED: gl.constexpr,
    ADDS: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """What comes after a tile's sums: what its rows' lengths divide them by, silu and gate, bias, or what was there."""
    layout: gl.constexpr = gl.SliceLayout(0, _by_sum(WARPS))
    column = tile * _COLUMNS + gl.arange(0, _COLUMNS, gl.SliceLayout(1, layout))[:, None]
    row = gl.arange(0, ROWS, gl.SliceLayout(0, layout))[None, :]
    target = out + row * WIDTH + column
    there = (row + column * 0) < rows
    if ADDS:
        before = gl.load(target, mask=there, other=0.0).to(gl.float32)
    sums = _of_warps(total, room.index(0), WARPS)
    if IS_NORMED:
        sums *= shrink
    if IS_GATED:
        others = _of_warps(other, room.index(1), WARPS) * shrink
        sums = sums / (1.0 + gl.exp(-sums)) * others
    if HAS_BIAS:
        sums += gl.load(bias + column).to(gl.float32)
    if ADDS:
        sums += before
    gl.store(target, sums.to(out.dtype.element_ty), mask=there)


@gluon.jit
def _normed(
    x, scale, rows, room, eps,
    DEPTH: gl.constexpr, PART: gl.constexpr, LAYOUT: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """All of the rows, times the norm's scale, chunk by chunk; and what their products are to be multiplied by."""
    squares = gl.zeros([WARPS, ROWS], gl.float32, gl.SliceLayout(1, LAYOUT))
    parts = ()
    for first in gl.static_range(0, DEPTH, WARPS * PART):
        wide = _rows_of(x, rows, first, DEPTH, PART, LAYOUT, ROWS, WARPS).to(gl.float32)
        squares += gl.sum(wide * wide, 1)
        at = first + _along(0, WARPS, LAYOUT) * PART + _along(1, PART, LAYOUT)
        parts = parts + ((wide * gl.load(scale + at).to(gl.float32)).to(x.dtype.element_ty),)  # type: ignore[assignment]  # noqa: RUF005
    room.store(squares)
    _wait_for_warps()
    total = gl.sum(room.load(gl.BlockedLayout([WARPS, 1], [1, 32], [1, WARPS], [1, 0])), 0)
    columns: gl.constexpr = gl.SliceLayout(0, _by_sum(WARPS))
    return parts, gl.convert_layout(gl.rsqrt(total / DEPTH + eps), gl.SliceLayout(0, columns))[None, :]


@gluon.jit
def _add_products(
    x, rows, residual, bias, number, ring, room, matrices, counts, me, programs,
    DEPTH: gl.constexpr, HIDDEN: gl.constexpr, MIXED: gl.constexpr, INNER: gl.constexpr, ROWS: gl.constexpr, STEP: gl.constexpr,
    RING: gl.constexpr, WARPS: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """residual += x, [rows, DEPTH], times my tiles of the matrix whose chunks come next. The number of the chunk after these."""
    part: gl.constexpr = STEP // WARPS
    sums: gl.constexpr = _sums_layout(WARPS)
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 8)
    zero = gl.zeros([WARPS, _COLUMNS, ROWS], gl.float32, sums)
    for tile in range(me, HIDDEN // _COLUMNS, programs):
        total = zero
        now = _rows_of(x, rows, 0, DEPTH, part, right, ROWS, WARPS)
        for at in range(STEP, DEPTH + STEP, STEP):
            later = _rows_of(x, gl.where(at < DEPTH, rows, 0), at, DEPTH, part, right, ROWS, WARPS)
            chunk = _take(number, ring, matrices, counts, me, programs, left, HIDDEN, MIXED, INNER, STEP, WARPS, RING)
            total = mma_v2(chunk, now, total)
            now = later
            number += 1
        _finish(total, zero, 1.0, bias, residual, tile, rows, room, HIDDEN, ROWS, WARPS, False, False, True, HAS_BIAS)
    return number


@gluon.jit
def _between_attentions(
    mixed, residual, gated, next_qkv, matrices, o_bias, qkv_bias, norms, counter, next_counter, rows, eps,
    HIDDEN: gl.constexpr, MIXED: gl.constexpr, INNER: gl.constexpr, QKV: gl.constexpr, ROWS: gl.constexpr, STEP: gl.constexpr,
    RING: gl.constexpr, WARPS: gl.constexpr, HAS_O_BIAS: gl.constexpr, HAS_QKV_BIAS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """`mixed` is what attention gave. If there is no next layer, `QKV` is 0. `counter` is 0 before, the next one afterwards."""
    part: gl.constexpr = STEP // WARPS
    sums: gl.constexpr = _sums_layout(WARPS)
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 8)
    me, programs = gl.program_id(0), gl.num_programs(0)
    dtype: gl.constexpr = residual.dtype.element_ty
    ring = gl.allocate_shared_memory(dtype, [RING, WARPS, _COLUMNS, part], gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
    room = gl.allocate_shared_memory(
        gl.float32, [2, WARPS, _COLUMNS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    few = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    counts = (
        _num_tiles(me, programs, HIDDEN) * (MIXED // STEP),
        _num_tiles(me, programs, INNER) * (HIDDEN // STEP) * 2,
        _num_tiles(me, programs, HIDDEN) * (INNER // STEP),
        _num_tiles(me, programs, QKV) * (HIDDEN // STEP) if QKV > 0 else me * 0,
    )
    for early in gl.static_range(RING - 1):
        _ask(me * 0 + early, ring, matrices, counts, me, programs, HIDDEN, MIXED, INNER, STEP, WARPS, RING)
    if EARLY:  # weights are nobody's secret; all else is that of the kernel before
        gdc_wait()
    if me == 0:
        gl.store(next_counter, 0)
    zero = gl.zeros([WARPS, _COLUMNS, ROWS], gl.float32, sums)

    number = _add_products(
        mixed, rows, residual, o_bias, me * 0, ring, room, matrices, counts, me, programs,
        MIXED, HIDDEN, MIXED, INNER, ROWS, STEP, RING, WARPS, HAS_O_BIAS,
    )  # fmt: skip
    _meet(counter, programs)

    parts, shrink = _normed(residual, norms[0], rows, few, eps, HIDDEN, part, right, ROWS, WARPS)
    for tile in range(me, INNER // _COLUMNS, programs):
        total = zero
        other = zero
        for index in gl.static_range(HIDDEN // STEP):
            chunk = _take(number, ring, matrices, counts, me, programs, left, HIDDEN, MIXED, INNER, STEP, WARPS, RING)
            total = mma_v2(chunk, parts[index], total)
            number += 1
            chunk = _take(number, ring, matrices, counts, me, programs, left, HIDDEN, MIXED, INNER, STEP, WARPS, RING)
            other = mma_v2(chunk, parts[index], other)
            number += 1
        _finish(total, other, shrink, residual, gated, tile, rows, room, INNER, ROWS, WARPS, True, True, False, False)
    _meet(counter, 2 * programs)

    number = _add_products(
        gated, rows, residual, residual, number, ring, room, matrices, counts, me, programs,
        INNER, HIDDEN, MIXED, INNER, ROWS, STEP, RING, WARPS, False,
    )  # fmt: skip

    if QKV > 0:
        _meet(counter, 3 * programs)
        if EARLY:
            gdc_launch_dependents()
        parts, shrink = _normed(residual, norms[1], rows, few, eps, HIDDEN, part, right, ROWS, WARPS)
        for tile in range(me, QKV // _COLUMNS, programs):
            total = zero
            for index in gl.static_range(HIDDEN // STEP):
                chunk = _take(
                    number, ring, matrices, counts, me, programs, left, HIDDEN, MIXED, INNER, STEP, WARPS, RING
                )
                total = mma_v2(chunk, parts[index], total)
                number += 1
            _finish(
                total, zero, shrink, qkv_bias, next_qkv, tile, rows, room,
                QKV, ROWS, WARPS, True, False, False, HAS_QKV_BIAS,
            )  # fmt: skip


class Matrices(NamedTuple):
    """Of a layer and its successor; the last layer has none."""

    o: Tensor
    gate_up: Tensor
    down: Tensor
    qkv: Tensor | None
    o_bias: Tensor | None
    qkv_bias: Tensor | None
    post_norm: Tensor
    next_norm: Tensor


class FewRows:
    """Where steps of few rows write what they have between two attentions. For one stream at a time."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._counters = torch.zeros(spec.num_layers, dtype=torch.int32, device=device)
        self._programs = torch.cuda.get_device_properties(device).multi_processor_count
        self._eps = spec.rms_eps
        step = _step(spec)
        assert step is not None
        self._step = step

    def run(self, number: int, matrices: Matrices, mixed: Tensor, residual: Tensor, gated: Tensor, qkv: Tensor) -> None:
        """Layer `number`: residual += what comes of `mixed`, and `qkv` is the next layer's."""
        rows, hidden = residual.shape
        there = matrices.qkv is not None
        _between_attentions[(self._programs,)](
            mixed, residual, gated, qkv,
            (matrices.o, matrices.gate_up, matrices.down, matrices.qkv if there else matrices.o),
            matrices.o_bias, matrices.qkv_bias, (matrices.post_norm, matrices.next_norm),
            self._counters[number:], self._counters[(number + 1) % len(self._counters) :], rows, self._eps,
            HIDDEN=hidden, MIXED=mixed.shape[1], INNER=gated.shape[1], QKV=qkv.shape[1] if there else 0,
            ROWS=8 if rows <= 8 else 16, STEP=self._step, RING=_RING, WARPS=_WARPS, HAS_O_BIAS=matrices.o_bias is not None,
            HAS_QKV_BIAS=there and matrices.qkv_bias is not None, num_warps=_WARPS, launch_cooperative_grid=True,
            **kernels.early(residual),
        )  # fmt: skip


def most_rows(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> int:
    """That `FewRows` is for; 0 if it is for none of such a model's, or on such a device."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    if device.type != "cuda" or not is_half or _step(spec) is None or spec.num_layers < 2:
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    if properties.major < 8 or properties.shared_memory_per_block_optin < _shared_memory(spec, MOST_ROWS):
        return 0
    return next((rows for size, rows in _FASTER if spec.hidden_size <= size), 0)


def _step(spec: ModelSpec) -> int | None:
    """How deep a chunk is: all matrices have whole ones."""
    depths = spec.hidden_size, spec.num_heads * spec.head_dim, spec.intermediate_size
    return next((step for step in (1024, 512) if all(depth % step == 0 for depth in depths)), None)


def _shared_memory(spec: ModelSpec, rows: int) -> int:
    """What the ring and the sums of warps take, in bytes."""
    return _RING * 16 * (_step(spec) or 0) * 2 + 3 * _WARPS * 16 * rows * 4
