"""What lives on between steps: requests, and the sequences that answer them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from segue.base.types import FinishReason, SamplingParams, Scope
from segue.engine.beam import BeamSearch, Search
from segue.kv import BlockTable, Lease
from segue.policies import Call, Job, TurnView
from segue.state import State

_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """All a sampler needs besides the logits and the tokens so far; it has no state of its own, because the random
    numbers of a step are a function of `seed` and the position."""

    params: SamplingParams
    seed: int
    num_prompt: int
    stop_ids: frozenset[int]  # end the sequence; not to be sampled before min_tokens


@dataclass(frozen=True, slots=True)
class Reuse:
    """Where the tokens a request started with came from.

    `held` were taken from the parent's lease, `cached` found in the prefix cache, `loaded` came from another tier; `recomputed`
    had KV once and lost it; `new` never had any: the suffix, and a parent's last token, which was sampled and not fed.
    """

    held: int = 0
    cached: int = 0
    recomputed: int = 0
    new: int = 0
    loaded: int = 0

    @property
    def inherited(self) -> int:
        return self.held + self.cached + self.loaded


@dataclass(frozen=True, slots=True)
class Thought:
    """Where a thought ended, in tokens of its sequence, and what the search that follows it had to compute first."""

    end: int
    reason: FinishReason
    num_prefilled: int


class Status(Enum):
    WAITING = "waiting"  # holds no blocks
    LOADING = "loading"  # holds blocks, into which KV from another tier comes; takes no part in steps
    RUNNING = "running"
    PARKED = "parked"  # on its way to another engine: takes no part in steps, its KV is under a lease
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Hold:
    """How long a finished answer's KV is kept, and how dear it is; None is: until released."""

    seconds: float | None
    value: float = 0.0


@dataclass(slots=True, eq=False)
class Turn:
    """One request under way: a call for `params.n` answers to a prompt.

    `prompt` becomes the first answer's token array, and grows with it; `num_prompt` says where the prompt ends. A turn that
    came from another engine or from disk has its output so far in it as well. The first `num_shared` tokens of a continuation
    are its `parent`'s. An heir, whose parent still runs, has only its suffix until then.
    """

    id: str
    prompt: array[int]
    params: SamplingParams
    scope: Scope
    seed: int
    arrived_at: float
    eos_ids: frozenset[int] = frozenset()
    job_id: str | None = None
    hold: Hold | None = None
    parent: State | None = None
    num_shared: int = 0
    consume: bool = False
    priority: int = 0
    is_last_step: bool = False
    detokenize: bool = True
    search: Search | None = None
    num_output: int = 0  # tokens at the end of `prompt` that are output, when the turn starts here
    sequences: list[Sequence] = field(default_factory=list)
    heirs: list[Heir] = field(default_factory=list)
    awaits: Turn | None = None  # an heir's parent
    expects: Lease | None = None  # the lease that waits for this turn's first run
    job: Job | None = None  # from its arrival to its end
    claims: list[Lease] = field(default_factory=list)  # what was kept for the job and waits for this turn
    has_started: bool = False
    call: tuple[Call | None] | None = None  # the tool call in its answer, once that was looked for
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.begin_with(self.prompt)

    def begin_with(self, prompt: array[int]) -> None:
        self.prompt, self.num_prompt = prompt, len(prompt) - self.num_output

    def view(
        self,
        sequence_id: int,
        num_prompt: int,
        num_tokens: int,
        num_computed: int,
        num_preemptions: int,
        blocked_seconds: float,
    ) -> TurnView:
        """One of its sequences, as a policy sees it."""
        job = self.job
        return TurnView(
            sequence_id,
            self.job_id if job is None else job.key,
            self.arrived_at,
            num_prompt,
            num_tokens,
            num_computed,
            num_preemptions,
            self.priority,
            self.is_last_step,
            self.arrived_at if job is None else job.arrived_at,
            1 if job is None else job.num_turns,
            bool(self.claims),
            blocked_seconds,
        )


@dataclass(frozen=True, slots=True)
class Heir:
    """A turn that goes on from the end, or from token `at`, of an answer that is not finished yet."""

    turn: Turn
    parent: Turn
    index: int
    at: int | None


class Sequence:
    """Tokens, a block table, and how many of the tokens have KV. Everything else about a request is parameters.

    Before a step `num_computed < len(tokens)`: there is always something to catch up with. `table` is None until the
    sequence first runs, so that one that waits for its sibling's prompt holds nothing.
    """

    __slots__ = (
        "error",
        "finish_reason",
        "has_asked",
        "id",
        "index",
        "limit",
        "num_computed",
        "num_preemptions",
        "num_prompt",
        "reuse",
        "sampling",
        "search",
        "state",
        "status",
        "table",
        "thought",
        "tokens",
        "turn",
    )

    def __init__(self, sequence_id: int, index: int, turn: Turn, limit: int) -> None:
        params = turn.params
        eos = frozenset() if params.ignore_eos else turn.eos_ids
        self.id = sequence_id
        self.index = index
        self.turn = turn
        self.tokens: array[int] = turn.prompt[:] if index else turn.prompt
        self.num_prompt = turn.num_prompt
        self.num_computed = 0
        self.limit = limit
        self.sampling = Sampling(
            params, sample_seed(turn.seed, index), self.num_prompt, eos | frozenset(params.stop_token_ids)
        )
        self.table: BlockTable | None = None
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.state: State | None = None  # what it left, once it has finished well
        self.num_preemptions = 0
        self.has_asked = False  # tiers that others share, for what they have of it
        self.reuse: Reuse | None = None  # None before it first runs
        self.search: BeamSearch | None = None  # once it is one: from then on no more tokens come
        self.thought: Thought | None = None  # that led to the search
        if turn.search is not None and not turn.search.thinks:
            self.begin_search(turn.search)

    @property
    def state_id(self) -> str:
        """What its state will be called: as the request, or request/index where there are several answers."""
        return self.turn.id if self.turn.params.n == 1 else f"{self.turn.id}/{self.index}"

    def starts(self, num_reused: int, num_held: int, num_loaded: int = 0) -> None:
        """It runs for the first time, with KV for `num_reused` of its tokens, `num_held` of them from its parent's lease and
        `num_loaded` from another tier."""
        if self.reuse is None:
            parent, shared = self.turn.parent, self.turn.num_shared
            once = min(parent.num_computed, shared) if parent is not None else 0
            recomputed = max(once - num_reused, 0)
            cached, new = num_reused - num_held - num_loaded, len(self.tokens) - num_reused - recomputed
            self.reuse = Reuse(num_held, cached, recomputed, new, num_loaded)

    def begin_search(self, search: Search) -> None:
        seed = self.turn.seed if search.params.seed is None else search.params.seed
        self.search = search.begin(self.turn.eos_ids, sample_seed(seed, self.index), self.index)

    def end_thought(self, search: Search, reason: FinishReason, *, by_text: bool = False) -> None:
        """What was sampled so far was a thought: the suffix follows, and from there on a search. That it ended in a stop string
        (`by_text`) may be seen a moment later than that it was full: then it ends once more."""
        length = len(self.tokens) if self.thought is None else self.thought.end
        del self.tokens[length:]
        if by_text and search.rest is not None:
            self.tokens.extend(search.rest)
        else:
            stopped = reason is FinishReason.STOP
            self.tokens.extend(search.suffix_after(self.tokens[self.num_prompt :], stopped=stopped))
        self.thought = Thought(length, reason, len(self.tokens) - self.num_computed)
        self.begin_search(search)

    @property
    def output(self) -> array[int]:
        return self.tokens[self.num_prompt :]

    def stop_reason(self, token: int) -> FinishReason | None:
        """Whether the sequence ends with `token`, which has just been appended."""
        length = len(self.tokens)
        if token in self.sampling.stop_ids and length - self.num_prompt > self.sampling.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self.limit else None

    def view(self, blocked_seconds: float = 0.0) -> TurnView:
        return self.turn.view(
            self.id, self.num_prompt, len(self.tokens), self.num_computed, self.num_preemptions, blocked_seconds
        )


def sample_seed(seed: int, index: int) -> int:
    """A seed for each of a request's answers; the first keeps the request's own."""
    return (seed + index * 0x9E3779B97F4A7C15) & _MASK
