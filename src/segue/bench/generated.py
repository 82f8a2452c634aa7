"""Workloads that are made up: agents, chats, thinking before a search, and a prompt that all share."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from segue.base.errors import InvalidRequest
from segue.bench.workload import Job, Run, Turn, Workload

_OWN = 1 << 32  # texts above are of one job alone


@dataclass(frozen=True, slots=True)
class AgentJob:
    """The eight-turn job of the Continuum experiments: published are its prompts' lengths, its tools and their seconds; how long
    its answers are was worked out from latencies (docs/simulator.md). Its messages and tool outputs are the same for all jobs;
    an answer is the usual one with a chance of `usual`, and from the first that is not, all that a job hears and says is its
    own: on a real engine too, whose model says what it likes."""

    prompt_tokens: tuple[int, ...] = (92, 469, 811, 1343, 1655, 2241, 2665, 2915)
    output_tokens: tuple[int, ...] = (22, 12, 9, 16, 13, 10, 63, 21)
    gaps: tuple[tuple[float, float], ...] = (
        (0.05, 0.15),
        (0.05, 0.1),
        (0.05, 0.1),
        (0.08, 0.2),
        (2.0, 5.0),
        (0.05, 0.1),
        (0.1, 0.3),
    )
    commands: tuple[str, ...] = (
        "find . -name '*.py'",
        "cat main.py",
        "cat util.py",
        "grep -rn TODO .",
        "pytest",
        "cat test.py",
        "git apply fix.patch",
    )
    usual: float = 0.925
    gap_scale: float = 1.0

    def __post_init__(self) -> None:
        turns = len(self.prompt_tokens)
        if (
            not turns
            or len(self.output_tokens) != turns
            or len(self.gaps) < turns - 1
            or len(self.commands) < turns - 1
        ):
            raise InvalidRequest(
                "agents", "each turn needs an output length, and each but the last a tool and its seconds"
            )
        for at in range(1, turns):
            if self.prompt_tokens[at] <= self.prompt_tokens[at - 1] + self.output_tokens[at - 1]:
                raise InvalidRequest("agents", f"the prompt of turn {at + 1} does not hold what was said before it")

    def make(self, number: int, at: float, randomly: random.Random) -> Job:
        turns, said, is_usual = [], 0, True
        last = len(self.prompt_tokens) - 1
        for index, (prompt, output) in enumerate(zip(self.prompt_tokens, self.output_tokens, strict=True)):
            own = _OWN + 2 * (number * (last + 1) + index)
            heard = Run(1 + index if is_usual else own, 0, prompt - said)
            is_usual = randomly.random() < self.usual and is_usual
            answer = Run(1000 + index if is_usual else own + 1, 0, output)
            gap = randomly.uniform(*self.gaps[index]) * self.gap_scale if index < last else 0.0
            use = ("bash", self.commands[index]) if index < last else ("", "")
            turns.append(Turn((heard,), output, gap, *use, answer=answer))
            said = prompt + output
        return Job(f"job-{number:05d}", tuple(turns), at)


def agents(times: Sequence[float], seed: int = 0, job: AgentJob | None = None) -> Workload:
    job = job or AgentJob()
    randomly = random.Random(f"agents {seed}")
    return Workload("agents", tuple(job.make(number, at, randomly) for number, at in enumerate(times)))


def chat(
    times: Sequence[float],
    seed: int = 0,
    *,
    system_tokens: int = 400,
    turns: tuple[int, int] = (2, 8),
    message_tokens: tuple[int, int] = (20, 200),
    output_tokens: tuple[int, int] = (50, 400),
    pause_seconds: float = 20.0,
) -> Workload:
    """People who read and type: gaps are log-normal around `pause_seconds`. All chats begin with the same system prompt."""
    randomly = random.Random(f"chat {seed}")
    jobs = []
    for number, at in enumerate(times):
        made: list[Turn] = []
        count = randomly.randint(*turns)
        for index in range(count):
            own = Run(_OWN + number * 100 + index, 0, randomly.randint(*message_tokens))
            gap = pause_seconds * randomly.lognormvariate(0.0, 0.7) if index < count - 1 else 0.0
            made.append(
                Turn(((Run(1, 0, system_tokens), own) if not index else (own,)), randomly.randint(*output_tokens), gap)
            )
        jobs.append(Job(f"chat-{number:05d}", tuple(made), at))
    return Workload("chat", tuple(jobs))


def two_stage(
    times: Sequence[float],
    seed: int = 0,
    *,
    prompt_tokens: int = 500,
    thought_tokens: int = 200,
    suffix_tokens: int = 5,
    beam_width: int = 32,
    item_tokens: int = 3,
) -> Workload:
    """Think, then search for items: the second turn follows at once."""
    jobs = []
    for number, at in enumerate(times):
        own = _OWN + number * 100
        think = Turn((Run(own, 0, prompt_tokens),), thought_tokens)
        search = Turn((Run(1, 0, suffix_tokens),), item_tokens, beam_width=beam_width)
        jobs.append(Job(f"user-{number:05d}", (think, search), at))
    return Workload("two-stage", tuple(jobs))


def shared_prefix(
    times: Sequence[float],
    seed: int = 0,
    *,
    num_prefixes: int = 4,
    prefix_tokens: int = 2000,
    own_tokens: tuple[int, int] = (20, 300),
    output_tokens: tuple[int, int] = (20, 200),
) -> Workload:
    """Single requests under one of a few long prompts."""
    randomly = random.Random(f"shared {seed}")
    jobs = []
    for number, at in enumerate(times):
        prefix = Run(1 + randomly.randrange(num_prefixes), 0, prefix_tokens)
        own = Run(_OWN + number, 0, randomly.randint(*own_tokens))
        jobs.append(Job(f"request-{number:05d}", (Turn((prefix, own), randomly.randint(*output_tokens)),), at))
    return Workload("shared-prefix", tuple(jobs))


GENERATED: dict[str, Callable[..., Workload]] = {
    "agents": agents,
    "chat": chat,
    "two-stage": two_stage,
    "shared-prefix": shared_prefix,
}


def closed(workload: Workload, concurrency: int) -> Workload:
    """The same jobs, so many at a time."""
    return replace(workload, jobs=tuple(replace(job, at=0.0) for job in workload.jobs), concurrency=concurrency)
