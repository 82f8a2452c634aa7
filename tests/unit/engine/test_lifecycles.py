"""What becomes of a job's KV while its tool runs, under full memory: freed, pinned, or moved to the host.

fcfs      freed, taken by others           computed again, however short the tool
pin       kept for two seconds             nothing is computed again after a short tool; after a long one, all of it
offload   freed, but the host has it       loaded, however long the tool
"""

import pytest

from segue.base.clock import VirtualClock
from segue.base.config import EngineConfig
from segue.base.types import SamplingParams
from segue.engine import EngineCore
from segue.engine.jobs import JobDesk
from segue.policies import Call
from tests.fakes import FakeExecutor, expected

SIZE, NUM_BLOCKS = 4, 25  # of which one is never used
PROMPT = [token % 40 for token in range(41)]
ANSWER = 8  # tokens; the last of them is never fed
BLOCK = SIZE * FakeExecutor(2, SIZE).kv_layout.token_bytes
SHORT, LONG = 1.0, 5.0
STRATEGIES = {
    "fcfs": ("fcfs", []),
    "pin": ("continuum-released", []),
    "offload": ("fcfs", [f"host={200 * BLOCK}"]),
    "pin and offload": ("continuum-released", [f"host={200 * BLOCK}"]),
    "adaptive and offload": ("adaptive", [f"host={200 * BLOCK}"]),
}


@pytest.fixture(autouse=True)
def arranged(monkeypatch):
    """The fake model names no tool, and neither computes nor loads in any time."""
    monkeypatch.setattr(JobDesk, "_call_of", lambda desk, sequence: Call("bash", "ls", sequence.turn.job_id))
    monkeypatch.setattr("segue.kv.tiers.courier.Speed.seconds_for", lambda speed, num_bytes: 0.0)


def after_a_tool(strategy, seconds):
    """Where the KV of a job's first turn came from in its second one, while others wanted all of the memory."""
    policy, tiers = STRATEGIES[strategy]
    clock = VirtualClock()
    config = EngineConfig(NUM_BLOCKS, SIZE, max_step_tokens=64, max_running=8, max_model_len=90)
    params = SamplingParams(max_tokens=ANSWER, temperature=0)
    with EngineCore(FakeExecutor(NUM_BLOCKS, SIZE), config, policy=policy, clock=clock, tiers=tiers) as engine:
        [first] = engine.generate(PROMPT, params, job_id="job")
        clock.advance(seconds)
        for number in range(2):  # beside a pin there is room for one of these, else for two
            other = [number + 41, *range(30)]
            [answer] = engine.generate(other, params)
            assert list(answer.token_ids) == expected(other, ANSWER)
        prompt = [*PROMPT, *first.token_ids, 7, 8, 9]
        [second] = engine.generate(prompt, params, job_id="job", is_last_step=True)
        assert list(second.token_ids) == expected(prompt, ANSWER)
        engine.check()
        return second.reuse


WITH_KV = len(PROMPT) + ANSWER - 1  # tokens, when the tool starts
IN_FULL_BLOCKS = WITH_KV // SIZE * SIZE


@pytest.mark.parametrize("seconds", [SHORT, LONG])
def test_freed_and_computed_again(seconds):
    reuse = after_a_tool("fcfs", seconds)
    assert reuse.loaded == 0 and reuse.cached < IN_FULL_BLOCKS - 2 * SIZE, "others took it"


def test_pinned_for_as_long_as_a_short_tool_takes():
    reuse = after_a_tool("pin", SHORT)
    assert reuse.cached == WITH_KV and reuse.loaded == 0


def test_a_pin_that_ends_before_the_tool_is_none():
    assert after_a_tool("pin", LONG) == after_a_tool("fcfs", LONG)


@pytest.mark.parametrize("seconds", [SHORT, LONG])
def test_offloaded_and_loaded_again(seconds):
    reuse = after_a_tool("offload", seconds)
    lost = after_a_tool("fcfs", seconds)
    assert reuse.cached + reuse.loaded == IN_FULL_BLOCKS, "a tail that fills no block is computed again"
    assert reuse.loaded == IN_FULL_BLOCKS - lost.cached // SIZE * SIZE


def test_pinned_while_that_pays_and_loaded_later():
    assert after_a_tool("pin and offload", SHORT).cached == WITH_KV
    late = after_a_tool("pin and offload", LONG)
    assert late.loaded > 0 and late.cached + late.loaded == IN_FULL_BLOCKS


@pytest.mark.parametrize("seconds", [SHORT, LONG])
def test_adaptive_computes_no_full_block_again(seconds):
    reuse = after_a_tool("adaptive and offload", seconds)
    assert reuse.cached + reuse.loaded >= IN_FULL_BLOCKS
