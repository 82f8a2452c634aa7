"""An engine's KV memory as numbers of blocks, without the blocks."""

from __future__ import annotations

from collections import OrderedDict

from segue.sim.jobs import FleetJob


class CoarseMemory:
    """Each block is free, the trunk's, a turn's that runs, or keeps what a job has of its own between two turns:

        num_blocks = free + trunk + running + cached + leased

    What is cached goes when others need room, the oldest first and from its end. What is leased does not before its time is
    over, unless nothing else runs; a job that is back and waits keeps its lease. The trunk stays: every job uses it.
    """

    def __init__(self, num_blocks: int, block_size: int, lease_seconds: float = 0.0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.lease_seconds = lease_seconds  # 0: nothing is leased
        self._cached: OrderedDict[int, int] = OrderedDict()  # tokens of its own, by a job's number
        self._leased: OrderedDict[int, tuple[int, float]] = OrderedDict()  # tokens, and until when
        self._awaited: dict[int, int] = {}  # leases whose job is back
        self.clear()

    def clear(self) -> None:
        self.free = self.num_blocks
        self.trunk = self.trunk_blocks = 0  # tokens, and blocks for them
        self.num_cached = self.num_leased = 0  # blocks
        self._cached.clear()
        self._leased.clear()
        self._awaited.clear()

    def expect(self, number: int) -> bool:
        """Whether the job has a lease here; it lasts until the job's turn runs."""
        if number not in self._leased:
            return False
        self._awaited[number] = self._leased.pop(number)[0]
        return True

    def seat(self, job: FleetJob, now: float, num_others: int) -> int | None:
        """Blocks for all of a turn, and one to spare for each other: how many of its tokens are there. None if there is no room;
        then only leases that are over have changed."""
        size, common = self.block_size, job.common
        own = -(-(job.prompt + job.output - common) // size)
        needed = own
        if common > self.trunk:
            needed += -(-common // size) - self.trunk_blocks
        mine = -(-self._awaited.get(job.number, 0) // size) if self._awaited else 0
        if self.free + self.num_cached + mine < needed + num_others:
            self._lapse(now)
            if not num_others:
                self._revoke(needed - mine, job.number)
            if self.free + self.num_cached + mine < needed + num_others:
                return None
        found = common + self._take(job.number) if common <= self.trunk else self.trunk
        if self.free < needed:
            self._evict(needed - self.free)
        self.free -= needed
        self.trunk_blocks += needed - own
        self.trunk = max(self.trunk, common)
        job.blocks = own
        return min(found, job.prompt - 1)

    def release(self, job: FleetJob, num_tokens: int, now: float, *, is_trunk: bool, is_last: bool) -> None:
        """A turn has ended, with KV for so many tokens."""
        size = self.block_size
        self.free += job.blocks
        job.blocks = 0
        if is_trunk:
            if num_tokens > self.trunk:
                grown = -(-num_tokens // size) - self.trunk_blocks
                self.free -= grown
                self.trunk_blocks += grown
                self.trunk = num_tokens
            return
        own = num_tokens - job.common
        if own <= 0:
            return
        blocks = -(-own // size)
        self.free -= blocks
        if self.lease_seconds and not is_last:
            self._leased[job.number] = (own, now + self.lease_seconds)
            self.num_leased += blocks
        else:
            self._cached[job.number] = own
            self.num_cached += blocks

    def check(self, num_running: int) -> None:
        """That the sums are right, with so many blocks in use by turns."""
        size = self.block_size
        cached = sum(-(-tokens // size) for tokens in self._cached.values())
        leased = sum(-(-tokens // size) for tokens, _ in self._leased.values())
        leased += sum(-(-tokens // size) for tokens in self._awaited.values())
        assert (cached, leased) == (self.num_cached, self.num_leased)
        assert self.trunk_blocks == -(-self.trunk // size)
        assert self.free >= 0 and num_running >= 0
        assert self.free + self.trunk_blocks + num_running + cached + leased == self.num_blocks

    def _take(self, number: int) -> int:
        """What is kept of the job becomes free, to be used by it at once: how many tokens."""
        if (tokens := self._cached.pop(number, 0)) > 0:
            blocks = -(-tokens // self.block_size)
            self.num_cached -= blocks
        elif (tokens := self._awaited.pop(number, 0)) > 0:
            blocks = -(-tokens // self.block_size)
            self.num_leased -= blocks
        else:
            return 0
        self.free += blocks
        return tokens

    def _evict(self, shortage: int) -> None:
        cached, size = self._cached, self.block_size
        while shortage > 0:
            number, tokens = cached.popitem(last=False)
            blocks = -(-tokens // size)
            gone = min(blocks, shortage)
            if gone < blocks:
                cached[number] = (blocks - gone) * size
                cached.move_to_end(number, last=False)
            self.num_cached -= gone
            self.free += gone
            shortage -= gone

    def _lapse(self, now: float) -> None:
        leased = self._leased
        while leased and next(iter(leased.values()))[1] <= now:
            number, (tokens, _) = leased.popitem(last=False)
            self._uncover(number, tokens)

    def _uncover(self, number: int, tokens: int) -> None:
        """What was leased is cached like anything else."""
        blocks = -(-tokens // self.block_size)
        self.num_leased -= blocks
        self.num_cached += blocks
        self._cached[number] = tokens

    def _revoke(self, needed: int, number: int) -> None:
        """Leases end early, the oldest first and those of jobs that are back last, until there are so many blocks."""
        while self.free + self.num_cached < needed and self._leased:
            oldest, (tokens, _) = self._leased.popitem(last=False)
            self._uncover(oldest, tokens)
        for other in [other for other in self._awaited if other != number]:
            if self.free + self.num_cached >= needed:
                return
            self._uncover(other, self._awaited.pop(other))
