"""Attention of a few rows, with rotation before it and new KV on its way to the cache, by kernels of ours: in pieces of what rows
see together (`pieces.cu`) or alone (`rows.cu`), and of beams (`beams.cu`)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import c_float, c_int, c_void_p
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from segue.model.cuda import driver, hopper
from segue.model.cuda.driver import TensorMap
from segue.model.cuda.hopper import CHUNK, LOG2E, addresses, kv_boxes
from segue.model.cuda.inputs import FEW
from segue.model.cuda.work import FIELDS
from segue.model.spec import ModelSpec

LANES = 64  # query heads times rows, at most
BOX = 16  # tokens that beams' items are made of
THREADS = 160
RANKS = (8, 4, 2)  # programs of a cluster
ROW_WARPS, ROW_PROGRAMS = 4, 2  # of a program; on a multiprocessor
_HALF_BYTES = 113 * 1024  # so that two programs are on a multiprocessor, of which one may be of the next kernel
_MOST_STAGES = 8


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


class RowStep(ctypes.Structure):
    """What `rows.cu` is given, as it says."""

    _fields_ = (
        *_pointers("qkv k_cache v_cache out q_norm k_norm cosines sines positions slots tables own counts starts"),
        *_pointers("sums logs arrivals"),
        ("scale", c_float),
        ("eps", c_float),
        ("table_stride", c_int),
        ("padding", c_int),
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
        """Whether there is a kernel for beams: two heads of a row are prepared by the same threads, and each of eight programs
        finishes whole rows."""
        return self.group in (2, 4, 8)

    @property
    def own_rows(self) -> int:
        """Of a piece of rows alone, at most: a warp's product has eight columns. 0 if there is no kernel for them."""
        return 8 // self.group

    @property
    def tile_bytes(self) -> int:
        return CHUNK * self.dim * 2

    def macros(self, dtype: torch.dtype) -> dict[str, int]:
        of_kind = {"HEADS": self.heads, "KV_HEADS": self.kv_heads, "DIM": self.dim, "SIZE": self.size}
        of_kind |= {"FIELDS": FIELDS, "MOST_NEW": FEW}
        return of_kind | {"HAS_NORM": int(self.has_norm), "IS_FP16": int(dtype == torch.float16)}


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


def row_bytes(kind: Kind) -> int:
    """What four warps keep: norms and angles, and what they say to each other."""
    kept, said = 4 * kind.dim * (1 + FEW), 128 * (kind.dim // 4 + 4)
    return ROW_WARPS * (max(kept, said) + 4)


def possible_ranks(kind: Kind, each: int) -> list[int]:
    """Programs that an item can have: enough for what is newest of each of a program's rows to be in its first stages."""
    first = beam_layout(kind).stages * CHUNK
    return [ranks for ranks in RANKS if LANES // ranks // kind.group * each <= first]


def ranks_of(kind: Kind, room: int, each: int, clusters: Mapping[int, int]) -> int:
    """Of each of so many items, where a device has room for so many clusters of each size at once: as many as fit."""
    possible = possible_ranks(kind, each)
    return next((ranks for ranks in possible if room * kind.kv_heads <= clusters[ranks]), possible[-1])


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
        return addresses(*self[:4], q_norm, k_norm, *self[5:])


class Listed(NamedTuple):
    """Pieces, of single rows and shared ones, and room for what comes of them."""

    own: Tensor | None
    shared: Tensor | None
    counts: Tensor
    starts: Tensor
    sums: Tensor
    logs: Tensor
    arrivals: Tensor


class BeamItems(NamedTuple):
    """Items of beams, with `room` for so many. What beams have for themselves is in slots that they list; `each`: tokens of it
    that are put side by side, 4 if no beam has more, or 16."""

    items: Tensor
    num_items: Tensor
    tails: tuple[Tensor, Tensor]
    room: int
    each: int


def piece_step(given: Given, listed: Listed, keys: Any, values: Any, *, scale: float, eps: float) -> PieceStep:
    """Pieces put themselves together where none is shared."""
    pointers = (*given.pointers, *addresses(*listed))
    return PieceStep(keys, values, *pointers, scale * LOG2E, eps, given.tables.stride(0), int(listed.shared is None))


def row_step(given: Given, listed: Listed, *, scale: float, eps: float) -> RowStep:
    """Pieces put themselves together."""
    assert listed.shared is None
    pointers = (*given.pointers, *addresses(listed.own, *listed[2:]))
    return RowStep(*pointers, scale * LOG2E, eps, given.tables.stride(0))


def beam_step(given: Given, items: BeamItems, *maps: Any, scale: float, eps: float) -> BeamStep:
    tails, counts = items.tails
    pointers = (*given.pointers, *addresses(items.items, items.num_items, tails, counts))
    strides = given.tables.stride(0), tails.stride(0)
    return BeamStep(*maps, *pointers, scale * LOG2E, eps, *strides, items.each.bit_length() - 1)


class PieceKernel:
    """In pieces, of caches of one type and shape."""

    def __init__(self, kind: Kind, dtype: torch.dtype, device: torch.device) -> None:
        self.kind, self._layout = kind, piece_layout(kind)
        units = torch.cuda.get_device_properties(device).multi_processor_count
        self._programs = max(2 * units // kind.kv_heads, 1) * kind.kv_heads
        macros = kind.macros(dtype) | {"STAGES": self._layout.stages}
        self._kernel = hopper.kernel("pieces.cu", macros, 1, THREADS, device)
        self._encode = lru_cache(maxsize=4096)(lambda boxes: driver.tensor_map(boxes, dtype))

    def attend(self, given: Given, listed: Listed, *, scale: float, eps: float) -> None:
        """Rows whose pieces are all their own are done in `out`; for the others `sums` and `logs` are."""
        maps = [self._encode(kv_boxes(each)) for each in (given.k_cache, given.v_cache)]
        step = piece_step(given, listed, *maps, scale=scale, eps=eps)
        self._kernel.launch(step, self._programs, self._layout.shared_bytes)


class RowKernel:
    """Of rows alone, from caches of one type and shape."""

    def __init__(self, kind: Kind, dtype: torch.dtype, device: torch.device) -> None:
        self.kind, self._bytes = kind, row_bytes(kind)
        self._programs = ROW_PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
        self._kernel = hopper.kernel("rows.cu", kind.macros(dtype), 1, 32 * ROW_WARPS, device)

    def attend(self, given: Given, listed: Listed, *, scale: float, eps: float) -> None:
        """All rows are done in `out`."""
        self._kernel.launch(row_step(given, listed, scale=scale, eps=eps), self._programs, self._bytes)


class BeamKernel:
    """Of beams, whose caches are of one type and shape."""

    def __init__(self, kind: Kind, dtype: torch.dtype, device: torch.device) -> None:
        self.kind, self._layout = kind, beam_layout(kind)
        self._encode = lru_cache(maxsize=4096)(lambda boxes: driver.tensor_map(boxes, dtype))
        macros = kind.macros(dtype) | {"STAGES": self._layout.stages}
        self._kernels = {
            ranks: hopper.kernel("beams.cu", macros | {"RANKS": ranks}, ranks, THREADS, device) for ranks in RANKS
        }
        self._clusters = {
            ranks: kernel.most_clusters(self._layout.shared_bytes) for ranks, kernel in self._kernels.items()
        }

    def attend(self, given: Given, items: BeamItems, *, scale: float, eps: float) -> None:
        """What comes of each row to `out`."""
        maps = [self._encode(kv_boxes(each, tokens)) for tokens in (BOX, 1) for each in (given.k_cache, given.v_cache)]
        step = beam_step(given, items, *maps, scale=scale, eps=eps)
        ranks = ranks_of(self.kind, items.room, items.each, self._clusters)
        self._kernels[ranks].launch(step, items.room * self.kind.kv_heads * ranks, self._layout.shared_bytes)


class Fused(NamedTuple):
    """The kernels that there are."""

    pieces: PieceKernel
    rows: RowKernel | None
    beams: BeamKernel | None


def kernels_for(spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device) -> Fused | None:
    """None if they are not for such a model, blocks or device. `CompilerMissing` if they are, but nothing here compiles or loads
    them."""
    if why_not(spec, block_size, dtype, device) is not None:
        return None
    kind = kind_of(spec, block_size)
    return Fused(
        PieceKernel(kind, dtype, device),
        RowKernel(kind, dtype, device) if kind.own_rows else None,
        BeamKernel(kind, dtype, device) if kind.has_beams else None,
    )


def why_not(spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """What such a model, its blocks or the device would need for them; None if nothing is missing."""
    if spec.num_heads // spec.num_kv_heads + 2 * FEW > LANES:
        return f"is for up to {LANES - 2 * FEW} query heads on a KV head"
    return hopper.why_no_attention(spec, block_size, dtype, device)


def kind_of(spec: ModelSpec, block_size: int) -> Kind:
    return Kind(spec.num_heads, spec.num_kv_heads, spec.head_dim, block_size, spec.qk_norm)
