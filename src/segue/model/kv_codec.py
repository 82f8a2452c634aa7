"""KV in fewer bits, for copies that need not be exact."""

from __future__ import annotations

from typing import Any

import numpy as np

from segue.kv import KVLayout


class Int8Codec:
    """Eight bits for each value, and a scale for each head's key or value of a token: a quarter of fp32, half of bf16.

    scales, fp32 | values, int8
    """

    def __init__(self, layout: KVLayout, block_size: int) -> None:
        self._dtype = layout.dtype
        self._width = layout.shape[-1]
        self._num_rows = layout.token_bytes * block_size // (4 if layout.dtype == "float32" else 2) // self._width
        self.num_bytes = self._num_rows * (4 + self._width)

    def encode(self, block: memoryview) -> memoryview:
        rows = self._numbers(block)
        scales = np.abs(rows).max(axis=1) / 127
        out: Any = np.empty(self.num_bytes, np.uint8)
        out[: 4 * self._num_rows] = scales.astype(np.float32).view(np.uint8)
        whole = np.rint(rows / np.where(scales > 0, scales, 1)[:, None])
        out[4 * self._num_rows :] = whole.astype(np.int8).view(np.uint8).reshape(-1)
        return memoryview(out)

    def decode(self, data: memoryview, out: memoryview) -> None:
        held = np.frombuffer(data, np.uint8)
        scales = held[: 4 * self._num_rows].view(np.float32)
        rows = held[4 * self._num_rows :].view(np.int8).reshape(-1, self._width) * scales[:, None]
        target = np.frombuffer(out, np.uint8)
        target[:] = self._bits(rows.reshape(-1)).view(np.uint8)

    def _numbers(self, block: memoryview) -> Any:
        """As fp32, a head's key or value in a row."""
        if self._dtype == "bfloat16":  # the upper half of an fp32
            numbers: Any = (np.frombuffer(block, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            numbers = np.frombuffer(block, np.dtype(self._dtype)).astype(np.float32)
        return numbers.reshape(-1, self._width)

    def _bits(self, numbers: Any) -> Any:
        if self._dtype != "bfloat16":
            return numbers.astype(np.dtype(self._dtype))
        bits = numbers.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to the nearest, ties to even
