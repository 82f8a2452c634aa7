"""Attention of a few rows, with rotation before it and new KV on its way to the cache, by kernels of ours: in pieces of what rows
see (`pieces.cu`), and of beams (`beams.cu`)."""

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
from segue.model.cuda.work import BOX, FIELDS
from segue.model.spec import ModelSpec

LANES, CHUNK = 64, 64  # query heads times rows, at most; tokens at once
THREADS = 160
RANKS = (8, 4, 2)  # programs of a cluster
_HALF_BYTES = 113 * 1024  # so that two programs are on a multiprocessor, of which one may be of the next kernel
_MOST_STAGES = 8
_LOG2E = 1.4426950408889634


def _pointers(names: str) -> list[tuple[str, Any]]:
    return [(name, c_void_p) for name in names.split()]


class PieceStep(ctypes.Structure):
    """What `pieces.cu` is given, as it says."""

    _fields_ = (
        ("keys", TensorMap),
        ("values", TensorMap),
        *_pointers(
            "qkv k_cache v_cache out q_norm k_norm cosines sines positions slots tables own shared counts starts"
        ),
        *_pointers("sums logs arrivals"),
        ("scale", c_float),
        ("eps", c_float),
        ("table_stride", c_int),
        ("merges", c_int),
        ("padding", c_int * 8),
    )


class BeamStep(ctypes.Structure):
    """What `beams.cu` is given, as it says."""

    _fields_ = (
        ("keys", TensorMap),
        ("values", TensorMap),
        ("key_lines", TensorMap),
        ("value_lines", TensorMap),
        *_pointers("qkv k_cache v_cache out q_norm k_norm cosines sines positions slots tables items num_items"),
        *_pointers("tails tail_counts"),
        ("scale", c_float),
        ("eps", c_float),
        ("table_stride", c_int),
        ("tail_stride", c_int),
        ("shift", c_int),
        ("padding", c_int * 13),
    )


class Kind(NamedTuple):
    """What kernels are compiled for."""

    heads: int
    kv_heads: int
    dim: int
    size: int  # of a block
    has_norm: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def group_rows(self) -> int:
        """Of a piece or an item, at most."""
        return LANES // self.group

    @property
    def has_beams(self) -> bool:
        """Whether there is a kernel for beams: two heads of a row are prepared by the same threads."""
        return self.group in (2, 4, 8)

    @property
    def tile_bytes(self) -> int:
        return CHUNK * self.dim * 2

    def macros(self, dtype: torch.dtype) -> dict[str, int]:
        of_kind = {"HEADS": self.heads, "KV_HEADS": self.kv_heads, "DIM": self.dim, "SIZE": self.size}
        return of_kind | {"FIELDS": FIELDS, "HAS_NORM": int(self.has_norm), "IS_FP16": int(dtype == torch.float16)}


class Layout(NamedTuple):
    """How many chunks of keys and values there is room for, beside queries and what else a program has."""

    stages: int
    shared_bytes: int


def layout(kind: Kind, besides: int) -> Layout:
    stage, fixed = 2 * kind.tile_bytes + 16, kind.tile_bytes + besides
    stages = min((_HALF_BYTES - fixed) // stage, _MOST_STAGES)
    return Layout(stages, stages * stage + fixed)


def piece_layout(kind: Kind) -> Layout:
    return layout(kind, 4)


def beam_layout(kind: Kind) -> Layout:
    return layout(kind, 8)


def ranks_of(kind: Kind, room: int, each: int, units: int) -> int:
    """Programs for each of so many items: as many as there is room for at once, but enough for what is newest of each of a
    program's rows to be in its first stages."""
    first = beam_layout(kind).stages * CHUNK
    possible = [ranks for ranks in RANKS if LANES // ranks // kind.group * each <= first]
    return next((ranks for ranks in possible if room * kind.kv_heads * ranks <= 2 * units), possible[-1])


class Given(NamedTuple):
    """A step's tensors, all contiguous; `None` is what there is not."""

    qkv: Tensor  # [rows, heads + 2 kv heads, dim]
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor
    norms: tuple[Tensor, Tensor] | None
    cosines: Tensor  # [positions, dim / 2] fp32
    sines: Tensor
    positions: Tensor
    slots: Tensor
    tables: Tensor

    @property
    def pointers(self) -> list[int | None]:
        q_norm, k_norm = self.norms or (None, None)
        return _addresses(*self[:4], q_norm, k_norm, *self[5:])


class Listed(NamedTuple):
    """Pieces, of single rows and shared ones, and room for what comes of them."""

    own: Tensor | None
    shared: Tensor | None
    counts: Tensor
    starts: Tensor
    sums: Tensor
    logs: Tensor
    arrivals: Tensor


class Beams(NamedTuple):
    """Items of beams, with `room` for so many. What beams have for themselves is in slots that they list; `each`: tokens of it
    that are put side by side, 4 if no beam has more, or 16."""

    items: Tensor
    num_items: Tensor
    tails: tuple[Tensor, Tensor]
    room: int
    each: int


def kv_boxes(cache: Tensor, tokens: int) -> Boxes:
    """So many of a block's tokens of one head, or all of them, and 64 numbers of each."""
    blocks, kv_heads, size, dim = cache.shape
    return Boxes(cache.data_ptr(), (dim, blocks * kv_heads * size), (2 * dim,), (64, min(size, tokens)))


def piece_step(given: Given, listed: Listed, keys: Any, values: Any, *, scale: float, eps: float) -> PieceStep:
    """Pieces put themselves together where none is shared."""
    pointers = (*given.pointers, *_addresses(*listed))
    return PieceStep(keys, values, *pointers, scale * _LOG2E, eps, given.tables.stride(0), int(listed.shared is None))


def beam_step(given: Given, beams: Beams, *maps: Any, scale: float, eps: float) -> BeamStep:
    tails, counts = beams.tails
    pointers = (*given.pointers, *_addresses(beams.items, beams.num_items, tails, counts))
    strides = given.tables.stride(0), tails.stride(0)
    return BeamStep(*maps, *pointers, scale * _LOG2E, eps, *strides, beams.each.bit_length() - 1)


def _addresses(*tensors: Tensor | None) -> list[int | None]:
    assert all(each is None or each.is_contiguous() for each in tensors)
    return [each.data_ptr() if each is not None else None for each in tensors]


class _Kernels:
    """For caches of one type and shape."""

    def __init__(self, kind: Kind, dtype: torch.dtype, device: torch.device) -> None:
        self.kind, self._dtype, self._device = kind, dtype, device
        self._units = torch.cuda.get_device_properties(device).multi_processor_count
        self._encode = lru_cache(maxsize=4096)(lambda boxes: driver.tensor_map(boxes, dtype))


class PieceKernel(_Kernels):
    """In pieces."""

    def __init__(self, kind: Kind, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(kind, dtype, device)
        self._programs = max(2 * self._units // kind.kv_heads, 1) * kind.kv_heads
        self._layout = piece_layout(kind)
        self._kernel = _kernel("pieces.cu", kind, 1, self._layout.stages, dtype, device)

    def attend(self, given: Given, listed: Listed, *, scale: float, eps: float) -> None:
        """Rows whose pieces are all their own are done in `out`; for the others `sums` and `logs` are."""
        maps = [self._encode(kv_boxes(each, CHUNK)) for each in (given.k_cache, given.v_cache)]
        step = piece_step(given, listed, *maps, scale=scale, eps=eps)
        self._kernel.launch(step, self._programs, self._layout.shared_bytes)


class BeamKernel(_Kernels):
    """Of rows that begin beams."""

    def __init__(self, kind: Kind, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(kind, dtype, device)
        self._layout = beam_layout(kind)
        for ranks in RANKS:  # so that what does not compile is known at the start
            self._kernel(ranks)

    def _kernel(self, ranks: int) -> driver.Kernel:
        return _kernel("beams.cu", self.kind, ranks, self._layout.stages, self._dtype, self._device)

    def attend(self, given: Given, beams: Beams, *, scale: float, eps: float) -> None:
        """What comes of each row to `out`."""
        maps = [self._encode(kv_boxes(each, tokens)) for tokens in (BOX, 1) for each in (given.k_cache, given.v_cache)]
        step = beam_step(given, beams, *maps, scale=scale, eps=eps)
        ranks = ranks_of(self.kind, beams.room, beams.each, self._units)
        self._kernel(ranks).launch(step, beams.room * self.kind.kv_heads * ranks, self._layout.shared_bytes)


class Fused(NamedTuple):
    """The kernels that there are."""

    pieces: PieceKernel
    beams: BeamKernel | None


def kernels_for(spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device) -> Fused | None:
    """None if they are not for such a model, blocks or device. `CompilerMissing` if they are, but nothing here compiles or loads
    them."""
    if device.type != "cuda" or why_not(spec, block_size, dtype, device) is not None:
        return None
    kind = kind_of(spec, block_size)
    return Fused(PieceKernel(kind, dtype, device), BeamKernel(kind, dtype, device) if kind.has_beams else None)


def why_not(spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """What such a model, its blocks or the device would need for them; None if nothing is missing."""
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
def _kernel(name: str, kind: Kind, ranks: int, stages: int, dtype: torch.dtype, device: torch.device) -> driver.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    macros = kind.macros(dtype) | {"RANKS": ranks, "STAGES": stages}
    binary = driver.compile_cuda(name, f"sm_{major}{minor}a", macros)
    try:
        return driver.Kernel(binary, "compute", ranks, THREADS)
    except RuntimeError as error:  # the driver does not take it
        raise driver.CompilerMissing(str(error)) from error
