"""The CPU kernels against plain references, and the promise that a row never depends on its batch."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from segue.model.native import Kernels, NativeUnavailable, load
from segue.model.native import build as native_build

STORAGES = ("fp32", "bf16", "int8")


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@pytest.fixture(scope="session")
def kernels(cache_dir: Path) -> Kernels:
    try:
        return load(cache_dir)
    except NativeUnavailable as error:
        pytest.skip(error.reason)


@pytest.fixture
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bits(tensor: Tensor) -> Tensor:
    """Compares NaN and signed zero too."""
    return tensor.contiguous().view(torch.int32)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(kernels: Kernels, x: Tensor, weight, bias: Tensor | None = None) -> Tensor:
    return kernels.linear(x.contiguous(), weight, bias, torch.full((len(x), weight.shape[0]), float("nan")))


# ---- products


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(0, 90),
    k=st.integers(1, 700),
    n=st.integers(1, 130),
    storage=st.sampled_from(STORAGES),
    biased=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_linear_is_the_product_of_the_stored_rows(kernels, m, k, n, storage, biased, seed):
    x, bias = normal(seed, m, k), normal(seed + 1, n) if biased else None
    weight = kernels.pack(normal(seed + 2, n, k), storage)
    stored = weight.rows(torch.arange(n)).double()
    expected = x.double() @ stored.T + (bias.double() if biased else 0)
    # A chain of k roundings errs by at most k/2 ulp of the sum of magnitudes; random signs keep it far below.
    bound = (k + 1) * 2**-24 * (x.double().abs() @ stored.abs().T + (bias.double().abs() if biased else 0)) + 1e-30
    assert bool(((linear(kernels, x, weight, bias) - expected).abs() <= bound).all())


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("k", [1, 31, 33, 576])
def test_packing_rounds_as_the_storage_says(kernels, storage, k):
    weight = normal(3, 50, k)
    packed = kernels.pack(weight, storage)
    rows = packed.rows(torch.tensor([49, 0, 17]))
    original = weight[[49, 0, 17]]
    if storage == "fp32":
        assert same(rows, original)
    elif storage == "bf16":
        assert same(rows, original.bfloat16().float())
    else:
        for group in range(0, k, 32):
            part = original[:, group : group + 32]
            step = part.abs().amax(1, keepdim=True) / 127
            assert bool(((rows[:, group : group + 32] - part).abs() <= step * 0.5001).all())
    assert packed.shape == (50, k)
    assert packed.storage == storage


def test_packing_takes_any_float_type_and_more_rows_than_one_conversion(kernels):
    weight = normal(4, 5000, 8).bfloat16()
    ids = torch.tensor([0, 4095, 4096, 4999])
    for storage in ("fp32", "bf16"):
        assert same(kernels.pack(weight, storage).rows(ids), weight[ids].float())
    assert same(kernels.pack(weight.double(), "fp32").rows(ids), weight[ids].float())


def q8_weight(rows):
    codes = torch.randint(-126, 127, (rows, 64), generator=torch.Generator().manual_seed(5)).float()
    codes[:, ::32] = 127
    scales = (torch.rand(rows, 2, generator=torch.Generator().manual_seed(6)) * 0.01 + 0.001).half().float()
    return (codes.view(rows, 2, 32) * scales[..., None]).view(rows, 64)


def test_what_came_as_q8_is_packed_into_a_quarter_and_multiplies_to_the_same_bits(kernels):
    weight, x = q8_weight(5000), normal(7, 9, 64)
    packed, wide = kernels.pack_exactly(weight), kernels.pack(weight, "fp32")
    assert packed.storage == "int8" and packed.nbytes < 0.3 * wide.nbytes
    assert same(packed.rows(torch.arange(5000)), weight)
    for rows in (1, 3, 9):
        assert same(linear(kernels, x[:rows], packed), linear(kernels, x[:rows], wide))


@pytest.mark.parametrize("row", [0, 4095, 4999])
def test_a_single_value_that_eight_bits_do_not_hold_keeps_all_of_them_wide(kernels, row):
    weight = q8_weight(5000)
    weight[row, 40] *= 1 + 2**-23
    packed = kernels.pack_exactly(weight)
    assert packed.storage == "fp32" and same(packed.rows(torch.arange(5000)), weight)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("k", "n"), [(576, 100), (1000, 33), (37, 16)])
def test_a_row_of_a_product_does_not_depend_on_its_batch(kernels, storage, k, n):
    x, bias = normal(6, 211, k), normal(7, n)
    weight = kernels.pack(normal(8, n, k), storage)
    whole = linear(kernels, x, weight, bias)
    for first, last in [(0, 1), (5, 6), (0, 2), (3, 10), (0, 37), (30, 95), (210, 211)]:
        assert same(whole[first:last], linear(kernels, x[first:last], weight, bias))
    assert same(whole, torch.cat([linear(kernels, x[i : i + 1], weight, bias) for i in range(211)]))


@pytest.mark.parametrize("storage", STORAGES)
def test_threads_do_not_change_a_product(kernels, storage, restore_threads):
    weight = kernels.pack(normal(9, 300, 400), storage)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append([linear(kernels, normal(10, m, 400), weight) for m in (1, 8, 150)])
    for other in results[1:]:
        assert all(itertools.starmap(same, zip(results[0], other, strict=True)))


def test_a_product_keeps_nan_and_infinity(kernels):
    x = torch.ones(3, 40)
    x[1, 7], x[2, 9] = float("nan"), float("inf")
    out = linear(kernels, x, kernels.pack(torch.ones(20, 40), "fp32"))
    assert bool((out[0] == 40).all() and out[1].isnan().all() and (out[2] == float("inf")).all())


def test_wrong_shapes_and_types_are_refused(kernels):
    weight = kernels.pack(normal(1, 8, 4), "fp32")
    good, out = torch.zeros(2, 4), torch.zeros(2, 8)
    for x in (torch.zeros(2, 5), torch.zeros(2, 4).double(), torch.zeros(4, 2).T):
        with pytest.raises(ValueError, match="x must be"):
            kernels.linear(x, weight, None, out)
    with pytest.raises(ValueError, match="bias must be"):
        kernels.linear(good, weight, torch.zeros(4), out)
    with pytest.raises(ValueError, match="row ids"):
        weight.rows(torch.tensor([8]))
    with pytest.raises(ValueError, match="matrix of floats"):
        kernels.pack(torch.zeros(3, 3, dtype=torch.int64), "fp32")


# ---- rows


def norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize(("m", "size"), [(1, 7), (3, 576), (150, 577)])
def test_norms(kernels, m, size):
    x, residual, weight = normal(1, m, size), normal(2, m, size), normal(3, size)
    out = kernels.rms_norm(x, weight, 1e-5, torch.empty(m, size))
    torch.testing.assert_close(out.double(), norm_reference(x, weight, 1e-5), rtol=1e-6, atol=1e-6)
    total = residual + x
    fused = kernels.add_rms_norm(residual, x, weight, 1e-5, torch.empty(m, size))
    assert same(residual, total)
    assert same(fused, kernels.rms_norm(total, weight, 1e-5, torch.empty(m, size)))
    alone = kernels.rms_norm(x[:1].clone(), weight, 1e-5, torch.empty(1, size))
    assert same(alone, out[:1])


@pytest.mark.parametrize("storage", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(("m", "size", "k"), [(1, 5, 3), (2, 1536, 64), (5, 40, 33), (60, 1537, 40), (130, 48, 1600)])
def test_gated(kernels, m, size, k, storage):
    """The products are those of `linear`, to the bit, so only the activation has a tolerance."""
    x, gate, up = normal(4, m, k), normal(5, size, k), normal(6, size, k)
    packed = kernels.pack_gated(gate, up, storage)
    out = kernels.gated(x, packed, torch.full((m, size), torch.nan))
    gates, ups = (
        kernels.linear(x, kernels.pack(side, storage), None, torch.empty(m, size)).double() for side in (gate, up)
    )
    torch.testing.assert_close(out.double(), torch.nn.functional.silu(gates) * ups, rtol=1e-6, atol=1e-7)
    assert same(kernels.gated(x[-1:].clone(), packed, torch.empty(1, size)), out[-1:])


def test_a_gated_weight_is_for_gated_alone(kernels):
    weight, pair = kernels.pack(normal(1, 4, 3), "fp32"), kernels.pack_gated(normal(1, 4, 3), normal(2, 4, 3), "fp32")
    x, out = normal(3, 2, 3), torch.empty(2, 4)
    with pytest.raises(ValueError, match="gated"):
        kernels.linear(x, pair, None, out)
    with pytest.raises(ValueError, match="gated"):
        kernels.gated(x, weight, out)
    with pytest.raises(ValueError, match="gated"):
        pair.rows(torch.tensor([0]))
    with pytest.raises(ValueError, match="one shape"):
        kernels.pack_gated(normal(1, 4, 3), normal(1, 5, 3), "fp32")


def test_silu_at_the_ends_of_the_range(kernels):
    gate = torch.tensor([[float("-inf"), -200.0, -88.5, -0.0, 88.5, 200.0, float("inf"), float("nan"), -87.0]]).T
    packed = kernels.pack_gated(gate, torch.ones_like(gate), "fp32")
    out = kernels.gated(torch.ones(1, 1), packed, torch.empty(1, len(gate)))[0]
    assert out[1].abs() < 1e-30
    assert out[2].abs() < 1e-30
    assert out[3:7].tolist() == [0.0, 88.5, 200.0, float("inf")]
    assert bool(out[7].isnan())


def rotate_reference(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = heads.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@pytest.mark.parametrize("dim", [16, 24, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("m", [1, 40])
def test_rope_store(kernels, dim, dtype, normed, m):
    heads, kv_heads, block_size, blocks = 6, 2, 5, 20
    qkv = normal(5, m, (heads + 2 * kv_heads) * dim)
    angles = torch.arange(100.0)[:, None] * 0.3 ** torch.arange(dim // 2)
    cos, sin = angles.cos(), angles.sin()
    generator = torch.Generator().manual_seed(6)
    positions = torch.randint(0, 100, (m,), generator=generator, dtype=torch.int32)
    slots = torch.randperm(blocks * block_size, generator=generator)[:m]
    k_cache, v_cache = (torch.full((blocks, kv_heads, block_size, dim), 7.0, dtype=dtype) for _ in range(2))
    norms = {"q_norm": normal(7, dim), "k_norm": normal(8, dim), "eps": 1e-6} if normed else {}

    q, k, v = (part.double() for part in qkv.view(m, -1, dim).split([heads, kv_heads, kv_heads], 1))
    if normed:
        q, k = norm_reference(q, norms["q_norm"], 1e-6), norm_reference(k, norms["k_norm"], 1e-6)
    at = positions.long()
    q, k = (rotate_reference(part, cos[at, None].double(), sin[at, None].double()) for part in (q, k))

    kernels.rope_store(
        qkv, cos, sin, positions, slots, k_cache, v_cache,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, **norms,
    )  # fmt: skip
    got_q, got_k, got_v = qkv.view(m, -1, dim).split([heads, kv_heads, kv_heads], 1)
    torch.testing.assert_close(got_q.double(), q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_k.double(), k, rtol=1e-5, atol=1e-5)
    for cache, rows in ((k_cache, got_k), (v_cache, got_v)):
        flat = cache.transpose(1, 2).reshape(-1, kv_heads, dim)
        assert torch.equal(flat[slots], rows.to(dtype))
        untouched = torch.ones(len(flat), dtype=torch.bool)
        untouched[slots] = False
        assert bool((flat[untouched] == 7).all())
    assert torch.equal(got_v.double(), v)


# ---- attention


@dataclass
class Batch:
    """A ragged batch; caches hold every token of every sequence, `queries` all their query rows, unsplit."""

    heads: int
    kv_heads: int
    dim: int
    block_size: int
    window: int | None
    lengths: list[int]  # tokens of each sequence
    queries: list[Tensor]  # [length, (H + 2 Hkv) D]
    keys: list[Tensor]  # [length, Hkv, D], already rounded to the cache's type
    values: list[Tensor]
    tables: Tensor
    k_cache: Tensor
    v_cache: Tensor

    def attend(self, kernels: Kernels, spans: list[tuple[int, int]]) -> list[Tensor]:
        """Outputs for tokens [first, last) of each sequence, in one call."""
        chosen = [(s, span) for s, span in enumerate(spans) if span[0] < span[1]]
        rows = torch.cat([self.queries[s][a:b] for s, (a, b) in chosen]).contiguous()
        sizes = [b - a for _, (a, b) in chosen]
        out = kernels.attention(
            rows,
            self.k_cache,
            self.v_cache,
            self.tables[[s for s, _ in chosen]],
            torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32),
            torch.tensor([b for _, (_, b) in chosen], dtype=torch.int32),
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            scale=self.dim**-0.5,
            window=self.window,
            out=torch.full((len(rows), self.heads * self.dim), float("nan")),
        )
        return list(out.split(sizes))

    def reference(self, s: int) -> Tensor:
        length, group = self.lengths[s], self.heads // self.kv_heads
        q = self.queries[s][:, : self.heads * self.dim].view(length, self.heads, self.dim).double().transpose(0, 1)
        k = self.keys[s].double().repeat_interleave(group, 1).permute(1, 2, 0)
        v = self.values[s].double().repeat_interleave(group, 1).transpose(0, 1)
        distance = torch.arange(length)[:, None] - torch.arange(length)[None]
        hidden = (distance < 0) | (distance >= (self.window or length))
        weights = ((q @ k) * self.dim**-0.5).masked_fill(hidden, float("-inf")).softmax(-1)
        return (weights @ v).transpose(0, 1).reshape(length, -1)


def make_batch(
    lengths: list[int],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 64,
    block_size: int = 16,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    """Blocks are handed out in random order; every slot no token was written to holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(needed) + 3, generator=generator).int()
    tables = torch.full((len(lengths), max(needed) + 1), 2**30, dtype=torch.int32)
    shape = (sum(needed) + 3, kv_heads, block_size, dim)
    k_cache, v_cache = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    batch = Batch(heads, kv_heads, dim, block_size, window, lengths, [], [], [], tables, k_cache, v_cache)
    for s, length in enumerate(lengths):
        tables[s, : needed[s]] = order[sum(needed[:s]) :][: needed[s]]
        batch.queries.append(torch.randn(length, (heads + 2 * kv_heads) * dim, generator=generator) * 2)
        at = torch.arange(length)
        for cache, kept in ((k_cache, batch.keys), (v_cache, batch.values)):
            rows = torch.randn(length, kv_heads, dim, generator=generator).to(dtype)
            kept.append(rows.float())
            cache[tables[s, at // block_size].long(), :, at % block_size] = rows
    return batch


@settings(max_examples=40, deadline=None)
@given(
    group=st.sampled_from([1, 3, 4, 8]),
    kv_heads=st.integers(1, 3),
    dim=st.sampled_from([16, 24, 64, 72, 128, 256]),
    block_size=st.sampled_from([1, 5, 16, 64]),
    window=st.sampled_from([None, None, 1, 7, 100, 300]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    shapes=st.lists(st.tuples(st.integers(1, 330), st.sampled_from([1, 1, 1, 2, 30, 400])), min_size=1, max_size=4),
    seed=st.integers(0, 2**20),
)
def test_attention_over_ragged_batches(kernels, group, kv_heads, dim, block_size, window, dtype, shapes, seed):
    lengths = [length for length, _ in shapes]
    batch = make_batch(
        lengths, heads=group * kv_heads, kv_heads=kv_heads, dim=dim, block_size=block_size, window=window,
        dtype=dtype, seed=seed,
    )  # fmt: skip
    spans = [(max(0, length - rows), length) for length, rows in shapes]
    for s, (got, (a, b)) in enumerate(zip(batch.attend(kernels, spans), spans, strict=True)):
        # Inputs of size 2 and up to 330 terms: 1e-5 is some 50 roundings; NaN from an unused slot would show here.
        torch.testing.assert_close(got.double(), batch.reference(s)[a:b], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 50, 200])
@pytest.mark.parametrize("heads", [3, 9, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_do_not_change_attention(kernels, window, heads, dtype):
    length = 600
    batch = make_batch([length], heads=heads, kv_heads=3, window=window, dtype=dtype, seed=11)
    whole = batch.attend(kernels, [(0, length)])[0]
    generator = torch.Generator().manual_seed(12)
    for largest in (40, 300):
        cuts = torch.randint(1, largest, (length,), generator=generator).cumsum(0)
        edges = [0, *(int(c) for c in cuts if c < length), length]
        chunks = [batch.attend(kernels, [span])[0] for span in itertools.pairwise(edges)]
        assert same(whole, torch.cat(chunks))
    tokens = [batch.attend(kernels, [(i, i + 1)])[0] for i in range(0, length, 3)]
    assert same(whole[::3], torch.cat(tokens))


def test_neighbours_blocks_and_threads_do_not_change_attention(kernels, restore_threads):
    lengths = [700, 3, 260, 129, 511]
    batch = make_batch(lengths, heads=9, kv_heads=3, seed=13)
    spans = [(699, 700), (0, 3), (100, 260), (128, 129), (500, 511)]
    together = batch.attend(kernels, spans)
    for s, span in enumerate(spans):
        alone = [span if other == s else (0, 0) for other in range(len(spans))]
        assert same(together[s], batch.attend(kernels, alone)[0])

    flipped = replace(
        batch, k_cache=batch.k_cache.flip(0).contiguous(), v_cache=batch.v_cache.flip(0).contiguous(),
        tables=torch.where(batch.tables < 2**30, len(batch.k_cache) - 1 - batch.tables, batch.tables),
    )  # fmt: skip
    torch.set_num_threads(1)
    assert all(itertools.starmap(same, zip(together, flipped.attend(kernels, spans), strict=True)))


def test_a_later_token_cannot_reach_an_earlier_one(kernels):
    """Not even as 0 * infinity, when both are in one call."""
    batch = make_batch([100], seed=14)
    clean = batch.attend(kernels, [(0, 60)])[0]
    block = int(batch.tables[0, 60 // 16])
    batch.v_cache[block, :, 60 % 16] = float("inf")
    batch.k_cache[block, :, 60 % 16] = float("nan")
    assert same(clean, batch.attend(kernels, [(0, 100)])[0][:60])


def test_attention_refuses_what_it_cannot_do(kernels):
    batch = make_batch([4])
    with pytest.raises(ValueError, match="window"):
        replace(batch, window=0).attend(kernels, [(0, 4)])
    with pytest.raises(ValueError, match="k_cache"):
        replace(batch, k_cache=batch.k_cache.transpose(1, 2)).attend(kernels, [(0, 4)])


# ---- building


def counting_compiler(folder: Path) -> Path:
    """A compiler that leaves a line in `folder`/runs for every compilation."""
    real = native_build._compiler(None)
    script = folder / "counting-cxx"
    script.write_text(f'#!/bin/sh\ncase "$*" in *.cpp*) echo run >> {folder}/runs;; esac\nexec {real} "$@"\n')
    script.chmod(0o755)
    return script


def test_a_second_load_does_not_compile_and_racing_builds_are_safe(tmp_path):
    compiler = str(counting_compiler(tmp_path))
    cache, paths = tmp_path / "cache" / "deeper", []
    racers = [threading.Thread(target=lambda: paths.append(native_build.library(cache, compiler))) for _ in range(2)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert len(set(paths)) == 1
    compiled = (tmp_path / "runs").read_text()
    kernels = load(cache, compiler)
    assert (tmp_path / "runs").read_text() == compiled
    assert [path.name for path in cache.iterdir()] == [paths[0].name]
    assert bool((linear(kernels, torch.ones(1, 4), kernels.pack(torch.ones(2, 4), "fp32")) == 4).all())


def test_no_compiler(tmp_path):
    with pytest.raises(NativeUnavailable, match="no C\\+\\+ compiler found") as caught:
        load(tmp_path, "segue-has-no-such-compiler")
    assert "segue-has-no-such-compiler" in caught.value.reason


def test_a_broken_compiler_is_quoted(tmp_path):
    script = tmp_path / "broken"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\nfor i in 1 2 3 4 5 6 7; do echo trouble $i >&2; done; exit 3\n'
    )
    script.chmod(0o755)
    with pytest.raises(NativeUnavailable, match="trouble 1") as caught:
        load(tmp_path / "cache", str(script))
    assert "trouble 7" not in caught.value.reason
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_damaged_library_is_unavailable_not_a_crash(tmp_path):
    broken = tmp_path / "kernels.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(NativeUnavailable, match="does not load"):
        Kernels(broken)


def test_one_openmp_runtime_serves_torch_and_the_kernels(cache_dir, kernels):
    """Import order matters for the OpenMP runtime; a fresh interpreter takes the shortest path through the imports."""
    code = (
        "import sys; from pathlib import Path; from segue.model.native import load; load(Path(sys.argv[1]));"
        "print(len({l.split()[-1] for l in open('/proc/self/maps') if 'gomp' in l}))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(cache_dir)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout.strip() == "1", done.stderr
