"""Blocks in eight bits: close to what they were, a fraction of the size, and nobody takes them for exact ones."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segue import Engine, InvalidRequest, SamplingParams
from segue.kv import KVLayout
from segue.model.kv_codec import Int8Codec

SIZE, SHAPE = 4, (2, 2, 3, 16)
PROMPTS = [[(token * number + token * token) % 250 for token in range(330)] for number in (1, 7)]
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1)


@given(data=st.data())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_value_comes_back_within_half_a_step_of_its_row(dtype, data):
    seed, size = data.draw(st.integers(0, 1000)), data.draw(st.sampled_from([0.0, 1e-3, 1.0, 500.0]))
    layout = KVLayout(dtype, SHAPE)
    values = (torch.randn(2, 2, 3, SIZE, 16, generator=torch.Generator().manual_seed(seed)) * size).to(
        getattr(torch, dtype)
    )
    block = memoryview(values.view(torch.uint8).numpy()).cast("B")
    codec = Int8Codec(layout, SIZE)
    encoded = codec.encode(block)
    assert len(encoded) == codec.num_bytes == values.numel() // 16 * (16 + 4)
    out = bytearray(len(block))
    codec.decode(encoded, memoryview(out))
    back = torch.frombuffer(out, dtype=getattr(torch, dtype)).reshape(values.shape).float()
    step = values.float().abs().amax(dim=-1, keepdim=True) / 127
    rounding = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-10}[dtype]
    assert ((back - values.float()).abs() <= step / 2 + values.float().abs() * rounding + step * rounding).all()
    assert codec.encode(memoryview(out)).nbytes == codec.num_bytes


def answers(tmp_path, compressed, num_rounds=2, **options):
    tiers = [f"disk={tmp_path / 'kv'},64MiB" + (",int8" if compressed else "")]
    with Engine("tiny", num_blocks=60, tiers=tiers, **options) as engine:
        results = [engine.generate(prompt, PARAMS)[0] for _ in range(num_rounds) for prompt in PROMPTS]
        while engine.has_work or any(courier.has_work for courier in engine._tiers._couriers):
            engine.step()
        return results, engine.tiers()[0]


@pytest.fixture(autouse=True)
def loading_takes_no_time(monkeypatch):
    monkeypatch.setattr("segue.kv.tiers.courier.Speed.seconds_for", lambda speed, num_bytes: 0.0)


@pytest.mark.parametrize(("dtype", "share"), [("fp32", 0.33), ("bf16", 0.65)])
def test_copies_are_smaller_and_answers_close(tmp_path, dtype, share):
    _, exact = answers(tmp_path / "exact", False, dtype=dtype)
    first, _ = answers(tmp_path / "int8", True, 1, dtype=dtype)
    again, row = answers(tmp_path / "int8", True, 1, dtype=dtype)
    assert row["bytes"] / row["blocks"] < share * exact["bytes"] / exact["blocks"]
    for before, after in zip(first, again, strict=True):
        assert after.reuse.loaded == 329 // 16 * 16
        chosen = [result.completions[0].logprobs[0].chosen for result in (before, after)]
        assert np.isclose(*chosen, atol=0.1)


def test_an_exact_engine_does_not_find_them_nor_the_other_way_round(tmp_path):
    answers(tmp_path, True, 1)
    assert all(result.reuse.loaded == 0 for result in answers(tmp_path, False, 1)[0])
    assert all(result.reuse.loaded > 0 for result in answers(tmp_path, True, 1)[0])


def test_the_host_refuses():
    with pytest.raises(InvalidRequest, match="exact"):
        Engine("tiny", tiers=["host=64MiB,int8"])
