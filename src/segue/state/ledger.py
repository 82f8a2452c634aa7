"""Which states an engine knows: bounded, and able to say why it does not know one."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

from segue.base.errors import ForgottenState, ParentFailed, StateError, UnknownState
from segue.base.types import Scope
from segue.kv import Lease
from segue.state.snapshot import Progress

_KEY_BYTES = 40  # an int object and its place in a list
_STATE_BYTES = 600
_REMEMBERED = 8  # ids of states no longer known, for each that may be


class State:
    """What is left of a sequence when its request has ended: its tokens, and its KV as far as a lease still holds it.

    `num_computed` counts the tokens that once had KV, normally all but the last; `num_held` those that have it now, for
    certain. What lies between may still be in the prefix cache and is computed again if it is not.
    """

    __slots__ = ("id", "job", "keys", "lease", "num_computed", "progress", "scope", "tokens")

    def __init__(
        self,
        state_id: str,
        scope: Scope,
        tokens: array[int],
        keys: list[int],
        num_computed: int,
        *,
        job: str | None = None,
        lease: Lease | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.id = state_id
        self.scope = scope
        self.job = job
        self.tokens = tokens
        self.keys = keys  # chain keys of its full blocks, so that no child hashes them again
        self.num_computed = num_computed
        self.lease = lease
        self.progress = progress  # of a request that had not ended

    def __repr__(self) -> str:
        return f"State({self.id!r}, {self.num_tokens} tokens, {self.num_held} held)"

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_held(self) -> int:
        return self.lease.num_computed if self.lease is not None else 0

    @property
    def expires_at(self) -> float | None:
        """On the engine's clock; None without a limit, or without a hold."""
        return self.lease.expires_at if self.lease is not None and self.num_held else None

    @property
    def size_bytes(self) -> int:
        """Of the bookkeeping; KV not counted."""
        return len(self.tokens) * self.tokens.itemsize + len(self.keys) * _KEY_BYTES + _STATE_BYTES


@dataclass(slots=True)
class _Shelf:
    """One tenant's states, the least recently used first, and which of them had no KV when last looked at."""

    states: OrderedDict[str, State] = field(default_factory=OrderedDict)
    without_kv: OrderedDict[str, None] = field(default_factory=OrderedDict)
    size_bytes: int = 0

    def least_useful(self, newest: State) -> State | None:
        """The least recently used without KV of its own; if all have some, the least recently used of them. All are looked at
        only when none is known to be without, and then what is found is noted for the next times."""
        if (found := self._first_without_kv(newest)) is not None:
            return found
        self.without_kv = OrderedDict.fromkeys(key for key, state in self.states.items() if not state.num_held)
        return self._first_without_kv(newest) or next(
            (state for state in self.states.values() if state is not newest), None
        )

    def _first_without_kv(self, newest: State) -> State | None:
        for state_id in list(islice(self.without_kv, 8)):
            state = self.states[state_id]
            if state.num_held:
                del self.without_kv[state_id]  # held again
            elif state is not newest:
                return state
        return None


class StateLedger:
    """States by id. When there are too many, the tenant that has the most gives one up: its least recently used, those under
    a lease after all others. So a tenant with less than its share loses none to another.

    What was given up, failed or was aborted is remembered by id only, for a while, so that whoever asks for it hears why.
    """

    def __init__(self, max_states: int, max_bytes: int) -> None:
        self.max_states = max_states
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._states: dict[str, State] = {}
        self._shelves: dict[str, _Shelf] = {}  # by tenant
        self._gone: OrderedDict[str, tuple[str, StateError]] = OrderedDict()  # id -> its salt, what to say

    def __len__(self) -> int:
        return len(self._states)

    def all(self, salt: str) -> list[State]:
        """The states with a salt, the least recently used first."""
        shelf = self._shelves.get(Scope(salt).tenant)
        return [] if shelf is None else [state for state in shelf.states.values() if state.scope.salt == salt]

    def get(self, state_id: str) -> State | None:
        return self._states.get(state_id)

    def find(self, state_id: str, salt: str) -> State:
        """The state, which now counts as used, or an error that says why there is none. Another tenant's does not exist."""
        state = self._states.get(state_id)
        if state is not None and state.scope.salt == salt:
            shelf = self._shelves[state.scope.tenant]
            shelf.states.move_to_end(state_id)
            if state_id in shelf.without_kv:
                shelf.without_kv.move_to_end(state_id)
            return state
        owner, error = self._gone.get(state_id, ("", None))
        if state is None and error is not None and owner == salt:
            raise type(error)(*error.args)
        raise UnknownState(f"no state or request {state_id!r:.100} is known")

    def add(self, state: State) -> list[State]:
        """Enter a state under its id, in place of one that had it; the states that had to go, whose leases are the
        caller's to end."""
        given_up = []
        if (replaced := self.remove(state.id)) is not None:
            given_up.append(replaced)
        self._gone.pop(state.id, None)
        shelf = self._shelves.setdefault(state.scope.tenant, _Shelf())
        self._states[state.id] = shelf.states[state.id] = state
        if not state.num_held:
            shelf.without_kv[state.id] = None
        self.size_bytes += state.size_bytes
        shelf.size_bytes += state.size_bytes
        while len(self._states) > 1 and (len(self._states) > self.max_states or self.size_bytes > self.max_bytes):
            given_up.append(self._give_up(state))
        return given_up

    def remove(self, state_id: str) -> State | None:
        state = self._states.pop(state_id, None)
        if state is not None:
            shelf = self._shelves[state.scope.tenant]
            del shelf.states[state_id]
            shelf.without_kv.pop(state_id, None)
            shelf.size_bytes -= state.size_bytes
            if not shelf.states:
                del self._shelves[state.scope.tenant]
            self.size_bytes -= state.size_bytes
        return state

    def note_failure(self, state_id: str, scope: Scope, why: str) -> None:
        """A request ended without leaving a state."""
        if state_id not in self._states:
            self._remember(state_id, scope.salt, ParentFailed(f"{state_id!r} {why}, so there is nothing to continue"))

    def _give_up(self, newest: State) -> State:
        chosen = self._least_useful(newest)
        self.remove(chosen.id)
        limits = f"the last {self.max_states} states, {self.max_bytes / 2**20:.3g} MiB of tokens"
        self._remember(chosen.id, chosen.scope.salt, ForgottenState(f"{chosen.id!r} was forgotten: {limits} are kept"))
        return chosen

    def _least_useful(self, newest: State) -> State:
        """Of the tenant that has the most of what there is too much of. The newest state stays, whoever has it."""
        if len(self._states) > self.max_states:
            shelves = sorted(self._shelves.values(), key=lambda shelf: len(shelf.states), reverse=True)
        else:
            shelves = sorted(self._shelves.values(), key=lambda shelf: shelf.size_bytes, reverse=True)
        return next(found for shelf in shelves if (found := shelf.least_useful(newest)) is not None)

    def _remember(self, state_id: str, salt: str, error: StateError) -> None:
        self._gone.pop(state_id, None)
        self._gone[state_id] = (salt, error)
        while len(self._gone) > _REMEMBERED * self.max_states:
            self._gone.popitem(last=False)
