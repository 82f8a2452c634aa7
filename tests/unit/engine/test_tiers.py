"""KV that leaves the device and comes back: the same answers, and not a token computed that a tier had."""

import contextlib
import os
import threading
import time

import pytest

from segue.base.config import EngineConfig
from segue.base.errors import InvalidRequest, TierError
from segue.base.types import SamplingParams
from segue.engine import EngineCore
from tests.fakes import FakeExecutor, expected, settle

SIZE = 4
BLOCK = SIZE * FakeExecutor(2, SIZE).kv_layout.token_bytes
FIRST, SECOND = [token % 40 for token in range(41)], [token % 37 + 1 for token in range(41)]


@pytest.fixture(autouse=True)
def loading_takes_no_time(request, monkeypatch):
    """What this model computes takes no time either: but for the test of just this, tiers are always sooner."""
    if "sooner" not in request.node.name:
        monkeypatch.setattr("segue.kv.tiers.courier.Speed.seconds_for", lambda speed, num_bytes: 0.0)


def make(tiers, num_blocks=16, *, model="m", policy="fcfs", **options):
    config = EngineConfig(
        num_blocks, SIZE, **{"max_step_tokens": 64, "max_running": 8, "max_model_len": 200, **options}
    )
    return EngineCore(FakeExecutor(num_blocks, SIZE), config, tiers=tiers, model_fingerprint=model, policy=policy)


def greedy(max_tokens=4):
    return SamplingParams(max_tokens=max_tokens, temperature=0)


def ask(engine, prompt, **options):
    """Its answer is right; where the prompt's KV came from."""
    result = engine.generate(prompt, greedy(), **options)[0]
    assert result.token_ids == expected(prompt, 4)
    engine.check()
    return result.reuse


def disk(folder, size="1MiB"):
    return [f"disk={folder},{size}"]


# ---- host


def test_what_the_device_had_to_give_up_comes_back_from_the_host():
    with make([f"host={100 * BLOCK}"]) as engine:
        ask(engine, FIRST)
        ask(engine, SECOND)  # takes most of the fifteen blocks
        reuse = ask(engine, FIRST)
        assert reuse.loaded > 0 and reuse.loaded + reuse.cached == 40 and reuse.recomputed == 0
        row = engine.tiers()[0]
        assert row["found_blocks"] == reuse.loaded // SIZE
        assert row["looked_blocks"] == 10 + 10 + row["found_blocks"], "two prompts that nobody had, and what was lost"


def test_without_a_tier_the_same_is_computed_again():
    with make([]) as engine:
        ask(engine, FIRST)
        ask(engine, SECOND)
        reuse = ask(engine, FIRST)
        assert reuse.loaded == 0 and reuse.new > 20


def test_what_fits_the_device_is_not_copied():
    with make([f"host={100 * BLOCK}"], num_blocks=64) as engine:
        ask(engine, FIRST)
        ask(engine, SECOND)
        assert ask(engine, FIRST).cached == 40
        assert engine.tiers()[0]["stored_blocks"] == 0


def test_a_hit_that_is_cut_short_loads_what_there_is():
    with make([f"host={10 * BLOCK}"]) as engine:  # too few for both prompts
        reuses = [ask(engine, prompt) for prompt in (FIRST, SECOND, FIRST)]
        assert reuses[-1].cached == 16 and 0 < reuses[-1].loaded < 24


def test_a_state_that_lost_its_kv_goes_on_from_the_host():
    with make([f"host={100 * BLOCK}"]) as engine:
        state = engine.generate(FIRST, greedy())[0].state
        ask(engine, SECOND)
        result = engine.continue_(state, [7], greedy())
        assert result.token_ids == expected([*state.tokens, 7], 4)
        assert result.reuse.loaded > 0 and result.reuse.recomputed < SIZE


def test_loading_is_left_alone_where_computing_is_sooner():
    with make([f"host={100 * BLOCK}"]) as engine:
        ask(engine, FIRST)
        ask(engine, SECOND)
        ask(engine, FIRST)  # now it knows how long that takes
        ask(engine, SECOND)
        engine._scheduler.jobs.gauge.seconds_per_token = 1e-12
        assert ask(engine, FIRST).loaded == 0
        assert engine.tiers()[0]["requests"]["compute"] >= 1


# ---- others are not held up


class Gated:
    """A slow tier whose loads wait to be let through."""

    def __init__(self, tier):
        self.tier, self.gate = tier, threading.Event()

    def __len__(self):
        return len(self.tier)

    def __getattr__(self, name):
        return getattr(self.tier, name)

    def load_all(self, blocks):
        assert self.gate.wait(20)
        return self.tier.load_all(blocks)


def test_a_request_that_waits_for_a_slow_tier_holds_nobody_up(tmp_path):
    with make(disk(tmp_path)) as engine:
        ask(engine, FIRST)
        settle(engine)
    with make(disk(tmp_path), num_blocks=64, max_running=1) as engine:
        courier = engine._tiers._couriers[0]
        courier.tier = gated = Gated(courier.tier)
        waiting = engine.submit(FIRST, greedy())
        engine.step()
        assert engine.stats().num_loading == 1 and engine.stats().num_running == 0
        assert ask(engine, SECOND).loaded == 0, "another runs, though there is one slot only"
        engine.check()
        assert engine.stats().num_loading == 1
        gated.gate.set()
        stream = engine.follow(waiting)
        assert [token for delta in stream for token in delta.token_ids] == expected(FIRST, 4)
        assert stream.result.reuse.loaded == 40


@pytest.mark.parametrize("end", ["abort", "close"])
def test_a_request_can_end_while_its_kv_is_on_its_way(tmp_path, end):
    with make(disk(tmp_path)) as engine:
        ask(engine, FIRST)
        settle(engine)
    engine = make(disk(tmp_path))
    courier = engine._tiers._couriers[0]
    courier.tier = gated = Gated(courier.tier)
    request = engine.submit(FIRST, greedy())
    engine.step()
    assert engine.kv.usage > 0
    if end == "abort":
        engine.abort(request)
        engine.check()
        assert engine.kv.usage == 0
        gated.gate.set()
        settle(engine)
        assert ask(engine, FIRST).new <= 41
    gated.gate.set()
    engine.close()


def test_one_that_runs_takes_memory_from_one_that_still_loads(tmp_path):
    with make(disk(tmp_path), num_blocks=32) as engine:
        ask(engine, FIRST)
        settle(engine)
    with make(disk(tmp_path), num_blocks=20) as engine:
        courier = engine._tiers._couriers[0]
        courier.tier = gated = Gated(courier.tier)
        tokens = {"running": [], "loading": []}

        def step():
            for delta in engine.step():
                tokens[delta.request_id] += delta.token_ids
            engine.check()

        engine.submit(SECOND[:9], greedy(60), request_id="running")
        step()
        engine.submit(FIRST, greedy(), request_id="loading")
        step()
        assert engine.stats().num_loading == 1
        while len(tokens["running"]) < 60:
            step()
        assert tokens["running"] == expected(SECOND[:9], 60) and engine.stats().num_preemptions == 0
        gated.gate.set()
        while engine.has_work:
            step()
        assert tokens["loading"] == expected(FIRST, 4)


# ---- disk


def test_a_prefix_survives_the_process(tmp_path):
    with make(disk(tmp_path)) as engine:
        ask(engine, FIRST)
    with make(disk(tmp_path)) as engine:
        assert ask(engine, FIRST).loaded == 40
        assert engine.tiers()[0]["loaded_blocks"] == 10


def test_host_and_disk_together(tmp_path):
    with make([f"host={3 * BLOCK}", *disk(tmp_path)]) as engine:
        for prompt in (FIRST, SECOND, FIRST, SECOND):
            ask(engine, prompt)
            settle(engine)
        assert ask(engine, FIRST).new <= 1 + SIZE


@pytest.mark.parametrize("salt", ["tenant", "tenant\0part"])
@pytest.mark.parametrize("in_host", [True, False])
def test_another_tenant_finds_nothing(tmp_path, salt, in_host):
    with make([f"host={100 * BLOCK}", *disk(tmp_path)]) as engine:
        ask(engine, FIRST, salt="tenant\0other")
        ask(engine, SECOND)
        settle(engine)
        if in_host:
            assert ask(engine, FIRST, salt=salt).inherited == 0
    if not in_host:
        with make(disk(tmp_path)) as engine:
            assert ask(engine, FIRST, salt=salt).inherited == 0
            assert ask(engine, FIRST, salt="tenant\0other").inherited == 40


def test_another_model_finds_nothing(tmp_path):
    with make(disk(tmp_path)) as engine:
        ask(engine, FIRST)
    with make(disk(tmp_path), model="another") as engine:
        assert ask(engine, FIRST).loaded == 0


@pytest.mark.parametrize("damage", ["bit", "short", "long", "empty", "other"])
def test_a_damaged_file_is_computed_again_and_counted(tmp_path, damage):
    with make(disk(tmp_path)) as engine:
        ask(engine, FIRST)
    files = sorted(tmp_path.glob("*/*/*.kv"))
    assert len(files) == 11
    for path in files:
        data = bytearray(path.read_bytes())
        if damage == "bit":
            data[-3] ^= 4
        elif damage == "other":
            data = bytearray(files[0].read_bytes() if path != files[0] else files[1].read_bytes())
        else:
            data = {"short": data[:-1], "long": data + b"x", "empty": bytearray()}[damage]
        path.write_bytes(data)
    with make(disk(tmp_path)) as engine:
        assert ask(engine, FIRST).loaded == 0
        assert engine.tiers()[0]["damaged_blocks"] >= 1
        settle(engine)
    with make(disk(tmp_path)) as engine:
        assert ask(engine, FIRST).loaded > 0, "it was stored anew"


def test_a_full_tier_keeps_what_was_used(tmp_path):
    with make(disk(tmp_path, 12 * (BLOCK + 64))) as engine:
        for number in range(6):
            ask(engine, FIRST if number % 2 else [number] * 40)
            settle(engine)
        row = engine.tiers()[0]
        assert row["bytes"] <= row["capacity_bytes"] and row["blocks"] <= 12


def test_a_folder_that_cannot_be_written_is_left_alone(tmp_path, monkeypatch):
    with make(disk(tmp_path)) as engine:

        def refuse(*_):
            raise PermissionError("not allowed")

        monkeypatch.setattr(os, "rename", refuse)
        for number in range(3):
            ask(engine, [number] * 41)
            settle(engine)
        row = engine.tiers()[0]
        assert row["errors"] >= 3 and row["breaks"] >= 1 and row["is_out"] and row["blocks"] == 0
    assert not list(tmp_path.glob("*/*/*"))


@contextlib.contextmanager
def no_permission(folder):
    """For whoever may everything: as somebody else, who may nothing here."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        folder.chmod(0)
        try:
            yield
        finally:
            folder.chmod(0o700)


def test_a_permission_that_is_lost_and_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr("segue.kv.tiers.courier._SHORTEST_BREAK", 0.05)
    folder = tmp_path / "kv"
    with make(disk(folder)) as engine:
        ask(engine, FIRST)
        settle(engine)
        ask(engine, SECOND)
        settle(engine)
        engine._tiers._host.drop()
        with no_permission(folder):
            assert ask(engine, FIRST).loaded == 0
            for number in range(3):
                ask(engine, [number] * 41)
                settle(engine)
            row = engine.tiers()[0]
            assert row["errors"] >= 3 and row["breaks"] >= 1
        deadline, loaded = time.monotonic() + 20, 0
        while not loaded:  # as soon as it is tried again
            assert time.monotonic() < deadline
            time.sleep(0.02)
            engine._tiers._host.drop()
            loaded = ask(engine, SECOND).loaded
            ask(engine, [5] * 52)
            settle(engine)


def test_reset_deletes_one_tenants_or_all(tmp_path):
    with make([f"host={100 * BLOCK}", *disk(tmp_path)], num_blocks=64) as engine:
        for salt in ("a", "b\0x"):
            ask(engine, FIRST, salt=salt)
        settle(engine)
        engine.forget("a")
        assert ask(engine, FIRST, salt="a").inherited == 0 and ask(engine, FIRST, salt="b\0x").inherited == 40
        settle(engine)
        engine.forget()
        assert not list(tmp_path.glob("*/*/*.kv"))
        assert ask(engine, FIRST, salt="b\0x").inherited == 0


@pytest.mark.parametrize(
    "tiers",
    [["host"], ["host=1"], ["host=x"], ["disk=/tmp/x"], ["disk=,1GiB"], ["floppy=1"], ["host=1GiB", "host=2GiB"]],
)
def test_what_is_no_tier_is_refused(tiers):
    with pytest.raises(InvalidRequest, match="tier"):
        make(tiers)


def test_a_folder_that_is_none_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="cannot be used"):
        make(disk(tmp_path / "file"))


def test_tiers_without_prefix_caching_are_refused():
    with pytest.raises(InvalidRequest, match="prefix caching"):
        make([f"host={100 * BLOCK}"], prefix_caching=False)
