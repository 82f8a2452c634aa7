"""KV between the engine's blocks and the other tiers: what goes out, what comes back, and whether that is worth it.

    device blocks  ◀── engine's thread, between steps ──▶  host slots  ◀── a thread for each tier ──▶  disk, remote

Only the engine's thread touches blocks, so no plan can meet one that is half written: a sequence whose prefix is being loaded
takes no part in steps, and its blocks are found by nobody before they are complete. A block that is about to be reused is
copied out first, unless a tier has it; so nothing is copied that memory would have kept anyhow. What must outlive the
process is copied at the end of each turn besides, when there is time.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from segue.base.clock import Clock
from segue.base.errors import InvalidRequest
from segue.engine.executor import Executor
from segue.engine.offers import NO_OFFER, Asked, Load, Offer, worth_loading
from segue.engine.sequence import Sequence
from segue.kv import BlockTable, KVManager
from segue.kv.tiers import (
    BlockNames,
    CompressedTier,
    Courier,
    DiskTier,
    HostTier,
    RemoteTier,
    SlowTier,
    tenant_tag,
)
from segue.kv.tiers.courier import Speed
from segue.kv.tiers.specs import DiskSpec, RemoteSpec, parse_tiers

OpenSlow = Callable[[DiskSpec | RemoteSpec, Executor], Courier]
_LOAD_SHARE, _SAVE_SHARE = (
    0.1,
    0.05,
)  # of a step's time that copies may take before the next one: somebody waits for a load
_IDLE_SECONDS = 0.02  # of copies at a time when nothing runs: requests may come
_AT_ONCE = 64  # blocks in one copy, at most: how long it takes is only known before it begins
_PARTS = 4  # of what can be copied out: memory that is new to the system takes many times as long
_AHEAD = 32  # blocks that are on their way from a slow tier at once
_TRY_EVERY = 16  # decisions to compute after which loading is tried all the same
_MOST_SECONDS = 10.0  # without a block from a slow tier, then the rest is computed
_MOST_LOOKING = 0.5  # seconds that a sequence waits for a tier to say what it has
_CLOSE_SECONDS = 10.0
_STAGING_BYTES = 64 << 20  # of host memory on the way to and from the others, if it is no tier of its own
_MOST_WAITING = 1 << 16  # blocks to be copied out


class TierDesk:
    def __init__(
        self,
        kv: KVManager,
        executor: Executor,
        host: HostTier,
        couriers: list[Courier],
        names: BlockNames,
        clock: Clock,
        *,
        is_tier: bool,
    ) -> None:
        """`is_tier`: the host's memory was asked for, and is not only on the way to the others."""
        self._kv = kv
        self._executor = executor
        self._host = host
        self._host_is_tier = is_tier
        self._couriers = couriers
        self._names = names
        self._clock = clock
        self._loads: dict[Sequence, Load] = {}
        self._asked: dict[Sequence, Asked] = {}
        self._to_save: deque[tuple[int, bytes]] = deque()
        self._arrived = threading.Event()
        for courier in couriers:
            courier.arrived = self._arrived
        self._in, self._out = Speed(), Speed()
        self.num_loaded = 0  # blocks, by where they were
        self.num_saved = 0
        self.num_skipped = 0
        self._num_chosen = [{"load": 0, "compute": 0} for _ in range(1 + len(couriers))]  # sequences, by where most was
        self._num_looked = [0] * (1 + len(couriers))  # blocks, in the host and each slow tier
        self._num_found = [0] * (1 + len(couriers))
        self._num_computed = 0  # in a row, since loading seemed slower
        kv.name_blocks(self._names, self.save)

    # What is to be had

    @property
    def is_shared(self) -> bool:
        """Whether others store in one of the tiers too."""
        return any(courier.tier.is_shared for courier in self._couriers)

    def offer(self, table: BlockTable, tokens: array[int], num_found: int, seconds_per_token: float) -> Offer:
        """What tiers have beyond the first `num_found` blocks, and how much of it is to be loaded: what comes sooner than it is
        computed."""
        most = (len(tokens) - 1) // self._kv.block_size
        if most <= num_found:
            return NO_OFFER
        costs, found = self._costs(self._kv.names(table, tokens, most)[num_found:])
        count = len(costs)
        if self._num_computed < _TRY_EVERY:  # else it may be faster by now, which only trying shows
            count = worth_loading(costs, seconds_per_token * self._kv.block_size)
        return Offer(len(costs), count, most - num_found, found)

    def ask(self, sequence: Sequence, table: BlockTable, num_found: int) -> bool:
        """Whether a tier has to be asked what it has beyond the first `num_found` blocks. Once for a sequence, and
        `take_answered` gives it back."""
        shared = [courier for courier in self._couriers if courier.tier.is_shared and not courier.breaker.is_open]
        most = (len(sequence.tokens) - 1) // self._kv.block_size
        if sequence.has_asked or not shared or most <= num_found:
            return False
        sequence.has_asked = True
        names = self._kv.names(table, sequence.tokens, most)[num_found:]
        have = [courier.find(names) for courier in self._couriers]
        unknown = [name for name, *has in zip(names, *have, strict=True) if name not in self._host and not any(has)]
        if unknown:
            looks = [courier.look(unknown) for courier in shared]
            self._asked[sequence] = Asked(looks, self._clock.now() + _MOST_LOOKING)
        return bool(unknown)

    def take_answered(self) -> list[Sequence]:
        now = self._clock.now()
        answered = [
            sequence
            for sequence, asked in self._asked.items()
            if now > asked.until or all(look.is_over for look in asked.looks)
        ]
        for sequence in answered:
            del self._asked[sequence]
        return answered

    def chose(self, offer: Offer) -> None:
        """A sequence got its blocks, and goes on so."""
        left = offer.num_looked
        for at, num_found in enumerate(offer.found):
            self._num_looked[at] += left
            self._num_found[at] += num_found
            left -= num_found
        if offer.num_there:
            most = max(range(len(offer.found)), key=offer.found.__getitem__)
            self._num_chosen[most]["load" if offer.num_wanted else "compute"] += 1
            self._num_computed = 0 if offer.num_wanted else self._num_computed + 1

    def _costs(self, names: list[bytes]) -> tuple[list[float], tuple[int, ...]]:
        """Seconds for each block, up to the first that no tier has; and how many each tier has of them, the host first."""
        size = self._names.block_bytes
        here = self._in.seconds_for(size)
        seconds = [here, *(here + courier.load_speed.seconds_for(size) for courier in self._couriers)]
        found = [courier.find(names) for courier in self._couriers]
        costs, counts = [], [0] * len(seconds)
        for at, name in enumerate(names):
            tier = 0 if name in self._host else next((tier for tier, has in enumerate(found, 1) if has[at]), None)
            if tier is None:
                break
            costs.append(seconds[tier])
            counts[tier] += 1
        return costs, tuple(counts)

    @property
    def seconds_per_token(self) -> float:
        """What a token of KV takes of the engine's time to come back from the host; from a slow tier, if the host is none."""
        here = self._in.seconds_for(self._names.block_bytes) / self._kv.block_size
        return here if self._host_is_tier else here + (self.slow_seconds_per_token or 0.0)

    @property
    def slow_seconds_per_token(self) -> float | None:
        """What a token takes from a slow tier to the host; None if there is none."""
        taken = [courier.load_speed.seconds_for(self._names.block_bytes) for courier in self._couriers]
        return min(taken) / self._kv.block_size if taken else None

    # In

    def begin(self, sequence: Sequence, table: BlockTable, first: int, count: int, num_held: int) -> None:
        names = self._kv.names(table, sequence.tokens, first + count)
        load = Load(sequence, table, names, first, first + count, num_held, self._clock.now())
        for name in names[first:]:
            if name in self._host:
                self._pin(load, name)
        self._loads[sequence] = load

    def cancel(self, sequence: Sequence) -> None:
        """Nothing comes for it any more. Slots that are being filled stay: others may want them."""
        self._asked.pop(sequence, None)
        if (load := self._loads.pop(sequence, None)) is not None:
            self._unpin(load)

    def take_complete(self) -> list[Load]:
        complete = [load for load in self._loads.values() if load.is_over]
        for load in complete:
            self.cancel(load.sequence)
        return complete

    def _move(self, load: Load, most: int) -> bool:
        """Write the next blocks, `most` at most. False if none has come yet, or will."""
        host, came = self._host, []
        for name in load.names[load.at : min(load.at + most, load.stop)]:
            if name not in host:
                break
            came.append(name)
        if not came:
            name = load.names[load.at]
            self._ask(load)
            is_lost = not host.is_known(name) and (name in load.asked or not self._comes(load))
            load.is_over = is_lost or self._clock.now() > load.moved_at + _MOST_SECONDS
            return False
        blocks = load.table.blocks[load.at : load.at + len(came)]
        began = self._clock.now()
        self._executor.blocks_in(blocks, [host.use(name) for name in came], host.memory)
        self._in.note(len(came) * self._names.block_bytes, self._clock.now() - began)
        for name in load.pinned.intersection(came):
            load.pinned.discard(name)
            host.unpin(name)
        load.at += len(came)
        load.moved_at = self._clock.now()
        load.is_over = load.at == load.stop
        self.num_loaded += len(came)
        return True

    def _comes(self, load: Load) -> bool:
        """Whether a slot may become free for what could not be asked for yet."""
        return any(courier.has_work for courier in self._couriers)

    def _ask(self, load: Load) -> None:
        """See to it that the next blocks are on their way."""
        for name in load.names[load.at : min(load.at + _AHEAD, load.stop)]:
            if name in load.asked or self._host.is_known(name):
                continue
            courier = next((one for one in self._couriers if one.find([name])[0]), None)
            if courier is None:
                load.asked.add(name)
                return
            slot = self._host.begin(name)
            if slot is None:
                return
            load.asked.add(name)
            courier.load(name, self._host.view(slot))

    def prefetch(self, names: list[bytes]) -> None:
        """Bring blocks to the host that only a slow tier has, from the first on: as many as half of the host holds."""
        for name in names[: max(self._host.num_slots // 2, 1)]:
            if self._host.is_known(name):
                continue
            courier = next((one for one in self._couriers if one.find([name])[0]), None)
            slot = self._host.begin(name) if courier is not None else None
            if courier is None or slot is None:
                return
            courier.load(name, self._host.view(slot))
            courier.counts.prefetched += 1

    def _pin(self, load: Load, name: bytes) -> None:
        if name not in load.pinned:
            load.pinned.add(name)
            self._host.pin(name)

    def _unpin(self, load: Load) -> None:
        for name in load.pinned:
            self._host.unpin(name)
        load.pinned.clear()

    # Out

    def turn_ended(self, table: BlockTable, tokens: array[int], num_computed: int) -> None:
        """Its full blocks are copied out when there is time, if a tier outlives the process."""
        full = min(num_computed // self._kv.block_size, table.num_committed)
        if not self._couriers or not table.indexed or not full:
            return
        names = self._kv.names(table, tokens, full)
        for block, name in zip(table.blocks, names, strict=False):
            if len(self._to_save) < _MOST_WAITING and not self._is_kept(name):
                self._to_save.append((block, name))

    def save(self, leaving: list[tuple[int, bytes]]) -> None:
        """Blocks that are about to be reused, with their names: their content goes now or never."""
        self.num_skipped += len(leaving) - self._copy_out(leaving)

    def _copy_out(self, wanted: list[tuple[int, bytes]]) -> int:
        """Copy blocks to the host, unless they are there, and from there to the tiers that lack them. For how many of them, from
        the first on, there was room on the way."""
        host, slots = self._host, {}
        count = 0
        for block, name in wanted:
            if not (host.is_known(name) or self._is_kept(name)):
                slot = host.begin(name)
                if slot is None:
                    break
                slots[name] = block, slot
            count += 1
        if slots:
            self._read_into(slots)
        for _, name in wanted[:count] if self._couriers else ():
            self._send(name)
        return count

    def _read_into(self, slots: dict[bytes, tuple[int, int]]) -> None:
        """Blocks and slots, by name."""
        began = self._clock.now()
        try:
            blocks, places = zip(*slots.values(), strict=True)
            self._executor.blocks_out(blocks, places, self._host.memory)
        except BaseException:
            for name in slots:
                self._host.failed(name)
            raise
        self._out.note(len(slots) * self._names.block_bytes, self._clock.now() - began)
        for name in slots:
            self._host.filled(name)
        self.num_saved += len(slots)

    def _send(self, name: bytes) -> None:
        """From the host to the tiers that lack it."""
        for courier in self._couriers if name in self._host else ():
            if not courier.find([name])[0] and not courier.store(name, self._host.pin(name)):
                self._host.unpin(name)

    def _is_kept(self, name: bytes) -> bool:
        """By every tier that is to have it."""
        if self._host_is_tier and not self._host.is_known(name):
            return False
        return all(courier.breaker.is_open or courier.find([name])[0] for courier in self._couriers)

    # The engine's thread, between steps

    @property
    def has_work(self) -> bool:
        return bool(self._loads or self._to_save or self._asked)

    def rest(self) -> None:
        """Nothing runs: slow tiers may have the machine."""
        for courier in self._couriers:
            courier.set_busy(False)

    def work(self, step_seconds: float | None) -> bool:
        """Move blocks for a share of the time that the last step took, or for a moment if there was none. Whether any moved."""
        began = self._clock.now()
        load_until = began + (_IDLE_SECONDS if step_seconds is None else step_seconds * _LOAD_SHARE)
        save_until = began + (_IDLE_SECONDS if step_seconds is None else step_seconds * _SAVE_SHARE)
        for courier in self._couriers:
            courier.set_busy(step_seconds is not None)
        moved = self._collect()
        for load in list(self._loads.values()):
            while not load.is_over and self._move(load, self._num_until(load_until, self._in)):
                moved = True
                if self._clock.now() > load_until:
                    return True
        while self._to_save and self._clock.now() < save_until:
            many = min(-(-self._num_until(save_until, self._out) // _PARTS), len(self._to_save))
            wanted = [self._to_save.popleft() for _ in range(many)]
            held = [(block, name) for block, name in wanted if self._kv.holds(block, name)]
            count = self._copy_out(held)
            moved = moved or count > len(held) - len(wanted)
            if count < len(held):  # until a slow tier has taken what waits for it
                self._to_save.extendleft(reversed(held[count:]))
                break
        return moved or any(load.is_over for load in self._loads.values()) or self._is_answered()

    def _is_answered(self) -> bool:
        return any(all(look.is_over for look in asked.looks) for asked in self._asked.values())

    def _num_until(self, limit: float, speed: Speed) -> int:
        """Blocks that can be copied until then; one is always."""
        each = speed.seconds_for(self._names.block_bytes)
        return min(max(int((limit - self._clock.now()) / each), 1), _AT_ONCE) if each else 1

    def wait(self, seconds: float) -> None:
        """For a slow tier, when nothing else is to be done."""
        if self._couriers:
            self._couriers[0].wait(seconds)

    def _collect(self) -> bool:
        done = [task for courier in self._couriers for task in courier.finished()]
        for task in done:
            if task.is_store:
                self._host.unpin(task.name)
                continue
            if not task.ok:
                self._host.failed(task.name)
                continue
            for load in self._loads.values():
                if task.name in load.asked:
                    self._pin(load, task.name)
            self._host.filled(task.name)
        return bool(done)

    # Operation

    def reset_host(self, tenant: str | None = None) -> dict[str, int]:
        """Forget everything in the host's memory, or all of one tenant; how many blocks."""
        return {"host": self._host.drop(None if tenant is None else tenant_tag(tenant))}

    def reset_slow(self, tenant: str | None = None) -> dict[str, int]:
        """The same for the other tiers. It may take long, and any thread may call it."""
        tag = None if tenant is None else tenant_tag(tenant)
        return {courier.tier.kind: courier.drop(tag) for courier in self._couriers}

    def info(self) -> list[dict[str, Any]]:
        """For people and metrics: a row for each tier."""
        host = self._host
        rows: list[dict[str, Any]] = []
        if self._host_is_tier:
            rows.append(
                {
                    "tier": "host",
                    "blocks": len(host),
                    "bytes": len(host) * host.block_bytes,
                    "capacity_bytes": host.num_slots * host.block_bytes,
                    "stored_blocks": self.num_saved,
                    "loaded_blocks": self.num_loaded,
                    "skipped_blocks": self.num_skipped,
                    "store_bytes_per_second": self._out.bytes_per_second,
                    "load_bytes_per_second": self._in.bytes_per_second,
                }
            )
        rows += [courier.info() for courier in self._couriers]
        first = 0 if self._host_is_tier else 1
        for at, row in enumerate(rows, first):
            row["looked_blocks"], row["found_blocks"] = self._num_looked[at], self._num_found[at]
            row["requests"] = dict(self._num_chosen[at])
        return rows

    def close(self) -> None:
        """Copy out what was to be, for a bounded time."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self._to_save and time.monotonic() < deadline:
            self.work(None)
        for courier in self._couriers:
            courier.close(max(deadline - time.monotonic(), 0.1))


def open_tiers(
    texts: Seq[str], kv: KVManager, executor: Executor, clock: Clock, open_slow: OpenSlow | None = None
) -> TierDesk | None:
    """None if there are to be none. A tier that cannot be had is refused."""
    specs = parse_tiers(texts)
    if not specs:
        return None
    if not kv.prefix_caching:
        raise InvalidRequest("tier", "without prefix caching nothing is looked for in a tier")
    block_bytes = executor.kv_layout.token_bytes * kv.block_size
    host_bytes = specs.host_bytes if specs.host_bytes is not None else max(_STAGING_BYTES, _AHEAD * block_bytes)
    if host_bytes < block_bytes:
        raise InvalidRequest("tier", f"host={host_bytes} bytes hold less than one block, {block_bytes} bytes")
    couriers = [(open_slow or _open_slow)(spec, executor) for spec in (specs.disk, specs.remote) if spec is not None]
    names = BlockNames(executor.kv_layout, kv.block_size, specs.compressed)
    memory = executor.host_memory(host_bytes // block_bytes * block_bytes)
    host = HostTier(memory, block_bytes)
    return TierDesk(kv, executor, host, couriers, names, clock, is_tier=specs.host_bytes is not None)


def _open_slow(spec: DiskSpec | RemoteSpec, executor: Executor) -> Courier:
    tier: SlowTier = DiskTier(spec.folder, spec.num_bytes) if isinstance(spec, DiskSpec) else RemoteTier(spec.url)
    return Courier(CompressedTier(tier, executor.codec()) if spec.compressed else tier)
