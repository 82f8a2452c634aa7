"""Random lives of states on two engines with tiny pools, and a model that notices every wrong block.

Whatever is held, forked, continued, consumed, expired, moved, saved, lost or aborted: `check()` holds after every step,
every answer is the one of a request that never moved, every request that fits the pool finishes, and in the end nothing
is held.
"""

from contextlib import suppress
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from segue.base.clock import VirtualClock
from segue.base.config import EngineConfig
from segue.base.errors import InvalidRequest, NoRoom, RequestTooLong, StateError
from segue.base.types import FinishReason, SamplingParams
from segue.engine import EngineCore, Request, hand_over
from segue.state import State
from tests.fakes import FakeExecutor, PipelinedFake, expected

PROMPTS = st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=1, max_size=20)
HOLDS = st.sampled_from([False, True, 0.5, 3.0])
MAX_LEN = 48


@dataclass
class Asked:
    """What a request's answer must be; `prompt` is None while it depends on a parent that has not ended."""

    prompt: list[int] | None
    max_tokens: int
    temperature: float
    parent: str | None = None
    at: int | None = None
    suffix: tuple[int, ...] = ()
    seen: int = 0

    def answer(self):
        return expected(self.prompt, self.max_tokens, 5, self.temperature)


class StateMachine(RuleBasedStateMachine):
    fake = FakeExecutor

    @initialize(
        blocks=st.tuples(st.integers(3, 20), st.integers(3, 20)),
        sizes=st.tuples(st.sampled_from([1, 2, 4, 5]), st.sampled_from([1, 3, 4])),
        running=st.integers(1, 4),
        caching=st.booleans(),
        quota=st.none() | st.integers(0, 6),
        max_states=st.integers(2, 8),
    )
    def start(self, blocks, sizes, running, caching, quota, max_states):
        self.clock = VirtualClock()
        self.engines = [
            EngineCore(
                self.fake(count, size),
                EngineConfig(count, size, 12, running, MAX_LEN, caching, max_states=max_states, lease_quota=quota),
                clock=self.clock,
            )
            for count, size in zip(blocks, sizes, strict=True)
        ]
        self.asked: dict[str, Asked] = {}
        self.ended: dict[str, Asked] = {}
        self.where: dict[str, int] = {}
        self.exports = []
        self.count = 0

    # Asking

    def _params(self, max_tokens, temperature):
        return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=5, ignore_eos=True)

    def _new_id(self):
        self.count += 1
        return f"r{self.count:03}"

    @rule(
        which=st.integers(0, 1),
        prompt=PROMPTS,
        max_tokens=st.integers(1, 10),
        temperature=st.sampled_from([0.0, 1.0]),
        hold=HOLDS,
        value=st.floats(0, 2),
    )
    def submit(self, which, prompt, max_tokens, temperature, hold, value):
        request_id = self._new_id()
        params = self._params(max_tokens, temperature)
        try:
            self.engines[which].submit(prompt, params, request_id=request_id, hold=hold, value=value)
        except RequestTooLong:
            assert len(prompt) + max_tokens - 1 > self.engines[which].config.kv_tokens
            return
        self.asked[request_id] = Asked(prompt, max_tokens, temperature)
        self.where[request_id] = which

    @precondition(lambda self: self.where)
    @rule(
        data=st.data(),
        suffix=st.lists(st.sampled_from([1, 2]), max_size=6),
        at=st.none() | st.integers(1, 30) | st.just("now"),
        max_tokens=st.integers(1, 10),
        temperature=st.sampled_from([0.0, 1.0]),
        hold=HOLDS,
        consume=st.booleans(),
    )
    def continue_from(self, data, suffix, at, max_tokens, temperature, hold, consume):
        which = data.draw(st.integers(0, 1))
        engine = self.engines[which]
        known = [state.id for state in engine.states()]
        names = sorted({*known, *(name for name in self._alive() if self.where[name] == which)})
        if not names:
            return
        parent = data.draw(st.sampled_from(names))
        request_id = self._new_id()
        params = self._params(max_tokens, temperature)
        request = Request(
            params=params, parent=parent, suffix=suffix, at=at, request_id=request_id, hold=hold, consume=consume
        )
        running = engine.is_active(parent)
        if not running:
            tokens = list(engine.state(parent).tokens)
        elif at == "now":
            try:
                tokens = list(engine._turns.unfinished(parent, "").tokens)
            except StateError:
                return
        try:
            engine.submit(request)
        except InvalidRequest:
            return
        if running and at != "now":
            self.asked[request_id] = Asked(None, max_tokens, temperature, parent, at, tuple(suffix))
        else:
            kept = tokens[:at] if isinstance(at, int) else tokens
            self.asked[request_id] = Asked([*kept, *suffix], max_tokens, temperature)
        self.where[request_id] = which

    # Living

    @rule(which=st.integers(0, 1), count=st.integers(1, 8), seconds=st.sampled_from([0.0, 0.1, 1.0]))
    def step(self, which, count, seconds):
        for _ in range(count):
            self._take(self.engines[which].step())
            self.engines[which].check()
            self.clock.advance(seconds)

    @rule(which=st.integers(0, 1))
    def a_step_fails(self, which):
        engine = self.engines[which]
        engine._executor.fail_next = RuntimeError("injected")
        self._take(engine.step())
        engine._executor.fail_next = None

    def _alive(self):
        """An heir may have ended with its parent, and its last delta not been taken yet."""
        return sorted(name for name in self.asked if self.engines[self.where[name]].is_active(name))

    @precondition(lambda self: self._alive())
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(self._alive()))
        engine = self.engines[self.where[request_id]]
        assert engine.abort(request_id)
        del self.asked[request_id]

    @rule(which=st.integers(0, 1))
    def forget(self, which):
        self.engines[which].forget()

    # States

    def _some_state(self, data):
        engine = self.engines[data.draw(st.integers(0, 1))]
        states = engine.states()
        return engine, (data.draw(st.sampled_from(states)) if states else None)

    @rule(data=st.data(), share=st.floats(0, 1), hold=HOLDS)
    def fork(self, data, share, hold):
        engine, state = self._some_state(data)
        if state is not None:
            at = max(int(share * state.num_tokens), 1)
            child = engine.fork(state, at, hold=hold, state_id=f"s{self._new_id()}")
            assert child.num_held <= at  # the parent may have come without KV that the cache has

    @rule(data=st.data(), seconds=st.none() | st.sampled_from([0.5, 4.0]), value=st.floats(0, 3))
    def hold(self, data, seconds, value):
        engine, state = self._some_state(data)
        if state is not None:
            engine.hold(state, seconds, value=value)

    @rule(data=st.data())
    def release(self, data):
        engine, state = self._some_state(data)
        if state is not None:
            engine.release(state)

    @rule(data=st.data(), lose=st.sets(st.integers(0, 3)))
    def copy_to_the_other(self, data, lose):
        """Save here, load there, with some chunks lost on the way."""
        engine, state = self._some_state(data)
        if state is None:
            return
        other = self.engines[1 - self.engines.index(engine)]
        outgoing, done = engine.begin_save(state)
        try:
            arrival = other.begin_load(outgoing.snapshot, state_id=f"s{self._new_id()}", hold=1.0)
        except (NoRoom, RequestTooLong):
            done()
            return
        self._ship(outgoing, arrival, lose)
        done()
        loaded = arrival.commit()
        assert isinstance(loaded, State) and list(loaded.tokens) == list(state.tokens)

    def _ship(self, outgoing, arrival, lose):
        for index in arrival.missing:
            if index not in lose:
                chunk = memoryview(bytearray(outgoing.snapshot.chunk_bytes(index)))
                outgoing.read(index, chunk)
                arrival.write(index, chunk)

    # Moving

    def _movable(self):
        active = {name: self.engines[self.where[name]]._answers.get(name) for name in self._alive()}
        return [name for name, at in active.items() if at.turn.sequences and at.export is None]

    @precondition(lambda self: self._movable())
    @rule(data=st.data())
    def move(self, data):
        request_id = data.draw(st.sampled_from(self._movable()))
        which = self.where[request_id]
        source, destination = self.engines[which], self.engines[1 - which]
        heirs = [heir.turn.id for heir in source._answers.get(request_id).turn.heirs]
        try:
            hand_over(source, destination, request_id)
        except (NoRoom, RequestTooLong, InvalidRequest):
            return
        self.where[request_id] = 1 - which
        assert not source.is_active(request_id) and not any(source.is_active(heir) for heir in heirs)
        self._take(source.step(), moved=True)

    @precondition(lambda self: self._movable())
    @rule(data=st.data())
    def begin_export(self, data):
        request_id = data.draw(st.sampled_from(self._movable()))
        self.exports.append(self.engines[self.where[request_id]].export_request(request_id))

    @precondition(lambda self: self.exports)
    @rule(data=st.data(), lose=st.sets(st.integers(0, 3)), commit=st.booleans())
    def end_export(self, data, lose, commit):
        export = self.exports.pop(data.draw(st.integers(0, len(self.exports) - 1)))
        request_id = export.request_id
        if request_id not in self._alive():
            export.abort()
            return
        which = self.where[request_id]
        try:
            arrival = self.engines[1 - which].import_request(export.snapshot)
        except (NoRoom, RequestTooLong, InvalidRequest):
            export.abort()
            return
        if not commit:
            arrival.abort()
            export.abort()
            return
        with suppress(StateError):  # its KV had to give way: the rest is computed there
            self._ship(export, arrival, lose)
        arrival.commit()
        export.commit()
        self.where[request_id] = 1 - which
        self._take(self.engines[which].step(), moved=True)

    # Judging

    def _take(self, deltas, moved=False):
        for delta in deltas:
            request_id = delta.request_id
            asked = self.asked.get(request_id)
            if delta.finish_reason is FinishReason.MOVED:
                assert moved
                continue
            if delta.finish_reason is FinishReason.ERROR:
                self.asked.pop(request_id, None)
                continue
            assert asked is not None
            if asked.prompt is None:
                self._inherit(asked)
            wanted = asked.answer()
            assert list(delta.token_ids) == wanted[asked.seen : asked.seen + 1], "one unbroken, exact stream"
            asked.seen += 1
            if delta.finish_reason is not None:
                assert delta.finish_reason is FinishReason.LENGTH and asked.seen == len(wanted)
                reuse = delta.reuse
                assert reuse.held + reuse.cached + reuse.recomputed + reuse.new >= len(asked.prompt)
                self.ended[request_id] = self.asked.pop(request_id)

    def _inherit(self, asked):
        parent = self.ended[asked.parent]
        tokens = [*parent.prompt, *parent.answer()]
        asked.prompt = [*tokens[: asked.at], *asked.suffix]

    @invariant()
    def promises_hold(self):
        for engine in getattr(self, "engines", ()):
            engine.check()

    def teardown(self):
        if not hasattr(self, "engines"):
            return
        for export in self.exports:
            export.abort()
        steps = 0
        while any(engine.has_work for engine in self.engines):
            for engine in self.engines:
                self._take(engine.step())
                engine.check()
            steps += 1
            assert steps < 3000, "the engines do not come to an end"
        assert not self.asked, "every admitted request finishes"
        for engine in self.engines:
            for state in engine.states():
                engine.release(state)
            engine.check()
            assert engine.stats().kv_usage == 0.0 and not engine.kv.leases.totals


TestStateMachine = StateMachine.TestCase
TestStateMachine.settings = settings(stateful_step_count=40)


class PipelinedStateMachine(StateMachine):
    """The same, while each step begins before the last one's tokens are known."""

    fake = PipelinedFake


TestPipelinedStateMachine = PipelinedStateMachine.TestCase
TestPipelinedStateMachine.settings = settings(stateful_step_count=40)
