"""What the KV of a token is made of, once it has left the engine's blocks."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Logical order: a run of `n` tokens is one contiguous array of shape `(*shape[:-1], n, shape[-1])`.

    For a model, `shape` is (layers, 2, kv_heads, head_dim). Block ids and block sizes are not part of it.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def token_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * prod(self.shape)
