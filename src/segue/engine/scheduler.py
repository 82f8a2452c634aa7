"""Decides what each step computes. `plan` only reserves; `apply` and `fail` are what changes sequences after a step."""

from __future__ import annotations

from typing import NamedTuple

from segue.base.clock import Clock
from segue.base.config import EngineConfig
from segue.base.types import FinishReason
from segue.engine.executor import Row, StepPlan, StepResult, TokenLogprobs
from segue.engine.sequence import Request, Sequence, Status
from segue.engine.waiting import WaitingQueue
from segue.kv import BlockTable, Copy, KVManager, Reservation
from segue.policies import Policy


class Produced(NamedTuple):
    """A token that a step gave a sequence."""

    sequence: Sequence
    token: int
    logprobs: TokenLogprobs | None


class Scheduler:
    """There are no phases: each step lets every sequence's `num_computed` catch up with its tokens, within a budget.

    Prefill in chunks, prefix hits, forks and resuming after preemption are all this one rule.
    """

    def __init__(self, config: EngineConfig, kv: KVManager, policy: Policy, clock: Clock) -> None:
        self.config = config
        self.kv = kv
        self.num_preemptions = 0
        self._policy = policy
        self._clock = clock
        self._waiting = WaitingQueue()
        self._running: dict[int, Sequence] = {}  # in order of admission
        self._next_id = 0
        self._now = clock.now()  # one time for all of a plan's decisions

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, request: Request) -> None:
        """Queue a request that was found to fit. Its first answer computes the prompt, the others share it."""
        params = request.params
        limit = self.config.max_sequence_len
        if params.max_tokens is not None:
            limit = min(limit, len(request.prompt) + params.max_tokens)
        for index in range(params.n):
            self._next_id += 1
            request.sequences.append(Sequence(self._next_id, index, request, limit))
        self._wait(request.sequences[0])

    # Before a step

    def plan(self) -> StepPlan:
        """Decide the next step. It reserves, which `fail` undoes; it may preempt and take back leases, which stays."""
        self._now = self._clock.now()
        rows: dict[int, Row] = {}
        copies: dict[int, Copy] = {}
        preempted_before = self.num_preemptions
        budget = self._plan_running(rows, copies)
        if self.num_preemptions == preempted_before or not rows:
            self._plan_waiting(rows, copies, budget)
        return StepPlan(list(rows.values()), list(copies.values()))

    def _plan_running(self, rows: dict[int, Row], copies: dict[int, Copy]) -> int:
        """Every running sequence gets at least one token, so a long prompt never stalls the others. Returns what is
        left of the budget."""
        running, extend, now = self._running, self.kv.extend, self._now
        budget = self.config.max_step_tokens
        behind = len(running)
        for sequence in list(running.values()):
            behind -= 1
            table = sequence.table
            if table is None or sequence.id not in running:
                continue  # preempted a moment ago, by one in front
            start = sequence.num_computed
            stop = min(len(sequence.tokens), start + budget - behind)
            reservation = extend(table, start, stop, now)
            while reservation is None and self._preempt_for(sequence, rows, copies):
                reservation = extend(table, start, stop, now)
            if reservation is None:
                continue
            rows[sequence.id] = _row(sequence, table, stop)
            if reservation.copy:
                copies[sequence.id] = reservation.copy
            budget -= stop - start
        return budget

    def _preempt_for(self, sequence: Sequence, rows: dict[int, Row], copies: dict[int, Copy]) -> bool:
        """Preempt the policy's victim. False when that was `sequence` itself."""
        victim = max(self._running.values(), key=lambda running: self._policy.victim(running.view(), self._now))
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
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._wait(sequence)

    def _plan_waiting(self, rows: dict[int, Row], copies: dict[int, Copy], budget: int) -> None:
        """Admit in the policy's order, and nobody past one that does not fit: a large request is not starved."""
        while budget > 0 and len(self._running) < self.config.max_running:
            sequence = self._waiting.peek()
            if sequence is None:
                return
            if sequence.table is None:
                sequence.table = self.kv.open(sequence.tokens, sequence.request.scope)
            reservation = self._seat(sequence, sequence.table)
            if reservation is None:
                return
            stop = min(len(sequence.tokens), sequence.num_computed + budget)
            rows[sequence.id] = _row(sequence, sequence.table, stop)
            if reservation.copy:
                copies[sequence.id] = reservation.copy
            budget -= stop - sequence.num_computed

    def _seat(self, sequence: Sequence, table: BlockTable) -> Reservation | None:
        """Give a waiting sequence blocks for all its tokens, reusing what is there, and let it run. None, and no
        change, if there is no room for it beside the running ones, each of which may need a block before long."""
        match = self.kv.match(table, sequence.tokens)
        reservation = self.kv.admit(table, match, len(sequence.tokens), headroom=len(self._running), now=self._now)
        if reservation is None:
            return None
        self._waiting.remove(sequence)
        self._running[sequence.id] = sequence
        sequence.status = Status.RUNNING
        sequence.num_computed = reservation.num_reused
        if sequence.num_reused is None:
            sequence.num_reused = reservation.num_reused
        return reservation

    # After a step

    def apply(self, plan: StepPlan, result: StepResult) -> list[Produced]:
        """Take over what a step computed: KV committed, tokens appended, sequences ended."""
        for copy in plan.copies:
            self.kv.settle(copy)
        produced: list[Produced] = []
        running, commit, size = self._running, self.kv.commit, self.kv.block_size
        logprobs, sampled = result.logprobs, 0
        for sequence_id, tokens, _, stop, _, sampling in plan.rows:
            sequence = running[sequence_id]
            sequence.num_computed = stop
            table = sequence.table
            if table is not None and stop // size > table.num_committed:
                commit(table, tokens, stop)
            if sampling is None:
                continue
            token = result.tokens[sampled]
            tokens.append(token)
            produced.append(Produced(sequence, token, logprobs.get(sampled) if logprobs else None))
            sampled += 1
            length = len(tokens)
            if length == sequence.num_prompt + 1 and sequence.index == 0:
                self._wake_siblings(sequence)
            if (length >= sequence.limit or token in sampling.stop_ids) and (reason := sequence.stop_reason(token)):
                self.finish(sequence, reason)
        return produced

    def _wake_siblings(self, first: Sequence) -> None:
        """The prompt is computed: the request's other answers share all of it but the last token, which each computes
        for itself to sample from. Those beyond `max_running` queue, and find the prompt in the index."""
        assert first.table is not None
        shared = first.num_prompt - 1
        for sequence in first.request.sequences[1:]:
            if len(self._running) >= self.config.max_running:
                self._wait(sequence)
                continue
            sequence.table = self.kv.fork(first.table, shared)
            sequence.num_computed = sequence.num_reused = shared
            sequence.status = Status.RUNNING
            self._running[sequence.id] = sequence

    def fail(self, plan: StepPlan, error: Exception) -> list[Sequence]:
        """A step raised: undo its reservations and end its requests, and no others; the sequences this ended. What
        earlier steps computed stays in the index."""
        for copy in plan.copies:
            self.kv.settle(copy)
        requests = dict.fromkeys(self._running[row.sequence_id].request for row in plan.rows)
        ended = [seq for request in requests for seq in request.sequences if seq.status is not Status.FINISHED]
        for sequence in ended:
            self.finish(sequence, FinishReason.ERROR, error)
        return ended

    def abort(self, request: Request) -> None:
        for sequence in request.sequences:
            self.finish(sequence, FinishReason.ABORT)

    def finish(self, sequence: Sequence, reason: FinishReason, error: Exception | None = None) -> None:
        """End a sequence between steps, whatever it was doing; a second time does nothing."""
        if sequence.status is Status.FINISHED:
            return
        self._waiting.remove(sequence)
        self._running.pop(sequence.id, None)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.error = error
        if sequence.table is None:
            return
        if error is None:
            self.kv.commit_tail(sequence.table, sequence.tokens, sequence.num_computed)
        if sequence.request.hold and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._hold(sequence, sequence.table)
        self.kv.close(sequence.table)

    def _hold(self, sequence: Sequence, table: BlockTable) -> None:
        """n tokens, KV for the `num_computed` of them that were fed: the last sampled one never was."""
        job = sequence.request.job_id
        sequence.lease = self.kv.hold(table, sequence.tokens, sequence.num_computed, job=job)

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self._waiting.push(sequence, self._policy.order(sequence.view(), self._clock.now()))


def _row(sequence: Sequence, table: BlockTable, stop: int) -> Row:
    """Compute up to `stop`; sample if that is the last token there is."""
    sampling = sequence.sampling if stop == len(sequence.tokens) else None
    return Row(sequence.id, sequence.tokens, sequence.num_computed, stop, table.blocks, sampling)
