"""Attention of a few rows, with rotation before it and new KV on its way to the cache, by a kernel of ours (`pieces.cu`)."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from segue.model.cuda import driver
from segue.model.cuda.driver import Boxes, TensorMap
from segue.model.cuda.inputs import FEW
from segue.model.cuda.work import FIELDS
from segue.model.spec import ModelSpec

LANES, CHUNK = 64, 64  # query heads times rows of a piece, at most; tokens at once
THREADS = 160
_HALF_BYTES = 113 * 1024  # so that two programs are on a multiprocessor, of which one may be of the next kernel
_MOST_STAGES = 8
_LOG2E = 1.4426950408889634


class Step(ctypes.Structure):
    """What the kernel is given, as it says."""

    _fields_ = (
        ("keys", TensorMap),
        ("values", TensorMap),
        *(
            (name, c_void_p)
            for name in ("qkv", "k_cache", "v_cache", "q", "out", "q_norm", "k_norm", "cosines", "sines")
        ),
        *(
            (name, c_void_p)
            for name in ("positions", "slots", "tables", "own", "shared", "counts", "starts", "tail_counts")
        ),
        *((name, c_void_p) for name in ("sums", "logs", "arrivals")),
        ("scale", c_float),
        ("eps", c_float),
        ("rows", c_int),
        ("table_stride", c_int),
        ("merges", c_int),
        ("padding", c_int * 3),
    )


class Kind(NamedTuple):
    """What a kernel is compiled for."""

    heads: int
    kv_heads: int
    dim: int
    size: int  # of a block
    has_norm: bool

    @property
    def group_rows(self) -> int:
        """Of a piece, at most."""
        return LANES // (self.heads // self.kv_heads)

    @property
    def _tile_bytes(self) -> int:
        return CHUNK * self.dim * 2

    @property
    def stages(self) -> int:
        """Chunks of keys and values that there is room for, beside a tile of queries."""
        return min((_HALF_BYTES - self._tile_bytes - 4) // (2 * self._tile_bytes + 16), _MOST_STAGES)

    @property
    def shared_bytes(self) -> int:
        return self._tile_bytes + self.stages * (2 * self._tile_bytes + 16) + 4

    def macros(self, dtype: torch.dtype) -> dict[str, int]:
        of_kind = {"HEADS": self.heads, "KV_HEADS": self.kv_heads, "DIM": self.dim, "SIZE": self.size}
        of_all = {"STAGES": self.stages, "FIELDS": FIELDS, "HAS_NORM": int(self.has_norm)}
        return of_kind | of_all | {"IS_FP16": int(dtype == torch.float16)}


class Given(NamedTuple):
    """A step's tensors, all contiguous; `None` is what there is not. `q` is written for rows with tails only: those see slots
    that others are to look at."""

    qkv: Tensor  # [rows, heads + 2 kv heads, dim]
    k_cache: Tensor
    v_cache: Tensor
    q: Tensor
    out: Tensor
    norms: tuple[Tensor, Tensor] | None
    cosines: Tensor  # [positions, dim / 2] fp32
    sines: Tensor
    positions: Tensor
    slots: Tensor
    tables: Tensor
    own: Tensor | None
    shared: Tensor | None
    counts: Tensor
    starts: Tensor
    tail_counts: Tensor | None
    sums: Tensor
    logs: Tensor
    arrivals: Tensor


def kv_boxes(cache: Tensor) -> Boxes:
    """A block's tokens of one head, or 64 of them, and 64 numbers of each."""
    blocks, kv_heads, size, dim = cache.shape
    return Boxes(cache.data_ptr(), (dim, blocks * kv_heads * size), (2 * dim,), (64, min(size, CHUNK)))


def describe(given: Given, keys: Any, values: Any, *, scale: float, eps: float) -> Step:
    """Pieces put themselves together where none is shared; rows with tails share some."""
    assert given.tail_counts is None or given.shared is not None
    q_norm, k_norm = given.norms or (None, None)
    tensors = (*given[:5], q_norm, k_norm, *given[6:])
    assert all(each is None or each.is_contiguous() for each in tensors)
    pointers = (each.data_ptr() if each is not None else None for each in tensors)
    merges = int(given.shared is None)
    return Step(keys, values, *pointers, scale * _LOG2E, eps, len(given.positions), given.tables.stride(0), merges)


class PieceKernel:
    """For caches of one type and shape."""

    def __init__(self, kind: Kind, dtype: torch.dtype, device: torch.device) -> None:
        self.kind = kind
        units = torch.cuda.get_device_properties(device).multi_processor_count
        self._programs = max(2 * units // kind.kv_heads, 1) * kind.kv_heads
        self._kernel = _kernel(kind, dtype, device)
        self._encode = lru_cache(maxsize=4096)(lambda boxes: driver.tensor_map(boxes, dtype))

    def attend(self, given: Given, *, scale: float, eps: float) -> None:
        """Rows whose pieces are all their own are done in `out`; for the others `sums` and `logs` are."""
        keys, values = (self._encode(kv_boxes(each)) for each in (given.k_cache, given.v_cache))
        step = describe(given, keys, values, scale=scale, eps=eps)
        self._kernel.launch(step, self._programs, self.kind.shared_bytes)


def why_not(spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """What such a model, its blocks or the device would need for it; None if nothing is missing."""
    if torch.cuda.get_device_capability(device) != (9, 0):  # what multiplies there is on no other
        return f"needs a device of compute capability 9.0; {device} has another"
    if dtype not in (torch.bfloat16, torch.float16):
        return "computes in bf16 or fp16"
    if spec.head_dim not in (64, 128) or any(spec.windows):
        return "is for heads of 64 or 128 numbers, which see all that came before"
    if spec.num_heads // spec.num_kv_heads + 2 * FEW > LANES:
        return f"is for up to {LANES - 2 * FEW} query heads on a KV head"
    if block_size not in (16, 32) and block_size % CHUNK:
        return f"needs a block_size of 16, 32 or a multiple of {CHUNK}"
    return None


def kind_of(spec: ModelSpec, block_size: int) -> Kind:
    return Kind(spec.num_heads, spec.num_kv_heads, spec.head_dim, block_size, spec.qk_norm)


@cache
def _kernel(kind: Kind, dtype: torch.dtype, device: torch.device) -> driver.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    binary = driver.compile_cuda("pieces.cu", f"sm_{major}{minor}a", kind.macros(dtype))
    try:
        return driver.Kernel(binary, "compute", 1, THREADS)
    except RuntimeError as error:  # the driver does not take it
        raise driver.CompilerMissing(str(error)) from error
