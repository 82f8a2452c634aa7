"""One decoder for every family of the Llama shape: Llama, Mistral, Qwen2, Qwen3, SmolLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segue.model.backend import Backend
from segue.model.batch import Batch
from segue.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Layer:
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


class Decoder:
    """Weights in a backend's layout, and the order in which they are used.

    q, k, v and gate, up are stored as one matrix each: one pass over the activations instead of three and two.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor], backend: Backend) -> None:
        self.spec = spec
        self._backend = backend
        self._embed = backend.matrix(weights["embed"])
        self._layers = [_layer(weights, f"layers.{i}.", spec.windows[i], backend) for i in range(spec.num_layers)]
        self._final_norm = backend.vector(weights["final_norm"])
        self._head = self._embed if spec.tie_embeddings else backend.matrix(weights["head"])

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: Tensor) -> Tensor:
        """Logits of the rows that sample, fp32 [samples, vocab]; writes the KV of every row. `kv` is
        [layers, 2, blocks, kv_heads, block_size, head_dim]."""
        ops, eps = self._backend, self.spec.rms_eps
        ops.prepare(batch)
        residual = ops.embed(self._embed, batch.tokens)
        x = ops.rms_norm(residual, self._layers[0].input_norm, eps, into="normed")
        for index, layer in enumerate(self._layers):
            k_cache, v_cache = kv[index]
            qkv = ops.linear(x, layer.qkv, layer.qkv_bias, into="qkv")
            ops.rope_store(qkv, batch, k_cache, v_cache, layer.q_norm, layer.k_norm)
            x = ops.attention(qkv, batch, k_cache, v_cache, layer.window, into="attended")
            if index == len(self._layers) - 1:  # nobody reads what the others become after their last KV
                x, residual = x[batch.sample_rows], residual[batch.sample_rows]
            x = ops.linear(x, layer.o, layer.o_bias, into="hidden")
            x = ops.add_rms_norm(residual, x, layer.post_norm, eps, into="normed")
            x = ops.gated(x, layer.gate_up, into="gated")
            x = ops.linear(x, layer.down, None, into="hidden")
            x = ops.add_rms_norm(residual, x, self._norm_after(index), eps, into="normed")
        return ops.linear(x, self._head, None, into="logits").float()

    def _norm_after(self, index: int) -> Tensor:
        return self._layers[index + 1].input_norm if index + 1 < len(self._layers) else self._final_norm


def _layer(weights: Mapping[str, Tensor], prefix: str, window: int | None, backend: Backend) -> Layer:
    def stacked(*names: str) -> Tensor:
        return torch.cat([weights[prefix + name] for name in names])

    def vector(*names: str) -> Tensor | None:
        return backend.vector(stacked(*names)) if prefix + names[0] in weights else None

    return Layer(
        input_norm=backend.vector(weights[prefix + "input_norm"]),
        qkv=backend.matrix(stacked("q", "k", "v")),
        qkv_bias=vector("q_bias", "k_bias", "v_bias"),
        q_norm=vector("q_norm"),
        k_norm=vector("k_norm"),
        o=backend.matrix(weights[prefix + "o"]),
        o_bias=vector("o_bias"),
        post_norm=backend.vector(weights[prefix + "post_norm"]),
        gate_up=backend.gated_matrix(weights[prefix + "gate"], weights[prefix + "up"]),
        down=backend.matrix(weights[prefix + "down"]),
        window=window,
    )
