"""GGUF metadata to `ModelSpec`.

GGUF knows Mistral (and SmolLM) as `llama`, which is exact: their files differ in nothing the decoder sees.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from segue.base.errors import ModelError, UnsupportedModel
from segue.model.spec import MAX_LAYERS, ConfigFields, LinearScaling, Llama3Scaling, ModelSpec, RopeScaling

_SUPPORTED = ("llama", "qwen2", "qwen3")


def spec_from_gguf_metadata(
    metadata: Mapping[str, Any], tensor_names: Collection[str], rope_divisors: Sequence[float] | None
) -> ModelSpec:
    family = metadata.get("general.architecture")
    if family is None:
        raise ModelError("general.architecture is missing.")
    if "rope_freqs.weight" in tensor_names and rope_divisors is None:
        raise ModelError("rope_freqs.weight is in the file, and its values were not given.")
    if family not in _SUPPORTED:
        known = ", ".join(_SUPPORTED)
        raise UnsupportedModel(f"general.architecture {str(family)[:80]!r} is not supported; supported are {known}.")
    fields = ConfigFields(metadata, f"{family}.")
    _refuse_unsupported(metadata, fields)
    hidden, heads = fields.whole("embedding_length"), fields.whole("attention.head_count")
    num_layers = fields.whole("block_count", most=MAX_LAYERS)
    head_dim = fields.whole("attention.key_length", max(hidden // heads, 1))
    theta = fields.real("rope.freq_base", 10_000.0)
    _refuse_partial_heads(fields, head_dim)
    tokens = metadata.get("tokenizer.ggml.tokens")
    bos = ConfigFields(metadata).token_ids("tokenizer.ggml.bos_token_id")
    scale = fields.get("attention.scale")
    return ModelSpec(
        architecture=family,
        vocab_size=fields.whole("vocab_size", len(tokens) if isinstance(tokens, list) else None),
        hidden_size=hidden,
        intermediate_size=fields.whole("feed_forward_length"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=fields.whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=fields.whole("context_length"),
        rms_eps=fields.real("attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        windows=(None,) * num_layers,
        rope_scaling=_scaling(fields, theta, head_dim, rope_divisors),
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        o_bias="blk.0.attn_output.bias" in tensor_names,
        qk_norm=family == "qwen3",
        tie_embeddings="output.weight" not in tensor_names,
        bos_id=bos[0] if bos else None,
        eos_ids=end_token_ids(metadata),
        attention_scale=None if scale is None else fields.real("attention.scale"),
    )


def end_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """End of sequence, of turn and of message: generation stops at any of them."""
    fields = ConfigFields(metadata, "tokenizer.ggml.")
    found = [id for kind in ("eos", "eot", "eom") for id in fields.token_ids(f"{kind}_token_id")]
    return tuple(dict.fromkeys(found))


def _refuse_unsupported(metadata: Mapping[str, Any], fields: ConfigFields) -> None:
    if fields.get("expert_count"):
        raise UnsupportedModel(f"expert_count is {fields.get('expert_count')}: mixtures of experts are not supported.")
    if metadata.get("split.count") not in (None, 0, 1):
        raise UnsupportedModel("The file is one part of a split GGUF; merge the parts into one file first.")
    if fields.get("attention.sliding_window"):
        window = fields.whole("attention.sliding_window")
        if window < fields.whole("context_length"):
            raise UnsupportedModel(f"attention.sliding_window {window} in a GGUF file is not supported.")


def _refuse_partial_heads(fields: ConfigFields, head_dim: int) -> None:
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.whole(name, head_dim) != head_dim:
            raise UnsupportedModel(f"{name} {fields.get(name)} is not supported; the key length {head_dim} is.")


def _scaling(
    fields: ConfigFields, theta: float, head_dim: int, rope_divisors: Sequence[float] | None
) -> RopeScaling | None:
    kind = fields.get("rope.scaling.type") or "none"
    if kind not in ("none", "linear"):
        raise UnsupportedModel(f"rope.scaling.type {kind!r} is not supported; supported are none and linear.")
    linear = fields.get("rope.scaling.factor") if kind == "linear" else fields.get("rope.scale_linear")
    if rope_divisors is not None:
        if linear not in (None, 1):
            raise UnsupportedModel("rope_freqs.weight together with linear rope scaling is not supported.")
        return _llama3_scaling(rope_divisors, theta, head_dim)
    if linear is None and kind == "none":
        return None
    return LinearScaling(fields.real("rope.scaling.factor" if kind == "linear" else "rope.scale_linear"))


def _llama3_scaling(divisors: Sequence[float], theta: float, head_dim: int) -> Llama3Scaling:
    """GGUF keeps the result of Llama 3's formula, not its settings.

    Every published Llama 3.x uses low 1, high 4 and 8192 positions, with the factor as the last divisor, so the
    settings are recovered and proven by computing the same table again; anything else is refused.
    """
    if len(divisors) != head_dim // 2:
        raise ModelError(
            f"rope_freqs.weight has {len(divisors)} values, and head_dim {head_dim} needs {head_dim // 2}."
        )
    if not all(0 < divisor < math.inf for divisor in divisors):
        raise ModelError("rope_freqs.weight must hold positive numbers.")
    scaling = Llama3Scaling(float(divisors[-1]), 1.0, 4.0, 8192)
    for index, divisor in enumerate(divisors):
        expected = scaling.divisor(theta ** (-2 * index / head_dim))
        if not abs(divisor - expected) <= 1e-4 * expected:
            raise UnsupportedModel(
                f"rope_freqs.weight is not Llama 3's table: value {index} is {divisor}, expected {expected:.4f}."
            )
    return scaling
