"""Random traffic on an engine with a tiny pool and a model that notices every wrong block.

Whatever is submitted, aborted, held, released, preempted or failed: `check()` holds after every step, every answer is
the one that an engine with endless memory gives, and in the end usage is 0.0.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from segue.base.clock import VirtualClock
from segue.base.config import EngineConfig
from segue.base.errors import RequestTooLong
from segue.base.types import FinishReason, SamplingParams
from segue.engine import EngineCore
from segue.engine.sequence import sample_seed
from tests.fakes import FakeExecutor, PipelinedFake, expected

PROMPTS = st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=1, max_size=30)


class EngineMachine(RuleBasedStateMachine):
    fake = FakeExecutor

    @initialize(
        num_blocks=st.integers(2, 24),
        size=st.sampled_from([1, 2, 4, 16]),
        step_tokens=st.integers(6, 40),
        running=st.integers(1, 6),
        caching=st.booleans(),
    )
    def start(self, num_blocks, size, step_tokens, running, caching):
        self.config = EngineConfig(num_blocks, size, step_tokens, running, max_model_len=60, prefix_caching=caching)
        self.executor = self.fake(num_blocks, size)
        self.clock = VirtualClock()
        self.engine = EngineCore(self.executor, self.config, clock=self.clock)
        self.asked: dict[str, tuple[list[int], SamplingParams, int]] = {}
        self.answers: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.sequences = {}
        self.leases = []

    @rule(
        prompt=PROMPTS,
        max_tokens=st.none() | st.integers(1, 20),
        n=st.sampled_from([1, 1, 2, 3, 5]),
        temperature=st.sampled_from([0.0, 1.0]),
        hold=st.booleans(),
        salt=st.sampled_from(["", "t"]),
        stops=st.sampled_from([(), (), (3,), (4, 9, 17, 30, 41)]),
    )
    def submit(self, prompt, max_tokens, n, temperature, hold, salt, stops):
        params = SamplingParams(
            max_tokens=max_tokens, n=n, temperature=temperature, seed=5, ignore_eos=True, stop_token_ids=stops
        )
        needed = len(prompt) + (max_tokens or 1) - 1
        try:
            request_id = f"r{len(self.sequences):03}"  # not a random one: a failing run must be repeatable
            self.engine.submit(prompt, params, hold=hold, salt=salt, request_id=request_id)
        except RequestTooLong:
            assert needed > self.config.kv_tokens or len(prompt) + (max_tokens or 1) > 60
            return
        assert needed <= self.config.kv_tokens
        length = self.config.max_sequence_len - len(prompt) if max_tokens is None else max_tokens
        self.asked[request_id] = (prompt, params, length)
        self.sequences[request_id] = self.engine._answers.get(request_id).turn.sequences

    @rule()
    def step(self):
        self._take(self.engine.step())
        self.clock.advance(0.1)

    @rule()
    def run_for_a_while(self):
        for _ in range(10):
            self.step()
            self.engine.check()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.asked)))
        if self.engine.abort(request_id):
            self.asked.pop(request_id)
            self.leases += [s.state for s in self.sequences[request_id] if s.state]

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        self.engine.release(self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))))

    @rule()
    def a_step_fails(self):
        self.executor.fail_next = RuntimeError("injected")
        deltas = self.engine.step()
        self.executor.fail_next = None
        for delta in deltas:
            assert delta.finish_reason is FinishReason.ERROR and "injected" in str(delta.error)
            if self.asked.pop(delta.request_id, None):
                self.leases += [s.state for s in self.sequences[delta.request_id] if s.state]

    @rule()
    def forget(self):
        self.engine.forget()

    def _take(self, deltas):
        for delta in deltas:
            assert delta.error is None, repr(delta.error)
            answer = self.answers.setdefault((delta.request_id, delta.index), [])
            answer.extend(delta.token_ids)
            if delta.finish_reason is not None:
                prompt, params, length = self.asked[delta.request_id]
                wanted = expected(prompt, length, sample_seed(5, delta.index), params.temperature)
                ends = [at for at, token in enumerate(wanted) if token in params.stop_token_ids]
                length = ends[0] + 1 if ends else length
                assert delta.finish_reason is (FinishReason.STOP if ends else FinishReason.LENGTH)
                assert answer == wanted[:length]
                sequence = self.sequences[delta.request_id][delta.index]
                assert sequence.state.num_held <= len(prompt) + length - 1
                self.leases.append(sequence.state)
        self.asked = {request_id: ask for request_id, ask in self.asked.items() if self.engine.is_active(request_id)}

    @invariant()
    def promises_hold(self):
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        steps = 0
        while self.engine.has_work:
            self._take(self.engine.step())
            self.engine.check()
            steps += 1
            assert steps < 5000, "the engine does not come to an end"
        assert not self.asked, "every admitted request finishes"
        for lease in self.leases:
            self.engine.release(lease)
        assert self.engine.stats().kv_usage == 0.0
        self.engine.check()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(stateful_step_count=30)


class PipelinedMachine(EngineMachine):
    """The same, while each step begins before the last one's tokens are known."""

    fake = PipelinedFake


TestPipelinedMachine = PipelinedMachine.TestCase
TestPipelinedMachine.settings = settings(stateful_step_count=30)


def test_steps_begin_ahead():
    executor = PipelinedFake(200, 4)
    engine = EngineCore(executor, EngineConfig(200, 4, 40, 6, max_model_len=60))
    prompts = [[1, 2, 3], [4] * 9, [5, 6]]
    results = engine.generate(prompts, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    assert [result.token_ids for result in results] == [expected(prompt, 20) for prompt in prompts]
    assert executor.num_ahead == 19
    engine.check()
    assert engine.stats().kv_usage == 0.0
