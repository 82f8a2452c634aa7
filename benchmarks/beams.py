"""Beam search on a cached prefix: SmolLM2 in fp32 on this machine, beside transformers and vLLM.

    python benchmarks/beams.py [--only widths|catalogue|bookkeeping] [--rounds N] [--vllm-python PATH]

A prefix of 700 tokens is in memory; a suffix of five and three steps of a search follow. transformers gets the same prefix as a
cache that is repeated for each beam before its time begins. vLLM finds it in its prefix cache: with both cores and blocks of 32
tokens, and as it is shipped, with one core and blocks of 128.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from segue import BeamParams, Catalogue, Engine, EngineConfig, EngineCore, Request, SamplingParams, State
from segue.base.config import Environment
from segue.engine import Candidates, StepPlan, StepResult
from segue.model.loading import open_model
from segue.model.tiny import save_hf_folder

WIDTHS = (8, 32, 128)
PREFIX = [random.Random(number).randrange(1000, 40_000) for number in range(700)]
SUFFIX = [11, 12, 13, 14, 15]


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def held(engine: Engine) -> State:
    state = engine.generate(PREFIX, SamplingParams(max_tokens=1, temperature=0), hold=True)[0].state
    assert state is not None
    return engine.fork(state, len(PREFIX))


@contextmanager
def folder() -> Iterator[Path]:
    model = open_model("smollm2", Environment.read().cache_dir)
    with tempfile.TemporaryDirectory() as name:
        save_hf_folder(model.spec, model.weights, Path(name))
        model.tokenizer.save(Path(name) / "tokenizer.json")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": model.chat_template.eos}
        (Path(name) / "tokenizer_config.json").write_text(json.dumps(settings))
        yield Path(name)


def widths(rounds: int, vllm: str | None) -> None:
    from transformers import AutoModelForCausalLM

    taken: dict[str, dict[int, list[float]]] = {"segue": {}, "transformers": {}}
    with folder() as path, Engine("smollm2", num_blocks=800) as engine:
        reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        state = held(engine)
        for _ in range(rounds):
            for width in WIDTHS:
                engine.kv.forget()  # what an earlier round computed of the suffix
                beam = BeamParams(width=width, max_tokens=3, ignore_eos=True)
                request = Request(parent=state, suffix=SUFFIX, beam=beam)
                taken["segue"].setdefault(width, []).append(seconds(lambda request=request: engine.generate(request)))
        for width in WIDTHS[:2]:
            for _ in range(2):
                taken["transformers"].setdefault(width, []).append(_transformers(reference, width))
        del reference
        found = {name: {width: statistics.median(own) for width, own in of.items()} for name, of in taken.items()}
        if vllm is not None:
            found["vllm"] = _vllm(vllm, path, 32, {"VLLM_CPU_OMP_THREADS_BIND": "0-1"})
            found["vllm, shipped"] = _vllm(vllm, path, 128, {})
    ours = found["segue"]
    for name, of in found.items():
        for width, own in of.items():
            print(f"{name:14} width {width:3}: {own * 1e3:8.1f} ms  {own / ours[width]:6.1f} of ours")
    for one, other in pairwise(WIDTHS):
        print(f"width x{other // one}: cost x{ours[other] / ours[one]:.2f} ({one} to {other})")


def _transformers(model: torch.nn.Module, width: int) -> float:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([PREFIX]), past_key_values=cache)
        cache.batch_repeat_interleave(width)
        options = {"num_beams": width, "num_return_sequences": width, "max_new_tokens": 3, "do_sample": False}
        ids = torch.tensor([PREFIX + SUFFIX])
        return seconds(
            lambda: model.generate(ids, past_key_values=cache, eos_token_id=None, pad_token_id=0, **options)  # type: ignore[operator]
        )


def _vllm(command: str, path: Path, block_size: int, settings: dict[str, str]) -> dict[int, float]:
    env = {**os.environ, **settings, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
    env["PATH"] = f"{Path(command).parent}:{os.environ['PATH']}"
    peer = Path(__file__).with_name("peer_vllm_beams.py")
    arguments = [command, "-P", str(peer), str(path), str(block_size), "8", "32"]
    told = subprocess.run(arguments, env=env, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    return {int(width): own for width, own in json.loads(told).items()}


def catalogue(rounds: int) -> None:
    """Steps of a search with and without a million items, in turns."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (1_000_000, 4)) + np.array([20_000, 20_256, 20_512, 20_768])
    items = Catalogue.from_arrays(tokens.astype(np.int32), [str(number) for number in range(len(tokens))])
    kinds = {
        "none": BeamParams(width=32, max_tokens=4, ignore_eos=True),
        "full": BeamParams(width=32, max_tokens=4, ignore_eos=True, catalogue=items),
        "legal": BeamParams(width=32, max_tokens=4, ignore_eos=True, catalogue=items, scoring="legal"),
    }
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    with Engine("smollm2", num_blocks=800) as engine:
        state = held(engine)
        for number in range(rounds + 1):
            for name, beam in kinds.items():
                own = seconds(
                    lambda beam=beam: engine.generate(Request(parent=state, suffix=SUFFIX, beam=beam))  # type: ignore[misc]
                )
                taken[name] += [own] if number else []
    for name, own in taken.items():
        ratio = statistics.median(a / b for a, b in zip(own, taken["none"], strict=True))
        print(f"a million items, {name:6}: {statistics.median(own) * 1e3:7.1f} ms, {ratio:.3f} of none")


class Still:
    """An executor that computes nothing: what is left of a step is bookkeeping."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        found = []
        for row in plan.rows:
            if row.search is not None:
                beams, count = max(len(row.search.tails), 1), row.search.num_candidates
                order = range(count)
                scores = [-float(at) for at in order]
                own = (
                    [(at * 7) % beams for at in order],
                    [at % 1000 for at in order],
                    scores,
                    [0] * count,
                    [False] * count,
                )
                found.append(Candidates(*own))
        self.seconds += time.perf_counter() - began
        return StepResult((), candidates=found)

    def close(self) -> None:
        pass


def bookkeeping(rounds: int) -> None:
    executor = Still()
    engine = EngineCore(executor, EngineConfig(4000, max_step_tokens=2048, max_running=64))  # type: ignore[arg-type]
    prefixes = [[number, *PREFIX] for number in range(16)]
    spent = []
    for _ in range(rounds * 4):
        executor.seconds = 0.0
        for prefix in prefixes:
            engine.submit(Request(prefix, beam=BeamParams(width=32, max_tokens=8)))
        steps = 0
        while engine.stats().num_waiting:
            engine.step()
        executor.seconds, began = 0.0, time.perf_counter()
        while engine.has_work:
            engine.step()
            steps += 1
        spent.append((time.perf_counter() - began - executor.seconds) / steps)
    print(f"bookkeeping of 16 groups of 32: {statistics.median(spent) * 1e3:.2f} ms a step (goal 2)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["widths", "catalogue", "bookkeeping"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm-python", metavar="PATH", help="the Python of an environment with vLLM for the CPU")
    given = parser.parse_args()
    if given.only in (None, "widths"):
        widths(given.rounds, given.vllm_python)
    if given.only in (None, "catalogue"):
        catalogue(given.rounds)
    if given.only in (None, "bookkeeping"):
        bookkeeping(given.rounds)


if __name__ == "__main__":
    main()
