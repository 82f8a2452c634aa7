"""Workloads as data: jobs of turns, what is said in each, and how long a job is away in between. The same object drives the
simulator, an engine in this process, and any OpenAI-compatible server."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from segue.base.errors import InvalidRequest

_FIRST_TOKEN = 10  # ids below are left to a model's special tokens
_MIX = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)


class Run(NamedTuple):
    """Tokens `start … start+length-1` of a text. The same number is the same text, in whatever job."""

    text: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: the first `keep` tokens of what was said so far (None: all of it, with the last answer), then `added`.

    `answer` is what it says where that can be laid down; else the model's own words, as many. Afterwards the job uses `tool`
    and is away for `gap_seconds`. With a `beam_width` the answer is searched for, and not added to the conversation.
    """

    added: tuple[Run, ...]
    num_output: int
    gap_seconds: float = 0.0
    tool: str = ""
    command: str = ""  # if the tool is a shell
    keep: int | None = None
    answer: Run | None = None
    beam_width: int = 0

    @property
    def num_added(self) -> int:
        return sum(run.length for run in self.added)


@dataclass(frozen=True, slots=True)
class Job:
    """`at`: seconds after the workload's start; in a closed loop it comes when another has ended."""

    id: str
    turns: tuple[Turn, ...]
    at: float = 0.0

    def prompt_lengths(self) -> list[int]:
        lengths, said = [], 0
        for turn in self.turns:
            said = (said if turn.keep is None else min(turn.keep, said)) + turn.num_added
            lengths.append(said)
            said += 0 if turn.beam_width else turn.num_output
        return lengths


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs in order of arrival. `concurrency`: a closed loop, with so many jobs at once."""

    name: str
    jobs: tuple[Job, ...]
    concurrency: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.jobs:
            raise InvalidRequest("workload", f"{self.name} has no jobs")
        if self.concurrency is not None and self.concurrency < 1:
            raise InvalidRequest("concurrency", f"must be at least 1, got {self.concurrency}")
        if any(later.at < earlier.at for earlier, later in pairwise(self.jobs)):
            raise InvalidRequest("workload", f"{self.name}'s jobs are not in order of arrival")
        for job in self.jobs:
            if not job.turns or any(length < 1 for length in job.prompt_lengths()):
                raise InvalidRequest("workload", f"{job.id} has a turn without a prompt")
            if any(turn.num_output < 1 or turn.gap_seconds < 0 for turn in job.turns):
                raise InvalidRequest("workload", f"{job.id} has a turn without an answer, or that ends before it began")

    @property
    def max_tokens(self) -> int:
        """The longest any sequence gets."""
        return max(
            length + turn.num_output
            for job in self.jobs
            for length, turn in zip(job.prompt_lengths(), job.turns, strict=True)
        )

    @property
    def rate(self) -> float | None:
        """Jobs a second, as they came; None for a closed loop, or too few to say."""
        span = self.jobs[-1].at - self.jobs[0].at
        return None if self.concurrency is not None or span <= 0 else (len(self.jobs) - 1) / span


class Texts:
    """Words for texts that are only numbers: token ids below `vocab_size`, the same for the same text and seed."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        if vocab_size <= _FIRST_TOKEN:
            raise InvalidRequest("vocab_size", f"must be over {_FIRST_TOKEN}, got {vocab_size}")
        self._span = np.uint64(vocab_size - _FIRST_TOKEN)
        self._seed = seed

    def tokens(self, run: Run) -> array[int]:
        base = (run.text * 0x9E3779B97F4A7C15 + self._seed * 0xD1B54A32D192ED03) % 2**64
        value = np.arange(run.start, run.start + run.length, dtype=np.uint64) + np.uint64(base)
        for factor in _MIX:
            value ^= value >> _SHIFT
            value *= factor
        value ^= value >> _SHIFT
        return array("i", (value % self._span + np.uint64(_FIRST_TOKEN)).astype(np.int32).tobytes())

    def append(self, said: array[int], runs: Iterable[Run]) -> None:
        for run in runs:
            said.extend(self.tokens(run))
