"""The plugin's scheduler over vLLM's own, without a model: right KV, right order, nothing lost, nothing kept."""

import pytest

pytest.importorskip("vllm")

from tests.vllm.harness import BLOCK, World, expected, prompt


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def world(request):
    return lambda **options: World(is_async=request.param, **options)


def test_a_plain_request_is_answered_as_without_the_plugin(world):
    here = world()
    for seed in range(5):
        here.add(f"r{seed}", prompt(seed, 40 + seed), max_tokens=6)
    here.run()
    for seed in range(5):
        assert here.said[f"r{seed}"] == expected(prompt(seed, 40 + seed), 6)
    assert here.num_free == here.num_blocks and not here.reports["r0"]


def test_a_continuation_prefills_one_token_and_its_suffix(world):
    here = world(num_blocks=24)
    here.add("a", prompt(1, 53), max_tokens=7, hold_seconds=60)
    here.run()
    for seed in range(8):  # everything that can be evicted is
        here.add(f"other{seed}", prompt(100 + seed, 200), max_tokens=4)
        here.run()
    here.add("b", [400, 401, 402], max_tokens=5, continuation_of="a")
    here.run()
    tokens = prompt(1, 53) + here.said["a"] + [400, 401, 402]
    assert here.prefilled["b"] == 1 + 3
    assert here.said["b"] == expected(tokens, 5)
    assert here.reports["b"]["inherited_tokens"] == 53 + 7 - 1 and here.reports["b"]["recomputed_tokens"] == 0
    here.clock.advance(61)
    here.add("c", prompt(9, 20))
    here.run()
    assert here.num_free == here.num_blocks
