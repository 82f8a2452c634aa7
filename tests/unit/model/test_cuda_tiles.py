"""Attention of prompts in C++, on an emulated device (`tests/cuda`), and that it compiles for a real one."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.model.cuda import driver, tiles
from segue.model.cuda.tiles import Kind
from segue.model.tiny import tiny_spec
from tests.emulator import EmulatedTileKernel, Emulator
from tests.tiles import LARGE, NARROW, SPANS, WIDE, Case


@pytest.fixture(scope="session")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory)


@pytest.mark.parametrize("what", SPANS)
def test_rows_see_what_came_before_them(what, emulator):
    """Whatever order threads and copies come in, and however many programs there are."""
    case = Case(WIDE, SPANS[what])
    kernel = EmulatedTileKernel(emulator, WIDE, case.dtype)
    for kernel.seed, kernel.programs in enumerate((1, 2, 3, 9)):
        assert case.is_right(kernel)


@pytest.mark.parametrize("kind", [NARROW, LARGE, Kind(2, 1, 64, 192)], ids=["narrow", "large blocks", "larger blocks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_models(kind, dtype, emulator):
    kernel = EmulatedTileKernel(emulator, kind, dtype, seed=1)
    for what in ("rows of which half see less", "two, and one after the other"):
        assert Case(kind, SPANS[what], dtype=dtype).is_right(kernel)


def test_tiles_that_are_none_and_rows_that_are_nobodys(emulator):
    """As a recorded step has them."""
    case = Case(NARROW, [(0, 150)], padding=(42, 2))
    assert case.is_right(EmulatedTileKernel(emulator, NARROW, case.dtype))


def test_a_step_without_tiles(emulator):
    case = Case(NARROW, [(0, 20)], padding=(3, 1))
    case.inputs = case.inputs._replace(tiles=case.inputs.tiles[:0])
    assert case.run(EmulatedTileKernel(emulator, NARROW, case.dtype)).isnan().all()


STARTS = st.one_of(st.just(0), st.integers(0, 130), st.integers(0, 600))
SOME = st.lists(st.tuples(STARTS, st.integers(17, 200)), min_size=1, max_size=3)


@settings(max_examples=8, deadline=None)
@given(SOME, st.sampled_from([WIDE, NARROW, LARGE]), st.integers(1, 7), st.integers(0, 2**30))
def test_any_step(emulator, some, kind, programs, seed):
    case = Case(kind, [(start, start + count) for start, count in some], padding=(seed % 3, seed % 2), seed=seed)
    assert case.is_right(EmulatedTileKernel(emulator, kind, case.dtype, programs, seed))


HALF, BOTH = "rows of which half see less", "two, and one after the other"
FAULTS = {
    "copies over what is read": ("ring.wait_until_empty(turn);", "", "a few after many"),
    "queries over what is read": ("here.queries.wait_until_empty(turn);", "", "several tiles"),
    "queries over lines that are not fenced": ("fence_products();  // the next", "// the next", "several tiles"),
    "keys that have not come": ("here.keys.wait(place.keys);\n    ask", "ask", "a tile"),
    "values that have not come": ("here.values.wait(place.values);\n    if", "if", "a few after many"),
    "queries that are not written yet": ("wait_for_kernel_before();\n        int", "int", "a tile"),
    "a count that is left": ("if (before == total - 1", "if (before == total", "a tile"),
    "values that are no numbers": ("mend(tile, here.values.tile(place.values));", ";", "from the middle"),
    "zeros that may not be seen": ("fence_products();\n    meet_threads(is", "meet_threads(is", "from the middle"),
    "zeros that others wait for": ("|| tile.num_seen(0) < tile.num_chunks;", ";", HALF),
    "zeros of two tiles": ("is_alone ? MET + my_group() : MENDED", "MENDED", BOTH),
    "what comes after it": ("if ((chunk + 1) * CHUNK - 1 >", "if ((chunk + 1) * CHUNK - 129 >", "several tiles"),
    "weights that are not there yet": ("products_wait<1>();", "", "several tiles"),
    "a turn that never comes": ("if (!sees_all) wait_for_turn(), end_turn();", "", HALF),
    "two turns at once": ("if (!sees_all) wait_for_turn(), end_turn();", "if (!sees_all) end_turn();", HALF),
    "chunks that one gives back twice": ("wait(turn);\n        meet_warp();", "wait(turn);", BOTH),
    "lines that others have yet to put there": ("meet_threads(MET + my_group(), GROUP);", "", "a tile"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_notices(fault, emulator):
    """A wait that is left out shows as a wrong number, or as an end that never comes."""
    line, instead, what = FAULTS[fault]
    source = (driver.SOURCES / "tiles.cu").read_text()
    assert source.count(line) == 1
    case = Case(WIDE, SPANS[what])
    kernel = EmulatedTileKernel(emulator, WIDE, case.dtype, 1, source=source.replace(line, instead))
    assert any(not case.is_right(kernel) for kernel.seed in range(8))


@pytest.mark.parametrize("kind", [WIDE, LARGE, Kind(32, 8, 64, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_compiles_without_a_device(kind, dtype):
    """For an H100 or H200."""
    assert driver.compile_cuda("tiles.cu", "sm_90a", kind.macros(dtype)).startswith(b"\x7fELF")


@pytest.mark.parametrize("dim", [64, 128])
def test_chunks_come_while_others_are_read(dim):
    kind = Kind(8, 2, dim, 16)
    assert kind.stages >= 2 and kind.shared_bytes <= 227 * 1024


def test_there_is_none_for_other_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    spec = replace(tiny_spec(), head_dim=64)
    for device in ("cuda", "cpu"):
        assert tiles.kernel_for(spec, 16, torch.bfloat16, torch.device(device)) is None
