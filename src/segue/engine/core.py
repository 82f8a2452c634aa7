"""The engine: its loop, and everything that can be done with a state."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from segue.base.errors import ForgottenState, InvalidRequest, StateError, UnknownState
from segue.base.types import FinishReason
from segue.engine.beam import Catalogued
from segue.engine.desk import FILE_CHUNK, WIRE_CHUNK
from segue.engine.handoff import Export, Import
from segue.engine.loop import EngineLoop, new_request_id
from segue.engine.outputs import Delta
from segue.engine.request import At, as_hold, check_at, check_id, check_terms
from segue.engine.sequence import Hold, Sequence
from segue.engine.transfer import Outgoing
from segue.engine.turns import position
from segue.policies import Decision, Sums
from segue.state import Progress, Snapshot, State
from segue.state.store import SavedState
from segue.state.store import save as save_snapshot


class EngineCore(EngineLoop):
    """Serves requests, and lets their states be held, forked, saved and moved.

    Not thread-safe: one thread calls it. `AsyncEngine` gives it that thread. `model_fingerprint` keeps KV of different models
    apart in here; `state_identity`, by default the same, says which engines' states fit each other.
    """

    def state(self, state_id: str, *, salt: str = "") -> State:
        """A state by its id; an error says why there is none."""
        return self._desk.find(state_id, salt)

    def states(self, *, salt: str = "") -> list[State]:
        """What a tenant could continue, the least recently used first."""
        return self._desk.ledger.all(salt)

    def fork(
        self,
        parent: State | str,
        at: At = None,
        *,
        state_id: str | None = None,
        salt: str = "",
        hold: bool | float = True,
        value: float = 0.0,
    ) -> State:
        """A state of its own, with the parent's first `at` tokens and their KV by reference; of a request that runs, where
        it stands now."""
        check_at(at)
        check_terms(hold, value)
        check_id("state_id", state_id)
        chosen_id = new_state_id() if state_id is None else state_id
        if isinstance(parent, State):
            salt = parent.scope.salt  # a state object speaks for its own scope
        self._turns.check_free(chosen_id, salt)
        terms = as_hold(hold, value)
        sequence = self._turns.unfinished(parent, salt) if isinstance(parent, str) else None
        if sequence is None:
            state = self._desk.find(parent, salt)
            return self._desk.fork(state, position(at, state), chosen_id, terms)
        present = self._scheduler.fork(sequence, chosen_id, transient=True)
        try:
            return self._desk.fork(present, position(at, present), chosen_id, terms)
        finally:
            self._desk.release(present)

    def hold(
        self, state: State | str, seconds: float | None = None, *, value: float = 0.0, salt: str | None = None
    ) -> State:
        """Keep a state's KV, as far as it is still there, for so long; None: until it is released."""
        check_terms(True if seconds is None else seconds, value)
        found = self._find(state, salt)
        self._desk.hold(found, Hold(seconds, value))
        return found

    def release(self, state: State | str, *, salt: str | None = None) -> None:
        """Give up a hold; a second time does nothing. The state stays known, and its KV reusable while memory lasts."""
        with suppress(ForgottenState):  # it lost its hold when it was given up
            self._desk.release(self._find(state, salt))

    def set_lease_quota(self, tenant: str, num_blocks: int | None) -> None:
        """How many blocks one tenant may hold beyond its running requests; None: no limit. Applies to the next hold.

        The tenants named here have equal shares of what the longest request leaves of the pool: what a tenant holds within
        its share, only its own work can take back.
        """
        longest = self.kv.blocks_for(self.config.max_sequence_len)
        self.kv.leases.set_quota(tenant, num_blocks, spare=self.config.num_blocks - 1 - longest)

    def set_catalogue(self, name: str, catalogue: Catalogued | None) -> None:
        """Let searches name a catalogue; None: no longer. Those under way keep the one they began with."""
        check_id("catalogue", name)
        if catalogue is None:
            self._turns.catalogues.pop(name, None)
        elif isinstance(catalogue, Catalogued):
            self._turns.catalogues[name] = catalogue
        else:
            raise InvalidRequest("catalogue", f"must be a Catalogue, not {type(catalogue).__name__}")

    @property
    def catalogues(self) -> Mapping[str, Catalogued]:
        """By name."""
        return self._turns.catalogues

    def decisions(self, tenant: str | None = None, job_id: str | None = None) -> Iterator[Decision]:
        """What the policy decided at the ends of turns, the newest first; of one tenant's or one job's only, if asked."""
        return self._scheduler.jobs.decisions.of(tenant, job_id)

    def decision_sums(self) -> Mapping[str, Sums]:
        """By command."""
        return self._scheduler.jobs.decisions.sums

    def save(
        self, state: State | str, path: str | Path, *, salt: str | None = None, note: Mapping[str, Any] | None = None
    ) -> int:
        """Write a state, or a request as it stands, to a file; how many bytes. What KV is still there goes with it."""
        outgoing, done = self.begin_save(state, salt=salt, note=note)
        try:
            return save_snapshot(Path(path), outgoing.snapshot, outgoing.read)
        finally:
            done()

    def begin_save(
        self, state: State | str, *, salt: str | None = None, note: Mapping[str, Any] | None = None
    ) -> tuple[Outgoing, Callable[[], None]]:
        """A snapshot whose chunks can be read between steps, and what to call when they have been."""
        sequence = self._turns.unfinished(state, salt or "") if isinstance(state, str) else None
        if sequence is not None:
            _check_movable(sequence)
            found = self._scheduler.fork(sequence, sequence.state_id, transient=True)
            found.progress = self._progress(sequence)
            lease = found.lease
        else:
            found = self._find(state, salt)
            lease = self._desk.grasp(found, found.num_tokens, transient=True)
        outgoing = self._desk.send(found, lease, FILE_CHUNK, note)
        return outgoing, lambda: self.kv.leases.end(lease) if lease is not None else None

    def load(self, path: str | Path, **options: Any) -> State:
        """Bring a saved state back, with its KV; see `begin_load` for the options. A file that is damaged or does not fit
        changes nothing."""
        with SavedState.open(Path(path)) as saved:
            arrival = self.begin_load(saved.snapshot, **options)
            try:
                saved.take(arrival.write)
                return arrival.commit()
            except BaseException:
                arrival.abort()
                raise

    def begin_load(
        self,
        snapshot: Snapshot,
        *,
        state_id: str | None = None,
        salt: str = "",
        hold: bool | float = True,
        value: float = 0.0,
    ) -> Import[State]:
        """Make room for a state. It gets `state_id`, or its old id where that is free, or a new one."""
        self._require_open()
        check_terms(hold, value)
        check_id("state_id", state_id)
        if state_id is not None:
            self._turns.check_free(state_id, salt)
        chosen_id = state_id or self._turns.free_id(snapshot.id) or new_state_id()
        terms = as_hold(hold, value)

        def keep(state: State) -> State:
            self._require_open()
            self._scheduler.keep(state)
            if terms is None:
                self._desk.release(state)
            elif state.lease is not None:
                self.kv.leases.renew(state.lease, **self._desk.terms(terms))
            return state

        incoming = self._desk.receive(snapshot, self._turns.scope(salt, snapshot.adapter))
        return Import(incoming, chosen_id, keep, self._turns.reserve(chosen_id))

    def resume(
        self,
        state: State | str,
        *,
        request_id: str | None = None,
        salt: str | None = None,
        hold: bool | float = False,
        value: float = 0.0,
        consume: bool = False,
    ) -> str:
        """Let a request that was saved unfinished go on as if it had never stopped; its id. Its result has the whole
        answer, its deltas are those that were not seen yet."""
        self._require_open()
        check_terms(hold, value)
        check_id("request_id", request_id)
        found = self._find(state, salt)
        chosen_id = request_id or new_request_id()
        self._turns.check_free(chosen_id, found.scope.salt)
        return self._resume(found, chosen_id, as_hold(hold, value), consume=consume)

    def _resume(self, state: State, request_id: str, hold: Hold | None, *, consume: bool) -> str:
        turn = self._turns.resumed(state, request_id, hold, consume=consume)
        self._start(turn, state.progress)
        return request_id

    # To and from other engines

    def export_request(self, request_id: str, *, salt: str = "") -> Export:
        """Stop a request where it stands and offer it to another engine. It goes on here after `abort()`, and is gone
        from here after `commit()`."""
        sequence = self._turns.unfinished(request_id, salt)
        active = self._answers.get(request_id)
        if sequence is None or active is None:
            raise UnknownState(f"no request {request_id!r} is running")
        if active.export is not None:
            raise StateError(f"{request_id!r} is on its way to another engine already")
        _check_movable(sequence)
        progress = self._progress(sequence)
        state = self._scheduler.park(sequence)
        state.progress = progress
        outgoing = self._desk.send(state, state.lease, WIRE_CHUNK)
        active.export = Export(self, self._scheduler, sequence, state, outgoing)
        return active.export

    def missing(self, snapshot: Snapshot, *, salt: str = "") -> range:
        """Which chunks of a snapshot would have to be shipped here: the others are in memory."""
        return self._desk.missing(snapshot, self._turns.scope(salt, snapshot.adapter))

    def import_request(
        self,
        snapshot: Snapshot,
        *,
        request_id: str | None = None,
        salt: str = "",
        hold: bool | float = False,
        value: float = 0.0,
    ) -> Import[str]:
        """Make room for a request from another engine. Refused here, before any change, if it cannot run."""
        self._require_open()
        check_terms(hold, value)
        check_id("request_id", request_id)
        chosen_id = snapshot.id if request_id is None else request_id
        self._turns.check_free(chosen_id, salt)
        self._turns.checked_progress(snapshot.progress, snapshot.tokens)
        incoming = self._desk.receive(snapshot, self._turns.scope(salt, snapshot.adapter))
        terms = as_hold(hold, value)

        def run(state: State) -> str:
            self._require_open()
            return self._resume(state, chosen_id, terms, consume=True)

        return Import(incoming, chosen_id, run, self._turns.reserve(chosen_id))

    def end_export(self, export: Export, successor: Iterator[Delta] | None) -> None:
        """The other engine has the request: nothing is left of it here but its caller's stream."""
        active = self._answers.get(export.request_id)
        assert active is not None
        self._answers.retire(active)
        if successor is not None and export.request_id in self._mail:
            active.result.finished_at = None
            self._mail.pop(export.request_id).successor = successor
        else:
            delta = Delta(export.request_id, 0, (), "", (), FinishReason.MOVED)
            active.result.completions[0].add(delta)
            self._deliver([delta])
        self._tell_orphans()

    def withdraw_export(self, export: Export) -> None:
        active = self._answers.get(export.request_id)
        assert active is not None
        active.export = None

    def _progress(self, sequence: Sequence) -> Progress:
        """The limit that was in force here goes along, so that the answer ends where it would have."""
        params, active = sequence.turn.params, self._answers.get(sequence.turn.id)
        assert active is not None
        most = params.max_tokens if params.max_tokens is not None else sequence.limit - sequence.num_prompt
        done = active.result.completions[sequence.index].logprobs
        logprobs = tuple((entry.chosen, entry.rank, entry.top) for entry in done)
        return Progress(replace(params, n=1, max_tokens=most), sequence.sampling.seed, sequence.num_prompt, logprobs)

    def _find(self, state: State | str, salt: str | None) -> State:
        """By id in the caller's scope; a state object speaks for its own scope."""
        if salt is None:
            salt = state.scope.salt if isinstance(state, State) else ""
        return self._desk.find(state, salt)


def _check_movable(sequence: Sequence) -> None:
    if sequence.turn.search is not None:
        raise StateError(f"{sequence.turn.id!r} searches, or is about to: it can be moved or saved when it has ended")


def new_state_id() -> str:
    """An id that no other state has."""
    return f"state-{secrets.token_hex(8)}"
