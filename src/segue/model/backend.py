"""What a decoder needs computed, whoever computes it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from segue.model.batch import Batch
from segue.model.kv_copies import Place
from segue.model.spec import LinearScaling, Llama3Scaling, ModelSpec


class Backend(Protocol):
    """The operations of one decoder layer over a ragged batch: [tokens, features], sequences end to end, no padding.

    Where a method takes `into`, the result may live in a buffer of that name: it is valid until the next call with it.
    Each output row depends on its own sequence alone, never on what else is in the batch.
    """

    name: str
    device: torch.device
    kv_dtype: torch.dtype
    place_kv: Place | None
    """A faster way to write KV from outside into the blocks, if there is one."""

    def matrix(self, weight: Tensor) -> Any:
        """A [out, in] weight in the layout and precision this backend multiplies with."""
        ...

    def gated_matrix(self, gate: Tensor, up: Tensor) -> Any:
        """Two weights of one shape as `gated` multiplies with them."""
        ...

    def vector(self, weight: Tensor) -> Tensor: ...

    def prepare(self, batch: Batch) -> None:
        """Called before the operations of a step."""
        ...

    def embed(self, matrix: Any, ids: Tensor) -> Tensor:
        """A fresh [tokens, hidden]: the residual stream, which `add_rms_norm` changes in place."""
        ...

    def linear(self, x: Tensor, matrix: Any, bias: Tensor | None, into: str) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, into: str) -> Tensor: ...

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, into: str) -> Tensor:
        """residual += x, in place; the norm of the sum."""
        ...

    def gated(self, x: Tensor, matrix: Any, into: str) -> Tensor:
        """silu(x @ gate.T) * (x @ up.T), of a `gated_matrix`."""
        ...

    def rope_store(
        self, qkv: Tensor, batch: Batch, k_cache: Tensor, v_cache: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> None:
        """Norm (if any) and rotate q and k in place, and write k and v to the batch's slots."""
        ...

    def attention(
        self, qkv: Tensor, batch: Batch, k_cache: Tensor, v_cache: Tensor, window: int | None, into: str
    ) -> Tensor:
        """Causal attention of each token over its own sequence's KV, which holds it already."""
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
