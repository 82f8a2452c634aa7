"""Options that several commands share, and what they make."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from segue.base.types import SamplingParams

if TYPE_CHECKING:
    from segue.model.engine import Engine

_ENGINE_OPTIONS = (
    "device", "dtype", "quantize", "kv_dtype", "attention", "exact", "num_blocks", "kv_memory", "block_size",
    "max_model_len", "threads", "prefix_caching", "tiers",
)  # fmt: skip


def add_engine_options(command: argparse.ArgumentParser, *, model: bool = True) -> None:
    group = command.add_argument_group("engine")
    if model:
        group.add_argument(
            "--model", default="smollm2", help="a name from `segue models`, a Hugging Face folder or a .gguf file"
        )
    group.add_argument("--device", default="auto", help="cpu or cuda (default: cuda if there is one)")
    group.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16", "fp16"])
    group.add_argument("--quantize", choices=["int8"], help="8-bit weights, on CPU")
    group.add_argument("--kv-dtype", default="auto", choices=["auto", "fp8"], help="fp8: half the KV memory, on CUDA")
    group.add_argument(
        "--attention",
        default="auto",
        choices=["auto", "triton"],
        help="on CUDA; auto: on an H100 or H200, kernels for these devices",
    )
    group.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="on CUDA: an answer does not depend on what else is computed with it; slower",
    )
    group.add_argument("--kv-memory", metavar="SIZE", help="memory for KV, such as 2GiB (default: automatic)")
    group.add_argument("--num-blocks", type=int, metavar="N", help="KV memory in blocks, instead of --kv-memory")
    group.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens in a block (default: 16)")
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest sequence (default: the model's)")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all cores)")
    group.add_argument(
        "--tier", dest="tiers", action="append", default=[], metavar="TIER",
        help="where KV goes when the device is full: host=4GiB, or disk=/path,20GiB, which outlives the process; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="reuse computed KV (default)"
    )


def add_sampling_options(command: argparse.ArgumentParser, *, max_tokens: int, temperature: float) -> None:
    group = command.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"default: {max_tokens}")
    group.add_argument(
        "--temperature", type=float, default=temperature, metavar="T", help=f"0: greedy; default: {temperature:g}"
    )
    group.add_argument("--top-p", type=float, default=1.0, metavar="P")
    group.add_argument("--top-k", type=int, default=0, metavar="K")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )


def sampling_params(arguments: argparse.Namespace, **more: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=arguments.seed,
        stop=tuple(arguments.stop),
        **more,
    )


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in _ENGINE_OPTIONS}


def open_engine(arguments: argparse.Namespace) -> Engine:
    """Load the model, with a progress bar where something is fetched; what was chosen goes to standard error."""
    from segue.cli.progress import FetchProgress
    from segue.model.engine import Engine

    options = engine_options(arguments)
    with FetchProgress(f"Fetching {arguments.model}") as progress:
        engine = Engine(arguments.model, progress=progress, **options)
    print(f"{engine.model.name}: {engine.backend_note}\n{engine.budget}", file=sys.stderr)
    return engine
