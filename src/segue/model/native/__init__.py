"""Kernels for the CPU, compiled on first use: products, attention over the paged cache, and the row work between.

The contract, for every kernel: an output row is bitwise the same whatever other rows are in the call, however a
sequence's tokens are cut into chunks, whichever cache blocks it has, and however many threads work. Batching and
chunking therefore never change what a model says.

Tensors are contiguous and a wrong shape or type raises `ValueError` before anything is written. That they are on the
CPU is taken for granted: a call of a few microseconds cannot afford to ask everything.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from segue.model.native.build import NativeUnavailable, library, open_library

__all__ = ["Kernels", "NativeUnavailable", "PackedWeight", "Storage", "expect", "expect_heads", "load"]

Storage = Literal["fp32", "bf16", "int8"]

_STORAGES: dict[Storage, tuple[int, int]] = {"fp32": (0, 1), "bf16": (1, 2), "int8": (2, 4)}  # code, values per lane
_PACK_ROWS = 4096  # rows converted to fp32 at a time while packing; a multiple of every panel width
_HUGE_PAGE = 2 << 20
_KINDS: dict[str, type[ctypes._SimpleCData[Any]]] = {
    "p": ctypes.c_void_p,
    "n": ctypes.c_int64,
    "i": ctypes.c_int32,
    "f": ctypes.c_float,
}


def load(cache_dir: Path, compiler: str | None = None) -> Kernels:
    """Kernels for this machine, compiled into `cache_dir` unless they are there. Raises `NativeUnavailable`."""
    return Kernels(library(cache_dir, compiler))


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A matrix [N, K] in the kernels' own layout. Read-only; belongs to the `Kernels` that packed it.

    int8 keeps one fp32 scale for each row and group of 32 values (9 bits a value in all), the grouping of Q8_0, so
    such a file's codes survive packing.
    """

    shape: tuple[int, int]
    storage: Storage
    _kernels: Kernels
    _lanes: Tensor
    _scales: Tensor
    address: int
    scales_address: int
    code: int
    gated: bool = False  # made by `pack_gated`, for `gated` alone

    @property
    def nbytes(self) -> int:
        return self._lanes.nbytes + self._scales.nbytes

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the matrix as stored (after rounding), [n, K] fp32: what a tied embedding looks up."""
        return self._kernels._unpack(self, ids)


class Kernels:
    """One operation at a time, with what it is given checked; `layers.LayerStack` runs a decoder's in one call."""

    def __init__(self, path: Path) -> None:
        free, locked = open_library(path)
        self.threads: int | None = None  # by default as many as torch has
        self.alone = False  # whether calls stay in the thread that makes them
        self._panel = int(free.segue_panel_width())
        self._group = int(free.segue_group_size())
        self._clear = _bind(free.segue_clear, "pn")
        self._pack = _bind(free.segue_pack, "pnnnippi")
        self._unpack_rows = _bind(free.segue_unpack, "ppinpnpi")
        self._linear = _bind(free.segue_linear, "pppippnnni")
        self._gated = _bind(free.segue_gated, "pppipnnni")
        self._attention = _bind(free.segue_attention, "pppipnpppnnnnnfnpi")
        self._place = _bind(free.segue_place, "pppnnnnnnnnn")
        self._blocks_out = _bind(free.segue_blocks_out, "ppppnnnn")
        self._blocks_in = _bind(free.segue_blocks_in, "ppppnnnn")
        self.run_layers = _bind(free.segue_layers, "pnp")  # for `layers.LayerStack`
        self._rms_norm = _bind(locked.segue_rms_norm, "ppfpnni")
        self._add_rms_norm = _bind(locked.segue_add_rms_norm, "pppfpnni")
        self._rope_store = _bind(locked.segue_rope_store, "pppppppippfnnnnni")

    @property
    def num_threads(self) -> int:
        return 1 if self.alone else self.threads or torch.get_num_threads()

    def pack(self, weight: Tensor, storage: Storage) -> PackedWeight:
        """Copies `weight` [N, K] into panels, rounding to `storage`."""
        if weight.dim() != 2 or not weight.is_floating_point() or 0 in weight.shape:
            raise ValueError(f"a weight is a matrix of floats, not {weight.dtype} {list(weight.shape)}")
        n, k = weight.shape
        code, per_lane = _STORAGES[storage]
        panels = -(-n // self._panel)
        lanes = self._zeros(panels * -(-k // per_lane) * self._panel)
        groups = -(-k // self._group) if storage == "int8" else 0
        scales = self._zeros(panels * groups * self._panel)
        for first in range(0, n, _PACK_ROWS):
            part = weight[first : first + _PACK_ROWS].float().contiguous()
            self._pack(
                part.data_ptr(), len(part), k, first, code, lanes.data_ptr(), scales.data_ptr(), self.num_threads
            )
        return PackedWeight((n, k), storage, self, lanes, scales, lanes.data_ptr(), scales.data_ptr(), code)

    def part(self, weight: PackedWeight, first: int, last: int) -> tuple[PackedWeight, int]:
        """The panels that hold rows `first … last-1`, as a matrix of their own in the same memory, and how many rows come before
        the first of them."""
        n, k = weight.shape
        if weight.gated or not 0 <= first < last <= n:
            raise ValueError(f"rows {first} to {last} of {n}")
        before = first // self._panel
        rows = min(-(-last // self._panel) * self._panel, n) - before * self._panel
        panels = -(-n // self._panel)
        lanes = before * (weight._lanes.numel() // panels) * weight._lanes.element_size()
        scales = before * (weight._scales.numel() // panels) * weight._scales.element_size()
        part = replace(
            weight,
            shape=(rows, k),
            address=weight.address + lanes,
            scales_address=weight.scales_address + scales,
        )
        return part, first - before * self._panel

    def pack_exactly(self, weight: Tensor) -> PackedWeight:
        """As int8 where that keeps every bit, as it does what came as Q8_0; else as fp32. A quarter of the memory is read for
        few rows; many rows gain nothing, since a panel is expanded for them."""
        if self._keeps_bits(weight[:_PACK_ROWS], self.pack(weight[:_PACK_ROWS], "int8")):
            packed = self.pack(weight, "int8")
            if self._keeps_bits(weight, packed):
                return packed
        return self.pack(weight, "fp32")

    def _keeps_bits(self, weight: Tensor, packed: PackedWeight) -> bool:
        def same(first: int) -> bool:
            part = weight[first : first + _PACK_ROWS].float()
            rows = packed.rows(torch.arange(first, first + len(part)))
            return torch.equal(rows.view(torch.int32), part.contiguous().view(torch.int32))

        return all(same(first) for first in range(0, len(weight), _PACK_ROWS))

    def pack_gated(self, gate: Tensor, up: Tensor, storage: Storage) -> PackedWeight:
        """Two weights [N, K] as one for `gated`: their panels in turn, so that both are read as one stream."""
        if gate.shape != up.shape or gate.dim() != 2:
            raise ValueError(f"gate {list(gate.shape)} and up {list(up.shape)} must be matrices of one shape")
        n, k = gate.shape
        sides = [F.pad(side, (0, 0, 0, -n % self._panel)).view(-1, self._panel, k) for side in (gate, up)]
        packed = self.pack(torch.stack(sides, 1).view(-1, k), storage)
        return replace(packed, shape=(n, k), gated=True)

    def _zeros(self, count: int) -> Tensor:
        """Lanes of 4 bytes that start on a cache line, or on a huge page when they fill one."""
        alignment = _HUGE_PAGE if count * 4 >= _HUGE_PAGE else 64
        raw = torch.empty(count + alignment // 4, dtype=torch.int32)
        skip = -raw.data_ptr() % alignment // 4
        lanes = raw[skip : skip + count]
        self._clear(lanes.data_ptr(), count * 4)
        return lanes

    def _unpack(self, weight: PackedWeight, ids: Tensor) -> Tensor:
        n, k = weight.shape
        _expect_kind(weight, gated=False)
        ids = ids.to(torch.int64).contiguous()
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= n):
            raise ValueError(f"row ids must be in 0..{n - 1}")
        out = torch.empty(ids.numel(), k)
        self._unpack_rows(
            weight.address,
            weight.scales_address,
            weight.code,
            k,
            ids.data_ptr(),
            ids.numel(),
            out.data_ptr(),
            self.num_threads,
        )
        return out

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> Tensor:
        """out [M, N] = x [M, K] @ weight.T + bias; `out` may not overlap `x`."""
        n, k = weight.shape
        m = x.shape[0]
        expect("x", x, (m, k))
        expect("out", out, (m, n))
        _expect_kind(weight, gated=False)
        if bias is not None:
            expect("bias", bias, (n,))
        if not m:
            return out
        self._linear(
            x.data_ptr(),
            weight.address,
            weight.scales_address,
            weight.code,
            bias.data_ptr() if bias is not None else None,
            out.data_ptr(),
            m,
            k,
            n,
            self.num_threads,
        )
        return out

    def gated(self, x: Tensor, weight: PackedWeight, out: Tensor) -> Tensor:
        """out [M, N] = silu(x @ gate.T) * (x @ up.T), of what `pack_gated` packed; `out` may not overlap `x`."""
        n, k = weight.shape
        m = x.shape[0]
        expect("x", x, (m, k))
        expect("out", out, (m, n))
        _expect_kind(weight, gated=True)
        if m:
            self._gated(
                x.data_ptr(),
                weight.address,
                weight.scales_address,
                weight.code,
                out.data_ptr(),
                m,
                k,
                n,
                self.num_threads,
            )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        """out = x / sqrt(mean(x²) + eps) * weight for each row; `out` may be `x`."""
        m, size = x.shape
        expect("x", x, (m, size))
        expect("weight", weight, (size,))
        expect("out", out, (m, size))
        self._rms_norm(x.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), m, size, self.num_threads)
        return out

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        """Adds `x` to `residual` in place, then out = rms_norm(residual)."""
        m, size = x.shape
        expect("residual", residual, (m, size))
        expect("x", x, (m, size))
        expect("weight", weight, (size,))
        expect("out", out, (m, size))
        self._add_rms_norm(
            residual.data_ptr(), x.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), m, size, self.num_threads
        )
        return out

    def rope_store(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """Rotates q and k of every row in place (first half with second half) and writes k and v into their slots.

        `qkv` [M, (H + 2 Hkv) D]; `cos`, `sin` [positions, D/2]; `positions` int32 and `slots` int64 [M], a slot being
        block * block_size + offset; caches as for `attention`. `q_norm`, `k_norm` [D] normalise each head before it
        is rotated. Positions and slots are trusted: they come from the scheduler, not from a request.
        """
        m = qkv.shape[0]
        expect("qkv", qkv, (m, (num_heads + 2 * num_kv_heads) * head_dim))
        expect("cos", cos, (cos.shape[0], head_dim // 2))
        expect("sin", sin, (cos.shape[0], head_dim // 2))
        expect("positions", positions, (m,), torch.int32)
        expect("slots", slots, (m,), torch.int64)
        half = _expect_caches(k_cache, v_cache, num_kv_heads, head_dim)
        for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
            if norm is not None:
                expect(name, norm, (head_dim,))
        self._rope_store(
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            half,
            q_norm.data_ptr() if q_norm is not None else None,
            k_norm.data_ptr() if k_norm is not None else None,
            eps,
            m,
            num_heads,
            num_kv_heads,
            head_dim,
            k_cache.shape[2],
            self.num_threads,
        )

    def attention(
        self,
        qkv: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None,
        out: Tensor,
    ) -> Tensor:
        """Causal attention of every query row over its sequence's cached keys, decode and prefill rows alike.

        Sequence s has query rows query_starts[s] to query_starts[s + 1] (int32 [S + 1]), the last of which is token
        context_lens[s] - 1 (int32 [S]); their keys and values are already stored. `block_tables` int32 [S, blocks];
        caches [blocks, Hkv, block_size, D], fp32 or bf16. A query sees its last `window` keys, itself among them.
        Table entries and lengths are trusted, as in `rope_store`.
        """
        m = qkv.shape[0]
        sequences = context_lens.shape[0]
        expect("qkv", qkv, (m, (num_heads + 2 * num_kv_heads) * head_dim))
        expect("out", out, (m, num_heads * head_dim))
        expect("query_starts", query_starts, (sequences + 1,), torch.int32)
        expect("context_lens", context_lens, (sequences,), torch.int32)
        _expect_tables(block_tables, sequences)
        half = _expect_caches(k_cache, v_cache, num_kv_heads, head_dim)
        expect_heads(num_heads, num_kv_heads, head_dim)
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1, not {window}")
        self._attention(
            qkv.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            half,
            block_tables.data_ptr(),
            block_tables.stride(0),
            query_starts.data_ptr(),
            context_lens.data_ptr(),
            None,
            sequences,
            num_heads,
            num_kv_heads,
            head_dim,
            k_cache.shape[2],
            scale,
            window or 0,
            out.data_ptr(),
            self.num_threads,
        )
        return out

    def blocks_out(self, kv: Tensor, blocks: Sequence[int], slots: Sequence[int], memory: memoryview) -> None:
        """Copies whole blocks of `kv` [layers, 2, blocks, heads, block_size, D], each to its slot of `memory`, where a block is
        [layers, 2, heads, block_size, D]. In the calling thread."""
        self._move_blocks(self._blocks_out, kv, blocks, slots, memory, to_kv=False)

    def blocks_in(self, kv: Tensor, blocks: Sequence[int], slots: Sequence[int], memory: memoryview) -> None:
        """The other way round."""
        self._move_blocks(self._blocks_in, kv, blocks, slots, memory, to_kv=True)

    def _move_blocks(
        self,
        move: Callable[..., None],
        kv: Tensor,
        blocks: Sequence[int],
        slots: Sequence[int],
        memory: memoryview,
        *,
        to_kv: bool,
    ) -> None:
        layers, two, num_blocks, heads, size, dim = kv.shape
        planes, run = layers * two, heads * size * dim * kv.itemsize
        held = np.frombuffer(memory, np.uint8)
        address = held.ctypes.data
        if not kv.is_contiguous() or kv.data_ptr() % 16 or address % 16 or run % 16:
            raise ValueError(f"kv must be contiguous, with blocks of a multiple of 16 bytes, not {list(kv.shape)}")
        ids, at = np.array(blocks, np.int32), np.array(slots, np.int64)
        num_slots = len(held) // (planes * run)
        if len(ids) != len(at) or not _below(ids, num_blocks) or not _below(at, num_slots):
            raise ValueError(f"{len(ids)} blocks below {num_blocks} and as many slots below {num_slots} are needed")
        source, target = (address, kv.data_ptr()) if to_kv else (kv.data_ptr(), address)
        move(source, target, ids.ctypes.data, at.ctypes.data, len(ids), planes, num_blocks, run)

    def place(
        self, kv: Tensor, data: memoryview, blocks: Sequence[int], start: int, stop: int, first: int, last: int
    ) -> None:
        """Writes tokens `first … last-1` of `data`, the KV of tokens `start … stop-1` [layers, 2, heads, tokens, D], into
        `kv` [layers, 2, blocks, heads, block_size, D], token t into blocks[t // block_size]. In the calling thread."""
        layers, two, num_blocks, heads, size, dim = kv.shape
        row, count = dim * kv.itemsize, -(-last // size)
        if not kv.is_contiguous() or kv.data_ptr() % 16 or row % 16:
            raise ValueError(f"kv must be contiguous, with rows of a multiple of 16 bytes, not {list(kv.shape)}")
        if len(data) != layers * two * heads * (stop - start) * row or not start <= first <= last <= stop:
            raise ValueError(f"{len(data)} bytes are not the KV of tokens {start} to {stop} with {first} to {last}")
        ids = np.array(blocks[:count], np.int32)
        if len(ids) < count or not _below(ids, num_blocks):
            raise ValueError(f"{count} blocks below {num_blocks} are needed")
        source = np.frombuffer(data, np.uint8)
        self._place(
            source.ctypes.data,
            kv.data_ptr(),
            ids.ctypes.data,
            layers * two,
            heads,
            num_blocks,
            size,
            row,
            stop - start,
            start,
            first,
            last,
        )


def _bind(function: ctypes._NamedFuncPointer, signature: str) -> ctypes._NamedFuncPointer:
    """One letter an argument: p pointer, n int64, i int32, f float."""
    function.argtypes = [_KINDS[letter] for letter in signature]
    function.restype = None
    return function


def _below(numbers: np.ndarray[Any, Any], limit: int) -> bool:
    return not len(numbers) or 0 <= int(numbers.min()) <= int(numbers.max()) < limit


def expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_contiguous():
        found = f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
        raise ValueError(f"{name} must be contiguous {dtype} {list(shape)}, not {found}")


def _expect_kind(weight: PackedWeight, gated: bool) -> None:
    if weight.gated is not gated:
        raise ValueError(
            "a weight of pack_gated is for gated alone" if weight.gated else "gated needs a weight of pack_gated"
        )


def expect_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if num_heads % num_kv_heads or head_dim % 8 or not 16 <= head_dim <= 256:
        raise ValueError(f"unsupported heads: {num_heads} over {num_kv_heads} of {head_dim} values")


def _expect_tables(tables: Tensor, sequences: int) -> None:
    if tables.dim() != 2 or tables.dtype != torch.int32 or tables.shape[0] != sequences or tables.stride(1) != 1:
        raise ValueError(f"block_tables must be int32 [{sequences}, blocks], not {tables.dtype} {list(tables.shape)}")


def _expect_caches(k_cache: Tensor, v_cache: Tensor, num_kv_heads: int, head_dim: int) -> bool:
    """Whether they are bf16."""
    dtype = k_cache.dtype
    if dtype not in (torch.float32, torch.bfloat16) or k_cache.dim() != 4:
        raise ValueError(f"caches are fp32 or bf16 [blocks, heads, block_size, dim], not {dtype}")
    shape = (k_cache.shape[0], num_kv_heads, k_cache.shape[2], head_dim)
    expect("k_cache", k_cache, shape, dtype)
    expect("v_cache", v_cache, shape, dtype)
    return dtype == torch.bfloat16
