"""What an engine is asked for, it does or refuses; and KV that was computed in another way is not taken for its own."""

from dataclasses import replace

import pytest
import torch

from segue import Engine, InvalidRequest, SamplingParams
from segue.base.errors import UnsupportedModel
from segue.model import engine as engine_module
from segue.model.runner import ModelRunner

SMALL = {"device": "cpu", "num_blocks": 20, "max_model_len": 100}


@pytest.fixture
def one_device(monkeypatch):
    """As if there were one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))


def test_another_device_than_the_first_is_refused_with_the_way_to_have_it(one_device):
    with pytest.raises(InvalidRequest, match=r"^device: cuda:2: .*CUDA_VISIBLE_DEVICES=2"):
        Engine("tiny", device="cuda:2")


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:1"])
def test_a_device_that_is_not_there_is_refused(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InvalidRequest, match="torch finds no CUDA device"):
        Engine("tiny", device=name)


@pytest.mark.parametrize("option", [{"exact": True}, {"kv_dtype": "fp8"}, {"attention": "triton"}], ids=str)
def test_what_only_our_kernels_can_do_is_refused_without_them(one_device, option):
    from segue.base.config import Environment
    from segue.model.loading import open_model

    with pytest.raises(UnsupportedModel, match="needs our kernels"):
        Engine("tiny", native=False, **option, **SMALL)
    environment = Environment.read()
    loaded = open_model("tiny", environment.cache_dir)
    unusual = replace(loaded, spec=replace(loaded.spec, head_dim=80))
    with pytest.raises(UnsupportedModel, match="needs our kernels on cuda: heads of 80"):
        engine_module._backend(engine_module.ModelOptions(**option), unusual, torch.device("cuda"), 64, environment)


def test_eight_bit_kv_needs_a_device_that_has_it(one_device):
    pytest.importorskip("triton")
    from segue.base.config import Environment
    from segue.model.loading import open_model

    environment = Environment.read()
    loaded = open_model("tiny", environment.cache_dir)
    with pytest.raises(UnsupportedModel, match=r"compute capability 8\.9"):
        engine_module._backend(
            engine_module.ModelOptions(kv_dtype="fp8"), loaded, torch.device("cuda"), 64, environment
        )


def test_kernels_that_do_not_compile_are_done_without_and_it_says_so(one_device, monkeypatch):
    pytest.importorskip("triton")
    from segue.model.cuda import fused
    from segue.model.cuda.driver import CompilerMissing
    from segue.model.tiny import tiny_spec

    def missing(*_):
        raise CompilerMissing("no NVRTC")

    monkeypatch.setattr(fused, "kernels_for", missing)
    device, options = torch.device("cuda"), engine_module.ModelOptions()
    said = engine_module._attention(options, tiny_spec(), torch.bfloat16, device)
    assert said == (None, None, ["attention by Triton (no NVRTC)"])
    for other in ({"attention": "triton"}, {"exact": True}, {"kv_dtype": "fp8"}):
        chosen = engine_module.ModelOptions(**other)
        assert engine_module._attention(chosen, tiny_spec(), torch.bfloat16, device) == (None, None, [])


def test_kv_in_eight_bits_is_not_made_smaller_once_more():
    runner = object.__new__(ModelRunner)
    runner.kv = torch.empty(1, 2, 3, 1, 4, 16, dtype=torch.float8_e4m3fn)
    with pytest.raises(InvalidRequest, match=r"^tiers: int8"):
        runner.codec()


def test_what_another_precision_left_on_disk_is_not_taken(tmp_path):
    params = SamplingParams(max_tokens=2, temperature=0)
    prompt = list(range(5, 69))

    def loaded(**options):
        with Engine("tiny", tiers=[f"disk={tmp_path},1GiB"], **{**SMALL, **options}) as engine:
            result = engine.generate(prompt, params)[0]
            return result.reuse.loaded

    assert loaded() == 0
    assert loaded() > 0
    assert loaded(quantize="int8") == 0, "KV of rounded weights is other KV"
    assert loaded(quantize="int8") > 0
