"""Attention of few rows in one kernel, on an emulated device (`tests/cuda`), and that it compiles for a real one."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.model.cuda import driver, pieces
from segue.model.cuda.inputs import FEW
from segue.model.cuda.pieces import Kind
from segue.model.tiny import tiny_spec
from tests.emulator import EmulatedPieceKernel, Emulator
from tests.pieces import ALL, LLAMA, QWEN, SMOL, Blocks, Case, beams, rows_of, sequences


@pytest.fixture(scope="session")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory)


@pytest.mark.parametrize("what", ALL)
def test_rows_see_what_they_are_to_see(what, emulator):
    """Whatever order threads and copies come in: output, what is new in the cache, and nothing else there."""
    case = Case(QWEN, rows_of(QWEN, what))
    kernel = EmulatedPieceKernel(emulator, QWEN, case.dtype)
    for kernel.seed in range(3):
        assert case.is_right(kernel)


@pytest.mark.parametrize("kind", [LLAMA, SMOL, Kind(2, 2, 64, 128, True)], ids=["llama", "smol", "large blocks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_models(kind, dtype, emulator):
    kernel = EmulatedPieceKernel(emulator, kind, dtype, slots=9, seed=1)
    for what in ("all of it", "some tokens of one"):
        assert Case(kind, rows_of(kind, what), dtype=dtype).is_right(kernel)


def test_more_beams_than_a_piece_has_room_for(emulator):
    case = Case(QWEN, [beams(70, QWEN.group_rows + 3, 2, Blocks(160, 4), QWEN.size)])
    assert case.is_right(EmulatedPieceKernel(emulator, QWEN, case.dtype))


STARTS = st.one_of(st.just(0), st.integers(0, 130), st.integers(0, 600))
PARTS = st.one_of(
    st.tuples(st.just("sequence"), STARTS, st.one_of(st.just(1), st.integers(1, FEW))),
    st.tuples(st.just("beams"), st.integers(1, 350), st.integers(1, 40), st.integers(1, 4)),
    st.tuples(st.just("forks"), st.lists(st.integers(257, 380), min_size=2, max_size=7)),
)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(PARTS, min_size=1, max_size=4), st.sampled_from([QWEN, SMOL]), st.integers(1, 12), st.integers(0, 2**30)
)
def test_any_step(emulator, parts, kind, slots, seed):
    blocks, size, rows = Blocks(300, seed), kind.size, []
    for what, *given_of in parts:
        if what == "sequence":
            start, count = given_of
            rows += sequences([(start, start + count)], blocks, size)
        elif what == "beams":
            rows.append(beams(*given_of, blocks, size))
        else:
            shared = blocks.take(256 // size)
            rows += sequences([(start, start + 1) for start in given_of[0]], blocks, size, shared)
    case = Case(kind, rows, num_blocks=300, seed=seed)
    assert case.is_right(EmulatedPieceKernel(emulator, kind, case.dtype, slots, seed))


FAULTS = {
    "copies over what is read": ("wait_for(here.empty + 8 * turn.at, turn.parity ^ 1);", "", "a long one alone"),
    "reads what has not come": ("wait_for(here.full + 8 * turn.at, turn.parity);", "", "some tokens of one"),
    "reads what is not written yet": (
        "    wait_for_kernel_before();\n#pragma unroll",
        "#pragma unroll",
        "some tokens of one",
    ),
    "ends before its turn": ("    }\n    wait_for_kernel_before();\n}", "    }\n}", "beams", 16),
    "the next piece's queries over this one's": (
        "meet_threads(2, WORKERS);  // the next piece",
        "// the next piece",
        "beams",
        1,
    ),
    "products that may not see queries": (") fence_products(), meet", ") meet", "some tokens of one"),
    "queries of which some come later": ("fence_products(), meet_threads(2, WORKERS);", "fence_products();", "forks"),
    "new tokens that may not be seen": (
        "if (chunk == 0 || is_mended) fence",
        "if (chunk == 0) fence",
        "one after each other",
    ),
    "others' angles": ("if (round > 0) turning.load", "if (round > 9) turning.load", "forks"),
    "sums that are put together before all are there": (
        "    meet_threads(2, WORKERS);\n    if (kept",
        "    if (kept",
        "one after each other",
    ),
    "a product's sums before it has ended": (
        "products_wait<0>();\n    const int column",
        "const int column",
        "a long one alone",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_notices(fault, emulator):
    """A wait that is left out shows as a wrong number, or as an end that never comes."""
    line, instead, what, *slots = FAULTS[fault]
    source = (driver.SOURCES / "pieces.cu").read_text()
    assert source.count(line) == 1
    case = Case(QWEN, rows_of(QWEN, what))
    kernel = EmulatedPieceKernel(emulator, QWEN, case.dtype, *(slots or [2]), source=source.replace(line, instead))
    results = []
    for kernel.seed in range(8):
        results.append(case.is_right(kernel))
        if not results[-1]:
            break
    assert not all(results)


@pytest.mark.parametrize("kind", [QWEN, LLAMA, SMOL, Kind(16, 8, 128, 128, True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_compiles_without_a_device(kind, dtype):
    """For an H100 or H200."""
    assert driver.compile_cuda("pieces.cu", "sm_90a", kind.macros(dtype)).startswith(b"\x7fELF")


@pytest.mark.parametrize("dim", [64, 128])
def test_two_programs_fit_on_a_multiprocessor(dim):
    kind = Kind(8, 2, dim, 16, False)
    assert kind.stages >= 3 and kind.shared_bytes <= 113 * 1024


def test_what_it_is_not_for_is_said(monkeypatch):
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    spec, device = replace(tiny_spec(), head_dim=64), torch.device("cuda")
    assert pieces.why_not(spec, 16, torch.bfloat16, device) is None
    assert "bf16 or fp16" in pieces.why_not(spec, 16, torch.float32, device)
    assert "block_size" in pieces.why_not(spec, 48, torch.bfloat16, device)
    assert "heads of" in pieces.why_not(tiny_spec(), 16, torch.bfloat16, device)
    assert "see all" in pieces.why_not(replace(spec, windows=(None, 100, None)), 16, torch.bfloat16, device)
    assert "query heads" in pieces.why_not(replace(spec, num_heads=66, num_kv_heads=2), 16, torch.bfloat16, device)
    capability = (10, 0)
    assert "compute capability" in pieces.why_not(spec, 16, torch.bfloat16, device)
