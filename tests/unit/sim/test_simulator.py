"""The simulator runs the product's own scheduler: the same plans as a real engine, and time that can be worked out by hand."""

from __future__ import annotations

import pytest

from segue.base.clock import VirtualClock
from segue.base.config import EngineConfig
from segue.base.errors import InvalidRequest
from segue.base.types import BeamParams, SamplingParams
from segue.bench.contestants import make_contestant
from segue.bench.generated import AgentJob, agents, chat
from segue.bench.local import shape_of
from segue.bench.play import Player, VirtualPace
from segue.bench.workload import Texts
from segue.engine.executor import StepPlan, StepResult
from segue.model.engine import Engine
from segue.sim.costs import Coefficients, StepCosts, Work
from segue.sim.engine import SimulatedEngine
from segue.sim.hardware import find_hardware
from segue.sim.shapes import find_shape
from segue.sim.slow import Link

COSTS = StepCosts(find_shape("llama-3.1-8b"), find_hardware("rtx5090"))
SMALL = AgentJob(
    prompt_tokens=(30, 90, 150, 240),
    output_tokens=(9, 5, 12, 4),
    gaps=((0.02, 0.05), (0.5, 1.5), (0.02, 0.05)),
    usual=0.3,
)


class Costed:
    """A real executor that takes no time of its own, but what its plans would cost."""

    def __init__(self, inner, costs: StepCosts, clock: VirtualClock) -> None:
        self._inner, self._costs, self._clock = inner, costs, clock
        self.results: list[StepResult] = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._inner.execute(plan)
        self._clock.advance(self._costs.seconds(Work.of(plan)))
        self.results.append(result)
        return result


def _seen(plan: StepPlan, at: float):
    rows = [(row.sequence_id, row.start, row.stop, row.blocks.tolist(), row.sampling is not None) for row in plan.rows]
    return at, rows, list(plan.copies)


@pytest.mark.parametrize("policy", ["fcfs", "continuum-released", "adaptive"])
def test_plans_are_those_of_the_real_engine(policy):
    """The same arrivals, costs and answers: every plan is equal, to the block and to the moment. Memory is short, so there is
    preemption and eviction to agree on."""
    workload = agents([0.01 * number for number in range(24)], 3, SMALL)
    config = EngineConfig(90, 16, max_step_tokens=128, max_running=16, max_model_len=512)
    options = {"num_blocks": 90, "max_step_tokens": 128, "max_running": 16, "max_model_len": 512}
    clock, real, simulated = VirtualClock(), [], []
    with Engine("tiny", policy=make_contestant(policy, workload), clock=clock, **options) as engine:
        costs = StepCosts(
            shape_of(engine.model.spec, "float32"), find_hardware("rtx6000"), Coefficients(step_seconds=0.02)
        )
        texts = Texts(engine.model.spec.vocab_size)
        engine._executor = executor = Costed(engine._executor, costs, clock)
        engine.watch = lambda plan: real.append(_seen(plan, clock.now()))
        first = Player(workload, engine, pace=VirtualPace(clock), texts=texts).play()
    assert engine.config == config
    with SimulatedEngine(costs, config, policy=make_contestant(policy, workload)) as engine:
        said = iter(executor.results)
        costed = engine.executor.execute
        engine.executor.execute = lambda plan: (costed(plan), next(said))[1]
        engine.watch = lambda plan: simulated.append(_seen(plan, engine.clock.now()))
        second = Player(workload, engine, texts=texts).play()
    assert len(real) > 60
    assert simulated == real
    assert second.durations == first.durations
    assert [turn[:-2] for turn in second.turns] == [turn[:-2] for turn in first.turns]
    assert first.num_preemptions == second.num_preemptions


def test_one_request_takes_what_its_steps_cost():
    with SimulatedEngine(COSTS, EngineConfig(200)) as engine:
        engine.submit(list(range(10, 110)), SamplingParams(max_tokens=3, ignore_eos=True))
        while engine.has_work:
            engine.step()
        assert engine.clock.now() == pytest.approx(
            COSTS.prefill_seconds(100) + COSTS.decode_seconds(1, 101) + COSTS.decode_seconds(1, 102)
        )


def test_searches_are_simulated_too():
    with SimulatedEngine(COSTS, EngineConfig(200)) as engine:
        result = engine.generate([list(range(10, 60))], beam=BeamParams(width=8, max_tokens=3, ignore_eos=True))[0]
        assert len(result.beams) == 8
        assert all(len(beam.token_ids) == 3 for beam in result.beams)
        assert engine.clock.now() > 3 * COSTS.decode_seconds(8, 50) * 0.5


def _replayed(tiers, **links):
    """A prompt is computed, driven out by others, and asked for again: what the second time found, and the seconds it took."""
    config = EngineConfig(100, 16, max_model_len=1024)
    with SimulatedEngine(COSTS, config, policy="fcfs", tiers=tiers, **links) as engine:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        engine.generate([list(range(100, 900))], params)
        for other in range(4):
            engine.generate([[other + 10] * 800], params)
        began = engine.clock.now()
        result = engine.generate([list(range(100, 900))], params)[0]
        engine.check()
        return result.reuse.loaded, engine.clock.now() - began


def test_tiers_move_blocks_in_virtual_time():
    lost = _replayed(())[1]
    host = _replayed(("host=1GiB",))
    assert host[0] >= 768
    assert host[1] < lost / 2
    fast = _replayed(("disk=/nowhere,1GiB",), disk=Link(20e9, 1e-5))
    assert fast[0] >= 768
    slow = _replayed(("disk=/nowhere,1GiB",), disk=Link(1e6, 1.0))
    assert slow[0] < 768 or slow[1] > fast[1]
    shared = _replayed(("remote=redis://nowhere", "host=64MiB"), network=Link(20e9, 1e-5))
    assert shared[0] >= 768


def test_what_a_simulated_engine_has_not_is_refused():
    with SimulatedEngine(COSTS, EngineConfig(100)) as engine:
        engine.generate([[10] * 50], SamplingParams(max_tokens=2, ignore_eos=True), request_id="a", hold=True)
        with pytest.raises(InvalidRequest, match="no KV"):
            engine.save("a", "/tmp/never")
    with pytest.raises(InvalidRequest, match="int8"):
        SimulatedEngine(COSTS, EngineConfig(100), tiers=("disk=/nowhere,1GiB,int8",))


def test_blocks_of_a_job_that_is_over_are_not_copied_out():
    """Unless another job had used them: then they may be wanted again."""

    def copied(is_last: bool, share: bool) -> int:
        with SimulatedEngine(
            COSTS, EngineConfig(60, 16, max_model_len=1024), policy="fcfs", tiers=("host=1GiB",)
        ) as engine:
            params = SamplingParams(max_tokens=2, ignore_eos=True)
            text = list(range(100, 500))
            engine.generate([text], params, job_id="a", is_last_step=is_last)
            if share:
                engine.generate([text], params, job_id="b", is_last_step=is_last)
            engine.generate([[7] * 800], params, job_id="c", is_last_step=True)
            engine.check()
            return engine.tiers()[0]["stored_blocks"]

    assert copied(False, False) > 10
    assert copied(True, False) == 0
    assert copied(True, True) > 10


def test_the_same_seed_gives_the_same_run():
    def played():
        workload = chat([0.3 * number for number in range(20)], 5, pause_seconds=1.0)
        with SimulatedEngine(
            COSTS, EngineConfig(300, max_model_len=4096), policy=make_contestant("adaptive", workload)
        ) as engine:
            found = Player(workload, engine, sample_seconds=0.1).play()
            return found.turns, found.occupancy, found.durations, found.num_events

    assert played() == played()
