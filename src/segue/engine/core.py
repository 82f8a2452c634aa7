"""The engine: one loop, `step() = plan → execute → apply`."""

from __future__ import annotations

import secrets
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from segue.base.clock import Clock, SystemClock
from segue.base.config import EngineConfig
from segue.base.errors import EngineClosed, IntegrityError, InvalidRequest, StepFailed
from segue.base.types import FinishReason, SamplingParams, Scope
from segue.engine.admission import Prompt, as_prompts, as_token_ids, check_options, check_request
from segue.engine.executor import Executor, StepPlan, check_result
from segue.engine.outputs import Completion, Delta, EngineStats, Result
from segue.engine.scheduler import Produced, Scheduler
from segue.engine.sequence import Request
from segue.engine.text import AnswerText, Tokenizer
from segue.kv import KVManager, Lease
from segue.policies import FirstComeFirstServed, Policy


@dataclass(slots=True)
class _Active:
    """A request under way, and what has come of it."""

    request: Request
    result: Result
    texts: list[AnswerText | None]
    unfinished: int  # answers whose last delta is still to come


class EngineCore:
    """Serves requests on any executor: torch on CPU or CUDA, the simulator, or a test's fake.

    Not thread-safe: one thread calls it. `AsyncEngine` gives it that thread.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        vocab_size: int | None = None,
        model_fingerprint: str = "",
        policy: Policy | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.kv = KVManager(config.num_blocks, config.block_size, prefix_caching=config.prefix_caching)
        self._executor = executor
        self._vocab_size = vocab_size if vocab_size is not None else (tokenizer.vocab_size if tokenizer else None)
        self._fingerprint = model_fingerprint
        self._clock = clock or SystemClock()
        self._scheduler = Scheduler(config, self.kv, policy or FirstComeFirstServed(), self._clock)
        self._active: dict[str, _Active] = {}
        self._arrived: list[Delta] = []  # for the caller of step()
        self._mail: dict[str, deque[Delta]] = {}  # for those that generate() and stream() follow themselves
        self._num_steps = self._prompt_tokens = self._reused_tokens = self._generated = 0
        self._closed = False

    # The loop

    def step(self) -> list[Delta]:
        """Run one step if there is work; what came for requests made with `submit` since the last call."""
        self._advance()
        arrived, self._arrived = self._arrived, []
        return arrived

    def _advance(self) -> None:
        plan = self._scheduler.plan()
        if not plan.rows:
            if self._scheduler.num_waiting:
                raise IntegrityError("requests wait, nothing runs, and none can be admitted")
            return
        self._num_steps += 1
        try:
            result = self._executor.execute(plan)
            check_result(plan, result)
        except BaseException as error:
            self._deliver(self._fail(plan, error))
            if not isinstance(error, Exception):
                raise  # an interrupt: the step is undone, and the caller hears of it
            return
        self._deliver(self._publish(self._scheduler.apply(plan, result)))

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._mail.get(delta.request_id, self._arrived).append(delta)

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.num_running or self._scheduler.num_waiting)

    def is_active(self, request_id: str) -> bool:
        return request_id in self._active

    # Requests

    def encode(self, prompt: Prompt) -> array[int]:
        """Token ids of a prompt given as text; ids pass through, checked."""
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequest("prompt", "is empty")
            if self.tokenizer is None:
                raise InvalidRequest("prompt", "this engine has no tokenizer: pass token ids")
            return array("i", self.tokenizer.encode(prompt))
        return as_token_ids(prompt)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        salt: str = "",
        job_id: str | None = None,
        hold: bool = False,
    ) -> str:
        """Queue a request and return its id. A request that could never run is refused here. With `hold`, each
        answer's KV is leased when it ends (`Completion.lease`)."""
        if self._closed:
            raise EngineClosed("the engine is closed")
        params = SamplingParams() if params is None else params
        check_options(params, request_id=request_id, salt=salt, job_id=job_id, hold=hold)
        tokens = self.encode(prompt)
        check_request(tokens, params, self.config, self._vocab_size)
        if request_id is None:
            request_id = new_request_id()
        if request_id in self._active:
            raise InvalidRequest("request_id", f"{request_id!r} is already running")
        request = Request(
            request_id,
            tokens,
            params,
            Scope(salt=salt, model=self._fingerprint),
            secrets.randbits(62) if params.seed is None else params.seed,
            self._clock.now(),
            frozenset(self.tokenizer.eos_ids) if self.tokenizer else frozenset(),
            job_id,
            hold,
        )
        self._scheduler.submit(request)
        completions = [Completion(index) for index in range(params.n)]
        result = Result(request_id, list(tokens), completions, request.arrived_at)
        self._active[request_id] = _Active(request, result, [self._text(params) for _ in completions], params.n)
        self._prompt_tokens += len(tokens)
        return request_id

    def abort(self, request_id: str) -> bool:
        """End a request and free its memory. False if it is not running."""
        active = self._active.get(request_id)
        if active is None:
            return False
        self._scheduler.abort(active.request)
        self._retire(active)
        return True

    def release(self, lease: Lease) -> None:
        """Give up a hold; a second time does nothing."""
        self.kv.drop(lease)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        hold: bool = False,
    ) -> list[Result]:
        """Answer one prompt or many, batched together; results in the order of the prompts."""
        many = as_prompts(prompts)
        each = [params] * len(many) if params is None or isinstance(params, SamplingParams) else params
        if len(each) != len(many):
            raise InvalidRequest("params", f"{len(each)} for {len(many)} prompts")
        results: list[Result] = []
        try:
            for prompt, own in zip(many, each, strict=True):
                results.append(self._follow(self.submit(prompt, own, hold=hold)))
            for result in results:
                while result.finished_at is None:
                    self._advance()
                if result.error is not None:
                    raise result.error
            return results
        except BaseException:
            for completion in (completion for result in results for completion in result.completions):
                if completion.lease is not None:
                    self.release(completion.lease)
            raise
        finally:
            for result in results:
                self._unfollow(result.request_id)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Stream:
        """Answer one prompt as tokens come; see `submit` for the options. Closing the stream frees the request."""
        return Stream(self, self._follow(self.submit(prompt, params, **options)))

    def _follow(self, request_id: str) -> Result:
        self._mail[request_id] = deque()
        return self._active[request_id].result

    def _unfollow(self, request_id: str) -> None:
        if self._mail.pop(request_id, None) is not None:
            self.abort(request_id)

    def _next_delta(self, result: Result) -> Delta | None:
        """The next one of a request that is followed, running the engine as far as needed; None after the last."""
        mail = self._mail.get(result.request_id)
        while mail is not None and not mail and result.finished_at is None:
            self._advance()
        return mail.popleft() if mail else None

    # Operation

    def stats(self) -> EngineStats:
        return EngineStats(
            self._num_steps,
            self._scheduler.num_running,
            self._scheduler.num_waiting,
            self._scheduler.num_preemptions,
            self._prompt_tokens,
            self._reused_tokens,
            self._generated,
            self.kv.usage,
            self.kv.num_leased,
        )

    def forget(self) -> None:
        """Empty the prefix cache; leases and running requests keep theirs."""
        self.kv.forget()

    def check(self) -> None:
        """Raise `IntegrityError` if the KV core broke a promise."""
        self.kv.check()

    def close(self) -> None:
        for request_id in list(self._active):
            self.abort(request_id)
        if not self._closed:
            self._closed = True
            self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside

    def _text(self, params: SamplingParams) -> AnswerText | None:
        if self.tokenizer is None:
            return None
        return AnswerText(self.tokenizer.answer_stream(), params.stop, params.include_stop, params.min_tokens)

    def _publish(self, produced: list[Produced]) -> list[Delta]:
        now = self._clock.now()
        self._generated += len(produced)
        deltas = []
        for sequence, token, logprobs in produced:
            active = self._active[sequence.request.id]
            if active.result.first_token_at is None:
                active.result.first_token_at = now
            text = active.texts[sequence.index]
            piece = self._push(text, token, sequence.finish_reason, sequence.sampling.params) if text else ""
            if text is not None and text.stopped:
                self._scheduler.finish(sequence, FinishReason.STOP)
                sequence.finish_reason = FinishReason.STOP
            if text is not None and sequence.finish_reason is not None:
                piece += text.flush()
            chosen = (logprobs,) if logprobs is not None else ()
            reason = sequence.finish_reason
            delta = Delta(sequence.request.id, sequence.index, (token,), piece, chosen, reason, lease=sequence.lease)
            deltas.append(delta)
            self._record(active, delta)
        return deltas

    def _push(self, text: AnswerText, token: int, reason: FinishReason | None, params: SamplingParams) -> str:
        """A token that ends the answer by being itself (eos, stop token) is not part of its text."""
        hidden = reason is FinishReason.STOP and not params.include_stop
        return "" if hidden else text.push(token)

    def _record(self, active: _Active, delta: Delta) -> None:
        completion = active.result.completions[delta.index]
        completion.token_ids += delta.token_ids
        completion.text += delta.text
        completion.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            sequence = active.request.sequences[delta.index]
            completion.finish_reason = delta.finish_reason
            completion.num_reused = sequence.num_reused or 0
            completion.lease = sequence.lease
            active.unfinished -= 1
            if not active.unfinished:
                self._retire(active)

    def _retire(self, active: _Active) -> None:
        active.result.finished_at = self._clock.now()
        self._reused_tokens += active.request.sequences[0].num_reused or 0
        del self._active[active.request.id]

    def _fail(self, plan: StepPlan, cause: BaseException) -> list[Delta]:
        error = StepFailed(f"the step failed: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        deltas = []
        for sequence in self._scheduler.fail(plan, error):
            request_id = sequence.request.id
            deltas.append(Delta(request_id, sequence.index, (), "", (), FinishReason.ERROR, error))
            if active := self._active.get(request_id):
                active.result.error = error
                self._retire(active)
        return deltas


class Stream:
    """One request's deltas as they come. Ends by itself, or by `close()`, which frees the request."""

    def __init__(self, engine: EngineCore, result: Result) -> None:
        self._engine = engine
        self.result = result

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        delta = self._engine._next_delta(self.result)
        if delta is None:
            self.close()
            raise StopIteration
        if delta.error is not None:
            self.close()
            raise delta.error
        return delta

    def close(self) -> None:
        self._engine._unfollow(self.result.request_id)

    def __del__(self) -> None:
        self.close()


def new_request_id() -> str:
    """An id that no other request has."""
    return f"req-{secrets.token_hex(8)}"
