"""Everything an engine can do with a state between two steps: find, fork, hold, release, send out, take in."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from hashlib import blake2b
from math import inf
from typing import Any

from segue.base.clock import Clock
from segue.base.config import EngineConfig
from segue.base.errors import InvalidRequest, NoRoom, RequestTooLong, SnapshotError
from segue.base.types import Scope
from segue.engine.executor import Executor
from segue.engine.scheduler import Scheduler
from segue.engine.sequence import Hold
from segue.engine.transfer import Incoming, Outgoing
from segue.kv import KVManager, Lease, Match
from segue.state import Snapshot, State, StateLedger

FILE_CHUNK = 2**22  # bytes: large enough that two threads seldom meet between chunks
WIRE_CHUNK = 2**20  # small enough to stay in a core's cache, and to be on its way while the next is copied
_ANY_TOKEN = array("i", [0])


class StateDesk:
    """Works on memory and the ledger only; requests are the engine's own business."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, clock: Clock, *, identity: str, vocab_size: int | None
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._identity = identity
        self._vocab_size = vocab_size

    @property
    def _kv(self) -> KVManager:
        return self._scheduler.kv

    @property
    def _config(self) -> EngineConfig:
        return self._scheduler.config

    @property
    def ledger(self) -> StateLedger:
        return self._scheduler.states

    def find(self, state: State | str, salt: str) -> State:
        """By id, or the very object; an error says why there is none."""
        known = self.ledger.find(state if isinstance(state, str) else state.id, salt)
        if known is not state and not isinstance(state, str):
            raise InvalidRequest("state", f"{state!r} is not a state of this engine, or another has its id by now")
        return known

    # Hold, release, fork

    def terms(self, hold: Hold) -> dict[str, Any]:
        expires_at = None if hold.seconds is None else self._clock.now() + hold.seconds
        return {"expires_at": expires_at, "value": hold.value}

    def hold(self, state: State, hold: Hold) -> None:
        """Keep what KV there is from now on, on these terms: what its lease has, or what the prefix cache still has."""
        lease, terms = state.lease, self.terms(hold)
        is_pinned = lease is not None and self._scheduler.jobs.is_pin(
            lease
        )  # then the policy would end it when it sees fit
        is_whole = lease is not None and (lease.num_heirs or state.num_held == state.num_computed)
        if lease is not None and state.num_held and is_whole and not is_pinned:
            self._kv.leases.renew(lease, **terms)
            return
        state.lease = self.grasp(state, state.num_tokens, job=state.job, **terms)
        if lease is not None and not (is_pinned and lease.num_heirs):
            self._kv.leases.end(lease)

    def release(self, state: State) -> None:
        """The state stays known; its KV may be reused."""
        if state.lease is not None:
            self._kv.leases.end(state.lease)

    def drop(self, state_id: str) -> None:
        """The state with this id, if there is one, is known no longer and holds nothing."""
        state = self.ledger.remove(state_id)
        if state is not None:
            self.release(state)

    def fork(self, state: State, at: int, state_id: str, hold: Hold | None) -> State:
        lease = None if hold is None else self.grasp(state, at, job=state.job, **self.terms(hold))
        tokens, keys = state.tokens, state.keys  # neither ever changes
        if at < state.num_tokens:
            tokens, keys = tokens[:at], keys[: at // self._kv.block_size]
        child = State(state_id, state.scope, tokens, keys, min(at, state.num_computed), job=state.job, lease=lease)
        return self._scheduler.keep(child)

    def grasp(self, state: State, num_tokens: int, **terms: Any) -> Lease | None:
        """A new lease on as much KV as can be had for the state's first `num_tokens` tokens."""
        held = min(state.num_held, num_tokens)
        if held < min(num_tokens, state.num_computed) or not state.num_computed:
            found = self._cached(state, num_tokens)
            if found.num_tokens > held:
                blocks = array("i", found.blocks)
                blocks.extend(() if found.tail_block is None else (found.tail_block,))
                return self._kv.leases.grant(state.scope, blocks, found.num_tokens, indexed=True, **terms)
        if state.lease is None or not held:
            return None
        return self._kv.share(state.lease, held, **terms)

    def _cached(self, state: State, num_tokens: int) -> Match:
        """What the prefix cache has of a state; a match always leaves one token, so one is added to be left."""
        tokens = state.tokens[:num_tokens] + _ANY_TOKEN
        table = self._kv.open(tokens, state.scope, state.keys[: num_tokens // self._kv.block_size])
        match = self._kv.match(table, tokens)
        self._kv.close(table)
        return match

    # Out and in

    def send(
        self, state: State, lease: Lease | None, chunk_bytes: int, note: Mapping[str, Any] | None = None
    ) -> Outgoing:
        """A state as a snapshot, and its KV to be read chunk by chunk while `lease` lasts.

        A chunk is as many whole blocks as fit in `chunk_bytes`, and at least one.
        """
        layout, size = self._executor.kv_layout, self._kv.block_size
        snapshot = Snapshot(
            state.id,
            self._identity,
            layout,
            state.tokens,
            lease.num_computed if lease is not None else 0,
            max(chunk_bytes // (layout.token_bytes * size), 1) * size,
            time.time(),
            scope_digest(state.scope.salt),
            state.scope.adapter,
            state.job,
            state.progress,
            note or {},
        )
        return Outgoing(self._executor, snapshot, lease)

    def missing(self, snapshot: Snapshot, scope: Scope) -> range:
        """The chunks of a snapshot whose KV is not here already."""
        return range(self._in_memory(snapshot, scope).num_tokens // snapshot.chunk_tokens, snapshot.num_chunks)

    def receive(self, snapshot: Snapshot, scope: Scope) -> Incoming:
        """Pay for a snapshot's blocks, less those that are here. `NoRoom`, and no change, where they cannot be had."""
        self._check(snapshot, scope)
        kv, now = self._kv, self._clock.now()
        table = kv.open(snapshot.tokens, scope)
        match = self._in_memory(snapshot, scope)
        if kv.admit(table, match, snapshot.num_computed, now=now) is None:
            kv.close(table)
            needed = kv.blocks_for(snapshot.num_computed) - len(match.blocks)
            raise NoRoom(f"{needed} blocks are needed for {snapshot.num_computed} tokens of KV, and cannot be had now")
        lease = None
        if table.blocks:
            lease = kv.hold(table, snapshot.num_computed, job=snapshot.job, value=inf, transient=True)
            lease.indexed = False  # not before everything is in it
        kv.close(table)
        return Incoming(self._executor, kv, snapshot, scope, table.keys, lease, match.num_tokens)

    def _in_memory(self, snapshot: Snapshot, scope: Scope) -> Match:
        """Full blocks only: a payload always ends on the sender's boundaries, not on ours."""
        tokens = snapshot.tokens[: snapshot.num_computed] + _ANY_TOKEN
        table = self._kv.open(tokens, scope)
        match = self._kv.match(table, tokens)
        self._kv.close(table)
        return Match(match.blocks, None, 0, len(match.blocks) * self._kv.block_size)

    def _check(self, snapshot: Snapshot, scope: Scope) -> None:
        layout = self._executor.kv_layout
        if snapshot.model != self._identity:
            raise SnapshotError(f"it belongs to model {snapshot.model!r}, and this engine runs {self._identity!r}")
        if snapshot.layout != layout:
            raise SnapshotError(f"its KV is {snapshot.layout}, and this engine's {layout}")
        if snapshot.scope != scope_digest(scope.salt):
            raise SnapshotError("it belongs to another scope: give the salt that it was made with")
        if snapshot.adapter != scope.adapter:
            raise SnapshotError(
                f"it was computed with adapter {snapshot.adapter!r}, and {scope.adapter!r} is asked for"
            )
        if len(snapshot.tokens) > self._config.max_sequence_len:
            raise RequestTooLong(
                "state", f"{len(snapshot.tokens)} tokens are over the limit of {self._config.max_sequence_len} here"
            )
        vocab_size = self._vocab_size
        if vocab_size is not None and (min(snapshot.tokens) < 0 or max(snapshot.tokens) >= vocab_size):
            raise SnapshotError(f"it has token ids outside the vocabulary of {vocab_size}")


def scope_digest(salt: str) -> str:
    """Names a tenant's scope outside the engine without giving the salt away; empty for none."""
    return blake2b(salt.encode(), digest_size=16, person=b"segue scope").hexdigest() if salt else ""
