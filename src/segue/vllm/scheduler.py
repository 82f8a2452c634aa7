"""The scheduler that vLLM is given: its own, with leases over its blocks, continuations, and a policy's order."""

from __future__ import annotations

import logging
import time
from array import array
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VLLMAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VLLMScheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine import FinishReason as VLLMFinishReason
from vllm.v1.request import Request, RequestStatus

from segue.base.clock import Clock, SystemClock
from segue.base.errors import InvalidRequest, ParentFailed, RequestTooLong, SegueError, StateError, UnknownState
from segue.base.types import FinishReason, Scope
from segue.engine.holds import JobHolds
from segue.engine.jobs import JobDesk
from segue.kv import Lease
from segue.policies import make_policy
from segue.state import State, StateLedger
from segue.vllm.blocks import VLLMBlocks
from segue.vllm.fields import Fields, read_fields
from segue.vllm.hooks import in_engine
from segue.vllm.names import Names, is_conversation, names_of, short_salt
from segue.vllm.options import Options
from segue.vllm.queue import PolicyQueue, Postponed
from segue.vllm.room import Room
from segue.vllm.tokens import decoder
from segue.vllm.turns import Asked
from segue.vllm.versions import check_config, check_version, keeps_postponed, num_waiting

_log = logging.getLogger(__name__)
_ENDS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_REPETITION: FinishReason.STOP,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
}
_ENDED_WELL = (FinishReason.STOP, FinishReason.LENGTH)

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Base
else:
    _Base = object


class _Continuing(_Base):
    """What is added, before vLLM's own class.

    Only these of its parts are touched: the queues of those that wait, two methods of the KV cache manager (what is found in the
    cache, what is done when a block is not to be had), and the moments at which a request comes, first runs and ends.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        check_version()
        check_config(vllm_config, kv_cache_config)
        config, options = vllm_config, Options.of(vllm_config)
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        in_engine()
        self.clock: Clock = SystemClock()
        self.segue_policy = make_policy(options.policy)
        group = self.kv_cache_config.kv_cache_groups[0]
        self.blocks = VLLMBlocks(self.kv_cache_manager, group.kv_cache_spec.block_size)
        decode = decoder(config) if self.segue_policy.reads_calls else None
        # `Asked` has all that it asks of a sequence.
        self.jobs: Any = JobDesk(self.segue_policy, cast(Any, self.blocks), self.clock, self._load, decode)
        self.holds = JobHolds()
        self.states = StateLedger(options.max_states, options.max_state_bytes)
        self._asked: dict[str, Asked] = {}
        self._names = Names(8 * options.max_states, lambda request_id: self.states.get(request_id) is not None)
        self._refused: dict[str, tuple[Request, SegueError]] = {}  # not told yet
        self._rank = int(config.parallel_config.data_parallel_index)  # the rank is 0 in engines that share no experts
        self._count = 0
        self._planned_at = 0.0
        self._has_connector = self.connector is not None
        self.num_inherited = self.num_recomputed = 0
        self.waiting = PolicyQueue(self._asked_of, self._order, self.segue_policy.fair_every)
        if keeps_postponed(self):
            self.skipped_waiting = Postponed()
        self._find_cached = self.kv_cache_manager.get_computed_blocks
        self.kv_cache_manager.get_computed_blocks = self._find
        self._num_special = 0  # requests under way that ask for more than an answer
        self._room = Room(self, self.blocks, self.segue_policy, self.jobs, self._asked_of)

    # A request comes

    def add_request(self, request: Request) -> None:
        if request.request_id in self.requests or request.sampling_params is None or request.resumable:
            super().add_request(request)
            return
        try:
            asked = self._ask(request, read_fields(request.sampling_params.extra_args))
            waits = asked.fields.continuation_of is not None and self._inherit(asked)
        except SegueError as error:
            self._refuse(request, error)
            return
        except Exception as error:  # one request's misfortune is not to end the engine
            _log.exception("%s could not be taken in", request.request_id)
            self._refuse(request, SegueError(f"the scheduler failed: {error!r:.200}"))
            return
        self._asked[request.request_id] = asked
        self._num_special += asked.is_special
        self._names.begin(asked)
        if waits:
            self.requests[request.request_id] = request  # so that it can be aborted
        else:
            self._arrive(asked)

    def _arrive(self, asked: Asked) -> None:
        request, fields, turn = asked.request, asked.fields, asked.turn
        self.jobs.arrive(turn)
        if fields.job_id is not None:
            self.holds.begin(request.request_id, turn.scope.salt, fields.job_id, is_last=fields.is_last_step)
        super().add_request(request)

    def _ask(self, request: Request, fields: Fields) -> Asked:
        self._count += 1
        adapter = request.lora_request.lora_name if request.lora_request is not None else ""
        scope = Scope(salt=short_salt(request.cache_salt or ""), adapter=adapter)
        if fields.state_id is not None and self._names.running(scope.salt, fields.state_id) is not None:
            raise InvalidRequest("state_id", f"{fields.state_id!r} is in use: a request with this id has not ended")
        return Asked(self._count, request, fields, scope, self.clock.now())

    def _asked_of(self, request: Request) -> Asked:
        """Sessions and the like come here without having been asked anything."""
        asked = self._asked.get(request.request_id)
        if asked is None:
            asked = self._asked[request.request_id] = self._ask(request, Fields())
            self._num_special += asked.is_special
        return asked

    def _state(self, name: str, salt: str) -> State:
        """Whatever had this name last; an error that says why there is none."""
        own = self._names.ended(salt, name)
        if own is None:
            raise UnknownState(f"no state or request {name!r:.100} is known")
        try:
            return self.states.find(own, salt)
        except StateError as error:
            raise type(error)(str(error).replace(repr(own), repr(name))) from None

    # Continuations

    def _inherit(self, asked: Asked) -> bool:
        """Put the parent's tokens before a request's own. True if the parent has not ended: then that has to wait."""
        name = asked.fields.continuation_of
        assert name is not None
        salt = asked.turn.scope.salt
        running = self._asked.get(self._names.running(salt, name) or "")
        if running is not None:
            _check_adapter(name, running.turn.scope, asked.turn.scope)
            asked.waits_for = running
            running.heirs.append(asked)
            return True
        parent = self._state(name, salt)
        _check_adapter(name, parent.scope, asked.turn.scope)
        self._extend(asked, parent)
        return False

    def _extend(self, asked: Asked, parent: State) -> None:
        """A chat's prompt has the parent's tokens already, unless its template writes them differently."""
        request, is_whole = asked.request, asked.fields.whole_prompt
        if is_whole is None:
            is_whole = is_conversation(request.request_id)
        own: list[int] = list(request.prompt_token_ids or ())
        if not _is_text(request):
            if not is_whole:
                raise InvalidRequest("continuation_of", "a suffix is text or token ids")
            asked.why_not = "the prompt is not text alone"
            return
        if request.sampling_params.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs", "a continuation's prompt is not computed again, so there are none")
        known = parent.tokens.tolist()
        if is_whole and own[: len(known)] != known:
            asked.why_not = "the prompt does not begin with the parent's tokens"
            return
        tokens = own if is_whole else known + own
        if len(tokens) >= self.max_model_len:
            raise RequestTooLong(
                "continuation_of",
                f"{len(known)} tokens and {len(own)} more leave no room: {self.max_model_len} is the model's limit",
            )
        request.prompt_token_ids = tokens
        request.num_prompt_tokens = len(tokens)
        request._all_token_ids[:] = tokens
        request.block_hashes[:] = parent.keys
        request.update_block_hashes()
        asked.parent, asked.num_shared = parent, len(known)
        if parent.lease is not None and parent.lease in self.blocks.leases:
            asked.expects = parent.lease
            self.blocks.leases.await_heir(parent.lease)

    def _endow(self, heir: Asked, parent: State) -> None:
        """The parent has ended: now the heir can wait like any other."""
        heir.waits_for = None
        del self.requests[heir.request.request_id]
        try:
            self._extend(heir, parent)
        except SegueError as error:
            self._disown(heir, error)
            return
        self._arrive(heir)

    def _disown(self, heir: Asked, error: SegueError) -> None:
        """It has nothing to continue; nor have those that wait for it, and so on."""
        self._refuse(heir.request, error)
        pending = [heir]
        while pending:
            failed = pending.pop()
            failed.finish_reason = FinishReason.ERROR
            for waiting in self._fail(failed):
                del self.requests[waiting.request.request_id]
                self._refuse(waiting.request, ParentFailed(f"{names_of(failed)[-1]!r} was refused"))
                pending.append(waiting)

    def _leave_nothing(self, asked: Asked, why: str) -> None:
        """To continue: who waited for it waited in vain."""
        for heir in self._fail(asked, why):
            del self.requests[heir.request.request_id]
            self._disown(heir, ParentFailed(f"{names_of(asked)[-1]!r} {why}"))

    def _fail(self, asked: Asked, why: str = "was aborted or has failed") -> list[Asked]:
        """It leaves nothing; who waited for it."""
        self._forget(asked)
        self.states.note_failure(asked.request.request_id, asked.turn.scope, why)
        heirs, asked.heirs = asked.heirs, []
        for heir in heirs:
            heir.waits_for = None
        return heirs

    # Into a step

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        leases = self.blocks.leases
        if leases or self.jobs.next_review() is not None:
            now = self.clock.now()
            leases.expire(now)
            self.jobs.review(now)
        self._room.want(bool(leases) or self._num_special > 0)
        output = super().schedule(*args, **kwargs)
        for new in output.scheduled_new_reqs:
            if (asked := self._asked.get(new.req_id)) is not None:
                self._start(asked, new.num_computed_tokens)
        for name in output.scheduled_cached_reqs.resumed_req_ids:
            if (asked := self._asked.get(name)) is not None:
                asked.blocked_at = None
        self._planned_at = time.monotonic()
        return output

    def _start(self, asked: Asked, num_reused: int) -> None:
        asked.blocked_at = None
        if asked.reuse is not None:
            return
        asked.starts(num_reused)
        assert asked.reuse is not None
        self.num_inherited += asked.reuse.inherited
        self.num_recomputed += asked.reuse.recomputed
        self._settle(asked)
        self.jobs.start(asked.turn, asked)

    def _settle(self, asked: Asked) -> None:
        if asked.expects is not None:
            self.blocks.leases.heir_settled(asked.expects)
            asked.expects = None

    def _find(self, request: Request) -> Any:
        """KV that is there: in the prefix cache, or, with the block that its parent did not fill, under the parent's lease. vLLM
        copies such a block before it is written to."""
        found = self._find_cached(request)
        asked = self._asked.get(request.request_id)
        if asked is None or asked.parent is None or asked.parent.lease is None or request.skip_reading_prefix_cache:
            return found
        held = min(asked.held_tokens(), request.num_tokens - 1)
        fills_all = (
            self.blocks.blocks_for(request.num_tokens) >= self.blocks.num_blocks - 1
        )  # there is no room for a copy
        if self._has_connector or fills_all:  # a connector is told whole blocks
            held -= held % self.blocks.block_size
        if held <= found[1]:
            return found
        return (KVCacheBlocks((self.blocks.blocks_of(asked.parent.lease, held),)), held, *found[2:])

    def _order(self, asked: Asked) -> tuple[Any, ...]:
        return self.segue_policy.order(asked.view(), self.clock.now())

    def _load(self) -> tuple[int, int]:
        return len(self.waiting), len(self.running)

    # A request ends

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if request.request_id not in self.requests:
            self._refused.pop(request.request_id, None)
            return None, None  # aborted with its parent, which had to go first
        asked = self._asked.get(request.request_id)
        if asked is None:
            return super()._free_request(request, *args, **kwargs)
        asked.finish_reason = _ENDS.get(request.status, FinishReason.ERROR)
        state = None
        if asked.finish_reason in _ENDED_WELL and _is_text(request):
            self._forget(asked)
            state = self._leave_state(asked)
        elif asked.finish_reason in _ENDED_WELL:
            self._leave_no_state(asked)
        else:
            is_kept = (
                asked.finish_reason is FinishReason.ABORT and request.num_output_tokens and not asked.fields.is_plain
            )
            self._leave_nothing(asked, "was aborted or has failed")
            if is_kept and not asked.fields.is_last_step:
                self._keep(asked)
        self._end_holds(asked, state)
        self.jobs.end(asked)
        params, *others = super()._free_request(request, *args, **kwargs)
        if not asked.fields.is_plain:
            params = {**(params or {}), "segue": self._report(asked, state)}
        return params, *others

    def _end_holds(self, asked: Asked, state: State | None) -> None:
        """A job's next turn has what the one before held for it; with its last step, all is given back."""
        if state is None and not asked.fields.is_last_step:
            self.holds.forget(asked.request.request_id)
            return
        held = [state.id] if state is not None and asked.turn.hold is not None and state.num_held else []
        salt, released = self.holds.end(asked.request.request_id, held)
        for name in released:
            earlier = self.states.get(name)
            if earlier is not None and earlier.scope.salt == salt and earlier.lease is not None:
                self.blocks.leases.end(earlier.lease)

    def _forget(self, asked: Asked) -> None:
        self._settle(asked)
        del self._asked[asked.request.request_id]
        self._num_special -= asked.is_special
        self._names.end(asked)
        if asked.waits_for is not None:
            asked.waits_for.heirs.remove(asked)
            asked.waits_for = None

    def _leave_state(self, asked: Asked) -> State:
        request, turn = asked.request, asked.turn
        lease = self._keep(asked)
        keys: Any = request.block_hashes[: asked.num_computed // self.blocks.block_size]
        tokens = array("i", asked.tokens)
        state = State(request.request_id, turn.scope, tokens, keys, asked.num_computed, job=turn.job_id, lease=lease)
        for given_up in self.states.add(state):
            if given_up.lease is not None:
                self.blocks.leases.end(given_up.lease)
        for heir in asked.heirs:
            self._endow(heir, state)
        if lease is not None and lease.transient and not lease.num_heirs:
            self.blocks.leases.end(lease)
        return state

    def _leave_no_state(self, asked: Asked) -> None:
        """An image is not in its tokens, so they do not say what came before. Its job's next turn finds the KV all the same."""
        self._leave_nothing(asked, "has more than text in its prompt, and cannot be continued")
        if not asked.fields.is_last_step:
            self._keep(asked)

    def _keep(self, asked: Asked) -> Lease | None:
        """The KV of an answer that has ended, as its client or the policy wants it. vLLM's server finds stop strings by itself,
        and then aborts the request: what was computed until then is the job's all the same."""
        turn = asked.turn
        disposed = self.jobs.dispose(asked)
        hold = self.jobs.hold_for(disposed[0]) if disposed is not None else turn.hold
        if hold is not None and hold.seconds == 0:
            hold = None
        lease: Lease | None = None
        if hold is not None or asked.heirs:
            terms: dict[str, Any] = {"transient": True}
            if hold is not None:
                expires_at = None if hold.seconds is None else self.clock.now() + hold.seconds
                terms = {"expires_at": expires_at, "value": hold.value}
            lease = self.blocks.hold(asked.request.request_id, turn.scope, asked.num_computed, job=turn.job_id, **terms)
        if disposed is not None:
            self.jobs.decided(asked, *disposed, lease if hold is not None else None)
        return lease

    def _report(self, asked: Asked, state: State | None) -> dict[str, Any]:
        """What a response carries."""
        reuse = asked.reuse
        report: dict[str, Any] = {
            "inherited_tokens": reuse.inherited if reuse is not None else 0,
            "recomputed_tokens": reuse.recomputed if reuse is not None else 0,
            "new_tokens": reuse.new if reuse is not None else 0,
        }
        if state is not None:
            report |= {
                "state_id": names_of(asked)[-1],
                "num_tokens": state.num_tokens,
                "held_tokens": state.num_held,
            }
        if asked.why_not is not None:
            report["fallback"] = asked.why_not
        if self._rank:
            report["rank"] = self._rank
        return report

    # What could not be done

    def _refuse(self, request: Request, error: SegueError) -> None:
        self._refused[request.request_id] = request, error
        if self.finished_req_ids_dict is not None:
            self.finished_req_ids_dict[request.client_index].add(request.request_id)

    def has_finished_requests(self) -> bool:
        """Beside a connector vLLM takes all that are in no queue for such as have ended; heirs are in none."""
        if not super().has_finished_requests():
            return False
        in_queues = len(self.running) + num_waiting(self)
        return bool(self.finished_req_ids) or len(self.requests) - self._num_heirs > in_queues

    @property
    def _num_heirs(self) -> int:
        return sum(asked.waits_for is not None for asked in self._asked.values())

    def get_num_unfinished_requests(self) -> int:
        return int(super().get_num_unfinished_requests()) + len(self._refused)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            took = time.monotonic() - self._planned_at
            counts = scheduler_output.num_scheduled_tokens
            self.jobs.gauge.step(took, scheduler_output.total_num_scheduled_tokens, len(counts))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._refused:
            self._tell_refusals(outputs)
        return outputs

    def _tell_refusals(self, outputs: dict[int, Any]) -> None:
        for request, error in self._refused.values():
            told = outputs.setdefault(request.client_index, EngineCoreOutputs())
            report = {"error": str(error), "type": type(error).__name__, "status": error.status}
            told.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=VLLMFinishReason.ERROR,
                    kv_transfer_params={"segue": report},
                )
            )
        self._refused = {}

    # Operation

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Everything goes: nothing is kept that nobody may find again."""
        for lease in list(self.blocks.leases):
            self.blocks.leases.end(lease)
        return super().reset_prefix_cache(*args, **kwargs)

    def segue_release(self, name: str, salt: str) -> bool:
        """Let go of a state, and of what it holds. False if there is none of this name."""
        try:
            state = self._state(name, short_salt(salt))
        except SegueError:
            return False
        self.states.remove(state.id)
        if state.lease is not None:
            self.blocks.leases.end(state.lease)
        return True

    def segue_decisions(self, salt: str, job_id: str | None, limit: int) -> list[dict[str, Any]]:
        """What the policy did with the KV of a tenant's jobs, the newest first."""
        now, tenant = self.clock.now(), Scope(short_salt(salt)).tenant
        found = islice(self.jobs.decisions.of(tenant, job_id), limit)
        return [decision.to_json() | {"seconds_ago": round(now - decision.decided_at, 3)} for decision in found]

    def segue_status(self) -> dict[str, Any]:
        leases = self.blocks.leases
        return {
            "policy": self.segue_policy.name,
            "block_size": self.blocks.block_size,
            "kv_blocks": self.blocks.num_blocks - 1,
            "free_blocks": self.blocks.num_free,
            "leases": len(leases),
            "leased_blocks": leases.num_blocks,
            "revoked_blocks": self.blocks.num_revoked,
            "inherited_tokens": self.num_inherited,
            "recomputed_tokens": self.num_recomputed,
            "states": len(self.states),
            "waiting": len(self.waiting),
            "running": len(self.running),
        }


def _check_adapter(name: str, theirs: Scope, own: Scope) -> None:
    if theirs.adapter != own.adapter:
        raise StateError(
            f"{name!r} was made with the adapter {theirs.adapter or 'none'!r}, not with {own.adapter or 'none'!r}"
        )


def _is_text(request: Request) -> bool:
    return not request.mm_features and request.prompt_embeds is None


class SyncScheduler(_Continuing, VLLMScheduler):
    """For steps that wait for each other."""


class AsyncScheduler(_Continuing, VLLMAsyncScheduler):
    """For steps that are planned while the one before is under way."""


class Scheduler(AsyncScheduler):
    """`--scheduler-cls segue.vllm.Scheduler`: whichever of the two the configuration asks for."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if vllm_config.scheduler_config.async_scheduling:
            return super().__new__(cls)
        made = SyncScheduler.__new__(SyncScheduler)
        made.__init__(vllm_config, *args, **kwargs)  # type: ignore[misc]  # Python calls it for a Scheduler only
        return made
