"""A tier that takes its time, in threads of its own: blocks go out and come in while the engine steps.

It never holds anybody up. Stores wait in a bounded queue, and what does not fit is not stored; a load that fails, or takes too
long, is a miss. A tier that fails again and again is left alone for a while, longer each time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from segue.base.errors import TierError
from segue.kv.tiers.names import TENANT_BYTES

_log = logging.getLogger(__name__)
_MOST_FAILURES = 3  # in a row
_SHORTEST_BREAK, _LONGEST_BREAK = 1.0, 60.0  # seconds
_FADE = 0.2
_MOST_SLOWER = 8.0  # that one copy counts: the machine may have done something else meanwhile
_COLD_BLOCKS = 4  # or calls that move several
_NUM_THREADS = 2  # one waits for a file's folder or a reply while the other moves bytes
_REST = 3.0  # while the engine steps: so many times what a block took, so that a core is not lost to it


class SlowTier(Protocol):
    """What a courier needs of a tier. `find` and the sizes only look at what this process knows; `store_all`, `load_all` and
    `look` may run in several threads at once, the others alone. A method may raise OSError, and must end within a bounded time.
    """

    kind: str
    most_at_once: int  # blocks that are sooner there together than one by one
    is_shared: bool  # others store there too, and only `look` tells what; `find` knows it from then on
    num_bytes: int | None  # at most; None: as much as there is room for

    def __len__(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    def find(self, names: list[bytes]) -> list[bool]: ...
    def look(self, names: list[bytes]) -> None: ...
    def store_all(self, blocks: list[tuple[bytes, memoryview]]) -> None: ...
    def load_all(self, blocks: list[tuple[bytes, memoryview]]) -> list[bool | TierError]: ...
    def drop(self, tenant: bytes | None = None) -> int: ...
    def verify(self) -> tuple[int, int]: ...


@dataclass(slots=True)
class Counts:
    """Since the start, in blocks and bytes."""

    stored: int = 0
    stored_bytes: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    prefetched: int = 0  # of those asked for: before anybody needed them
    missed: int = 0
    skipped: int = 0  # not stored: too much was waiting, or the tier was left alone
    errors: int = 0
    damaged: int = 0
    breaks: int = 0  # how often it was left alone


@dataclass(slots=True)
class Speed:
    """Bytes a second, of late; 0 until there is something to go by. The first blocks do not count: they wake what is asleep."""

    _bytes: float = 0.0  # both faded alike, so that what moved much counts for more
    _seconds: float = 0.0
    _num_noted: int = 0

    @property
    def bytes_per_second(self) -> float:
        return self._bytes / self._seconds if self._seconds else 0.0

    def note(self, num_bytes: int, seconds: float) -> None:
        self._num_noted += 1
        if self._bytes:
            seconds = min(seconds, _MOST_SLOWER * self.seconds_for(num_bytes))
        if seconds > 0 and self._num_noted > _COLD_BLOCKS:
            self._bytes += num_bytes - self._bytes * _FADE
            self._seconds += seconds - self._seconds * _FADE

    def seconds_for(self, num_bytes: int) -> float:
        return num_bytes * self._seconds / self._bytes if self._bytes else 0.0


@dataclass(slots=True)
class Breaker:
    """Whether to try: no longer after some failures in a row, again after a while."""

    failures: int = 0
    pause: float = _SHORTEST_BREAK
    until: float = field(default=0.0)

    @property
    def is_open(self) -> bool:
        return time.monotonic() < self.until

    def succeeded(self) -> None:
        self.failures, self.pause = 0, _SHORTEST_BREAK

    def failed(self) -> bool:
        """Whether this one was too many."""
        self.failures += 1
        if self.failures < _MOST_FAILURES:
            return False
        self.until = time.monotonic() + self.pause
        self.pause = min(self.pause * 2, _LONGEST_BREAK)
        return True


def give_way() -> None:
    """This thread runs when a core has nothing else to do: else a step waits for the part of it that has no core."""
    with contextlib.suppress(AttributeError, OSError):  # where there is no such thing
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


@dataclass(slots=True)
class Task:
    """A block on its way. `buffer` is read or filled until `done`; then `ok` says how it went."""

    name: bytes
    buffer: memoryview
    is_store: bool
    ok: bool = False


@dataclass(slots=True)
class Look:
    """Names that are being looked for. When it `is_over`, `find` knows."""

    names: list[bytes]
    is_over: bool = False


class Courier:
    def __init__(self, tier: SlowTier, most_stores: int = 256, num_threads: int = _NUM_THREADS) -> None:
        self.tier = tier
        self.counts = Counts()
        self.store_speed, self.load_speed = Speed(), Speed()
        self.breaker = Breaker()
        self._engine_is_busy = False
        self._most_stores = most_stores
        self._stores: deque[Task] = deque()
        self._loads: deque[Task] = deque()
        self._looks: deque[Look] = deque()
        self._verbs: deque[Callable[[], None]] = deque()
        self._done: deque[Task] = deque()
        self._wake = threading.Condition()
        self.arrived = threading.Event()  # something was carried out; couriers may share it
        self._num_working = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=[number], name=f"segue-{tier.kind}-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    # For the engine's thread

    def find(self, names: list[bytes]) -> list[bool]:
        return [False] * len(names) if self.breaker.is_open else self.tier.find(names)

    def store(self, name: bytes, block: memoryview) -> bool:
        """Whether it is on its way; then `block` must not change until `finished` gives it back."""
        if len(self._stores) >= self._most_stores or self.breaker.is_open:
            self.counts.skipped += 1
            return False
        self._enqueue(self._stores, Task(name, block, True))
        return True

    def load(self, name: bytes, out: memoryview) -> None:
        self._enqueue(self._loads, Task(name, out, False))

    def look(self, names: list[bytes]) -> Look:
        """Ask a tier that is shared."""
        look = Look(names, is_over=self.breaker.is_open)
        if not look.is_over:
            self._enqueue(self._looks, look)
        return look

    def set_busy(self, engine_is_busy: bool) -> None:
        """While the engine steps, one thread loads, and the other stores, gives way to all others and rests between blocks."""
        if engine_is_busy != self._engine_is_busy:
            with self._wake:
                self._engine_is_busy = engine_is_busy
                self._wake.notify_all()

    def finished(self) -> list[Task]:
        """What has been carried out since the last call."""
        self.arrived.clear()
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    @property
    def has_work(self) -> bool:
        with self._wake:
            return bool(self._stores or self._loads or self._verbs or self._num_working or self._done)

    def wait(self, seconds: float) -> None:
        """Until something has been carried out, and at most so long."""
        self.arrived.wait(seconds)

    def ask(self, verb: Callable[[], object]) -> object:
        """Run `verb` in one of the tier's threads while the others rest, and wait for it."""
        outcome: list[object] = []
        ended = threading.Event()

        def run() -> None:
            try:
                outcome.append(verb())
            except Exception as error:
                outcome.append(error)
            ended.set()

        with self._wake:
            if self._closed:
                raise TierError(f"the {self.tier.kind} tier is closed")
            self._verbs.append(run)
            self._wake.notify_all()
        ended.wait()
        if isinstance(outcome[0], OSError):
            raise TierError(f"{self.tier.kind}: {outcome[0]}") from outcome[0]
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    def drop(self, tenant: bytes | None) -> int:
        """Delete everything, or all of one tenant, with what is on its way there."""
        with self._wake:
            waiting = [task for task in self._stores if tenant in (None, task.name[:TENANT_BYTES])]
            for task in waiting:
                self._stores.remove(task)
            self._done.extend(waiting)
        return int(str(self.ask(lambda: self.tier.drop(tenant))))

    def info(self) -> dict[str, Any]:
        counts = self.counts
        return {
            "tier": self.tier.kind,
            "blocks": len(self.tier),
            "bytes": self.tier.size_bytes,
            "capacity_bytes": self.tier.num_bytes,
            "stored_blocks": counts.stored,
            "loaded_blocks": counts.loaded,
            "prefetched_blocks": counts.prefetched,
            "missed_blocks": counts.missed,
            "skipped_blocks": counts.skipped,
            "damaged_blocks": counts.damaged,
            "errors": counts.errors,
            "breaks": counts.breaks,
            "is_out": self.breaker.is_open,
            "store_bytes_per_second": self.store_speed.bytes_per_second,
            "load_bytes_per_second": self.load_speed.bytes_per_second,
        }

    def close(self, seconds: float) -> None:
        """Let the stores that wait be carried out, for at most so long."""
        deadline = time.monotonic() + seconds
        self.set_busy(False)
        while self.has_work and time.monotonic() < deadline and not self.breaker.is_open:
            self.finished()
            self.wait(0.01)
        with self._wake:
            self._closed = True
            self._stores.clear()
            self._loads.clear()
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0) + 1.0)

    def _enqueue(self, queue: deque[Any], task: Task | Look) -> None:
        with self._wake:
            queue.append(task)
            self._wake.notify_all()

    # In the tier's own threads

    def _run(self, number: int) -> None:
        if number == 0:
            give_way()
        while (work := self._next(number)) is not None:
            began = time.monotonic()
            if isinstance(work, list):
                self._carry_out(work)
                self._done.extend(work)
            elif isinstance(work, Look):
                self._look(work)
            else:
                work()
            self.arrived.set()
            took = time.monotonic() - began
            with self._wake:
                self._num_working -= 1
                if self._verbs:
                    self._wake.notify_all()
            if isinstance(work, list) and work[0].is_store and self._engine_is_busy:
                time.sleep(min(took * _REST, 0.25))

    def _next(self, number: int) -> list[Task] | Look | Callable[[], None] | None:
        """What this thread is to do; None when all is over."""
        with self._wake:
            while True:
                if self._verbs:
                    if not self._num_working:
                        self._num_working += 1
                        return self._verbs.popleft()
                elif self._closed:
                    return None
                else:
                    if self._looks:
                        self._num_working += 1
                        return self._looks.popleft()
                    queue = self._loads or self._stores
                    if self._engine_is_busy:
                        queue = self._loads if number else self._stores
                    if queue:
                        self._num_working += 1
                        return [queue.popleft() for _ in range(min(len(queue), self.tier.most_at_once))]
                self._wake.wait()

    def _look(self, look: Look) -> None:
        try:
            if not self.breaker.is_open:
                self.tier.look(look.names)
                self.breaker.succeeded()
        except Exception as error:
            self._failed(error)
        look.is_over = True

    def _carry_out(self, tasks: list[Task]) -> None:
        """All stores, or all loads."""
        counts, is_store = self.counts, tasks[0].is_store
        if self.breaker.is_open:
            if is_store:
                counts.skipped += len(tasks)
            else:
                counts.missed += len(tasks)
            return
        began = time.monotonic()
        blocks = [(task.name, task.buffer) for task in tasks]
        try:
            outcomes = [True] * len(tasks) if is_store else self.tier.load_all(blocks)
            if is_store:
                self.tier.store_all(blocks)
        except Exception as error:
            self._failed(error)
            return
        self.breaker.succeeded()
        for task, outcome in zip(tasks, outcomes, strict=True):
            task.ok = outcome is True
            if isinstance(outcome, TierError):  # it works, but this block is no good
                counts.damaged += 1
                _log.warning("%s: %s", self.tier.kind, outcome)
        self._count_bytes(is_store, [len(task.buffer) for task in tasks if task.ok], time.monotonic() - began)
        counts.missed += outcomes.count(False)

    def _count_bytes(self, is_store: bool, sizes: list[int], seconds: float) -> None:
        counts = self.counts
        if is_store:
            counts.stored += len(sizes)
            counts.stored_bytes += sum(sizes)
        else:
            counts.loaded += len(sizes)
            counts.loaded_bytes += sum(sizes)
        if sizes:
            (self.store_speed if is_store else self.load_speed).note(sum(sizes), seconds)

    def _failed(self, error: Exception) -> None:
        self.counts.errors += 1
        if self.breaker.failed():
            self.counts.breaks += 1
            _log.warning("the %s tier is left alone for %.0f s: %s", self.tier.kind, self.breaker.pause / 2, error)
