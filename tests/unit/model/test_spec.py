"""A config becomes the right numbers, or an error that names what is wrong."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from segue.base.errors import ModelError, UnsupportedModel
from segue.model.hf_config import hf_config_from_spec
from segue.model.spec import LinearScaling, Llama3Scaling, ModelSpec, tensor_shapes

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

GGUF = {
    "general.architecture": "llama",
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.block_count": 4,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 100,
}


def test_written_config_reads_back(family: ModelSpec) -> None:
    assert ModelSpec.from_hf_config(json.loads(json.dumps(hf_config_from_spec(family)))) == family


def test_transformers_reads_and_writes_the_same_model(family: ModelSpec) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(**hf_config_from_spec(family))
    assert ModelSpec.from_hf_config(json.loads(json.dumps(config.to_dict(), default=str))) == family
    assert ModelSpec.from_hf_config(json.loads(config.to_json_string())) == family


def test_rope_settings_of_both_generations() -> None:
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3"} | LLAMA3_ROPE}
    new = LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3_ROPE}
    spec = ModelSpec.from_hf_config(old)
    assert spec == ModelSpec.from_hf_config(new)
    assert (spec.rope_theta, spec.rope_scaling) == (5e5, Llama3Scaling(8.0, 1.0, 4.0, 64))
    linear = ModelSpec.from_hf_config(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2}})
    assert (linear.rope_theta, linear.rope_scaling) == (10_000.0, LinearScaling(2.0))


def test_llama3_divisors_equal_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3_ROPE
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=512, rope_parameters=rope)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 64)
    for index, frequency in enumerate(theirs.tolist()):
        plain = 5e5 ** (-2 * index / 64)
        assert frequency == pytest.approx(plain / scaling.divisor(plain), rel=1e-5)


def test_defaults_are_the_families_own() -> None:
    assert ModelSpec.from_hf_config(LLAMA | {"sliding_window": 5}).windows == (None,) * 4
    assert ModelSpec.from_hf_config(LLAMA | {"model_type": "mistral"}).windows == (4096,) * 4
    assert ModelSpec.from_hf_config(LLAMA | {"model_type": "mistral", "sliding_window": None}).windows == (None,) * 4
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 3}
    assert ModelSpec.from_hf_config(qwen).windows == (None,) * 4
    assert ModelSpec.from_hf_config(qwen | {"use_sliding_window": True}).windows == (None, None, None, 8)
    assert ModelSpec.from_hf_config(LLAMA | {"model_type": "qwen3"}).head_dim == 128
    assert ModelSpec.from_hf_config(LLAMA).head_dim == 16
    assert ModelSpec.from_hf_config({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}).num_kv_heads == 4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gemma3"}, "gemma3"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "smollm3"),
        ({"no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers"),
        ({"model_type": None, "architectures": ["MixtralForCausalLM"]}, "Mixtral"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer types"),
        ({"partial_rotary_factor": 0.5}, "0.5"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        ModelSpec.from_hf_config(LLAMA | change)


@pytest.mark.parametrize("field", sorted(LLAMA.keys() - {"model_type", "num_key_value_heads", "rms_norm_eps"}))
@pytest.mark.parametrize("value", [None, 0, -1, 1.5, "7", True, [1], 2**70, math.nan])
def test_bad_numbers_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(ModelError, match=field):
        ModelSpec.from_hf_config(LLAMA | {field: value})


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": 3},
        {"head_dim": 15},
        {"rms_norm_eps": math.inf},
        {"rope_theta": "big"},
        {"rope_scaling": "llama3"},
        {"rope_scaling": {"rope_type": "llama3"}},
        {"rope_scaling": {"rope_type": "llama3"} | LLAMA3_ROPE | {"high_freq_factor": 1.0}},
        {"eos_token_id": ["</s>"]},
        {"tie_word_embeddings": "yes"},
        {"model_type": None},
        {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["full_attention"]},
    ],
)
def test_garbage_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        ModelSpec.from_hf_config(LLAMA | change)


def test_gguf_metadata() -> None:
    spec = ModelSpec.from_gguf_metadata(GGUF, {"blk.0.attn_q.bias"})
    assert (spec.head_dim, spec.num_kv_heads, spec.tie_embeddings, spec.qkv_bias, spec.o_bias) == (
        16,
        2,
        True,
        True,
        False,
    )
    ends = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.bos_token_id": 1}
    spec = ModelSpec.from_gguf_metadata(GGUF | ends, {"output.weight"})
    assert (spec.tie_embeddings, spec.eos_ids, spec.bos_id) == (False, (5, 7), 1)


def test_gguf_rope_table_is_recognised_or_refused() -> None:
    metadata = GGUF | {"llama.rope.freq_base": 5e5}
    scaling = Llama3Scaling(32.0, 1.0, 4.0, 8192)
    table = [scaling.divisor(5e5 ** (-2 * index / 16)) for index in range(8)]
    assert ModelSpec.from_gguf_metadata(metadata, (), table).rope_scaling == scaling
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        ModelSpec.from_gguf_metadata(metadata, (), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    with pytest.raises(ModelError, match="rope_freqs"):
        ModelSpec.from_gguf_metadata(metadata, (), table[:4])
    with pytest.raises(ModelError, match="rope_freqs"):
        ModelSpec.from_gguf_metadata(metadata, (), [0.0] * 8)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"general.architecture": "gemma2"}, "gemma2"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.rope.dimension_count": 8}, "dimension_count"),
        ({"llama.attention.sliding_window": 128}, "sliding_window"),
        ({"split.count": 3}, "split"),
    ],
)
def test_unsupported_gguf_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        ModelSpec.from_gguf_metadata(GGUF | change, ())


def test_shapes_follow_the_spec(family: ModelSpec) -> None:
    shapes = tensor_shapes(family)
    assert ("head" in shapes) != family.tie_embeddings
    assert ("layers.0.q_bias" in shapes) == family.qkv_bias
    assert ("layers.0.o_bias" in shapes) == family.o_bias
    assert ("layers.1.k_norm" in shapes) == family.qk_norm
    assert shapes["layers.1.k"] == (family.num_kv_heads * family.head_dim, family.hidden_size)
