"""What lies between two attentions, in one kernel: against the same in double precision. It needs a device to run, but none to
be compiled."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton.experimental.gluon")

from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compiled
from triton.experimental.gluon._runtime import GluonASTSource

from segue import Engine, SamplingParams
from segue.model.chat import ChatTemplate
from segue.model.cuda import few_rows
from segue.model.cuda.few_rows import FewRows, Matrices
from segue.model.loading import LoadedModel
from segue.model.spec import ModelSpec
from segue.model.tiny import random_weights
from segue.model.tokenizer import ByteTokenizer
from segue.model.weights import Weights, fingerprint

needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs where a CUDA device is")
SHAPES = [  # hidden, mixed, inner, qkv, chunk
    (1024, 2048, 3072, 4096, 1024),
    (2048, 2048, 6144, 4096, 1024),
    (1536, 1536, 2560, 2048, 512),
]

COMPILED = [((2048, 2048, 6144, 4096), 16), ((4096, 4096, 14336, 0), 8)]


def spec(hidden, mixed, inner, layers=3):
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": mixed // 64, "num_key_value_heads": 1,
        "head_dim": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return ModelSpec.from_hf_config(config)


def normed(x, scale):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * scale.double()


def error(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


@needs_device
@pytest.mark.parametrize(
    ("shape", "dtype", "has_bias"),
    [(SHAPES[0], torch.bfloat16, False), (SHAPES[1], torch.bfloat16, True), (SHAPES[2], torch.float16, True)],
)
def test_layers_follow_each_other(shape, dtype, has_bias):
    """Three of them, the last without a successor, twice: counters are as they were."""
    hidden, mixed_width, inner, width, step = shape
    torch.manual_seed(1)

    def random(*shape, scale=1.0):
        return (torch.randn(*shape, device="cuda") * scale).to(dtype)

    def matrix(rows, columns):
        return random(rows, columns, scale=columns**-0.5)

    model = spec(hidden, mixed_width, inner)
    assert few_rows._step(model) == step
    between = FewRows(model, torch.device("cuda"))
    layers = [
        (matrix(hidden, mixed_width), matrix(2 * inner, hidden), matrix(hidden, inner), matrix(width, hidden))
        for _ in range(3)
    ]
    norms = [random(hidden) for _ in range(4)]
    o_bias, qkv_bias = (random(hidden), random(width)) if has_bias else (None, None)
    for rows in (1, 2, 8, 9, 16, 5):
        residual, mixed = random(rows, hidden), random(rows, mixed_width)
        gated, qkv = torch.full((rows, inner), torch.nan, dtype=dtype, device="cuda"), random(rows, width) * torch.nan
        wanted = residual.double()
        for number, (o, gate_up, down, after) in enumerate(layers):
            is_last = number == 2
            given = Matrices(
                o, gate_up, down, None if is_last else after, o_bias, qkv_bias, norms[number], norms[number + 1]
            )
            between.run(number, given, mixed, residual, gated, qkv)
            wanted = wanted + mixed.double() @ o.double().t() + (o_bias.double() if has_bias else 0.0)
            gate, up = (normed(wanted, norms[number]) @ gate_up.double().t()).chunk(2, -1)
            wanted = wanted + (F.silu(gate) * up) @ down.double().t()
            if not is_last:
                following = normed(wanted, norms[number + 1]) @ after.double().t()
                following += qkv_bias.double() if has_bias else 0.0
                assert error(qkv, following) < 2e-2
        assert error(residual, wanted) < 2e-2
        assert between._counters[0] == 0


@needs_device
def test_the_same_rows_alone_and_beside_others():
    """Up to eight together: a row's sums have one order, whoever else is there."""
    torch.manual_seed(2)
    hidden, mixed_width, inner, width, _ = SHAPES[0]
    between = FewRows(spec(hidden, mixed_width, inner), torch.device("cuda"))
    made = [
        torch.randn(a, b, device="cuda").bfloat16() * b**-0.5
        for a, b in ((hidden, mixed_width), (2 * inner, hidden), (hidden, inner), (width, hidden))
    ]
    norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    residual, mixed = (
        torch.randn(8, hidden, device="cuda").bfloat16(),
        torch.randn(8, mixed_width, device="cuda").bfloat16(),
    )

    def run(some):
        out, qkv = residual[some].clone(), torch.empty(len(residual[some]), width, device="cuda", dtype=torch.bfloat16)
        gated = torch.empty(len(out), inner, device="cuda", dtype=torch.bfloat16)
        between._counters.zero_()
        between.run(0, Matrices(*made, None, None, norm, norm), mixed[some].contiguous(), out, gated, qkv)
        return out, qkv

    together = run(slice(0, 8))
    for at in range(8):
        alone = run(slice(at, at + 1))
        assert all(torch.equal(few[0], many[at]) for few, many in zip(alone, together, strict=True))


def compile_all() -> None:
    """In a process of its own: Triton's interpreter, which other tests here use, is on or off for all of one."""
    kernel, found = few_rows._between_attentions, []
    for (hidden, mixed, inner, qkv), rows in COMPILED:
        fixed = {
            "HIDDEN": hidden, "MIXED": mixed, "INNER": inner, "QKV": qkv, "ROWS": rows, "STEP": 1024, "RING": few_rows._RING,
            "WARPS": few_rows._WARPS, "HAS_O_BIAS": False, "HAS_QKV_BIAS": False, "EARLY": True, "o_bias": None, "qkv_bias": None,
        }  # fmt: skip
        kinds = {"matrices": ("*bf16",) * 4, "norms": ("*bf16",) * 2, "counter": "*i32", "next_counter": "*i32"}
        kinds |= {"rows": "i32", "eps": "fp32"} | dict.fromkeys(fixed, "constexpr")
        names = kernel.arg_names
        signature = {name: kinds.get(name, "*bf16") for name in names}
        places = [(names.index(name),) for name in ("mixed", "residual", "gated", "next_qkv")]
        places += [(names.index(name), at) for name in ("matrices", "norms") for at in range(len(kinds[name]))]
        values = {(names.index(name),): value for name, value in fixed.items()}
        source = GluonASTSource(kernel, signature, values, {at: [["tt.divisibility", 16]] for at in places})
        made = compiled(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": few_rows._WARPS})
        found.append((made.metadata.shared, made.asm["ptx"]))
    print(json.dumps(found))


def test_it_compiles_without_a_device():
    """For an H100 or H200, by the Triton that is here: weights in copies of sixteen bytes, as much memory as is said."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", "from tests.parity import test_cuda_few_rows as test; test.compile_all()"]
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    for ((hidden, mixed, inner, _), rows), (shared, ptx) in zip(COMPILED, json.loads(run.stdout), strict=True):
        assert re.search(r"cp\.async\.cg\.shared\.global .*0x10", ptx)
        assert shared <= few_rows._shared_memory(spec(hidden, mixed, inner), rows)


@needs_device
def test_an_engine_says_what_it_says_in_single_precision():
    model = spec(512, 1024, 1536)
    assert few_rows.most_rows(model, torch.bfloat16, torch.device("cuda")) == 16
    weights = random_weights(model, seed=3)
    loaded = LoadedModel(
        "few", model, Weights.in_memory(weights), ByteTokenizer(), ChatTemplate("", "", ""), fingerprint(model, weights)
    )
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=1, ignore_eos=True)
    prompts = [[1 + (number * 7 + at) % 60 for at in range(4 + number)] for number in range(14)]
    found = {}
    for dtype in ("fp32", "bf16"):
        with Engine(loaded, num_blocks=200, device="cuda", dtype=dtype) as engine:
            for count in (1, 5, 14):
                results = engine.generate(prompts[:count], params, detokenize=False)
                found[dtype, count] = [result.completions[0].logprobs[0].chosen for result in results]
    for count in (1, 5, 14):
        assert found["bf16", count] == pytest.approx(found["fp32", count], abs=0.08)


def test_what_it_is_not_for():
    assert few_rows._step(spec(576, 576, 1536)) is None
    assert few_rows.most_rows(spec(1024, 1024, 1024), torch.bfloat16, torch.device("cpu")) == 0


def test_a_triton_without_gluon():
    hidden = "import sys; sys.modules['triton.experimental.gluon'] = None; "
    said = hidden + "from segue.model.cuda import backend; print(backend.few_rows)"
    run = subprocess.run([sys.executable, "-c", said], check=True, capture_output=True, text=True)
    assert run.stdout == "None\n"
