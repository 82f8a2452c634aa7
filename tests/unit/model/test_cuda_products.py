"""Products of few rows: the kernel on an emulated device (`tests/cuda`), how it is divided, and that it compiles for a real
one."""

import ctypes
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.model.cuda import driver, products
from segue.model.cuda.backend import CudaBackend
from segue.model.cuda.products import Kind, layout, macros_of
from segue.model.spec import ModelSpec
from segue.model.tiny import tiny_spec
from tests.emulator import Emulator, tensor_map

H200 = 132


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    """The kernel for a kind and a type, compiled for this machine; with `source`, another than the real one."""
    emulator = Emulator(tmp_path_factory)
    return lambda kind, dtype, source=None: emulator.build("products", macros_of(kind, dtype), source)


class Case:
    def __init__(self, rows, width, depth, *, is_pair=False, has_bias=False, dtype=torch.bfloat16, units=8, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape, scale=1.0):
            return (torch.randn(*shape, generator=generator) * scale).to(dtype)

        self.x, self.matrix = random(rows, depth), random(width, depth, scale=depth**-0.5)
        self.bias = random(width) if has_bias else None
        self.plan = layout(rows, width, depth, is_pair=is_pair, units=units)
        self.seed, self.is_pair = seed, is_pair

    @property
    def wanted(self):
        found = self.x.double() @ self.matrix.double().t()
        if self.is_pair:
            gate, up = found.chunk(2, -1)
            return F.silu(gate) * up
        return found + self.bias.double() if self.bias is not None else found

    def run(self, library):
        """What comes of it; None if it never ended."""
        wanted = self.wanted
        out = torch.full(wanted.shape, torch.nan, dtype=self.x.dtype)
        weights = tensor_map(products.weights_boxes(self.matrix, is_pair=self.is_pair))
        rows = tensor_map(products.rows_boxes(self.x, self.plan.kind.rows))
        told = products.describe(self.x, self.bias, out, weights, rows, self.plan.stages)
        assert ctypes.sizeof(told) == library.size_of_product()
        failed = library.run(ctypes.byref(told), self.plan.num_programs, self.seed)
        return out if not failed else None

    def error(self, library):
        out = self.run(library)
        return float((out.double() - self.wanted).norm() / self.wanted.norm()) if out is not None else None


CASES = {
    "one program a tile": Case(5, 512, 1536, units=4, has_bias=True),
    "two": Case(13, 256, 1024, units=6),
    "four": Case(31, 256, 2560, units=16, has_bias=True),
    "more stages than there is room for": Case(64, 128, 4096, units=4),
    "pairs": Case(7, 512, 1280, is_pair=True, units=8),
    "pairs in four": Case(33, 256, 1024, is_pair=True, units=16),
    "fp16": Case(20, 256, 1024, is_pair=True, units=8, dtype=torch.float16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_it_computes_the_product(case, emulated):
    """Whatever order threads, copies and messages come in."""
    library = emulated(case.plan.kind, case.x.dtype)
    bound = 3e-3 if case.x.dtype == torch.bfloat16 else 4e-4
    for seed in range(6):
        case.seed = seed
        assert case.error(library) < bound


def test_each_kind_of_division_is_among_these():
    kinds = [case.plan.kind for case in CASES.values()]
    assert {kind.ranks for kind in kinds} == {1, 2, 4} and {kind.rows for kind in kinds} == set(products.ROWS)


def test_a_row_is_the_same_beside_others(emulated):
    """Its sums have one order: the same bits alone, and as one of eight."""
    case = Case(8, 256, 1024, units=8)
    library = emulated(case.plan.kind, torch.bfloat16)
    together, rows = case.run(library), case.x
    for at in range(8):
        case.x = rows[at : at + 1].contiguous()
        assert torch.equal(case.run(library)[0], together[at])


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("wait_for(here.empty + 8 * turn.at, turn.parity);", ""),
        ("wait_for(here.full + 8 * turn.at, turn.parity);", ""),
        ("wait_for_ranks(here.sent, 0);", ""),
        ("products_wait<1>();", ""),
        ("wait_for_kernel_before();\n    for (int chunk", "for (int chunk"),
        ("wait_for_kernel_before();\n    finish", "finish"),
        ("if (chunk > 0 && my_thread() % 32 == 0) arrive", "if (chunk > 1 && my_thread() % 32 == 0) arrive"),
    ],
)
def test_the_emulator_notices(line, instead, emulated):
    """A wait that is left out shows as a wrong number or as an end that never comes."""
    source = (driver.SOURCES / "products.cu").read_text()
    assert source.count(line) == 1
    case = Case(40, 128, 4096, units=4)
    library = emulated(case.plan.kind, torch.bfloat16, source.replace(line, instead))
    errors = []
    for seed in range(8):
        case.seed = seed
        errors.append(case.error(library))
    assert not all(error is not None and error < 3e-3 for error in errors)


@settings(deadline=None)
@given(
    st.integers(1, products.MOST_ROWS),
    st.integers(1, 600).map(lambda tiles: tiles * products.TILE),
    st.integers(1, 200).map(lambda chunks: chunks * products.DEPTH),
    st.sampled_from((78, 114, H200)),
)
def test_what_a_program_has_fits_its_memory(num_rows, width, depth, units):
    for is_pair in (False, True):
        plan = layout(num_rows, width, depth, is_pair=is_pair, units=units)
        kind, chunks = plan.kind, depth // (plan.kind.ranks * products.DEPTH)
        assert kind.rows >= num_rows and depth == chunks * kind.ranks * products.DEPTH
        assert plan.num_programs == width // products.TILE * kind.ranks
        assert (
            min(2, chunks) <= plan.stages <= chunks
        )  # the next chunk is multiplied before the last one's stage is free
        a_stage = (products.TILE + kind.rows) * products.DEPTH * 2 + 16
        assert plan.stages * a_stage + products.TILE * kind.rows * 4 + 8 == plan.shared_bytes <= 227 * 1024


def test_how_known_models_are_divided():
    """As was measured to be best: Qwen3-1.7B's o, gate and up, down and qkv, then Llama-8B's."""
    for hidden, mixed, inner, qkv, wanted in (
        (2048, 2048, 6144, 4096, (4, 1, 4, 2)),
        (4096, 4096, 14336, 6144, (2, 2, 2, 2)),
    ):
        shapes = ((hidden, mixed, False), (2 * inner, hidden, True), (hidden, inner, False), (qkv, hidden, False))
        plans = [layout(8, width, depth, is_pair=is_pair, units=H200) for width, depth, is_pair in shapes]
        assert tuple(plan.kind.ranks for plan in plans) == wanted


@pytest.mark.parametrize("kind", [Kind(8, 1, False), Kind(16, 2, True), Kind(32, 4, False), Kind(64, 4, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_compiles_without_a_device(kind, dtype):
    """For an H100 or H200."""
    assert driver.compile_cuda("products.cu", "sm_90a", macros_of(kind, dtype)).startswith(b"\x7fELF")


def test_a_source_that_does_not_compile_is_said_to():
    with pytest.raises(driver.CompilerMissing, match="does not compile for sm_90a"):
        driver.compile_cuda("products.cu", "sm_90a", {"ROWS": 7})


def test_what_it_is_not_for():
    def spec(hidden, inner):
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": hidden,
                  "intermediate_size": inner, "num_hidden_layers": 2, "num_attention_heads": hidden // 64,
                  "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
                  "tie_word_embeddings": True, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
        return ModelSpec.from_hf_config(config)

    assert products.fits(spec(1024, 3072)) and not products.fits(spec(576, 1536))
    assert products.products_for(spec(1024, 1024), torch.bfloat16, torch.device("cpu")) is None


def test_a_device_without_a_compiler_does_without(monkeypatch):
    """And says why: the same model, on the library's products."""
    spec = replace(tiny_spec(), num_layers=1, windows=(None,))

    def missing(*_):
        raise driver.CompilerMissing("no NVRTC here")

    monkeypatch.setattr(products, "products_for", missing)
    backend = CudaBackend(spec, torch.float32, torch.device("cpu"), 64)
    assert backend.missing == "no NVRTC here"
    assert CudaBackend(spec, torch.float32, torch.device("cpu"), 64, exact=True).missing is None


def test_only_layers_matrices_are_for_it():
    """A part of the head may have any width."""
    spec = replace(tiny_spec(), num_layers=1, windows=(None,))
    backend = CudaBackend(spec, torch.float32, torch.device("cpu"), 64)
    backend._products = object()  # whatever is asked of it fails
    x, part = torch.randn(3, spec.hidden_size), torch.randn(100, spec.hidden_size)
    assert torch.equal(backend.linear(x, part, None, into="some logits"), F.linear(x, part))
