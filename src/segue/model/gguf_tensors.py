"""Turns a GGUF tensor's bytes into a torch tensor.

The three formats of small models are unpacked here in a few whole-tensor operations, faster than the `gguf`
package's row groups and equal to it bit for bit; every other format is left to the package. All of it is numpy
on one thread: torch would split each of these short operations over all cores, and when the cores are busy with
something else its threads wait for each other ten times longer than the work takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from segue.base.errors import UnsupportedModel
from segue.model.gguf_file import GGUFFile, GGUFTensor

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_Q4_0, _Q4_1, _Q8_0, _BF16 = 2, 3, 8, 30
# numpy has no bfloat16: it is carried as 16-bit words and given its type at the end.
_PLAIN: dict[int, type[Any]] = {0: np.float32, 1: np.float16, _BF16: np.int16}


@dataclass(frozen=True)
class GGUFStored:
    """A tensor still in its file. Quantised ones are read as float32, floats in the type they are stored in.

    `rotary_heads` is the number of heads whose rows the Llama conversion interleaved, to be put back in order.
    """

    file: GGUFFile
    tensor: GGUFTensor
    rotary_heads: int | None = None

    @property
    def origin(self) -> str:
        return f"{self.file.path.name}: tensor {self.tensor.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def raw(self) -> Bytes:
        return self.file.raw(self.tensor)

    def read(self) -> Tensor:
        return dequantize(self.raw(), self.tensor, self.rotary_heads)


def dequantize(raw: Bytes, tensor: GGUFTensor, rotary_heads: int | None = None) -> Tensor:
    """A fresh tensor, never a view of the file."""
    values = _unpacked(raw, tensor).reshape(tensor.shape)
    if rotary_heads is not None:
        values = _halves_first(values, rotary_heads)
    read = torch.from_numpy(values)
    return read.view(torch.bfloat16) if tensor.kind == _BF16 else read


def _unpacked(raw: Bytes, tensor: GGUFTensor) -> npt.NDArray[Any]:
    if tensor.kind in _PLAIN:
        return raw.copy().view(_PLAIN[tensor.kind])
    if tensor.kind == _Q8_0:
        return _unpack_q8_0(raw)
    if tensor.kind == _Q4_0:
        return _unpack_q4_0(raw)
    if tensor.kind == _Q4_1:
        return _unpack_q4_1(raw)
    return _unpack_by_package(raw, tensor)


def _unpack_q8_0(raw: Bytes) -> Floats:
    """Blocks of 32: a float16 scale, then 32 signed bytes."""
    blocks = raw.reshape(-1, 34)
    values = blocks[:, 2:].view(np.int8).astype(np.float32)
    values *= _half(blocks, 0)
    return values


def _unpack_q4_0(raw: Bytes) -> Floats:
    """Blocks of 32: a float16 scale, then 32 nibbles around 8."""
    blocks = raw.reshape(-1, 18)
    values = _nibbles(blocks[:, 2:])
    values -= 8
    values *= _half(blocks, 0)
    return values


def _unpack_q4_1(raw: Bytes) -> Floats:
    """Blocks of 32: a float16 scale, a float16 minimum, then 32 nibbles."""
    blocks = raw.reshape(-1, 20)
    values = _nibbles(blocks[:, 4:])
    values *= _half(blocks, 0)
    values += _half(blocks, 2)
    return values


def _nibbles(packed: Bytes) -> Floats:
    """The low nibbles are a block's first half, the high ones its second."""
    out = np.empty((len(packed), 2, 16), np.uint8)
    np.bitwise_and(packed, 15, out=out[:, 0])
    np.right_shift(packed, 4, out=out[:, 1])
    return out.reshape(-1, 32).astype(np.float32)


def _half(blocks: Bytes, start: int) -> Floats:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _unpack_by_package(raw: Bytes, tensor: GGUFTensor) -> Floats:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as package_dequantize

    kind = GGMLQuantizationType(tensor.kind)
    num_rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
    try:
        values: Floats = package_dequantize(raw.reshape(num_rows, -1), kind).astype(np.float32, copy=False)
    except NotImplementedError:
        raise UnsupportedModel(f"tensor {tensor.name} is quantised as {kind.name}, which cannot be read.") from None
    return values


def _halves_first(values: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Undoes the conversion's (2i, 2i+1) pairing: rows of a head return to (i, i + head_dim / 2) pairing."""
    half = values.shape[0] // num_heads // 2
    return values.reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(values.shape)
