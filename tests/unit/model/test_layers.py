"""All layers in one call are what the kernels give one after the other, to the bit."""

import pytest
import torch

from segue.model.backend import Layer, rope_tables
from segue.model.batch import Batch
from segue.model.native import NativeUnavailable, load
from segue.model.native.layers import LayerStack
from segue.model.spec import ModelSpec

SIZE, BLOCKS = 4, 40


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    try:
        return load(tmp_path_factory.mktemp("native"))
    except NativeUnavailable as error:
        pytest.skip(error.reason)


def spec_of(**changes):
    shape = {
        "hidden_size": 48, "intermediate_size": 72, "num_layers": 3, "num_heads": 6, "num_kv_heads": 2, "head_dim": 16,
    }  # fmt: skip
    return ModelSpec(
        "x", 100, max_positions=128, rms_eps=1e-5, rope_theta=1e4, windows=(7, None, 7), **{**shape, **changes}
    )


def layers_of(kernels, spec, storage, biased):
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    width = spec.num_heads * spec.head_dim
    qkv = width + 2 * spec.num_kv_heads * spec.head_dim
    made = [
        Layer(
            normal(spec.hidden_size),
            kernels.pack(normal(qkv, spec.hidden_size), storage),
            normal(qkv) if biased else None,
            normal(spec.head_dim) if biased else None,
            normal(spec.head_dim) if biased else None,
            kernels.pack(normal(spec.hidden_size, width), storage),
            normal(spec.hidden_size) if biased else None,
            normal(spec.hidden_size),
            kernels.pack_gated(
                normal(spec.intermediate_size, spec.hidden_size),
                normal(spec.intermediate_size, spec.hidden_size),
                storage,
            ),
            kernels.pack(normal(spec.hidden_size, spec.intermediate_size), storage),
            window,
        )
        for window in spec.windows
    ]
    return made, [*(layer.input_norm for layer in made[1:]), normal(spec.hidden_size)]


def batch_of(shapes, sampled):
    """Sequences of (tokens before, tokens now), each with its own blocks."""
    counts = [now for _, now in shapes]
    contexts = [before + now for before, now in shapes]
    tables = torch.arange(1, 1 + 10 * len(shapes), dtype=torch.int32).view(len(shapes), 10)
    positions = [torch.arange(before, before + now) for before, now in shapes]
    slots = [table[at // SIZE].long() * SIZE + at % SIZE for table, at in zip(tables, positions, strict=True)]
    return Batch(
        torch.zeros(sum(counts), dtype=torch.int32),
        torch.cat(positions).int(),
        torch.cat(slots),
        tables,
        torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
        torch.tensor(contexts, dtype=torch.int32),
        torch.tensor(sampled, dtype=torch.int64),
        (),
    )


def one_by_one(kernels, spec, layers, norms, cos, sin, x, residual, batch, kv):
    heads = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
    for at, (layer, norm) in enumerate(zip(layers, norms, strict=True)):
        qkv = kernels.linear(x, layer.qkv, layer.qkv_bias, torch.empty(len(x), layer.qkv.shape[0]))
        rotated = {"q_norm": layer.q_norm, "k_norm": layer.k_norm, "eps": spec.rms_eps, **heads}
        kernels.rope_store(qkv, cos, sin, batch.positions, batch.slots, *kv[at], **rotated)
        seen = {"scale": spec.softmax_scale, "window": layer.window, **heads}
        out = torch.empty(len(x), layer.o.shape[1])
        x = kernels.attention(qkv, *kv[at], batch.tables, batch.starts, batch.contexts, **seen, out=out)
        if layer is layers[-1]:
            x, residual = x[batch.sample_rows], residual[batch.sample_rows]
        hidden = kernels.linear(x, layer.o, layer.o_bias, torch.empty(len(x), layer.o.shape[0]))
        x = kernels.add_rms_norm(residual, hidden, layer.post_norm, spec.rms_eps, torch.empty_like(hidden))
        gated = kernels.gated(x, layer.gate_up, torch.empty(len(x), spec.intermediate_size))
        hidden = kernels.linear(gated, layer.down, None, torch.empty_like(hidden))
        x = kernels.add_rms_norm(residual, hidden, norm, spec.rms_eps, torch.empty_like(hidden))
    return x


def fresh(name, rows, width):
    return torch.full((rows, width), torch.nan)


@pytest.mark.parametrize(
    ("storage", "kv_dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("int8", torch.float32)]
)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("shapes", "sampled"),
    [([(0, 20)], [19]), ([(13, 1), (5, 1), (0, 1)], [0, 1, 2]), ([(3, 9), (20, 1), (0, 12)], [9, 21]), ([(2, 8)], [])],
)
def test_the_stack_is_its_operations_one_after_the_other(kernels, storage, kv_dtype, biased, shapes, sampled):
    spec = spec_of()
    layers, norms = layers_of(kernels, spec, storage, biased)
    cos, sin = rope_tables(spec, 128)
    stack = LayerStack(kernels, spec, layers, norms, cos, sin)
    batch = batch_of(shapes, sampled)
    rows = len(batch.tokens)
    generator = torch.Generator().manual_seed(2)
    shape = (spec.num_layers, 2, BLOCKS, spec.num_kv_heads, SIZE, spec.head_dim)
    kv = torch.randn(shape, generator=generator).to(kv_dtype)
    x, residual = torch.randn(rows, spec.hidden_size, generator=generator), torch.randn(rows, spec.hidden_size)
    copies = x.clone(), residual.clone(), batch, kv.clone()
    expected = one_by_one(kernels, spec, layers, norms, cos, sin, *copies)
    got = stack.run(x, residual, batch, kv, fresh)
    assert got.shape == (len(sampled), spec.hidden_size) and torch.equal(got, expected)
    assert torch.equal(kv.view(torch.uint8), copies[3].view(torch.uint8)), "the KV of every row"


def test_other_kv_memory_is_bound_anew(kernels):
    spec = spec_of()
    layers, norms = layers_of(kernels, spec, "fp32", False)
    stack = LayerStack(kernels, spec, layers, norms, *rope_tables(spec, 128))
    batch = batch_of([(0, 6)], [5])
    for blocks, dtype in ((BLOCKS, torch.float32), (2 * BLOCKS, torch.float32), (BLOCKS, torch.bfloat16)):
        kv = torch.zeros(spec.num_layers, 2, blocks, spec.num_kv_heads, SIZE, spec.head_dim, dtype=dtype)
        stack.run(torch.ones(6, 48), torch.ones(6, 48), batch, kv, fresh)
        written = kv.float().abs().sum((3, 4, 5)) > 0
        assert written[:, :, 1:3].all() and not written[:, :, 3:].any()


def test_what_does_not_fit_is_refused_before_anything_is_written(kernels):
    spec = spec_of()
    layers, norms = layers_of(kernels, spec, "fp32", False)
    stack = LayerStack(kernels, spec, layers, norms, *rope_tables(spec, 128))
    batch, kv = batch_of([(0, 6)], [5]), torch.zeros(spec.num_layers, 2, BLOCKS, spec.num_kv_heads, SIZE, spec.head_dim)
    for x, memory in (
        (torch.ones(5, 48), kv),
        (torch.ones(6, 47), kv),
        (torch.ones(6, 48).half(), kv),
        (torch.ones(6, 48), kv[:2]),
        (torch.ones(6, 48), kv.half()),
        (torch.ones(6, 48), kv.transpose(0, 1)),
    ):
        with pytest.raises(ValueError):
            stack.run(x, torch.ones(6, 48), batch, memory, fresh)
    assert not kv.any()
    with pytest.raises(ValueError, match="heads"):
        LayerStack(kernels, spec_of(head_dim=12), layers, norms, *rope_tables(spec, 128))
