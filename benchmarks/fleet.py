"""The coarse engine of `segue sim fleet` beside the engine whose every step is planned, on the same jobs (docs/scale.md)."""

from __future__ import annotations

import argparse
from statistics import fmean

from segue.base.config import EngineConfig
from segue.bench.arrivals import arrival_times
from segue.bench.generated import AgentJob, agents
from segue.bench.play import Player
from segue.bench.workload import Workload
from segue.policies import Disposition, Policy
from segue.policies.continuum import ContinuumReleased
from segue.sim import SimulatedEngine, StepCosts, find_hardware, find_shape
from segue.sim.fleet import Fleet, FleetConfig
from segue.sim.jobs import FleetJob, JobShape

CASES = (
    ("h100", 24_000, 0.925, (1, 3, 10, 20, 30)),
    ("h100", 24_000, 0.0, (3, 10, 12, 15, 20)),
    ("rtx5090", 5_402, 0.925, (2, 5, 8)),
    ("rtx5090", 5_402, 0.0, (1, 2, 5)),
)
LEASE_SECONDS = 10.0


class TenSeconds(ContinuumReleased):
    """What the `lease` router's engines do: every job's KV is kept for so long, and whoever has it goes first."""

    name = "ten-seconds"

    def at_turn_end(self, *_: object) -> Disposition:
        return Disposition(keep_seconds=LEASE_SECONDS, value=1.0)

    def review(self, *_: object) -> Disposition:
        return Disposition(keep_seconds=LEASE_SECONDS, value=1.0)


def fleet_jobs(workload: Workload) -> list[FleetJob]:
    jobs = []
    for number, job in enumerate(workload.jobs):
        own = [turn for turn, asked in enumerate(job.turns) if asked.answer is not None and asked.answer.text > 1 << 31]
        gaps = [turn.gap_seconds for turn in job.turns[:-1]]
        jobs.append(FleetJob(number, job.at, min(own, default=len(job.turns)), gaps))
    return jobs


def compare(gpu: str, blocks: int, usual: float, jps: float, seconds: float, router: str, policy: Policy | str) -> str:
    job = AgentJob(usual=usual)
    workload = agents(arrival_times("poisson", jps, seconds, 0), 0, job)
    costs = StepCosts(find_shape("llama-3.1-8b"), find_hardware(gpu))
    engine = SimulatedEngine(costs, EngineConfig(blocks, max_model_len=4096), policy=policy)
    detailed = Player(workload, engine, turn_seconds=0.008).play()
    shape = JobShape(job.prompt_tokens, job.output_tokens, job.gaps, usual)
    coarse = Fleet(FleetConfig(1, blocks, router, lease_seconds=LEASE_SECONDS), costs, shape).run(fleet_jobs(workload))
    found = sum(turn.num_reused for turn in detailed.turns) / sum(turn.num_prompt for turn in detailed.turns)
    first = fmean(turn.first_token_at - turn.asked_at for turn in detailed.turns)
    mean, ours = fmean(detailed.durations.values()), coarse.job_seconds["mean"]
    return (
        f"| {gpu}, {usual:g} | {router} | {jps:g} | {mean:.2f} | {ours:.2f} ({ours / mean - 1:+.1%}) "
        f"| {found:.3f} | {coarse.found_share:.3f} | {first * 1e3:.0f} | {coarse.ttft_seconds['mean'] * 1e3:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="that jobs come for (default: 60)")
    seconds = parser.parse_args().seconds
    print(
        "| card, usual | router | jobs/s | job s, planned | coarse | found, planned | coarse | ttft ms, planned | coarse |"
    )
    print("|" + " --- |" * 9)
    for gpu, blocks, usual, loads in CASES:
        for jps in loads:
            print(compare(gpu, blocks, usual, jps, seconds, "prefix", "fcfs"), flush=True)
    for jps in (12, 15, 20):
        print(compare("h100", 24_000, 0.0, jps, seconds, "lease", TenSeconds()), flush=True)


if __name__ == "__main__":
    main()
