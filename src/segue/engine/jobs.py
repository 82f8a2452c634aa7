"""Turns of one job, and its KV between them: what the policy decides is carried out here, and what came of it written down."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from segue.base.clock import Clock
from segue.engine.gauge import Gauge
from segue.engine.prefetch import Prefetcher
from segue.engine.sequence import Hold, Sequence, Turn
from segue.engine.text import Decode
from segue.engine.tiering import TierDesk
from segue.kv import KVManager, Lease
from segue.policies import (
    Call,
    Decision,
    Decisions,
    Disposition,
    Job,
    JobBook,
    JobEnded,
    PinView,
    Policy,
    Pressure,
    Returned,
    Started,
    TurnEnd,
)
from segue.toolcalls.shell import MAX_COMMAND_CHARS
from segue.toolcalls.uses import find_use

_MOST_TEXT_TOKENS = 4096  # of an answer's end, in which its tool call is looked for


@dataclass(slots=True, eq=False)
class Pin:
    """KV of a turn that has ended, kept for the job's next one because the policy said so."""

    job: Job
    lease: Lease
    end: TurnEnd
    since: float
    decision: Decision
    disposition: Disposition  # as the policy last said
    num_blocks: int
    changed_at: float


class JobDesk:
    def __init__(
        self,
        policy: Policy,
        kv: KVManager,
        clock: Clock,
        load: Callable[[], tuple[int, int]],
        decode: Decode | None = None,
        tiers: TierDesk | None = None,
    ) -> None:
        """`load` says how many turns wait and run; without `decode` no tool calls are found."""
        self.book = JobBook()
        self.decisions = Decisions()
        self.gauge = Gauge()
        self._policy = policy
        self._kv = kv
        self._clock = clock
        self._load = load
        self._decode = decode
        self._tiers = tiers
        self._prefetcher = Prefetcher(kv, tiers) if tiers is not None else None
        self._pins: dict[Job, list[Pin]] = {}
        self._by_lease: dict[int, Pin] = {}
        self._reviews: list[tuple[float, int, Pin]] = []
        self._count = 0
        kv.leases.watch = self._lease_changed

    # A turn's life

    def arrive(self, turn: Turn) -> None:
        """What is kept for the job now waits for this turn: it neither expires nor is the first to give way."""
        if turn.job_id is None:
            return
        now = self._clock.now()
        turn.job, gap = self.book.begin(turn.scope.salt, turn.job_id, now)
        if self._prefetcher is not None:
            self._prefetcher.forget(turn.job)
        turn.claims = [pin.lease for pin in self._pins.get(turn.job, ())]
        for lease in turn.claims:
            self._kv.leases.await_heir(lease)
            self._kv.leases.renew(lease, expires_at=lease.expires_at, value=inf)  # who it was kept for is here
        if gap is not None:
            self._policy.observe(Returned(turn.job.key, turn.job.call, gap))
            outcome = "returned" if turn.claims else "late"
            for decision in turn.job.decisions:
                decision.pinned_seconds = gap if outcome == "returned" else min(decision.pinned_seconds, gap)
                self.decisions.close(decision, outcome, gap)
            turn.job.decisions = []

    def start(self, turn: Turn, sequence: Sequence) -> None:
        """It runs, with the blocks it found; what was kept for it is its own now."""
        if turn.job is None or turn.has_started:
            return
        turn.has_started = True
        reused = sequence.reuse.inherited if sequence.reuse is not None else 0
        lost = max(turn.job.num_kv - reused, 0)
        waited = max(self._clock.now() - turn.arrived_at, 0.0)
        for lease in self._settle(turn):
            pin = self._by_lease.get(lease.id)
            if pin is not None and pin.lease is lease:
                pin.decision.hit_tokens = reused
            self._kv.leases.end(lease, "continued")
        if lost:
            self.gauge.queued(waited)
        self._policy.observe(Started(sequence.view(), waited, reused, lost))

    def _settle(self, turn: Turn) -> list[Lease]:
        """Claims are given up: to be ended, or to go on as they were."""
        claims, turn.claims = turn.claims, []
        for lease in claims:
            self._kv.leases.heir_settled(lease)
            pin = self._by_lease.get(lease.id)
            if pin is not None and pin.lease is lease and not lease.num_heirs:
                self._kv.leases.renew(lease, expires_at=lease.expires_at, value=pin.disposition.value)
                self._plan_review(pin, self._clock.now())  # one that came up meanwhile was passed over
        return claims

    def dispose(self, sequence: Sequence) -> tuple[Disposition, TurnEnd] | None:
        """What becomes of the KV of an answer that has ended well; None if that is not for the policy to say."""
        turn = sequence.turn
        if turn.job is None or turn.hold is not None or turn.is_last_step or turn.job.is_over:
            return None
        end = TurnEnd(sequence.view(), self._kv.blocks_for(sequence.num_computed), self._call_of(sequence))
        return self._policy.at_turn_end(end, self.pressure(), self._clock.now()), end

    def hold_for(self, disposition: Disposition) -> Hold | None:
        return Hold(disposition.keep_seconds, disposition.value) if disposition.keep_seconds > 0 else None

    def decided(self, sequence: Sequence, disposition: Disposition, end: TurnEnd, lease: Lease | None) -> None:
        turn, job, now = sequence.turn, sequence.turn.job, self._clock.now()
        assert job is not None
        decision = self.decisions.add(turn.scope.salt, job.id, end, disposition, now)
        job.decisions.append(decision)
        if disposition.prefetch_seconds is not None and self._prefetcher is not None:
            self._prefetcher.expect(job, sequence, now + disposition.prefetch_seconds)
        if lease is not None and lease in self._kv.leases:
            pin = Pin(job, lease, end, now, decision, disposition, len(lease.blocks), now)
            self._pins.setdefault(job, []).append(pin)
            self._by_lease[lease.id] = pin
            self._plan_review(pin, now)

    def end(self, sequence: Sequence) -> None:
        """Called for each of a turn's answers; the last to end is the turn's end. With the job's last step all goes."""
        turn, job = sequence.turn, sequence.turn.job
        if job is None or any(other.finish_reason is None for other in turn.sequences):
            return
        self._settle(turn)
        turn.job = None
        now = self._clock.now()
        call = self._call_of(sequence) if self._policy.reads_calls and not turn.is_last_step else None
        job.num_kv = sequence.num_computed
        is_over = self.book.end(turn.scope.salt, job, call, now, is_last=turn.is_last_step)
        if is_over:
            self._policy.observe(JobEnded(job.key, job.num_turns))
        if job.is_over:
            self._end_pins(job)

    def _end_pins(self, job: Job) -> None:
        for pin in list(self._pins.get(job, ())):
            self._kv.leases.end(pin.lease)
        for decision in job.decisions:
            self.decisions.close(decision, "over", None)
        job.decisions = []

    def _call_of(self, sequence: Sequence) -> Call | None:
        """Decoded and read once a turn, and only if the policy wants to know."""
        if not self._policy.reads_calls or self._decode is None:
            return None
        turn = sequence.turn
        if turn.call is None:
            output = sequence.tokens[max(sequence.num_prompt, len(sequence.tokens) - _MOST_TEXT_TOKENS) :]
            use = find_use(self._decode(output))
            job = f"{turn.scope.salt}\0{turn.job_id}"
            turn.call = (Call(use.tool, use.key, job, use.command[:MAX_COMMAND_CHARS]) if use is not None else None,)
        return turn.call[0]

    # Pins

    def is_pin(self, lease: Lease) -> bool:
        pin = self._by_lease.get(lease.id)
        return pin is not None and pin.lease is lease

    def pressure(self) -> Pressure:
        kv = self._kv
        num_waiting, num_running = self._load()
        return Pressure(
            num_blocks=kv.num_blocks,
            num_free=kv.num_free,
            num_leased=kv.leases.totals.total(),
            num_waiting=num_waiting,
            num_running=num_running,
            block_size=kv.block_size,
            seconds_per_token=self._seconds_per_token(),
            queue_seconds=self.gauge.queue_seconds,
            slow_seconds_per_token=self._tiers.slow_seconds_per_token if self._tiers is not None else None,
            idle_share=self.gauge.idle_share(num_running),
        )

    def _seconds_per_token(self) -> float:
        """What a token of KV takes to have again: to compute, or to load where that is sooner."""
        computed = self.gauge.seconds_per_token
        loaded = self._tiers.seconds_per_token if self._tiers is not None else 0.0
        return min(computed, loaded) if loaded else computed

    def review(self, now: float) -> None:
        """Ask again about pins whose time for it has come, and fetch what is expected to be needed."""
        if self._prefetcher is not None:
            self._prefetcher.run(now)
        while self._reviews and self._reviews[0][0] <= now:
            _, _, pin = heapq.heappop(self._reviews)
            if self._by_lease.get(pin.lease.id) is not pin or pin.lease.num_heirs:
                continue
            view = PinView(pin.end, pin.since, len(pin.lease.blocks))
            disposition = self._policy.review(view, self.pressure(), now)
            if disposition.prefetch_seconds is not None and self._prefetcher is not None:
                self._prefetcher.move(pin.job, now + disposition.prefetch_seconds)
            if disposition.keep_seconds <= 0:
                self._kv.leases.end(pin.lease, "expired")
                continue
            pin.disposition = disposition
            self._kv.leases.renew(pin.lease, expires_at=now + disposition.keep_seconds, value=disposition.value)
            self._plan_review(pin, now)

    def next_review(self) -> float | None:
        upcoming = [self._reviews[0][0]] if self._reviews else []
        if self._prefetcher is not None and (at := self._prefetcher.next_at()) is not None:
            upcoming.append(at)
        return min(upcoming, default=None)

    def _plan_review(self, pin: Pin, now: float) -> None:
        disposition = pin.disposition
        if disposition.review_seconds is not None and 0 < disposition.review_seconds < disposition.keep_seconds:
            self._count += 1
            heapq.heappush(self._reviews, (now + disposition.review_seconds, self._count, pin))

    def _lease_changed(self, lease: Lease) -> None:
        """A lease has shrunk or ended."""
        pin = self._by_lease.get(lease.id)
        if pin is None or pin.lease is not lease:
            return
        now, decision = self._clock.now(), pin.decision
        decision.block_seconds += pin.num_blocks * max(now - pin.changed_at, 0.0)
        pin.num_blocks, pin.changed_at = len(lease.blocks), now
        if lease in self._kv.leases:
            return
        del self._by_lease[lease.id]
        if decision.outcome == "open":
            decision.pinned_seconds = max(now - pin.since, 0.0)
        self.decisions.unpinned(decision)
        pins = self._pins[pin.job]
        pins.remove(pin)
        if not pins:
            del self._pins[pin.job]
