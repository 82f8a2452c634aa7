"""Sampling draws from the distribution that transformers' own processors define, row by row."""

from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.base.types import SamplingParams
from segue.engine import Row, Sampling
from segue.model import sampler
from segue.model.sampler import largest, sample, uniforms

VOCAB = 40


def row(params: SamplingParams, seed: int = 0, prompt=(1, 2, 3), output=(), stop_ids=frozenset()) -> Row:
    tokens = array("i", [*prompt, *output])
    return Row(0, tokens, 0, len(tokens), array("i"), Sampling(params, seed, len(prompt), stop_ids))


def reference(logits, params: SamplingParams, ids) -> torch.Tensor:
    """Probabilities by transformers' processors, in its order."""
    processors = pytest.importorskip("transformers.generation.logits_process")
    scores = logits[None].clone()
    steps = [processors.TemperatureLogitsWarper(params.temperature)]
    if params.repetition_penalty != 1.0:
        steps.insert(0, processors.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.top_k:
        steps.append(processors.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        steps.append(processors.TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(processors.MinPLogitsWarper(params.min_p))
    for step in steps:
        scores = step(torch.tensor([ids]), scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 10, "top_p": 0.8, "min_p": 0.1, "temperature": 1.7},
        {"repetition_penalty": 1.8, "top_p": 0.9},
        {"top_p": 0.999, "temperature": 50.0},
    ],
    ids=str,
)
def test_the_distribution_is_transformers_own(options):
    params = SamplingParams(**options)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    wanted = reference(logits, params, [1, 2, 3])
    draws = 20_000
    rows = [row(params, seed) for seed in range(draws)]
    got = torch.bincount(torch.tensor(sample(logits.repeat(draws, 1), rows).tokens), minlength=VOCAB) / draws
    assert got[wanted == 0].sum() == 0
    assert (got - wanted).abs().sum() / 2 < 0.03


@given(st.data())
@settings(max_examples=40)
def test_a_row_does_not_depend_on_its_neighbours(data):
    vocab = data.draw(st.sampled_from([40, 700]))
    count = data.draw(st.integers(2, 6))
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    rows = [
        row(
            SamplingParams(
                temperature=data.draw(st.sampled_from([0.0, 0.7, 1.0, 5.0])),
                top_k=data.draw(st.sampled_from([0, 0, 3, 50])),
                top_p=data.draw(st.sampled_from([1.0, 1.0, 0.5, 0.99])),
                min_p=data.draw(st.sampled_from([0.0, 0.1])),
                presence_penalty=data.draw(st.sampled_from([0.0, 0.5])),
            ),
            seed=data.draw(st.integers(0, 2**62)),
            output=data.draw(st.lists(st.integers(0, 39), max_size=4)),
        )
        for _ in range(count)
    ]
    together = sample(logits.clone(), rows).tokens
    alone = [sample(logits[i : i + 1].clone(), rows[i : i + 1]).tokens[0] for i in range(count)]
    assert list(together) == alone


def test_top_p_asks_for_more_candidates_when_the_first_do_not_suffice(monkeypatch):
    monkeypatch.setattr(sampler, "_FIRST_CANDIDATES", 4)
    params = SamplingParams(top_p=0.97, temperature=8.0)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5))
    wanted = reference(logits, params, [1])
    rows = [row(params, seed) for seed in range(3000)]
    got = torch.bincount(torch.tensor(sample(logits.repeat(3000, 1), rows).tokens), minlength=VOCAB) / 3000
    assert (got > 0).sum() > 16
    assert (got - wanted).abs().sum() / 2 < 0.06


def test_greedy_and_its_adjustments():
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8], logits[0, 9] = 3.0, 2.5, 2.0
    greedy = {"temperature": 0.0}
    cases = [
        (SamplingParams(**greedy), {}, 7),
        (SamplingParams(**greedy, logit_bias={7: -100.0}), {}, 8),
        (SamplingParams(**greedy, logit_bias={30: 50.0}), {}, 30),
        (SamplingParams(**greedy, presence_penalty=1.0), {"output": (7,)}, 8),
        (SamplingParams(**greedy, presence_penalty=1.0), {"prompt": (7,)}, 7),
        (SamplingParams(**greedy, frequency_penalty=0.3), {"output": (7,)}, 7),
        (SamplingParams(**greedy, frequency_penalty=0.3), {"output": (7, 7, 7)}, 8),
        (SamplingParams(**greedy, repetition_penalty=1.6), {"prompt": (7, 8)}, 9),
        (SamplingParams(**greedy, min_tokens=2), {"output": (5,), "stop_ids": frozenset([7])}, 8),
        (SamplingParams(**greedy, min_tokens=2), {"output": (5, 5), "stop_ids": frozenset([7])}, 7),
    ]
    for params, options, wanted in cases:
        assert sample(logits.clone(), [row(params, **options)]).tokens == [wanted], (params, options)


def test_the_coldest_temperature_is_greedy_and_nonsense_is_refused():
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    for options in (
        {"temperature": 5e-324},
        {"temperature": 1e-300, "top_p": 0.5},
        {"temperature": 1e-200, "top_k": 3},
    ):
        assert sample(logits.clone(), [row(SamplingParams(**options))]).tokens == [int(logits.argmax())]
    logits[0, 3] = torch.nan
    with pytest.raises(ValueError, match="not numbers"):
        sample(logits, [row(SamplingParams(temperature=0.0))])


def test_logprobs_are_the_models_own():
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=0.0, logprobs=3, logit_bias={int(logits[0].argmax()): -100.0})
    result = sample(logits.clone(), [row(params), row(SamplingParams(temperature=0.0))])
    assert list(result.logprobs) == [0]
    got, wanted = result.logprobs[0], logits[0].log_softmax(-1)
    values, ids = wanted.topk(3)
    assert [token for token, _ in got.top] == ids.tolist()
    assert torch.allclose(torch.tensor([value for _, value in got.top]), values)
    assert (got.chosen, got.rank) == (pytest.approx(float(wanted[result.tokens[0]])), 2)


@given(st.integers(0, 999), st.sampled_from([64, 640, 700, 6400]), st.integers(1, 60), st.booleans())
@settings(max_examples=60)
def test_the_largest_come_in_order_and_of_equal_ones_the_first(seed, length, count, is_round):
    values = torch.randn(3, length, generator=torch.Generator().manual_seed(seed)) * 3
    values = values.round() + 0.0 if is_round else values  # a zero with a sign is below one without
    values[1] = -torch.inf
    values[1, length // 2] = 1.0
    count = min(count, length)
    assert torch.equal(largest(values, count), values.sort(dim=-1, descending=True, stable=True).indices[:, :count])


def test_uniform_numbers_are_uniform_and_apart():
    numbers = torch.tensor(np.stack([uniforms([seed] * 100, range(100)) for seed in range(100)]))
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01 and abs(numbers.std() - 12**-0.5) < 0.01
    assert torch.corrcoef(numbers).fill_diagonal_(0).abs().max() < 0.5
    assert torch.corrcoef(numbers.T).fill_diagonal_(0).abs().max() < 0.5
