"""The CPU's fast path: our own kernels over packed weights and paged KV."""

from __future__ import annotations

import torch
from torch import Tensor

from segue.model.backend import rope_tables
from segue.model.batch import Batch
from segue.model.kv_copies import Place
from segue.model.native import Kernels, PackedWeight, Storage
from segue.model.spec import ModelSpec

_WORTH_THREADS = 1 << 26  # multiply-adds of a step


class NativeBackend:
    """Activations are fp32 whatever the weights are stored in. Bitwise: a row's result does not depend on the batch,
    on how its sequence was cut into steps, or on the number of threads."""

    name = "native"

    def __init__(self, kernels: Kernels, spec: ModelSpec, storage: Storage, max_tokens: int, max_len: int) -> None:
        self.device = torch.device("cpu")
        self.kv_dtype = torch.bfloat16 if storage == "bf16" else torch.float32
        self.place_kv: Place | None = kernels.place
        self._kernels = kernels
        self._num_weights = 0
        self._work_per_score = 2 * spec.num_layers * spec.num_heads * spec.head_dim
        self._storage = storage
        self._heads = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
        self._attention_width = spec.num_heads * spec.head_dim
        self._scale = spec.softmax_scale
        self._eps = spec.rms_eps
        self._cos, self._sin = rope_tables(spec, max_len)
        self._max_tokens = max_tokens
        self._buffers: dict[str, Tensor] = {}

    def matrix(self, weight: Tensor) -> PackedWeight:
        self._num_weights += weight.numel()
        return self._kernels.pack(weight, self._storage)

    def gated_matrix(self, gate: Tensor, up: Tensor) -> PackedWeight:
        self._num_weights += gate.numel() + up.numel()
        return self._kernels.pack_gated(gate, up, self._storage)

    def prepare(self, batch: Batch) -> None:
        """A step of a millisecond or so is as fast on one core, and leaves the others to whoever serves its tokens: threads
        that wait for their next piece of work do so at full speed."""
        work = self._num_weights * len(batch.tokens)
        if work < _WORTH_THREADS:
            work += self._work_per_score * sum((span.stop - span.start) * span.context for span in batch.spans)
        self._kernels.alone = work < _WORTH_THREADS

    def vector(self, weight: Tensor) -> Tensor:
        return weight.float().contiguous()

    def embed(self, matrix: PackedWeight, ids: Tensor) -> Tensor:
        return matrix.rows(ids)

    def linear(self, x: Tensor, matrix: PackedWeight, bias: Tensor | None, into: str) -> Tensor:
        return self._kernels.linear(x, matrix, bias, self._buffer(into, x.shape[0], matrix.shape[0]))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, into: str) -> Tensor:
        return self._kernels.rms_norm(x, weight, eps, self._buffer(into, *x.shape))

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, into: str) -> Tensor:
        return self._kernels.add_rms_norm(residual, x, weight, eps, self._buffer(into, *x.shape))

    def gated(self, x: Tensor, matrix: PackedWeight, into: str) -> Tensor:
        return self._kernels.gated(x, matrix, self._buffer(into, x.shape[0], matrix.shape[0]))

    def rope_store(
        self, qkv: Tensor, batch: Batch, k_cache: Tensor, v_cache: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> None:
        self._kernels.rope_store(
            qkv,
            self._cos,
            self._sin,
            batch.positions,
            batch.slots,
            k_cache,
            v_cache,
            **self._heads,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=self._eps,
        )

    def attention(
        self, qkv: Tensor, batch: Batch, k_cache: Tensor, v_cache: Tensor, window: int | None, into: str
    ) -> Tensor:
        return self._kernels.attention(
            qkv,
            k_cache,
            v_cache,
            batch.tables,
            batch.starts,
            batch.contexts,
            **self._heads,
            scale=self._scale,
            window=window,
            out=self._buffer(into, qkv.shape[0], self._attention_width),
        )

    def _buffer(self, name: str, rows: int, width: int) -> Tensor:
        """Memory is taken once per name: fresh pages on every call would cost more than the small operations."""
        held = self._buffers.get(name)
        if held is None or held.shape[0] < rows or held.shape[1] != width:
            held = self._buffers[name] = torch.empty(max(rows, min(self._max_tokens, 4 * rows)), width)
        return held[:rows]
