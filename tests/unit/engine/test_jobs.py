"""KV between the turns of a job: what the policy decides is done, and nobody pays for it who should not."""

import pytest

from segue.base.clock import VirtualClock
from segue.base.config import EngineConfig
from segue.base.types import SamplingParams
from segue.engine import EngineCore
from segue.engine.jobs import JobDesk
from segue.policies import Adaptive, Call, Continuum, Disposition, Policy, make_policy, policy_names
from tests.fakes import VOCAB, FakeExecutor, expected

SECONDS_PER_TOKEN = 0.01


class Timed(FakeExecutor):
    """Each token takes its time."""

    def __init__(self, num_blocks, block_size, clock):
        super().__init__(num_blocks, block_size)
        self.clock = clock

    def execute(self, plan):
        self.clock.advance(SECONDS_PER_TOKEN * sum(row.stop - row.start for row in plan.rows))
        return super().execute(plan)


@pytest.fixture(autouse=True)
def tools(monkeypatch):
    """The fake model's answers are no text: each ends with the same command."""
    monkeypatch.setattr(JobDesk, "_call_of", lambda desk, sequence: Call("bash", "ls", sequence.turn.job_id))


def make(policy, num_blocks=64, size=4, **options):
    clock = VirtualClock()
    config = EngineConfig(
        num_blocks, size, **{"max_step_tokens": 64, "max_running": 8, "max_model_len": 200, **options}
    )
    return EngineCore(Timed(num_blocks, size, clock), config, policy=policy, clock=clock), clock


def greedy(max_tokens):
    return SamplingParams(max_tokens=max_tokens, temperature=0)


def turn(engine, prompt, max_tokens=4, **options):
    """Run to the end; the tokens of prompt and answer."""
    [answer] = engine.generate(prompt, greedy(max_tokens), **options)
    engine.check()
    assert list(answer.token_ids) == expected(prompt, max_tokens)
    return [*prompt, *answer.token_ids]


def prompt_of(number, length):
    return [(number * 7 + position * 3) % VOCAB for position in range(length)]


class Keeps(Policy):
    """Two seconds for everybody, at a price."""

    name = "keeps"
    bids = True
    growth_bid = 1e-9

    def bid(self, turn, pressure, now):
        return 1e-9

    def at_turn_end(self, end, pressure, now):
        return Disposition(2.0, 1.0)


def test_a_pin_lasts_for_its_time_and_goes_to_the_next_turn():
    engine, clock = make(Keeps())
    tokens = turn(engine, prompt_of(1, 30), job_id="j")
    assert 63 - engine.kv.num_free == -(-(len(tokens) - 1) // 4)
    clock.advance(1.0)
    before = engine._executor.num_computed
    turn(engine, [*tokens, 1, 2, 3], job_id="j")
    assert engine._executor.num_computed - before == 1 + 3 + 3, "the last token, the new ones, and what was sampled"
    clock.advance(2.5)
    assert engine.expire() is None and engine.stats().kv_usage == 0.0
    outcomes = [(decision.outcome, decision.pinned_seconds) for decision in engine.decisions()]
    assert outcomes[1][0] == "returned" and outcomes[0] == ("open", pytest.approx(2.5))
    assert engine.decision_sums()["ls"].wasted_block_seconds > engine.decision_sums()["ls"].used_block_seconds > 0


def test_the_last_step_ends_all_a_job_has():
    engine, _ = make(Keeps())
    tokens = turn(engine, prompt_of(1, 30), job_id="j")
    turn(engine, prompt_of(2, 30), job_id="j")  # another line of the same job
    assert engine.stats().kv_usage > 0
    turn(engine, [*tokens, 5], job_id="j", is_last_step=True)
    assert engine.stats().kv_usage == 0.0
    turn(engine, prompt_of(3, 9), job_id="j")  # the name again: a new job
    assert engine.stats().kv_usage > 0


def test_a_turn_that_never_ran_leaves_the_pin_as_it_was():
    engine, clock = make(Keeps())
    tokens = turn(engine, prompt_of(1, 30), job_id="j")
    used = engine.kv.num_free
    request = engine.submit([*tokens, 1], greedy(3), job_id="j")
    clock.advance(5.0)  # past its time: but somebody waits for it
    engine.kv.leases.expire(clock.now())
    assert engine.kv.num_free == used
    engine.abort(request)
    engine.expire()
    assert engine.stats().kv_usage == 0.0
    engine.check()


def test_what_a_client_holds_is_not_the_policys():
    engine, clock = make(Keeps())
    [answer] = engine.generate(prompt_of(1, 30), greedy(4), job_id="j", hold=60.0)
    clock.advance(30.0)
    engine.expire()
    assert answer.state.num_held and not list(engine.decisions())
    turn(engine, prompt_of(2, 10), job_id=None)
    assert len(list(engine.decisions())) == 0, "no job, no decision"


@pytest.mark.parametrize("policy", policy_names())
def test_jobs_and_strangers_all_end_as_if_alone(policy):
    """Many more than fit, some of them pinned; with every policy each answer is what it would be alone."""
    engine, _ = make(policy, num_blocks=24, max_model_len=60)
    wanted = {}
    for number in range(12):
        prompt = prompt_of(number, 10 + number * 3)
        job = [None, "a", "b", "c"][number % 4]
        request = engine.submit(prompt, greedy(12), job_id=job, is_last_step=number > 9)
        wanted[request] = expected(prompt, 12)
    got = {request: [] for request in wanted}
    while engine.has_work:
        for delta in engine.step():
            got[delta.request_id] += delta.token_ids
        engine.check()
    assert got == wanted


def evicted(policy):
    """A's KV of 4 blocks, B and C running on 3 and 5, 8 blocks free; others pass through them; A comes back for 12 blocks.

    Of A's return: tokens it found, and seconds it took; and how many turns were preempted in all."""
    engine, clock = make(policy, num_blocks=21, max_model_len=60)
    turn(engine, prompt_of(40, 8), max_tokens=1)  # so that there is a speed to go by
    first = turn(engine, prompt_of(1, 13), max_tokens=4, job_id="a")
    for number, length in enumerate((9, 17)):
        engine.submit(prompt_of(20 + number, length), greedy(30), job_id=f"running {number}")
    engine.step()
    assert engine.kv.num_free == (12 if policy.name in ("fcfs", "priority") else 8)
    for number in (5, 6):  # through the free blocks
        request = engine.submit(prompt_of(number, 18), greedy(1), job_id=f"passing {number}", is_last_step=True)
        while engine.is_active(request):
            engine.step()
    began = clock.now()
    back = engine.submit([*first, *prompt_of(3, 44 - len(first))], greedy(2), job_id="a", is_last_step=True)
    reuse = took = None
    while engine.has_work:
        for delta in engine.step():
            if delta.request_id == back and delta.finish_reason is not None:
                reuse, took = delta.reuse, clock.now() - began
        engine.check()
    return reuse.inherited, took, engine.stats().num_preemptions


def test_who_pays_when_memory_is_short():
    found, seconds, preempted = zip(
        *(evicted(make_policy(name)) for name in ("fcfs", "continuum", "adaptive")), strict=True
    )
    assert found[0] == 0, "overwritten: all of A's 12 blocks are computed again"
    assert found[1] == found[2] == 16, "A's 4 blocks were kept"
    assert preempted[:2] == (1, 1), "C gives way"
    assert seconds[2] <= seconds[1] < seconds[0]
    assert evicted(make_policy("continuum-released")) == evicted(make_policy("continuum"))
    assert evicted(make_policy("context_serve")) == evicted(make_policy("continuum")), "no tool is found: uncertain"
    assert evicted(make_policy("priority")) == evicted(make_policy("fcfs"))


def test_nobody_is_overtaken_for_ever():
    """A job that never ends sends turn after turn; a newcomer is admitted within so many of them."""
    engine, _ = make(Adaptive(), num_blocks=40, max_running=1)
    endless = prompt_of(1, 20)
    for _ in range(5):
        endless = turn(engine, endless[:40], max_tokens=1, job_id="endless")
    newcomer = engine.submit(prompt_of(2, 20), greedy(1), job_id="new")
    overtaken = 0
    while engine.is_active(newcomer):
        request = engine.submit(endless[:40], greedy(1), job_id="endless")
        for _ in range(50):
            if not engine.is_active(request) or not engine.is_active(newcomer):
                break
            engine.step()
        overtaken += 1
        assert overtaken <= Adaptive.fair_every
    assert overtaken > 1, "a job under way goes first all the same"


def test_a_pin_is_looked_at_again_while_the_gap_lasts():
    policy = Adaptive()
    for seconds in [0.1] * 60 + [90.0] * 2:
        policy.durations.learn(Call("bash", "ls"), seconds)
    engine, clock = make(policy, num_blocks=24, max_model_len=60)
    turn(engine, prompt_of(1, 30), job_id="j")
    [pin] = engine.kv.leases
    at_first = pin.value
    clock.advance(5.0)
    engine.expire()
    assert pin in engine.kv.leases and pin.value < at_first / 10, "nobody wants the memory, but who does may have it"
    before = engine.kv.num_free
    clock.advance(9000.0)
    engine.expire()
    assert engine.kv.num_free > before, "what is never asked for again ends some day"


def test_a_pin_whose_turn_was_given_up_is_looked_at_again():
    policy = Adaptive()
    for _ in range(60):
        policy.durations.learn(Call("bash", "ls"), 0.1)
    engine, clock = make(policy, num_blocks=24, max_model_len=60)
    tokens = turn(engine, prompt_of(1, 30), job_id="j")
    [pin] = engine.kv.leases
    at_first = pin.value
    request = engine.submit([*tokens, 1], greedy(2), job_id="j")
    clock.advance(5.0)
    engine.expire()  # its review comes up, and is passed over: the job is here
    engine.abort(request)
    assert pin.value == at_first
    clock.advance(5.0)
    engine.expire()
    assert pin not in engine.kv.leases or pin.value < at_first / 2


def test_continuum_finds_tools_in_the_text(monkeypatch):
    """With a tokenizer, the command in the answer decides."""
    monkeypatch.undo()
    from segue import Engine

    with Engine("tiny", policy=Continuum(), num_blocks=200) as engine:
        text = "I think.\n```bash\npytest -x\n```"
        found = engine._scheduler.jobs._decode(engine.tokenizer.encode(text, add_special=False))
        assert found == text
        engine.generate("Go", SamplingParams(max_tokens=3), job_id="j")
        assert [decision.key for decision in engine.decisions()] == [""]
