"""Hugging Face `config.json` to `ModelSpec` and back.

Settings are read the way transformers reads them, its per-family defaults included, because a config says
only what differs. Both generations are understood: `rope_parameters` (5.x) and `rope_theta` + `rope_scaling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from segue.base.errors import ModelError, UnsupportedModel
from segue.model.spec import (
    ARCHITECTURES,
    MAX_LAYERS,
    ConfigFields,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    RopeScaling,
)

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_SUPPORTED = "supported are " + ", ".join(ARCHITECTURES)


def spec_from_hf_config(config: Mapping[str, Any]) -> ModelSpec:
    if not isinstance(config, Mapping):
        raise ModelError(f"config.json must hold an object, not {type(config).__name__}.")
    family = _family(config)
    _refuse_unsupported(config)
    fields = ConfigFields(config)
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    num_layers = fields.whole("num_hidden_layers", most=MAX_LAYERS)
    head_dim = fields.whole("head_dim", 128 if family == "qwen3" else max(hidden // heads, 1))
    theta, scaling = _rope(config, fields)
    attention_bias = family in ("llama", "qwen3") and fields.flag("attention_bias", False)
    bos = fields.token_ids("bos_token_id")
    return ModelSpec(
        architecture=family,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=head_dim,
        max_positions=fields.whole("max_position_embeddings"),
        rms_eps=fields.real("rms_norm_eps", 1e-6),
        rope_theta=theta,
        windows=_windows(family, config, fields, num_layers),
        rope_scaling=scaling,
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        qk_norm=family == "qwen3",
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        bos_id=bos[0] if bos else None,
        eos_ids=fields.token_ids("eos_token_id"),
    )


def hf_config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """A `config.json` that transformers (and we) read back as this spec."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if isinstance(spec.rope_scaling, Llama3Scaling):
        scaling = spec.rope_scaling
        rope |= {"rope_type": "llama3", "factor": scaling.factor}
        rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        rope["original_max_position_embeddings"] = scaling.original_max_positions
    elif spec.rope_scaling is not None:
        rope |= {"rope_type": "linear", "factor": spec.rope_scaling.factor}
    config: dict[str, Any] = {
        "architectures": [_CLASSES[spec.architecture]],
        "model_type": spec.architecture,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.rms_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": spec.tie_embeddings,
        "bos_token_id": spec.bos_id,
        "eos_token_id": list(spec.eos_ids) or None,
    }
    return config | _family_settings(spec)


def _family_settings(spec: ModelSpec) -> dict[str, Any]:
    window = next((window for window in spec.windows if window is not None), None)
    if spec.architecture == "mistral":
        return {"sliding_window": window}
    settings: dict[str, Any] = {} if spec.architecture == "qwen2" else {"attention_bias": spec.qkv_bias}
    if spec.architecture == "llama":
        return settings | {"mlp_bias": False}
    kinds = ["full_attention" if window is None else "sliding_attention" for window in spec.windows]
    return settings | {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": kinds}


def _family(config: Mapping[str, Any]) -> str:
    family = config.get("model_type")
    if family is None:
        named = config.get("architectures") or [None]
        family = next((key for key, value in _CLASSES.items() if value == named[0]), named[0])
    if family is None:
        raise ModelError("model_type is missing.")
    if family not in ARCHITECTURES:
        raise UnsupportedModel(f"model_type {str(family)[:80]!r} is not supported; {_SUPPORTED}.")
    return str(family)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {activation!r} is not supported; silu is.")
    if config.get("mlp_bias"):
        raise UnsupportedModel("mlp_bias is set, and MLP layers with a bias are not supported.")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise UnsupportedModel(
            f"quantization_config {method!r} is not supported; use float weights, or a quantised GGUF file."
        )
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(name):
            raise UnsupportedModel(f"{name} is {config[name]!r}, and mixtures of experts are not supported.")
    if config.get("no_rope_layers"):
        raise UnsupportedModel("no_rope_layers is set, and layers without rotary positions are not supported.")


def _rope(config: Mapping[str, Any], fields: ConfigFields) -> tuple[float, RopeScaling | None]:
    settings: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        part = config.get(name) or {}
        if not isinstance(part, Mapping):
            raise ModelError(f"{name} must be an object, not {type(part).__name__}.")
        settings |= part
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise UnsupportedModel("rope_parameters differ between layer types, which is not supported.")
    partial = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor {partial!r} is not supported; 1 is.")
    rope = ConfigFields(settings)
    default_theta = fields.real("rope_theta", 10_000.0)
    return rope.real("rope_theta", default_theta), _scaling(settings, rope, fields)


def _scaling(settings: Mapping[str, Any], rope: ConfigFields, fields: ConfigFields) -> RopeScaling | None:
    kind = settings.get("rope_type", settings.get("type")) or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(rope.real("factor"))
    if kind != "llama3":
        raise UnsupportedModel(f"rope_type {kind!r} is not supported; supported are default, linear, llama3.")
    original = rope.get("original_max_position_embeddings") is not None
    scaling = Llama3Scaling(
        factor=rope.real("factor"),
        low_freq_factor=rope.real("low_freq_factor"),
        high_freq_factor=rope.real("high_freq_factor"),
        original_max_positions=(
            rope.whole("original_max_position_embeddings") if original else fields.whole("max_position_embeddings")
        ),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ModelError("high_freq_factor must be greater than low_freq_factor.")
    return scaling


def _windows(family: str, config: Mapping[str, Any], fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """Mistral slides on every layer, Qwen on some and only when told to, Llama never."""
    everywhere: tuple[int | None, ...] = (None,) * num_layers
    if family == "llama":
        return everywhere
    if config.get("sliding_window", 4096) is None:
        return everywhere
    if family == "mistral":
        return (fields.whole("sliding_window", 4096),) * num_layers
    if not fields.flag("use_sliding_window", False):
        return everywhere
    window = fields.whole("sliding_window", 4096)
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ModelError(f"max_window_layers must be a whole number, not {first!r}.")
        return tuple(window if index >= first else None for index in range(num_layers))
    if not isinstance(kinds, list) or not set(map(str, kinds)) <= {"full_attention", "sliding_attention"}:
        raise UnsupportedModel("layer_types may hold full_attention and sliding_attention only.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
