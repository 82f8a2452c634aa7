"""Disk and network in virtual time: blocks arrive when a link of so many bytes a second has brought them."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Any

from segue.base.clock import VirtualClock
from segue.base.errors import InvalidRequest, TierError
from segue.engine.executor import Executor
from segue.engine.tiering import OpenSlow
from segue.kv.tiers import Courier
from segue.kv.tiers.courier import Look, Task
from segue.kv.tiers.names import TENANT_BYTES
from segue.kv.tiers.replacement import Replacement
from segue.kv.tiers.specs import DiskSpec, RemoteSpec


@dataclass(frozen=True, slots=True)
class Link:
    bytes_per_second: float
    latency_seconds: float

    def __post_init__(self) -> None:
        if self.bytes_per_second <= 0 or self.latency_seconds < 0:
            raise InvalidRequest("link", "must move bytes, and not before they are sent")


DISK = Link(3e9, 1e-4)  # a current NVMe drive's sustained writes
NETWORK = Link(3.1e9, 2e-4)  # 25 Gbit/s


class RememberedTier:
    """Which blocks are there, and nothing in them."""

    most_at_once = 1

    def __init__(self, kind: str, num_bytes: int | None, *, is_shared: bool = False) -> None:
        self.kind = kind
        self.num_bytes = num_bytes
        self.is_shared = is_shared
        self._order = Replacement(num_bytes if num_bytes is not None else 1 << 62)

    def __len__(self) -> int:
        return len(self._order)

    @property
    def size_bytes(self) -> int:
        return self._order.size

    def find(self, names: list[bytes]) -> list[bool]:
        return [name in self._order for name in names]

    def look(self, names: list[bytes]) -> None:
        """All is known here."""

    def store_all(self, blocks: list[tuple[bytes, memoryview]]) -> None:
        for name, block in blocks:
            if name in self._order or (self.num_bytes is not None and len(block) > self.num_bytes):
                continue
            while self.num_bytes is not None and self._order.size + len(block) > self.num_bytes:
                gone = self._order.evict(lambda _: True)
                if gone is None:
                    return
            self._order.add(name, len(block))

    def load_all(self, blocks: list[tuple[bytes, memoryview]]) -> list[bool | TierError]:
        found: list[bool | TierError] = []
        for name, _ in blocks:
            found.append(name in self._order)
            if found[-1]:
                self._order.use(name)
        return found

    def drop(self, tenant: bytes | None = None) -> int:
        names = [name for name in self._order if tenant is None or name[:TENANT_BYTES] == tenant]
        for name in names:
            self._order.remove(name)
        return len(names)

    def verify(self) -> tuple[int, int]:
        return len(self), 0


class SimulatedCourier(Courier):
    """No threads: what was asked for is carried out when it is due. One thing at a time each way."""

    def __init__(self, tier: RememberedTier, link: Link, clock: VirtualClock) -> None:
        super().__init__(tier, num_threads=0)
        self._link = link
        self._clock = clock
        self._due: list[tuple[float, int, Task | Look]] = []
        self._free_at = {True: 0.0, False: 0.0}  # the link, for stores and for loads
        self._count = 0

    def _enqueue(self, queue: deque[Any], task: Task | Look) -> None:
        now, link = self._clock.now(), self._link
        if isinstance(task, Look):
            at = now + link.latency_seconds
        else:
            at = max(now, self._free_at[task.is_store]) + len(task.buffer) / link.bytes_per_second
            self._free_at[task.is_store] = at
            at += link.latency_seconds
            if task.is_store:
                queue.append(task)  # what waits is counted
        self._count += 1
        heapq.heappush(self._due, (at, self._count, task))

    def finished(self) -> list[Task]:
        done, now = [], self._clock.now()
        while self._due and self._due[0][0] <= now:
            _, _, task = heapq.heappop(self._due)
            if isinstance(task, Look):
                task.is_over = True
                continue
            blocks, seconds = [(task.name, task.buffer)], len(task.buffer) / self._link.bytes_per_second
            if task.is_store:
                self._stores.remove(task)
                self.tier.store_all(blocks)
                task.ok = True
            else:
                task.ok = self.tier.load_all(blocks)[0] is True
                self.counts.missed += not task.ok
            self._count_moved(task, seconds)
            done.append(task)
        return done

    def _count_moved(self, task: Task, seconds: float) -> None:
        if task.ok:
            self._count_bytes(task.is_store, [len(task.buffer)], seconds)

    @property
    def has_work(self) -> bool:
        return bool(self._due)

    def wait(self, seconds: float) -> None:
        """Time goes on to what is due next, at most so far."""
        if self._due:
            seconds = min(max(self._due[0][0] - self._clock.now(), 0.0), seconds)
        self._clock.advance(seconds)

    def drop(self, tenant: bytes | None) -> int:
        return self.tier.drop(tenant)

    def close(self, seconds: float) -> None:
        self._due.clear()


def simulated(clock: VirtualClock, disk: Link = DISK, network: Link = NETWORK) -> OpenSlow:
    """Opens the tiers that an engine is asked for, as links."""

    def open_slow(spec: DiskSpec | RemoteSpec, executor: Executor) -> Courier:
        if spec.compressed:
            executor.codec()
        if isinstance(spec, DiskSpec):
            return SimulatedCourier(RememberedTier("disk", spec.num_bytes), disk, clock)
        return SimulatedCourier(RememberedTier("remote", None, is_shared=True), network, clock)

    return open_slow
