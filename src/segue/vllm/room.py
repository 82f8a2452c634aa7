"""Room in vLLM's block pool: leases give way before anybody is preempted, and the policy says who that is."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from vllm.v1.request import Request, RequestStatus

from segue.base.clock import Clock
from segue.engine.jobs import JobDesk
from segue.policies import Policy
from segue.vllm.blocks import VLLMBlocks
from segue.vllm.turns import Asked
from segue.vllm.versions import spare_blocks


class Room:
    """Takes the place of a KV cache manager's `allocate_slots`, as long as that can make a difference: a call of ours for each
    request and step is 3 % of a step."""

    def __init__(
        self, scheduler: Any, blocks: VLLMBlocks, policy: Policy, jobs: JobDesk, asked_of: Callable[[Request], Asked]
    ) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._blocks = blocks
        self._policy = policy
        self._jobs = jobs
        self._asked_of = asked_of
        self._allocate = self._manager.allocate_slots
        self._is_wanted = False

    def want(self, wanted: bool) -> None:
        if wanted == self._is_wanted:
            return
        self._is_wanted = wanted
        if wanted:
            self._manager.allocate_slots = self._make
        else:
            del self._manager.allocate_slots

    @property
    def _clock(self) -> Clock:
        clock: Clock = self._scheduler.clock
        return clock

    @property
    def _running(self) -> list[Request]:
        running: list[Request] = self._scheduler.running
        return running

    def _make(
        self, request: Request, num_new_tokens: int, num_new_computed_tokens: int = 0, *args: Any, **kwargs: Any
    ) -> Any:
        """Before vLLM gives up on blocks, and preempts somebody, leases give way."""
        found = self._allocate(request, num_new_tokens, num_new_computed_tokens, *args, **kwargs)
        if found is not None:
            return found
        asked, leases = self._asked_of(request), self._blocks.leases
        is_running = request.status == RequestStatus.RUNNING
        if leases:
            below, now, tenant = self._bid(asked, is_running=is_running), self._clock.now(), asked.turn.scope.tenant
            reused = kwargs["new_computed_blocks"].blocks[0] if kwargs.get("new_computed_blocks") is not None else ()
            wanted = self._num_wanted(request, num_new_tokens, num_new_computed_tokens, len(reused), kwargs)
            with self._blocks.kept(reused):  # to take these back would give it nothing
                has_room = leases.reclaim(wanted, now, tenant, below)
            while has_room:
                found = self._allocate(request, num_new_tokens, num_new_computed_tokens, *args, **kwargs)
                if found is not None:
                    return found
                has_room = not self._running and leases.reclaim(self._blocks.num_free + 1, now, tenant, below)
        if is_running:
            self._choose_victim(request)
        elif asked.blocked_at is None:
            asked.blocked_at = self._clock.now()
        return None

    def _num_wanted(
        self, request: Request, num_new: int, num_found: int, num_reused: int, options: dict[str, Any]
    ) -> int:
        """Free blocks that vLLM will ask for beside those it reuses, as far as can be told from outside."""
        external = options.get("num_external_computed_tokens", 0)
        end = request.num_computed_tokens + num_found + external + num_new + options.get("num_lookahead_tokens", 0)
        if options.get("full_sequence_must_fit"):
            end = max(end, request.num_tokens)
        had = len(self._manager.get_blocks(request.request_id).blocks[0])
        is_copied = num_found % self._blocks.block_size != 0
        spare = spare_blocks(self._manager) if self._running else 0
        spare += int(options.get("reserved_blocks", 0))
        most = self._blocks.blocks_for(min(int(end), int(self._scheduler.max_model_len)))
        return max(most - had - num_reused + is_copied, 1) + spare

    def _bid(self, asked: Asked, *, is_running: bool) -> float:
        policy = self._policy
        if is_running:
            return policy.growth_bid if len(self._running) > 1 else inf
        if not self._running or not policy.bids:
            return inf
        now = self._clock.now()
        blocked = now - asked.blocked_at if asked.blocked_at is not None else 0.0
        return policy.bid(asked.view(blocked), self._jobs.pressure(), now)

    def _choose_victim(self, request: Request) -> None:
        """vLLM preempts the last of those that run. Of them, those before this request are in the step already."""
        running = self._running
        at = next(index for index, other in enumerate(running) if other is request)
        if len(running) - at > 1:
            now = self._clock.now()
            rest = running[at:]
            victim = max(rest, key=lambda other: self._policy.victim(self._asked_of(other).view(), now))
            rest.remove(victim)
            running[at:] = [*rest, victim]
