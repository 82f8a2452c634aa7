"""Triton kernels of a step. They run on CUDA, and, slowly, in Triton's interpreter.

All arithmetic is fp32 with one rounding at the end of each kernel. Attention has its own file.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def wait_in_turn(EARLY: tl.constexpr):
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
    wait_in_turn(EARLY)
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
    wait_in_turn(EARLY)
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
    wait_in_turn(EARLY)
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


def precision(x: Tensor) -> str:
    """fp32 means fp32; narrower types are multiplied exactly anyhow."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def stages(x: Tensor) -> int:
    """Of a loop that multiplies: how many of its loads are under way."""
    return 1 if x.dtype == torch.float32 else 3


@cache
def _is_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def early(x: Tensor) -> dict[str, bool]:
    """Options of a kernel that waits for the one before it by itself."""
    return {"EARLY": True, "launch_pdl": True} if _is_early(x.device) else {"EARLY": False}


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
        ROWS=many, COLUMNS=columns, STEP=step, HAS_BIAS=bias is not None, PRECISION=precision(x), num_warps=warps,
        num_stages=stages(x),
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
