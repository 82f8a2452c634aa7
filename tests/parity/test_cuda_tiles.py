"""Attention of prompts in C++, on a device: against double precision, and a whole engine on it."""

import pytest
import torch

from segue import SamplingParams
from segue.model.cuda.tiles import Kind, TileKernel
from tests.parity.test_cuda_fused import open_engine
from tests.tiles import LARGE, NARROW, SPANS, WIDE, Case

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="runs where a Hopper device is",
)
KINDS = [WIDE, NARROW, LARGE, Kind(2, 1, 64, 192), Kind(16, 8, 128, 16), Kind(32, 8, 128, 64)]
LONG = [[(0, 2900)], [(0, 705), (1000, 1300), (37, 1537)], [(2031, 3000), (64, 128), (0, 129), (5, 68)]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_see_what_came_before_them(kind, dtype):
    kernel = TileKernel(kind, dtype, torch.device("cuda"))
    for spans in [*SPANS.values(), *LONG]:
        case = Case(kind, spans, dtype=dtype, device="cuda", padding=(30, 3))
        for _ in range(3):
            assert case.is_right(kernel), spans


def test_any_length():
    kernel = TileKernel(WIDE, torch.bfloat16, torch.device("cuda"))
    for length in range(17, 300, 7):
        spans = [(start, start + length) for start in (0, length, 3 * length % 128)]
        assert Case(WIDE, spans, device="cuda", seed=length).is_right(kernel), length


def scores(engine):
    """Of prompts of all lengths, alone and together; each several times, so that recordings are replayed."""
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=1, ignore_eos=True)
    found = []
    for lengths in ([20], [64], [65], [128], [129], [500], [1500], [20, 100, 300], [700, 40, 18, 1100, 90]):
        for salt in range(3):
            prompts = [[1 + (at * at + length + salt) % 60 for at in range(length)] for length in lengths]
            results = engine.generate(prompts, params, detokenize=False)
            found += [result.completions[0].logprobs[0].chosen for result in results]
    engine.check()
    return found


def test_an_engine_says_what_it_says_in_single_precision():
    with open_engine("fp32") as wanted, open_engine("bf16") as ours:
        assert "attention for Hopper" in ours.backend_note
        assert scores(ours) == pytest.approx(scores(wanted), abs=0.1)


def test_the_same_again_and_again():
    """Recorded steps whose kernels begin early: no run differs from the one before."""
    kernel = TileKernel(WIDE, torch.bfloat16, torch.device("cuda"))
    case = Case(WIDE, [(0, 1500), (100, 1000)], device="cuda")
    first = case.run(kernel)
    assert all(torch.equal(case.run(kernel), first) for _ in range(20))
