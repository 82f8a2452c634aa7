"""The plugin's scheduler over vLLM's own, without a model: right KV, right order, nothing lost, nothing kept."""

import pytest

pytest.importorskip("vllm")

import torch

from segue.base.errors import InvalidRequest
from segue.vllm.tokens import decoder
from segue.vllm.versions import UnsupportedVLLM
from tests.vllm.harness import BLOCK, PlainScheduler, World, expected, make_config, make_scheduler, prompt


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def world(request):
    return lambda **options: World(is_async=request.param, **options)


def evict(here, count=8):
    """Everything that can be."""
    for seed in range(count):
        here.add(f"evict{len(here.said)}-{seed}", prompt(1000 + seed, 200), max_tokens=4)
        here.run()


def test_a_plain_request_is_answered_as_without_the_plugin(world):
    here, plain = world(), world(cls=PlainScheduler)
    for each in (here, plain):
        for seed in range(5):
            each.add(f"r{seed}", prompt(seed, 40 + seed), max_tokens=6)
        each.run()
    assert here.said == plain.said and here.prefilled == plain.prefilled
    assert here.said["r3"] == expected(prompt(3, 43), 6)
    assert here.num_free == here.num_blocks and not here.reports["r0"]


@pytest.mark.parametrize("length", [53, 57, 58, 41 + BLOCK])
def test_a_continuation_prefills_one_token_and_its_suffix(world, length):
    here = world(num_blocks=24)
    here.add("a", prompt(1, length), max_tokens=7, hold_seconds=60)
    here.run()
    evict(here)
    here.add("b", [400, 401, 402], max_tokens=5, continuation_of="a")
    here.run()
    assert here.prefilled["b"] == 1 + 3
    assert here.said["b"] == expected(prompt(1, length) + here.said["a"] + [400, 401, 402], 5)
    assert here.reports["b"]["inherited_tokens"] == length + 7 - 1 and here.reports["b"]["recomputed_tokens"] == 0
    here.clock.advance(61)
    here.add("c", prompt(9, 20))
    here.run()
    assert here.num_free == here.num_blocks


@pytest.mark.parametrize("name", ["chatcmpl-b-12ab34cd", "1_chatcmpl-b-12ab34cd", "resp_b-12ab34cd"])
def test_a_conversation_brings_its_whole_prompt(world, name):
    here = world(num_blocks=24)
    here.add("chatcmpl-a-12ab34cd", prompt(1, 40), hold_seconds=60)
    here.run()
    whole = prompt(1, 40) + here.said["chatcmpl-a-12ab34cd"] + [400, 401]
    evict(here)
    here.add(name, whole, max_tokens=5, continuation_of="chatcmpl-a")
    here.add(f"{name[:-1]}0", [9, *whole], max_tokens=5, continuation_of="chatcmpl-a")
    here.run()
    assert here.said[name] == expected(whole, 5) and here.prefilled[name] == 1 + 2
    assert here.said[f"{name[:-1]}0"] == expected([9, *whole], 5) and "fallback" in here.reports[f"{name[:-1]}0"]


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_request_may_say_that_its_prompt_is_whole(world, is_whole):
    here = world()
    here.add("a", prompt(1, 40), hold_seconds=60)
    here.run()
    known = prompt(1, 40) + here.said["a"]
    here.add("3-12ab34cd", [*known, 400], continuation_of="a", whole_prompt=is_whole)
    here.run()
    assert here.said["3-12ab34cd"] == expected([*([] if is_whole else known), *known, 400], 4)


def test_what_is_not_text_alone_is_not_continued(world):
    """Its tokens do not say what came before: computed again, they would be other KV under the same hashes."""
    here = world()
    here.add("a", [0] * 40, embeds=torch.zeros(40, 128), hold_seconds=60, job_id="j")
    here.step()
    here.add("heir", [300], continuation_of="a")
    here.run()
    here.add("late", [300], continuation_of="a")
    here.run()
    assert [here.reports[name]["status"] for name in ("heir", "late")] == [409, 409]
    assert "more than text" in here.reports["late"]["error"] and "state_id" not in here.reports["a"]
    here.clock.advance(61)
    here.add("last", prompt(2, 10), job_id="j", is_last_step=True)
    here.run()
    assert here.num_free == here.num_blocks


def test_a_long_salt_is_a_tenant_of_its_own_and_is_not_kept(world):
    here, salts = world(), ["x" * 1000, "x" * 1000 + "y", "team\0" + "x" * 1000]
    for at, salt in enumerate(salts):
        here.add(f"a{at}", prompt(1, 40), salt=salt, state_id="same", hold_seconds=60)
        here.run()
        here.add(f"b{at}", [300 + at], salt=salt, continuation_of="same")
        here.run()
        assert here.prefilled[f"b{at}"] == 2
    assert max(len(salt) for salt, _ in here.scheduler._names._ended) < 100
    assert here.scheduler.states.get("a2").scope.tenant == "team"
    assert all(here.scheduler.segue_release("same", salt) for salt in salts) and here.num_free == here.num_blocks


def test_whatever_goes_wrong_with_one_request_is_its_own(world, monkeypatch):
    here = world()
    here.add("huge", [300], hold_seconds=2**62)
    monkeypatch.setattr(here.scheduler, "_inherit", lambda asked: 1 / 0)
    here.add("unlucky", [300], continuation_of="huge")
    here.add("fine", prompt(1, 30))
    here.run()
    assert here.said["fine"] == expected(prompt(1, 30), 4)
    assert here.reports["huge"]["status"] == 400 and here.reports["unlucky"]["status"] == 500


def test_a_tokenizer_that_fails_costs_tool_calls_and_nothing_else(world, monkeypatch):
    config = make_config()
    assert decoder(config) is None
    monkeypatch.setattr("vllm.tokenizers.cached_tokenizer_from_config", lambda config: 1 / 0)
    assert decoder(config) is None

    class Strict:
        def decode(self, tokens, skip_special_tokens):
            raise IndexError("no such token")

    monkeypatch.setattr("vllm.tokenizers.cached_tokenizer_from_config", lambda config: Strict())
    assert decoder(config)([5]) == ""


def test_an_heir_is_not_taken_for_one_that_has_ended(world):
    """Beside a connector vLLM counts those that are in no queue; while it is paused, it would go on for ever."""
    here = world(offloads=True)
    here.add("a", prompt(1, 40), max_tokens=30)
    here.step()
    here.add("heir", [300], continuation_of="a")
    here.step()
    assert not here.scheduler.finished_req_ids and not here.scheduler.has_finished_requests()
    here.run()
    assert here.said["heir"] == expected(prompt(1, 40) + here.said["a"] + [300], 4)


def test_those_that_cannot_run_yet_do_not_count_as_admitted(world):
    here = world(options={"policy": "continuum"})
    queue = here.scheduler.waiting
    for at in range(3):
        here.add(f"r{at}", prompt(at, 20))
    before = queue._queue.num_admitted
    queue.prepend_requests([queue.pop_request() for _ in range(3)])
    assert queue._queue.num_admitted == before and len(queue) == 3
    here.run()


def test_forks_of_one_state_each_have_a_tail_of_their_own(world):
    here = world()
    here.add("a", prompt(1, 37), max_tokens=3, hold_seconds=60)
    here.run()
    for at in range(6):
        here.add(f"fork{at}", [200 + at], max_tokens=20, continuation_of="a")
    here.run()
    for at in range(6):
        assert here.prefilled[f"fork{at}"] == 2
        assert here.said[f"fork{at}"] == expected(prompt(1, 37) + here.said["a"] + [200 + at], 20)


def test_without_a_hold_what_the_prefix_cache_has_is_used_and_the_rest_is_told(world):
    here = world(num_blocks=24)
    here.add("a", prompt(1, 64), max_tokens=8)
    here.run()
    here.add("b", [400], continuation_of="a")
    here.run()
    assert here.prefilled["b"] == 64 + 8 + 1 - 64 and here.reports["b"]["recomputed_tokens"] == 7
    evict(here)
    here.add("c", [400], continuation_of="a")
    here.run()
    assert here.said["c"] == here.said["b"] and here.reports["c"]["recomputed_tokens"] == 71


def test_a_continuation_of_what_still_runs_waits_for_its_end(world):
    here = world()
    here.add("a", prompt(1, 30), max_tokens=12)
    here.step()
    here.add("b", [300, 301], max_tokens=4, continuation_of="a")
    here.add("c", [302], max_tokens=4, continuation_of="b")
    here.run()
    first = prompt(1, 30) + here.said["a"] + [300, 301]
    assert here.said["b"] == expected(first, 4)
    assert here.said["c"] == expected(first + here.said["b"] + [302], 4)
    assert here.prefilled["b"] == 3 and here.prefilled["c"] == 2
    assert here.num_free == here.num_blocks


def test_what_cannot_be_continued_is_refused_by_name(world):
    here = world()
    here.add("a", prompt(1, 30), max_tokens=400, hold_seconds=5)
    here.step()
    here.add("heir", [300], continuation_of="a")
    here.abort("a")
    here.add("late", [300], continuation_of="a")
    here.add("unknown", [300], continuation_of="nobody")
    here.add("strange", [300], hold_seconds="long")
    here.add("own", prompt(2, 40), salt="alice", state_id="mine", hold_seconds=5)
    here.run()
    here.add("foreign", [300], salt="bob", continuation_of="mine")
    here.add("long", prompt(3, 1000), salt="alice", continuation_of="mine")
    here.add("mine too", [300], salt="alice", continuation_of="mine")
    here.run()
    statuses = {name: report.get("status") for name, report in here.reports.items()}
    assert statuses == {
        "heir": 409, "late": 409, "unknown": 404, "strange": 400, "own": None, "foreign": 404, "long": 400, "mine too": None,
    }  # fmt: skip
    assert "nobody" in here.reports["unknown"]["error"] and "hold_seconds" in here.reports["strange"]["error"]
    assert not here.scheduler._asked and not here.scheduler._names


def test_leases_give_way_before_running_work_and_the_cheapest_first(world):
    here = world(num_blocks=20, options={"policy": "fcfs"})
    for at, seconds in enumerate((600, 600)):
        here.add(f"held{at}", prompt(at, 60), max_tokens=4, hold_seconds=seconds)
        here.run()
    here.scheduler.blocks.leases.renew(_lease(here, "held1"), expires_at=None, value=5.0)
    here.add("big", prompt(7, 230), max_tokens=4)
    here.run()
    assert here.said["big"] == expected(prompt(7, 230), 4) and here.num_preempted == 0
    assert len(_lease(here, "held0").blocks) < len(_lease(here, "held1").blocks) or not _lease(here, "held0").blocks
    assert _state(here, "held1").num_held > 0
    here.add("bigger", prompt(8, 290), max_tokens=4)
    here.run()
    assert here.said["bigger"] == expected(prompt(8, 290), 4) and here.num_preempted == 0
    assert here.scheduler.blocks.num_revoked > 0


def _state(here, name):
    return here.scheduler.states.find(name, "")


def _lease(here, name):
    return _state(here, name).lease


@pytest.mark.parametrize("policy", ["continuum-released", "continuum", "adaptive"])
def test_a_jobs_kv_stays_through_the_gap_and_goes_with_its_last_step(world, policy):
    here = world(num_blocks=24, options={"policy": policy})
    here.scheduler.jobs._decode = lambda tokens: "```bash\nls\n```"
    here.scheduler.jobs.gauge.seconds_per_token = 0.01
    history = prompt(1, 60)
    for turn in range(4):
        here.add(f"t{turn}", history, max_tokens=5, job_id="agent", **({"is_last_step": 1} if turn == 3 else {}))
        here.run()
        if turn:
            assert here.prefilled[f"t{turn}"] < 2 * BLOCK, f"turn {turn} was computed again"
        history = history + here.said[f"t{turn}"] + prompt(50 + turn, 6)
        assert (len(here.scheduler.blocks.leases) > 0) == (turn < 3)
        evict(here, 1)
        here.clock.advance(0.5)
    assert here.num_free == here.num_blocks
    assert [decision.outcome for decision in here.scheduler.jobs.decisions].count("returned") == 3


def test_waiting_requests_go_in_the_policys_order(world):
    here = world(max_seqs=1, options={"policy": "continuum"})
    here.scheduler.jobs._decode = lambda tokens: "```bash\nls\n```"
    here.add("old1", prompt(1, 40), job_id="old")
    here.run()
    here.clock.advance(1.0)
    here.add("running", prompt(2, 40), max_tokens=8)
    here.step()
    here.add("new", prompt(3, 40), job_id="new")
    here.clock.advance(0.1)
    here.add("old2", prompt(1, 40) + here.said["old1"] + [33], job_id="old", is_last_step=True)
    here.run()
    order = [name for name in here.prefilled if name in ("new", "old2")]
    assert order == ["old2", "new"]


def test_a_hold_longer_than_memory_is_never_a_reason_that_work_waits(world):
    here = world(num_blocks=12)
    for seed in range(30):
        here.add(f"r{seed}", prompt(seed, 30 + seed % 40), max_tokens=5, hold_seconds=86400, job_id=f"j{seed % 3}")
    here.run()
    assert all(here.said[f"r{seed}"] == expected(prompt(seed, 30 + seed % 40), 5) for seed in range(30))


def test_a_reset_lets_go_of_everything(world):
    here = world()
    here.add("a", prompt(1, 60), hold_seconds=600)
    here.run()
    assert here.num_free < here.num_blocks
    assert here.scheduler.reset_prefix_cache() and here.num_free == here.num_blocks
    here.add("b", [300], continuation_of="a")
    here.run()
    assert here.said["b"] == expected(prompt(1, 60) + here.said["a"] + [300], 4)
    assert here.reports["b"]["recomputed_tokens"] == 63


def test_a_state_can_be_let_go_by_any_of_its_names(world):
    here = world()
    here.add("cmpl-x-0-12ab34cd", prompt(1, 60), hold_seconds=600)
    here.run()
    here.add("b", [300], continuation_of="cmpl-x")
    here.run()
    assert here.prefilled["b"] == 2
    assert not here.scheduler.segue_release("cmpl-x", "somebody else")
    assert here.scheduler.segue_release("cmpl-x", "") and here.num_free == here.num_blocks
    assert not here.scheduler.segue_release("cmpl-x", "")


def test_what_it_cannot_be_part_of_is_refused_at_the_start(world):
    with pytest.raises(UnsupportedVLLM, match="2 groups"):
        make_scheduler(num_groups=2)
    with pytest.raises(UnsupportedVLLM, match="--policy priority"):
        make_scheduler(order="priority")
    with pytest.raises(InvalidRequest, match="polcy"):
        make_scheduler(options={"polcy": "fcfs"})
    with pytest.raises(InvalidRequest, match="nonsense"):
        make_scheduler(options={"policy": "nonsense"})
