"""One decoder for every family of the Llama shape: Llama, Mistral, Qwen2, Qwen3, SmolLM."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from segue.model.backend import Backend, Layer
from segue.model.batch import Batch
from segue.model.spec import ModelSpec


class Decoder:
    """Weights in a backend's layout: embedding, layers, head."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor], backend: Backend) -> None:
        self.spec = spec
        self._backend = backend
        self._embed = backend.vocabulary(weights["embed"])
        layers = [_layer(weights, f"layers.{i}.", spec.windows[i], backend) for i in range(spec.num_layers)]
        norms = [layer.input_norm for layer in layers] + [backend.vector(weights["final_norm"])]
        self._first_norm = norms[0]
        self._run_layers = backend.stack(layers, norms[1:])
        self._head = self._embed if spec.tie_embeddings else backend.vocabulary(weights["head"])

    @torch.inference_mode()
    def hidden(self, batch: Batch, kv: Tensor) -> Tensor:
        """What the head makes logits of, for the rows that sample; writes the KV of every row."""
        ops = self._backend
        ops.prepare(batch)
        residual = ops.embed(self._embed, batch.tokens)
        x = ops.rms_norm(residual, self._first_norm, self.spec.rms_eps, into="normed")
        return self._run_layers(x, residual, batch, kv)

    @torch.inference_mode()
    def logits(self, x: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """fp32 [rows, vocab], or of the tokens `first … last-1` alone; valid until the next call."""
        if last is None or last - first == self.spec.vocab_size:
            return self.raw_logits(x).float()
        part, skipped = self._backend.part(self._head, first, last)
        return self._backend.linear(x, part, None, into="some logits").float()[:, skipped : skipped + last - first]

    def raw_logits(self, x: Tensor) -> Tensor:
        """As the backend computes them; valid until the next call."""
        return self._backend.linear(x, self._head, None, into="logits")


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
