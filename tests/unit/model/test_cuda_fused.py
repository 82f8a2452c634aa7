"""Attention of few rows in one kernel with what lies before it, on an emulated device (`tests/cuda`), and that it compiles for a
real one."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.model.cuda import driver, fused
from segue.model.cuda.fused import Kind
from segue.model.cuda.inputs import FEW
from segue.model.tiny import tiny_spec
from tests.emulator import EmulatedGroupKernel, EmulatedPieceKernel, Emulator
from tests.fused import GROUPS, LLAMA, PIECES, QWEN, SMOL, Blocks, Case, beams, forks, rows_of, sequences


@pytest.fixture(scope="session")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory)


@pytest.mark.parametrize("what", PIECES)
def test_rows_see_what_they_are_to_see(what, emulator):
    """Whatever order threads and copies come in: output, what is new in the cache, and nothing else there."""
    case = Case(QWEN, rows_of(QWEN, what))
    kernel = EmulatedPieceKernel(emulator, QWEN, case.dtype)
    for kernel.seed in range(3):
        assert case.is_right(kernel)


@pytest.mark.parametrize("what", GROUPS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rows_that_begin_alike_see_what_they_are_to_see(what, ranks, emulator):
    case = Case(QWEN, rows_of(QWEN, what), spare=ranks % 3)
    if fused.ranks_of(QWEN, 10**6, 4 if what in ("beams", "many beams") else 16, 132) > ranks:
        pytest.skip("more programs are needed")
    kernel = EmulatedGroupKernel(emulator, QWEN, case.dtype, ranks)
    for kernel.seed in range(2):
        assert case.is_right(kernel)


@pytest.mark.parametrize("kind", [LLAMA, SMOL, Kind(2, 2, 64, 128, True)], ids=["llama", "smol", "large blocks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_models(kind, dtype, emulator):
    kernel = EmulatedPieceKernel(emulator, kind, dtype, slots=9, seed=1)
    for what in ("one after each other", "some tokens of one"):
        assert Case(kind, rows_of(kind, what), dtype=dtype).is_right(kernel)


@pytest.mark.parametrize("kind", [LLAMA, Kind(4, 2, 64, 128, True), Kind(8, 1, 128, 32, True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_models_of_rows_that_begin_alike(kind, dtype, emulator):
    kernel = EmulatedGroupKernel(emulator, kind, dtype, units=12, seed=1)
    for what in ("beams", "long beams"):
        assert Case(kind, rows_of(kind, what), dtype=dtype).is_right(kernel)
    blocks = Blocks(160, 5)
    case = Case(kind, forks(256, [256, 270, 300], blocks, kind.size), dtype=dtype)
    assert len(case.inputs.items) and case.is_right(kernel)


STARTS = st.one_of(st.just(0), st.integers(0, 130), st.integers(0, 600))
SEQUENCES = st.tuples(STARTS, st.one_of(st.just(1), st.integers(1, FEW)))


@settings(max_examples=12, deadline=None)
@given(
    st.lists(SEQUENCES, min_size=1, max_size=4),
    st.sampled_from([QWEN, SMOL]),
    st.integers(1, 12),
    st.integers(0, 2**30),
)
def test_any_step(emulator, spans, kind, slots, seed):
    blocks = Blocks(300, seed)
    rows = sequences([(start, start + count) for start, count in spans], blocks, kind.size)
    case = Case(kind, rows, num_blocks=300, seed=seed)
    assert case.is_right(EmulatedPieceKernel(emulator, kind, case.dtype, slots, seed))


BEAMS = st.tuples(st.integers(1, 350), st.integers(1, 40), st.integers(1, 6))
FORKS = st.lists(st.integers(257, 380), min_size=2, max_size=7)


@settings(max_examples=12, deadline=None)
@given(
    st.one_of(st.lists(BEAMS, min_size=1, max_size=3), st.lists(FORKS, min_size=1, max_size=2)),
    st.sampled_from([QWEN, LLAMA]),
    st.integers(1, 132),
    st.integers(0, 2**30),
)
def test_any_step_of_rows_that_begin_alike(emulator, groups, kind, units, seed):
    blocks, rows = Blocks(300, seed), []
    for group in groups:
        is_beams = isinstance(group, tuple)
        rows += [beams(*group, blocks, kind.size)] if is_beams else forks(256, group, blocks, kind.size)
    case = Case(kind, rows, num_blocks=300, seed=seed)
    assert case.is_right(EmulatedGroupKernel(emulator, kind, case.dtype, units=units, seed=seed))


FAULTS = {
    "copies over what is read": ("wait_for(here.empty + 8 * turn.at, turn.parity ^ 1);", "", "a long one alone"),
    "reads what has not come": ("wait_for(here.full + 8 * turn.at, turn.parity);", "", "some tokens of one"),
    "reads what is not written yet": (
        "    wait_for_kernel_before();\n#pragma unroll",
        "#pragma unroll",
        "some tokens of one",
    ),
    "ends before its turn": ("    }\n    wait_for_kernel_before();\n}", "    }\n}", "a long one alone", 16),
    "the next piece's queries over this one's": (
        "meet_threads(2, WORKERS);  // the next piece",
        "// the next piece",
        "a beginning",
        1,
    ),
    "products that may not see queries": (") fence_products(), meet", ") meet", "some tokens of one"),
    "queries of which some come later": (
        "fence_products(), meet_threads(2, WORKERS);",
        "fence_products();",
        "a beginning",
    ),
    "new tokens that may not be seen": (
        "if (chunk == 0 || is_mended) fence",
        "if (chunk == 0) fence",
        "one after each other",
    ),
    "others' angles": ("if (round > 0) ask(", "if (round > 9) ask(", "a beginning"),
    "sums that are put together before all are there": (
        "    meet_threads(2, WORKERS);\n    if (kept",
        "    if (kept",
        "one after each other",
    ),
    "a product's sums before it has ended": (
        "products_wait<0>();\n    float peak",
        "float peak",
        "a long one alone",
    ),
}


GROUP_FAULTS = {
    "copies over what is read": ("wait_for(here.empty + 8 * stage, (chunk / STAGES & 1) ^ 1)", "", "long beams"),
    "reads what has not come": ("wait_for(here.full + 8 * stage, chunk / STAGES & 1);", "", "long beams"),
    "mends what has not come": (
        "        wait_for(here.full + 8 * chunk, 0);\n        clear",
        "        clear",
        "forks and others",
    ),
    "keys of rows that are not written yet": (
        "    wait_for_kernel_before();\n#pragma unroll",
        "#pragma unroll",
        "forks",
    ),
    "new keys that products may not see": (
        "    fence_products();\n    arrive_threads",
        "    arrive_threads",
        "forks",
    ),
    "sums over what others still look at": (
        "    arrive_at_cluster();\n    wait_for_cluster();  // so nobody",
        "    //",
        "long beams",
    ),
    "sums that are read before they have come": ("    wait_for_ranks(here.sent, 0);\n", "", "beams"),
    "a row sees what is another one's": (
        "if (view.row_of(box, line) != own_row[which]) return 0;",
        "",
        "beams",
    ),
    "nobody's values": ("        clear_nobodys(view, here, chunk);\n    }\n    wait", "    }\n    wait", "beams"),
}


def whole(name):
    """With what it has in common with others."""
    source, header = ((driver.SOURCES / each).read_text() for each in (name, "attention.h"))
    return source.replace("#include <attention.h>", header.replace("#pragma once", ""))


@pytest.mark.parametrize("fault", GROUP_FAULTS)
def test_the_emulator_notices_in_groups(fault, emulator):
    line, instead, what = GROUP_FAULTS[fault]
    source = whole("groups.cu")
    assert source.count(line) == 1
    case = Case(QWEN, rows_of(QWEN, what))
    kernel = EmulatedGroupKernel(emulator, QWEN, case.dtype, units=4, source=source.replace(line, instead))
    results = []
    for kernel.seed in range(12):
        results.append(case.is_right(kernel))
        if not results[-1]:
            break
    assert not all(results)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_notices(fault, emulator):
    """A wait that is left out shows as a wrong number, or as an end that never comes."""
    line, instead, what, *slots = FAULTS[fault]
    source = whole("pieces.cu")
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
def test_they_compile_without_a_device(kind, dtype):
    """For an H100 or H200."""

    def compiled(name, stages, ranks):
        return driver.compile_cuda(name, "sm_90a", kind.macros(dtype) | {"STAGES": stages, "RANKS": ranks})

    assert compiled("pieces.cu", fused.piece_layout(kind).stages, 1).startswith(b"\x7fELF")
    for ranks in fused.RANKS if kind.has_groups else ():
        assert compiled("groups.cu", fused.group_layout(kind).stages, ranks).startswith(b"\x7fELF")


@pytest.mark.parametrize("dim", [64, 128])
def test_two_programs_fit_on_a_multiprocessor(dim):
    kind = Kind(8, 2, dim, 16, False)
    for layout in (fused.piece_layout(kind), fused.group_layout(kind)):
        assert layout.stages >= 3 and layout.shared_bytes <= 113 * 1024


def test_many_items_have_few_programs_each_but_enough_for_what_is_new():
    kind = Kind(16, 8, 128, 16, True)
    assert [fused.ranks_of(kind, room, 4, 132) for room in (1, 4, 8, 16, 64)] == [8, 8, 4, 2, 2]
    assert [fused.ranks_of(kind, room, 16, 132) for room in (1, 4, 8, 16, 64)] == [8, 8, 4, 4, 4]


def test_what_it_is_not_for_is_said(monkeypatch):
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    spec, device = replace(tiny_spec(), head_dim=64), torch.device("cuda")
    assert fused.why_not(spec, 16, torch.bfloat16, device) is None
    assert "bf16 or fp16" in fused.why_not(spec, 16, torch.float32, device)
    assert "block_size" in fused.why_not(spec, 48, torch.bfloat16, device)
    assert "heads of" in fused.why_not(tiny_spec(), 16, torch.bfloat16, device)
    assert "see all" in fused.why_not(replace(spec, windows=(None, 100, None)), 16, torch.bfloat16, device)
    assert "query heads" in fused.why_not(replace(spec, num_heads=66, num_kv_heads=2), 16, torch.bfloat16, device)
    capability = (10, 0)
    assert "compute capability" in fused.why_not(spec, 16, torch.bfloat16, device)
