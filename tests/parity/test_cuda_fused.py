"""Attention of few rows in one kernel with what lies before it, on a device: against double precision, in a recording, and a
whole engine on it."""

import pytest
import torch

from segue import BeamParams, Engine, Request, SamplingParams
from segue.model.chat import ChatTemplate
from segue.model.cuda.fused import BeamKernel, Kind, PieceKernel, RowKernel
from segue.model.loading import LoadedModel
from segue.model.spec import ModelSpec
from segue.model.tiny import random_weights
from segue.model.tokenizer import ByteTokenizer
from segue.model.weights import Weights, fingerprint
from tests.fused import ALONE, BEAMS, LLAMA, PIECES, QWEN, SMOL, Blocks, Case, beams, rows_of, sequences

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="runs where a Hopper device is",
)
KINDS = [QWEN, LLAMA, SMOL, Kind(2, 2, 64, 128, True), Kind(16, 8, 128, 16, True), Kind(32, 8, 128, 16, False)]
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64, "hidden_size": 512,
    "intermediate_size": 1536, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 128, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "rope_theta": 10000.0, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_see_what_they_are_to_see(kind, dtype):
    kernel = PieceKernel(kind, dtype, torch.device("cuda"))
    for what in PIECES:
        case = Case(kind, rows_of(kind, what), dtype=dtype, device="cuda")
        for _ in range(3):
            assert case.is_right(kernel), what


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_alone_see_what_they_are_to_see(kind, dtype):
    kernel = RowKernel(kind, dtype, torch.device("cuda"))
    for what in ALONE:
        case = Case(kind, rows_of(kind, what), dtype=dtype, device="cuda", own_rows=kind.own_rows)
        for _ in range(3):
            assert case.is_right(kernel), what
    spans = [(230 + 3 * at, 231 + 3 * at + at % 7) for at in range(120)]  # so many that a warp has several pieces
    rows = sequences(spans, Blocks(6000, 1), kind.size)
    many = Case(kind, rows, dtype=dtype, device="cuda", num_blocks=6000, own_rows=kind.own_rows)
    for _ in range(3):
        assert many.is_right(kernel)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.has_beams], ids=str)
def test_beams_see_what_they_are_to_see(kind, dtype):
    kernel = BeamKernel(kind, dtype, torch.device("cuda"))
    for what in BEAMS:
        for spare in (0, 9, 40):  # fewer programs for each item
            case = Case(kind, rows_of(kind, what), dtype=dtype, device="cuda", spare=spare)
            for _ in range(3):
                assert case.is_right(kernel), what
    case = Case(kind, [beams(70, kind.group_rows + 3, 2, Blocks(160, 4), kind.size)], dtype=dtype, device="cuda")
    assert case.is_right(kernel)


def open_engine(dtype, **options):
    model = ModelSpec.from_hf_config(CONFIG)
    weights = random_weights(model, seed=3)
    tokenizer, name = ByteTokenizer(), fingerprint(model, weights)
    loaded = LoadedModel("few", model, Weights.in_memory(weights), tokenizer, ChatTemplate("", "", ""), name)
    return Engine(loaded, num_blocks=2000, device="cuda", dtype=dtype, max_model_len=2048, **options)


def scores(engine):
    """Of batches of all sizes, continuations, forks of a long state, and searches; each several times, so that recordings are
    replayed."""
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=1, ignore_eos=True)
    found = []
    for count in (1, 5, 14, 30, 60, 150):
        prompts = [[1 + (number * 7 + at) % 60 for at in range(1 + number % 16)] for number in range(count)]
        for _ in range(2):
            results = engine.generate(prompts, params, detokenize=False)
        found += [result.completions[0].logprobs[0].chosen for result in results]
    for length in (100, 705, 1500):
        prompt = [1 + (at * at + length) % 60 for at in range(length)]
        state = engine.generate([prompt], params, hold=True, detokenize=False)[0].request_id
        for count in (1, 3, 32, 40):
            many = [Request(params=params, parent=state, suffix=[5, 9, at + 1][: 1 + at % 3]) for at in range(count)]
            for _ in range(2):
                results = engine.generate(many)
            found += [result.completions[0].logprobs[0].chosen for result in results]
        beam = BeamParams(width=32, max_tokens=3, ignore_eos=True)
        for _ in range(3):
            lines = engine.generate(Request(beam=beam, parent=state, suffix=[7, 8]))[0].beams
        found += [line.score for line in lines[:4]]
    engine.check()
    return found


def test_an_engine_says_what_it_says_in_single_precision():
    with open_engine("fp32") as wanted, open_engine("bf16") as fused:
        assert fused.runner._steps.item_rows == 16
        assert scores(fused) == pytest.approx(scores(wanted), abs=0.1)


def test_the_same_again_and_again():
    """Recorded steps whose kernels begin early: no run differs from the one before."""
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    prompts = [[1 + (number * 5 + at) % 60 for at in range(300 + 20 * number)] for number in range(20)]
    with open_engine("bf16") as engine:
        found = []
        for _ in range(20):
            results = engine.generate(prompts, params, detokenize=False)
            found.append([result.token_ids for result in results])
    assert all(each == found[2] for each in found[3:])  # the first ones find less in memory, and are recorded
