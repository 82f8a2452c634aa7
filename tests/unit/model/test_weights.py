"""Tensors arrive exactly as stored, and a damaged file is an error that names it, never a crash or a wrong tensor."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from segue.base.errors import ModelError, UnsupportedModel, WeightsError
from segue.model.gguf_file import GGUFFile, GGUFTensor
from segue.model.gguf_tensors import dequantize
from segue.model.loading import LoadedModel, open_model
from segue.model.spec import Llama3Scaling, ModelSpec, tensor_shapes
from segue.model.tiny import random_weights, save_hf_folder, tiny_spec
from segue.model.weights import fingerprint, hf_names, load_weights
from tests.unit.model.conftest import SMALL, add_byte_vocabulary, write_gguf


def assert_equal(left: Any, right: Any) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("max_shard_bytes", [None, 40_000])
def test_folder_loads_as_transformers_loads_it(family: ModelSpec, tmp_path: Path, max_shard_bytes: int | None) -> None:
    from transformers import AutoModelForCausalLM

    save_hf_folder(family, random_weights(family, seed=3), tmp_path, max_shard_bytes=max_shard_bytes)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    theirs = model.state_dict()
    assert_equal(dict(load_weights(tmp_path, family)), {o: theirs[t] for o, t in hf_names(family).items()})


def test_half_precision_stays_as_stored(tmp_path: Path) -> None:
    halves = {name: tensor.bfloat16() for name, tensor in random_weights(SMALL).items()}
    save_hf_folder(SMALL, halves, tmp_path)
    assert_equal(dict(load_weights(tmp_path, SMALL)), halves)


def test_random_weights_depend_on_the_seed_alone() -> None:
    spec = tiny_spec()
    assert_equal(random_weights(spec, 1), random_weights(spec, 1))
    assert not torch.equal(random_weights(spec, 1)["embed"], random_weights(spec, 2)["embed"])
    assert {name: tuple(tensor.shape) for name, tensor in random_weights(spec).items()} == tensor_shapes(spec)


def test_smollm2_equals_transformers_bit_for_bit(smollm2: LoadedModel, smollm2_reference: Any) -> None:
    theirs = smollm2_reference.state_dict()
    for ours, name in hf_names(smollm2.spec).items():
        assert torch.equal(smollm2.weights[ours].view(torch.int32), theirs[name].view(torch.int32)), ours


def test_smollm2_config_equals_transformers(smollm2: LoadedModel, smollm2_reference: Any) -> None:
    config = smollm2_reference.config.to_dict()
    del config["quantization_config"]  # says that it came from a GGUF file
    theirs = ModelSpec.from_hf_config(config)
    assert replace(theirs, eos_ids=(), bos_id=None) == replace(smollm2.spec, eos_ids=(), bos_id=None)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_gguf_rows_return_to_their_order(architecture: str, tmp_path: Path) -> None:
    spec = replace(SMALL, architecture=architecture, qkv_bias=True, qk_norm=architecture == "qwen3")
    weights = random_weights(spec)
    path = tmp_path / "m.gguf"
    write_gguf(path, spec, weights, lambda writer: add_byte_vocabulary(writer, spec.vocab_size))
    model = open_model(str(path), tmp_path)
    assert model.spec == replace(spec, eos_ids=(95,), bos_id=94, rms_eps=model.spec.rms_eps)
    assert model.spec.rms_eps == pytest.approx(spec.rms_eps)
    assert_equal(dict(model.weights), weights)


@pytest.mark.parametrize(("kind", "dtype"), [(1, torch.float16), (30, torch.bfloat16), (8, torch.float32)])
def test_gguf_types(kind: int, dtype: torch.dtype, tmp_path: Path) -> None:
    spec = replace(SMALL, intermediate_size=192)
    weights = random_weights(spec)
    write_gguf(tmp_path / "m.gguf", spec, weights, kind=kind)
    loaded = load_weights(tmp_path / "m.gguf", spec)
    assert loaded["layers.0.q"].dtype == dtype
    torch.testing.assert_close(loaded["layers.0.q"].float(), weights["layers.0.q"], atol=0.02, rtol=0.02)
    assert torch.equal(loaded["final_norm"], weights["final_norm"])


@pytest.mark.parametrize(
    "name", ["Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"]
)
def test_dequantised_values_equal_the_reference(name: str) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    kind = GGMLQuantizationType[name]
    block, size = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 0x70, (6, 4 * size), dtype=np.uint8)  # keeps float16 scales finite
    tensor = GGUFTensor("t", (6, 4 * block), int(kind), 0, raw.size)
    ours = dequantize(raw.reshape(-1), tensor).reshape(tensor.shape)
    assert torch.equal(ours, torch.from_numpy(quants.dequantize(raw, kind)))


def test_gguf_rope_table_is_honoured(tmp_path: Path) -> None:
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 8192)
    table = [scaling.divisor(SMALL.rope_theta ** (-2 * index / SMALL.head_dim)) for index in range(SMALL.head_dim // 2)]

    def more(writer: Any) -> None:
        add_byte_vocabulary(writer, SMALL.vocab_size)
        writer.add_tensor("rope_freqs.weight", np.array(table, dtype=np.float32))

    write_gguf(tmp_path / "m.gguf", SMALL, random_weights(SMALL), more)
    assert open_model(str(tmp_path / "m.gguf"), tmp_path).spec.rope_scaling == scaling
    with pytest.raises(WeightsError, match="rope_freqs"):
        load_weights(tmp_path / "m.gguf", SMALL)


def test_fingerprint_tells_models_apart_and_ignores_places(tmp_path: Path) -> None:
    weights = random_weights(SMALL)
    first = fingerprint(SMALL, weights)
    for folder in ("a", "b"):
        save_hf_folder(SMALL, weights, tmp_path / folder)
        assert fingerprint(SMALL, load_weights(tmp_path / folder, SMALL)) == first
    assert len(first) == 64
    assert fingerprint(replace(SMALL, eos_ids=(9,)), weights) == first
    others = [
        fingerprint(SMALL, random_weights(SMALL, 1)),
        fingerprint(replace(SMALL, rope_theta=1e6), weights),
        fingerprint(SMALL, {name: tensor.half() for name, tensor in weights.items()}),
        fingerprint(SMALL, weights | {"layers.1.down": weights["layers.1.down"] * 1.01}),
    ]
    assert len({first, *others}) == 5


# Damage: each of these is something that happens to files.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_hf_folder(SMALL, random_weights(SMALL), tmp_path / "m", max_shard_bytes=60_000)
    return tmp_path / "m"


def first_shard(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


def edit(path: Path, change: Any) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def refused(folder: Path, *names: str) -> None:
    with pytest.raises(WeightsError) as caught:
        load_weights(folder, SMALL)
    for name in names:
        assert name in str(caught.value)


def test_missing_shard(folder: Path) -> None:
    shard = first_shard(folder)
    shard.unlink()
    refused(folder, shard.name)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 2000, -1])
def test_truncated_shard(folder: Path, keep: int) -> None:
    shard = first_shard(folder)
    shard.write_bytes(shard.read_bytes()[:keep])
    refused(folder, shard.name)


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**62, 2**64 - 1])
def test_wrong_header_length(folder: Path, length: int) -> None:
    shard = first_shard(folder)
    shard.write_bytes(struct.pack("<Q", length) + shard.read_bytes()[8:])
    refused(folder, shard.name)


def test_wrong_shape_missing_and_unexpected_tensors(tmp_path: Path) -> None:
    def folder_with(change: Any) -> Path:
        save_hf_folder(SMALL, random_weights(SMALL), tmp_path)
        edit(tmp_path / "model.safetensors", change)
        return tmp_path

    name = "model.layers.1.self_attn.k_proj.weight"
    refused(folder_with(lambda tensors: tensors.update({name: torch.zeros(32, 63)})), name, "[32, 63]", "[32, 64]")
    refused(folder_with(lambda tensors: tensors.pop(name)), name, "lacks")
    extra = "model.layers.0.self_attn.q_proj.bias"
    refused(folder_with(lambda tensors: tensors.update({extra: torch.zeros(64)})), extra)
    refused(folder_with(lambda tensors: tensors.update({name: torch.zeros(32, 64, dtype=torch.int8)})), name, "I8")


def test_harmless_extras(tmp_path: Path) -> None:
    tied = replace(SMALL, tie_embeddings=True)
    save_hf_folder(tied, random_weights(tied), tmp_path)
    more = {"lm_head.weight": torch.zeros(96, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    edit(tmp_path / "model.safetensors", lambda tensors: tensors.update(more))
    assert "head" not in load_weights(tmp_path, tied)


def test_index_that_lies(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    placed = json.loads(index.read_text())
    first, *_, last = placed["weight_map"]
    wrong = placed["weight_map"] | {first: placed["weight_map"][last]}
    index.write_text(json.dumps({"weight_map": wrong}))
    refused(folder, first)
    index.write_text(json.dumps({"weight_map": {first: "../elsewhere.safetensors"}}))
    refused(folder, "elsewhere")
    index.write_text("{}")
    refused(folder, "weight_map")
    index.write_text("{")
    with pytest.raises(ModelError, match="index"):
        load_weights(folder, SMALL)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    refused(tmp_path, "safetensors", "pickled")
    (tmp_path / "pytorch_model.bin").unlink()
    refused(tmp_path, "safetensors")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b"{", b"[" * 100_000, b'{"model_type": "llama"}'])
def test_config_garbage(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError):
        open_model(str(tmp_path), tmp_path)


def test_truncated_gguf(small_gguf: Path, tmp_path: Path) -> None:
    whole = small_gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    for keep in [0, 3, 4, 8, 20, 24, 100, 1000, 2000, 3000, 5000, len(whole) // 2, len(whole) - 33]:
        cut.write_bytes(whole[:keep])
        with pytest.raises(WeightsError, match=r"cut\.gguf"):
            GGUFFile.open(cut)


@pytest.mark.parametrize("at", [8, 16, 24])
@pytest.mark.parametrize("length", [2**31, 2**40, 2**63, 2**64 - 1])
def test_gguf_announces_too_much(small_gguf: Path, at: int, length: int) -> None:
    whole = bytearray(small_gguf.read_bytes())
    whole[at : at + 8] = struct.pack("<Q", length)
    small_gguf.write_bytes(whole)
    with pytest.raises(WeightsError, match=r"small\.gguf"):
        GGUFFile.open(small_gguf)


def test_gguf_header_with_random_damage(small_gguf: Path, tmp_path: Path) -> None:
    """Whatever the bytes say, the outcome is a model or one of our errors, at once."""
    whole = small_gguf.read_bytes()
    header = min(tensor.start for tensor in GGUFFile.open(small_gguf).tensors.values())
    generator = random.Random(7)
    damaged = tmp_path / "damaged.gguf"
    outcomes = set()
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(generator.randint(1, 3)):
            content[generator.randrange(header)] = generator.choice([0, 1, 0x7F, 0xFF, generator.randrange(256)])
        damaged.write_bytes(content)
        try:
            open_model(str(damaged), tmp_path)
            outcomes.add("opened")
        except ModelError as error:
            outcomes.add(type(error).__name__)
    assert {"opened", "WeightsError"} <= outcomes


def test_unreadable_quantisation_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="Q8_1"):
        dequantize(np.zeros(36, dtype=np.uint8), GGUFTensor("t", (1, 32), 9, 0, 36))
