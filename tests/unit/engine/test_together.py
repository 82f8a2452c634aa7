"""Features that meet: holds and policies, forks and failed steps, searches and shares. Found by a review, each in turn."""

import pytest

from segue import BeamParams, EngineConfig, EngineCore, InvalidRequest, Request, SamplingParams, Then
from segue.base.clock import VirtualClock
from segue.base.errors import RequestTooLong
from segue.kv.tiers import courier
from segue.policies import Call, make_policy
from segue.policies.learned import load_learned, save_learned
from segue.policies.policy import Disposition, Policy, Returned
from tests.fakes import VOCAB, FakeExecutor, PipelinedFake, expected


def make(num_blocks=40, fake=FakeExecutor, *, clock=None, policy="fcfs", tiers=(), **options) -> EngineCore:
    config = EngineConfig(num_blocks, 4, **{"max_step_tokens": 64, "max_running": 8, "max_model_len": 200, **options})
    return EngineCore(
        fake(num_blocks, 4), config, clock=clock or VirtualClock(), policy=policy, tiers=tiers, vocab_size=VOCAB
    )


def greedy(count, **options):
    return SamplingParams(max_tokens=count, temperature=0, **options)


def finish(engine):
    while engine.has_work:
        engine.step()
        engine.check()


class Refusing(PipelinedFake):
    """Does not begin the next step that is planned ahead: what it was to copy is not copied."""

    refuses = False

    def launch(self, plan, after):
        if self.refuses and after is not None:
            self.refuses = False
            raise RuntimeError("nothing was copied")
        return super().launch(plan, after)


@pytest.mark.parametrize("how", ["stop", "abort", "fork", "save"])
def test_a_block_whose_copy_never_came_is_kept_for_nobody(how, tmp_path):
    """A request is forked, so that its next step copies its last block; that step is under way when the request ends, or is
    kept in another way, and then fails."""
    engine, prompt = make(fake=Refusing), [1, 2, 3, 4, 5]
    said = expected(prompt, 10)
    end = next(at for at in range(3, 9) if said[at] not in said[:at] and (len(prompt) + at - 1) % 4 in (1, 2))
    stops = {"stop_token_ids": (said[end],)} if how == "stop" else {}
    engine.submit(Request(prompt, greedy(10, **stops), request_id="a", hold=True))
    sequence = engine._answers.get("a").turn.sequences[0]
    while len(sequence.output) < end:
        engine.step()
    engine.fork("a", "now", state_id="other")
    engine._executor.refuses = True
    engine.step()
    assert engine._flying is not None and engine._flying.plan.copies
    parent = "a"
    if how == "abort":
        engine.abort("a")
    elif how == "fork":
        parent = engine.fork("a", "now", state_id="later").id
    elif how == "save":
        engine.save("a", tmp_path / "a.segue")
    tokens = list(sequence.tokens)
    finish(engine)
    engine.release("other")
    after = [*tokens, 3, 3]
    if how == "abort":
        found = engine.generate(after, greedy(3))[0]
    elif how == "save":
        resumed = engine.follow(engine.resume(engine.load(tmp_path / "a.segue"), consume=True))
        list(resumed)
        assert resumed.result.token_ids == said
        return
    else:
        found = engine.continue_(parent, [3, 3], greedy(3))
    assert found.token_ids == expected(after, 3)


class Keeps(Policy):
    name = "keeps"

    def at_turn_end(self, end, pressure, now):
        return Disposition(5.0, 1.0)


@pytest.mark.parametrize(
    "policy", [Keeps, lambda: "continuum", lambda: "adaptive"], ids=["own", "continuum", "adaptive"]
)
@pytest.mark.parametrize("is_last", [False, True])
def test_what_a_caller_holds_the_policy_does_not_let_go(policy, is_last):
    engine = make(policy=policy())
    engine._scheduler.jobs.gauge.seconds_per_token = 1.0  # so that it is worth a pin
    result = engine.generate(Request(list(range(1, 10)), greedy(3), job_id="job"))[0]
    engine.hold(result.state)
    held = result.state.num_held
    engine.generate(Request([9, 9, 9], greedy(2), job_id="job", is_last_step=is_last))
    engine._clock.advance(1e5)
    engine.expire()
    assert result.state.num_held == held == 11 and result.state.expires_at is None
    engine.release(result.state)
    engine.forget()
    engine._clock.advance(1e5)
    assert engine.stats().leased_blocks == 0


def test_a_search_that_is_more_than_the_longest_request_takes_others_shares_rather_than_waiting_for_ever():
    engine = make(33, max_model_len=24)
    engine.set_lease_quota("a", None)
    for number in range(8):
        engine.generate(Request([number] * 14 + [30 + number], greedy(2), salt="a", hold=True))
    found = engine.generate(Request([5, 6, 7], beam=BeamParams(width=16, max_tokens=4), salt="b"))[0]
    assert len(found.beams) == 16 and engine.stats().num_preemptions == 0
    engine.check()


def test_what_follows_a_stop_string_counts_if_it_is_longer_than_the_suffix():
    engine = make(9)
    then = Then(BeamParams(width=2, max_tokens=2, ignore_eos=True), suffix=[7], rest=[8] * 12)
    with pytest.raises(RequestTooLong, match="10 blocks are needed"):
        engine.submit(Request([1, 2, 3, 4], greedy(20), then=then))


def test_an_export_that_is_given_up_while_its_request_loads_leaves_nothing(monkeypatch):
    monkeypatch.setattr(courier.Speed, "seconds_for", lambda self, size: 0.0)
    engine = make(20, tiers=["host=1MiB"])
    first = engine.generate(Request([token % 40 for token in range(41)], greedy(3), hold=True))[0]
    engine.generate([33] * 50, greedy(2))  # takes some of what is held, which goes to the host
    engine.submit(Request(parent=first.state, suffix=[1, 2], params=greedy(4), request_id="child"))
    engine.step()
    assert engine.stats().num_loading == 1
    engine.export_request("child").abort()
    engine.abort("child")
    engine.release(first.state)
    engine.check()
    assert not engine.has_work and engine.stats().leased_blocks == 0


def test_a_salt_that_is_no_text_is_refused():
    engine = make()
    with pytest.raises(InvalidRequest, match=r"^salt: has half a surrogate pair"):
        engine.submit(Request([1, 2], greedy(2), salt="\ud800"))
    assert not engine.has_work


def test_an_id_is_free_when_its_hold_is_over_though_nobody_has_looked():
    engine = make()
    engine.generate(Request([1, 2, 3], greedy(3), hold=1.0, request_id="x"))
    engine._clock.advance(100)
    engine.generate(Request([1, 2, 3], greedy(3), request_id="x"))


def test_a_state_speaks_for_its_own_scope_when_it_is_forked():
    engine = make()
    state = engine.generate(Request([1, 2, 3], greedy(3), hold=True, salt="tenant"))[0].state
    assert engine.fork(state).scope.salt == "tenant"


def test_lines_of_several_thoughts_do_not_depend_on_which_search_ended_first():
    params = SamplingParams(n=3, max_tokens=4, temperature=1, seed=5)
    then = Then(BeamParams(width=VOCAB, max_tokens=1, merge="sum"), [1])
    found = []
    for order in (1, -1):
        engine = make(200, max_step_tokens=128)
        conclude, all_ended = engine._answers.conclude, []

        def at_last(ended, conclude=conclude, all_ended=all_ended, order=order):
            all_ended += ended
            return conclude(all_ended[::order]) if len(all_ended) == 3 else []

        engine._answers.conclude = at_last
        found.append(engine.generate(Request([1, 2, 3], params, then=then))[0].beams)
    assert found[0] == found[1], "sums of three to the last bit"


def test_a_command_that_always_takes_equally_long_is_learned_and_can_be_read_again(tmp_path):
    policy = make_policy("context_serve")
    for _ in range(4000):
        policy.observe(Returned("job", Call("bash", "foo"), 0.0005))
    save_learned(tmp_path / "learned.json", policy)
    again = make_policy("context_serve")
    load_learned(tmp_path / "learned.json", again)
    assert again.to_json() == policy.to_json()
