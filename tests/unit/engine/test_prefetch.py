"""KV of a job that is about to return waits for it in the host's memory."""

import pytest

from segue.base.clock import VirtualClock
from segue.base.config import EngineConfig
from segue.base.types import SamplingParams
from segue.engine import EngineCore
from segue.policies import Adaptive, Call, Disposition, Policy, Pressure, Returned, TurnEnd, TurnView
from tests.fakes import FakeExecutor, expected, settle

SIZE = 4
PROMPT = [token % 40 for token in range(41)]
PARAMS = SamplingParams(max_tokens=4, temperature=0)
NUM_FULL = 44 // SIZE  # blocks, of what has KV when the turn ends


class Expects(Policy):
    name = "expects"

    def at_turn_end(self, end, pressure, now):
        return Disposition(prefetch_seconds=3.0)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setattr("segue.kv.tiers.courier.Speed.seconds_for", lambda speed, num_bytes: 0.0)
    config = EngineConfig(16, SIZE, max_step_tokens=64, max_running=8, max_model_len=60)
    tiers = [f"disk={tmp_path / 'kv'},1MiB"]
    clock = VirtualClock()
    with EngineCore(FakeExecutor(16, SIZE), config, policy=Expects(), clock=clock, tiers=tiers) as engine:
        engine.clock = clock
        yield engine


def ask(engine, prompt, **options):
    [result] = engine.generate(prompt, PARAMS, **options)
    assert result.token_ids == expected(prompt, 4)
    engine.check()
    return result


def away(engine):
    """The job's first turn, after which only the folder has its KV. Its tokens."""
    first = ask(engine, PROMPT, job_id="job")
    settle(engine)
    flood(engine)
    return [*PROMPT, *first.token_ids, 7]


def flood(engine):
    ask(engine, [token % 37 + 1 for token in range(52)])
    settle(engine)
    engine._tiers._host.drop()


def wait(engine, seconds):
    engine.clock.advance(seconds)
    engine.expire()
    settle(engine)


def disk(engine):
    return engine.tiers()[0]


def test_it_is_there_when_the_job_returns(engine):
    prompt = away(engine)
    wait(engine, 2.5)
    assert disk(engine)["prefetched_blocks"] == 0
    wait(engine, 1.0)
    assert disk(engine)["prefetched_blocks"] > 0
    loaded = disk(engine)["loaded_blocks"]
    assert loaded == disk(engine)["prefetched_blocks"]
    reuse = ask(engine, prompt, job_id="job").reuse
    assert reuse.cached + reuse.loaded == NUM_FULL * SIZE and reuse.loaded > 0
    assert disk(engine)["loaded_blocks"] == loaded, "all of it had come"


def test_an_engine_that_rests_knows_when_to_look(engine):
    away(engine)
    assert 0 < engine.expire() <= 3.0


@pytest.mark.parametrize("how", ["it is back", "it is over"])
def test_nothing_is_fetched_for_nobody(engine, how):
    prompt = away(engine)
    wait(engine, 1.0)
    ask(engine, prompt, job_id="job", is_last_step=how == "it is over")
    settle(engine)
    flood(engine)
    wait(engine, 2.5)
    assert disk(engine)["prefetched_blocks"] == 0, "the first turn's time has passed"
    wait(engine, 1.0)
    assert (disk(engine)["prefetched_blocks"] == 0) == (how == "it is over"), "after another turn it is expected anew"


def test_what_the_device_still_has_is_not_fetched(engine):
    ask(engine, PROMPT, job_id="job")
    settle(engine)
    engine._tiers._host.drop()
    wait(engine, 4.0)
    assert disk(engine)["prefetched_blocks"] == 0


def test_adaptive_fetches_before_the_first_calls_end():
    policy, call = Adaptive(), Call("bash", "pytest")
    for number in range(200):
        policy.observe(Returned("j", call, 10.0 + number / 20))
    end = TurnEnd(TurnView(1, "j", 0.0, 400, 2000, 2000, 0), 125, call)
    full = Pressure(1000, 0, 300, num_waiting=5, num_running=8, seconds_per_token=1e-5)
    assert policy.at_turn_end(end, full, 0.0).prefetch_seconds is None
    slow = Pressure(1000, 0, 300, num_waiting=5, num_running=8, seconds_per_token=1e-5, slow_seconds_per_token=0.001)
    told = policy.at_turn_end(end, slow, 0.0)
    assert told.keep_seconds == 0 and 6.0 < told.prefetch_seconds < 11.0, "two seconds before the first tenth"
    empty = Pressure(100000, 99000, 0, seconds_per_token=0.01, slow_seconds_per_token=0.001)
    kept = policy.at_turn_end(end, empty, 0.0)
    assert kept.keep_seconds > 0 and kept.prefetch_seconds >= kept.keep_seconds
