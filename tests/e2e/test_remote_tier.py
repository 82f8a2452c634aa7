"""Engines that share a real Redis, and what they do when it is killed, comes back, or says nothing: right answers, in bounded
time."""

import signal
import time

import pytest

pytest.importorskip("redis")

from segue import Engine, SamplingParams
from tests.fakes import settle
from tests.remotes import redis_server

PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPTS = [[(number * 31 + 7 * token * token + token) % 256 for token in range(330)] for number in range(4)]
FULL = 329 // 16 * 16  # tokens of a prompt that a tier can have


@pytest.fixture
def redis(tmp_path):
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Loading is always sooner than computing, and nobody waits long for a server."""
    monkeypatch.setattr("segue.kv.tiers.courier.Speed.seconds_for", lambda speed, num_bytes: 0.0)
    monkeypatch.setattr("segue.kv.tiers.remote._REPLY_SECONDS", 1.0)
    monkeypatch.setattr("segue.engine.tiering._MOST_LOOKING", 1.0)


@pytest.fixture(scope="module")
def answers():
    with Engine("tiny") as engine:
        return [engine.generate(prompt, PARAMS)[0].token_ids for prompt in PROMPTS]


def make(redis, *more, **options):
    return Engine("tiny", num_blocks=60, tiers=[f"remote={redis.url}", *more], **options)


def ask(engine, number, answers, **options):
    [result] = engine.generate(PROMPTS[number], PARAMS, **options)
    assert result.token_ids == answers[number]
    engine.check()
    return result.reuse


def row(engine):
    return next(row for row in engine.tiers() if row["tier"] == "remote")


def test_what_one_engine_computed_another_loads(redis, answers):
    with make(redis) as first, make(redis) as second:
        ask(first, 0, answers)
        settle(first)
        reuse = ask(second, 0, answers)
        assert reuse.loaded == FULL and reuse.cached == 0
        assert row(second)["loaded_blocks"] == FULL // 16 and row(second)["errors"] == 0


def test_what_another_tenant_or_model_stored_is_not_found(redis, answers):
    with make(redis) as first, make(redis) as second, make(redis, dtype="bf16") as other_model:
        ask(first, 0, answers, salt="a")
        settle(first)
        assert ask(second, 0, answers, salt="b").loaded == 0
        assert ask(second, 0, answers).loaded == 0
        assert other_model.generate(PROMPTS[0], PARAMS, salt="a")[0].reuse.loaded == 0
        assert ask(second, 0, answers, salt="a").loaded == FULL


def test_reset_empties_it(redis, answers):
    with make(redis) as first, make(redis) as second:
        ask(first, 0, answers)
        settle(first)
        assert first.forget_stored()["remote"] >= FULL // 16
        assert ask(second, 0, answers).loaded == 0


@pytest.mark.parametrize("moment", ["before a load", "while it loads"])
def test_killed_and_restarted_around_a_load(redis, answers, moment):
    with make(redis) as first:
        for number in range(4):
            ask(first, number, answers)
        settle(first)
    with make(redis) as engine:
        assert ask(engine, 0, answers).loaded == FULL
        request = engine.submit(PROMPTS[1], PARAMS)
        if moment == "while it loads":
            deadline = time.monotonic() + 20
            while row(engine)["loaded_blocks"] == FULL // 16:  # of the first prompt alone
                engine.step()
                assert time.monotonic() < deadline
        redis.kill()
        assert collect(engine, request) == answers[1]
        ask(engine, 2, answers)
        redis.start()  # empty: it keeps nothing
        until_tried_again(engine, answers)


def collect(engine, request):
    tokens, deadline = [], time.monotonic() + 20
    while engine.is_active(request):
        tokens += [token for delta in engine.step() if delta.request_id == request for token in delta.token_ids]
        assert time.monotonic() < deadline, "it waits for a server that is gone"
    engine.check()
    return tokens


def until_tried_again(engine, answers):
    """It stores there again before long."""
    deadline, before = time.monotonic() + 60, row(engine)["stored_blocks"]
    while row(engine)["stored_blocks"] == before:
        assert time.monotonic() < deadline
        ask(engine, 3, answers)
        ask(engine, 2, answers)
        settle(engine)
        time.sleep(0.1)


def test_killed_and_restarted_while_it_stores(redis, answers):
    with make(redis) as engine:
        ask(engine, 0, answers)
        redis.kill()
        for number in range(4):
            ask(engine, number, answers)
        settle(engine)
        assert row(engine)["errors"] > 0
        redis.start()
        until_tried_again(engine, answers)


def test_a_server_that_says_nothing_is_not_waited_for(redis, answers):
    with make(redis) as first:
        ask(first, 0, answers)
        settle(first)
    with make(redis) as engine:
        redis.signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert ask(engine, 0, answers).loaded == 0
            assert time.monotonic() - began < 10, "a bounded wait"
            for number in range(1, 4):
                ask(engine, number, answers)
            settle(engine)
            assert row(engine)["errors"] > 0 and row(engine)["breaks"] > 0
        finally:
            redis.signal(signal.SIGCONT)
        until_tried_again(engine, answers)


def test_a_server_that_is_not_there_yet_is_no_reason_not_to_start(redis, answers):
    redis.kill()
    with make(redis) as engine:
        ask(engine, 0, answers)
        redis.start()
        until_tried_again(engine, answers)


def test_host_disk_and_remote_together(redis, answers, tmp_path):
    tiers = "host=16MiB", f"disk={tmp_path / 'kv'},64MiB"
    with make(redis, *tiers) as engine:
        for number in range(4):
            ask(engine, number, answers)
        settle(engine)
        assert {row["tier"] for row in engine.tiers()} == {"host", "disk", "remote"}
        reuse = ask(engine, 0, answers)
        assert reuse.loaded + reuse.cached == FULL
    with make(redis, f"disk={tmp_path / 'kv'},64MiB") as again:
        assert ask(again, 0, answers).loaded == FULL
        assert row(again)["loaded_blocks"] == 0, "the folder is nearer"
