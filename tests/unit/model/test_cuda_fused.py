"""Attention of few rows in one kernel with what lies before it, on an emulated device (`tests/cuda`), and that it compiles for a
real one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.model.cuda import driver, fused, work
from segue.model.cuda.fused import Kind
from segue.model.cuda.inputs import FEW
from segue.model.tiny import tiny_spec
from tests.emulator import EmulatedBeamKernel, EmulatedPieceKernel, EmulatedRowKernel, Emulator
from tests.fused import ALONE, BEAMS, LLAMA, PIECES, QWEN, SMOL, Blocks, Case, beams, forks, rows_of, sequences


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


@pytest.mark.parametrize(
    "programs", [1, 3, 7, 13, 26]
)  # so many that each of these has one, two or four warps share a piece
@pytest.mark.parametrize("what", ALONE)
def test_rows_alone_see_what_they_are_to_see(what, programs, emulator):
    case = Case(QWEN, rows_of(QWEN, what), own_rows=QWEN.own_rows)
    kernel = EmulatedRowKernel(emulator, QWEN, case.dtype, programs)
    for kernel.seed in range(3):
        assert case.is_right(kernel)


@pytest.mark.parametrize(
    ("what", "ranks"),
    [(what, ranks) for what in BEAMS for ranks in fused.possible_ranks(QWEN, 16 if what == "long beams" else 4)],
)
def test_beams_see_what_they_are_to_see(what, ranks, emulator):
    case = Case(QWEN, rows_of(QWEN, what), spare=ranks % 3)
    kernel = EmulatedBeamKernel(emulator, QWEN, case.dtype, ranks)
    for kernel.seed in range(2):
        assert case.is_right(kernel)


@pytest.mark.parametrize("kind", [LLAMA, SMOL, Kind(2, 2, 64, 128, True)], ids=["llama", "smol", "large blocks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_models(kind, dtype, emulator):
    kernel = EmulatedPieceKernel(emulator, kind, dtype, slots=9, seed=1)
    for what in ("one after each other", "forks and others"):
        assert Case(kind, rows_of(kind, what), dtype=dtype).is_right(kernel)


@pytest.mark.parametrize("kind", [LLAMA, SMOL, Kind(2, 2, 64, 128, True), Kind(8, 1, 128, 32, True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_alone_of_other_models(kind, dtype, emulator):
    for seed, what in enumerate(ALONE):
        kernel = EmulatedRowKernel(emulator, kind, dtype, programs=4 << seed, seed=seed)
        assert Case(kind, rows_of(kind, what), dtype=dtype, own_rows=kind.own_rows).is_right(kernel)


@pytest.mark.parametrize("kind", [LLAMA, Kind(4, 2, 64, 128, True), Kind(8, 1, 128, 32, True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_beams_of_other_models(kind, dtype, emulator):
    kernel = EmulatedBeamKernel(emulator, kind, dtype, units=12, seed=1)
    for what in ("beams", "long beams"):
        assert Case(kind, rows_of(kind, what), dtype=dtype).is_right(kernel)


def test_a_warp_with_more_sixteens_than_lanes(emulator, monkeypatch):
    """Each lane knows where one of them is; of a context of over 16,384 tokens, pieces are as long as this one."""
    monkeypatch.setattr(work, "piece_length", lambda num_tokens: np.full_like(num_tokens, 4096))
    rows = sequences([(900, 910), (520, 521)], Blocks(160, 3), QWEN.size)
    case = Case(QWEN, rows, own_rows=QWEN.own_rows)
    assert case.inputs.own[:, 4].max() == 910
    assert case.is_right(EmulatedRowKernel(emulator, QWEN, case.dtype, programs=2))


STARTS = st.one_of(st.just(0), st.integers(0, 130), st.integers(0, 600))
SPAN = st.tuples(STARTS, st.one_of(st.just(1), st.integers(1, FEW)))
PARTS = st.one_of(
    SPAN,
    st.lists(st.integers(257, 380), min_size=2, max_size=7),
)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(PARTS, min_size=1, max_size=4), st.sampled_from([QWEN, SMOL]), st.integers(1, 12), st.integers(0, 2**30)
)
def test_any_step(emulator, parts, kind, slots, seed):
    blocks, rows = Blocks(300, seed), []
    for part in parts:
        if isinstance(part, tuple):
            rows += sequences([(part[0], sum(part))], blocks, kind.size)
        else:
            rows += forks(256, part, blocks, kind.size)
    case = Case(kind, rows, num_blocks=300, seed=seed)
    assert case.is_right(EmulatedPieceKernel(emulator, kind, case.dtype, slots, seed))


@settings(max_examples=12, deadline=None)
@given(
    st.lists(SPAN, min_size=1, max_size=5), st.sampled_from([QWEN, LLAMA, SMOL]), st.integers(1, 24),
    st.integers(0, 2**30),
)  # fmt: skip
def test_any_rows_alone(emulator, spans, kind, programs, seed):
    rows = sequences([(start, start + count) for start, count in spans], Blocks(300, seed), kind.size)
    case = Case(kind, rows, num_blocks=300, seed=seed, own_rows=1 + seed % kind.own_rows)
    assert case.is_right(EmulatedRowKernel(emulator, kind, case.dtype, programs, seed))


SEARCH = st.tuples(st.integers(1, 350), st.integers(1, 40), st.integers(1, 6))


@settings(max_examples=12, deadline=None)
@given(
    st.lists(SEARCH, min_size=1, max_size=3),
    st.sampled_from([QWEN, LLAMA]),
    st.integers(1, 132),
    st.integers(0, 2**30),
)
def test_any_beams(emulator, searches, kind, units, seed):
    blocks = Blocks(300, seed)
    rows = [beams(*search, blocks, kind.size) for search in searches]
    case = Case(kind, rows, num_blocks=300, seed=seed)
    assert case.is_right(EmulatedBeamKernel(emulator, kind, case.dtype, units=units, seed=seed))


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
        "products_wait<0>();\n    keep_order(weights);\n    float peak",
        "float peak",
        "a long one alone",
    ),
}


BEAM_FAULTS = {
    "copies over what is read": ("wait_for(here.empty + 8 * stage, (chunk / STAGES & 1) ^ 1)", "", "long beams"),
    "reads what has not come": ("wait_for(here.full + 8 * stage, chunk / STAGES & 1);", "", "long beams"),
    "mends what has not come": (
        "        wait_for(here.full + 8 * chunk, 0);\n        clear",
        "        clear",
        "long beams",
    ),
    "keys of rows that are not written yet": (
        "    wait_for_kernel_before();\n    mine.load",
        "    mine.load",
        "beams",
        132,
    ),
    "new keys that products may not see": (
        "    mine.put(view, here);\n    fence_products();",
        "    mine.put(view, here);",
        "beams",
        132,
    ),
    "sums over what others still look at": ("    wait_for_cluster();   // so nobody", "    //", "long beams"),
    "sums that are read before they have come": ("    wait_for_ranks(here.sent, 0);\n", "", "beams"),
    "a row sees what is another one's": (
        "if (view.row_of(box, line) != own_row[which]) return 0;",
        "",
        "beams",
    ),
    "nobody's values": ("        clear_nobodys(view, here, chunk);\n    }\n    wait", "    }\n    wait", "beams"),
}


ROW_FAULTS = {
    "reads what is not written yet": (
        "if (!has_waited) wait_for_kernel_before(), has_waited = true;", "", "some tokens of one", 2,
    ),
    "ends before its turn": ("    if (!has_waited) wait_for_kernel_before();\n}", "}", "a long one alone", 60),
    "norms and angles before they are there": (
        "        meet_warp();\n    }\n};\n\n// Norm and", "    }\n};\n\n// Norm and", "a beginning", 6,
    ),
    "sums that are heard before they are said": (
        "        meet_threads(name, count);\n        for (int other", "        for (int other", "a long one alone", 13,
    ),
    "sums that are put together before all are there": (
        "    meet_threads(name, count);\n    if (thread == 0) {", "    if (thread == 0) {", "one after each other", 6,
    ),
    "who is last is read before it is known": (
        "    meet_threads(name, count);\n    for (int at = 0; kept", "    for (int at = 0; kept",
        "one after each other", 2,
    ),
    "values of nobody": (
        "if (first + token(which) < piece.known && first + token(which) < piece.end)\n                load(",
        "if (true)\n                load(", "a long one alone", 2,
    ),
    "a row sees what comes after it": ("(its_end < end ? its_end : end)", "end", "some tokens of one", 2),
    "queries that are turned again": ("int which = are_fresh ? -1 : 0", "int which = -1", "a beginning", 2),
}  # fmt: skip


def whole(name):
    """With what it has in common with others."""
    source, header = ((driver.SOURCES / each).read_text() for each in (name, "attention.h"))
    return source.replace("#include <attention.h>", header.replace("#pragma once", ""))


@pytest.mark.parametrize("fault", BEAM_FAULTS)
def test_the_emulator_notices_in_beams(fault, emulator):
    line, instead, what, *units = BEAM_FAULTS[fault]
    source = whole("beams.cu")
    assert source.count(line) == 1
    case = Case(QWEN, rows_of(QWEN, what))
    kernel = EmulatedBeamKernel(emulator, QWEN, case.dtype, None, *(units or [4]), source=source.replace(line, instead))
    assert any(not case.is_right(kernel) for kernel.seed in range(12))


@pytest.mark.parametrize("fault", ROW_FAULTS)
def test_the_emulator_notices_in_rows_alone(fault, emulator):
    line, instead, what, programs = ROW_FAULTS[fault]
    source = whole("rows.cu")
    assert source.count(line) == 1
    case = Case(QWEN, rows_of(QWEN, what), own_rows=QWEN.own_rows)
    kernel = EmulatedRowKernel(emulator, QWEN, case.dtype, programs, source=source.replace(line, instead))
    assert any(not case.is_right(kernel) for kernel.seed in range(12))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_notices(fault, emulator):
    """A wait that is left out shows as a wrong number, or as an end that never comes."""
    line, instead, what, *slots = FAULTS[fault]
    source = whole("pieces.cu")
    assert source.count(line) == 1
    case = Case(QWEN, rows_of(QWEN, what))
    kernel = EmulatedPieceKernel(emulator, QWEN, case.dtype, *(slots or [2]), source=source.replace(line, instead))
    assert any(not case.is_right(kernel) for kernel.seed in range(8))


@pytest.mark.parametrize("kind", [QWEN, LLAMA, SMOL, Kind(16, 8, 128, 128, True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_they_compile_without_a_device(kind, dtype):
    """For an H100 or H200."""

    def compiled(name, stages, ranks):
        return driver.compile_cuda(name, "sm_90a", kind.macros(dtype) | {"STAGES": stages, "RANKS": ranks})

    assert compiled("pieces.cu", fused.piece_layout(kind).stages, 1).startswith(b"\x7fELF")
    assert compiled("rows.cu", 1, 1).startswith(b"\x7fELF")
    for ranks in fused.RANKS if kind.has_beams else ():
        assert compiled("beams.cu", fused.beam_layout(kind).stages, ranks).startswith(b"\x7fELF")


@pytest.mark.parametrize("dim", [64, 128])
def test_two_programs_fit_on_a_multiprocessor(dim):
    kind = Kind(8, 2, dim, 16, False)
    for layout in (fused.piece_layout(kind), fused.beam_layout(kind)):
        assert layout.stages >= 3 and layout.shared_bytes <= 113 * 1024


def test_how_many_rows_of_a_sequence_have_pieces_together():
    assert [Kind(heads, 2, 128, 16, False).own_rows for heads in (2, 4, 6, 8, 10, 16, 18)] == [8, 4, 2, 2, 1, 1, 0]


def test_many_items_have_few_programs_each_but_enough_for_what_is_new():
    kind, clusters = Kind(16, 8, 128, 16, True), {8: 30, 4: 66, 2: 132}
    assert [fused.ranks_of(kind, room, 4, clusters) for room in (1, 2, 4, 8, 16, 64)] == [8, 8, 4, 4, 2, 2]
    assert [fused.ranks_of(kind, room, 16, clusters) for room in (1, 2, 4, 8, 16, 64)] == [8, 8, 4, 4, 4, 4]


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
