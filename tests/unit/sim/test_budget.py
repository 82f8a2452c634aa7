"""Model sizes and memory budgets: against counts that are published, and against vLLM's own log."""

from __future__ import annotations

import json

import pytest

from segue.base.errors import InvalidRequest
from segue.cli import main
from segue.sim.budget import budget
from segue.sim.hardware import GIB, HARDWARE, find_hardware
from segue.sim.shapes import KNOWN, ModelShape, find_shape

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8"},
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}


@pytest.mark.parametrize(
    ("config", "billions", "tolerance"),
    [
        (KNOWN["llama-3.1-8b"], 8.030261248, 0.0),
        (KNOWN["smollm2-135m"], 0.134515008, 0.0),
        (KNOWN["qwen3-1.7b"], 1.720574976, 0.0),
        (KNOWN["llama-3.1-70b"], 70.553706496, 0.0),
        (MIXTRAL, 46.7, 0.005),
        (DEEPSEEK_V3, 671.0, 0.005),
        (GPT2, 0.124, 0.01),
    ],
    ids=["llama-8b", "smollm2", "qwen3-1.7b", "llama-70b", "mixtral", "deepseek-v3", "gpt2"],
)
def test_parameters_are_those_that_are_published(config, billions, tolerance):
    assert ModelShape.from_config(config).num_params == pytest.approx(billions * 1e9, rel=tolerance or 1e-12)


def test_experts_count_as_far_as_a_token_meets_them():
    mixtral, deepseek = ModelShape.from_config(MIXTRAL), ModelShape.from_config(DEEPSEEK_V3)
    assert mixtral.num_active + mixtral.num_head_params == pytest.approx(12.9e9, rel=0.02)
    assert deepseek.num_active + deepseek.num_head_params == pytest.approx(37e9, rel=0.03)


def test_kv_of_a_token():
    assert find_shape("llama-3.1-8b").kv_bytes_per_token() * 16 == 2 * 2**20
    assert ModelShape.from_config(DEEPSEEK_V3).kv_bytes_per_token("bfloat16") == 61 * 576 * 2  # latent attention
    hybrid = {**KNOWN["qwen3-8b"], "layer_types": ["linear_attention"] * 27 + ["full_attention"] * 9}
    shape = ModelShape.from_config(hybrid)
    assert shape.kv_bytes_per_token() == 9 * 2 * 8 * 128 * 2
    assert any("without KV" in each for each in shape.assumed)


def test_vllms_log_is_met_with_its_figures_and_nearly_without():
    """31.34 GiB at .85 with 14.99 GiB of weights and 1.01 of activations gave 5,402 blocks of 2 MiB."""
    shape = find_shape("llama-3.1-8b")
    given = {"weights": 14.99 * GIB, "activations": 1.01 * GIB, "other": 0.09 * GIB}
    found = budget(shape, 31.34 * GIB, utilization=0.85, **given)
    assert found.block == 2 * 2**20
    assert found.num_blocks == pytest.approx(5402, rel=0.01)
    assert not found.assumed
    guessed = budget(shape, find_hardware("rtx5090").memory_bytes, utilization=0.85)
    assert guessed.num_blocks == pytest.approx(5402, rel=0.02)
    assert len(guessed.assumed) == 3


def test_every_device_holds_the_eight_billion_model_and_the_published_blocks():
    counts = {name: budget(find_shape("llama-3.1-8b"), each.memory_bytes).num_blocks for name, each in HARDWARE.items()}
    assert counts["rtx6000"] == pytest.approx(3000, rel=0.1)
    assert counts["a100-40"] == pytest.approx(9000, rel=0.12)
    assert counts["l40s"] == pytest.approx(13000, rel=0.1)
    assert all(each.source for each in HARDWARE.values())


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_attention_heads": True}, "num_attention_heads"),
    ],
)
def test_a_config_without_its_numbers_is_refused_by_name(change, names):
    with pytest.raises(InvalidRequest, match=names):
        ModelShape.from_config({**KNOWN["llama-3.1-8b"], **change})


def test_what_does_not_fit_is_refused():
    with pytest.raises(InvalidRequest, match="hold no KV"):
        budget(find_shape("llama-3.1-70b"), 24 * GIB)
    with pytest.raises(InvalidRequest, match="utilization"):
        budget(find_shape("llama-3.1-8b"), 80 * GIB, utilization=1.5)
    with pytest.raises(InvalidRequest, match="dtype"):
        budget(find_shape("llama-3.1-8b"), 80 * GIB, dtype="float3")


def test_the_command_reads_a_config_and_says_what_it_assumed(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    assert main(["budget", str(tmp_path), "--gpu", "b200"]) == 0
    said = capsys.readouterr().out
    assert "assumed: weights: 46,702,792,704 parameters" in said
    assert main(["budget", str(tmp_path / "config.json"), "--memory", "180GiB", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["blocks"] > 10_000
    assert data["tokens"] == data["blocks"] * 16


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing-there"],
        ["llama-3.1-8b", "--gpu", "abacus"],
        ["llama-3.1-8b", "--memory", "lots"],
        ["llama-3.1-8b", "--context", "0"],
    ],
)
def test_the_command_refuses(arguments, capsys):
    assert main(["budget", *arguments]) == 2
    assert "segue:" in capsys.readouterr().err
