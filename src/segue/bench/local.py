"""Workloads on a real engine in this process, and what its steps cost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from segue.base.types import SamplingParams
from segue.bench.contestants import make_contestant
from segue.bench.play import Played, Player, check_fits
from segue.bench.workload import Run, Texts, Workload
from segue.engine import EngineCore
from segue.engine.executor import StepPlan
from segue.engine.outputs import Delta
from segue.model.engine import Engine
from segue.model.spec import ModelSpec
from segue.sim.costs import StepCosts, Work
from segue.sim.fitting import Fit, Step, fit
from segue.sim.hardware import GB, TFLOP, Hardware
from segue.sim.shapes import ModelShape

_WARM_TOKENS = 64
_SETTLE_STEPS = 3
LOCAL = Hardware(
    "local", "this machine", 0.0, 25 * GB, 0.15 * TFLOP, 10 * GB, source="round numbers; what is fitted counts"
)


def shape_of(spec: ModelSpec, dtype: str) -> ModelShape:
    config = {
        "model_type": spec.architecture,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tie_embeddings,
        "torch_dtype": dtype,
    }
    return ModelShape.from_config(config, spec.architecture)


def costs_of(engine: Engine) -> StepCosts:
    """With the default coefficients, to be fitted."""
    return StepCosts(shape_of(engine.model.spec, engine.runner.kv_layout.dtype), LOCAL)


def play_locally(
    workload: Workload,
    model: str,
    policy: str,
    tiers: Sequence[str] = (),
    *,
    progress: Callable[[int, int], None] | None = None,
    sample_seconds: float | None = None,
    steps: list[Step] | None = None,
    **options: Any,
) -> Played:
    """In real time. `options` are those of `Engine`; what its steps took is added to `steps`."""
    with Engine(model, policy=make_contestant(policy, workload), tiers=tiers, **options) as engine:
        check_fits(workload, engine)
        engine.runner.warm_up()
        warm_up(engine)
        texts = Texts(engine.model.spec.vocab_size)
        timer = StepTimer(engine, steps) if steps is not None else None
        player = Player(
            workload,
            engine,
            texts=texts,
            progress=progress,
            sample_seconds=sample_seconds,
            step=timer.step if timer is not None else None,
        )
        return player.play()


def warm_up(engine: EngineCore) -> None:
    """What is slow once is not what is measured."""
    engine.generate([10] * _WARM_TOKENS, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))


class StepTimer:
    """Takes an engine's steps and remembers what each had to do and how long all of it took: from the end of the last one, if
    there was more to do."""

    def __init__(self, engine: EngineCore, steps: list[Step] | None = None) -> None:
        self.steps: list[Step] = steps if steps is not None else []
        self._engine = engine
        self._work: Work | None = None
        self._ended: float | None = None
        engine.watch = self._see

    def _see(self, plan: StepPlan) -> None:
        self._work = Work.of(plan)

    def step(self) -> list[Delta]:
        self._work = None
        began = time.perf_counter() if self._ended is None else self._ended
        deltas = self._engine.step()
        now = time.perf_counter()
        if self._work is not None:
            self.steps.append(Step(self._work, now - began))
        self._ended = now if self._engine.has_work else None
        return deltas


def measure_steps(engine: Engine, seed: int = 0, rounds: int = 3) -> list[Step]:
    """Steps of many shapes: prompts of several lengths, alone and beside decoding, and batches that shrink."""
    warm_up(engine)
    timer, texts = StepTimer(engine), Texts(engine.model.spec.vocab_size, seed)
    randomly = random.Random(f"calibrate {seed}")
    longest = min(engine.config.max_sequence_len - 64, engine.config.kv_tokens // 4, 2800)
    text = 0
    for _ in range(rounds):
        for batch in (1, 2, 4, 8, 16, 32):
            for _ in range(batch):
                text += 1
                length = int(longest ** randomly.uniform(0.4, 1.0)) if batch <= 4 else randomly.randint(8, longest // 8)
                params = SamplingParams(max_tokens=randomly.randint(6, 24), temperature=0.0, ignore_eos=True)
                engine.submit(texts.tokens(Run(text, 0, max(length, 4))), params, detokenize=False)
                if randomly.random() < 0.3:
                    timer.step()
            while engine.has_work:
                timer.step()
    engine.watch = None
    return timer.steps[_SETTLE_STEPS:]


def calibrate(engine: Engine, seed: int = 0, rounds: int = 3) -> Fit:
    return fit(costs_of(engine), measure_steps(engine, seed, rounds))
