"""Plain torch on any device: the path for CUDA, and for machines without a compiler."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from segue.model.backend import Layer, Stack, rope_tables
from segue.model.batch import Batch, Beams, Span
from segue.model.kv_copies import KVMoves
from segue.model.spec import ModelSpec


class TorchBackend:
    """Computes in `dtype`, norms and rotation in fp32 as the reference does."""

    name = "torch"

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, max_len: int) -> None:
        self.device = device
        self.kv_dtype = dtype
        self.kv_moves: KVMoves | None = None
        self._spec = spec
        self._dtype = dtype
        cos, sin = rope_tables(spec, max_len)
        self._cos, self._sin = cos.to(device), sin.to(device)

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.to(device=self.device, dtype=self._dtype).contiguous()

    def vocabulary(self, weight: Tensor) -> Tensor:
        return self.matrix(weight)

    def part(self, matrix: Tensor, first: int, last: int) -> tuple[Tensor, int]:
        return matrix[first:last], 0

    def gated_matrix(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.matrix(torch.cat([gate, up]))

    def prepare(self, batch: Batch) -> None:
        pass

    def vector(self, weight: Tensor) -> Tensor:
        return self.matrix(weight)

    def embed(self, matrix: Tensor, ids: Tensor) -> Tensor:
        return F.embedding(ids, matrix)

    def linear(self, x: Tensor, matrix: Tensor, bias: Tensor | None, into: str) -> Tensor:
        return F.linear(x, matrix, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, into: str) -> Tensor:
        return _rms_norm(x, weight, eps)

    def stack(self, layers: Sequence[Layer], norms: Sequence[Tensor]) -> Stack:
        return partial(self._run_layers, layers, norms)

    def _run_layers(
        self, layers: Sequence[Layer], norms: Sequence[Tensor], x: Tensor, residual: Tensor, batch: Batch, kv: Tensor
    ) -> Tensor:
        eps = self._spec.rms_eps
        for layer, norm, (k_cache, v_cache) in zip(layers, norms, kv, strict=True):
            qkv = F.linear(x, layer.qkv, layer.qkv_bias)
            self._rope_store(qkv, batch, k_cache, v_cache, layer.q_norm, layer.k_norm)
            x = self._attention(qkv, batch, k_cache, v_cache, layer.window)
            if layer is layers[-1]:  # nobody reads what the others become after their last KV
                x, residual = x[batch.sample_rows], residual[batch.sample_rows]
            residual.add_(F.linear(x, layer.o, layer.o_bias))
            gate, up = F.linear(_rms_norm(residual, layer.post_norm, eps), layer.gate_up).chunk(2, dim=-1)
            residual.add_(F.linear(F.silu(gate) * up, layer.down))
            x = _rms_norm(residual, norm, eps)
        return x

    def _rope_store(
        self, qkv: Tensor, batch: Batch, k_cache: Tensor, v_cache: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> None:
        """Norm (if any) and rotate q and k in place, and write k and v to the batch's slots."""
        q, k, v = self._heads(qkv)
        if q_norm is not None and k_norm is not None:
            q.copy_(_rms_norm(q, q_norm, self._spec.rms_eps))
            k.copy_(_rms_norm(k, k_norm, self._spec.rms_eps))
        cos = self._cos[batch.positions].to(self._dtype)[:, None]
        sin = self._sin[batch.positions].to(self._dtype)[:, None]
        _rotate(q, cos, sin)
        _rotate(k, cos, sin)
        size = k_cache.shape[2]
        blocks, offsets = batch.slots // size, batch.slots % size
        k_cache[blocks, :, offsets] = k
        v_cache[blocks, :, offsets] = v

    def _attention(self, qkv: Tensor, batch: Batch, k_cache: Tensor, v_cache: Tensor, window: int | None) -> Tensor:
        """Of each token over its own sequence's KV, which holds it already."""
        q, _, _ = self._heads(qkv)
        out = torch.empty_like(q)
        groups = {group.sequence: group for group in batch.groups}
        for at, (span, table) in enumerate(zip(batch.spans, batch.tables, strict=True)):
            if (group := groups.get(at)) is not None:
                out[group.start : group.stop] = self._attend_beams(q, group, table, k_cache, v_cache, window)
                continue
            keys, values = _gather(k_cache, table, span.context), _gather(v_cache, table, span.context)
            out[span.start : span.stop] = F.scaled_dot_product_attention(
                q[span.start : span.stop].transpose(0, 1)[None],
                keys,
                values,
                attn_mask=_mask(span, window, self.device),
                scale=self._spec.softmax_scale,
                enable_gqa=self._spec.num_heads != self._spec.num_kv_heads,
            )[0].transpose(0, 1)
        return out.reshape(len(q), -1)

    def _attend_beams(
        self, q: Tensor, group: Beams, table: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None
    ) -> Tensor:
        """Each beam over what all share and over its own tail, as one sequence of a batch."""
        count, num_own = group.tails.shape
        context = group.num_shared + num_own
        first = max(context - window, 0) if window is not None else 0
        blocks, offsets = group.tails.long() // k_cache.shape[2], group.tails.long() % k_cache.shape[2]

        def lines(cache: Tensor) -> Tensor:
            shared = _gather(cache, table, group.num_shared).expand(count, -1, -1, -1)
            own = cache[blocks, :, offsets].transpose(1, 2)
            return torch.cat([shared, own], dim=2)[:, :, first:]

        return F.scaled_dot_product_attention(
            q[group.start : group.stop, :, None],
            lines(k_cache),
            lines(v_cache),
            scale=self._spec.softmax_scale,
            enable_gqa=self._spec.num_heads != self._spec.num_kv_heads,
        )[:, :, 0]

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as views [tokens, heads, head_dim]."""
        spec = self._spec
        heads = qkv.view(len(qkv), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        first_v = spec.num_heads + spec.num_kv_heads
        return heads[:, : spec.num_heads], heads[:, spec.num_heads : first_v], heads[:, first_v:]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    left, right = x.chunk(2, dim=-1)
    turned = left * cos - right * sin
    right.copy_(right * cos + left * sin)
    left.copy_(turned)


def _gather(cache: Tensor, table: Tensor, context: int) -> Tensor:
    """A sequence's KV in logical order, [1, kv_heads, context, head_dim]."""
    size = cache.shape[2]
    blocks = cache[table[: -(-context // size)]]
    return blocks.transpose(0, 1).flatten(1, 2)[None, :, :context]


def _mask(span: Span, window: int | None, device: torch.device) -> Tensor | None:
    """Which keys each query sees: those up to its own position, the last `window` of them."""
    count = span.stop - span.start
    if count == 1 and (window is None or window >= span.context):
        return None
    queries = torch.arange(span.context - count, span.context, device=device)[:, None]
    keys = torch.arange(span.context, device=device)[None, :]
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)
