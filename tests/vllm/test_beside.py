"""Beside other parts of vLLM: its offloading connector, whose hits still count, and adapters."""

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest

from tests.vllm.harness import BLOCK, PlainScheduler, World, expected, prompt
from tests.vllm.test_scheduler import evict


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def world(request):
    return lambda **options: World(is_async=request.param, **options)


def test_what_was_offloaded_is_found_as_without_the_plugin(world):
    here, plain = world(num_blocks=24, offloads=True), world(num_blocks=24, offloads=True, cls=PlainScheduler)
    for each in (here, plain):
        for number in range(2):
            each.add(f"a{number}", prompt(1, 100), max_tokens=6)
            each.run()
            evict(each)
    assert here.num_loaded == plain.num_loaded > 0 and here.said == plain.said
    assert here.said["a1"] == expected(prompt(1, 100), 6)


def test_a_continuation_takes_the_lease_and_of_the_rest_what_was_offloaded(world):
    here = world(num_blocks=24, offloads=True)
    here.add("a", prompt(1, 100), max_tokens=7, hold_seconds=60)
    here.add("b", prompt(2, 100), max_tokens=7)
    here.run()
    evict(here)
    loaded = here.num_loaded
    here.add("held", [400, 401], max_tokens=5, continuation_of="a")
    here.run()
    assert here.num_loaded == loaded and here.reports["held"]["inherited_tokens"] == 106 // BLOCK * BLOCK
    here.add("offloaded", [400, 401], max_tokens=5, continuation_of="b")
    here.run()
    assert here.num_loaded > loaded and here.reports["offloaded"]["inherited_tokens"] == 106 // BLOCK * BLOCK
    for name, parent, seed in (("held", "a", 1), ("offloaded", "b", 2)):
        assert here.said[name] == expected(prompt(seed, 100) + here.said[parent] + [400, 401], 5)
    here.clock.advance(61)
    here.add("last", prompt(9, 20))
    here.run()
    assert here.num_free == here.num_blocks


def test_many_with_holds_longer_than_memory_all_end_beside_offloading(world):
    here = world(num_blocks=14, offloads=True)
    for seed in range(40):
        fields = {"hold_seconds": 3600.0} if seed % 3 else {}
        here.add(f"r{seed}", prompt(seed % 6, 30 + seed % 40), max_tokens=5, job_id=f"j{seed % 3}", **fields)
        if seed % 4 == 3:
            here.step()
    here.run()
    assert all(here.said[f"r{seed}"] == expected(prompt(seed % 6, 30 + seed % 40), 5) for seed in range(40))


def test_only_the_adapter_that_made_a_state_continues_it(world):
    here, one, other = world(has_lora=True), LoRARequest("one", 1, "/none"), LoRARequest("other", 2, "/none")
    here.add("a", prompt(1, 40), hold_seconds=60, lora=one)
    here.run()
    here.add("running", prompt(2, 40), max_tokens=12, lora=one)
    here.step()
    here.add("same", [300], continuation_of="a", lora=one)
    here.add("other", [300], continuation_of="a", lora=other)
    here.add("base", [300], continuation_of="a")
    here.add("heir", [300], continuation_of="running", lora=other)
    here.run()
    statuses = {name: here.reports[name].get("status") for name in ("same", "other", "base", "heir")}
    assert statuses == {"same": None, "other": 400, "base": 400, "heir": 400}
    assert here.prefilled["same"] == 2 and "'one'" in here.reports["base"]["error"]


@pytest.mark.parametrize("lora", [None, LoRARequest("one", 1, "/none")], ids=["base", "adapter"])
def test_the_prefix_cache_knows_adapters_apart_in_continuations_too(world, lora):
    """The same tokens under another adapter are other KV."""
    here = world(has_lora=True)
    here.add("a", prompt(1, 64), lora=LoRARequest("other", 2, "/none"))
    here.add("b", prompt(1, 64), lora=lora, hold_seconds=60)
    here.run()
    here.add("c", [300], continuation_of="b", lora=lora)
    here.add("d", [*prompt(1, 64), *here.said["b"], 300], lora=lora)
    here.run()
    assert here.scheduler.states.find("c", "").keys[:4] == here.scheduler.states.find("d", "").keys[:4]
    assert here.scheduler.states.find("c", "").keys[0] != here.scheduler.states.find("a", "").keys[0]
