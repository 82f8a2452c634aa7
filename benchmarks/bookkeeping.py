"""KV bookkeeping and scheduling without a model: ours, and vLLM's in the same run when an interpreter that has it is given.

    python benchmarks/bookkeeping.py [--vllm-python PATH]

Block size 16, 20,000 blocks, prefix caching on, a request of 4,096 tokens. Times are medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from segue.base.clock import SystemClock
from segue.base.config import EngineConfig
from segue.base.types import SamplingParams, Scope
from segue.engine import EngineCore, StepPlan, StepResult
from segue.kv import KVManager

BLOCKS, SIZE, TOKENS, ROUNDS = 20_000, 16, 4_096, 60
OPERATIONS = ("create and hash", "full-hit match", "take the hit", "cold allocate", "free", "decode append")


def timed(function: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    value = function()
    return time.perf_counter() - start, value


def ours(rounds: int = ROUNDS) -> dict[str, float]:
    """Microseconds for each operation of a request's life, cold and then on a full hit."""
    kv = KVManager(BLOCKS, SIZE)
    scope = Scope(model="bench")
    rng = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    for _ in range(rounds):
        tokens = array("i", [rng.randrange(100_000) for _ in range(TOKENS)])
        seconds, table = timed(lambda tokens=tokens: kv.open(tokens, scope))
        times["create and hash"].append(seconds)
        match = kv.match(table, tokens)

        def cold(table=table, match=match, tokens=tokens):
            kv.admit(table, match, TOKENS)
            kv.commit(table, tokens, TOKENS)

        times["cold allocate"].append(timed(cold)[0])
        appends = []
        for position in range(TOKENS, TOKENS + 4 * SIZE):
            tokens.append(7)

            def append(table=table, tokens=tokens, position=position):
                kv.extend(table, position, position + 1)
                kv.commit(table, tokens, position + 1)

            appends.append(timed(append)[0])
        times["decode append"].append(statistics.fmean(appends))
        times["free"].append(timed(lambda table=table: kv.close(table))[0])
        prompt = tokens[:TOKENS]
        again = kv.open(prompt, scope)
        seconds, match = timed(lambda again=again, prompt=prompt: kv.match(again, prompt))
        times["full-hit match"].append(seconds)
        assert match.num_tokens == TOKENS - 1
        seconds, got = timed(lambda again=again, match=match: kv.admit(again, match, TOKENS))
        times["take the hit"].append(seconds)
        kv.settle(got.copy)
        kv.close(again)
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


class InstantExecutor:
    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult([9] * len(plan.rows))

    def close(self) -> None: ...


def scheduler_steps(num_sequences: int, steps: int = 300) -> float:
    """Microseconds of plan + apply for a step in which every sequence decodes one token."""
    config = EngineConfig(BLOCKS, SIZE, max_step_tokens=16_384, max_running=num_sequences, max_model_len=8_192)
    engine = EngineCore(InstantExecutor(), config, clock=SystemClock())
    scheduler, executor = engine._scheduler, engine._executor
    rng = random.Random(1)
    for _ in range(num_sequences):
        prompt = [rng.randrange(100_000) for _ in range(rng.randrange(40, 64))]
        engine.submit(prompt, SamplingParams(max_tokens=steps + 50, ignore_eos=True))
    while scheduler.num_waiting:
        engine.step()
    taken = []
    for _ in range(steps):
        start = time.perf_counter()
        plan = scheduler.plan()
        middle = time.perf_counter()
        result = executor.execute(plan)
        again = time.perf_counter()
        scheduler.apply(plan, result)
        taken.append(middle - start + time.perf_counter() - again)
    return statistics.median(taken) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="an interpreter that can import vLLM")
    arguments = parser.parse_args()
    mine = ours()
    steps = {count: scheduler_steps(count) for count in (1, 8, 64, 256)}
    theirs: dict[str, float] = {}
    if arguments.vllm_python:
        script = Path(__file__).with_name("peer_vllm_bookkeeping.py")
        output = subprocess.run(
            [arguments.vllm_python, "-P", script], check=True, capture_output=True, text=True
        ).stdout
        theirs = json.loads(output.strip().splitlines()[-1])
    rows = [(name, mine[name]) for name in OPERATIONS]
    rows.append(("sum", sum(mine.values())))
    rows += [(f"plan + apply, {count} decoding", value) for count, value in steps.items()]
    if theirs:
        theirs["sum"] = sum(theirs[name] for name in OPERATIONS)
    print(f"{'microseconds':30}{'segue':>10}" + (f"{'vLLM':>10}{'ratio':>8}" if theirs else ""))
    for name, value in rows:
        peer = f"{theirs[name]:10.1f}{theirs[name] / value:7.1f}x" if theirs else ""
        print(f"{name:30}{value:10.1f}{peer}")


if __name__ == "__main__":
    sys.exit(main())
