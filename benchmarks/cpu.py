"""SmolLM2 in fp32 on the CPU: ours against transformers in this process and, when an interpreter that has it is given, vLLM.

    python benchmarks/cpu.py [--vllm-python PATH] [--llama-cpp-python PATH]

Decode steps at a context of 700 for batch 1 and 8, cold prefill of 700 tokens, first token when those 700 are in memory.
Milliseconds, medians; ours and transformers' are measured in alternation, the peers in their own process in between.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from segue import Engine, SamplingParams
from segue.base.config import Environment
from segue.model.catalog import resolve
from segue.model.tiny import save_hf_folder

CONTEXT, STEPS, ROUNDS = 700, 24, 3
MEASURES = ("decode step, batch 1", "decode step, batch 8", "cold prefill of 700", "first token, 700 in memory")
_rng = random.Random(0)


def prompt(length: int = CONTEXT) -> list[int]:
    return [_rng.randrange(1000, 40_000) for _ in range(length)]


def milliseconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


class Ours:
    """Through the whole engine: submit, plan, execute, sample, apply."""

    def __init__(self, **options: object) -> None:
        self.engine = Engine("smollm2", device="cpu", num_blocks=1200, **options)

    def measure(self) -> dict[str, float]:
        one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        ids = prompt()
        cold = milliseconds(lambda: self.engine.generate(ids, one))
        warm = [milliseconds(lambda: self.engine.generate(ids, one)) for _ in range(3)]
        steps = [self._decode(1), self._decode(8)]
        self.engine.forget()
        return dict(zip(MEASURES, (*steps, cold, statistics.median(warm)), strict=True))

    def _decode(self, batch: int) -> float:
        for _ in range(batch):
            self.engine.submit(prompt(), SamplingParams(max_tokens=STEPS + 2, temperature=0, ignore_eos=True))
        while self.engine.stats().num_waiting or len(self.engine.step()) < batch:
            self.engine.step()
        times = []
        while self.engine.has_work:
            times.append(milliseconds(self.engine.step))
        return statistics.median(times[:-1])


class Transformers:
    def __init__(self) -> None:
        import transformers

        path = resolve("smollm2", Environment.read().cache_dir).path
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()

    @torch.inference_mode()
    def measure(self) -> dict[str, float]:
        ids = torch.tensor([prompt()])
        cold = milliseconds(lambda: self.model(ids, use_cache=True, logits_to_keep=1))
        cache = self.model(ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
        warm = milliseconds(lambda: self.model(ids[:, -1:], past_key_values=cache, logits_to_keep=1).logits.argmax())
        return dict(zip(MEASURES, (self._decode(1), self._decode(8), cold, warm), strict=True))

    def _decode(self, batch: int) -> float:
        ids = torch.tensor([prompt() for _ in range(batch)])
        state = self.model(ids, use_cache=True, logits_to_keep=1)
        times = []
        for _ in range(STEPS):
            start = time.perf_counter()
            token = state.logits[:, -1:].argmax(-1)
            state = self.model(token, past_key_values=state.past_key_values, logits_to_keep=1)
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times)


def peer(python: str, script: str, *words: str) -> dict[str, float]:
    environment = {
        **os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    command = [python, "-P", str(Path(__file__).with_name(script)), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{script} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def combine(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="an interpreter that can import vLLM's CPU build")
    parser.add_argument("--llama-cpp-python", help="an interpreter that can import llama_cpp")
    arguments = parser.parse_args()
    mine, theirs = Ours(), Transformers()
    found: dict[str, list[dict[str, float]]] = {"segue": [], "transformers": []}
    mine.measure()
    for _ in range(ROUNDS):
        found["segue"].append(mine.measure())
        found["transformers"].append(theirs.measure())
    if arguments.vllm_python:
        with tempfile.TemporaryDirectory() as folder:
            save_hf_folder(mine.engine.model.spec, mine.engine.model.weights, Path(folder))
            runs = [
                peer(arguments.vllm_python, "peer_vllm_cpu.py", folder, way) for way in ("in-process", "own-process")
            ]
            found["vLLM"] = [{name: min(run[name] for run in runs) for name in MEASURES}]  # the better of the two
    found["segue"].append(mine.measure())
    quantized = Ours(quantize="int8")
    quantized.measure()
    found["segue int8"] = [quantized.measure() for _ in range(ROUNDS)]
    if arguments.llama_cpp_python:
        path = str(resolve("smollm2", Environment.read().cache_dir).path)
        found["llama.cpp Q4_1"] = [peer(arguments.llama_cpp_python, "peer_llama_cpp.py", path)]
        found["segue int8"].append(quantized.measure())
    show({name: combine(rounds) for name, rounds in found.items()})
    cold_cost_of_caching(mine)
    start_up()


def cold_cost_of_caching(mine: Ours) -> None:
    """A cold request of 700 tokens and 16 decode steps, with the prefix cache on and off, in alternation."""
    without = Ours(prefix_caching=False)
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(8):
        ids = prompt()
        times[True].append(milliseconds(lambda: mine.engine.generate(ids, params)))
        times[False].append(milliseconds(lambda: without.engine.generate(ids, params)))
    on, off = statistics.median(times[True]), statistics.median(times[False])
    print(f"cold request, prefix cache on / off: {on:.1f} / {off:.1f} ms ({on / off - 1:+.1%})")


def start_up() -> None:
    """From the shell to the first token of `tiny`, and what importing torch takes of that."""
    command = [sys.executable, "-m", "segue", "generate", "--model", "tiny", "hello", "--max-tokens", "1"]
    whole, bare = [], []
    for _ in range(5):
        whole.append(milliseconds(lambda: subprocess.run(command, check=True, capture_output=True)))
        bare.append(milliseconds(lambda: subprocess.run([sys.executable, "-c", "import torch"], check=True)))
    print(f"start-up to the first token, tiny: {min(whole) / 1e3:.2f} s, of which import torch {min(bare) / 1e3:.2f} s")


def show(results: dict[str, dict[str, float]]) -> None:
    print(f"{'milliseconds':28}" + "".join(f"{name:>16}" for name in results))
    for measure in MEASURES:
        own = results["segue"][measure]
        cells = [
            f"{found[measure]:8.1f} {found[measure] / own:6.2f}x" if measure in found else "-"
            for found in results.values()
        ]
        print(f"{measure:28}" + "".join(f"{cell:>16}" for cell in cells))
    own = results["segue"]
    print(f"first token on a hit / cold: 1/{own[MEASURES[2]] / own[MEASURES[3]]:.1f}")


if __name__ == "__main__":
    main()
