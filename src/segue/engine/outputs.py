"""What callers get back."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from segue.base.errors import SegueError
from segue.base.types import FinishReason
from segue.engine.beam import Beam
from segue.engine.executor import TokenLogprobs
from segue.engine.sequence import Reuse
from segue.state import State


@dataclass(slots=True)
class Delta:
    """What one step added to one answer. The last one of an answer has a `finish_reason`."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: SegueError | None = None
    state: State | None = None  # with the last one, if the answer ended well
    reuse: Reuse | None = None  # with the last one
    beams: tuple[Beam, ...] | None = None  # with the very last one of a request that searches
    search_prefilled: int = (
        0  # tokens that the search after a thought had to compute before its first step; with the last one
    )


_NO_REUSE = Reuse()


@dataclass(slots=True)
class Completion:
    """One answer, and the state it left, which can be continued. A request that came from another engine or from disk has
    all its tokens here, also those from before."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    reuse: Reuse = _NO_REUSE
    state: State | None = None
    score: float | None = None  # of a line that a search found
    search_prefilled: int = 0  # tokens that the search after a thought had to compute before its first step

    def add(self, delta: Delta) -> None:
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.state = delta.state
            self.reuse = delta.reuse or self.reuse
            self.search_prefilled = delta.search_prefilled


@dataclass(slots=True)
class Result:
    """A finished request. Times are seconds on the engine's clock."""

    request_id: str
    _tokens: array[int]  # the first answer's sequence, which may grow
    num_prompt: int
    completions: list[Completion]
    arrived_at: float
    first_token_at: float | None = None
    finished_at: float | None = None
    error: SegueError | None = None
    beams: list[Beam] = field(default_factory=list)  # what a search found, the best first

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def prompt_token_ids(self) -> list[int]:
        """A continuation's include its parent's tokens."""
        return self._tokens[: self.num_prompt].tolist()

    def take(self, beams: tuple[Beam, ...], *, is_answer: bool) -> None:
        """What a search found. If nothing was sampled before it, the lines are the answers."""
        self.beams = list(beams)
        if is_answer:
            self.completions[1:] = map(Completion, range(1, len(beams)))
            for completion, beam in zip(self.completions, beams, strict=False):
                completion.token_ids, completion.text = list(beam.token_ids), beam.text
                completion.finish_reason, completion.score = beam.finish_reason, beam.score

    def set_prompt(self, tokens: array[int], num_prompt: int) -> None:
        self._tokens, self.num_prompt = tokens, num_prompt

    @property
    def state(self) -> State | None:
        return self.completions[0].state

    @property
    def reuse(self) -> Reuse:
        return self.completions[0].reuse

    @property
    def num_prefilled(self) -> int:
        """Tokens that had to be computed before the first one could be sampled."""
        return self.reuse.recomputed + self.reuse.new

    @property
    def first_token_seconds(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start and gauges of now."""

    num_steps: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    prompt_tokens: int
    reused_tokens: int  # of the prompts': found in memory,
    held_tokens: int  # of those: under a parent's lease
    recomputed_tokens: int  # had KV once and lost it
    generated_tokens: int
    kv_usage: float
    leased_blocks: int
    num_states: int
    loaded_tokens: int = 0  # of those found: in another tier
    num_loading: int = 0
