"""Many engines: the coarse engine agrees with the detailed one, and whatever happens, nothing is lost or counted twice."""

import argparse
import json
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.base.config import EngineConfig
from segue.base.errors import InvalidRequest
from segue.bench.arrivals import arrival_times
from segue.bench.generated import AgentJob, agents
from segue.bench.play import Player
from segue.cli import fleet as command
from segue.sim import SimulatedEngine, StepCosts, find_hardware, find_shape
from segue.sim.fleet import Fleet, FleetConfig
from segue.sim.jobs import FleetJob, JobShape
from segue.sim.routers import ROUTERS
from segue.sim.slow import Link

COSTS = StepCosts(find_shape("llama-3.1-8b"), find_hardware("h100"))
BLOCKS = 24_000
USUAL = AgentJob().usual


def agent_shape(usual: float = USUAL) -> JobShape:
    job = AgentJob(usual=usual)
    return JobShape(job.prompt_tokens, job.output_tokens, job.gaps, job.usual)


def simulate(count=300, jps=30.0, usual=USUAL, **options):
    shape = agent_shape(usual)
    fleet = Fleet(FleetConfig(**({"engines": 10, "blocks": BLOCKS} | options)), COSTS, shape)
    return fleet.run(shape.jobs(count, jps, options.get("seed", 0)))


# Against the engine whose every step is planned


def played(gpu, blocks, jps, usual, seconds):
    """The same jobs on both: mean job seconds, and the share of prompts found."""
    workload = agents(arrival_times("poisson", jps, seconds, 0), 0, AgentJob(usual=usual))
    costs = StepCosts(find_shape("llama-3.1-8b"), find_hardware(gpu))
    engine = SimulatedEngine(costs, EngineConfig(blocks, max_model_len=4096), policy="fcfs")
    detailed = Player(workload, engine, turn_seconds=0.008).play()
    found = sum(turn.num_reused for turn in detailed.turns) / sum(turn.num_prompt for turn in detailed.turns)
    jobs = []
    for number, job in enumerate(workload.jobs):
        own = [turn for turn, asked in enumerate(job.turns) if asked.answer.text > 1 << 31]
        gaps = [turn.gap_seconds for turn in job.turns[:-1]]
        jobs.append(FleetJob(number, job.at, min(own, default=len(job.turns)), gaps))
    report = Fleet(FleetConfig(1, blocks), costs, agent_shape(usual)).run(jobs)
    return (report.job_seconds["mean"], report.found_share), (fmean(detailed.durations.values()), found)


@pytest.mark.parametrize(
    ("gpu", "blocks", "jps", "usual", "tolerance"),
    [
        ("h100", 24_000, 1, 0.925, 0.01),
        ("h100", 24_000, 10, 0.925, 0.03),
        ("h100", 24_000, 10, 0.0, 0.03),
        ("rtx5090", 5_402, 2, 0.0, 0.03),
        ("rtx5090", 5_402, 5, 0.925, 0.03),
        ("rtx5090", 5_402, 8, 0.925, 0.05),  # near saturation
        ("rtx5090", 5_402, 5, 0.0, 0.1),  # far beyond it: KV goes before its job is back
    ],
)
def test_one_engine_agrees_with_the_one_whose_steps_are_planned(gpu, blocks, jps, usual, tolerance):
    (seconds, found), (true_seconds, true_found) = played(gpu, blocks, jps, usual, 30)
    assert seconds == pytest.approx(true_seconds, rel=tolerance)
    assert found == pytest.approx(true_found, abs=0.01)


def test_a_job_alone_takes_what_its_steps_cost():
    shape = JobShape((500, 900), (40, 60), ((1.0, 1.0),))
    report = Fleet(FleetConfig(1, BLOCKS, turn_seconds=0.0), COSTS, shape).run([FleetJob(0, 0.0, 0, [1.0])])
    first = COSTS.prefill_seconds(500) + sum(COSTS.decode_seconds(1, 500 + at) for at in range(1, 40))
    second = COSTS.prefill_seconds(361, 539) + sum(COSTS.decode_seconds(1, 900 + at) for at in range(1, 60))
    assert report.job_seconds["mean"] == pytest.approx(first + 1.0 + second, rel=0.01)
    assert report.found_share == 539 / 1400


# What holds whatever happens


@st.composite
def shapes(draw):
    prompts, outputs, said = [], [], 0
    for _ in range(draw(st.integers(1, 4))):
        prompts.append(said + draw(st.integers(1, 400)))
        outputs.append(draw(st.integers(1, 40)))
        said = prompts[-1] + outputs[-1]
    gaps = tuple((0.0, draw(st.floats(0, 3))) for _ in prompts[1:])
    return JobShape(tuple(prompts), tuple(outputs), gaps, draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])))


@st.composite
def fleets(draw):
    shape = draw(shapes())
    engines = draw(st.integers(1, 5))
    config = FleetConfig(
        engines,
        2 * -(-shape.max_tokens // 16) + 2 + draw(st.integers(0, 200)),
        draw(st.sampled_from(sorted(ROUTERS))),
        max_running=draw(st.integers(1, 8)),
        max_step_tokens=draw(st.sampled_from([64, 2048])),
        choices=draw(st.integers(1, 3)),
        lease_seconds=draw(st.sampled_from([0.1, 2.0, 60.0])),
        split=draw(st.sampled_from([0.0, 0.0, 0.5])) if engines > 1 else 0.0,
        mtbf=draw(st.sampled_from([None, None, 5.0, 50.0])),
        repair=draw(st.sampled_from([0.5, 5.0])),
        remote_tier=draw(st.booleans()),
        network=Link(draw(st.sampled_from([1e8, 50e9])), 1e-3),
        seed=draw(st.integers(0, 99)),
    )
    return config, shape


@given(fleets(), st.integers(1, 40), st.sampled_from([1.0, 20.0, 500.0]))
def test_every_job_ends_once_and_no_engine_has_more_than_it_has(made, count, jps):
    config, shape = made
    fleet = Fleet(config, COSTS, shape)
    jobs = list(shape.jobs(count, jps, config.seed))
    last = 0.0

    def watch(now):
        nonlocal last
        assert now >= last
        last = now
        fleet.check()

    report = fleet.run(jobs, watch)
    assert report.num_jobs == count and report.num_turns == count * shape.num_turns
    assert all(job.is_last for job in jobs)
    assert all(0 <= engine.busy_seconds <= report.seconds + 1e-6 for engine in fleet.engines)
    assert all(engine.load == 0 for engine in fleet.engines)
    counts = fleet.counts
    assert counts.num_found + counts.num_loaded + counts.num_computed == counts.num_prompt
    if config.mtbf is None:
        assert counts.num_prompt == count * sum(shape.prompt_tokens)
        assert report.num_failures == report.num_resubmitted == 0
    shortest = sum(output - 1 for output in shape.output_tokens) * COSTS.decode_seconds(1, 0)
    assert report.job_seconds["p50"] >= shortest * 0.999


def test_the_same_seed_gives_the_same_bytes():
    options = {"engines": 20, "mtbf": 60.0, "repair": 5.0, "split": 0.3, "router": "lease"}
    first, again, other = (json.dumps(simulate(seed=seed, **options).to_json()) for seed in (3, 3, 4))
    assert first == again != other


# What routing, leases and stores are for


@pytest.mark.parametrize("usual", [0.0, 0.925])
@pytest.mark.parametrize("jps_each", [3, 12, 25])
@pytest.mark.parametrize("split", [0.0, 0.5])
def test_who_goes_back_to_his_kv_finds_no_less_of_it(usual, jps_each, split):
    found = {
        router: simulate(900, jps_each * 6.0, usual, engines=6, router=router, split=split).found_share
        for router in ("round-robin", "prefix", "lease")
    }
    assert found["round-robin"] <= min(found["prefix"], found["lease"])


def test_leases_keep_what_a_cache_loses_when_memory_is_short():
    prefix, lease = (simulate(1200, 60.0, 0.0, engines=4, blocks=16_000, router=name) for name in ("prefix", "lease"))
    assert lease.found_share > 1.2 * prefix.found_share
    assert lease.job_seconds["mean"] < prefix.job_seconds["mean"]


def test_least_loaded_is_more_even_than_drawing_one():
    one, two = (simulate(2000, 100.0, router="least-loaded", choices=choices) for choices in (1, 2))
    assert two.ttft_seconds["p99"] < one.ttft_seconds["p99"]


def test_failures_cost_time_and_a_remote_store_gives_most_of_it_back():
    none, lost, stored = (
        simulate(2000, 60.0, 0.0, **options)
        for options in ({}, {"mtbf": 20.0, "repair": 2.0}, {"mtbf": 20.0, "repair": 2.0, "remote_tier": True})
    )
    assert lost.num_failures and lost.num_resubmitted and lost.num_turns == stored.num_turns == 16_000
    assert none.recomputed_tokens < stored.recomputed_tokens < lost.recomputed_tokens
    assert none.job_seconds["mean"] < stored.job_seconds["mean"] < lost.job_seconds["mean"]
    assert stored.loaded_share > 0 == lost.loaded_share


def test_a_split_fleet_moves_kv_and_computes_prompts_apart():
    slow, fast = (simulate(router="prefix", split=0.3, network=Link(rate, 0.0)) for rate in (2e8, 50e9))
    assert fast.moved_bytes > 0
    assert slow.job_seconds["mean"] > fast.job_seconds["mean"]


# The command


def run(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([*words]))


def test_the_command_prints_a_row_for_each_router(capsys):
    assert run("--engines", "4", "--jobs", "50", "--router", "prefix,lease") == 0
    told = capsys.readouterr()
    assert [line.split()[0] for line in told.out.splitlines()[1:]] == ["router", "prefix", "lease"]
    assert told.err.count("events") == 2


def test_the_commands_json_is_the_same_bytes_again(capsys):
    words = ("--engines", "4", "--jobs", "50", "--seed", "7", "--json")
    outputs = [run(*words) or capsys.readouterr().out for _ in range(2)]
    assert outputs[0] == outputs[1]
    assert [each["router"] for each in json.loads(outputs[0])["routers"]] == list(ROUTERS)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--engines 0", "engines"),
        ("--jobs 0", "jobs"),
        ("--jps -1", "jps"),
        ("--jps nan", "jps"),
        ("--blocks 100", "blocks"),
        ("--router fastest", "router"),
        ("--router ,", "router"),
        ("--usual 1.5", "usual"),
        ("--gap-scale -1", "gap_scale"),
        ("--split 1", "split"),
        ("--split 0.5 --engines 1", "split"),
        ("--mtbf 0", "mtbf"),
        ("--repair inf", "repair"),
        ("--lease 0", "lease_seconds"),
        ("--choices 0", "choices"),
        ("--overload 0.5", "overload"),
        ("--network 0", "network"),
        ("--turn-seconds -1", "turn_seconds"),
        ("--max-running 0", "max_running"),
        ("--block-size 0", "block_size"),
        ("--gpu abacus", "gpu"),
        ("--model none-such", "model"),
    ],
)
def test_wrong_numbers_are_refused_by_name(words, field):
    with pytest.raises(InvalidRequest) as refused:
        run(*words.split())
    assert refused.value.field == field
