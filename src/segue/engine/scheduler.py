"""Decides what each step computes. `plan` only reserves; `apply` and `fail` are what changes sequences after a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from segue.base.clock import Clock
from segue.base.config import EngineConfig
from segue.base.types import FinishReason
from segue.engine.admission import longest_answer
from segue.engine.beam import BeamSearch, Candidates, SearchStep
from segue.engine.executor import Row, StepPlan, StepResult, TokenLogprobs
from segue.engine.heirs import WHY_GONE, Heirs
from segue.engine.jobs import JobDesk
from segue.engine.offers import NO_OFFER, Load, Offer
from segue.engine.sequence import Hold, Sequence, Status, Turn
from segue.engine.text import Decode
from segue.engine.tiering import TierDesk
from segue.engine.waiting import WaitingQueue
from segue.kv import BlockTable, Copy, KVManager, Lease, Match, Reservation
from segue.policies import Policy
from segue.state import State, StateLedger

Produced = tuple[Sequence, int, TokenLogprobs | None]  # a token that a step gave a sequence
_MOST_PASSES = 8  # of a search in one step: others wait meanwhile
_MOST_BEAMS = 512  # of searches that go to their ends in one step; while it runs, the next one is prepared


@dataclass(slots=True)
class _Blocked:
    """The first in the queue, since it was found not to fit, and what tiers had for it beyond `num_found` blocks."""

    sequence: Sequence
    since: float
    num_found: int
    offer: Offer


class Scheduler:
    """There are no phases: each step lets every sequence's `num_computed` catch up with its tokens, within a budget.

    Prefill in chunks, prefix hits, forks and resuming after preemption are all this one rule.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVManager,
        policy: Policy,
        clock: Clock,
        states: StateLedger | None = None,
        decode: Decode | None = None,
        tiers: TierDesk | None = None,
        can_finish: Callable[[SearchStep, int], bool] | None = None,
    ) -> None:
        """`can_finish`: whether the executor carries a search to its end in one step."""
        self.config = config
        self._can_finish = can_finish
        self.tiers = tiers
        self.kv = kv
        self.states = states or StateLedger(config.max_states, config.max_state_bytes)
        self.heirs = Heirs(config, self.states, self.submit)
        self.num_preemptions = 0
        self.num_planned = 0  # tokens of the last plan
        self._policy = policy
        self._clock = clock
        self._waiting = WaitingQueue(policy.fair_every)
        self._running: dict[int, Sequence] = {}  # in order of admission
        self._loading: dict[int, Sequence] = {}  # with blocks, into which KV from another tier comes
        self._loaded: list[Load] = []  # of those, complete and waiting for their first step
        self._asking: dict[int, Sequence] = {}  # without blocks: a tier is asked what it has for them
        self._next_id = 0
        self._found: list[Sequence] = []
        self._now = clock.now()  # one time for all of a plan's decisions
        self._flying: frozenset[int] = frozenset()  # sequences of a step under way, while the next one is planned
        self._blocked: _Blocked | None = None
        self.jobs = JobDesk(policy, kv, clock, lambda: (len(self._waiting), len(self._running)), decode, tiers)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_loading(self) -> int:
        return len(self._loading) + len(self._asking)

    def submit(self, turn: Turn) -> None:
        """Queue a turn that was found to fit. Its first answer computes the prompt, the others share it."""
        params = turn.params
        limit = longest_answer(turn.search, self.config)
        if params.max_tokens is not None:
            limit = min(limit, turn.num_prompt + params.max_tokens)
        for index in range(params.n):
            self._next_id += 1
            turn.sequences.append(Sequence(self._next_id, index, turn, limit))
        self._expect(turn)
        self.jobs.arrive(turn)
        self._wait(turn.sequences[0])

    def _expect(self, turn: Turn) -> None:
        """Keep the parent's lease, if it has one, until the turn first runs."""
        if turn.expects is None and turn.parent is not None and turn.parent.lease is not None and turn.parent.num_held:
            turn.expects = turn.parent.lease
            self.kv.leases.await_heir(turn.expects)

    # Before a step

    def plan(self) -> StepPlan:
        """Decide the next step. It reserves, which `fail` undoes; it may preempt and take back leases, which stays."""
        self._now = self._clock.now()
        self.expire(self._now)
        rows: dict[int, Row] = {}
        copies: dict[int, Copy] = {}
        preempted_before = self.num_preemptions
        budget = self._plan_running(rows, copies)
        if self.num_preemptions == preempted_before or not rows:
            budget = self._plan_waiting(rows, copies, budget)
        self.num_planned = self.config.max_step_tokens - budget
        if self._can_finish is not None:
            self.num_planned += self._let_finish(rows)
        return StepPlan(list(rows.values()), list(copies.values()))

    def _let_finish(self, rows: dict[int, Row]) -> int:
        """Let searches be carried to their ends where nobody in the step waits for his next token, as far as there is memory for
        all that they write; how many tokens more that is. Those that are too many for one step wait for the next."""
        assert self._can_finish is not None
        if any(row.sampling is not None for row in rows.values()):
            return 0
        room, added, num_let = min(self.config.max_step_tokens, _MOST_BEAMS), 0, 0
        for sequence_id, row in list(rows.items()):
            sequence, step = self._running[sequence_id], row.search
            search, table = sequence.search, sequence.table
            if step is None:
                continue
            assert search is not None and table is not None
            passes, width = search.max_tokens, search.params.width
            if not 1 < passes <= _MOST_PASSES or not search.is_straight or not self._can_finish(step, passes):
                continue
            upto = row.stop + (passes - 1) * width
            if width > room and num_let:
                added -= row.stop - row.start
                del rows[sequence_id]
            elif self.kv.extend(table, row.stop, upto, self._now, self._policy.growth_bid) is not None:
                rows[sequence_id] = row._replace(search=step._replace(passes=passes))
                room -= width
                num_let += 1
                added += upto - row.stop
        return added

    def plan_beside(self, plan: StepPlan) -> StepPlan | None:
        """A step of others, while searches go to their ends in one that runs."""
        if not all(row.search is not None and row.search.passes > 1 for row in plan.rows):
            return None
        self._flying = frozenset(row.sequence_id for row in plan.rows)
        try:
            if not self._waiting and self._flying.issuperset(self._running):
                return None
            beside = self.plan()
        finally:
            self._flying = frozenset()
        return beside if beside.rows else None

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """The step after one that runs, if all that is unknown about it are its tokens: each sequence goes on by the one it is
        about to get, but for those that it completes. Who ends otherwise has computed one token for nothing. None if somebody
        waits, or if there is more to decide."""
        running = self._running
        if self._waiting or self._loading or self._asking or self.kv.num_free < 2 * len(running):
            return None
        going = []
        for row in plan.rows:
            sequence = running.get(row.sequence_id)
            if sequence is None:
                continue  # it has ended meanwhile
            if row.sampling is None or len(row.tokens) != row.stop or sequence.search is not None:
                return None
            if row.stop == sequence.num_prompt and len(sequence.turn.sequences) > 1:
                return None  # its siblings start from there
            going.append((row, sequence))
        if len(going) < len(running):
            return None
        self._now = self._clock.now()
        self.expire(self._now)
        rows, copies = [], []
        for row, sequence in going:
            if row.stop + 1 < sequence.limit:
                assert sequence.table is not None
                start, stop = row.stop, row.stop + 1
                reservation = self.kv.extend(sequence.table, start, stop, self._now)
                assert reservation is not None, "there was room for all"
                rows.append(row._replace(start=start, stop=stop, blocks=sequence.table.blocks))
                if reservation.copy is not None:
                    copies.append(reservation.copy)
        self.num_planned = len(rows)
        return StepPlan(rows, copies) if rows else None

    def expire(self, now: float) -> float | None:
        """End what is kept for nobody any longer; when to look again."""
        self.jobs.review(now)
        self.kv.leases.expire(now)
        upcoming = [at for at in (self.kv.leases.next_expiry(), self.jobs.next_review()) if at is not None]
        return min(upcoming, default=None)

    def _plan_running(self, rows: dict[int, Row], copies: dict[int, Copy]) -> int:
        """Every running sequence gets at least one token, so a long prompt never stalls the others, and the last one that runs
        takes whatever memory it needs. Returns what is left of the budget."""
        running, extend, now, bid = self._running, self.kv.extend, self._now, self._policy.growth_bid
        budget = self.config.max_step_tokens
        behind = len(running)
        searches = [sequence.search for sequence in running.values() if sequence.search is not None]
        beams_behind = sum(map(_num_beams, searches))
        for sequence in list(running.values()):
            behind -= 1
            num_beams = _num_beams(sequence.search) if sequence.search is not None else 0
            beams_behind -= num_beams
            table = sequence.table
            if table is None or sequence.id not in running or sequence.id in self._flying:
                continue  # preempted a moment ago, by one in front; or under way
            if num_beams > budget - behind:
                continue  # all of a group's beams or none: those in front go first, and soon end
            if num_beams and sequence.search is not None:
                start = len(sequence.tokens) + sequence.search.num_written
                stop = start + num_beams
            else:
                start = sequence.num_computed
                stop = len(sequence.tokens)
                if stop - start > 1:
                    stop = min(stop, start + max(budget - behind - beams_behind, 1))
            while (reservation := extend(table, start, stop, now, bid if len(running) > 1 else inf)) is None:
                if (
                    len(running) == 1 and not self._loading
                ):  # nobody else can give way, and it would come back to the same
                    reservation = extend(table, start, stop, now, takes_shares=True)
                if reservation is not None or not self._preempt_for(sequence, rows, copies):
                    break
            if reservation is None:
                continue
            rows[sequence.id] = _row(sequence, table, stop)
            if reservation.copy is not None:
                copies[sequence.id] = reservation.copy
            budget -= stop - start
        return budget

    def _preempt_for(self, sequence: Sequence, rows: dict[int, Row], copies: dict[int, Copy]) -> bool:
        """Preempt the policy's victim; before that, those that have not begun. False when that was `sequence` itself."""
        if self._loading:
            self._unload(next(reversed(self._loading.values())))
            return True
        choice = [running for running in self._running.values() if running.id not in self._flying]
        victim = max(choice, key=lambda running: self._policy.victim(running.view(), self._now))
        rows.pop(victim.id, None)
        if copy := copies.pop(victim.id, None):
            self.kv.settle(copy)
        self._preempt(victim)
        return victim is not sequence

    def _preempt(self, sequence: Sequence) -> None:
        """What was computed stays in the index as long as memory lasts; the rest is computed again on return."""
        assert sequence.table is not None
        del self._running[sequence.id]
        self.kv.clear(sequence.table)
        sequence.num_computed = 0
        if sequence.search is not None:
            sequence.search.restart()
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._wait(sequence)

    def _plan_waiting(self, rows: dict[int, Row], copies: dict[int, Copy], budget: int) -> int:
        """Admit in the policy's order, and nobody past one that does not fit: a large request is not starved. Returns what is
        left of the budget."""
        self._take_loaded()
        self._take_answered()
        while budget > 0 and len(self._running) < self.config.max_running and self._loaded:
            budget = self._begin_loaded(self._loaded.pop(0), rows, budget)
        while budget > 0 and len(self._running) < self.config.max_running:
            sequence = self._waiting.peek()
            if sequence is None:
                break
            if sequence.table is None:
                turn = sequence.turn
                sequence.table = self.kv.open(sequence.tokens, turn.scope, _known_keys(sequence, self.kv), turn.job)
            if self._ask_for(sequence, sequence.table):
                continue
            reservation = self._seat(sequence, sequence.table)
            if reservation is None:
                break
            if sequence.status is Status.LOADING:
                continue
            stop = min(len(sequence.tokens), sequence.num_computed + budget)
            rows[sequence.id] = _row(sequence, sequence.table, stop)
            if reservation.copy:
                copies[sequence.id] = reservation.copy
            budget -= stop - sequence.num_computed
        return budget

    def _take_loaded(self) -> None:
        """What came from another tier is KV like any other from now on."""
        for load in self.tiers.take_complete() if self.tiers is not None else ():
            sequence = load.sequence
            sequence.num_computed = max(sequence.num_computed, load.at * self.kv.block_size)
            self.kv.commit(load.table, sequence.tokens, sequence.num_computed)
            self._loaded.append(load)

    def _ask_for(self, sequence: Sequence, table: BlockTable) -> bool:
        """Whether somebody else may have KV for it, and is asked. It lets others pass meanwhile."""
        if self.tiers is None or sequence.has_asked or not self.tiers.is_shared:
            return False
        match, _ = self._find(sequence, table)
        if not self.tiers.ask(sequence, table, len(match.blocks)):
            return False
        self._waiting.remove(sequence)
        self._asking[sequence.id] = sequence
        sequence.status = Status.LOADING
        return True

    def _take_answered(self) -> None:
        for sequence in self.tiers.take_answered() if self._asking and self.tiers is not None else ():
            del self._asking[sequence.id]
            self._wait(sequence)

    def _begin_loaded(self, load: Load, rows: dict[int, Row], budget: int) -> int:
        sequence = load.sequence
        del self._loading[sequence.id]
        self._start(sequence, sequence.num_computed, load.num_held, load.num_blocks * self.kv.block_size)
        stop = min(len(sequence.tokens), sequence.num_computed + budget)
        rows[sequence.id] = _row(sequence, load.table, stop)
        return budget - (stop - sequence.num_computed)

    def _unload(self, sequence: Sequence) -> None:
        """Back into the queue, without its blocks."""
        assert sequence.table is not None
        self._stop_loading(sequence)
        self.kv.clear(sequence.table)
        sequence.num_computed = 0
        self._wait(sequence)

    def _stop_loading(self, sequence: Sequence) -> None:
        is_loading = self._loading.pop(sequence.id, None) or self._asking.pop(sequence.id, None)
        if is_loading is not None and self.tiers is not None:
            self.tiers.cancel(sequence)
            self._loaded = [load for load in self._loaded if load.sequence is not sequence]

    def _offer(self, sequence: Sequence, table: BlockTable, match: Match) -> Offer:
        """Nothing that the device's own tail covers."""
        if self.tiers is None:
            return NO_OFFER
        found, size, blocked = len(match.blocks), self.kv.block_size, self._blocked
        if blocked is not None and blocked.sequence is sequence and blocked.num_found == found:
            return blocked.offer  # what has gone meanwhile is computed
        offer = self.tiers.offer(table, sequence.tokens, found, self.jobs.gauge.seconds_per_token)
        return (
            offer if (found + offer.num_there) * size > match.num_tokens else offer._replace(num_there=0, num_wanted=0)
        )

    def _seat(self, sequence: Sequence, table: BlockTable) -> Reservation | None:
        """Give a waiting sequence blocks for all its tokens, reusing what is there, and let it run, or first let come what
        another tier has. None, and no change, if there is no room for it beside the running ones, each of which may need a
        block before long."""
        turn, parent = sequence.turn, sequence.turn.parent
        match, lender = self._find(sequence, table)
        offer, num_found = self._offer(sequence, table, match), len(match.blocks)
        if offer.num_wanted:
            match = match.without_tail(self.kv.block_size)
        num_held = min(parent.num_held, turn.num_shared) if parent is not None else 0
        reservation = self.kv.admit(
            table,
            match,
            len(sequence.tokens),
            headroom=len(self._running) + len(self._loading),
            now=self._now,
            below=self._bid(sequence),
            lender=lender,
            consumed=parent.lease if turn.consume and parent is not None and parent.num_held else None,
        )
        if reservation is None:
            since = self._blocked_since(sequence)
            self._blocked = _Blocked(sequence, since, num_found, offer)
            return None
        self._blocked = None
        self._waiting.admit(sequence)
        turn.consume = False  # whatever the parent holds from now on, it holds for others
        num_held = min(num_held, reservation.num_reused)
        if self.tiers is not None:
            self.tiers.chose(offer)
        if offer.num_wanted and self.tiers is not None:
            sequence.status = Status.LOADING
            sequence.num_computed = reservation.num_reused
            self._loading[sequence.id] = sequence
            self.tiers.begin(sequence, table, len(match.blocks), offer.num_wanted, num_held)
        else:
            self._start(sequence, reservation.num_reused, num_held)
        return reservation

    def _start(self, sequence: Sequence, num_reused: int, num_held: int, num_loaded: int = 0) -> None:
        """It runs, with KV for `num_reused` of its tokens."""
        self._running[sequence.id] = sequence
        sequence.status = Status.RUNNING
        sequence.num_computed = num_reused
        sequence.starts(num_reused, num_held, num_loaded)
        self._settle_expected(sequence.turn)
        self.jobs.start(sequence.turn, sequence)

    def _bid(self, sequence: Sequence) -> float:
        if not (self._running or self._loading) or not self._policy.bids:
            return inf
        waited = self._now - self._blocked_since(sequence)
        return self._policy.bid(sequence.view(waited), self.jobs.pressure(), self._now)

    def _blocked_since(self, sequence: Sequence) -> float:
        blocked = self._blocked
        return blocked.since if blocked is not None and blocked.sequence is sequence else self._now

    def _find(self, sequence: Sequence, table: BlockTable) -> tuple[Match, Lease | None]:
        """The KV there is for a sequence, and the lease that lends the first part of it."""
        turn = sequence.turn
        parent = turn.parent
        if parent is None or parent.lease is None or not parent.num_held:
            return self.kv.match(table, sequence.tokens), None
        held = self.kv.held(parent.lease, turn.num_shared, table, sequence.tokens)
        if not parent.lease.indexed:
            found = self.kv.match(table, sequence.tokens)
            if found.num_tokens > held.num_tokens:
                return found, None
        return held, parent.lease

    def _settle_expected(self, turn: Turn) -> None:
        """The lease a turn waited to continue from is needed for it no longer."""
        if (lease := turn.expects) is not None:
            turn.expects = None
            self.kv.leases.heir_settled(lease)

    # After a step

    def apply(self, plan: StepPlan, result: StepResult) -> list[Produced]:
        """Take over what a step computed: KV committed, tokens appended, sequences ended."""
        for copy in plan.copies:
            self.kv.settle(copy)
        produced: list[Produced] = []
        running, commit, size = self._running, self.kv.commit, self.kv.block_size
        new_tokens, logprobs, sampled = result.tokens, result.logprobs, 0
        candidates = iter(result.candidates)
        for sequence_id, tokens, _, stop, _, sampling, step in plan.rows:
            sequence = running.get(sequence_id)
            if sequence is None:  # it ended while this step, planned before that, was under way
                sampled += sampling is not None
                if step is not None:
                    next(candidates)
                continue
            if (
                sampling is not None and sequence.search is not None
            ):  # its thought ended meanwhile, and this is no part of it
                sampled += 1
                continue
            if step is not None and step.tails:
                self._expand(sequence, step, next(candidates))
                continue
            sequence.num_computed = stop
            table = sequence.table
            if table is not None and stop // size > table.num_committed:
                commit(table, tokens, stop)
            if step is not None:
                self._expand(sequence, step, next(candidates))
            if sampling is None:
                continue
            token = new_tokens[sampled]
            tokens.append(token)
            produced.append((sequence, token, logprobs.get(sampled) if logprobs else None))
            sampled += 1
            length = len(tokens)
            if length == sequence.num_prompt + 1 and sequence.index == 0:
                self._wake_siblings(sequence)
            if (length >= sequence.limit or token in sampling.stop_ids) and (reason := sequence.stop_reason(token)):
                self.finish(sequence, reason)
        return produced

    def _expand(self, sequence: Sequence, step: SearchStep, candidates: Candidates) -> None:
        search = sequence.search
        assert search is not None
        while search.take(step, candidates):
            if candidates.then is None:
                return
            step, candidates = search.step(step.num_shared), candidates.then
        best = search.found[0] if search.found else None
        self.finish(sequence, FinishReason.STOP if best is None else best.finish_reason)

    def take_found(self) -> list[Sequence]:
        """The sequences whose search has ended well since the last call."""
        found, self._found = self._found, []
        return found

    def _wake_siblings(self, first: Sequence) -> None:
        """The prompt is computed: the request's other answers share all of it but the last token, which each computes
        for itself to sample from. Those beyond `max_running` queue, and find the prompt in the index."""
        assert first.table is not None
        shared = first.num_prompt - 1
        for sequence in first.turn.sequences[1:]:
            if len(self._running) >= self.config.max_running:
                self._wait(sequence)
                continue
            sequence.table = self.kv.fork(first.table, shared)
            sequence.num_computed = shared
            sequence.starts(shared, 0)
            sequence.status = Status.RUNNING
            self._running[sequence.id] = sequence

    def fail(self, plan: StepPlan, error: Exception, begun: StepPlan | None = None) -> list[Sequence]:
        """A step raised: undo its reservations and end its requests, and no others; the sequences this ended. What
        earlier steps computed stays in the index. `begun`: a step after it that is under way already."""
        for copy in plan.copies:
            self.kv.settle(copy)
        failed = {row.sequence_id for row in plan.rows}
        relied = {row.sequence_id for row in begun.rows} if begun is not None else set()
        for sequence in self._without_copy(plan, failed):
            if sequence.id in relied:
                failed.add(sequence.id)
            else:
                self._preempt(sequence)
        turns = dict.fromkeys(sequence.turn for sequence in self._running.values() if sequence.id in failed)
        ended = [sequence for turn in turns for sequence in turn.sequences if sequence.status is not Status.FINISHED]
        for sequence in ended:
            self.finish(sequence, FinishReason.ERROR, error)
        return ended

    def _without_copy(self, plan: StepPlan, rows: set[int]) -> list[Sequence]:
        """Those that have no row in a failed step, but were to get a copy in it: nobody knows what is in that block."""
        targets = {copy.dst for copy in plan.copies}
        return [
            sequence
            for sequence in self._running.values()
            if sequence.id not in rows and sequence.table is not None and not targets.isdisjoint(sequence.table.blocks)
        ]

    def abort(self, turn: Turn) -> None:
        for sequence in turn.sequences:
            self.finish(sequence, FinishReason.ABORT)
        self.heirs.leave(turn)
        if not turn.sequences:
            self.states.note_failure(turn.id, turn.scope, WHY_GONE[FinishReason.ABORT])
        self.heirs.disinherit(turn, None, FinishReason.ABORT)

    def finish(self, sequence: Sequence, reason: FinishReason, error: Exception | None = None) -> None:
        """End a sequence between steps, whatever it was doing; a second time does nothing. One that ends well leaves a
        state, and its heirs go on from it."""
        if sequence.status is Status.FINISHED:
            return
        ends_well = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if ends_well and sequence.turn.search is not None:
            if sequence.search is None:
                sequence.end_thought(sequence.turn.search, reason)
                return
            self._found.append(sequence)
            sequence.tokens.extend(sequence.search.found[0].token_ids if sequence.search.found else ())
        self._waiting.remove(sequence)
        self._running.pop(sequence.id, None)
        self._stop_loading(sequence)
        self._settle_expected(sequence.turn)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.error = error
        table = sequence.table
        if table is not None and error is None:
            self.kv.commit_tail(table, sequence.tokens, sequence.num_computed)
        if ends_well:
            self._leave_state(sequence)
            if table is not None and sequence.turn.is_last_step:
                self.kv.retire(table)
            if table is not None and self.tiers is not None:
                self.tiers.turn_ended(table, sequence.tokens, sequence.num_computed)
        else:
            self.states.note_failure(sequence.state_id, sequence.turn.scope, WHY_GONE[reason])
            self.heirs.disinherit(sequence.turn, sequence.index, reason)
        self.jobs.end(sequence)
        if table is not None:
            self.kv.close(table)

    # States

    def keep(self, state: State) -> State:
        """Enter a state into the ledger; what that pushes out of it loses its lease."""
        for given_up in self.states.add(state):
            if given_up.lease is not None:
                self.kv.leases.end(given_up.lease)
        return state

    def _leave_state(self, sequence: Sequence) -> None:
        """n tokens, KV for the `num_computed` of them that were fed: the last sampled one never was."""
        turn, table = sequence.turn, sequence.table
        heirs = self.heirs.take(turn, sequence.index)
        disposed = self.jobs.dispose(sequence)
        hold = self.jobs.hold_for(disposed[0]) if disposed is not None else turn.hold
        lease = None
        if table is not None and (hold is not None or heirs):
            lease = self.kv.hold(table, sequence.num_computed, job=turn.job_id, **self._terms(hold))
        if disposed is not None:
            self.jobs.decided(sequence, *disposed, lease if hold is not None else None)
        keys = table.keys if table is not None else []
        sequence.state = self.keep(
            State(
                sequence.state_id,
                turn.scope,
                sequence.tokens,
                keys,
                sequence.num_computed,
                job=turn.job_id,
                lease=lease,
            )
        )
        for heir in heirs:
            self.heirs.endow(heir, sequence.state)
        if lease is not None and lease.transient and not lease.num_heirs:
            self.kv.leases.end(lease)  # none of them could use it

    def _terms(self, hold: Hold | None) -> dict[str, Any]:
        if hold is None:
            return {"transient": True}
        expires_at = None if hold.seconds is None else self._clock.now() + hold.seconds
        return {"expires_at": expires_at, "value": hold.value}

    # On the way to another engine

    def fork(self, sequence: Sequence, state_id: str, **terms: Any) -> State:
        """A running or waiting sequence as it stands between two steps, with a lease on its KV; it goes on itself."""
        table, turn = sequence.table, sequence.turn
        lease = (
            self.kv.hold(table, sequence.num_computed, **terms) if table is not None and sequence.num_computed else None
        )
        keys = table.keys[:] if table is not None else []
        return State(
            state_id, turn.scope, sequence.tokens[:], keys, sequence.num_computed, job=turn.job_id, lease=lease
        )

    def park(self, sequence: Sequence) -> State:
        """Take a sequence out of the steps; its KV stays under a lease, which may shrink like any other."""
        self._waiting.remove(sequence)
        self._running.pop(sequence.id, None)
        self._stop_loading(sequence)
        sequence.status = Status.PARKED
        state = self.fork(sequence, sequence.state_id, value=inf, transient=True)
        if sequence.table is not None:
            self.kv.commit_tail(sequence.table, sequence.tokens, sequence.num_computed)
            self.kv.clear(sequence.table)
        sequence.num_computed = 0
        return state

    def unpark(self, sequence: Sequence, state: State) -> None:
        """Let a parked sequence go on here, from as much of its KV as is left."""
        turn = sequence.turn
        if state.lease is not None:
            self._settle_expected(turn)  # what it waited to go on from before is not what it goes on from now
            turn.parent, turn.num_shared, turn.consume = state, state.num_tokens, True
        self._expect(turn)
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self._waiting.push(sequence, self._policy.order(sequence.view(), self._clock.now()))


def _known_keys(sequence: Sequence, kv: KVManager) -> list[int]:
    """Chain keys that a continuation's parent has worked out already."""
    turn = sequence.turn
    return turn.parent.keys[: turn.num_shared // kv.block_size] if turn.parent is not None else []


def _num_beams(search: BeamSearch) -> int:
    """Rows that its next step must have, all of them; 0 while its prefix is computed."""
    return search.width if search.has_begun else 0


def _row(sequence: Sequence, table: BlockTable, stop: int) -> Row:
    """Compute up to `stop`; sample, or search, if that is the last token there is."""
    search, length = sequence.search, len(sequence.tokens)
    if search is None:
        sampling = sequence.sampling if stop == length else None
        return Row(sequence.id, sequence.tokens, sequence.num_computed, stop, table.blocks, sampling)
    if search.has_begun:
        first = length + search.num_written
        return Row(sequence.id, search.tokens(), first, stop, table.blocks, None, search.step(length))
    step = search.step(length) if stop == length else None
    return Row(sequence.id, sequence.tokens, sequence.num_computed, stop, table.blocks, None, step)
