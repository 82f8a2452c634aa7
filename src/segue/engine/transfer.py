"""KV on its way out of an engine and into one, a chunk at a time, between steps."""

from __future__ import annotations

from segue.base.errors import StateError
from segue.base.types import Scope
from segue.engine.executor import Executor
from segue.kv import KVManager, Lease
from segue.state import Snapshot, State


class Outgoing:
    """A snapshot, and its KV as long as the lease it is read under has not shrunk."""

    def __init__(self, executor: Executor, snapshot: Snapshot, lease: Lease | None) -> None:
        self.snapshot = snapshot
        self._executor = executor
        self._lease = lease

    def read(self, index: int, out: memoryview) -> None:
        """Copy chunk `index` into `out`. `StateError` if its KV had to give way meanwhile."""
        start, stop = self.snapshot.chunk(index)
        if self._lease is None or self._lease.num_computed < stop:
            raise StateError(f"the KV of tokens {start} to {stop} had to give way to other work before it was read")
        self._executor.read_kv(self._lease.blocks, start, stop, out)


class Incoming:
    """Blocks that are paid for and being filled.

    They are under a lease that nobody can continue from yet and that may shrink like any other: what is lost, or never
    comes, is computed again. Chunks may come in any order; those of `missing` are enough.

        tokens   |0 --- here already ---|-- chunk --|-- chunk --|- … -| num_computed -- to compute --|
    """

    def __init__(
        self,
        executor: Executor,
        kv: KVManager,
        snapshot: Snapshot,
        scope: Scope,
        keys: list[int],
        lease: Lease | None,
        num_present: int,
    ) -> None:
        self.snapshot = snapshot
        self.missing = range(num_present // snapshot.chunk_tokens, snapshot.num_chunks)
        self._executor = executor
        self._kv = kv
        self._scope = scope
        self._keys = keys
        self._lease = lease
        self._num_present = num_present
        self._received: set[int] = set()

    def write(self, index: int, data: memoryview) -> None:
        """Take in one chunk's bytes. What is here already, or has given way meanwhile, is skipped."""
        start, stop = self.snapshot.chunk(index)
        if len(data) != self.snapshot.chunk_bytes(index):
            raise StateError(f"chunk {index} has {len(data)} bytes instead of {self.snapshot.chunk_bytes(index)}")
        first = max(start, self._num_present)
        last = min(stop, self._lease.num_computed) if self._lease is not None else 0
        if self._lease is not None and first < last:
            self._executor.write_kv(self._lease.blocks, start, stop, data, first, last)
        self._received.add(index)

    def finish(self, state_id: str) -> State:
        """A state with all the KV up to the first chunk that did not come; others can find it in the prefix cache."""
        snapshot, lease = self.snapshot, self._lease
        if lease is not None:
            self._kv.leases.trim(lease, self._num_complete())
            self._kv.publish(lease, snapshot.tokens, self._keys)
        return State(
            state_id,
            self._scope,
            snapshot.tokens,
            self._keys,
            snapshot.num_computed,
            job=snapshot.job,
            lease=lease,
            progress=snapshot.progress,
        )

    def abort(self) -> None:
        """Give the blocks back; a second time, or after `finish`, does nothing worth the name."""
        if self._lease is not None:
            self._kv.leases.end(self._lease)

    def _num_complete(self) -> int:
        for index in self.missing:
            if index not in self._received:
                return max(self.snapshot.chunk(index)[0], self._num_present)
        return self.snapshot.num_computed
