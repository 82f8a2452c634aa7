"""The jobs of a fleet as numbers: how long each prompt is, what of it all jobs share, and how long a job is away. No tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from segue.base.errors import InvalidRequest

if TYPE_CHECKING:
    from segue.sim.coarse import CoarseEngine


@dataclass(frozen=True, slots=True)
class JobShape:
    """Turns of a job, each prompt with all that was said before it. The gap after a turn is uniform between two bounds.

    What is asked is the same in all jobs, and so is an answer with a chance of `usual`. Up to the first answer that is not, a
    job's context is the *trunk*, which all jobs share; behind it, its own.
    """

    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    gaps: tuple[tuple[float, float], ...]  # seconds; after each turn but the last
    usual: float = 0.0

    def __post_init__(self) -> None:
        turns = len(self.prompt_tokens)
        if not turns or len(self.output_tokens) != turns or len(self.gaps) != turns - 1:
            raise InvalidRequest("shape", "each turn needs an output length, and each but the last a gap")
        if min(self.output_tokens) < 1 or self.prompt_tokens[0] < 1:
            raise InvalidRequest("shape", "a turn needs a prompt and an answer")
        if any(not 0 <= low <= high < float("inf") for low, high in self.gaps):
            raise InvalidRequest("shape", "a gap goes from some seconds to no fewer")
        if not 0 <= self.usual <= 1:
            raise InvalidRequest("usual", f"must be from 0 to 1, got {self.usual}")
        for at in range(1, turns):
            if self.prompt_tokens[at] <= self.prompt_tokens[at - 1] + self.output_tokens[at - 1]:
                raise InvalidRequest("shape", f"the prompt of turn {at + 1} does not hold what was said before it")

    @property
    def num_turns(self) -> int:
        return len(self.prompt_tokens)

    @property
    def max_tokens(self) -> int:
        return self.prompt_tokens[-1] + self.output_tokens[-1]

    def jobs(self, count: int, rate: float, seed: int) -> Iterator[FleetJob]:
        """So many, which come independently of each other, `rate` a second."""
        if count < 1:
            raise InvalidRequest("jobs", f"must be at least 1, got {count}")
        if not 0 < rate < float("inf"):
            raise InvalidRequest("jps", f"jobs a second must be above 0, got {rate}")
        return self._jobs(count, rate, random.Random(f"fleet {seed}"))

    def _jobs(self, count: int, rate: float, randomly: random.Random) -> Iterator[FleetJob]:
        draw, at = randomly.random, 0.0
        for number in range(count):
            at += randomly.expovariate(rate)
            leaves = 0
            while leaves < self.num_turns and draw() < self.usual:
                leaves += 1
            yield FleetJob(number, at, leaves, [low + (high - low) * draw() for low, high in self.gaps])


@dataclass(slots=True, eq=False)
class FleetJob:
    """A job under way, and what the present turn asks for."""

    number: int
    at: float  # seconds after the start
    leaves: int  # the turn whose answer is the first of its own; the number of turns if there is none
    gaps: list[float]
    turn: int = 0
    home: CoarseEngine | None = None  # where its last turn was
    source: CoarseEngine | None = None  # where its last prompt was computed, if that is elsewhere
    num_kv: int = 0  # tokens that had KV when its last turn ended
    asked_at: float = field(init=False)
    first_at: float = 0.0
    prompt: int = 0  # tokens of this turn
    output: int = 0
    common: int = 0  # of the prompt's, those that are the trunk's
    blocks: int = 0  # that it holds while it runs
    weight: int = 0  # tokens that each of its steps reads

    def __post_init__(self) -> None:
        self.asked_at = self.at

    def ask(self, shape: JobShape) -> None:
        """Its next turn begins."""
        turn, leaves = self.turn, self.leaves
        self.prompt, self.output = shape.prompt_tokens[turn], shape.output_tokens[turn]
        self.common = self.prompt if turn <= leaves else shape.prompt_tokens[leaves]

    @property
    def answers_as_usual(self) -> bool:
        return self.turn < self.leaves

    @property
    def is_last(self) -> bool:
        return self.turn == len(self.gaps)
