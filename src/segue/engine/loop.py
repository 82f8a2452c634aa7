"""The engine's loop, `step() = plan → execute → apply`, and the requests it serves."""

from __future__ import annotations

import secrets
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

from segue.base.clock import Clock, SystemClock
from segue.base.config import EngineConfig
from segue.base.errors import (
    DeviceLost,
    EngineClosed,
    IntegrityError,
    InvalidRequest,
    StateError,
    StepFailed,
    UnknownState,
)
from segue.base.types import SamplingParams
from segue.engine.admission import Prompt, as_list
from segue.engine.answers import Answers
from segue.engine.desk import StateDesk
from segue.engine.executor import Executor, Persistent, Pipelined, StepPlan, StepResult, Ticket, check_result
from segue.engine.outputs import Delta, EngineStats, Result
from segue.engine.request import Request, as_request
from segue.engine.scheduler import Scheduler
from segue.engine.sequence import Heir, Turn
from segue.engine.stream import Mailbox, Stream
from segue.engine.text import Tokenizer, decoder
from segue.engine.tiering import OpenSlow, open_tiers
from segue.engine.turns import TurnMaker, answer_names
from segue.kv import KVManager
from segue.policies import Policy, make_policy
from segue.state import Progress, State

_TIER_SECONDS = 0.002  # to wait for a slow tier when there is nothing else to do; requests may come


class _Flying(NamedTuple):
    """A step that has begun; `since` then the device had nothing else to do."""

    plan: StepPlan
    num_tokens: int
    ticket: Ticket
    since: float


class EngineLoop:
    """Requests in, deltas out, on any executor: torch on CPU or CUDA, the simulator, or a test's fake."""

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        vocab_size: int | None = None,
        model_fingerprint: str = "",
        state_identity: str | None = None,
        policy: Policy | str | None = None,
        clock: Clock | None = None,
        tiers: Sequence[str] = (),
        open_slow: OpenSlow | None = None,
    ) -> None:
        """`tiers`: where KV goes besides the device, such as "host=4GiB" and "disk=/path,20GiB"; `open_slow` opens those that
        take their time, if not as files and connections."""
        self.config = config
        self.policy = make_policy(policy)
        self.tokenizer = tokenizer
        self.kv = KVManager(config.num_blocks, config.block_size, prefix_caching=config.prefix_caching)
        self._executor = executor
        if vocab_size is None and tokenizer is not None:
            vocab_size = tokenizer.vocab_size
        self._clock = clock or SystemClock()
        self.kv.leases.default_quota = config.lease_quota
        self._answers = Answers(tokenizer, self._clock)
        decode = decoder(tokenizer) if tokenizer is not None else None
        self._tiers = open_tiers(tiers, self.kv, executor, self._clock, open_slow)
        self._scheduler = Scheduler(
            config,
            self.kv,
            self.policy,
            self._clock,
            decode=decode,
            tiers=self._tiers,
            can_finish=executor.can_finish if isinstance(executor, Persistent) else None,
        )
        self._desk = StateDesk(
            self._scheduler,
            executor,
            self._clock,
            identity=model_fingerprint if state_identity is None else state_identity,
            vocab_size=vocab_size,
        )
        self._turns = TurnMaker(
            self._scheduler,
            self._desk,
            self._answers,
            self._clock,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            fingerprint=model_fingerprint,
        )
        self._arrived: list[Delta] = []  # for the caller of step()
        self._mail: dict[str, Mailbox] = {}  # of those that have a stream
        self._abandoned: deque[tuple[str, Mailbox]] = deque()
        self._num_steps = 0
        self._step_seconds: float | None = None  # of the last step, if there was one
        self.watch: Callable[[StepPlan], None] | None = None  # told of each plan before it is carried out
        self._closed = False
        self._pipelined = executor if isinstance(executor, Pipelined) else None
        self._flying: _Flying | None = None  # a step under way

    # The loop

    def step(self) -> list[Delta]:
        """Run one step if there is work; what came for requests made with `submit` since the last call."""
        self.advance()
        arrived, self._arrived = self._arrived, []
        return arrived

    def advance(self) -> bool:
        """One step. False if there is nothing to do."""
        self._end_abandoned()
        moved = self._tiers.work(self._step_seconds) if self._tiers is not None else False
        if self._flying is None:
            plan = self._scheduler.plan()
            if not plan.rows:
                return self._rest(moved=moved)
            self._flying = self._begin(plan, None)
            if self._flying is None:
                self._take(plan, self._scheduler.num_planned, partial(self._executor.execute, plan), self._clock.now())
                return True
        flying, self._flying = self._flying, None
        refused = self._begin_next(flying)
        num_tokens = self._scheduler.num_planned
        try:
            self._take(flying.plan, flying.num_tokens, partial(self._land, flying), flying.since)
        except BaseException as error:
            if refused is not None:
                self._deliver(self._fail(refused, error))
            raise
        if self._flying is not None:
            self._flying = self._flying._replace(since=self._clock.now())
        elif refused is not None:
            self._take(refused, num_tokens, partial(self._executor.execute, refused), self._clock.now())
        return True

    def _begin_next(self, flying: _Flying) -> StepPlan | None:
        """Let the step after one that is under way begin, if it can be planned by now; what was planned, but cannot begin yet."""
        if isinstance(flying.ticket, BaseException):
            return None  # nothing can be built on a step that has failed already
        if (ahead := self._scheduler.plan_ahead(flying.plan)) is not None:
            self._flying = self._begin(ahead, flying.ticket)
        elif (beside := self._scheduler.plan_beside(flying.plan)) is not None:
            self._flying = self._begin(beside, None)
            return beside if self._flying is None else None
        return None

    def _rest(self, *, moved: bool) -> bool:
        """There is nothing to compute."""
        self._step_seconds = None
        if self._tiers is not None and self._tiers.has_work:
            if not moved:
                self._tiers.wait(_TIER_SECONDS)
            return True
        if self._scheduler.num_waiting:
            raise IntegrityError("requests wait, nothing runs, and none can be admitted")
        return moved

    def _begin(self, plan: StepPlan, after: Ticket | None) -> _Flying | None:
        """Let a step begin whose end is not waited for, if it can be. If that fails, so does the step when it lands."""
        if self._pipelined is None:
            return None
        try:
            ticket = self._pipelined.launch(plan, after)
        except BaseException as error:
            ticket = error
        return _Flying(plan, self._scheduler.num_planned, ticket, self._clock.now()) if ticket is not None else None

    def _land(self, flying: _Flying) -> StepResult:
        assert self._pipelined is not None
        if isinstance(flying.ticket, BaseException):
            raise flying.ticket
        return self._pipelined.land(flying.ticket)

    def _take(self, plan: StepPlan, num_tokens: int, run: Callable[[], StepResult], began: float) -> None:
        """Carry a step out, or wait for its end, and take over what it gave."""
        self._num_steps += 1
        if self.watch is not None:
            self.watch(plan)
        try:
            result = run()
            check_result(plan, result)
        except BaseException as error:
            self._deliver(self._fail(plan, error))
            self._tell_orphans()
            if not isinstance(error, Exception) or isinstance(error, DeviceLost):
                raise  # an interrupt, or the end: the step is undone, and the caller hears of it
            return
        self._step_seconds = self._clock.now() - began
        self._scheduler.jobs.gauge.step(self._step_seconds, num_tokens, len(plan.rows))
        produced = self._scheduler.apply(plan, result)
        self._deliver(self._answers.publish(produced, self._scheduler.finish))
        if found := self._scheduler.take_found():
            self._deliver(self._answers.conclude(found))
        self._tell_orphans()
        if self._tiers is not None and not self._scheduler.num_running:
            self._tiers.rest()

    def _fail(self, plan: StepPlan, cause: BaseException) -> list[Delta]:
        error = StepFailed(f"the step failed: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        ended: dict[str, list[int]] = {}
        begun = self._flying.plan if self._flying is not None else None
        for sequence in self._scheduler.fail(plan, error, begun):
            ended.setdefault(sequence.turn.id, []).append(sequence.index)
        deltas: list[Delta] = []
        for request_id, indices in ended.items():
            if active := self._answers.get(request_id):
                deltas += self._answers.end(active, indices, error)
        return deltas

    def _deliver(self, deltas: list[Delta]) -> None:
        if not self._mail:
            self._arrived += deltas
            return
        for delta in deltas:
            mailbox = self._mail.get(delta.request_id)
            (self._arrived if mailbox is None else mailbox.deltas).append(delta)
        for delta in deltas:
            if delta.finish_reason is not None and delta.request_id not in self._answers:
                self._mail.pop(delta.request_id, None)  # its stream has it; the id may be used again

    def _tell_orphans(self) -> None:
        """Heirs whose parent left them nothing end with an error."""
        for turn, error in self._scheduler.heirs.take_orphans():
            active = self._answers.get(turn.id)
            if active is not None and active.turn is turn:
                self._deliver(self._answers.end(active, range(turn.params.n), error))

    @property
    def has_work(self) -> bool:
        """Something to compute, or to hand out."""
        self._end_abandoned()
        scheduler = self._scheduler
        if (
            self._flying is not None
            or scheduler.num_running
            or scheduler.num_waiting
            or scheduler.num_loading
            or self._arrived
        ):
            return True
        return self._tiers is not None and self._tiers.has_work

    def is_active(self, request_id: str) -> bool:
        return request_id in self._answers

    # Requests

    def encode(self, prompt: Prompt) -> array[int]:
        """Token ids of a prompt given as text; ids pass through, checked."""
        if isinstance(prompt, str) and not prompt:
            raise InvalidRequest("prompt", "is empty")
        return self._turns.encode("prompt", prompt, add_special=True)

    def encode_suffix(self, suffix: Prompt) -> array[int]:
        """Token ids of what follows a parent: nothing is put before it, and it may be empty."""
        return self._turns.encode("suffix", suffix, add_special=False)

    def submit(self, request: Request | Prompt, params: SamplingParams | None = None, **options: Any) -> str:
        """Queue a request and return its id. `submit(prompt, params, hold=True, …)` stands for
        `submit(Request(prompt, params, hold=True, …))`. One that could never run is refused here."""
        self._require_open()
        self._end_abandoned()
        request = as_request(request, params, options)
        request_id = new_request_id() if request.request_id is None else request.request_id
        self._turns.check_free(request_id, request.salt, request.params.n)
        if request.parent is None:
            self._start(self._turns.first(request, request_id))
            return request_id
        child = self._turns.continuation(request, request_id)
        if isinstance(child, Heir):
            self._open(child.turn)
            self._scheduler.heirs.wait(child)
        else:
            self._start(child)
        return request_id

    def _start(self, turn: Turn, before: Progress | None = None) -> None:
        self._open(turn, before)
        self._scheduler.submit(turn)

    def _open(self, turn: Turn, before: Progress | None = None) -> None:
        """From here on the id is the new request's: a state that had it is gone, however the request ends."""
        for name in answer_names(turn.id, turn.params.n):
            self._desk.drop(name)
        self._answers.open(turn, before)

    def abort(self, request_id: str) -> bool:
        """End a request and free its memory. False if it is not running."""
        active = self._answers.get(request_id)
        if active is None:
            return False
        if active.export is not None:
            active.export.drop()
        self._scheduler.abort(active.turn)
        self._answers.retire(active)
        self._mail.pop(request_id, None)
        self._tell_orphans()
        return True

    def generate(
        self,
        prompts: Request | Prompt | Iterable[Request | Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Result]:
        """Answer one prompt or many, batched together; results in the order of the prompts. For the options see
        `Request`."""
        many = [prompts] if isinstance(prompts, Request) else as_list(prompts)
        each = [params] * len(many) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise InvalidRequest("params", f"{len(each)} for {len(many)} prompts")
        streams: list[Stream] = []
        try:
            for prompt, own in zip(many, each, strict=True):
                streams.append(self.stream(prompt, own, **options))
            for stream in streams:
                while stream.result.finished_at is None:
                    self.advance_for(stream.result.request_id)
                if stream.result.error is not None:
                    raise stream.result.error
            return [stream.result for stream in streams]
        except BaseException:
            for completion in (completion for stream in streams for completion in stream.result.completions):
                if completion.state is not None:
                    self._desk.release(completion.state)
            raise
        finally:
            for stream in streams:
                stream.close()

    def continue_(
        self, parent: State | str, suffix: Prompt = (), params: SamplingParams | None = None, **options: Any
    ) -> Result:
        """Go on from a state, or from a request by its id; see `Request` for the options."""
        return self.generate(Request(params=params or SamplingParams(), parent=parent, suffix=suffix, **options))[0]

    def stream(self, request: Request | Prompt, params: SamplingParams | None = None, **options: Any) -> Stream:
        """Answer one request as tokens come; see `submit`. Closing the stream frees the request."""
        return self.follow(self.submit(request, params, **options))

    def follow(self, request_id: str) -> Stream:
        """The stream of a request that is under way: what comes from now on."""
        active = self._answers.get(request_id)
        if active is None:
            raise UnknownState(f"no request {request_id!r} is running")
        if request_id in self._mail:
            raise StateError(f"{request_id!r} has a reader already")
        self._mail[request_id] = Mailbox()
        return Stream(self, active.result, self._mail[request_id])

    def has_reader(self, request_id: str) -> bool:
        """Whether a stream is open on it; if not, its deltas go to the caller of `step`."""
        return request_id in self._mail

    def advance_for(self, request_id: str) -> None:
        """A step that somebody who waits for this request needs."""
        if not self.advance():
            raise StateError(f"{request_id!r} stands still: it, or its parent, is on its way to another engine")

    def abandon(self, request_id: str, mailbox: Mailbox) -> None:
        """A stream was lost, perhaps in the middle of a step, perhaps in another thread: unfollow it when there is time."""
        self._abandoned.append((request_id, mailbox))

    def _end_abandoned(self) -> None:
        while self._abandoned:
            self.unfollow(*self._abandoned.popleft())

    def unfollow(self, request_id: str, mailbox: Mailbox) -> None:
        """A stream was closed: its request ends, if it is still this stream's."""
        mailbox.close()
        if self._mail.get(request_id) is mailbox:
            del self._mail[request_id]
            self.abort(request_id)

    def now(self) -> float:
        """The engine's time, in seconds."""
        return self._clock.now()

    # Operation

    def stats(self) -> EngineStats:
        self._end_abandoned()
        self.expire()
        reuse = self._answers.reuse
        return EngineStats(
            self._num_steps,
            self._scheduler.num_running,
            self._scheduler.num_waiting,
            self._scheduler.num_preemptions,
            self._answers.num_prompt_tokens,
            reuse.inherited,
            reuse.held,
            reuse.recomputed,
            self._answers.num_generated,
            self.kv.usage,
            self.kv.leases.num_blocks,
            len(self._desk.ledger),
            reuse.loaded,
            self._scheduler.num_loading,
        )

    def expire(self) -> float | None:
        """End the leases whose time is over; how many seconds until the next one's is, if any has a limit. Steps do this
        by themselves: it is for an engine that has nothing to do."""
        now = self._clock.now()
        upcoming = self._scheduler.expire(now)
        return None if upcoming is None else max(upcoming - now, 0.0)

    def forget(self, tenant: str | None = None) -> None:
        """Empty the prefix cache and every other tier, or one tenant's part of them; leases and running requests keep theirs."""
        self.forget_memory(tenant)
        self.forget_stored(tenant)

    def forget_memory(self, tenant: str | None = None) -> dict[str, int]:
        """Of the device and the host alone; how many blocks the host had."""
        self.kv.forget(tenant)
        return self._tiers.reset_host(tenant) if self._tiers is not None else {}

    def forget_stored(self, tenant: str | None = None) -> dict[str, int]:
        """Of slow tiers alone. It may take long, and any thread may call it."""
        return self._tiers.reset_slow(tenant) if self._tiers is not None else {}

    def tiers(self) -> list[dict[str, Any]]:
        """What is in the other tiers, and how they have fared: a row for each."""
        return self._tiers.info() if self._tiers is not None else []

    def check(self) -> None:
        """Raise `IntegrityError` if the KV core broke a promise."""
        self.kv.check()

    def close(self) -> None:
        for request_id in list(self._answers):
            self.abort(request_id)
        if not self._closed:
            self._closed = True
            if self._tiers is not None:
                self._tiers.close()
            self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed")


def new_request_id() -> str:
    """An id that no other request has."""
    return f"req-{secrets.token_hex(8)}"
