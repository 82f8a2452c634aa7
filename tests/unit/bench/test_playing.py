"""Playing workloads: what is measured is what happened."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from segue.base.config import EngineConfig
from segue.base.errors import InvalidRequest
from segue.bench.arrivals import arrival_times
from segue.bench.contestants import FixedTime, Oracle, make_contestant
from segue.bench.generated import AgentJob, agents, closed, shared_prefix, two_stage
from segue.bench.leaderboard import standings
from segue.bench.play import Player, check_fits
from segue.bench.records import read_lines, run_record, trace_records, write_lines
from segue.bench.served import _events
from segue.bench.sweep import Cell, Load, Machine, cells, run_all, simulate
from segue.bench.workload import Job, Run, Turn, Workload
from segue.sim.costs import StepCosts
from segue.sim.engine import SimulatedEngine
from segue.sim.hardware import find_hardware
from segue.sim.shapes import find_shape

COSTS = StepCosts(find_shape("llama-3.1-8b"), find_hardware("rtx5090"))


def _play(workload, blocks=2000, policy="fcfs", **options):
    with SimulatedEngine(
        COSTS, EngineConfig(blocks, max_model_len=8192), policy=make_contestant(policy, workload)
    ) as engine:
        return Player(workload, engine, **options).play()


def test_times_of_a_single_job_can_be_worked_out():
    turns = (Turn((Run(1, 0, 100),), 2, 3.0, "bash", "ls"), Turn((Run(2, 0, 50),), 1))
    played = _play(Workload("w", (Job("a", turns, 1.0),)), turn_seconds=0.01)
    first = COSTS.prefill_seconds(100) + COSTS.decode_seconds(1, 101)
    second = COSTS.prefill_seconds(51, 101)  # the last token of the answer was never fed
    assert played.turns[0].asked_at == 1.0
    assert played.turns[0].seconds == pytest.approx(first + 0.01)
    assert played.turns[1].num_reused == 101
    assert played.turns[1].num_lost == 0
    assert played.durations == {"a": pytest.approx(first + second + 3.02)}
    assert played.num_computed == 100 + 1 + 51


def test_a_closed_loop_keeps_so_many_jobs_going():
    workload = closed(shared_prefix([0.0] * 30, prefix_tokens=100), 4)
    played = _play(workload)
    assert len(played.durations) == 30
    events = sorted([(turn.asked_at, 1) for turn in played.turns] + [(turn.ended_at, -1) for turn in played.turns])
    going, most = 0, 0
    for _, change in events:
        going += change
        most = max(most, going)
    assert most == 4


def test_blocks_are_counted_by_what_they_are_for():
    workload = agents(arrival_times("poisson", 4, 10, 0))
    played = _play(workload, 800, "continuum-released", sample_seconds=0.1)
    assert all(sum(each[1:]) == 799 for each in played.occupancy)
    assert max(each.leased for each in played.occupancy) > 0
    assert max(each.cached for each in played.occupancy) > 0


def test_jobs_that_cannot_run_are_counted_and_others_go_on():
    short, long = (Turn((Run(1, 0, 50),), 2),), (Turn((Run(2, 0, 900),), 2),)
    workload = Workload("w", (Job("a", short), Job("b", long), Job("c", short)))
    played = _play(workload, 20)
    assert set(played.durations) == {"a", "c"}
    assert "b" in played.failed
    with SimulatedEngine(COSTS, EngineConfig(20)) as engine, pytest.raises(InvalidRequest, match="902 tokens"):
        check_fits(workload, engine)


def test_searches_follow_thoughts():
    played = _play(two_stage([0.0, 0.1], prompt_tokens=100, thought_tokens=20))
    assert len(played.durations) == 2
    assert {turn.num_prompt for turn in played.turns if turn.turn == 1} == {125}
    assert all(turn.num_reused == 119 for turn in played.turns if turn.turn == 1)


def test_fixed_times_and_an_oracle():
    workload = agents(arrival_times("poisson", 12, 15, 0))
    kept = {name: _play(workload, 5402, name) for name in ("fcfs", "fixed-30s", "oracle")}
    assert kept["fixed-30s"].wasted_pin_block_seconds + kept["fixed-30s"].used_pin_block_seconds > 0
    assert kept["oracle"].num_recomputed <= kept["fcfs"].num_recomputed
    mean = {name: sum(each.durations.values()) for name, each in kept.items()}
    assert mean["oracle"] <= mean["fcfs"]
    assert isinstance(make_contestant("oracle", workload), Oracle)
    assert isinstance(make_contestant("fixed-1.5s", workload), FixedTime)
    for wrong in ("fixed-", "fixed-0s", "nobody"):
        with pytest.raises(InvalidRequest, match="policy"):
            make_contestant(wrong, workload)


def test_policies_hear_of_the_tools_that_the_workload_names():
    """`context_serve` decides by the command: it drops what waits for pytest and keeps the rest."""
    workload = agents([0.0, 0.5], 0)
    with SimulatedEngine(
        COSTS, EngineConfig(800, max_model_len=8192), policy=make_contestant("context_serve", workload)
    ) as engine:
        Player(workload, engine).play()
        kept = {decision.num_tokens == 1655 + 12: decision.keep_seconds for decision in engine.decisions()}
    assert kept[True] == 0.0
    assert kept[False] > 0.0


def _records(policies, tiers=(), seconds=8.0, workers=1, jps=12.0):
    chosen = cells([Load("agents", jps, seconds)], [Machine("rtx5090", num_blocks=2500)], policies, tiers, [0], 0.5)
    return list(run_all(chosen, workers))


def test_records_have_the_seeds_schema_and_the_same_bytes_for_the_same_seed(tmp_path):
    once, again = _records(["fcfs", "adaptive"]), _records(["fcfs", "adaptive"], workers=2)
    assert json.dumps(once) == json.dumps(again)
    record = once[0][0]
    names = """policy jps avg_duration_s p90_duration_s p95_duration_s per_turn_avg_latency_ms per_turn_avg_prompt_tokens
    job_durations ttft_avg_s recompute_ratio preemptions wasted_pin_block_seconds"""
    assert set(names.split()) <= record.keys()
    assert record["per_turn_avg_prompt_tokens"] == {
        "1": 92.0, "2": 469.0, "3": 811.0, "4": 1343.0, "5": 1655.0, "6": 2241.0, "7": 2665.0, "8": 2915.0
    }  # fmt: skip
    assert record["avg_duration_s"] == pytest.approx(sum(record["job_durations"]) / 96, rel=1e-6)
    path = tmp_path / "all.jsonl"
    for run, trace in once:
        write_lines(path, [run, *trace])
    assert len(read_lines([path])) == 2
    assert len(read_lines([tmp_path], "turn")) == 2 * 8 * 96
    assert read_lines([path], "blocks")
    path.write_text("{}\nnot json\n")
    with pytest.raises(InvalidRequest, match="line 2"):
        read_lines([path])


def test_what_ends_no_job_is_no_result():
    workload = Workload("w", (Job("a", (Turn((Run(2, 0, 900),), 2),)),))
    with pytest.raises(InvalidRequest, match="no job"):
        run_record(workload, _play(workload, 20), {})
    assert list(trace_records(_play(workload, 20), {})) == []


def test_the_board_ranks_by_share_of_the_base_with_intervals():
    runs = [record for record, _ in _records(["fcfs", "adaptive", "fixed-2s", "fcfs+tiers"], ["host=8GiB"])]
    found = standings(runs)
    assert {each.name for each in found} == {"fcfs", "adaptive", "fixed-2s", "fcfs+tiers"}
    shares = {each.name: each.share for each in found}
    assert shares["fcfs"] == 1.0
    assert [each.share for each in found] == sorted(shares.values())
    assert all(each.low <= each.share <= each.high for each in found)
    assert shares["adaptive"] < 1.0
    with pytest.raises(InvalidRequest, match="fcfs was not run"):
        standings([record for record in runs if record["policy"] != "fcfs"])


def test_tiers_are_for_those_that_ask():
    with pytest.raises(InvalidRequest, match="tier"):
        cells([Load("agents", 1.0)], [Machine("rtx5090")], ["fcfs+tiers"], (), [0])
    chosen = cells([Load("agents", 1.0)], [Machine("rtx5090")], ["fcfs", "fcfs+tiers"], ["host=1GiB"], [0])
    assert [cell.tiers for cell in chosen] == [(), ("host=1GiB",)]


@pytest.mark.parametrize("gpu,blocks,rate", [("rtx6000", 3000, 8.0), ("rtx5090", 5402, 12.0), ("a100-40", 9000, 5.0)])
def test_adaptive_with_a_host_tier_is_nowhere_worse_than_another(gpu, blocks, rate):
    """Short runs of the cells that `benchmarks/simulator.py --cells` has in full."""
    load, machine = Load("agents", rate, 15.0), Machine(gpu, num_blocks=blocks)

    def mean(policy, tiers=()):
        durations = simulate(Cell(load, machine, policy, tiers))[1].durations
        return sum(durations.values()) / len(durations)

    host = ("host=64GiB",)
    ours = mean("adaptive", host)
    others = [mean("fcfs"), mean("continuum-released"), mean("continuum"), mean("fcfs", host), mean("continuum", host)]
    assert ours <= 1.02 * min(others)


def test_parameters_of_the_agents_job():
    job = AgentJob(prompt_tokens=(50, 100), output_tokens=(5, 5), gap_scale=0.5)
    assert len(agents([0.0], 0, job).jobs[0].turns) == 2
    assert agents([0.0], 0, job).jobs[0].turns[0].gap_seconds <= 0.075


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_servers_events_are_cut_at_newlines_alone(end):
    events = [{"choices": [{"text": text}]} for text in ("a\u2028b", "\u2029", "c\u0085")]
    said = [f"data: {json.dumps(each, ensure_ascii=False)}{end}{end}".encode() for each in events]

    async def pieces():
        for byte in b"".join([*said, b"data: [DONE]"]):
            yield bytes([byte])

    async def read():
        return [each async for each in _events(httpx.Response(200, content=pieces()))]

    assert asyncio.run(read()) == events
