"""Attention of prompts, whose KV is in the cache already, by a kernel of ours (`tiles.cu`)."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from segue.model.cuda import driver, hopper
from segue.model.cuda.driver import Boxes, TensorMap
from segue.model.cuda.hopper import LOG2E, addresses, kv_boxes
from segue.model.cuda.inputs import TILE_FIELDS
from segue.model.spec import ModelSpec

ROWS = 128  # of a tile, at most; tokens at once
THREADS = 384
_ALL_BYTES = 227 * 1024
_AHEAD = 2  # tiles of queries
_MOST_STAGES = 4


class Step(ctypes.Structure):
    """What the kernel is given, as it says."""

    _fields_ = (
        ("queries", TensorMap),
        ("keys", TensorMap),
        ("values", TensorMap),
        *((name, c_void_p) for name in ("out", "tables", "tiles", "num_tiles", "taken")),
        ("scale", c_float),
        ("table_stride", c_int),
        ("padding", c_int * 4),
    )


class Kind(NamedTuple):
    """What a kernel is compiled for."""

    heads: int
    kv_heads: int
    dim: int
    size: int  # of a block

    @property
    def _tile_bytes(self) -> int:
        return ROWS * self.dim * 2

    @property
    def stages(self) -> int:
        """Chunks of keys and values that there is room for, beside queries."""
        return min((_ALL_BYTES - self._query_bytes) // (2 * self._tile_bytes + 32), _MOST_STAGES)

    @property
    def _query_bytes(self) -> int:
        return _AHEAD * (self._tile_bytes + 32)

    @property
    def shared_bytes(self) -> int:
        return self._query_bytes + self.stages * (2 * self._tile_bytes + 32)

    def macros(self, dtype: torch.dtype) -> dict[str, int]:
        of_kind = {"HEADS": self.heads, "KV_HEADS": self.kv_heads, "DIM": self.dim, "SIZE": self.size}
        return of_kind | {"STAGES": self.stages, "FIELDS": TILE_FIELDS, "IS_FP16": int(dtype == torch.float16)}


class Given(NamedTuple):
    """A step's tensors, all contiguous."""

    q: Tensor  # [rows, heads, dim]
    k_cache: Tensor
    v_cache: Tensor
    tables: Tensor
    tiles: Tensor  # [tiles, TILE_FIELDS]
    num_tiles: Tensor  # how many of them are to be done
    out: Tensor


def query_boxes(q: Tensor) -> Boxes:
    """A tile's rows of one head, 64 numbers of each; those that are not there are zeros."""
    rows, heads, dim = q.shape
    return Boxes(q.data_ptr(), (dim, heads, rows), (2 * dim, 2 * heads * dim), (64, 1, ROWS))


def describe(given: Given, taken: Tensor, queries: Any, keys: Any, values: Any, *, scale: float) -> Step:
    """`taken`: one number, zero before and after."""
    pointers = addresses(given.out, given.tables, given.tiles, given.num_tiles, taken)
    return Step(queries, keys, values, *pointers, scale * LOG2E, given.tables.stride(0))


class TileKernel:
    """For caches of one type and shape."""

    def __init__(self, kind: Kind, dtype: torch.dtype, device: torch.device) -> None:
        self.kind = kind
        self._units = torch.cuda.get_device_properties(device).multi_processor_count
        self._taken = torch.zeros(1, dtype=torch.int32, device=device)
        self._kernel = hopper.kernel("tiles.cu", kind.macros(dtype), 1, THREADS, device)
        self._encode = lru_cache(maxsize=4096)(lambda boxes: driver.tensor_map(boxes, dtype))

    def attend(self, given: Given, *, scale: float) -> None:
        boxes = query_boxes(given.q), kv_boxes(given.k_cache), kv_boxes(given.v_cache)
        step = describe(given, self._taken, *map(self._encode, boxes), scale=scale)
        self._kernel.launch(step, min(self._units, len(given.tiles) * self.kind.heads), self.kind.shared_bytes)


def kernel_for(spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device) -> TileKernel | None:
    """None if it is not for such a model, blocks or device. `CompilerMissing` if it is, but nothing here compiles or loads it."""
    if hopper.why_no_attention(spec, block_size, dtype, device) is not None:
        return None
    return TileKernel(kind_of(spec, block_size), dtype, device)


def kind_of(spec: ModelSpec, block_size: int) -> Kind:
    return Kind(spec.num_heads, spec.num_kv_heads, spec.head_dim, block_size)
