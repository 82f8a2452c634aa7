"""What lives on between steps: requests, and the sequences that answer them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from segue.base.types import FinishReason, SamplingParams, Scope
from segue.kv import BlockTable, Lease
from segue.policies import TurnView

_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """All a sampler needs besides the logits and the tokens so far; it has no state of its own, because the random
    numbers of a step are a function of `seed` and the position."""

    params: SamplingParams
    seed: int
    num_prompt: int
    stop_ids: frozenset[int]  # end the sequence; not to be sampled before min_tokens


class Status(Enum):
    WAITING = "waiting"  # holds no blocks
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One call for `params.n` answers to a prompt."""

    id: str
    prompt: array[int]
    params: SamplingParams
    scope: Scope
    seed: int
    arrived_at: float
    eos_ids: frozenset[int] = frozenset()
    job_id: str | None = None
    hold: bool = False
    sequences: list[Sequence] = field(default_factory=list)


class Sequence:
    """Tokens, a block table, and how many of the tokens have KV. Everything else about a request is parameters.

    Before a step `num_computed < len(tokens)`: there is always something to catch up with. `table` is None until the
    sequence first runs, so that one that waits for its sibling's prompt holds nothing.
    """

    __slots__ = (
        "error",
        "finish_reason",
        "id",
        "index",
        "lease",
        "limit",
        "num_computed",
        "num_preemptions",
        "num_prompt",
        "num_reused",
        "request",
        "sampling",
        "status",
        "table",
        "tokens",
    )

    def __init__(self, sequence_id: int, index: int, request: Request, limit: int) -> None:
        params = request.params
        eos = frozenset() if params.ignore_eos else request.eos_ids
        self.id = sequence_id
        self.index = index
        self.request = request
        self.tokens: array[int] = request.prompt[:]
        self.num_prompt = len(self.tokens)
        self.num_computed = 0
        self.limit = limit
        self.sampling = Sampling(
            params, sample_seed(request.seed, index), self.num_prompt, eos | frozenset(params.stop_token_ids)
        )
        self.table: BlockTable | None = None
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.lease: Lease | None = None
        self.num_preemptions = 0
        self.num_reused: int | None = None  # prompt tokens whose KV was there already; None before it first runs

    @property
    def output(self) -> array[int]:
        return self.tokens[self.num_prompt :]

    def stop_reason(self, token: int) -> FinishReason | None:
        """Whether the sequence ends with `token`, which has just been appended."""
        length = len(self.tokens)
        if token in self.sampling.stop_ids and length - self.num_prompt > self.sampling.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self.limit else None

    def view(self) -> TurnView:
        request = self.request
        return TurnView(
            self.id,
            request.job_id,
            request.arrived_at,
            self.num_prompt,
            len(self.tokens),
            self.num_computed,
            self.num_preemptions,
        )


def sample_seed(seed: int, index: int) -> int:
    """A seed for each of a request's answers; the first keeps the request's own."""
    return (seed + index * 0x9E3779B97F4A7C15) & _MASK
