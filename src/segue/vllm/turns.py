"""A vLLM request, as policies and the job desk see a turn."""

from __future__ import annotations

from array import array
from typing import Any

from segue.base.types import FinishReason, SamplingParams, Scope
from segue.engine.sequence import Hold, Reuse, Turn
from segue.kv import Lease
from segue.policies import TurnView
from segue.state import State
from segue.vllm.fields import Fields

_NO_TOKENS: array[int] = array("i")


class Asked:
    """One request under way: a turn with one answer. `num_shared` of its first tokens are its parent's."""

    def __init__(self, number: int, request: Any, fields: Fields, scope: Scope, now: float) -> None:
        self.id = number
        self.request = request
        self.fields = fields
        hold = Hold(fields.hold_seconds) if fields.hold_seconds is not None else None
        self.turn = Turn(
            request.request_id,
            _NO_TOKENS,
            SamplingParams(),
            scope,
            0,
            now,
            job_id=fields.job_id,
            hold=hold,
            priority=request.priority,
            is_last_step=fields.is_last_step,
        )
        self.turn.sequences = [self]  # type: ignore[list-item]  # all that the job desk asks of one
        self.is_special = not fields.is_plain or request.priority != 0
        self.parent: State | None = None
        self.num_shared = 0
        self.expects: Lease | None = None  # the parent's, which waits for this request's first run
        self.waits_for: Asked | None = None  # its parent, if that has not ended
        self.heirs: list[Asked] = []
        self.reuse: Reuse | None = None  # None before it first runs
        self.finish_reason: FinishReason | None = None
        self.blocked_at: float | None = None  # since when it is the first in the queue and does not fit
        self.why_not: str | None = None  # nothing was inherited, though a parent was named

    @property
    def tokens(self) -> list[int]:
        tokens: list[int] = self.request._all_token_ids
        return tokens

    @property
    def num_prompt(self) -> int:
        return int(self.request.num_prompt_tokens)

    @property
    def num_computed(self) -> int:
        """Tokens with KV. A step that is under way counts in vLLM's number, and the last token was sampled and not fed."""
        return min(int(self.request.num_computed_tokens), len(self.tokens) - 1)

    def starts(self, num_reused: int) -> None:
        if self.reuse is None:
            once = min(self.parent.num_computed, self.num_shared) if self.parent is not None else 0
            held = min(self.held_tokens(), num_reused)
            recomputed = max(once - num_reused, 0)
            new = len(self.tokens) - num_reused - recomputed
            self.reuse = Reuse(held, num_reused - held, recomputed, new)

    def held_tokens(self) -> int:
        """Of the parent's tokens, how many its lease has KV for."""
        lease = self.parent.lease if self.parent is not None else None
        return min(lease.num_computed, self.num_shared) if lease is not None else 0

    def view(self, blocked_seconds: float = 0.0) -> TurnView:
        request = self.request
        computed, preempted = int(request.num_computed_tokens), int(request.num_preemptions)
        return self.turn.view(self.id, self.num_prompt, len(self.tokens), computed, preempted, blocked_seconds)
