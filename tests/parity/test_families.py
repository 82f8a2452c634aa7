"""Logits and greedy tokens equal Hugging Face's, for every family and on every backend."""

from array import array

import pytest
import torch

from segue import Engine, SamplingParams
from segue.engine import Row, StepPlan
from segue.engine.sequence import Sampling
from segue.model.chat import ChatTemplate
from segue.model.loading import LoadedModel
from segue.model.tiny import random_weights, save_hf_folder
from segue.model.tokenizer import ByteTokenizer
from segue.model.weights import Weights, fingerprint
from tests.parity.conftest import FAMILIES, family

GREEDY = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """The same weights as transformers sees them and as we do."""
    transformers = pytest.importorskip("transformers")
    spec = family(request.param)
    weights = random_weights(spec, seed=11)
    folder = tmp_path_factory.mktemp(request.param)
    save_hf_folder(spec, weights, folder)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    loaded = LoadedModel(
        "parity",
        spec,
        Weights.in_memory(weights),
        ByteTokenizer(),
        ChatTemplate("", "", ""),
        fingerprint(spec, weights),
    )
    return reference.eval(), loaded


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("chunk", [100, 7])
def test_logits_within_1e_4(pair, native, chunk):
    reference, loaded = pair
    ids = prompt(100)
    engine = Engine(loaded, num_blocks=16, native=native, device="cpu")
    runner = engine.runner
    tokens, blocks = array("i", ids), array("i", range(1, 9))
    with torch.inference_mode():
        wanted = reference(torch.tensor([ids])).logits[0]
    sampling = Sampling(GREEDY, 0, 0, frozenset())
    for start in range(0, len(ids), chunk):
        stop = min(start + chunk, len(ids))
        row = Row(0, tokens, start, stop, blocks, sampling)
        got = runner.forward(StepPlan([row], []))
        assert (got[0] - wanted[stop - 1]).abs().max() < 1e-4


@pytest.mark.parametrize("native", [True, False])
def test_64_greedy_tokens_identical_alone_batched_chunked_and_preempted(pair, native):
    reference, loaded = pair
    prompts = [prompt(length, seed=length) for length in (3, 17, 40, 90)]
    wanted = []
    for ids in prompts:
        with torch.inference_mode():
            out = reference.generate(
                torch.tensor([ids]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        wanted.append(out[0, len(ids) :].tolist())

    def answers(**options):
        with Engine(loaded, native=native, device="cpu", **options) as engine:
            together = [result.token_ids for result in engine.generate(prompts, GREEDY)]
            engine.check()
            return together, engine.stats().num_preemptions

    with Engine(loaded, num_blocks=64, native=native, device="cpu") as engine:
        alone = [engine.generate(ids, GREEDY)[0].token_ids for ids in prompts]
    assert alone == wanted
    assert answers(num_blocks=64)[0] == wanted
    assert answers(num_blocks=64, max_step_tokens=8, max_running=4)[0] == wanted
    tight, num_preemptions = answers(num_blocks=18, max_step_tokens=32, max_running=4)
    assert num_preemptions > 0
    assert tight == wanted
