"""What callers get back."""

from __future__ import annotations

from dataclasses import dataclass, field

from segue.base.errors import SegueError
from segue.base.types import FinishReason
from segue.engine.executor import TokenLogprobs
from segue.kv import Lease


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one answer. The last one of an answer has a `finish_reason`."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: SegueError | None = None
    lease: Lease | None = None  # with the last one, if the request asked for a hold


@dataclass(slots=True)
class Completion:
    """One answer. `num_reused` counts the prompt tokens whose KV was there already: the rest were prefilled."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_reused: int = 0
    lease: Lease | None = None


@dataclass(slots=True)
class Result:
    """A finished request. Times are seconds on the engine's clock."""

    request_id: str
    prompt_token_ids: list[int]
    completions: list[Completion]
    arrived_at: float
    first_token_at: float | None = None
    finished_at: float | None = None
    error: SegueError | None = None

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def num_prefilled(self) -> int:
        """Prompt tokens that had to be computed."""
        return len(self.prompt_token_ids) - self.completions[0].num_reused

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
    reused_tokens: int
    generated_tokens: int
    kv_usage: float
    leased_blocks: int
