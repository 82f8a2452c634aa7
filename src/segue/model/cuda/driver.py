"""CUDA kernels that are written in C++: compiled by NVRTC, which comes with torch, and launched through the driver.

Where warps have tasks of their own, and programs write to each other's shared memory, Triton has no words for it; `hopper.h` has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

SOURCES = Path(__file__).parent
_HEADERS = ("hopper.h", "attention.h")
_OUT_OF_MEMORY = 2
_SHARED_SIZE, _CLUSTER, _EARLY = 8, 4, 6  # numbers of attributes
_MOST_SHARED = 227 * 1024  # bytes, of a program
_KINDS = {torch.float16: 6, torch.bfloat16: 9}
_SWIZZLE_128, _PROMOTE_256 = 3, 3


class CompilerMissing(RuntimeError):
    """There is no NVRTC, or it does not take our kernels, or the driver does not take what comes of it. Whoever wanted one has to
    do without."""


class _Attribute(ctypes.Structure):
    _fields_ = (("kind", c_int), ("padding", c_int), ("value", c_uint32 * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", c_uint),
    )


class Boxes(NamedTuple):
    """Half precision numbers in memory, as a kernel copies them: `box` at once, 64 of its innermost dimension, which are next to
    each other. `strides` of the other dimensions, in bytes."""

    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


TensorMap = c_uint64 * 16


def compile_cuda(name: str, arch: str, macros: Mapping[str, int]) -> bytes:
    """What runs on `arch`, of the source with this name."""
    nvrtc, program = _nvrtc(), c_void_p()
    source = (SOURCES / name).read_bytes()
    headers = (c_char_p * len(_HEADERS))(*((SOURCES / each).read_bytes() for each in _HEADERS))
    names = (c_char_p * len(_HEADERS))(*(each.encode() for each in _HEADERS))
    options = [f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{macro}={value}" for macro, value in macros.items())]
    given = (c_char_p * len(options))(*(each.encode() for each in options))
    _check_nvrtc(nvrtc.nvrtcCreateProgram(byref(program), source, name.encode(), len(_HEADERS), headers, names))
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
        size = c_size_t()
        if failed:
            _check_nvrtc(nvrtc.nvrtcGetProgramLogSize(program, byref(size)))
            log = ctypes.create_string_buffer(size.value)
            _check_nvrtc(nvrtc.nvrtcGetProgramLog(program, log))
            raise CompilerMissing(f"{name} does not compile for {arch}: {log.value.decode(errors='replace')}")
        _check_nvrtc(nvrtc.nvrtcGetCUBINSize(program, byref(size)))
        binary = ctypes.create_string_buffer(size.value)
        _check_nvrtc(nvrtc.nvrtcGetCUBIN(program, binary))
        return binary.raw
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


class Kernel:
    """Of a binary, for as long as the process lives. It is launched with one argument, in clusters of programs, and is brought to
    the device while the kernel before it still runs, which it waits for by itself."""

    def __init__(self, binary: bytes, name: str, cluster: int, threads: int) -> None:
        torch.cuda.current_stream().synchronize()  # so that there is a context
        module, self._function = c_void_p(), c_void_p()
        _check(_cuda().cuModuleLoadData(byref(module), binary))
        _check(_cuda().cuModuleGetFunction(byref(self._function), module, name.encode()))
        _check(_cuda().cuFuncSetAttribute(self._function, _SHARED_SIZE, _MOST_SHARED))
        self._attributes = (_Attribute * 2)()
        for attribute, kind, values in zip(self._attributes, (_CLUSTER, _EARLY), ((cluster, 1, 1), (1,)), strict=True):
            attribute.kind = kind
            attribute.value[: len(values)] = values
        self._threads, self._cluster = threads, cluster

    def launch(self, argument: ctypes.Structure, num_programs: int, shared_bytes: int) -> None:
        given = (c_void_p * 1)(ctypes.addressof(argument))
        config = self._config(num_programs, shared_bytes)
        _check(_cuda().cuLaunchKernelEx(byref(config), self._function, given, None))

    def most_clusters(self, shared_bytes: int) -> int:
        """That the device has room for at once."""
        count, config = c_int(), self._config(self._cluster, shared_bytes)
        _check(_cuda().cuOccupancyMaxActiveClusters(byref(count), self._function, byref(config)))
        return count.value

    def _config(self, num_programs: int, shared_bytes: int) -> _Config:
        return _Config(
            (num_programs, 1, 1), (self._threads, 1, 1), shared_bytes, torch.cuda.current_stream().cuda_stream,
            self._attributes, len(self._attributes),
        )  # fmt: skip


def tensor_map(boxes: Boxes, dtype: torch.dtype) -> Any:
    """As the processor's copies read it."""
    room = ctypes.create_string_buffer(192)
    start = -ctypes.addressof(room) % 64
    made = TensorMap.from_buffer(room, start)
    count, base = len(boxes.sizes), c_void_p(boxes.base)
    sizes, strides = (c_uint64 * count)(*boxes.sizes), (c_uint64 * (count - 1))(*boxes.strides)
    box, steps = (c_uint32 * count)(*boxes.box), (c_uint32 * count)(*([1] * count))
    how = 0, _SWIZZLE_128, _PROMOTE_256, 0
    _check(_cuda().cuTensorMapEncodeTiled(made, _KINDS[dtype], count, base, sizes, strides, box, steps, *how))
    return made


@cache
def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int) -> None:
    if result == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError("CUDA out of memory: the driver has none for a kernel")
    if result:
        said = c_char_p()
        _cuda().cuGetErrorString(result, byref(said))
        raise RuntimeError(f"CUDA error: {said.value.decode() if said.value else result}")


@cache
def _nvrtc() -> ctypes.CDLL:
    """The one that comes with torch, or is installed beside it, or else the system's."""
    version = torch.version.cuda
    majors = [version.split(".")[0]] if version else ["13", "12"]
    for major in majors:
        for folder in (f"cu{major}", "cuda_nvrtc"):
            place = Path(torch.__file__).parents[1] / "nvidia" / folder / "lib"
            if (found := place / f"libnvrtc.so.{major}").exists():
                with suppress(OSError):
                    for part in place.glob(f"libnvrtc-builtins.so.{major}*"):  # it looks for it by name
                        ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
                    return ctypes.CDLL(str(found))
        with suppress(OSError):
            return ctypes.CDLL(f"libnvrtc.so.{major}")
    raise CompilerMissing("no NVRTC (libnvrtc.so) was found; it comes with torch's CUDA builds")


def _check_nvrtc(result: int) -> None:
    if result:
        raise CompilerMissing(f"NVRTC error {result}")
