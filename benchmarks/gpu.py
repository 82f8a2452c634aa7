"""The engine on a CUDA device, beside what the memory's speed allows.

    python benchmarks/gpu.py [--shape qwen3-1.7b|llama-8b] [--only decode,first,beams,forks,profile]

Weights are random and in bf16: how fast a step is does not depend on them. Each figure is the least of several rounds. The floor
of a decode step is one read of the weights.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from segue import BeamParams, Engine, Request, SamplingParams
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
GREEDY = {"temperature": 0.0, "ignore_eos": True}


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


def open_engine(shape: str, **options: object) -> Engine:
    spec = ModelSpec.from_hf_config(SHAPES[shape])
    loaded = LoadedModel(shape, spec, RandomWeights(spec), ByteTokenizer(), ChatTemplate("", "", ""), f"random {shape}")
    return Engine(loaded, device="cuda", max_model_len=8192, max_step_tokens=4096, **options)


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


def decode(engine: Engine, prompt: Prompts) -> None:
    for batch in (1, 32, 128):
        prompts = [prompt(64) for _ in range(batch)]
        short, long = (SamplingParams(max_tokens=count, **GREEDY) for count in (32, 160))
        timed(engine, prompts, long, detokenize=False)

        def run(params: SamplingParams, prompts=prompts) -> float:
            return least(lambda: timed(engine, prompts, params, detokenize=False), 5)

        print(f"decode step, batch {batch}: {(run(long) - run(short)) / 128 * 1e3:.3f} ms", flush=True)


def first(engine: Engine, prompt: Prompts) -> None:
    one = SamplingParams(max_tokens=1, **GREEDY)
    for length in (705, 2900):
        cold = least(lambda length=length: timed(engine, prompt(length), one, detokenize=False), 6)
        known = prompt(length)
        timed(engine, known, one, detokenize=False)
        warm = least(lambda known=known: timed(engine, known, one, detokenize=False), 12)
        result = engine.generate(known, one, hold=True, detokenize=False)[0]
        state = result.request_id
        suffix = prompt(5)

        def run(state=state, suffix=suffix) -> float:
            return timed(engine, Request(params=one, parent=state, suffix=suffix, detokenize=False))

        run()
        print(
            f"first token, {length} tokens: cold {cold * 1e3:.2f} ms, known {warm * 1e3:.2f} ms, "
            f"a continuation by 5 {least(run, 30) * 1e3:.2f} ms",
            flush=True,
        )
        engine.release(state)


def beams(engine: Engine, prompt: Prompts) -> None:
    for width in (8, 32):
        result = engine.generate(prompt(705), SamplingParams(max_tokens=1, **GREEDY), hold=True, detokenize=False)[0]
        beam = BeamParams(width=width, max_tokens=3, ignore_eos=True)
        suffix = prompt(5)

        def run(state=result.request_id, beam=beam, suffix=suffix) -> float:
            return timed(engine, Request(beam=beam, parent=state, suffix=suffix, detokenize=False))

        run()
        print(f"beams, width {width}, 3 tokens on a held state: {least(run, 12) * 1e3:.2f} ms", flush=True)
    states = [
        engine.generate(prompt(705), SamplingParams(max_tokens=1, **GREEDY), hold=True, detokenize=False)[0].request_id
        for _ in range(16)
    ]
    many = [Request(beam=beam, parent=state, suffix=prompt(5), detokenize=False) for state in states for _ in range(4)]
    timed(engine, many[:16])
    taken = least(lambda: timed(engine, many), 3)
    print(f"beams, width 32, {len(many)} requests at once: {len(many) / taken:.1f} a second", flush=True)


def forks(engine: Engine, prompt: Prompts) -> None:
    held = engine.generate(prompt(2900), SamplingParams(max_tokens=1, **GREEDY), hold=True, detokenize=False)[0]
    short, long = (SamplingParams(max_tokens=count, **GREEDY) for count in (8, 40))

    def run(many: Callable[[SamplingParams], list[Request]]) -> float:
        """By the least of each, since a difference of two has the noise of both."""
        one, more = (least(lambda: timed(engine, many(params)), 8) for params in (short, long))
        return (more - one) / 32

    own = [prompt(64) for _ in range(32)]
    suffixes = [prompt(1) for _ in range(32)]
    for params in (short, long):  # records what is new, and is not counted
        timed(engine, [Request(each, params, detokenize=False) for each in own])
        timed(
            engine, [Request(params=params, parent=held.request_id, suffix=each, detokenize=False) for each in suffixes]
        )
    alone = run(lambda params: [Request(each, params, detokenize=False) for each in own])
    forked = run(
        lambda params: [
            Request(params=params, parent=held.request_id, suffix=each, detokenize=False) for each in suffixes
        ]
    )
    print(
        f"32 forks of 2,900 tokens: a step {forked * 1e3:.3f} ms, of 32 short ones {alone * 1e3:.3f}: {forked / alone:.2f}"
    )


def profile(engine: Engine, prompt: Prompts) -> None:
    """Where the time of decode steps goes, on the host and on the device."""
    for batch in (1, 32, 128):
        for each in [prompt(64) for _ in range(batch)]:
            engine.submit(each, SamplingParams(max_tokens=200, **GREEDY), detokenize=False)
        for _ in range(20):
            engine.step()
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as seen:
            began = time.perf_counter()
            for _ in range(20):
                engine.step()
            torch.cuda.synchronize()
            wall = (time.perf_counter() - began) / 20
        busy: dict[str, float] = {}
        for event in seen.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                busy[event.name[:60]] = busy.get(event.name[:60], 0.0) + event.device_time / 20
        print(f"batch {batch}: a step {wall * 1e6:.0f} µs (profiled), on the device {sum(busy.values()):.0f} µs")
        for name, spent in sorted(busy.items(), key=lambda item: -item[1])[:14]:
            print(f"   {spent:8.1f} µs  {name}")
        while engine.has_work:
            engine.step()


PARTS = {"decode": decode, "first": first, "beams": beams, "forks": forks, "profile": profile}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), action="append")
    parser.add_argument("--only", default="decode,first,beams,forks")
    options = parser.parse_args()
    for shape in options.shape or list(SHAPES):
        began = time.perf_counter()
        with open_engine(shape, kv_memory="20GiB") as engine:
            spec = engine.model.spec
            size = 2 * sum(torch.Size(each).numel() for name, each in tensor_shapes(spec).items() if name != "embed")
            size += 2 * spec.vocab_size * spec.hidden_size if spec.tie_embeddings else 0
            print(f"{shape}: {engine.backend_note}; ready after {time.perf_counter() - began:.1f} s")
            print(f"floor of a decode step: {size / BYTES_PER_SECOND * 1e3:.2f} ms")
            for part in options.only.split(","):
                PARTS[part](engine, Prompts())


if __name__ == "__main__":
    main()
