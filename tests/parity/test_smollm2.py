"""The default model says what transformers says, word for word, however its work is cut up."""

import pytest
import torch

from segue import Engine, SamplingParams
from segue.base.config import Environment
from segue.model.catalog import resolve

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics are:\n1.",
    "Q: What is 17 + 25?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, the first humans",
    "Der schnelle braune Fuchs",
    "List of programming languages: Python, C,",
    "The mitochondria is the powerhouse of the cell. " * 6 + "In other words,",
]
NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def reference():
    """What transformers answers: tokens and text, from the same file."""
    transformers = pytest.importorskip("transformers")
    path = resolve("smollm2", Environment.read().cache_dir).path
    options = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**options)
    model = transformers.AutoModelForCausalLM.from_pretrained(**options, dtype=torch.float32).eval()
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            out = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        answers.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return answers


def texts(engine, prompts):
    results = engine.generate(prompts, GREEDY)
    engine.check()
    return [result.text for result in results]


def test_alone_and_with_state_kept(reference):
    with Engine("smollm2", num_blocks=256, device="cpu") as engine:
        assert [texts(engine, prompt)[0] for prompt in PROMPTS] == reference
        again = engine.generate(PROMPTS, GREEDY)
        assert [result.text for result in again] == reference
        assert [result.num_prefilled for result in again] == [1] * len(PROMPTS)


@pytest.mark.parametrize(
    ("options", "preempts"),
    [
        ({"num_blocks": 256}, False),
        ({"num_blocks": 256, "max_step_tokens": 16, "max_running": 10}, False),
        ({"num_blocks": 16, "max_step_tokens": 64, "max_running": 10}, True),
        ({"num_blocks": 256, "prefix_caching": False, "native": False}, False),
    ],
    ids=["batched", "chunked", "preempted", "plain torch"],
)
def test_together(reference, options, preempts):
    with Engine("smollm2", device="cpu", **options) as engine:
        assert texts(engine, PROMPTS) == reference
        assert (engine.stats().num_preemptions > 0) == preempts


def test_int8_weights_stay_close():
    """The bound that keeps `--quantize int8` honest: on a text of its own making, the 8-bit model's distribution is
    within 0.1 nats of the full one on average, and its likeliest token is the same nearly always."""
    with Engine("smollm2", num_blocks=64, device="cpu") as engine:
        text = engine.generate(PROMPTS[1], SamplingParams(max_tokens=60, temperature=0, logprobs=20))[0]
        prompt = text.prompt_token_ids
    with Engine("smollm2", num_blocks=64, device="cpu", quantize="int8") as engine:
        gaps, agree = [], 0
        for at, full in enumerate(text.completions[0].logprobs):
            ids = prompt + text.token_ids[:at]
            own = engine.generate(ids, SamplingParams(max_tokens=1, temperature=0, logprobs=20))[0].completions[0]
            quantized = dict(own.logprobs[0].top)
            agree += own.token_ids[0] == text.token_ids[at]
            gaps += [abs(value - quantized[token]) for token, value in full.top[:5] if token in quantized]
    assert sum(gaps) / len(gaps) < 0.1
    assert agree >= 57
