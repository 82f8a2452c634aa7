"""Anything in any order, in too little memory: all that is not aborted ends, with the right tokens, and nothing stays behind."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise

import pytest

pytest.importorskip("vllm")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import RequestStatus

from segue.vllm.versions import UnsupportedVLLM, check_config, installed
from tests.vllm.harness import BLOCK, World, expected, make_config, prompt

A_WEEK = 7 * 86400.0
ENDED_WELL = ("length", "stop")


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def world(request):
    return lambda **options: World(is_async=request.param, **options)


@dataclass(frozen=True)
class Ask:
    tokens: list[int]
    max_tokens: int
    stops: set[int]
    salt: str | None
    parent: str | None
    names: list[str]  # of its state


class Play:
    """A world, and what was asked of it, by request id."""

    def __init__(self, world) -> None:
        self.world = world
        self.asked: dict[str, Ask] = {}
        self.aborted: set[str] = set()
        self.released: set[str] = set()
        self.num_idle = 0  # steps in a row

    # What may happen

    def move(self, chance):
        """Whatever chance says: mostly requests and steps."""
        moves = [self.add, self.step, self.advance, self.abort, self.release, self.reset]
        chance.choices(moves, [40, 40, 10, 7, 3, 2])[0](chance)
        self.check()

    def add(self, chance):
        parent = self.any_id(chance) if self.asked and chance.random() < 0.6 else None
        salt = self.asked[parent].salt if parent in self.asked else None
        salt = salt if chance.random() < 0.95 else "another tenant's"
        # Prompts that begin alike share blocks.
        tokens, max_tokens = prompt(chance.randrange(4), chance.randint(1, 3 * BLOCK)), chance.randint(1, 20)
        if self.longest(parent) + len(tokens) + max_tokens > self.world.num_blocks * BLOCK:
            return
        number = len(self.asked)
        request_id, names = f"cmpl-{number}-0-{number:08x}", [f"cmpl-{number}", f"cmpl-{number}-0"]
        fields = {
            "continuation_of": chance.choice(self.asked[parent].names) if parent in self.asked else parent,
            "state_id": chance.choice([None, f"state-{number}"]),
            "hold_seconds": chance.choice([None, None, 0.0, 0.5, 60.0]),
            "job_id": chance.choice([None, None, "x", "y", "z"]),
            "is_last_step": chance.choice([None, None, False, True]),
        }
        if fields["is_last_step"] and (fields["job_id"] is None or fields["hold_seconds"]):
            fields["is_last_step"] = None
        given = {field: value for field, value in fields.items() if value is not None}
        stops = set(range(10, 500, 7)) if chance.random() < 0.3 else set()
        names = [*names, request_id, given.get("state_id", request_id)]
        self.asked[request_id] = Ask(tokens, max_tokens, stops, salt, parent, names)
        request = self.world.add(request_id, tokens, max_tokens, salt=salt, **given)
        request.sampling_params.stop_token_ids = sorted(stops)

    def abort(self, chance):
        if self.world.scheduler.connector is not None and installed().startswith("0.26."):
            return  # there an abort of what is not computed whole ends the connector, with vLLM's own scheduler as well
        request_ids = {self.any_id(chance) for _ in range(chance.randint(1, 4))}
        self.aborted |= request_ids
        self.world.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def release(self, chance):
        request_id = self.any_id(chance)
        if (ask := self.asked.get(request_id)) is not None:
            self.released.add(request_id)
            self.world.scheduler.segue_release(chance.choice(ask.names), ask.salt or "")

    def step(self, chance):
        for _ in range(chance.randint(1, 12)):
            must_run = bool(self.world.scheduler.waiting) and not self.world.scheduler.running
            planned = self.world.step()
            self.num_idle = self.num_idle + 1 if must_run and not planned.num_scheduled_tokens else 0
            assert self.num_idle < 4, "requests wait, and nothing runs"
            self.check()

    def advance(self, chance):
        self.world.clock.advance(chance.choice([0.1, 1.0, 30.0]))

    def reset(self, chance):
        if self.world.scheduler.connector is not None:
            return  # vLLM itself does not while anything is being loaded
        self.world.scheduler.reset_prefix_cache(reset_running_requests=chance.random() < 0.5)

    def any_id(self, chance):
        return chance.choice(list(self.asked)) if self.asked and chance.random() < 0.95 else "nobody"

    # What must be so

    def check(self):
        """Every block has as many holders as there are tables and leases with it."""
        scheduler = self.world.scheduler
        leases, manager = scheduler.blocks.leases, scheduler.kv_cache_manager
        holders = Counter(block for lease in leases for block in lease.blocks)
        for request_id in scheduler.requests:
            holders.update(block.block_id for block in manager.get_blocks(request_id).blocks[0])
        for _, freed in getattr(scheduler, "deferred_frees", ()):  # beside a connector, once a step has ended
            holders.update(block.block_id for block in freed)
        blocks = [block for block in manager.block_pool.blocks if not block.is_null]
        assert all(block.ref_cnt == holders[block.block_id] for block in blocks)
        assert self.world.num_free == len(blocks) - len(holders)
        assert leases.order_agrees()

    def finish(self):
        self.world.run()
        self.world.clock.advance(2 * A_WEEK)
        self.world.step()
        for request_id, ask in self.asked.items():
            self.check_end(request_id, ask)
        self.check_nothing_is_left()

    def check_end(self, request_id, ask):
        end = self.world.ended.get(request_id)
        if end in ENDED_WELL:
            answer = expected(self.history(request_id), ask.max_tokens)
            length = next((at for at, token in enumerate(answer, 1) if token in ask.stops), len(answer))
            assert self.world.said[request_id] == answer[:length]
        elif end == "error":
            assert not self.world.said[request_id] and not self.may_continue(ask)
        else:
            assert request_id in self.aborted

    def check_nothing_is_left(self):
        scheduler = self.world.scheduler
        assert not scheduler.blocks.leases and self.world.num_free == self.world.num_blocks
        assert not scheduler._asked and not scheduler._names and not scheduler.requests
        assert not scheduler.jobs._pins and not scheduler.jobs._by_lease and not scheduler.holds._turns
        assert not scheduler._refused and not scheduler._num_special

    def may_continue(self, ask):
        """A parent is none if it is another tenant's, did not end well, was released, or may have been forgotten."""
        if ask.parent is None:
            return True
        parent, is_forgetful = self.asked.get(ask.parent), self.world.scheduler.states.max_states < len(self.asked)
        if parent is None or parent.salt != ask.salt or ask.parent in self.released or is_forgetful:
            return False
        return self.world.ended.get(ask.parent) in ENDED_WELL

    def history(self, request_id):
        ask = self.asked[request_id]
        before = self.history(ask.parent) + self.world.said[ask.parent] if ask.parent is not None else []
        return before + ask.tokens

    def longest(self, request_id):
        if request_id not in self.asked:
            return 0
        ask = self.asked[request_id]
        return self.longest(ask.parent) + len(ask.tokens) + ask.max_tokens


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["fcfs", "continuum", "adaptive"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    chance=st.randoms(use_true_random=True),
    num_moves=st.integers(1, 60),
    num_blocks=st.integers(8, 24),
    budget=st.sampled_from([32, 512]),
    max_seqs=st.sampled_from([2, 16]),
    max_states=st.sampled_from([2, 1000]),
    offloads=st.booleans(),
)
def test_whatever_happens_answers_are_right_and_nothing_is_left(
    is_async, policy, chance, num_moves, max_states, **options
):
    play = Play(World(is_async=is_async, options={"policy": policy, "max_states": max_states}, **options))
    for _ in range(num_moves):
        play.move(chance)  # and look that every block has its holders
    play.finish()  # and that every answer is right, and nothing left


# Heirs


def test_all_heirs_of_a_request_start_from_its_kv_and_the_last_lets_it_go(world):
    here = world(num_blocks=64, max_seqs=2)
    here.add("a", prompt(1, 53), max_tokens=7)
    for at in range(5):
        here.add(f"heir{at}", [200 + at], max_tokens=6, continuation_of="a")
    here.run()
    assert all(here.prefilled[f"heir{at}"] == 2 for at in range(5))
    assert not here.scheduler.blocks.leases and here.num_free == here.num_blocks


def test_an_heir_that_is_aborted_leaves_its_parent_and_siblings_alone(world):
    here = world()
    here.add("a", prompt(1, 40), max_tokens=6)
    here.step()
    for name in ("stays", "goes"):
        here.add(name, [300], continuation_of="a")
    here.add("orphan", [301], continuation_of="goes")
    here.abort("goes")
    here.run()
    assert here.said["stays"] == expected(prompt(1, 40) + here.said["a"] + [300], 4)
    assert "goes" not in here.ended and here.ended["orphan"] == "error"
    assert not here.scheduler._asked and not here.scheduler._names and not here.scheduler.requests


def test_an_answer_that_ends_before_its_limit_leaves_all_but_its_last_token(world):
    here = world()
    here.add("a", prompt(1, 40), max_tokens=20, hold_seconds=60).sampling_params.stop_token_ids = [
        expected(prompt(1, 40), 9)[-1]
    ]
    here.run()
    here.add("b", [300], max_tokens=12, continuation_of="a")
    here.run()
    assert here.ended["a"] == "stop" and len(here.said["a"]) == 9 and here.prefilled["b"] == 2


@pytest.mark.parametrize("are_named", [False, True])
def test_a_parent_and_its_heirs_can_be_aborted_at_once(world, are_named):
    here = world()
    here.add("a", prompt(1, 40))
    here.step()
    names = ["a", *(f"heir{at}" for at in range(40))]
    for parent, name in pairwise(names):
        here.add(name, [300], continuation_of=parent)
    here.scheduler.finish_requests(names if are_named else None, RequestStatus.FINISHED_ABORTED)
    here.run()
    assert not here.ended and not here.scheduler._asked and not here.scheduler.requests


def test_a_line_of_heirs_may_be_of_any_length(world):
    here = world()
    here.add("0", prompt(1, 40))
    for at in range(1, 1500):
        here.add(f"{at}", [300], continuation_of=f"{at - 1}")
    here.abort("0")
    here.run()
    assert [here.ended[f"{at}"] for at in range(1, 1500)] == ["error"] * 1499


def test_what_is_kept_for_a_job_goes_to_its_next_turn_though_that_came_early(world):
    here = world(options={"policy": "continuum"})
    here.add("a", prompt(1, 40), job_id="x")
    here.step()
    here.add("b", [300], job_id="x", continuation_of="a")
    while "b" not in here.prefilled:
        here.step()
    assert not here.scheduler.blocks.leases


# Names


def test_an_heir_can_be_aborted_though_its_parents_name_is_anothers_now(world):
    here = world()
    here.add("cmpl-x-0-00000001", prompt(1, 40))
    here.add("heir", [300], continuation_of="cmpl-x")
    here.add("cmpl-x-0-00000002", prompt(2, 40))
    here.abort("heir")
    here.run()
    assert set(here.ended) == {"cmpl-x-0-00000001", "cmpl-x-0-00000002"}


def test_a_name_is_that_of_the_request_that_had_it_last(world):
    here = world()
    for at, fields in enumerate(({"state_id": "mine"}, {}), 1):
        here.add(f"cmpl-x-0-0000000{at}", prompt(at, 40), **fields)
        here.run()
    here.add("b", [300], continuation_of="cmpl-x")
    here.run()
    assert here.said["b"] == expected(prompt(2, 40) + here.said["cmpl-x-0-00000002"] + [300], 4)


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_tenant_can_take_no_name_from_another(world, has_ended):
    here = world()
    here.add("cmpl-x-0-00000001", prompt(1, 40), salt="alice", hold_seconds=60)
    here.run() if has_ended else here.step()
    here.add("cmpl-x-0-00000002", prompt(2, 40), salt="bob", hold_seconds=60)
    here.run() if has_ended else here.step()
    here.add("b", [300], salt="alice", continuation_of="cmpl-x")
    here.run()
    assert here.said["b"] == expected(prompt(1, 40) + here.said["cmpl-x-0-00000001"] + [300], 4)


def test_a_state_that_is_held_is_found_however_many_came_after_it(world):
    here = world(options={"policy": "fcfs", "max_states": 2})
    here.add("a", prompt(1, 40), hold_seconds=600)
    here.run()
    for seed in range(20):
        here.add(f"r{seed}", prompt(seed, 20), max_tokens=2)
    here.run()
    here.add("b", [300], continuation_of="a")
    here.run()
    assert here.prefilled.get("b") == 2


def test_a_refusal_counts_as_finished(world):
    here = world()
    here.scheduler.finished_req_ids_dict = defaultdict(set)
    here.add("a", [300], continuation_of="nobody")
    planned = here.scheduler.schedule()
    assert here.scheduler.update_from_output(planned, here._compute(planned))[0].finished_requests == {"a"}


# Memory


@pytest.mark.parametrize("policy", ["fcfs", "continuum", "adaptive"])
def test_the_first_in_the_queue_takes_all_that_is_kept_if_nothing_runs(world, policy):
    here = world(num_blocks=13, options={"policy": policy})
    for seed in range(4):
        here.add(f"r{seed}", prompt(seed, 40), job_id=f"j{seed}", hold_seconds=600 if seed % 2 else None)
        here.run()
    here.add("all", prompt(9, 12 * BLOCK - 4))
    assert "all" in here.step().num_scheduled_tokens
    here.run()
    assert here.said["all"] == expected(prompt(9, 12 * BLOCK - 4), 4) and here.num_preempted == 0


def test_a_continuation_may_fill_all_memory_beside_its_parents_lease(world):
    here = world(num_blocks=8)
    here.add("a", prompt(1, 70), hold_seconds=600)
    here.run()
    here.add("b", prompt(2, 30), max_tokens=8, continuation_of="a")
    assert any("b" in here.step().num_scheduled_tokens for _ in range(2))
    here.run()
    assert here.said["b"] == expected(prompt(1, 70) + here.said["a"] + prompt(2, 30), 8)


def test_who_runs_alone_takes_what_is_kept_before_it_is_preempted(world):
    here = world(num_blocks=8, options={"policy": "continuum"})
    here.add("kept", prompt(1, 60), job_id="x")
    here.run()
    here.add("alone", prompt(2, 40), max_tokens=40)
    here.run()
    assert here.said["alone"] == expected(prompt(2, 40), 40) and here.num_preempted == 0


def test_who_does_not_fit_in_any_case_takes_nothing(world):
    here = world(num_blocks=24, budget=32, options={"policy": "fcfs"})
    here.add("kept", prompt(1, 8 * BLOCK - 4), hold_seconds=600)
    here.run()
    here.add("runs", prompt(2, 120), max_tokens=60)
    for _ in range(6):
        here.step()
    here.add("big", prompt(3, 300))
    here.step()
    assert here.scheduler.blocks.num_revoked == 0
    here.run()
    assert here.said["big"] == expected(prompt(3, 300), 4)


def test_a_continuation_that_does_not_fit_yet_leaves_its_parents_lease_alone(world):
    here = world(num_blocks=24, options={"policy": "fcfs"})
    here.add("a", prompt(1, 8 * BLOCK - 10), hold_seconds=600)
    here.run()
    here.add("runs", prompt(2, 9 * BLOCK), max_tokens=40)
    here.step()
    here.add("b", prompt(3, 7 * BLOCK), continuation_of="a")
    here.run()
    assert here.scheduler.blocks.num_revoked == 0 and here.prefilled["b"] == 1 + 7 * BLOCK


def test_a_last_step_gives_all_back_however_it_ends(world):
    here = world()
    here.add("a", prompt(1, 40), job_id="x", hold_seconds=600)
    here.run()
    here.add("b", prompt(2, 40), max_tokens=50, job_id="x", is_last_step=True)
    for _ in range(6):
        here.step()
    here.abort("b")
    assert not here.scheduler.blocks.leases


def test_a_model_that_forgets_is_refused_at_the_start():
    """A lease that has lost its tail would have nothing in the window before it."""
    spec = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32, sliding_window=64)
    kv = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)])
    with pytest.raises(UnsupportedVLLM):
        check_config(make_config(), kv)
