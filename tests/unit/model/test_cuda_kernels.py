"""The kernels of the CUDA path, in Triton's interpreter: against the same in double precision, and a whole engine on them."""

from array import array
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

if torch.cuda.is_available():
    pytest.skip("where there is a device, tests/parity runs them there", allow_module_level=True)

from segue import BeamParams, Request, SamplingParams
from segue.base.config import EngineConfig, Environment
from segue.engine import EngineCore, Row, Sampling, SearchStep
from segue.model.cuda import attention, choosing, fused, inputs, kernels, sampling, search, steps, tiles
from segue.model.cuda import recording as recording_module
from segue.model.cuda.backend import CudaBackend
from segue.model.cuda.buffers import Buffers
from segue.model.cuda.choosing import PARTS, best_of_groups, best_tokens, legal_tokens, likeliest, log_totals
from segue.model.cuda.drawing import Cuts, draw
from segue.model.cuda.inputs import make_inputs
from segue.model.cuda.runner import CudaRunner
from segue.model.cuda.work import FIELDS, MOST_PIECES, WHOLE, Group, most_results, plan_work
from segue.model.decoder import Decoder
from segue.model.items import Catalogue
from segue.model.loading import open_model
from segue.model.runner import ModelRunner
from segue.model.sampler import sample
from segue.model.tiny import random_weights, tiny_spec
from segue.model.torch_backend import TorchBackend
from segue.model.weights import Weights
from tests.emulator import EmulatedBeamKernel, EmulatedPieceKernel, EmulatedRowKernel, EmulatedTileKernel, Emulator

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows that are nobody's may hold anything
SHAPES = [  # heads, kv heads, head_dim, block size, window, dtype
    (4, 2, 64, 16, None, torch.float16),
    (8, 2, 128, 16, 100, torch.float32),
    (6, 2, 64, 32, None, torch.float32),
]


def error(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


class Cache:
    def __init__(self, kv_heads, dim, size, dtype, num_blocks=60):
        self.k = torch.randn(num_blocks, kv_heads, size, dim).to(dtype)
        self.v = torch.randn(num_blocks, kv_heads, size, dim).to(dtype)
        self.size, self.num_blocks = size, num_blocks

    def attend(self, q, slots, window, scale):
        """Of one token, over what lies in these slots, in double precision."""
        blocks, offsets = slots // self.size, slots % self.size
        group = len(q) // self.k.shape[1]
        k, v = (x[blocks, :, offsets].double().repeat_interleave(group, 1) for x in (self.k, self.v))
        weights = torch.einsum("hd,chd->hc", q.double(), k) * scale
        if window is not None:
            weights[:, : max(len(slots) - window, 0)] = -torch.inf
        return torch.einsum("hc,chd->hd", weights.softmax(-1), v)

    def slots(self, table, context):
        at = torch.arange(context)
        return table[at // self.size].long() * self.size + at % self.size


def run_pieces(q, cache, tables, group_rows, work, contexts, window, scale, tails=None):
    sums = torch.full((work.num_results, *q.shape[1:]), torch.nan)
    logs = torch.full((work.num_results, q.shape[1], 2), torch.nan)
    out = torch.full_like(q, torch.nan)
    own, shared = (
        torch.from_numpy(np.ascontiguousarray(each)) if len(each) else None for each in (work.own, work.shared)
    )
    counts = torch.tensor([len(work.own), len(work.shared)], dtype=torch.int32)
    results, starts = torch.from_numpy(np.ascontiguousarray(work.results)), torch.from_numpy(work.starts)
    arrivals = torch.zeros(len(q), cache.k.shape[1], dtype=torch.int32)
    attention.attend_pieces(
        q, cache.k, cache.v, tables, own, shared, counts, contexts, sums, logs, starts, arrivals, out,
        scale=scale, window=window, group_rows=group_rows, programs=3, merges=shared is None,
    )  # fmt: skip
    assert not arrivals.any()
    if shared is None:
        return out
    attention.merge_pieces(q, cache.k, cache.v, sums, logs, results, starts, tails, out, scale=scale, window=window)
    return out


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "size", "window", "dtype"), SHAPES)
@pytest.mark.parametrize("shared", [0, 256])
def test_tokens_by_themselves_and_in_groups(heads, kv_heads, dim, size, window, dtype, shared):
    torch.manual_seed(1)
    cache, scale = Cache(kv_heads, dim, size, dtype), dim**-0.5
    contexts = [1, 17, 300, 520]
    tables = torch.stack([torch.randperm(cache.num_blocks)[:40] for _ in range(3)]).int()
    tables = torch.cat([tables, tables[2:]])
    q = torch.randn(5, heads, dim).to(dtype)  # the last one is padding
    begins = np.array([0, 0, shared, shared, 0], np.int32)
    ends = np.array([*contexts, 0], np.int32)
    groups = [Group(2, 2, 2, shared)] if shared else []
    work = plan_work(begins, ends, np.array([0, 1, 2, 3, 0], np.int32), groups, 2)
    out = run_pieces(q, cache, tables, 2, work, torch.from_numpy(ends), window, scale)
    for at, context in enumerate(contexts):
        wanted = cache.attend(q[at], cache.slots(tables[at], context), window, scale)
        assert error(out[at], wanted) < 2e-3
    assert out[4].isnan().all()  # nobody's


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_how_a_stretch_is_cut_can_be_fixed(mine, other):
    """Then it follows from its own length; otherwise the only one is cut into more pieces. It is whole in either case."""
    none = np.zeros(64, np.int32)
    groups = [Group(0, 32, 0, mine), Group(32, 32, 1, other)]

    def pieces(some, **options):
        shared = plan_work(none, none, none, some, **options).shared
        return [tuple(piece[3:5]) for piece in shared if piece[2] == 0]

    assert pieces(groups[:1], fixed=True) == pieces(groups, fixed=True) == pieces(groups)
    for cut in (pieces(groups), pieces(groups[:1])):
        assert [begin for begin, _ in cut] == [0, *(end for _, end in cut[:-1])] and cut[-1][1] == mine
    assert len(pieces(groups[:1])) >= len(pieces(groups))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "size", "window", "dtype"), [SHAPES[0], SHAPES[2], (4, 2, 64, 16, 5, torch.float32)]
)
def test_beams_see_what_they_share_and_their_own(heads, kv_heads, dim, size, window, dtype):
    torch.manual_seed(6)
    cache, scale, shared = Cache(kv_heads, dim, size, dtype), dim**-0.5, 300
    tables = torch.randperm(cache.num_blocks)[None, :40].int()
    q, none = torch.randn(5, heads, dim).to(dtype), np.zeros(5, np.int32)
    work = plan_work(none, none, none, [Group(0, 5, 0, shared)], 2)
    counts = torch.tensor([1, 3, 7, 0, 5], dtype=torch.int32)
    slots = torch.randperm(cache.num_blocks * size)[:40].view(5, 8).int()
    tails = (slots, counts)
    out = run_pieces(q, cache, tables, 2, work, shared + counts, window, scale, tails)
    for at, count in enumerate(counts.tolist()):
        seen = torch.cat([cache.slots(tables[0], shared), slots[at, :count].long()])
        assert error(out[at], cache.attend(q[at], seen, window, scale)) < 2e-3


def test_a_row_may_have_results_from_anywhere_and_more_than_are_read_at_once():
    torch.manual_seed(7)
    counts, heads, dim = [70, 1, 33, 0, 32], 2, 64
    sums, logs = torch.randn(sum(counts), heads, dim), torch.randn(sum(counts), heads, 2) * 3
    logs[..., 1].exp_()
    results = torch.randperm(sum(counts)).int()
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    out, cache = torch.full((5, heads, dim), torch.nan), Cache(heads, dim, 16, torch.float32, 1)
    attention.merge_pieces(out, cache.k, cache.v, sums, logs, results, starts, None, out, scale=1.0, window=None)
    for row, (first, last) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        which = results[first:last].long()
        gains = torch.exp2(logs[which, :, 0].double())
        wanted = (gains[..., None] * sums[which]).sum(0) / (gains * logs[which, :, 1]).sum(0)[:, None]
        assert error(out[row], wanted) < 1e-5 if first < last else out[row].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_products_of_any_number_of_rows(dtype):
    torch.manual_seed(8)
    x, weight, bias = torch.randn(70, 100).to(dtype), torch.randn(90, 100).to(dtype), torch.randn(90).to(dtype)
    wanted = x.double() @ weight.double().t() + bias.double()
    whole = kernels.product(x, weight, bias, torch.full((70, 90), torch.nan, dtype=dtype))
    assert error(whole, wanted) < 1e-3
    assert (
        error(kernels.product(x[:3], weight, None, torch.empty(3, 90, dtype=dtype)), wanted[:3] - bias.double()) < 1e-3
    )


def test_blocks_lie_together_on_their_way():
    kv = torch.randn(3, 2, 9, 2, 4, 16)
    staged = torch.full((2, 3 * 2 * 2 * 4 * 16), torch.nan)
    kernels.gather_blocks(kv, torch.tensor([7, 2], dtype=torch.int32), staged)
    assert torch.equal(staged.view(2, 3, 2, 2, 4, 16), kv[:, :, [7, 2]].movedim(2, 0))
    wanted = kv.clone()
    wanted[:, :, [1, 3]] = kv[:, :, [7, 2]]
    kernels.scatter_blocks(kv, torch.tensor([1, 3], dtype=torch.int32), staged)
    assert torch.equal(kv, wanted)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "size", "window", "dtype"), SHAPES)
def test_prompts_in_tiles(heads, kv_heads, dim, size, window, dtype):
    torch.manual_seed(2)
    cache, scale = Cache(kv_heads, dim, size, dtype), dim**-0.5
    tables = torch.stack([torch.randperm(cache.num_blocks)[:40] for _ in range(2)]).int()
    count, first = 150, 30
    q = torch.randn(count + 3, heads, dim).to(dtype)
    out = torch.full_like(q, torch.nan)
    tiles = [(3 + at, min(64, count - at), 1, first + at) for at in range(0, count, 64)]
    attention.attend_tiles(
        q, cache.k, cache.v, tables, torch.tensor([*tiles, (0, 3, 0, 0)], dtype=torch.int32),
        torch.tensor([len(tiles)], dtype=torch.int32), out, scale=scale, window=window, rows=64,
    )  # fmt: skip
    for at in range(0, count, 29):
        wanted = cache.attend(q[3 + at], cache.slots(tables[1], first + at + 1), window, scale)
        assert error(out[3 + at], wanted) < 2e-3
    assert out[:3].isnan().all()


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "size", "window", "dtype"), SHAPES)
def test_rotation_goes_to_the_cache(heads, kv_heads, dim, size, window, dtype, has_norm):
    torch.manual_seed(3)
    cache, count = Cache(kv_heads, dim, size, dtype), 5
    qkv = torch.randn(count, (heads + 2 * kv_heads) * dim).to(dtype)
    q = torch.empty(count, heads, dim, dtype=dtype)
    cos, sin = torch.randn(50, dim // 2), torch.randn(50, dim // 2)
    positions = torch.randint(0, 50, (count,)).int()
    slots = torch.randperm(cache.num_blocks * size)[:count].int()
    norms = (torch.rand(dim).to(dtype), torch.rand(dim).to(dtype)) if has_norm else None
    kernels.rope_store(qkv, q, cache.k, cache.v, norms, (cos, sin), positions, slots, 1e-6)

    def turned(x, weight):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double() if has_norm else x
        left, right = x.chunk(2, -1)
        c, s = (table[positions.long()].double()[:, None] for table in (cos, sin))
        return torch.cat([left * c - right * s, right * c + left * s], -1)

    given_heads = qkv.view(count, -1, dim).double()
    weights = norms or (None, None)
    blocks, offsets = slots.long() // size, slots.long() % size
    assert error(q, turned(given_heads[:, :heads], weights[0])) < 1e-3
    wanted = turned(given_heads[:, heads : heads + kv_heads], weights[1])
    assert error(cache.k[blocks, :, offsets], wanted) < 1e-3
    assert error(cache.v[blocks, :, offsets], given_heads[:, heads + kv_heads :]) < 1e-3


def test_norms_and_gates():
    torch.manual_seed(4)
    x, residual, weight = torch.randn(3, 96), torch.randn(3, 96), torch.rand(96)
    wanted = (x + residual).double()
    out = torch.empty_like(x)
    kernels.add_norm(x, residual, weight, 1e-5, out)
    assert error(residual, wanted) < 1e-6
    normed = wanted * torch.rsqrt(wanted.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert error(out, normed) < 1e-6
    pair, gated = torch.randn(3, 200), torch.empty(3, 100)
    kernels.gate(pair, gated)
    assert error(gated, torch.nn.functional.silu(pair[:, :100].double()) * pair[:, 100:].double()) < 1e-6


def test_the_likeliest_token_is_the_first_of_the_largest():
    logits = torch.randn(5, 1000)
    logits[1, 77] = logits[1, 800] = 50.0
    logits[2, 0] = 60.0
    logits[3, 999] = 60.0
    logits[4, 500] = torch.nan
    values, places = torch.empty(5, PARTS), torch.empty(5, PARTS, dtype=torch.int32)
    tokens = torch.empty(5, dtype=torch.int32)
    likeliest(logits, values, places, tokens)
    assert tokens.tolist() == [int(logits[0].argmax()), 77, 0, 999, -1]


@pytest.mark.parametrize("vocab", [130, 6000])
def test_the_best_of_a_vocabulary(vocab):
    torch.manual_seed(5)
    logits = torch.randn(4, vocab)
    logits[2] *= 100
    tokens, logprobs = best_tokens(logits, 7)
    wanted, order = logits.double().log_softmax(-1).topk(7, dim=-1)
    assert tokens.tolist() == order.tolist()
    assert torch.allclose(logprobs.double(), wanted, atol=1e-4)
    logits[1, 7] = torch.nan
    assert best_tokens(logits, 7)[1][1].isnan().any()
    few = torch.randint(-3, 3, (4, vocab)).float()  # many are equal: the first of them
    wanted = few.double().sort(dim=-1, descending=True, stable=True).indices[:, :7]
    assert best_tokens(few, 7)[0].tolist() == wanted.tolist()


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_the_best_of_each_group_come_in_order_and_of_equal_ones_the_first(data):
    groups, beams, count = (data.draw(st.integers(1, most)) for most in (3, 6, 40))
    width, has_scores = data.draw(st.integers(1, 40)), data.draw(st.booleans())
    randomly = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logprobs = -torch.randint(0, 9, (groups * beams, count), generator=randomly).float()  # of which many are equal
    logprobs[torch.rand(logprobs.shape, generator=randomly) < 0.2] = -torch.inf
    tokens, nodes = (torch.randint(0, 999, logprobs.shape, generator=randomly, dtype=torch.int32) for _ in range(2))
    scores = -torch.randint(0, 9, (groups, beams), generator=randomly).float()
    scores[torch.rand(scores.shape, generator=randomly) < 0.2] = -torch.inf
    chosen = torch.full((4, groups, width), 77, dtype=torch.int32)
    best_of_groups(logprobs, tokens, nodes, scores if has_scores else None, chosen)
    found = chosen[0].view(torch.float32)
    for group in range(groups):
        mine = slice(group * beams, (group + 1) * beams)
        totals = (logprobs[mine] + (scores[group][:, None] if has_scores else 0.0)).flatten()
        order = totals.sort(descending=True, stable=True).indices[:width]
        live = [at for at in order.tolist() if totals[at] > -torch.inf]
        assert found[group, : len(live)].tolist() == totals[live].tolist()
        assert (found[group, len(live) :] == -torch.inf).all()
        assert chosen[1, group, : len(live)].tolist() == [at // count for at in live]
        assert chosen[2, group, : len(live)].tolist() == tokens[mine].flatten()[live].tolist()
        assert chosen[3, group, : len(live)].tolist() == nodes[mine].flatten()[live].tolist()


@pytest.mark.parametrize("size", [3, 5000])
def test_more_than_one_program_sorts_is_sorted_otherwise(size, monkeypatch):
    torch.manual_seed(size)
    logits, scores = torch.randint(-30, 30, (6, size)).float(), torch.randn(2, 3)
    count = min(size, 9)
    logprobs, tokens = torch.randn(6, 50), torch.arange(300, dtype=torch.int32).view(6, 50)
    found = []
    for most in (choosing._MOST_SORTED, 1):
        monkeypatch.setattr(choosing, "_MOST_SORTED", most)
        chosen = torch.empty(4, 2, 200, dtype=torch.int32)
        best_of_groups(logprobs, tokens, None, scores, chosen)
        found.append((*best_tokens(logits, count), chosen[0].view(torch.float32), chosen[1:]))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one.double(), other.double(), atol=1e-5)


@pytest.mark.parametrize("of_all", [False, True])
def test_what_may_follow_beams_is_what_their_nodes_have(of_all):
    torch.manual_seed(3)
    logits, level = torch.randn(4, 3000), torch.randperm(3000)[:20].int()
    children, parents = torch.tensor([0, 3, 3, 9, 20], dtype=torch.int32), torch.tensor([2, 0, 3, 0], dtype=torch.int32)
    logprobs, tokens, nodes = legal_tokens(logits, level, children, parents, 11, of_all=of_all)
    for row, parent in enumerate(parents.tolist()):
        begin, end = children[parent], children[parent + 1]
        here = level[begin:end].long()
        total = logits[row].logsumexp(-1) if of_all else logits[row, here].logsumexp(-1)
        assert tokens[row, : end - begin].tolist() == here.tolist()
        assert nodes[row, : end - begin].tolist() == list(range(begin, end))
        assert torch.allclose(logprobs[row, : end - begin], logits[row, here] - total, atol=1e-5)
        assert (logprobs[row, end - begin :] == -torch.inf).all()
    first = legal_tokens(logits[:1], level, None, None, 20, of_all=of_all)
    assert first[1][0].tolist() == level.tolist()
    assert first[2][0].tolist() == list(range(20))


def test_blocks_are_copied_in_every_layer():
    kv = torch.randn(3, 2, 9, 2, 4, 16)
    wanted = kv.clone()
    wanted[:, :, [5, 8]] = wanted[:, :, [1, 2]]
    kernels.copy_blocks(kv, torch.tensor([[1, 5], [2, 8]], dtype=torch.int32))
    assert torch.equal(kv, wanted)
    wanted[:, :, 6] = wanted[:, :, 3]
    pairs, count = torch.tensor([[3, 6], [77, 99]], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    kernels.copy_blocks(kv, pairs, count)  # of which the first alone is one
    assert torch.equal(kv, wanted)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 5000), st.integers(1, inputs.FEW), st.sampled_from([16, 32]), st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 33]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_one_sequence_alone_is_planned_as_among_others(start, count, size, own_rows, few, is_sampled, is_last_known):
    stop = start + count
    sampling = Sampling(SamplingParams(), 0, 1, frozenset()) if is_sampled else None
    tokens, blocks = array("i", range(7, 6 + stop + is_last_known)), array("i", range(3, 3 + -(-stop // size)))
    row = Row(1, tokens, start, stop, blocks, sampling)
    for found, wanted in zip(
        make_inputs([row], size, 64, 128, own_rows=own_rows, few_pieces=few),
        inputs._of_many([row], size, 64, 128, own_rows, few, 0, alone=False),
        strict=True,
    ):
        assert found.tolist() == wanted.tolist()
        assert found.dtype == wanted.dtype


def few_tokens(name, start, count, first_block):
    """Of a sequence, which shares with those that begin with the same block."""
    return Row(
        name, array("i", range(start + count)), start, start + count, array("i", [first_block, *range(300)]), None
    )


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(1, inputs.FEW)), min_size=1, max_size=9), st.integers(1, 8))
def test_rows_of_a_sequence_that_have_pieces_together(spans, most):
    """Each row has a result of its own for each of its pieces, and these are all that it is to see; no piece has more rows
    than there may be, and no sequence more sets of rows than it must."""
    rows = [few_tokens(at, start, count, 2 + at) for at, (start, count) in enumerate(spans)]
    found = make_inputs(rows, 16, 64, 128, own_rows=most)
    stretches = [{} for _ in found.tokens]
    for first, count, table, begin, end, result, known in found.own.tolist():
        assert 1 <= count <= most and known == spans[table][0]
        others = found.starts[first + 1] - found.starts[first]
        for row in range(first, first + count):
            assert found.positions[row] - found.positions[first] == row - first
            assert (result + (row - first) * others) not in stretches[row]
            stretches[row][result + (row - first) * others] = begin, end
    for row, stretch in enumerate(stretches):
        assert sorted(stretch) == list(range(found.starts[row], found.starts[row + 1]))
        cuts = sorted(stretch.values())
        assert cuts[0][0] == 0 and all(one[1] == next_one[0] for one, next_one in pairwise(cuts))
        assert cuts[-1][1] >= found.contexts[row]
    sets = {(table, first) for first, _, table, *_ in found.own.tolist()}
    assert len(sets) == sum(-(-count // most) for _, count in spans)


SEQUENCE = st.tuples(st.integers(0, 900), st.integers(1, 40), st.booleans())


@given(st.lists(SEQUENCE, min_size=1, max_size=40), st.integers(1, 40))
def test_own_pieces_are_for_warps_where_they_are_many_or_have_several_rows(spans, few):
    """And then there is nothing else in the step that warps do not do."""
    rows = [few_tokens(at, start, count, shares or 2 + at) for at, (start, count, shares) in enumerate(spans)]
    found = make_inputs(rows, 16, 64, 128, own_rows=4, few_pieces=few)
    made = SimpleNamespace(_backend=SimpleNamespace(has_rows=True, few_pieces=few))
    has_several = bool((found.own[:, 1] > 1).any())
    is_alone = not (len(found.shared) or len(found.tiles))
    assert steps.CudaSteps._has_many(made, found) == (is_alone and (has_several or len(found.own) > few))
    assert is_alone or not has_several
    made._backend.has_rows = False
    assert not steps.CudaSteps._has_many(made, found)


@settings(max_examples=60, deadline=None)
@given(
    contexts=st.lists(st.integers(1, 40_000), min_size=1, max_size=12),
    groups=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3000)), max_size=3),
    most=st.integers(1, 4),
)
def test_work_covers_every_token_once(contexts, groups, most):
    """Each row's results come from pieces that together are its context, once; nobody else's row is in them."""
    made, begins, at = [], [0] * len(contexts), 0
    for count, shared in groups:
        count = min(count, len(contexts) - at)
        if count < 1:
            break
        shared = min(shared, *contexts[at : at + count])
        made.append(Group(at, count, at, shared))
        begins[at : at + count] = [shared] * count
        at += count
    ends = np.array(contexts, np.int32)
    work = plan_work(np.array(begins, np.int32), ends, np.arange(len(contexts), dtype=np.int32), made, most)
    of = {}
    for first, count, _, begin, end, result, _ in np.concatenate([work.own, work.shared]).reshape(-1, FIELDS).tolist():
        assert 1 <= count <= most
        for row in range(count):
            assert result + row not in of
            of[result + row] = (first + row, begin, end)
    assert sorted(of) == list(range(work.num_results)) and work.num_results <= most_results(len(contexts))
    for row, context in enumerate(contexts):
        pieces = sorted(of[at] for at in work.results[work.starts[row] : work.starts[row + 1]].tolist())
        assert all(each[0] == row for each in pieces)
        covered = [position for _, begin, end in pieces for position in (begin, end)]
        assert covered[0] == 0 and covered[-1] == context
        assert all(covered[at] == covered[at + 1] for at in range(1, len(covered) - 1, 2))
        assert len(pieces) <= 2 * MOST_PIECES and all(end - begin <= max(WHOLE, context) for _, begin, end in pieces)


class Again:
    """Stands in for a recorded step: done again with what is in its buffers then, and what comes of it is where it was before."""

    def __init__(self, run):
        self._run, self.step = run, run()
        self.num_replays = 0

    def replay(self):
        self.num_replays += 1
        for held, new in zip(self.step, self._run(), strict=True):
            for one, other in zip(held, new, strict=True) if isinstance(held, tuple) else [(held, new)]:
                if one is not None:
                    one.copy_(other)

    def pool(self):
        return None


def sorted_at_once(x, k):
    """In place of `tl.topk`, whose every comparison is a call in the interpreter."""
    count = getattr(k, "value", k)
    largest = np.sort(x.handle.data)[::-1][:count].copy()
    return tl.tensor(TensorHandle(largest, x.dtype), tl.block_type(x.dtype, [count]))


@pytest.fixture
def recording(monkeypatch):
    """Steps are recorded as on a device; all that was. What the kernels' own tests show takes less time here."""
    monkeypatch.setattr(choosing, "PARTS", 4)
    monkeypatch.setattr(tl, "topk", sorted_at_once)
    made = []

    def capture(run, pool):
        made.append(Again(run))
        return recording_module.Recorded(made[-1], made[-1].step)

    monkeypatch.setattr(recording_module, "capture", capture)
    monkeypatch.setattr(
        steps.CudaSteps, "records", property(lambda self: True, lambda self, value: None), raising=False
    )
    return made


def open_engine(backend_class, runner_class, max_step_tokens=64, **options):
    spec = replace(tiny_spec(), num_layers=2, windows=(None, None))  # the interpreter takes its time
    backend = backend_class(spec, torch.float32, torch.device("cpu"), 512, **options)
    config = EngineConfig(96, 16, max_step_tokens, min(16, max_step_tokens), 512)
    runner = runner_class(Decoder(spec, Weights.in_memory(random_weights(spec)), backend), backend, config)
    return EngineCore(runner, config, vocab_size=spec.vocab_size)


def test_an_engine_on_them_answers_as_on_torch(recording):
    """Prompts in chunks, decoding beside them, a prompt that two share, and a search: the same tokens. The first step of some
    kinds is launched, the others are replayed."""

    def answers(backend_class, runner_class):
        with open_engine(backend_class, runner_class) as engine:
            long = [7 + at % 90 for at in range(300)]
            params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
            engine.generate([long], params)  # from here on its blocks are shared
            prompts = [[5, 6, 7], [9 + at % 50 for at in range(40)], [*long, 3], [*long, 4]]
            found = [result.token_ids for result in engine.generate(prompts, params)]
            beam = BeamParams(width=4, max_tokens=3, ignore_eos=True)
            search = engine.generate(Request(prompts[1], beam=beam))[0]
            engine.check()
            return found, [(line.token_ids, pytest.approx(line.score, abs=1e-3)) for line in search.beams]

    assert answers(CudaBackend, CudaRunner) == answers(TorchBackend, ModelRunner)
    assert sum(each.num_replays for each in recording) > len(recording) > 3


# No whole number of equal tokens has exactly such a share as these: there, rounding would decide.
DRAWN = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=2.0, top_k=7),
    SamplingParams(temperature=0.7, top_p=0.9017),
    SamplingParams(temperature=1.5, top_k=30, top_p=0.7931, min_p=0.05),
    SamplingParams(temperature=1e-200, top_p=0.2969),
    SamplingParams(temperature=1.2, top_k=2, top_p=0.9017),  # so that parts have nothing among the best
    SamplingParams(temperature=3.0, top_k=1),
    SamplingParams(temperature=1.0, top_k=9999, min_p=0.3),
]


def drawing_row(params, seed, stop):
    return Row(0, array("i"), stop - 1, stop, array("i"), Sampling(params, seed, 1, frozenset()))


def drawn(logits, rows, parts=4, cuts=None):
    """With fewer parts than a device has, since the interpreter takes its time."""
    count = len(rows)
    told, found = sampling.table(rows, logits.shape[1])
    tops, places = torch.empty(count, parts), torch.empty(count, parts, dtype=torch.int32)
    tokens = torch.full((count,), -7, dtype=torch.int32)
    likeliest(logits, tops, places, tokens)
    draw(logits, tops, places, torch.from_numpy(told), tokens, cuts or found)
    return tokens.tolist()


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_what_is_drawn_is_what_the_sampler_draws(data):
    """Also where many logits are equal, as in half precision, and in whatever precision they are given."""
    randomly = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    logits = torch.randn(3, data.draw(st.sampled_from([5, 97, 700])), generator=randomly)
    logits = (logits * data.draw(st.sampled_from([0.1, 3.0, 20.0]))).to(dtype)
    if data.draw(st.booleans()):
        logits = logits.round()
    rows = [
        drawing_row(data.draw(st.sampled_from(DRAWN)), data.draw(st.integers(0, 2**62)), data.draw(st.integers(1, 999)))
        for _ in range(3)
    ]
    wanted = sample(logits.float(), rows).tokens
    assert drawn(logits, rows) == wanted
    assert drawn(logits[1:2], rows[1:2], parts=8) == wanted[1:2], "alone, and divided otherwise"


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_out_of_few_tokens_is_drawn_what_is_drawn_out_of_all(data):
    """Where top-k leaves few they are found first, which is another way to the same tokens: equal logits, what weighs nothing
    and denied tokens included."""
    randomly = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    logits = torch.randn(4, data.draw(st.sampled_from([70, 301])), generator=randomly)
    logits = (logits * data.draw(st.sampled_from([0.1, 3.0, 40.0]))).to(dtype)
    if data.draw(st.booleans()):
        logits = logits.round()
    if data.draw(st.booleans()):
        logits[:, 5:] = -torch.inf
    share, some = st.floats(2**-10, 1.0, width=32), st.integers(1, 64)
    options = st.builds(
        SamplingParams,
        temperature=st.floats(0.0625, 5.0, width=32),
        top_k=some,
        top_p=share,
        min_p=st.just(0.0) | share,
    )
    rows = [drawing_row(data.draw(options), at, 1 + at) for at in range(3)] + [drawing_row(DRAWN[0], 0, 1)]
    told, cuts = sampling.table(rows, logits.shape[1])
    assert cuts.most == (32 if told[:3, 3].max() <= 32 else 64)
    assert drawn(logits, rows) == drawn(logits, rows, cuts=Cuts(True))


def test_what_a_step_cuts_off():
    """Rows that draw nothing do not count; one that may draw anything does."""

    def cuts(*options):
        return sampling.table([drawing_row(SamplingParams(**each), 0, 1) for each in options], 1000)[1]

    greedy, free, few, more = {"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 20}, {"top_k": 50, "top_p": 0.9}
    assert cuts(greedy) == cuts(free) == cuts({"top_k": 1000}) == Cuts(False)
    assert cuts(few) == cuts(few, greedy) == Cuts(True, 32)
    assert cuts(few, more) == Cuts(True, 64)
    assert cuts(few, free) == cuts(few, {"top_k": 65}) == cuts({"top_p": 0.5}) == Cuts(True)


def test_numbers_that_are_none_are_told_and_nobody_else_suffers():
    logits = torch.randn(3, 50)
    logits[1, 7] = torch.nan
    rows = [drawing_row(params, 5, 9) for params in (DRAWN[4], DRAWN[4], DRAWN[0])]
    found = drawn(logits, rows)
    assert found[1] == -1
    assert [found[0], found[2]] == sample(logits[[0, 2]], [rows[0], rows[2]]).tokens


def engine_on(spec, **kernels_for_hopper):
    """In half precision, with kernels on an emulated device."""
    backend = CudaBackend(spec, torch.float16, torch.device("cpu"), 512, **kernels_for_hopper)
    config = EngineConfig(96, 16, 320, 16, 512)
    weights = Weights.in_memory(random_weights(spec))
    return EngineCore(CudaRunner(Decoder(spec, weights, backend), backend, config), config, vocab_size=spec.vocab_size)


def test_an_engine_with_attention_in_one_kernel_answers_as_with_others(recording, tmp_path_factory):
    """The kernels on an emulated device: tokens by themselves, some at once, forks of a long prompt, and searches."""
    spec = replace(tiny_spec(), num_layers=1, windows=(None,), head_dim=64, qk_norm=True)
    emulator, kind = Emulator(tmp_path_factory), fused.kind_of(spec, 16)
    emulated = EmulatedPieceKernel, EmulatedRowKernel, EmulatedBeamKernel
    kernels_there = [kernel(emulator, kind, torch.float16) for kernel in emulated]

    def answers(fused_kernels):
        with engine_on(spec, fused=fused_kernels) as engine:
            params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=1)
            state = engine.generate([[7 + at % 90 for at in range(270)]], params, hold=True)[0].request_id
            forks = [Request(params=params, parent=state, suffix=[at, 5]) for at in (20, 30)]
            beam = BeamParams(width=5, max_tokens=3, ignore_eos=True)
            found = engine.generate([*forks, Request(params=params, parent=state, suffix=list(range(50, 56)))])
            search = engine.generate(Request(beam=beam, parent=state, suffix=[9]))[0]
            engine.check()
            scores = [each.chosen for result in found for each in result.completions[0].logprobs]
            return scores + [line.score for line in search.beams]

    wanted = answers(None)
    assert answers(fused.Fused(*kernels_there)) == pytest.approx(wanted, abs=0.03)
    assert all(kernel.num_runs > 2 for kernel in kernels_there)


def test_an_engine_whose_prompts_are_in_tiles_of_another_kernel_answers_as_with_triton(recording, tmp_path_factory):
    """The kernel on an emulated device: prompts in one piece and in chunks, by themselves and beside each other."""
    spec = replace(tiny_spec(), num_layers=1, windows=(None,), head_dim=64, qk_norm=True)
    kernel = EmulatedTileKernel(Emulator(tmp_path_factory), tiles.kind_of(spec, 16), torch.float16)

    def answers(tile_kernel):
        with engine_on(spec, tile_kernel=tile_kernel) as engine:
            params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, logprobs=1)
            prompts = [[7 + at * at % 90 for at in range(length)] for length in (20, 70, 300)]
            found = engine.generate(prompts, params)
            engine.check()
            return [each.chosen for result in found for each in result.completions[0].logprobs]

    wanted = answers(None)
    assert not kernel.num_runs
    assert answers(kernel) == pytest.approx(wanted, abs=0.03)
    assert kernel.num_runs > 1


class Now:
    """Stands in for an event of a device that does everything at once."""

    def record(self):
        pass

    def synchronize(self):
        pass


class AheadRunner(CudaRunner):
    """Lets steps begin before the tokens of the last one are known, as on a device."""

    def __init__(self, decoder, backend, config):
        super().__init__(decoder, backend, config)
        self._steps._done = [Now(), Now()]
        self._moves = self
        self.num_ahead = self.num_refused = 0

    def step_ended(self):
        pass

    def launch(self, plan, after):
        ticket = super().launch(plan, after)
        self.num_ahead += after is not None
        self.num_refused += ticket is None
        return ticket


def test_an_engine_draws_on_the_device_what_the_sampler_draws(recording):
    """Beside greedy ones, and ahead of tokens that only the device knows; those whose logits are changed first, after all."""
    prompts = [[5, 6, 7], [9 + at % 50 for at in range(20)], [3, 4]]
    params = [
        SamplingParams(max_tokens=6, temperature=0.9, top_k=20, top_p=0.95, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=4, temperature=1.2, seed=2, ignore_eos=True),
        SamplingParams(max_tokens=5, temperature=0, ignore_eos=True),
    ]
    changed = SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9, seed=3, repetition_penalty=1.2, ignore_eos=True)

    def answers(backend_class, runner_class):
        with open_engine(backend_class, runner_class) as engine:
            found = [result.token_ids for result in engine.generate(prompts, params)]
            found += [result.token_ids for result in engine.generate(prompts[:2], [params[0], changed])]
            engine.check()
            return found, engine

    found, engine = answers(CudaBackend, AheadRunner)
    assert found == answers(TorchBackend, ModelRunner)[0]
    assert engine._executor.num_ahead >= 4 and engine._executor.num_refused > 0
    assert sum(each.num_replays for each in recording if len(each.step) == 1) >= 5, "recorded drawings"


def test_searches_are_carried_to_their_ends(recording):
    """Of several kinds and sizes at once, in a single step: the same lines as pass by pass."""
    randomly = np.random.default_rng(0)
    items = {f"item {at}": tuple(map(int, randomly.integers(3, 60, 3))) for at in range(400)}
    catalogue, few = Catalogue(items), Catalogue({name: items[name] for name in list(items)[:3]})
    uneven = Catalogue({"a": (5,), "b": (7, 9), "c": (7, 11, 12)})
    denied = tuple(name for name in items if items[name][0] < 20)
    kinds = [
        BeamParams(width=4, max_tokens=3, ignore_eos=True),
        BeamParams(width=4, max_tokens=3, ignore_eos=True, length_penalty=0.0),
        BeamParams(width=5, catalogue=catalogue, deny=denied),
        BeamParams(width=5, catalogue=catalogue, scoring="legal"),
        BeamParams(width=8, catalogue=few),  # more beams than there are lines
    ]
    early = BeamParams(width=4, catalogue=uneven)  # lines may end after each pass

    def lines(engine, params):
        requests = [Request([9 + at % 50 for at in range(4 + number)], beam=beam) for number, beam in enumerate(params)]
        before = engine.stats().num_steps
        found = engine.generate(requests)
        engine.check()
        assert engine.stats().kv_usage == 0
        said = [[(beam.token_ids, beam.items, beam.finish_reason, beam.score) for beam in each.beams] for each in found]
        return said, engine.stats().num_steps - before

    def same(found, wanted):
        for ours, theirs in zip(found, wanted, strict=True):
            assert [line[:3] for line in ours] == [line[:3] for line in theirs]
            assert [line[3] for line in ours] == pytest.approx([line[3] for line in theirs], abs=1e-3)

    with open_engine(CudaBackend, CudaRunner) as engine, open_engine(TorchBackend, ModelRunner) as torch_engine:
        for params, expected in ((kinds, 1), ([early, *kinds[:1]], 3)):
            found, num_steps = lines(engine, params)
            same(found, lines(torch_engine, params)[0])
            assert num_steps == expected
    assert sum(each.num_replays for each in recording) > 5


@pytest.fixture
def rows_apart(monkeypatch):
    """The interpreter's products are numpy's. On some processors a row's bits depend there on which row of its tile it is; on a
    device they do not."""

    def one_order(a, b, dtype):
        return (a.astype(dtype)[:, :, None] * b.astype(dtype)[None]).sum(1)

    monkeypatch.setattr(np, "matmul", one_order)


def test_an_exact_engine_gives_the_same_bits_whatever_comes_together(recording, rows_apart):
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=2)
    prompts = [[5, 6, 7], [9 + at % 50 for at in range(18)], [9 + at % 50 for at in range(19)]]

    def told(results):
        return [(each.token_ids, each.completions[0].logprobs) for each in results]

    with open_engine(CudaBackend, CudaRunner, exact=True) as engine:
        wanted = [told(engine.generate([prompt], params))[0] for prompt in prompts]
    with open_engine(CudaBackend, CudaRunner, max_step_tokens=11, exact=True) as engine:
        assert told(engine.generate(prompts, params)) == wanted
        assert told(engine.generate(prompts[::-1], params)) == wanted[::-1]
    with open_engine(TorchBackend, ModelRunner) as engine:
        assert [tokens for tokens, _ in told(engine.generate(prompts, params))] == [tokens for tokens, _ in wanted]


@pytest.mark.parametrize(("exact", "few_pieces"), [(False, None), (False, 33), (False, 3), (True, None)])
def test_the_usual_steps_are_recorded_beforehand(exact, few_pieces, monkeypatch):
    """Prompts, sequences that decode, and both together, of any size: none of them has to be recorded while somebody waits."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    loaded = open_model("tiny", Environment.read().cache_dir)
    backend = CudaBackend(loaded.spec, torch.float32, torch.device("cpu"), 512, exact=exact)
    backend.has_rows, backend.few_pieces = few_pieces is not None, few_pieces or 1
    made = steps.CudaSteps(
        Decoder(loaded.spec, loaded.weights, backend), backend, torch.empty(4, 2, 9, 2, 16, 32), 64, 32, 300
    )
    usual = set()
    monkeypatch.setattr(made, "_record", usual.add)
    made.warm_up()
    sampling = Sampling(SamplingParams(temperature=0), 0, 1, frozenset())
    tokens = array("i", bytes(4 * 512))

    def blocks(at):
        return array("i", [at + 1, *[0] * 31])  # nobody shares his first one

    randomly = np.random.default_rng(0)
    for number in range(200):
        starts = randomly.integers(1, [500, 200][number % 2], randomly.integers(0, 60)).tolist()
        rows = [Row(at, tokens, start, start + 1, blocks(at), sampling) for at, start in enumerate(starts)]
        if not rows or (number % 3 and not exact):
            count = int(randomly.integers(17, 230))
            rows.append(Row(99, tokens, 0, count, blocks(99), sampling))
        assert made._kind_of(made._inputs(rows)) in usual
        made.records = True
        assert made._kind(made._inputs(rows), (), needs_head=True) is not None


@torch.inference_mode()
def test_a_kind_is_recorded_when_it_comes_the_second_time(recording):
    """That its launch was refused is not the first."""
    with open_engine(CudaBackend, CudaRunner) as engine:
        made = engine._executor._steps
        sampling, tokens = Sampling(SamplingParams(temperature=0), 0, 1, frozenset()), array("i", bytes(4 * 64))
        rows = [Row(at, tokens, 0, 17, array("i", [1 + 2 * at, 2 + 2 * at]), sampling) for at in range(2)]
        assert made.launch(rows, (), None) is None
        made.run(rows, needs_head=True)
        assert not recording
        made.run(rows, needs_head=True)
        assert len(recording) == 1


@torch.inference_mode()
def test_before_a_kind_is_recorded_one_with_more_rows_stands_in(recording, monkeypatch):
    monkeypatch.setattr(steps, "SIZES", (16, 20, 24, 64))
    with small_engine(CudaBackend, CudaRunner) as engine:
        made = engine._executor._steps
        sampling, tokens = Sampling(SamplingParams(temperature=0), 0, 1, frozenset()), array("i", range(5, 37))

        def run(count):
            row = Row(0, tokens, 0, count, array("i", [1, 2]), sampling)
            return made.run([row], needs_head=True).hidden.clone()

        wanted = run(18)
        run(23)
        run(23)
        made._seen.clear()
        assert [kind.rows for kind in made._recorded] == [24]
        assert torch.allclose(run(18), wanted, atol=1e-4)
        assert len(recording) == 1 and recording[0].num_replays == 2
        assert torch.allclose(run(18), wanted, atol=1e-4)
        assert [kind.rows for kind in made._recorded] == [24, 20], "its own, from the second time on"


@torch.inference_mode()
def test_a_step_that_there_is_no_memory_to_record_is_done_without(recording, monkeypatch):
    def capture(run, pool):
        raise torch.OutOfMemoryError("all is taken")

    with open_engine(CudaBackend, CudaRunner) as engine:
        made = engine._executor._steps
        sampling, tokens = Sampling(SamplingParams(temperature=0), 0, 1, frozenset()), array("i", [5, 6, 7])
        rows = [Row(0, tokens, 0, 3, array("i", [1]), sampling)]
        wanted = made.run(rows, needs_head=True)
        made._recorded.clear()
        monkeypatch.setattr(recording_module, "capture", capture)
        assert made.launch(rows, (), None) is None
        assert torch.allclose(made.run(rows, needs_head=True).hidden, wanted.hidden, atol=1e-4)


def small_engine(backend_class, runner_class, max_len=32, **changes):
    spec = replace(tiny_spec(), num_layers=1, windows=(None,), **changes)
    backend = backend_class(spec, torch.float32, torch.device("cpu"), max_len)
    config = EngineConfig(96, 16, 64, 16, max_len)
    runner = runner_class(Decoder(spec, Weights.in_memory(random_weights(spec)), backend), backend, config)
    return EngineCore(runner, config, vocab_size=spec.vocab_size)


def test_beams_that_together_are_longer_than_a_sequence_may_be(recording):
    beam = BeamParams(width=9, max_tokens=3, ignore_eos=True)
    with small_engine(CudaBackend, CudaRunner) as engine, small_engine(TorchBackend, ModelRunner) as wanted:
        engine.generate([[9 + at % 50 for at in range(26)]], SamplingParams(max_tokens=1, temperature=0))
        request = Request([9 + at % 50 for at in range(27)], beam=beam)
        ours, theirs = (each.generate(request)[0].beams for each in (engine, wanted))
        assert [line.token_ids for line in ours] == [line.token_ids for line in theirs]


def test_a_step_that_does_not_fit_its_buffer_takes_it_from_nobody():
    buffers = Buffers(4, 4, 4, 4, 2, torch.device("cpu"))
    row = Row(0, array("i", [1]), 0, 1, array("i", [1]), None)
    fits = make_inputs([row], 16, 4, 64)
    too_wide = fits._replace(tables=np.zeros((1, 3), np.int32))
    assert buffers.holds(fits, ()) and not buffers.holds(too_wide, ())
    for _ in range(3):
        with pytest.raises(ValueError, match="broadcast"):
            buffers.fill(too_wide, (), 4)
    buffers.fill(fits, (), 4)
    assert buffers.read.tokens.tolist() == [1, 0, 0, 0]


def test_more_candidates_than_there_are_tokens(recording):
    beam = BeamParams(width=8, max_tokens=3, stop_token_ids=[2])
    found = []
    for backend_class, runner_class in ((TorchBackend, ModelRunner), (CudaBackend, CudaRunner)):
        with small_engine(backend_class, runner_class, vocab_size=12, eos_ids=(2,)) as engine:
            found.append([line.token_ids for line in engine.generate(Request([1, 3, 4, 5], beam=beam))[0].beams])
    assert found[0] == found[1]


def test_an_exact_search_is_computed_in_one_way_whoever_is_beside_it():
    """Wider ones in the same step, and ones that may not have everything."""

    def begun(beam, depth=1):
        walk = beam.catalogue.restricted(None, beam.deny) if beam.catalogue else None
        tails = [[40 + at] for at in range(beam.width)] if depth else []
        scores = [0.0] * max(len(tails), 1)
        step = SearchStep(8, tails, scores, [0] * len(scores), depth, 40, beam, 0, walk, 1 if depth else 2)
        return Row(
            beam.width, array("i", range(len(scores))), 40, 40 + len(scores), array("i", range(1, 9)), None, step
        )

    narrow, wide = BeamParams(width=2, max_tokens=2), BeamParams(width=40, max_tokens=2)
    with open_engine(CudaBackend, CudaRunner, exact=True) as engine:
        made = engine._executor._steps
        alone, beside = (made._inputs(rows) for rows in ([begun(narrow)], [begun(narrow), begun(wide)]))
        assert made._group_rows(alone) == made._group_rows(beside) == made.group_rows
    items = Catalogue({f"item {at}": (3 + at % 7, 20 + at % 11) for at in range(77)})
    free, limited = BeamParams(width=3, catalogue=items), BeamParams(width=3, catalogue=items, deny=("item 1",))
    assert search._kind(begun(free, 0)) != search._kind(begun(limited, 0))


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 99), st.integers(50, 5000))
def test_log_totals_have_one_value(seed, vocab):
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed)).bfloat16()
    values, total = best_tokens(logits, 1)[1], log_totals(logits)
    assert torch.equal(values[:, 0], logits.float().amax(-1) - total)
    assert torch.allclose(total, logits.float().logsumexp(-1), atol=1e-4)
