"""Two tenants and two engines with tiny pools, in random traffic that leaves nothing finished for long.

Saves, loads, exports and imports stay open while everything else goes on; ids are few, so that many want the same; quotas
change; requests have several answers and stop where they like. After every operation `check()` holds on both engines, every
answer is that of a request that was never disturbed, nobody gets what is another tenant's, and in the end nothing is held.
"""

import random
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest

from segue.base.clock import VirtualClock
from segue.base.config import EngineConfig
from segue.base.errors import InvalidRequest, NoRoom, ParentFailed, StateError
from segue.base.types import FinishReason, SamplingParams
from segue.engine import EngineCore, Request
from segue.engine.jobs import JobDesk
from segue.engine.sequence import sample_seed
from segue.policies import Adaptive, Call, ContextServe, Continuum, ContinuumReleased, FirstComeFirstServed, Priority
from tests.fakes import FakeExecutor, cut_chunks, expected

SALTS = ("", "t")
POLICIES = (FirstComeFirstServed, Priority, Continuum, ContinuumReleased, ContextServe, Adaptive)
MAX_LEN = 48
REFUSED = (InvalidRequest, StateError)  # NoRoom, RequestTooLong and SnapshotError among them


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Few tokens in a chunk, so that one of several can be missing."""
    cut_chunks(monkeypatch, 4 * FakeExecutor(2, 1).kv_layout.token_bytes)
    monkeypatch.setattr("segue.engine.tiering._STAGING_BYTES", 0)
    monkeypatch.setattr("segue.engine.tiering._AHEAD", 2)


@pytest.fixture(autouse=True)
def tools(monkeypatch):
    """Every answer ends with one of two tool calls, or with none."""
    calls = [None, Call("bash", "ls", "j"), Call("bash", "make")]
    monkeypatch.setattr(JobDesk, "_call_of", lambda desk, sequence: calls[sequence.tokens[-1] % 3])


@dataclass(eq=False)
class Asked:
    """A request, and what its answers must be. An heir's prompt follows from its parent's answer, once that has ended."""

    salt: str
    params: SamplingParams
    limit: int  # tokens in all
    prompt: list[int] | None = None
    parent: "tuple[Asked, int] | None" = None
    at: int | None = None
    suffix: list[int] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    came_with: int = 0  # tokens of output when it last arrived in an engine
    unfinished: set[int] = field(default_factory=set)

    def __post_init__(self):
        self.seen = self.seen or [0] * self.params.n
        self.unfinished = set(range(self.params.n))

    def start(self):
        if self.prompt is None:
            parent, index = self.parent
            assert index not in parent.unfinished, "an heir runs before its parent has ended"
            self.prompt = [*parent.tokens(index)[: self.at], *self.suffix]
        return self.prompt

    def answer(self, index):
        prompt, params = self.start(), self.params
        count = min(params.max_tokens or MAX_LEN, self.limit - len(prompt))
        tokens = expected(prompt, count, sample_seed(params.seed, index), params.temperature)
        stops = [at for at, token in enumerate(tokens, 1) if token in params.stop_token_ids]
        return tokens[: min(stops, default=count)]

    def tokens(self, index):
        """As far as they have been seen."""
        return [*self.start(), *self.answer(index)[: self.seen[index]]]

    def resumed(self, index, num_seen):
        """One of its answers on its own."""
        params = replace(self.params, n=1, seed=sample_seed(self.params.seed, index))
        return Asked(self.salt, params, self.limit, self.start(), seen=[num_seen], came_with=num_seen)


class Traffic:
    def __init__(self, seed, folder):
        self.random = random.Random(seed)
        self.folder = folder
        self.clock = VirtualClock()
        pick = self.random.choice
        shared = {
            "max_step_tokens": 12,
            "max_running": self.random.randint(1, 5),
            "max_model_len": MAX_LEN,
            "prefix_caching": self.random.random() < 0.6,
            "max_states": pick([1, 3, 9, 20]),
            "lease_quota": pick([None, None, 0, 2, 6]),
        }
        sizes = [(pick([8, 20, 30, 45, 60]) // size + 2, size) for size in (pick([1, 2, 3, 4, 5]), pick([1, 3, 4]))]
        self.engines = []
        for size in sizes:
            executor = FakeExecutor(*size)
            tiers = self.tiers(size[1] * executor.kv_layout.token_bytes) if shared["prefix_caching"] else []
            config = EngineConfig(*size, **shared)
            self.engines.append(EngineCore(executor, config, policy=pick(POLICIES)(), clock=self.clock, tiers=tiers))
        for engine in self.engines:  # as if tokens took that long: then there is something to keep
            engine._scheduler.jobs.gauge.seconds_per_token = pick([0.0, 0.01, 1.0])
        self.asked = [{}, {}]  # by engine: id -> Asked, until its end was heard
        self.saves = []  # (salt, outgoing, done, what it is: None or (Asked, index, tokens seen))
        self.loads = []  # (engine, outgoing, arrival, what it is)
        self.exports = []  # (engine, id, export)
        self.imports = []  # (engine, id, export, arrival)

    def tiers(self, block_bytes):
        """Often none; a host tier of few blocks or many, and a folder that both engines may use."""
        tiers = [f"host={self.random.choice([1, 3, 10, 60]) * block_bytes}"] if self.random.random() < 0.6 else []
        if self.random.random() < 0.3:
            tiers.append(f"disk={self.folder},{self.random.choice([2, 30]) * (block_bytes + 64)}")
        return tiers

    # One operation

    OPERATIONS = (
        ("submit", 12),
        ("continue_from", 12),
        ("step", 24),
        ("fail", 1),
        ("abort", 2),
        ("forget", 1),
        ("change_quota", 2),
        ("change_state", 8),
        ("begin_save", 5),
        ("end_save", 3),
        ("begin_load", 6),
        ("fill", 10),
        ("end_load", 5),
        ("begin_export", 8),
        ("begin_import", 10),
        ("end_import", 6),
        ("abort_export", 1),
        ("use_what_has_ended", 1),
    )

    def run(self):
        names, weights = zip(*self.OPERATIONS, strict=True)
        for name in self.random.choices(names, weights, k=self.random.randint(40, 140)):
            with suppress(*REFUSED):
                getattr(self, name)(self.random.randrange(2))
            for engine in self.engines:
                engine.check()
                states = [state for salt in SALTS for state in engine.states(salt=salt)]
                charged = {lease for lease in engine.kv.leases if not lease.transient}
                assert charged <= {state.lease for state in states}, "a hold that nobody can release"
        self.end()

    def some(self, items):
        """One of them; where there is none, the operation is off."""
        items = list(items)
        if not items:
            raise NoRoom("nothing to do it with")
        return self.random.choice(items)

    def new_id(self, which, salt, num_answers=1):
        """One of few, and none whose end is still to be heard; free, if the engine takes it, as far as we can see."""
        name = self.some(name for name in ("a", "b", "c", "d", "e", "a/0", "b/1") if name not in self.asked[which])
        names = [name] if num_answers == 1 else [f"{name}/{index}" for index in range(num_answers)]
        theirs = {state.id for other in SALTS if other != salt for state in self.engines[which].states(salt=other)}
        theirs |= {arrival.request_id for at, *_, arrival, _ in self.loads if at == which}
        theirs |= {arrival.request_id for at, *_, arrival in self.imports if at == which}
        for active, asked in self.asked[which].items():
            if self.engines[which].is_active(active):
                many = asked.params.n > 1
                theirs |= {f"{active}/{index}" for index in range(asked.params.n)} if many else {active}
        return name, theirs.isdisjoint([name, *names])

    def params(self):
        pick = self.random.choice
        return SamplingParams(
            max_tokens=pick([None, 1, 2, 5, 9, 12]),
            temperature=pick([0.0, 1.0]),
            seed=self.random.randint(0, 9),
            n=pick([1, 1, 1, 2, 3]),
            stop_token_ids=tuple(self.random.sample(range(50), pick([0, 0, 3]))),
        )

    def job(self):
        """Of few jobs, which lie about their last step as often as not."""
        return {"job_id": self.random.choice([None, "j", "k"]), "is_last_step": self.random.random() < 0.3}

    # Requests

    def submit(self, which):
        engine, salt, params = self.engines[which], self.random.choice(SALTS), self.params()
        longest = min(engine.config.kv_tokens, 20)
        prompt = self.random.choices([1, 1, 1, 2, 3], k=self.random.randint(1, longest))
        name, free = self.new_id(which, salt, params.n)
        hold = self.random.choice([False, True, 0.5, 3.0])
        engine.submit(prompt, params, request_id=name, salt=salt, hold=hold, value=self.random.random(), **self.job())
        assert free, f"{name!r} was somebody else's"
        self.asked[which][name] = Asked(salt, params, engine.config.max_sequence_len, prompt)

    def running(self, which):
        """The names of answers under way: (name, salt) -> (Asked, index)."""
        names = {}
        for name, asked in self.asked[which].items():
            if self.engines[which].is_active(name):
                for index in asked.unfinished:
                    names[name if asked.params.n == 1 else f"{name}/{index}", asked.salt] = asked, index
        return names

    def known(self, which):
        """The names of states, with their salts."""
        return [(state.id, salt) for salt in SALTS for state in self.engines[which].states(salt=salt)]

    def continue_from(self, which):
        engine, params, running = self.engines[which], self.params(), self.running(which)
        parent, salt = self.some([*running, *self.known(which)])
        name, free = self.new_id(which, salt, params.n)
        suffix = self.random.choices([1, 2], k=self.random.randint(0, 6))
        at = self.random.choice([None, None, "now", self.random.randint(1, 30)])
        asked = Asked(salt, params, engine.config.max_sequence_len, suffix=suffix, at=None if at == "now" else at)
        if (parent, salt) not in running:
            asked.prompt = [*engine.state(parent, salt=salt).tokens[: asked.at], *suffix]
        elif at == "now":
            asked.prompt = [*self.tokens_so_far(*running[parent, salt]), *suffix]
        else:
            asked.parent = running[parent, salt]
        hold, consume = self.random.choice([False, True, 0.5]), self.random.random() < 0.5
        options = {"request_id": name, "salt": salt, "hold": hold, "consume": consume, **self.job()}
        engine.submit(Request(parent=parent, suffix=suffix, params=params, at=at, **options))
        assert free, f"{name!r} was somebody else's"
        self.asked[which][name] = asked

    def tokens_so_far(self, asked, index):
        """Of an answer under way; an heir that waits has none, and cannot be forked."""
        if asked.prompt is None and asked.parent[1] in asked.parent[0].unfinished:
            return []
        return asked.tokens(index)

    def step(self, which):
        for _ in range(self.random.randint(1, 3)):
            self.take(which, self.engines[which].step())
            self.engines[which].check()
            self.clock.advance(self.random.choice([0.0, 0.1, 1.0, 50.0]))

    def fail(self, which):
        engine = self.engines[which]
        engine._executor.fail_next = RuntimeError("injected")
        self.take(which, engine.step())
        engine._executor.fail_next = None

    def abort(self, which):
        name = self.some(name for name in self.asked[which] if self.engines[which].is_active(name))
        assert self.engines[which].abort(name)
        del self.asked[which][name]

    def take(self, which, deltas):
        for delta in deltas:
            asked = self.asked[which].get(delta.request_id)
            if delta.finish_reason is FinishReason.MOVED:
                continue
            if delta.finish_reason is FinishReason.ERROR:
                assert "injected" in str(delta.error) or isinstance(delta.error, (ParentFailed, InvalidRequest))
                self.asked[which].pop(delta.request_id, None)
                continue
            assert asked is not None, f"{delta} for nobody"
            answer, seen = asked.answer(delta.index), asked.seen[delta.index]
            assert list(delta.token_ids) == answer[seen : seen + 1], "one unbroken, exact stream"
            asked.seen[delta.index] += 1
            if delta.finish_reason is not None:
                self.heard_the_end(which, asked, delta)

    def heard_the_end(self, which, asked, delta):
        assert asked.seen[delta.index] == len(asked.answer(delta.index))
        assert delta.state.tokens.tolist() == asked.tokens(delta.index) and delta.state.scope.salt == asked.salt
        reuse = delta.reuse
        assert min(reuse.held, reuse.cached, reuse.loaded, reuse.recomputed, reuse.new) >= 0, reuse
        assert reuse.inherited + reuse.recomputed + reuse.new == len(asked.start()) + asked.came_with, reuse
        asked.unfinished.remove(delta.index)
        if not asked.unfinished:
            assert not self.engines[which].is_active(delta.request_id)
            del self.asked[which][delta.request_id]

    # States

    def forget(self, which):
        self.engines[which].forget()

    def change_quota(self, which):
        self.engines[which].set_lease_quota(self.random.choice(SALTS), self.random.choice([None, 0, 1, 5]))

    def change_state(self, which):
        engine, change = self.engines[which], self.random.choice(["fork", "hold", "release", "fork a request"])
        name, salt = self.some(self.running(which) if change == "fork a request" else self.known(which))
        if change == "hold":
            engine.hold(name, self.random.choice([None, 0.5]), value=self.random.random(), salt=salt)
        elif change == "release":
            engine.release(name, salt=salt)
            assert engine.state(name, salt=salt).num_held == 0
        else:
            at = self.random.choice([None, self.random.randint(1, 30)])
            chosen, free = self.new_id(which, salt)
            child = engine.fork(name, at, salt=salt, state_id=chosen, hold=self.random.choice([True, 0.5, False]))
            assert free and child.num_held <= child.num_tokens == (at or child.num_tokens)

    # Out and in, with all the time in the world between

    def begin_save(self, which):
        running = self.running(which)
        name, salt = self.some([*running, *self.known(which)])
        outgoing, done = self.engines[which].begin_save(name, salt=salt)
        what = None
        if (name, salt) in running:
            asked, index = running[name, salt]
            what = asked, index, asked.seen[index]
        self.saves.append((salt, outgoing, done, what))

    def end_save(self, _):
        save = self.some(self.saves)
        self.saves.remove(save)
        save[2]()

    def begin_load(self, which):
        salt, outgoing, _, what = self.some(self.saves)
        name, free = self.new_id(which, salt)
        chosen = self.random.choice([name, None])
        hold = self.random.choice([True, 1.0, False])
        arrival = self.engines[which].begin_load(outgoing.snapshot, salt=salt, state_id=chosen, hold=hold)
        assert free or chosen is None
        self.loads.append((which, outgoing, arrival, what))

    def fill(self, _):
        """Some chunks, in any order, perhaps again; what had to give way at the source does not come."""
        source, arrival = self.some([load[1:3] for load in self.loads] + [move[2:4] for move in self.imports])
        for index in self.random.sample(range(source.snapshot.num_chunks), source.snapshot.num_chunks):
            chunk = memoryview(bytearray(source.snapshot.chunk_bytes(index)))
            if self.random.random() < 0.8:
                source.read(index, chunk)
                arrival.write(index, chunk)

    def end_load(self, _):
        load = self.some(self.loads)
        self.loads.remove(load)
        which, outgoing, arrival, what = load
        if self.random.random() < 0.3:
            arrival.abort()
            return
        state = arrival.commit()
        assert state.tokens == outgoing.snapshot.tokens and state.id == arrival.request_id
        if what is not None:
            name, free = self.new_id(which, state.scope.salt)
            self.engines[which].resume(state, request_id=name, consume=self.random.random() < 0.5)
            assert free
            asked, index, seen = what
            self.asked[which][name] = asked.resumed(index, seen)

    def begin_export(self, which):
        name, salt = self.some((name, salt) for name, salt in self.running(which) if name in self.asked[which])
        self.exports.append((which, name, self.engines[which].export_request(name, salt=salt)))

    def begin_import(self, _):
        moves = [move for move in self.exports if self.on_its_way(*move)]
        which, name, export = self.some(move for move in moves if move[1] not in self.asked[1 - move[0]])
        salt = self.asked[which][name].salt
        arrival = self.engines[1 - which].import_request(export.snapshot, salt=salt)
        self.exports.remove((which, name, export))
        self.imports.append((1 - which, name, export, arrival))

    def on_its_way(self, which, name, export):
        """It was not aborted meanwhile, nor another started with its id."""
        active = self.engines[which]._answers.get(name)
        return active is not None and active.export is export

    def end_import(self, _):
        move = self.some(self.imports)
        self.imports.remove(move)
        which, name, export, arrival = move
        if self.random.random() < 0.3 or not self.on_its_way(1 - which, name, export):
            arrival.abort()
            export.abort()
            return
        arrival.commit()
        export.commit()
        asked = self.asked[which][name] = self.asked[1 - which].pop(name)
        asked.came_with = asked.seen[0]
        self.take(1 - which, self.engines[1 - which].step())

    def abort_export(self, _):
        export = self.some(self.exports)
        self.exports.remove(export)
        export[2].abort()

    def use_what_has_ended(self, which):
        """Over is over, for those who come back to it."""
        name, salt = self.some(self.known(which))
        outgoing, done = self.engines[which].begin_save(name, salt=salt)
        done()
        arrival = self.engines[which].begin_load(outgoing.snapshot, salt=salt, hold=False)
        self.random.choice([arrival.commit, arrival.abort])()
        with pytest.raises(StateError):
            arrival.commit()
        arrival.abort()
        done()

    # The end

    def end(self):
        for *_, arrival in self.imports:
            arrival.abort()
        for _, _, arrival, _ in self.loads:
            arrival.abort()
        for export in [export for *_, export in self.exports] + [export for _, _, export, _ in self.imports]:
            export.abort()
        for _, _, done, _ in self.saves:
            done()
        rounds = 0
        while any(engine.has_work for engine in self.engines):
            for which, engine in enumerate(self.engines):
                self.take(which, engine.step())
                engine.check()
            rounds += 1
            assert rounds < 5000, "the engines do not come to an end"
        assert self.asked == [{}, {}], "every request that was taken ends"
        for engine in self.engines:
            for state in [state for salt in SALTS for state in engine.states(salt=salt)]:
                engine.release(state)
            engine.check()
            assert engine.stats().kv_usage == 0.0 and engine.kv.num_free == engine.config.num_blocks - 1
            assert len(engine.kv.leases) == 0 and not engine.kv.leases.totals
            engine.close()


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_nothing_is_lost_mixed_up_or_left_in_random_traffic(first, tmp_path):
    for seed in range(first, first + 50):
        try:
            Traffic(seed, tmp_path / str(seed)).run()
        except Exception as error:
            error.add_note(f"with seed {seed}")
            raise
