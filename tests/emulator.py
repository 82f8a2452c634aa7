"""Kernels in C++ on an emulated device (`tests/cuda`)."""

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from segue.model.cuda import driver, fused, hopper, tiles

_FOLDER = Path(__file__).parent / "cuda"
_FLAGS = [
    "-std=c++20",
    "-O1",
    "-shared",
    "-fPIC",
    "-fno-gnu-unique",
    "-Wno-psabi",
]  # no library shares another one's device


class Emulator:
    """What it compiled for this machine, for a session of tests."""

    def __init__(self, tmp_path_factory):
        self._tmp_path_factory = tmp_path_factory
        self._compiler = shutil.which("g++")
        self._made = {}

    def build(self, name, macros, source=None):
        """The kernel of that name, with `source` another than the real one, as a library."""
        if self._compiler is None:
            pytest.skip("no C++ compiler")
        key = name, tuple(sorted(macros.items())), source
        if key not in self._made:
            folder = self._tmp_path_factory.mktemp("emulated")
            (folder / f"{name}.cu").write_text(source or (driver.SOURCES / f"{name}.cu").read_text())
            command = [self._compiler, *_FLAGS, f"-I{_FOLDER}", f"-I{folder}", f"-I{driver.SOURCES}"]
            command += [f"-D{macro}={value}" for macro, value in macros.items()]
            subprocess.run([*command, str(_FOLDER / f"{name}.cpp"), "-o", str(folder / "kernel.so")], check=True)
            self._made[key] = ctypes.CDLL(str(folder / "kernel.so"))
        return self._made[key]


def tensor_map(boxes):
    """As the emulated device reads it."""
    five = [[*values, *[0] * (5 - len(values))] for values in (boxes.sizes, (2, *boxes.strides), boxes.box)]
    raw = struct.pack("<Q5Q5Q5II16x", boxes.base, *five[0], *five[1], *five[2], len(boxes.sizes))
    return driver.TensorMap.from_buffer_copy(raw)


class _Emulated:
    """In place of the kernels of `fused`; programs in an order that `seed` draws."""

    def __init__(self, emulator, kind, dtype, seed, source):
        self._emulator, self._source = emulator, source
        self.kind, self.seed, self.num_runs, self._dtype = kind, seed, 0, dtype

    def _run(self, name, stages, ranks, given, describe, num_programs):
        """Whether it came to its end. The product is no number until the kernel before has ended."""
        macros = self.kind.macros(self._dtype) | {"STAGES": stages, "RANKS": ranks}
        library = self._emulator.build(name, macros, self._source)
        product, there = given.qkv, torch.full_like(given.qkv, torch.nan)
        step = describe(given._replace(qkv=there))
        assert ctypes.sizeof(step) == library.size_of_step()
        pointer, size = ctypes.c_void_p(product.data_ptr()), ctypes.c_size_t(product.nbytes)
        self.num_runs += 1
        return not library.run(ctypes.byref(step), num_programs, self.seed, pointer, size)


class EmulatedPieceKernel(_Emulated):
    """With `slots` programs for each KV head."""

    def __init__(self, emulator, kind, dtype, slots=5, seed=0, source=None):
        super().__init__(emulator, kind, dtype, seed, source)
        self.slots = slots

    def attend(self, given, listed, *, scale, eps):
        maps = [tensor_map(hopper.kv_boxes(each)) for each in (given.k_cache, given.v_cache)]

        def describe(given):
            return fused.piece_step(given, listed, *maps, scale=scale, eps=eps)

        stages = fused.piece_layout(self.kind).stages
        return self._run("pieces", stages, 1, given, describe, self.slots * self.kind.kv_heads)


class EmulatedRowKernel(_Emulated):
    """With so many programs."""

    def __init__(self, emulator, kind, dtype, programs=3, seed=0, source=None):
        super().__init__(emulator, kind, dtype, seed, source)
        self.programs = programs

    def attend(self, given, listed, *, scale, eps):
        def describe(given):
            return fused.row_step(given, listed, scale=scale, eps=eps)

        return self._run("rows", 1, 1, given, describe, self.programs)


class EmulatedBeamKernel(_Emulated):
    """With as many `ranks` as are said, or else as a device with so many `units` has."""

    def __init__(self, emulator, kind, dtype, ranks=None, units=132, seed=0, source=None):
        super().__init__(emulator, kind, dtype, seed, source)
        self.ranks, self.units = ranks, units

    def attend(self, given, items, *, scale, eps):
        caches = given.k_cache, given.v_cache
        maps = [tensor_map(hopper.kv_boxes(each, tokens)) for tokens in (fused.BOX, 1) for each in caches]

        def describe(given):
            return fused.beam_step(given, items, *maps, scale=scale, eps=eps)

        clusters = {ranks: 2 * self.units // ranks for ranks in fused.RANKS}
        ranks = self.ranks or fused.ranks_of(self.kind, items.room, items.each, clusters)
        stages, programs = fused.beam_layout(self.kind).stages, items.room * self.kind.kv_heads * ranks
        return self._run("beams", stages, ranks, given, describe, programs)


class EmulatedTileKernel:
    """In place of `tiles.TileKernel`: so many programs, in an order that `seed` draws."""

    def __init__(self, emulator, kind, dtype, programs=3, seed=0, source=None):
        self._library = emulator.build("tiles", kind.macros(dtype), source)
        self.kind, self.programs, self.seed, self.num_runs = kind, programs, seed, 0

    def attend(self, given, *, scale):
        """Whether it came to its end. Queries, keys and values are no numbers until the kernel before has ended."""
        written = given[:3]
        given = given._replace(q=torch.full_like(given.q, torch.nan), k_cache=torch.full_like(given.k_cache, torch.nan),
                               v_cache=torch.full_like(given.v_cache, torch.nan))  # fmt: skip
        boxes = tiles.query_boxes(given.q), *(hopper.kv_boxes(each) for each in given[1:3])
        taken = torch.zeros(1, dtype=torch.int32)
        step = tiles.describe(given, taken, *map(tensor_map, boxes), scale=scale)
        assert ctypes.sizeof(step) == self._library.size_of_step()
        pointers = (ctypes.c_void_p * 3)(*(each.data_ptr() for each in written))
        sizes = (ctypes.c_size_t * 3)(*(each.nbytes for each in written))
        self.num_runs += 1
        programs = min(self.programs, len(given.tiles) * self.kind.heads)
        failed = self._library.run(ctypes.byref(step), programs, self.seed, pointers, sizes)
        return not failed and not taken.any()
