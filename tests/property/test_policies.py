"""Every policy against clients that lie, leave, hold for ever and share names, in pools that are far too small.

Whatever it decides: everybody is answered, rightly and in the end; nobody is overtaken more often than the policy says; nobody
holds more than its quota; the bookkeeping agrees after every step; and when all is over nothing is held.
"""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.base.clock import VirtualClock
from segue.base.config import EngineConfig
from segue.base.types import SamplingParams
from segue.engine import EngineCore
from segue.engine.jobs import JobDesk
from segue.engine.waiting import WaitingQueue
from segue.policies import Call, Disposition, Policy, make_policy, policy_names
from tests.fakes import VOCAB, FakeExecutor, expected

MAX_LEN = 40


class Greedy(Policy):
    """What a bad plugin might do: keep everything for ever, at any price, and preempt whoever."""

    name = "greedy"
    bids = True
    reads_calls = True
    growth_bid = 0.0

    def bid(self, turn, pressure, now):
        return 0.0

    def at_turn_end(self, end, pressure, now):
        return Disposition(1e12, 1e300, review_seconds=0.0)

    def review(self, pin, pressure, now):
        return Disposition(1e12, 1e300, review_seconds=1.0)


POLICIES = [*policy_names(), Greedy.name]


def policy_of(name):
    return Greedy() if name == Greedy.name else make_policy(name)


CALLS = [None, *(Call("bash", key, None, f"{key} -x | tail") for key in ("ls", "make", "mine"))]


@pytest.fixture(autouse=True)
def tools(monkeypatch):
    monkeypatch.setattr(JobDesk, "_call_of", lambda desk, sequence: CALLS[sequence.tokens[-1] % len(CALLS)])


class Timed(FakeExecutor):
    def __init__(self, num_blocks, block_size, clock, seconds):
        super().__init__(num_blocks, block_size)
        self.clock, self.seconds = clock, seconds

    def execute(self, plan):
        self.clock.advance(self.seconds * sum(row.stop - row.start for row in plan.rows))
        return super().execute(plan)


class Overtaking:
    """Who is admitted while others wait."""

    def __init__(self, monkeypatch, queue):
        self.older, self.younger, self.waits = Counter(), Counter(), Counter()
        admit, push = queue.admit, queue.push

        def pushed(sequence, key):
            self.waits[sequence.id] += 1  # more than once, if it is preempted
            push(sequence, key)

        def admitted(sequence):
            age = (sequence.turn.arrived_at, sequence.id)
            waiting = {entry[2].id: entry[2] for entry in queue._heap if queue._entries.get(entry[2].id) == entry[1]}
            for other in waiting.values():
                if other is not sequence:
                    count = self.older if age < (other.turn.arrived_at, other.id) else self.younger
                    count[other.id] += 1
            admit(sequence)

        monkeypatch.setattr(queue, "push", pushed)
        monkeypatch.setattr(queue, "admit", admitted)

    def within(self, fair_every):
        for id, waits in self.waits.items():
            most = 0 if fair_every is None else (fair_every - 1) * (self.older[id] + waits)
            assert self.younger[id] <= most, (
                f"{self.younger[id]} later ones before it, and {self.older[id]} earlier ones"
            )


class Crowd:
    def __init__(self, name, seed, monkeypatch):
        self.random = randomly = random.Random(seed)
        self.clock = VirtualClock()
        size, seconds = randomly.choice([1, 3, 4]), randomly.choice([0.0, 0.001, 0.1, 5.0])  # 0: the clock stands still
        num_blocks = randomly.choice([MAX_LEN, 60, 150]) // size + 2
        self.quota = randomly.choice([None, None, 0, 3, 9])
        config = EngineConfig(
            num_blocks,
            size,
            max_step_tokens=randomly.choice([6, 12, 64]),
            max_running=randomly.choice([1, 2, 6]),
            max_model_len=MAX_LEN,
            lease_quota=self.quota,
            prefix_caching=randomly.random() < 0.7,
        )
        self.policy = policy_of(name)
        self.engine = EngineCore(
            Timed(num_blocks, size, self.clock, seconds), config, policy=self.policy, clock=self.clock
        )
        self.overtaking = Overtaking(monkeypatch, self.engine._scheduler._waiting)
        self.wanted, self.got, self.histories = {}, {}, {}

    def submit(self):
        randomly = self.random
        job = randomly.choice([None, "a", "a", "b", f"j{randomly.randrange(30)}"])
        salt = randomly.choice(["", "t"])
        history = self.histories.get((salt, job), [])
        if not history or len(history) > MAX_LEN - 12 or randomly.random() < 0.2:
            history = [randomly.randrange(VOCAB) for _ in range(randomly.randint(1, MAX_LEN - 8))]
        prompt = [*history, randomly.randrange(VOCAB)]
        count = randomly.randint(1, MAX_LEN - len(prompt))
        request = self.engine.submit(
            prompt,
            SamplingParams(max_tokens=count, temperature=0),
            salt=salt,
            job_id=job,
            is_last_step=randomly.random() < 0.15,
            hold=randomly.choice([False, False, False, True, 0.5, 1e9]),
            priority=randomly.choice([0, 0, -5, 100]),
        )
        self.wanted[request] = (salt, job, prompt, expected(prompt, count))
        self.got[request] = []

    def step(self):
        for delta in self.engine.step():
            self.got[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                salt, job, prompt, answer = self.wanted.pop(delta.request_id)
                assert self.got.pop(delta.request_id) == answer
                self.histories[salt, job] = [*prompt, *answer]
        self.engine.check()
        if self.quota is not None:
            held = {}
            for lease in self.engine.kv.leases:
                if not lease.transient:
                    held.setdefault(lease.scope.tenant, set()).update(lease.blocks)
            assert all(len(blocks) <= self.quota for blocks in held.values())

    def run(self):
        randomly = self.random
        for _ in range(randomly.randint(20, 70)):
            doing = randomly.random()
            if doing < 0.4:
                for _ in range(randomly.choice([1, 1, 8])):
                    self.submit()
            elif doing < 0.85:
                self.step()
            elif doing < 0.9 and self.wanted:
                request = randomly.choice(list(self.wanted))
                self.engine.abort(request)
                del self.wanted[request], self.got[request]
                self.engine.check()
            else:
                self.clock.advance(randomly.choice([0.0, 0.1, 2.0, 60.0, 1e7]))
                self.engine.expire()
        self.finish()

    def finish(self):
        """No deadlock: as long as there is work, a few steps are enough to compute something."""
        idle, computed = 0, self.engine._executor.num_computed
        while self.engine.has_work:
            self.step()
            idle = idle + 1 if self.engine._executor.num_computed == computed else 0
            computed = self.engine._executor.num_computed
            assert idle < 20, "it has work and does none"
        assert not self.wanted
        self.overtaking.within(self.policy.fair_every)
        for salt in ("", "t"):
            for state in self.engine.states(salt=salt):
                self.engine.release(state)
        self.clock.advance(1e13)
        self.engine.expire()
        self.engine.check()
        assert self.engine.stats().kv_usage == 0.0


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=settings().max_examples // 3)
@given(seed=st.integers(0, 2**32))
def test_everybody_is_served_whatever_clients_and_policies_do(name, seed):
    with pytest.MonkeyPatch.context() as monkeypatch:
        Crowd(name, seed, monkeypatch).run()


@pytest.mark.parametrize("name", POLICIES)
def test_a_job_that_never_ends_lets_others_pass(name):
    """It sends its next turn as soon as the last has ended, its KV in place and its priority high; there is room for one."""
    policy = policy_of(name)
    clock = VirtualClock()
    config = EngineConfig(24, 4, max_step_tokens=64, max_running=1, max_model_len=MAX_LEN)
    engine = EngineCore(Timed(24, 4, clock, 0.01), config, policy=policy, clock=clock)
    greedy = SamplingParams(max_tokens=1, temperature=0)
    endless = [1] * 20
    for _ in range(3):
        engine.generate(endless, greedy, job_id="endless", priority=-9)
    newcomers = [engine.submit([number] * 15, greedy, job_id=f"new {number}") for number in range(2, 5)]
    turns, current = 0, None
    while any(map(engine.is_active, newcomers)):
        if current is None or not engine.is_active(current):
            current = engine.submit(endless, greedy, job_id="endless", priority=-9)
            turns += 1
        engine.step()
        assert turns <= len(newcomers) * ((policy.fair_every or 1) + 1)


def test_the_queue_forgets_those_that_left_it():
    """With turns that wait for ever at its end, it never is empty, and what left must not stay."""
    queue = WaitingQueue(fair_every=4)
    clock = VirtualClock()
    engine = EngineCore(
        FakeExecutor(8, 4), EngineConfig(8, 4, max_step_tokens=8, max_running=1, max_model_len=16), clock=clock
    )
    for _ in range(300):
        engine.submit([1, 2], SamplingParams(max_tokens=1))
    sequences = [entry[2] for entry in engine._scheduler._waiting._heap]
    queue.push(sequences[0], (10**9,))
    for round in range(50):
        for number, sequence in enumerate(sequences[1:]):
            queue.push(sequence, (round, number))
        for sequence in sequences[1:]:
            queue.remove(sequence)
    assert len(queue) == 1 and queue.peek() is sequences[0]
    assert max(len(queue._heap), len(queue._by_age)) < 3 * len(sequences)
