"""A model as numbers: how many weights it has and what a token's KV takes, from its `config.json` alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from segue.base.errors import InvalidRequest

DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0, "int8": 1.0, "int4": 0.5}
_PLAIN_MLP = {"gpt2", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2", "gpt_bigcode"}
_OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`num_params` are all weights; `num_active` those that a token is multiplied with, the output head's left out, which only
    rows that sample need. `assumed` says what the config did not."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_params: int
    num_active: int
    kv_values_per_token: int  # over all layers
    num_kv_layers: int
    dtype: str = "bfloat16"
    assumed: tuple[str, ...] = field(default=())

    @property
    def num_head_params(self) -> int:
        return self.vocab_size * self.hidden_size

    def weight_bytes(self, dtype: str | None = None) -> float:
        return self.num_params * dtype_bytes(dtype or self.dtype)

    def kv_bytes_per_token(self, dtype: str | None = None) -> float:
        return self.kv_values_per_token * dtype_bytes(dtype or self.dtype)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "") -> ModelShape:
        """Of any decoder whose config has the usual names; what is missing is said in an error."""
        return _Reader(config, name).shape()


def dtype_bytes(name: str) -> float:
    if name not in DTYPE_BYTES:
        raise InvalidRequest("dtype", f"{name!r:.40} is none of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


class _Reader:
    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        inner = config.get("text_config")
        self._config = {**config, **inner} if isinstance(inner, Mapping) else config
        self._name = name or str(config.get("_name_or_path") or config.get("model_type") or "model")
        self._assumed: list[str] = []

    def shape(self) -> ModelShape:
        hidden, layers, heads = (
            self._need(name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        vocab = self._need("vocab_size")
        kv_heads = self._number("num_key_value_heads") or (1 if self._config.get("multi_query") else heads)
        head_dim = self._number("head_dim") or hidden // heads
        intermediate = self._number("intermediate_size")
        if intermediate is None:
            intermediate = 4 * hidden
            self._assumed.append("the MLP is four times as wide as the model")
        attention, kv_values = self._attention(hidden, heads, kv_heads, head_dim)
        kv_layers = self._kv_layers(layers)
        dense, active = self._mlps(hidden, intermediate, layers)
        common = layers * (attention + 2 * hidden) + hidden
        tied = bool(self._config.get("tie_word_embeddings", self._config.get("model_type") in _PLAIN_MLP))
        embeddings = vocab * hidden * (1 if tied else 2)
        return ModelShape(
            self._name,
            layers,
            hidden,
            heads,
            head_dim,
            intermediate,
            vocab,
            embeddings + common + dense,
            common + active,
            kv_values * kv_layers,
            kv_layers,
            self._dtype(),
            tuple(self._assumed),
        )

    def _attention(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> tuple[int, int]:
        """Weights of a layer, and values that its KV has for each token."""
        if (rank := self._number("kv_lora_rank")) is None:
            weights = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
            if self._config.get("attention_bias") or self._config.get("model_type") == "qwen2":
                weights += (heads + 2 * kv_heads) * head_dim
            if self._config.get("model_type") in ("qwen3", "qwen3_moe"):
                weights += 2 * head_dim  # norms of queries and keys
            return weights, 2 * kv_heads * head_dim
        rope, plain = self._need("qk_rope_head_dim"), self._need("qk_nope_head_dim")
        value = self._number("v_head_dim") or plain
        query_rank = self._number("q_lora_rank")
        queries = heads * (plain + rope)
        weights = queries * query_rank + hidden * query_rank if query_rank else hidden * queries
        weights += hidden * (rank + rope) + rank * heads * (plain + value) + heads * value * hidden
        return weights, rank + rope  # latent attention keeps one vector for keys and values

    def _kv_layers(self, layers: int) -> int:
        kinds = self._config.get("layer_types")
        if not isinstance(kinds, (list, tuple)):
            return layers
        if any("sliding" in str(kind) for kind in kinds):
            self._assumed.append("layers with a sliding window keep all of a context's KV")
        keeping = sum("linear" not in str(kind) and "mamba" not in str(kind) for kind in kinds)
        if keeping < layers:
            self._assumed.append("the state of layers without KV is left out")
        return keeping

    def _mlps(self, hidden: int, intermediate: int, layers: int) -> tuple[int, int]:
        """Weights of all layers' MLPs, and of those the ones that a token meets."""
        matrices = 2 if self._config.get("model_type") in _PLAIN_MLP else 3
        experts = self._number("num_experts")
        if not experts:
            return (layers * matrices * hidden * intermediate,) * 2
        chosen = self._number("num_experts_per_tok") or 1
        width = self._number("moe_intermediate_size") or intermediate
        shared = self._number("n_shared_experts") or 0
        shared_width = self._number("shared_expert_intermediate_size") or shared * width
        plain = min(self._number("first_k_dense_replace") or 0, layers)
        sparse = layers - plain
        every = hidden * experts + matrices * hidden * shared_width  # the router, and what all tokens meet
        expert = matrices * hidden * width
        first = plain * matrices * hidden * intermediate
        return first + sparse * (every + experts * expert), first + sparse * (every + chosen * expert)

    def _dtype(self) -> str:
        quantized = self._config.get("quantization_config")
        if isinstance(quantized, Mapping):
            bits = quantized.get("bits") or {"fp8": 8}.get(str(quantized.get("quant_method")))
            if bits in (4, 8):
                return {4: "int4", 8: "int8"}[bits]
            self._assumed.append("weights in 16 bits: how they are quantised is not known")
        named = str(self._config.get("dtype") or self._config.get("torch_dtype") or "").removeprefix("torch.")
        if named in DTYPE_BYTES:
            return named
        self._assumed.append("bfloat16: the config names no type")
        return "bfloat16"

    def _number(self, name: str) -> int | None:
        for each in (name, *_OTHER_NAMES.get(name, ())):
            value = self._config.get(each)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None

    def _need(self, name: str) -> int:
        value = self._number(name)
        if value is None:
            raise InvalidRequest("model", f"its config has no {name}, a whole number of at least 1")
        return value


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocab: int, **more: Any) -> Any:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "torch_dtype": "bfloat16",
    } | more


KNOWN: dict[str, Mapping[str, Any]] = {  # as their config.json have it
    "llama-3.1-8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama-3.1-70b": _llama(80, 8192, 64, 8, 28672, 128256),
    "qwen3-1.7b": _llama(28, 2048, 16, 8, 6144, 151936, model_type="qwen3", head_dim=128, tie_word_embeddings=True),
    "qwen3-8b": _llama(36, 4096, 32, 8, 12288, 151936, model_type="qwen3", head_dim=128),
    "smollm2-135m": _llama(30, 576, 9, 3, 1536, 49152, tie_word_embeddings=True),
}


def find_shape(model: str) -> ModelShape:
    """By a known name, a `config.json`, or a folder with one."""
    if model.lower() in KNOWN:
        return ModelShape.from_config(KNOWN[model.lower()], model.lower())
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise InvalidRequest("model", f"{model!r:.80} is neither a config.json nor one of {', '.join(KNOWN)}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest("model", f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise InvalidRequest("model", f"{path} is no config: it must be a JSON object")
    return ModelShape.from_config(config, path.resolve().parent.name)
