"""Models made on the spot: the built-in `tiny`, and random weights for any spec.

`tiny` speaks bytes and says nothing sensible, but it is a whole model: it starts at once, needs no download, and
runs every code path that a real one does. `save_hf_folder` lets another library load the very same weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from segue.model.hf_config import hf_config_from_spec
from segue.model.spec import ModelSpec, tensor_shapes
from segue.model.tokenizer import ByteTokenizer
from segue.model.weights import hf_names

_LAYERS = 3


def tiny_spec() -> ModelSpec:
    tokenizer = ByteTokenizer()
    return ModelSpec(
        architecture="llama",
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=176,
        num_layers=_LAYERS,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=8192,
        rms_eps=1e-5,
        rope_theta=10_000.0,
        windows=(None,) * _LAYERS,
        bos_id=tokenizer.bos_id,
        eos_ids=tokenizer.eos_ids,
    )


def random_weights(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    """float32 weights for any spec, equal for equal seeds.

    Scaled so that activations neither vanish nor grow and logits have a standard deviation near 2: probabilities
    differ enough for greedy choices to be clear, and not so much that sampling has no choice.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in tensor_shapes(spec).items():
        values = torch.randn(shape, generator=generator)
        part = name.rsplit(".", 1)[-1]
        if part.endswith("norm"):
            weights[name] = 1 + 0.1 * values
        elif part.endswith("bias"):
            weights[name] = 0.3 * values
        elif part == "embed" and not spec.tie_embeddings:
            weights[name] = values
        else:
            weights[name] = values * ((2.0 if part in ("embed", "head") else 1.0) * shape[-1] ** -0.5)
    return weights


def save_hf_folder(
    spec: ModelSpec, weights: Mapping[str, Tensor], folder: Path, *, max_shard_bytes: int | None = None
) -> None:
    """Writes `config.json` and safetensors that transformers loads; sharded with an index when a limit is given."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config_from_spec(spec), indent=2), encoding="utf-8")
    named = {theirs: weights[ours].contiguous() for ours, theirs in hf_names(spec).items()}
    if max_shard_bytes is None:
        save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
        return
    shards = list(_shards(named, max_shard_bytes))
    placed: dict[str, str] = {}
    for index, shard in enumerate(shards, start=1):
        file_name = f"model-{index:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        placed |= dict.fromkeys(shard, file_name)
    total = sum(tensor.nbytes for tensor in named.values())
    contents = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(contents, indent=2), encoding="utf-8")


def _shards(tensors: Mapping[str, Tensor], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """In order, each as full as the limit allows; a tensor over the limit has a shard to itself."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if shard and sum(held.nbytes for held in shard.values()) + tensor.nbytes > max_bytes:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard
