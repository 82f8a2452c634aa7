"""The CPU's fast path: our own kernels over packed weights and paged KV."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from segue.model.backend import Layer, Stack, rope_tables
from segue.model.batch import Batch
from segue.model.kv_copies import KVMoves
from segue.model.native import Kernels, PackedWeight, Storage
from segue.model.native.layers import LayerStack
from segue.model.spec import ModelSpec

_WORTH_THREADS = 1 << 26  # multiply-adds of a step


class NativeBackend:
    """Activations are fp32 whatever the weights are stored in. Bitwise: a row's result does not depend on the batch,
    on how its sequence was cut into steps, or on the number of threads."""

    name = "native"

    def __init__(self, kernels: Kernels, spec: ModelSpec, storage: Storage, max_tokens: int, max_len: int) -> None:
        self.device = torch.device("cpu")
        self.kv_dtype = torch.bfloat16 if storage == "bf16" else torch.float32
        self.kv_moves: KVMoves | None = kernels
        self._kernels = kernels
        self._num_weights = 0
        self._spec = spec
        self._work_per_score = 2 * spec.num_layers * spec.num_heads * spec.head_dim
        self._storage = storage
        self._cos, self._sin = rope_tables(spec, max_len)
        self._max_tokens = max_tokens
        self._buffers: dict[str, Tensor] = {}

    def matrix(self, weight: Tensor) -> PackedWeight:
        self._num_weights += weight.numel()
        return self._kernels.pack(weight, self._storage)

    def vocabulary(self, weight: Tensor) -> PackedWeight:
        self._num_weights += weight.numel()
        pack = (
            self._kernels.pack_exactly
            if self._storage == "fp32"
            else partial(self._kernels.pack, storage=self._storage)
        )
        return pack(weight)

    def part(self, matrix: PackedWeight, first: int, last: int) -> tuple[PackedWeight, int]:
        return self._kernels.part(matrix, first, last)

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

    def stack(self, layers: Sequence[Layer], norms: Sequence[Tensor]) -> Stack:
        made = LayerStack(self._kernels, self._spec, layers, norms, self._cos, self._sin)
        return partial(made.run, buffer=self._buffer)

    def _buffer(self, name: str, rows: int, width: int) -> Tensor:
        """Memory is taken once per name: fresh pages on every call would cost more than the small operations."""
        held = self._buffers.get(name)
        if held is None or held.shape[0] < rows or held.shape[1] != width:
            held = self._buffers[name] = torch.empty(max(rows, min(self._max_tokens, 4 * rows)), width)
        return held[:rows]
