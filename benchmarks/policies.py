"""What policies cost, and what they bring: `tiny` on this machine, with a pool that is too small for its jobs.

    python benchmarks/policies.py [--only cost|effect] [--rounds N] [--seed N] [--scale S] [--tiers] [--output LEAST MOST]

The jobs are those of the agents' workload in small: eight turns, its prompts that grow to 2,915 tokens, and its tools' times,
all shortened by one factor. There a job that is alone computes for 2.45 seconds and its tools take 4.2; here it computes for
about .06 and they take .62 (.15 of those), so keeping KV through a gap costs more of what it saves than it did there. Answers are
short, as there: its transcripts have 7 to 12 tokens. Times are real. `tiny` writes no commands, so the tools' names are given.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from segue import Engine, SamplingParams
from segue.base.config import EngineConfig
from segue.engine import EngineCore
from segue.engine.executor import StepResult
from segue.engine.jobs import JobDesk
from segue.policies import (
    Adaptive,
    Call,
    ContextServe,
    FirstComeFirstServed,
    Policy,
    Pressure,
    Returned,
    TurnEnd,
    TurnView,
    make_policy,
)
from segue.policies.training import NUM_TREES
from segue.policies.trees import Tree, Trees
from segue.toolcalls.features import FEATURES

POLICIES = ("fcfs", "continuum-released", "continuum", "context_serve", "adaptive")
TIERED = ("fcfs + host", "adaptive + host")  # the same with a tier that has room for all
TOKENS = (92, 469, 811, 1343, 1655, 2241, 2665, 2915)
GAPS = ((0.05, 0.15), (0.05, 0.1), (0.05, 0.1), (0.08, 0.2), (2.0, 5.0), (0.05, 0.1), (0.1, 0.3))
CALLS = {
    "known": Call("bash", "pytest", "j", "pytest -q"),
    "new": Call("bash", "mytool", "j", "cd repo && FOO=1 mytool --flag x/y/z.py 2>&1 | tail -20"),
    "new, 2000 chars": Call("bash", "mytool", "j", "mytool a/b | x; " * 125),
}
TOOLS = ("ls", "cat", "grep", "sed", "pytest", "git diff", "python")


class Nothing:
    """An executor that computes nothing: what is left is bookkeeping."""

    def execute(self, plan):
        return StepResult([1] * sum(row.sampling is not None for row in plan.rows))

    def close(self) -> None:
        pass


def cost() -> None:
    taught = {name: make_policy(name) for name in POLICIES}
    taught["context_serve"] = ContextServe(_trees())
    for policy in taught.values():
        for number in range(2000):
            policy.observe(Returned("j", Call("bash", TOOLS[number % 7], "j"), random.random()))
    config = EngineConfig(2000, 16, max_step_tokens=512, max_running=256, max_model_len=4096)
    engine = EngineCore(Nothing(), config, policy=Adaptive())
    for number in range(10_000):
        engine.submit([number % 50] * 600, SamplingParams(max_tokens=5), job_id=f"job {number}")
    engine.step()
    pressure = replace(engine._scheduler.jobs.pressure(), seconds_per_token=1e-3)
    print(f"a decision with {pressure.num_waiting:,} turns waiting, µs:")
    print(f"  {'policy':20}" + "".join(f"{title:>15}" for title in CALLS))
    for name, policy in taught.items():
        taken = [_microseconds(policy, call, pressure) for call in CALLS.values()]
        print(f"  {name:20}" + "".join(f"{each:15.1f}" for each in taken))
    ratios = [_steps(Adaptive()) / _steps(FirstComeFirstServed()) for _ in range(9)]
    print(f"a step of 64 decoding, adaptive over fcfs, bookkeeping alone: {statistics.median(ratios):.3f}")


def _trees() -> Trees:
    """As large as trained ones, and never sure: then every stage of `context_serve` is asked."""
    chosen = random.Random(0)
    inner = [(chosen.randrange(len(FEATURES)), float(chosen.randrange(1, 4)), 2 * n + 1, 2 * n + 2) for n in range(15)]
    return Trees(0.0, 50.0, (Tree((*inner, *((-1, 0.1, 0, 0),) * 16)),) * NUM_TREES)


def _microseconds(policy: Policy, call: Call, pressure: Pressure) -> float:
    end = TurnEnd(TurnView(1, "j", 0.0, 400, 2000, 1999, 0), 32, call)
    taken = []
    for _ in range(2000):
        began = time.perf_counter()
        policy.at_turn_end(end, pressure, 0.0)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e6


def _steps(policy: Policy) -> float:
    config = EngineConfig(4000, 16, max_step_tokens=512, max_running=256, max_model_len=4096)
    engine = EngineCore(Nothing(), config, policy=policy)
    for number in range(64):
        engine.submit([number] * 20, SamplingParams(max_tokens=400), job_id=f"job {number}")
    for _ in range(20):
        engine.step()
    began = time.perf_counter()
    for _ in range(300):
        engine.step()
    return time.perf_counter() - began


@dataclass(frozen=True)
class Load:
    title: str
    rate: float  # jobs a second
    blocks: int
    num_jobs: int


LOADS = (
    Load("low load", 1, 2600, 20),
    Load("under pressure", 10, 900, 120),
    Load("more", 14, 900, 120),
    Load("twice the memory", 30, 1800, 200),
)


@dataclass(frozen=True)
class Workload:
    seed: int
    scale: float  # of the tools' times
    output: tuple[int, int]  # tokens of an answer: least, most


@dataclass(frozen=True)
class Played:
    mean: float
    p95: float
    computed: int
    ratio: float  # of the tokens that had to be computed
    preempted: int


def effect(names: Sequence[str], workload: Workload, rounds: int) -> None:
    """Means of the rounds, whose order turns round each time."""
    for load in LOADS:
        print(f"{load.title}: {load.num_jobs} jobs, {load.rate:g} a second, {load.blocks} blocks")
        print(
            f"  {'policy':20}{'mean s':>8}{'p95 s':>8}{'computed':>11}{'of least':>10}{'preempted':>11}{'of fcfs':>9}"
        )
        played: dict[str, list[Played]] = {name: [] for name in names}
        for number in range(rounds):
            for name in list(played) if number % 2 == 0 else list(played)[::-1]:
                played[name].append(_play(name, load, workload))
        first = statistics.mean(each.mean for each in played["fcfs"])
        tools = workload.scale * sum(sum(gap) / 2 for gap in GAPS)
        print(f"  tools take {tools:.2f} s a job")
        for name, results in played.items():
            mean, p95, computed, ratio, preempted = (
                statistics.mean(getattr(each, field.name) for each in results) for field in fields(Played)
            )
            print(
                f"  {name:20}{mean:8.2f}{p95:8.2f}{computed:11,.0f}{ratio:10.3f}{preempted:11.0f}{mean / first:9.3f}",
                flush=True,
            )


def _play(name: str, load: Load, workload: Workload) -> Played:
    calls: dict[str, Call] = {}
    JobDesk._call_of = lambda desk, sequence: calls.get(sequence.turn.id)  # type: ignore[method-assign]
    policy, _, tier = name.partition(" + ")
    tiers = ["host=1GiB"] if tier else []
    with Engine("tiny", policy=policy, num_blocks=load.blocks, max_running=64, tiers=tiers) as engine:
        engine.generate("warm", SamplingParams(max_tokens=8))
        return _jobs(engine, calls, load, workload)


def _jobs(engine: Engine, calls: dict[str, Call], load: Load, workload: Workload) -> Played:
    randomly = random.Random(workload.seed)
    events: list[tuple[float, int, int]] = []
    tokens: list[array[int]] = []
    texts: list[list[int]] = []  # drawn beforehand: the engine has this thread
    gaps, at = [], 0.0
    for job in range(load.num_jobs):
        at += randomly.expovariate(load.rate)
        heapq.heappush(events, (at, job, 0))
        tokens.append(array("i", [randomly.randrange(250)]))
        texts.append([randomly.randrange(250) for _ in range(TOKENS[-1])])
        gaps.append([workload.scale * randomly.uniform(*gap) for gap in GAPS])
    arrived, took = {}, []
    under_way: dict[str, tuple[int, int]] = {}
    began = time.perf_counter()
    while events or engine.has_work:
        now = time.perf_counter() - began
        while events and events[0][0] <= now:
            due, job, turn = heapq.heappop(events)
            arrived.setdefault(job, due)
            tokens[job].extend(texts[job][len(tokens[job]) : TOKENS[turn]])
            params = SamplingParams(max_tokens=randomly.randint(*workload.output), temperature=0, ignore_eos=True)
            request = engine.submit(tokens[job], params, job_id=f"job {job}", is_last_step=turn == 7)
            under_way[request] = job, turn
            if turn < 7:
                calls[request] = Call("bash", TOOLS[turn], f"job {job}")
        if not engine.has_work:
            time.sleep(max(events[0][0] - (time.perf_counter() - began), 0))
            continue
        for delta in engine.step():
            if delta.request_id not in under_way:
                continue
            job, turn = under_way[delta.request_id]
            tokens[job].extend(delta.token_ids)
            if delta.finish_reason is not None:
                del under_way[delta.request_id]
                now = time.perf_counter() - began
                if turn == 7:
                    took.append(now - arrived[job])
                else:
                    heapq.heappush(events, (now + gaps[job][turn], job, turn + 1))
    engine.check()
    stats = engine.stats()
    computed = stats.prompt_tokens - stats.reused_tokens + stats.generated_tokens
    took.sort()
    least = sum(
        len(each) + len(TOKENS) - 1 for each in tokens
    )  # a turn's last token is sampled, and computed in the next
    p95 = took[int(0.95 * len(took))]
    return Played(statistics.mean(took), p95, computed, computed / least, stats.num_preemptions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["cost", "effect"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scale", type=float, default=0.15, help="of the tools' times")
    parser.add_argument("--tiers", action="store_true", help="also with a host tier")
    parser.add_argument(
        "--output", type=int, nargs=2, default=(8, 32), metavar=("LEAST", "MOST"), help="tokens an answer"
    )
    options = parser.parse_args()
    if options.only in (None, "cost"):
        cost()
    if options.only in (None, "effect"):
        names = (*POLICIES, *TIERED) if options.tiers else POLICIES
        effect(names, Workload(options.seed, options.scale, tuple(options.output)), options.rounds)


if __name__ == "__main__":
    main()
