"""What the plugin costs vLLM, and what its policies bring there: run it with the Python of an environment that has vLLM.

    .vllm-env/bin/python benchmarks/vllm_plugin.py [--only steps|agents|beams] [--rounds N] [--jps RATE] [--jobs N] [--blocks N]

steps:  256 requests that decode, no model: vLLM's scheduler with the plugin, over without.
agents: the eight-turn job of `policies.py` on vLLM's CPU engine, with a pool that is too small for its jobs.
beams:  three tokens after 705 that are held, 32 wide: vLLM's own search, and the same as a continuation. With a GPU on it, and
        Qwen3-1.7B's shape (`--large`).
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

TOKENS = (92, 469, 811, 1343, 1655, 2241, 2665, 2915)
GAPS = ((0.05, 0.15), (0.05, 0.1), (0.05, 0.1), (0.08, 0.2), (2.0, 5.0), (0.05, 0.1), (0.1, 0.3))
TOOLS = ("ls", "cat", "grep", "sed", "pytest", "git diff", "python")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2048, "hidden_size": 256,
    "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LARGE = CONFIG | {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip
WITHOUT = "vLLM alone"
POLICIES = (WITHOUT, "fcfs", "continuum", "adaptive")


# A step's cost


def steps(rounds: int) -> None:
    from tests.vllm.harness import PlainScheduler, World

    for is_async in (False, True):
        ratios = []
        for _ in range(rounds):
            taken = {}
            for name in ("without", "with") if len(ratios) % 2 else ("with", "without"):
                options = {"num_blocks": 8000, "max_seqs": 256, "budget": 8192, "is_async": is_async}
                world = World(PlainScheduler, **options) if name == "without" else World(**options)
                taken[name] = _step_seconds(world)
            ratios.append(taken["with"] / taken["without"])
        print(
            f"a step of 256 that decode, {'async' if is_async else 'sync'}, with the plugin over without: "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}; goal 1.03)",
            flush=True,
        )


def _step_seconds(world: Any, num_steps: int = 150) -> float:
    """The median of schedule() and update_from_output() together; what a model would say is made up."""
    from vllm.v1.outputs import ModelRunnerOutput

    scheduler = world.scheduler
    for at in range(256):
        world.add(f"r{at}", [10 + (at + each) % 400 for each in range(60)], max_tokens=900)
    taken, under_way = [], []
    for at in range(num_steps + 20):
        began = time.perf_counter()
        planned = scheduler.schedule()
        spent = time.perf_counter() - began
        names = list(planned.num_scheduled_tokens)
        said = [[11]] * len(names)
        under_way.append((planned, ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, said)))
        if len(under_way) > (1 if scheduler.scheduler_config.async_scheduling else 0):
            began = time.perf_counter()
            scheduler.update_from_output(*under_way.pop(0))
            spent += time.perf_counter() - began
        if at >= 20:
            taken.append(spent)
    return statistics.median(taken)


# Agents


def agents(options: argparse.Namespace) -> None:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in POLICIES}
    for number in range(options.rounds):
        for name in POLICIES if number % 2 == 0 else POLICIES[::-1]:
            found[name].append(_in_process("agents", options, name))
            print(f"  round {number + 1}, {name}: {found[name][-1]}", flush=True)
    base = statistics.mean(each["seconds"] for each in found["fcfs"])
    print(
        f"{options.jobs} jobs, {options.jps:g} a second, {options.blocks} blocks of 32; {options.rounds} rounds, means:"
    )
    for name, each in found.items():
        seconds = statistics.mean(one["seconds"] for one in each)
        computed = statistics.mean(one["computed"] / one["needed"] for one in each)
        print(
            f"  {name:12} {seconds:6.2f} s a job, {seconds / base:.2f} of fcfs; {computed:.3f} of the tokens that had to be"
        )


def _in_process(part: str, options: argparse.Namespace, policy: str) -> dict[str, float]:
    command = [
        sys.executable,
        __file__,
        "--only",
        part,
        "--as",
        policy,
        "--jps",
        str(options.jps),
        "--jobs",
        str(options.jobs),
    ]
    command += ["--blocks", str(options.blocks), "--scale", str(options.scale)]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }  # fmt: skip
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
    told = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not told:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    result: dict[str, float] = json.loads(told[-1].removeprefix("RESULT "))
    return result


def open_llm(policy: str, num_blocks: int) -> Any:
    from vllm import LLM

    own = (
        {}
        if policy == WITHOUT
        else {"scheduler_cls": "segue.vllm.Scheduler", "additional_config": {"segue": {"policy": policy}}}
    )
    folder = tempfile.mkdtemp(prefix="segue-bench-")
    Path(folder, "config.json").write_text(json.dumps(CONFIG))
    return LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=4096,
        block_size=32, num_gpu_blocks_override=num_blocks, max_num_seqs=64, max_num_batched_tokens=2048,
        max_logprobs=64, seed=0, **own,
    )  # fmt: skip


def play(options: argparse.Namespace) -> dict[str, float]:
    """All jobs, in real time, in this process."""
    from vllm import SamplingParams

    llm = open_llm(options.policy, options.blocks)
    engine, with_plugin, randomly = llm.llm_engine, options.policy != WITHOUT, random.Random(0)
    llm.generate(
        [{"prompt_token_ids": [5] * 600}],
        SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    if with_plugin:
        from segue.policies import Call

        desk = engine.engine_core.engine_core.scheduler.jobs
        desk._call_of = lambda asked: Call(
            "bash", TOOLS[int(asked.request.request_id.split()[1].split("-")[0]) % 7], asked.turn.job_id, ""
        )
    events, said, began_at = [], {}, {}
    at = 0.0
    for job in range(options.jobs):
        at += randomly.expovariate(options.jps)
        gaps = [randomly.uniform(*pair) * options.scale for pair in GAPS]
        outputs = [randomly.randint(8, 32) for _ in TOKENS]
        events.append((at, job, 0, gaps, outputs))
        said[job], began_at[job] = [], at
    heapq.heapify(events)
    took, under_way, computed, needed = [], {}, 0, 0
    began = time.monotonic()
    while events or under_way:
        now = time.monotonic() - began
        while events and events[0][0] <= now:
            _, job, turn, gaps, outputs = heapq.heappop(events)
            fresh = max(TOKENS[turn] - len(said[job]), 1)
            said[job] += [5 + (job * 7919 + len(said[job]) + each * 31) % 2000 for each in range(fresh)]
            fields = {"job_id": f"job {job}", "is_last_step": int(turn == 7)} if with_plugin else None
            params = SamplingParams(
                max_tokens=outputs[turn], temperature=0, ignore_eos=True, detokenize=False, extra_args=fields
            )
            name = f"{job} {turn}"
            engine.add_request(name, {"prompt_token_ids": list(said[job])}, params)
            under_way[name] = job, turn, gaps, outputs, fresh + (1 if turn else 0)
        if not under_way:
            time.sleep(max(events[0][0] - (time.monotonic() - began), 0.0))
            continue
        for output in engine.step():
            if not output.finished:
                continue
            job, turn, gaps, outputs, fresh = under_way.pop(output.request_id)
            computed += len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
            needed += fresh
            said[job] += output.outputs[0].token_ids
            now = time.monotonic() - began
            if turn == 7:
                took.append(now - began_at[job])
            else:
                heapq.heappush(events, (now + gaps[turn], job, turn + 1, gaps, outputs))
    return {"seconds": round(statistics.mean(took), 3), "computed": computed, "needed": needed}


# Beams


def beams(options: argparse.Namespace, width: int = 32, length: int = 705) -> None:
    """In turns, and each on a prompt of its own: else one would find the other's lines in the cache."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import BeamSearchParams

    from segue.vllm.beams import beam_search

    config = LARGE if options.large else CONFIG
    folder = tempfile.mkdtemp(prefix="segue-bench-")
    Path(folder, "config.json").write_text(json.dumps(config))
    words = Tokenizer(models.WordLevel({f"t{at}": at for at in range(config["vocab_size"])}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t2", bos_token="t1").save_pretrained(
        folder
    )
    own = {"gpu_memory_utilization": 0.5} if options.large else {"enforce_eager": True, "block_size": 32}
    llm = LLM(
        folder, load_format="dummy", dtype=config["torch_dtype"], max_model_len=4096, max_logprobs=128, seed=0,
        scheduler_cls="segue.vllm.Scheduler", **own,
    )  # fmt: skip
    randomly, suffix = random.Random(0), [11, 12, 13, 14]

    def held() -> tuple[str, list[int]]:
        """A state, and all that it has."""
        prompt, name = [randomly.randrange(5, config["vocab_size"]) for _ in range(length)], f"s{randomly.random()}"
        params = SamplingParams(
            max_tokens=1, temperature=0, detokenize=False, extra_args={"hold_seconds": 60, "state_id": name}
        )
        said = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0].token_ids
        return name, [*prompt, *said]

    def search(tokens: list[int]) -> list[list[int]]:
        params = BeamSearchParams(beam_width=width, max_tokens=3, ignore_eos=True)
        found = llm.beam_search([{"prompt_token_ids": [*tokens, *suffix]}], params)[0].sequences
        return [list(line.tokens[-3:]) for line in found]

    def continued(name: str) -> list[list[int]]:
        return [list(line.token_ids) for line in beam_search(llm, name, suffix, width=width, max_tokens=3)]

    name, tokens = held()
    same = sum(line in search(tokens) for line in continued(name))
    taken: dict[str, list[float]] = {"vLLM's own": [], "continued": []}
    for _ in range(options.rounds * 3):
        for way in taken:
            name, tokens = held()
            began = time.perf_counter()
            search(tokens) if way == "vLLM's own" else continued(name)
            taken[way].append((time.perf_counter() - began) * 1e3)
    own_ms, ours_ms = (statistics.median(each) for each in taken.values())
    print(
        f"beams {width} x 3 after {length} held: vLLM's own {own_ms:.1f} ms, continued {ours_ms:.1f} "
        f"({ours_ms / own_ms:.2f}); {same} of {width} lines the same",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["steps", "agents", "beams"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jps", type=float, default=2.0, help="agents: jobs a second")
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--blocks", type=int, default=400)
    parser.add_argument("--scale", type=float, default=0.5, help="of the tools' times")
    parser.add_argument("--large", action="store_true", help="beams: with Qwen3-1.7B's shape")
    parser.add_argument("--as", dest="policy", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.policy is not None:
        print("RESULT", json.dumps(play(options)), flush=True)
        return
    if options.only in (None, "steps"):
        steps(max(options.rounds, 3) * 3)
    if options.only in (None, "agents"):
        agents(options)
    if options.only in (None, "beams"):
        beams(options)


if __name__ == "__main__":
    main()
