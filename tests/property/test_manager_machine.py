"""Random lives of tables, forks and leases on tiny pools: `check()` after every step, no leak at the end."""

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from segue.base.types import Scope
from segue.kv import KVManager

SCOPES = [Scope(model="m"), Scope(salt="tenant", model="m")]
# Few different tokens and many shared prefixes: hits, partial hits and duplicates are the rule.
PROMPTS = st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=24)


class Life:
    """A table with its tokens and how many of them have KV: what a scheduler keeps."""

    def __init__(self, table, ids):
        self.table, self.ids, self.num_computed = table, ids, 0


class ManagerMachine(RuleBasedStateMachine):
    lives = Bundle("lives")
    leases = Bundle("leases")

    @initialize(num_blocks=st.integers(2, 12), size=st.sampled_from([1, 2, 4, 5]), collide=st.booleans())
    def start(self, num_blocks, size, collide):
        hashing = {"hash_block": lambda parent, data: hash(data) % 3} if collide else {}
        self.kv = KVManager(num_blocks, size, **hashing)
        self.num_blocks = num_blocks
        self.open: set[Life] = set()
        self.held = []
        self.now = 0.0
        # What each block's slots really hold: (scope, all tokens up to and with this one).
        self.memory: dict[tuple[int, int], tuple] = {}

    def _content(self, life, position):
        return (life.table.scope, tuple(life.ids[: position + 1]))

    def _write(self, life, start, stop, copy):
        size = self.kv.block_size
        if copy is not None:
            for offset in range(size):
                self.memory[copy.dst, offset] = self.memory.get((copy.src, offset))
            self.kv.settle(copy)
        for position in range(start, stop):
            self.memory[life.table.blocks[position // size], position % size] = self._content(life, position)
        life.num_computed = stop

    @rule(target=lives, prompt=PROMPTS, scope=st.sampled_from(SCOPES), compute=st.floats(0, 1))
    def admit(self, prompt, scope, compute):
        ids = array("i", prompt)
        life = Life(self.kv.open(ids, scope), ids)
        self.open.add(life)
        match = self.kv.match(life.table, ids)
        assert match.num_tokens < len(ids)
        got = self.kv.admit(life.table, match, len(ids))
        if got is None:
            assert self.kv.num_free < self.kv.blocks_for(len(ids))
            return life
        life.num_computed = got.num_reused
        self._write(life, life.num_computed, max(life.num_computed, int(compute * len(ids))), got.copy)
        self.kv.commit(life.table, ids, life.num_computed)
        return life

    @rule(life=lives, token=st.sampled_from([1, 2]))
    def decode(self, life, token):
        if life not in self.open or not life.table.blocks:
            return
        if life.num_computed == len(life.ids):
            life.ids.append(token)
        start, stop = life.num_computed, len(life.ids)
        got = self.kv.extend(life.table, start, stop)
        if got is not None:
            self._write(life, start, stop, got.copy)
            self.kv.commit(life.table, life.ids, stop)

    @rule(target=lives, life=lives, share=st.floats(0, 1))
    def fork(self, life, share):
        shared = int(life.num_computed * share) if life in self.open else 0
        if not shared:
            return life
        child = Life(self.kv.fork(life.table, shared), life.ids[: shared + 1])
        child.num_computed = shared
        self.open.add(child)
        return child

    @rule(life=lives)
    def preempt(self, life):
        if life in self.open:
            self.kv.clear(life.table)
            life.num_computed = 0

    @rule(target=leases, life=lives, value=st.floats(0, 1), expires=st.none() | st.floats(0, 9))
    def hold(self, life, value, expires):
        if life not in self.open:
            return None
        lease = self.kv.hold(life.table, life.num_computed, value=value, expires_at=expires)
        self.held.append(lease)
        return lease

    @rule(lease=consumes(leases))
    def drop(self, lease):
        if lease is not None:
            self.kv.leases.end(lease)

    @rule(wanted=st.integers(0, 12))
    def reclaim(self, wanted):
        self.now += 1
        self.kv.leases.reclaim(wanted, self.now)

    @rule(life=consumes(lives))
    def finish(self, life):
        if life in self.open:
            self.open.remove(life)
            self.kv.commit_tail(life.table, life.ids, life.num_computed)
            self.kv.close(life.table)

    @rule()
    def forget(self):
        self.kv.forget()

    @invariant()
    def promises_hold(self):
        if hasattr(self, "kv"):
            self.kv.check()

    @invariant()
    def every_computed_token_reads_back(self):
        size = self.kv.block_size if hasattr(self, "kv") else 1
        for life in getattr(self, "open", ()):
            for position in range(life.num_computed):
                held = self.memory[life.table.blocks[position // size], position % size]
                assert held == self._content(life, position)

    def teardown(self):
        if not hasattr(self, "kv"):
            return
        for life in self.open:
            self.kv.close(life.table)
        for lease in self.held:
            self.kv.leases.end(lease)
        self.kv.check()
        assert self.kv.usage == 0.0


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(stateful_step_count=40)
