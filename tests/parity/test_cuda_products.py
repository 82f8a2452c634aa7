"""Products of few rows on a device, against double precision; a whole engine on them, against single precision."""

import pytest
import torch
import torch.nn.functional as F

from segue import Engine, SamplingParams
from segue.model.chat import ChatTemplate
from segue.model.cuda import products
from segue.model.cuda.products import Products
from segue.model.loading import LoadedModel
from segue.model.spec import ModelSpec
from segue.model.tiny import random_weights
from segue.model.tokenizer import ByteTokenizer
from segue.model.weights import Weights, fingerprint

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="runs where a Hopper device is",
)
SHAPES = [  # width, depth: Qwen3-1.7B's, Llama-8B's down, and a narrow one
    *((2048, 2048), (12288, 2048), (2048, 6144), (4096, 2048)),
    *((4096, 14336), (640, 384)),
]


def error(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_products(shape, dtype):
    width, depth = shape
    torch.manual_seed(1)
    made = Products(dtype, torch.device("cuda"))
    matrix = torch.randn(width, depth, device="cuda").to(dtype) * depth**-0.5
    bias = torch.randn(width, device="cuda").to(dtype)
    for rows in (1, 7, 8, 9, 16, 31, 32, 33, 64):
        x = torch.randn(rows, depth, device="cuda").to(dtype)
        wanted = x.double() @ matrix.double().t()
        assert error(made.product(x, matrix, None), wanted) < 5e-3
        assert error(made.product(x, matrix, bias), wanted + bias.double()) < 5e-3
        gate, up = wanted.chunk(2, -1)
        assert error(made.gated(x, matrix), F.silu(gate) * up) < 5e-3


def test_a_row_is_the_same_beside_others():
    """Up to as many as one kind of kernel takes: its sums have one order."""
    made = Products(torch.bfloat16, torch.device("cuda"))
    matrix, x = (torch.randn(rows, 2048, device="cuda").bfloat16() for rows in (2048, 32))
    together = made.product(x, matrix, None)
    for at in range(0, 32, 5):
        some = made.product(x[at : at + 17].contiguous(), matrix, None) if at + 17 <= 32 else None
        assert some is None or torch.equal(some, together[at : at + 17])


def test_many_after_each_other_without_a_pause():
    """Each begins before the one that it reads from has ended; the same a hundred times."""
    made = Products(torch.bfloat16, torch.device("cuda"))
    first, second = (torch.randn(2048, 2048, device="cuda").bfloat16() * 2048**-0.5 for _ in range(2))
    x = torch.randn(32, 2048, device="cuda").bfloat16()

    def run():
        y = x
        for _ in range(40):
            y = made.product(made.product(y, first, None), second, None)
        return y

    graph = torch.cuda.CUDAGraph()
    wanted = run().clone()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(100):
        found.zero_()
        graph.replay()
        assert torch.equal(found, wanted)


def test_an_engine_says_what_it_says_in_single_precision():
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 512,
        "intermediate_size": 1536, "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 1,
        "head_dim": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    model = ModelSpec.from_hf_config(config)
    assert products.products_for(model, torch.bfloat16, torch.device("cuda")) is not None
    weights = random_weights(model, seed=3)
    loaded = LoadedModel(
        "few", model, Weights.in_memory(weights), ByteTokenizer(), ChatTemplate("", "", ""), fingerprint(model, weights)
    )
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=1, ignore_eos=True)
    prompts = [[1 + (number * 7 + at) % 60 for at in range(4 + number % 20)] for number in range(60)]
    found = {}
    for dtype in ("fp32", "bf16"):
        with Engine(loaded, num_blocks=400, device="cuda", dtype=dtype) as engine:
            for count in (1, 5, 14, 30, 60):
                results = engine.generate(prompts[:count], params, detokenize=False)
                found[dtype, count] = [result.completions[0].logprobs[0].chosen for result in results]
    for count in (1, 5, 14, 30, 60):
        assert found["bf16", count] == pytest.approx(found["fp32", count], abs=0.08)
