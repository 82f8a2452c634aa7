"""What a decoder needs computed, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from segue.model.batch import Batch
from segue.model.kv_copies import KVMoves
from segue.model.spec import LinearScaling, Llama3Scaling, ModelSpec


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer, in a backend's layout; q, k, v and gate, up as one matrix each."""

    input_norm: Tensor
    qkv: Any
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Any
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Any
    down: Any
    window: int | None


Stack = Callable[[Tensor, Tensor, Batch, Tensor], Tensor]
"""(x, residual, batch, kv): all layers, from the first one's normed input to the last norm of the rows that are sampled from.
The KV of every row is written. `kv` is [layers, 2, blocks, kv_heads, block_size, head_dim]; x and residual may change."""


class Backend(Protocol):
    """What a decoder does with a ragged batch: [tokens, features], sequences end to end, no padding.

    Where a method takes `into`, the result may live in a buffer of that name: it is valid until the next call with it.
    Each output row depends on its own sequence alone, never on what else is in the batch.
    """

    name: str
    device: torch.device
    kv_dtype: torch.dtype
    kv_moves: KVMoves | None
    """Faster ways to copy KV out of and into the blocks, if there are any."""

    def matrix(self, weight: Tensor) -> Any:
        """A [out, in] weight in the layout and precision this backend multiplies with."""
        ...

    def vocabulary(self, weight: Tensor) -> Any:
        """The same for a matrix with a row for each token id, which is looked up in, and multiplied with few rows at a time."""
        ...

    def part(self, matrix: Any, first: int, last: int) -> tuple[Any, int]:
        """Rows `first … last-1` of a `vocabulary`, perhaps with some around them: how many before the first. Copies nothing."""
        ...

    def gated_matrix(self, gate: Tensor, up: Tensor) -> Any:
        """Two weights of one shape as a layer's gated product takes them."""
        ...

    def vector(self, weight: Tensor) -> Tensor: ...

    def prepare(self, batch: Batch) -> None:
        """Called before the operations of a step."""
        ...

    def embed(self, matrix: Any, ids: Tensor) -> Tensor:
        """A fresh [tokens, hidden]: the residual stream, which the layers change in place."""
        ...

    def linear(self, x: Tensor, matrix: Any, bias: Tensor | None, into: str) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, into: str) -> Tensor: ...

    def stack(self, layers: Sequence[Layer], norms: Sequence[Tensor]) -> Stack:
        """The layers made ready to run, each with the norm that follows it."""
        ...


def rope_tables(spec: ModelSpec, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, [num_positions, head_dim / 2], fp32: computed as the reference does, angle by angle in fp32."""
    half = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).to(torch.float32) / spec.head_dim
    frequencies = 1.0 / (spec.rope_theta**half)
    scaling = spec.rope_scaling
    if isinstance(scaling, LinearScaling):
        frequencies = frequencies / scaling.factor
    elif isinstance(scaling, Llama3Scaling):
        frequencies = frequencies / torch.tensor([scaling.divisor(float(f)) for f in frequencies])
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return angles.cos(), angles.sin()
