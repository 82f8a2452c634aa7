"""Products of a few rows and a matrix, by a kernel of ours (`products.cu`), and which ones it is for."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_void_p
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from segue.model.cuda import driver
from segue.model.cuda.driver import Boxes, TensorMap
from segue.model.spec import ModelSpec

ROWS = (8, 16, 32, 64)  # that there is a kernel for
MOST_ROWS = ROWS[-1]
TILE, DEPTH = 64, 128  # that widths and depths must be multiples of
THREADS = 160
_HALF_BYTES = 113 * 1024  # so that two programs are on a multiprocessor, of which one may be of the next kernel
_ALL_BYTES = 227 * 1024
_FAR = 16  # stages, from which on this does not pay


class Product(ctypes.Structure):
    """What the kernel is given, as it says."""

    _fields_ = (
        ("weights", TensorMap),
        ("rows", TensorMap),
        ("out", c_void_p),
        ("bias", c_void_p),
        ("num_rows", c_int),
        ("width", c_int),
        ("depth", c_int),
        ("stages", c_int),
        ("padding", c_int * 8),
    )


class Kind(NamedTuple):
    """What a kernel is compiled for."""

    rows: int
    ranks: int
    is_pair: bool


class Layout(NamedTuple):
    """How a product is divided among programs, and their shared memory."""

    kind: Kind
    num_programs: int
    stages: int
    shared_bytes: int


def layout(num_rows: int, width: int, depth: int, *, is_pair: bool, units: int) -> Layout:
    """For a device of so many `units`: measured to be best on an H200 (docs/log.md). All programs at once, or many after each
    other; and those that have a multiprocessor each, and far to go, have all of its memory."""
    rows, tiles = next(rows for rows in ROWS if num_rows <= rows), width // TILE
    possible = [ranks for ranks in (1, 2, 4) if depth % (ranks * DEPTH) == 0]
    counts = [(ranks, ranks * tiles / units) for ranks in possible]
    ranks = next((ranks for ranks, each in counts if 0.9 <= each <= 2.0 or each >= 5.0), possible[-1])
    programs, chunks = ranks * tiles, depth // (ranks * DEPTH)
    most = _ALL_BYTES if programs <= units and chunks >= _FAR else _HALF_BYTES
    parts, stage = TILE * rows * 4, (TILE + rows) * DEPTH * 2 + 16
    stages = min((most - parts - 8) // stage, chunks)
    return Layout(Kind(rows, ranks, is_pair), programs, stages, stages * stage + parts + 8)


def weights_boxes(matrix: Tensor, *, is_pair: bool) -> Boxes:
    """64 columns, 128 deep: in octets of columns, and of a pair octets of either matrix take turns, so that both are in the same
    threads."""
    width, depth = matrix.shape
    octets, line = width // 8 // (1 + is_pair), 2 * depth
    return Boxes(
        matrix.data_ptr(),
        (64, 8, 1 + is_pair, octets, depth // 64),
        (line, octets * 8 * line if is_pair else line, 8 * line, 128),
        (64, 8, 1 + is_pair, 8 // (1 + is_pair), 2),
    )


def rows_boxes(x: Tensor, rows: int) -> Boxes:
    """All rows, 128 deep; those that are not there are zeros."""
    num_rows, depth = x.shape
    return Boxes(x.data_ptr(), (64, num_rows, depth // 64), (2 * depth, 128), (64, rows, 2))


def describe(x: Tensor, bias: Tensor | None, out: Tensor, weights: Any, rows: Any, stages: int) -> Product:
    pointer = bias.data_ptr() if bias is not None else None
    return Product(weights, rows, out.data_ptr(), pointer, len(x), out.shape[1], x.shape[1], stages)


class Products:
    """For matrices and rows of one type."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._units = torch.cuda.get_device_properties(device).multi_processor_count
        self._dtype, self._device = dtype, device
        self._encode = lru_cache(maxsize=4096)(lambda boxes: driver.tensor_map(boxes, dtype))

    def product(self, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """x times the transposed matrix, and the bias."""
        return self._run(x, matrix, bias, torch.empty(len(x), len(matrix), dtype=self._dtype, device=self._device))

    def gated(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Of two matrices, one after the other: silu of the first product, times the second."""
        return self._run(x, matrix, None, torch.empty(len(x), len(matrix) // 2, dtype=self._dtype, device=self._device))

    def _run(self, x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        if len(x) == 0:  # of a chunk that nobody samples from
            return out
        assert len(matrix) % TILE == 0 and matrix.shape[1] % DEPTH == 0 and x.is_contiguous()
        is_pair = len(matrix) > out.shape[1]
        plan = layout(len(x), len(matrix), x.shape[1], is_pair=is_pair, units=self._units)
        weights, rows = weights_boxes(matrix, is_pair=is_pair), rows_boxes(x, plan.kind.rows)
        given = describe(x, bias, out, self._encode(weights), self._encode(rows), plan.stages)
        _kernel(plan.kind, self._dtype, self._device).launch(given, plan.num_programs, plan.shared_bytes)
        return out


def products_for(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Products | None:
    """None if they are not for such a model or device. `CompilerMissing` if they are, but nothing here compiles or loads them."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or not fits(spec):
        return None
    if torch.cuda.get_device_capability(device) != (9, 0):  # what multiplies there is on no other
        return None
    try:
        _kernel(Kind(ROWS[0], 1, False), dtype, device)
    except RuntimeError as error:
        raise driver.CompilerMissing(str(error)) from error
    return Products(dtype, device)


def fits(spec: ModelSpec) -> bool:
    """Widths in whole tiles, depths in whole chunks."""
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    widths = spec.hidden_size, heads + 2 * kv_heads, 2 * spec.intermediate_size
    depths = spec.hidden_size, heads, spec.intermediate_size
    return all(width % TILE == 0 for width in widths) and all(depth % DEPTH == 0 for depth in depths)


def macros_of(kind: Kind, dtype: torch.dtype) -> dict[str, int]:
    return {"ROWS": kind.rows, "RANKS": kind.ranks, "PAIRS": int(kind.is_pair), "IS_FP16": int(dtype == torch.float16)}


@cache
def _kernel(kind: Kind, dtype: torch.dtype, device: torch.device) -> driver.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    binary = driver.compile_cuda("products.cu", f"sm_{major}{minor}a", macros_of(kind, dtype))
    return driver.Kernel(binary, "compute", kind.ranks, THREADS)
