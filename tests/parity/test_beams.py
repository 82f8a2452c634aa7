"""Beam search equals Hugging Face's `generate(num_beams=…)`: the same lines with the same scores."""

import random

import pytest
import torch

from segue import BeamParams, Catalogue, Engine, Request
from tests.parity.conftest import FAMILIES, family
from tests.parity.test_families import pair, prompt

NUM_CASES = 66  # for each family
VOCAB = family("llama").vocab_size

__all__ = ["pair"]


def cases(seed):
    """Prompts with what to search: widths, lengths, penalties, ways to stop, and sets of tokens that end a line."""
    pick = random.Random(seed)
    for number in range(NUM_CASES):
        stops = pick.sample(range(VOCAB), pick.choice([0, 1, 2, 20]))
        yield (
            prompt(pick.randint(1, 70), seed=1000 * seed + number),
            BeamParams(
                width=pick.choice([2, 3, 4, 8, 16, 32]),
                max_tokens=pick.randint(1, 12),
                length_penalty=pick.choice([-0.5, 0.0, 0.5, 1.0, 2.0]),
                early_stopping=pick.choice([True, False, "never"]),
                stop_token_ids=tuple(stops),
                ignore_eos=True,
            ),
        )


def reference_beams(reference, ids, params, **options):
    """As a set of lines with their scores; a place that was left empty has a score that no line can have."""
    with torch.inference_mode():
        out = reference.generate(
            torch.tensor([ids]),
            num_beams=params.width,
            num_return_sequences=params.width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=list(params.stop_token_ids) or None,
            pad_token_id=VOCAB - 1,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    lines = {}
    for sequence, score in zip(out.sequences[:, len(ids) :].tolist(), out.sequences_scores.tolist(), strict=True):
        ends = [at for at, token in enumerate(sequence) if token in params.stop_token_ids]
        if score > -1e8:
            lines[tuple(sequence[: ends[0] + 1] if ends else sequence)] = score
    return lines


def assert_same(beams, wanted):
    assert {beam.token_ids for beam in beams} == wanted.keys()
    for beam in beams:
        assert abs(beam.score - wanted[beam.token_ids]) < 1e-4
    assert [beam.score for beam in beams] == sorted((beam.score for beam in beams), reverse=True)


@pytest.mark.parametrize("native", [True, False])
def test_lines_and_scores_of_random_searches(pair, native):
    """All of a family's searches run at once: groups of many widths share each step."""
    reference, loaded = pair
    wanted = list(cases(seed=FAMILIES.index(loaded.spec.architecture) if loaded.spec.rope_scaling is None else 9))
    wanted = wanted if native else wanted[::3]
    engine = Engine(loaded, num_blocks=4000, native=native, device="cpu")
    results = engine.generate([Request(ids, beam=params) for ids, params in wanted])
    engine.check()
    for (ids, params), result in zip(wanted, results, strict=True):
        assert_same(result.beams, reference_beams(reference, ids, params))
    assert engine.stats().kv_usage == 0


def random_items(pick, *, same_length):
    """Prefix-free lines of three or four tokens, few enough at each place that searches run out of them at times."""
    end = VOCAB - 2
    items = {}
    tokens = [pick.sample(range(VOCAB - 2), size) for size in (pick.choice([3, 12]), 8, 20)]
    for number in range(pick.choice([5, 60, 400])):
        line = [pick.choice(level) for level in tokens[: 3 if same_length else pick.randint(1, 3)]]
        items[f"item {number}"] = (*line, end)
    return items


@pytest.mark.parametrize("same_length", [True, False])
@pytest.mark.parametrize("native", [True, False])
def test_with_a_catalogue_as_with_allowed_tokens(pair, native, same_length):
    reference, loaded = pair
    engine = Engine(loaded, num_blocks=2000, native=native, device="cpu")
    pick = random.Random(77)
    for number in range(16):
        items = random_items(pick, same_length=same_length)
        by_prefix = {}
        for line in items.values():
            for at in range(len(line)):
                by_prefix.setdefault(line[:at], set()).add(line[at])
        ids = prompt(pick.randint(1, 40), seed=number)
        params = BeamParams(
            width=pick.choice([2, 8, 32]),
            max_tokens=4,
            length_penalty=pick.choice([0.0, 1.0]),
            early_stopping=pick.choice([True, False, "never"]),
            stop_token_ids=(VOCAB - 2,),
            ignore_eos=True,
            catalogue=Catalogue(items),
        )

        def allowed(_, line, by_prefix=by_prefix, ids=ids):
            return sorted(by_prefix.get(tuple(line.tolist()[len(ids) :]), {0}))

        result = engine.generate(Request(ids, beam=params))[0]
        wanted = reference_beams(reference, ids, params, prefix_allowed_tokens_fn=allowed)
        assert_same(result.beams, {line: score for line, score in wanted.items() if line in set(items.values())})
        for beam in result.beams:
            assert beam.items == tuple(name for name, line in items.items() if line == beam.token_ids)


def test_scored_over_legal_tokens_alone(pair):
    """By hand: at each place the log-probability among what the catalogue allows there."""
    reference, loaded = pair
    pick = random.Random(5)
    items = {
        str(number): (pick.randrange(200, 210), pick.randrange(210, 230), pick.randrange(300)) for number in range(90)
    }
    items = {name: line for name, line in items.items() if list(items.values()).count(line) == 1}
    ids = prompt(30)

    def score(line):
        total = 0.0
        for at, token in enumerate(line):
            legal = sorted({other[at] for other in items.values() if other[:at] == line[:at]})
            with torch.inference_mode():
                logits = reference(torch.tensor([[*ids, *line[:at]]])).logits[0, -1]
            total += float(logits[legal].log_softmax(-1)[legal.index(token)])
        return total / len(line)

    params = BeamParams(width=len(items), catalogue=Catalogue(items), scoring="legal")
    for native in (True, False):
        engine = Engine(loaded, num_blocks=200, native=native, device="cpu")
        beams = engine.generate(Request(ids, beam=params))[0].beams
        assert_same(beams, {line: score(line) for line in items.values()})
