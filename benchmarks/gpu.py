"""The engine on a CUDA device, beside vLLM and what the memory's speed allows: one table.

    python benchmarks/gpu.py [--shape qwen3-1.7b|llama-8b] [--exact] [--attention triton]
                             [--only decode,drawn,first,beams,forks,agents,idle,profile]

Weights are random and in bf16: how fast a step is does not depend on them. Each figure is the least of several rounds. The floor
of a decode step is one read of the weights. vLLM runs first, in a process of its own, if it can be imported (`--no-vllm`: not).
"""

from __future__ import annotations

import argparse
import cProfile
import heapq
import importlib.util
import io
import json
import os
import pstats
import random
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from segue import BeamParams, Catalogue, Engine, Request, SamplingParams
from segue.bench.arrivals import arrival_times
from segue.bench.generated import AgentJob, agents
from segue.bench.local import play_locally
from segue.bench.workload import Texts, Workload
from segue.model.chat import ChatTemplate
from segue.model.loading import LoadedModel
from segue.model.spec import ModelSpec, tensor_shapes
from segue.model.tokenizer import ByteTokenizer

BYTES_PER_SECOND = 4.3e12  # that an H200 reads
SHAPES = {
    "qwen3-1.7b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "rope_theta": 1000000.0, "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    },
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "rope_theta": 500000.0, "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
Figures = dict[str, float]
BEAMS = "beams, 32 x 3 on a held state of 705"
GREEDY = {"temperature": 0.0, "ignore_eos": True}
DRAWN = {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "ignore_eos": True}
BATCHES = (1, 32, 128)


class RandomWeights(Mapping[str, torch.Tensor]):
    """Made on the device when they are taken."""

    def __init__(self, spec: ModelSpec) -> None:
        self._shapes = tensor_shapes(spec)

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if name.endswith("norm"):
            return torch.ones(shape, dtype=torch.bfloat16, device="cuda")
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * shape[-1] ** -0.5

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def load(shape: str) -> LoadedModel:
    spec = ModelSpec.from_hf_config(SHAPES[shape])
    return LoadedModel(shape, spec, RandomWeights(spec), ByteTokenizer(), ChatTemplate("", "", ""), f"random {shape}")


def open_engine(shape: str, **options: object) -> Engine:
    return Engine(load(shape), device="cuda", max_model_len=8192, max_step_tokens=4096, **options)


class Prompts:
    def __init__(self) -> None:
        self._randomly = random.Random(0)

    def __call__(self, length: int) -> list[int]:
        return [self._randomly.randrange(100, 100_000) for _ in range(length)]


def least(run: Callable[[], float], rounds: int) -> float:
    return min(run() for _ in range(rounds))


def timed(engine: Engine, *args: object, **options: object) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    engine.generate(*args, **options)
    return time.perf_counter() - began


def step_name(batch: int, how: dict[str, Any]) -> str:
    return f"decode step, batch {batch}{', drawn' if how is DRAWN else ''}"


def decode(engine: Engine, prompt: Prompts, how: dict[str, Any] = GREEDY) -> Figures:
    found = {}
    for batch in BATCHES:
        prompts = [prompt(64) for _ in range(batch)]
        short, long = (SamplingParams(max_tokens=count, **how) for count in (32, 160))
        timed(engine, prompts, long, detokenize=False)

        def run(params: SamplingParams, prompts=prompts) -> float:
            return least(lambda: timed(engine, prompts, params, detokenize=False), 5)

        found[step_name(batch, how)] = (run(long) - run(short)) / 128 * 1e3
    return found


def drawn(engine: Engine, prompt: Prompts) -> Figures:
    """The same with a temperature, top-k and top-p."""
    return decode(engine, prompt, DRAWN)


def first(engine: Engine, prompt: Prompts) -> Figures:
    one, found = SamplingParams(max_tokens=1, **GREEDY), {}
    for length in (705, 2900):
        cold = least(lambda length=length: timed(engine, prompt(length), one, detokenize=False), 6)
        known = prompt(length)
        timed(engine, known, one, detokenize=False)
        warm = least(lambda known=known: timed(engine, known, one, detokenize=False), 12)
        state = engine.generate(known, one, hold=True, detokenize=False)[0].request_id

        def run(state=state) -> float:  # by other tokens each time, since those that came before are known
            return timed(engine, Request(params=one, parent=state, suffix=prompt(5), detokenize=False))

        run(), run()
        found[f"first token, cold {length}"] = cold * 1e3
        found[f"first token, known {length}"] = warm * 1e3
        found[f"first token, {length} continued by 5"] = least(run, 30) * 1e3
        engine.release(state)
    return found


def items(vocab_size: int) -> Catalogue:
    """A hundred thousand, three tokens each."""
    randomly = np.random.default_rng(0)
    tokens = randomly.integers(vocab_size - 768, vocab_size - 512, (100_000, 3)) + np.array([0, 256, 512])
    tokens = np.unique(tokens, axis=0).astype(np.int32)
    return Catalogue.from_arrays(tokens, [f"item {at}" for at in range(len(tokens))])


def beams(engine: Engine, prompt: Prompts) -> Figures:
    found, one = {}, SamplingParams(max_tokens=1, **GREEDY)
    engine.set_catalogue("items", items(engine.model.spec.vocab_size))
    plain, chosen = BeamParams(width=32, max_tokens=3, ignore_eos=True), BeamParams(width=32, catalogue="items")
    states = [engine.generate(prompt(705), one, hold=True, detokenize=False)[0].request_id for _ in range(16)]
    for name, beam in ((BEAMS, plain), ("the same among 100,000 items", chosen)):

        def search(state: str, beam: BeamParams = beam) -> Request:
            return Request(beam=beam, parent=state, suffix=prompt(5), detokenize=False)

        def run(search=search) -> float:
            return timed(engine, search(states[0]))

        def run_many(count: int = 4, search=search) -> float:
            return timed(engine, [search(state) for state in states for _ in range(count)])

        run(), run()
        found[name] = least(run, 12) * 1e3
        run_many(1), run_many()
        found[f"{name}, many at once, a second"] = 4 * len(states) / least(run_many, 4)
    for state in states:
        engine.release(state)
    return found


def forks(engine: Engine, prompt: Prompts) -> Figures:
    held = engine.generate(prompt(2900), SamplingParams(max_tokens=1, **GREEDY), hold=True, detokenize=False)[0]
    short, long = (SamplingParams(max_tokens=count, **GREEDY) for count in (8, 40))

    def run(many: Callable[[SamplingParams], list[Request]]) -> float:
        """By the least of each, since a difference of two has the noise of both."""
        one, more = (least(lambda: timed(engine, many(params)), 8) for params in (short, long))
        return (more - one) / 32

    own = [prompt(64) for _ in range(32)]
    suffixes = [prompt(1) for _ in range(32)]

    def alone(params: SamplingParams) -> list[Request]:
        return [Request(each, params, detokenize=False) for each in own]

    def forked(params: SamplingParams) -> list[Request]:
        return [Request(params=params, parent=held.request_id, suffix=each, detokenize=False) for each in suffixes]

    for params in (short, long):  # records what is new, and is not counted
        timed(engine, alone(params))
        timed(engine, forked(params))
    of_short, of_forks = run(alone), run(forked)
    engine.release(held.request_id)
    return {
        "step of 32 short contexts": of_short * 1e3,
        "step of 32 forks of 2,900": of_forks * 1e3,
        "forks of short": of_forks / of_short,
    }


def idle(engine: Engine, prompt: Prompts) -> Figures:
    """The share of decode steps in which the device has nothing to do: a gap of over 5 µs is a wait for the host."""
    found = {}
    for batch in BATCHES:
        for each in [prompt(64) for _ in range(batch)]:
            engine.submit(each, SamplingParams(max_tokens=200, **GREEDY), detokenize=False)
        for _ in range(30):
            engine.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            for _ in range(50):
                engine.step()
            torch.cuda.synchronize()
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in seen.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
        busy, end = 0.0, spans[0][0]
        for begin, until in spans:
            busy += max(until - max(begin, end), 0.0)
            end = max(end, until)
        waited = sum(max(later[0] - before[1], 0.0) for before, later in pairwise(spans) if later[0] - before[1] > 5.0)
        found[f"device waits for the host, batch {batch}, %"] = 100 * waited / (end - spans[0][0])
        found[f"device between two kernels, batch {batch}, %"] = 100 * (1 - (busy + waited) / (end - spans[0][0]))
        while engine.has_work:
            engine.step()
    return found


def agents_workload(rate: float, seconds: float) -> Workload:
    """Each job's text is its own, as agents at work on different things have it."""
    return agents(arrival_times("poisson", rate, seconds, 0), 0, AgentJob(usual=0.0))


def agents_here(shape: str, options: argparse.Namespace) -> Figures:
    """The published eight-turn job, in the published pool."""
    workload = agents_workload(options.jps, options.seconds)
    found = {}
    for policy in options.policies.split(","):
        policy, _, host = policy.partition("+")
        tiers = [f"host={host}"] if host else []
        played = play_locally(
            workload, load(shape), policy, tiers, device="cuda", num_blocks=5403, max_model_len=8192,
            max_step_tokens=4096, exact=options.exact, attention=options.attention,
        )  # fmt: skip
        name = f"agents, {options.jps:g} jobs/s, {policy}{' + host' if tiers else ''}, s a job"
        found |= heard("ours", {name: statistics.mean(played.durations.values())})
        print(f"    {played.num_computed:,} tokens computed, {played.num_recomputed:,} of them again", flush=True)
    return found


def profile(engine: Engine, prompt: Prompts) -> Figures:
    """Where the time goes, on the host and on the device."""
    one = SamplingParams(max_tokens=1, **GREEDY)
    for batch in (1, 128):
        for each in [prompt(64) for _ in range(batch)]:
            engine.submit(each, SamplingParams(max_tokens=200, **GREEDY), detokenize=False)
        for _ in range(20):
            engine.step()
        where(f"decode, batch {batch}", engine.step, 20)
        while engine.has_work:
            engine.step()
    state = engine.generate(prompt(705), one, hold=True, detokenize=False)[0].request_id
    longer = Request(params=one, parent=state, suffix=prompt(5), detokenize=False)
    search = Request(
        beam=BeamParams(width=32, max_tokens=3, ignore_eos=True), parent=state, suffix=prompt(5), detokenize=False
    )
    where("continuation by 5", lambda: engine.generate(longer), 20)
    where("beams 32 x 3", lambda: engine.generate(search), 10)
    where("64 such searches", lambda: engine.generate([search] * 64), 2)
    where("cold 2,900", lambda: engine.generate([prompt(2900)], one, detokenize=False), 3)
    return {}


def where(name: str, run: Callable[[], object], rounds: int) -> None:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(rounds):
        run()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - began) / rounds
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as seen:
        for _ in range(rounds):
            run()
        torch.cuda.synchronize()
    busy: dict[str, tuple[float, int]] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent, count = busy.get(event.name[:64], (0.0, 0))
            busy[event.name[:64]] = spent + event.device_time / rounds, count + 1
    total = sum(spent for spent, _ in busy.values())
    print(f"{name}: {wall * 1e6:.0f} µs, on the device {total:.0f} µs")
    for kernel, (spent, count) in sorted(busy.items(), key=lambda item: -item[1][0])[:12]:
        print(f"   {spent:8.1f} µs {count // rounds:5} x {kernel}")
    if rounds > 2:
        host = cProfile.Profile()
        host.enable()
        for _ in range(rounds):
            run()
        host.disable()
        text = io.StringIO()
        pstats.Stats(host, stream=text).sort_stats("tottime").print_stats(12)
        print("\n".join(text.getvalue().splitlines()[6:22]))


# vLLM, in a process of its own


def vllm_figures(shape: str, options: argparse.Namespace) -> Figures:
    """Asked the same way: prompts as token ids, nothing detokenised, the least of several rounds."""
    if importlib.util.find_spec("vllm") is None or options.no_vllm:
        return {}
    found: Figures = {}
    wanted = [part for part in options.only.split(",") if part in ("decode", "drawn", "first", "beams", "agents")]
    for parts in ([part for part in wanted if part != "agents"], [part for part in wanted if part == "agents"]):
        if not parts:
            continue
        command = [sys.executable, __file__, "--peer", "--shape", shape, "--only", ",".join(parts)]
        command += ["--jps", str(options.jps), "--seconds", str(options.seconds)]
        # Steps in the caller's process, as ours are; for agents as it is served, with a process for the engine.
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if parts == ["agents"] else "0"}
        quiet = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        peer = subprocess.Popen(command, env=os.environ | quiet | own, stdout=subprocess.PIPE, text=True)
        with peer:
            assert peer.stdout is not None
            for line in peer.stdout:
                if line.startswith("figure "):
                    found |= heard("vLLM", json.loads(line.removeprefix("figure ")))
        if peer.returncode:
            print(f"vLLM ended with status {peer.returncode}")
    return found


def tell(found: Figures) -> None:
    print("figure", json.dumps(found), flush=True)


def heard(who: str, found: Figures) -> Figures:
    """Said at once: a run that is cut short has told what it found."""
    for name, value in found.items():
        print(f"    {who}: {name}: {value:.3f}", flush=True)
    return found


def as_vllm(shape: str, options: argparse.Namespace) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from vllm import LLM
    from vllm import SamplingParams as Sampling
    from vllm.sampling_params import BeamSearchParams

    parts, prompt = options.only.split(","), Prompts()
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/config.json", "w") as file:
            json.dump(SHAPES[shape], file)
        words = Tokenizer(models.WordLevel({f"t{at}": at for at in range(SHAPES[shape]["vocab_size"])}, unk_token="t0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t2", bos_token="t1")
        fast.save_pretrained(folder)
        pool = {"num_gpu_blocks_override": 5402} if parts == ["agents"] else {}
        llm = LLM(
            folder, load_format="dummy", max_model_len=8192, gpu_memory_utilization=0.5, dtype="bfloat16",
            enable_prefix_caching=True, max_logprobs=128, max_num_batched_tokens=4096, **pool,
        )  # fmt: skip

    def run(prompts: list[list[int]], count: int, how: dict[str, Any] = GREEDY) -> float:
        params = Sampling(max_tokens=count, detokenize=False, **how)
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
        return time.perf_counter() - began

    if "first" in parts:
        for length in (705, 2900):
            cold = least(lambda length=length: run([prompt(length)], 1), 6)
            known = prompt(length)
            run([known], 1)
            warm = least(lambda known=known: run([known], 1), 12)
            again = least(lambda known=known: run([[*known, *prompt(5)]], 1), 12)
            tell({f"first token, cold {length}": cold * 1e3, f"first token, known {length}": warm * 1e3})
            tell({f"first token, {length} continued by 5": again * 1e3})
    for how in (each for part, each in (("decode", GREEDY), ("drawn", DRAWN)) if part in parts):
        for batch in BATCHES:
            prompts = [prompt(64) for _ in range(batch)]
            run(prompts, 160, how)
            long, short = (least(lambda count=count: run(prompts, count, how), 5) for count in (160, 32))
            tell({step_name(batch, how): (long - short) / 128 * 1e3})
    if "beams" in parts:
        params = BeamSearchParams(beam_width=32, max_tokens=3, ignore_eos=True)

        def search(prompts: list[list[int]]) -> float:
            began = time.perf_counter()
            llm.beam_search([{"prompt_token_ids": each} for each in prompts], params)
            return time.perf_counter() - began

        known = [prompt(705) for _ in range(16)]
        run(known, 1)
        tell({BEAMS: least(lambda: search(known[:1]), 4) * 1e3})
        tell({f"{BEAMS}, many at once, a second": len(known) / least(lambda: search(known), 2)})
    if "agents" in parts:
        seconds = vllm_agents(llm.llm_engine, Sampling, agents_workload(options.jps, options.seconds), shape)
        tell({f"agents, {options.jps:g} jobs/s, fcfs, s a job": seconds})


def vllm_agents(engine: Any, sampling: Any, workload: Workload, shape: str) -> float:
    """The same jobs at the same times; the mean of their seconds."""
    texts = Texts(SHAPES[shape]["vocab_size"])
    said = {job.id: array("i") for job in workload.jobs}
    events = [(job.at, number, job, 0) for number, job in enumerate(workload.jobs)]
    heapq.heapify(events)
    count, under_way, took, began = len(events), {}, [], time.monotonic()
    while events or under_way:
        now = time.monotonic() - began
        while events and events[0][0] <= now:
            _, number, job, at = heapq.heappop(events)
            texts.append(said[job.id], job.turns[at].added)
            params = sampling(max_tokens=job.turns[at].num_output, temperature=0, ignore_eos=True, detokenize=False)
            name = f"{job.id} {at}"
            under_way[name] = job, at, number
            engine.add_request(name, {"prompt_token_ids": said[job.id].tolist()}, params)
        if not under_way:
            time.sleep(max(events[0][0] - (time.monotonic() - began), 0.0))
            continue
        for output in engine.step():
            if output.finished:
                job, at, _ = under_way.pop(output.request_id)
                said[job.id].extend(output.outputs[0].token_ids)
                now = time.monotonic() - began
                if at + 1 < len(job.turns):
                    count += 1
                    heapq.heappush(events, (now + job.turns[at].gap_seconds, count, job, at + 1))
                else:
                    took.append(now - job.at)
    return statistics.mean(took)


PARTS = {
    "decode": decode,
    "drawn": drawn,
    "first": first,
    "beams": beams,
    "forks": forks,
    "idle": idle,
    "profile": profile,
}


def floors(spec: ModelSpec) -> Figures:
    """One read of the weights, as a rule; three for a search of three tokens."""
    size = 2 * sum(torch.Size(each).numel() for name, each in tensor_shapes(spec).items() if name != "embed")
    size += 2 * spec.vocab_size * spec.hidden_size if spec.tie_embeddings else 0
    once = size / BYTES_PER_SECOND * 1e3
    steps = [step_name(batch, how) for how in (GREEDY, DRAWN) for batch in BATCHES]
    firsts = [f"first token, {length} continued by 5" for length in (705, 2900)]
    return dict.fromkeys((*steps, *firsts), once) | {BEAMS: 3 * once}


def table(ours: Figures, theirs: Figures, least_there_is: Figures) -> None:
    print(f"  {'ms, unless said':58}{'ours':>9}{'vLLM':>9}{'ours/vLLM':>11}{'floor':>8}")
    for name, value in ours.items():
        peer, floor = theirs.get(name), least_there_is.get(name)
        if peer is None and name.startswith("agents"):
            peer = theirs.get(name.replace("adaptive + host", "fcfs").replace("adaptive", "fcfs"))
        columns = (
            f"{value:9.2f}",
            f"{peer:9.2f}" if peer is not None else " " * 9,
            f"{value / peer:11.3f}" if peer is not None else " " * 11,
            f"{floor:8.2f}" if floor is not None else "",
        )
        print(f"  {name:58}{''.join(columns)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), action="append")
    parser.add_argument("--only", default="decode,drawn,first,beams,forks")
    parser.add_argument("--exact", action="store_true", help="batch-invariant")
    parser.add_argument("--attention", default="auto", choices=["auto", "triton"])
    parser.add_argument("--jps", type=float, default=8.0, help="agents: jobs a second")
    parser.add_argument("--seconds", type=float, default=30.0, help="agents: for how long they come")
    parser.add_argument(
        "--policies", default="fcfs,adaptive,adaptive+24GiB", help="agents: with a host tier of that size"
    )
    parser.add_argument("--no-vllm", action="store_true")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for shape in options.shape or list(SHAPES):
        if options.peer:
            as_vllm(shape, options)
            continue
        theirs, ours, began = vllm_figures(shape, options), {}, time.perf_counter()
        parts = options.only.split(",")
        if set(parts) - {"agents"}:
            with open_engine(shape, kv_memory="20GiB", exact=options.exact, attention=options.attention) as engine:
                print(f"{shape}: {engine.backend_note}; ready after {time.perf_counter() - began:.1f} s")
                for part in parts:
                    if part != "agents":
                        ours |= heard("ours", PARTS[part](engine, Prompts()))
        if "agents" in parts:
            ours |= agents_here(shape, options)
        table(ours, theirs, floors(ModelSpec.from_hf_config(SHAPES[shape])))


if __name__ == "__main__":
    main()
