"""Models for the tests: one spec per family, small GGUF files written on the spot, and the real SmolLM2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from segue.base.config import Environment
from segue.model import weights as weights_module
from segue.model.catalog import resolve
from segue.model.loading import LoadedModel, open_model
from segue.model.spec import LinearScaling, Llama3Scaling, ModelSpec
from segue.model.tiny import random_weights, tiny_spec

SMALL = replace(
    tiny_spec(), vocab_size=96, max_positions=512, bos_id=1, eos_ids=(2, 3), num_layers=2, windows=(None,) * 2
)

FAMILIES: dict[str, ModelSpec] = {
    "llama": replace(SMALL, tie_embeddings=True, eos_ids=(2,)),
    "llama with llama3 rope and biases": replace(
        SMALL, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64), qkv_bias=True, o_bias=True, rope_theta=500_000.0
    ),
    "llama with linear rope": replace(SMALL, rope_scaling=LinearScaling(4.0)),
    "mistral": replace(SMALL, architecture="mistral", windows=(7, 7)),
    "qwen2": replace(SMALL, architecture="qwen2", qkv_bias=True, windows=(None, 9), tie_embeddings=True),
    "qwen3": replace(SMALL, architecture="qwen3", qk_norm=True, head_dim=32, rope_theta=1e6),
}


@pytest.fixture(params=FAMILIES, ids=lambda name: name.replace(" ", "-"))
def family(request: pytest.FixtureRequest) -> ModelSpec:
    return FAMILIES[request.param]


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    path = resolve("smollm2", Environment.read().cache_dir).path
    assert path is not None
    return path


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> LoadedModel:
    return open_model("smollm2", Environment.read().cache_dir, fetch=False)


@pytest.fixture(scope="session")
def quick_reference() -> Iterator[None]:
    """transformers parses a GGUF file anew at every turn, for seconds each; remembering what it parsed is enough."""
    import gguf

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        yield


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_path: Path, quick_reference: None) -> Any:
    """SmolLM2 as transformers loads it."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32)


def write_gguf(
    path: Path, spec: ModelSpec, tensors: Mapping[str, Tensor], more: Callable[[Any], None] | None = None, kind: int = 0
) -> None:
    """A GGUF as llama.cpp's converter would write it: matrices of type `kind`, q and k rows interleaved for llama."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    writer = GGUFWriter(path, spec.architecture)
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_block_count(spec.num_layers)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_eps)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_vocab_size(spec.vocab_size)
    for ours, theirs in weights_module.gguf_names(spec).items():
        values = _interleaved(ours, tensors[ours].numpy(), spec)
        stored = GGMLQuantizationType(kind if values.ndim == 2 else 0)
        writer.add_tensor(theirs, quants.quantize(np.ascontiguousarray(values), stored), raw_dtype=stored)
    if more is not None:
        more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_byte_vocabulary(writer: Any, size: int, **fields: Any) -> None:
    """A byte-level vocabulary of `size` tokens: printable characters, one merge, and two control tokens at the end."""
    tokens = [chr(0x21 + index) for index in range(size - 3)] + ["ab", "<|a|>", "<|b|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields.get("pre", "gpt-2"))
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (size - 2) + [3, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(size - 2)
    writer.add_eos_token_id(size - 1)


def _interleaved(name: str, values: np.ndarray, spec: ModelSpec) -> np.ndarray:
    part = name.rsplit(".", 1)[-1]
    if spec.architecture != "llama" or part not in ("q", "k", "q_bias", "k_bias"):
        return values
    heads = spec.num_heads if part.startswith("q") else spec.num_kv_heads
    paired = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)


@pytest.fixture
def small_gguf(tmp_path: Path) -> Path:
    """A whole model in some 100 kB, vocabulary included."""
    path = tmp_path / "small.gguf"
    write_gguf(path, SMALL, random_weights(SMALL), lambda writer: add_byte_vocabulary(writer, SMALL.vocab_size))
    return path
