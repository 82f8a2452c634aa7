"""Turns a GGUF tensor's bytes into a torch tensor.

The three formats of small models are unpacked here in a few whole-tensor operations, several times faster than
the `gguf` package's row groups and equal to it bit for bit; every other format is left to the package.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from segue.base.errors import UnsupportedModel
from segue.model.gguf_file import GGUFFile, GGUFTensor

_F32, _F16, _Q4_0, _Q4_1, _Q8_0, _BF16 = 0, 1, 2, 3, 8, 30
_FLOATS = {_F32: torch.float32, _F16: torch.float16, _BF16: torch.bfloat16}


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

    def raw(self) -> npt.NDArray[np.uint8]:
        return self.file.raw(self.tensor)

    def read(self) -> Tensor:
        values = dequantize(self.file.raw(self.tensor), self.tensor).reshape(self.shape)
        return values if self.rotary_heads is None else _halves_first(values, self.rotary_heads)


def dequantize(raw: npt.NDArray[np.uint8], tensor: GGUFTensor) -> Tensor:
    """A fresh tensor (never a view of the file) of `tensor`'s values, in any shape."""
    if tensor.kind in _FLOATS:
        return torch.from_numpy(raw.copy()).view(_FLOATS[tensor.kind])
    unpack = {_Q4_0: _unpack_q4_0, _Q4_1: _unpack_q4_1, _Q8_0: _unpack_q8_0}.get(tensor.kind)
    if unpack is not None:
        return unpack(torch.from_numpy(raw.copy()))
    return _dequantize_by_package(raw, tensor)


def _unpack_q8_0(data: Tensor) -> Tensor:
    """Blocks of 32: a float16 scale, then 32 signed bytes."""
    blocks = data.view(-1, 34)
    return blocks[:, 2:].contiguous().view(torch.int8).float().mul_(_half(blocks, 0))


def _unpack_q4_0(data: Tensor) -> Tensor:
    """Blocks of 32: a float16 scale, then 32 nibbles around 8."""
    blocks = data.view(-1, 18)
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_half(blocks, 0))


def _unpack_q4_1(data: Tensor) -> Tensor:
    """Blocks of 32: a float16 scale, a float16 minimum, then 32 nibbles."""
    blocks = data.view(-1, 20)
    return _nibbles(blocks[:, 4:]).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _nibbles(packed: Tensor) -> Tensor:
    """The low nibbles are a block's first half, the high ones its second."""
    out = torch.empty(packed.shape[0], 2, 16, dtype=torch.uint8)
    torch.bitwise_and(packed, 15, out=out[:, 0])
    torch.bitwise_right_shift(packed, 4, out=out[:, 1])
    return out.view(-1, 32).float()


def _half(blocks: Tensor, start: int) -> Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _dequantize_by_package(raw: npt.NDArray[np.uint8], tensor: GGUFTensor) -> Tensor:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as package_dequantize

    kind = GGMLQuantizationType(tensor.kind)
    rows = raw.reshape(-1, raw.size * tensor.shape[-1] // _num_values(tensor))
    try:
        return torch.from_numpy(package_dequantize(rows, kind).astype(np.float32, copy=False))
    except NotImplementedError:
        raise UnsupportedModel(f"tensor {tensor.name} is quantised as {kind.name}, which cannot be read.") from None


def _num_values(tensor: GGUFTensor) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64))


def _halves_first(values: Tensor, num_heads: int) -> Tensor:
    """Undoes the conversion's (2i, 2i+1) pairing: rows of a head return to (i, i + head_dim / 2) pairing."""
    half = values.shape[0] // num_heads // 2
    return values.reshape(num_heads, half, 2, -1).transpose(1, 2).reshape(values.shape)
