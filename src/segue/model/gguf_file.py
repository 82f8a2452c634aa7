"""Reads a GGUF file: header first, tensors when asked.

The `gguf` package supplies the constants and the arithmetic of the quantised formats, but not the parsing:
its reader takes seconds on a large vocabulary, and follows lengths found in a damaged file without end. Here
every length is checked against what is left of the file before anything is read or allocated.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from segue.base.errors import WeightsError

if TYPE_CHECKING:
    import numpy.typing as npt

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies. `shape` is in torch's order, outermost first; `kind` is the ggml type's number."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A parsed header over a mapped file; `raw` views are valid as long as this object lives."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    _mapped: mmap.mmap

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise WeightsError(f"{path.name} cannot be read: {error}.") from error
        header = _Header(mapped, path.name)
        metadata = header.read_metadata()
        return cls(path, metadata, header.read_tensors(metadata), mapped)

    def raw(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The stored bytes, mapped and read-only."""
        return np.frombuffer(self._mapped, np.uint8, tensor.num_bytes, tensor.start)


class _Header:
    """A cursor over the header; any step past the end of the file is a WeightsError."""

    def __init__(self, data: mmap.mmap, file_name: str) -> None:
        self._data = data
        self._name = file_name
        self._at = 0
        if bytes(data[:4]) != b"GGUF":
            raise WeightsError(f"{file_name} is not a GGUF file: it does not start with GGUF.")
        self._skip(4)
        version = self._number("I")
        if version not in (2, 3):
            raise WeightsError(f"{file_name} has GGUF version {version}; versions 2 and 3, little-endian, can be read.")
        self._num_tensors = self._count(32, "tensors")
        self._num_fields = self._count(13, "metadata fields")

    def read_metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(self._num_fields):
            key = self._string()
            metadata[key] = self._value(self._number("I"), key)
        return metadata

    def read_tensors(self, metadata: dict[str, Any]) -> dict[str, GGUFTensor]:
        found = [self._tensor_entry() for _ in range(self._num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._damaged(f"its alignment is {alignment!r}")
        base = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in found:
            tensor = GGUFTensor(name, shape, kind, base + offset, self._num_bytes(name, shape, kind))
            if tensor.start + tensor.num_bytes > len(self._data):
                raise self._damaged(f"tensor {name} would end at byte {tensor.start + tensor.num_bytes}")
            if name in tensors:
                raise self._damaged(f"tensor {name} is there twice")
            tensors[name] = tensor
        return tensors

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        rank = self._number("I")
        if not 1 <= rank <= _MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name} has {rank} dimensions")
        shape = tuple(int(self._number("Q")) for _ in range(rank))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _num_bytes(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (KeyError, ValueError):
            raise WeightsError(f"{self._name}: tensor {name} has the unknown type {kind}.") from None
        num_values = 1
        for size in shape:
            num_values *= size
        if num_values == 0 or shape[-1] % block_values:
            raise self._damaged(f"tensor {name} has shape {list(shape)} in blocks of {block_values}")
        return int(num_values // block_values * block_bytes)

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._damaged(f"field {key} has the unknown type {kind}")
        item = self._number("I")
        if item == _STRING:
            return [self._string() for _ in range(self._count(8, f"values in {key}"))]
        if item not in _SCALARS:
            raise self._damaged(f"field {key} is an array of the unknown type {item}")
        size = struct.calcsize("<" + _SCALARS[item])
        count = self._count(size, f"values in {key}")
        return list(struct.unpack_from(f"<{count}{_SCALARS[item]}", self._data, self._skip(count * size)))

    def _number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self._data, self._skip(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        length = self._number("Q")
        start = self._skip(length)
        try:
            return self._data[start : start + length].decode()
        except UnicodeDecodeError:
            raise self._damaged(f"the text at byte {start} is not UTF-8") from None

    def _count(self, least_bytes_each: int, what: str) -> int:
        count = int(self._number("Q"))
        if count * least_bytes_each > len(self._data) - self._at:
            raise self._damaged(f"it announces {count} {what}, more than could fit")
        return count

    def _skip(self, num_bytes: int) -> int:
        """Moves on and returns where it was."""
        start = self._at
        if num_bytes > len(self._data) - start:
            raise self._damaged(f"{num_bytes} bytes are announced at byte {start}")
        self._at = start + num_bytes
        return start

    def _damaged(self, found: str) -> WeightsError:
        return WeightsError(f"{self._name} is truncated or corrupt: {found}, in a file of {len(self._data)} bytes.")
