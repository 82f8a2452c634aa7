"""The CPU kernels beside plain torch, on the shapes of a 135M-parameter model (30 layers, hidden 576, vocab 49152).

    python benchmarks/kernels.py [--cache DIR] [--rounds N] [--layers N] [--only NAME]

Times are the minimum over interleaved rounds, so a neighbour's burst of work hits every column alike. The floor of a
product over few rows is one read of the weights; of decode attention, one read of the keys and values.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from segue.model.native import Kernels, PackedWeight, load

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, DIM, VOCAB = 576, 1536, 9, 3, 64, 49152
LAYER = [((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
BLOCK = 16


def fastest_ms(rounds: int, **calls: Callable[[], object]) -> dict[str, float]:
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
    return best


def table(title: str, rows: dict[str, dict[str, float]]) -> None:
    columns = list(next(iter(rows.values())))
    print(f"\n{title}\n{'':>12}" + "".join(f"{c:>16}" for c in columns))
    for name, row in rows.items():
        print(f"{name:>12}" + "".join(f"{row[c]:16.2f}" for c in columns))


class Chain:
    """Every product of the model, in order, on made-up activations. The matrices are all different: none is cached."""

    def __init__(self, kernels: Kernels, layers: int, storage: str) -> None:
        self.kernels = kernels
        self.plain: list[Tensor] = []
        self.packed: list[PackedWeight] = []
        for n, k in [*(LAYER * layers), (VOCAB, HIDDEN)]:
            weight = torch.randn(n, k) * 0.02
            self.packed.append(kernels.pack(weight, storage))  # type: ignore[arg-type]
            if storage == "fp32":
                self.plain.append(weight)

    def inputs(self, m: int, count: int) -> list[tuple[Tensor, Tensor]]:
        made = {(n, k): (torch.randn(m, k), torch.empty(m, n)) for n, k in {w.shape for w in self.packed[:count]}}
        return [made[w.shape] for w in self.packed[:count]]

    def native(self, m: int, count: int) -> Callable[[], None]:
        steps = [(x, w, out) for (x, out), w in zip(self.inputs(m, count), self.packed, strict=False)]

        def call() -> None:
            for x, w, out in steps:
                self.kernels.linear(x, w, None, out)

        return call

    def torch(self, m: int, count: int) -> Callable[[], None]:
        steps = [(x, w) for (x, _), w in zip(self.inputs(m, count), self.plain, strict=False)]

        def call() -> None:
            for x, w in steps:
                F.linear(x, w)

        return call


def bench_linear(kernels: Kernels, layers: int, rounds: int) -> None:
    chain = Chain(kernels, layers, "fp32")
    everything = torch.ones(sum(w.nbytes for w in chain.packed) // 4)
    rows = {}
    count = len(chain.packed)
    for m in (1, 2, 3, 4, 6, 8, 12, 16, 32):
        calls = {"native": chain.native(m, count), "torch": chain.torch(m, count), "one read": everything.sum}
        rows[f"M={m}"] = fastest_ms(rounds, **calls)
    table(f"all products with the head, fp32, {everything.nbytes / 1e6:.0f} MB, ms", rows)
    del everything
    rows, flops = {}, 2 * sum(n * k for n, k in LAYER) * layers
    for m in (64, 128, 256, 700):
        best = fastest_ms(max(3, rounds // 3), native=chain.native(m, count - 1), torch=chain.torch(m, count - 1))
        best["GFLOP/s"], best["of torch, %"] = flops * m / best["native"] / 1e6, 100 * best["torch"] / best["native"]
        rows[f"M={m}"] = best
    table("all products without the head, fp32, ms", rows)
    del chain
    for storage in ("bf16", "int8"):
        chain, rows = Chain(kernels, layers, storage), {}
        for m in (1, 4, 8, 16):
            rows[f"M={m}"] = fastest_ms(rounds, native=chain.native(m, count))
        rows["M=256"] = fastest_ms(3, native=chain.native(256, count - 1))
        table(f"{storage}, {sum(w.nbytes for w in chain.packed) / 1e6:.0f} MB, ms (256: without the head)", rows)


class Attention:
    """Caches for several layers, so that decode reads memory and not a cache that the last call warmed."""

    def __init__(self, kernels: Kernels, sequences: int, context: int, queries: int, layers: int, dtype: torch.dtype):
        self.kernels, self.context = kernels, context
        blocks = -(-context // BLOCK)
        shape = (sequences * blocks, KV_HEADS, BLOCK, DIM)
        self.caches = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(layers)]
        self.qkv = torch.randn(sequences * queries, (HEADS + 2 * KV_HEADS) * DIM)
        self.tables = torch.randperm(sequences * blocks).int().view(sequences, blocks)
        self.starts = torch.arange(0, sequences * queries + 1, queries, dtype=torch.int32)
        self.lengths = torch.full((sequences,), context, dtype=torch.int32)
        self.out = torch.empty(sequences * queries, HEADS * DIM)
        self.q = torch.randn(sequences, HEADS, queries, DIM)
        self.kv = [(torch.randn(sequences, KV_HEADS, context, DIM),) * 2 for _ in range(layers)]
        self.causal = queries > 1
        self.bytes = 2 * sequences * KV_HEADS * context * DIM * dtype.itemsize * layers

    def native(self) -> None:
        for k, v in self.caches:
            self.kernels.attention(
                self.qkv, k, v, self.tables, self.starts, self.lengths, num_heads=HEADS, num_kv_heads=KV_HEADS,
                head_dim=DIM, scale=DIM**-0.5, window=None, out=self.out,
            )  # fmt: skip

    def torch(self) -> None:
        for k, v in self.kv:
            F.scaled_dot_product_attention(self.q, k, v, is_causal=self.causal, enable_gqa=True)


def bench_attention(kernels: Kernels, rounds: int) -> None:
    layers, rows = 30, {}
    cases = {
        "8x700": (8, 700, 1, torch.float32),
        "1x700": (1, 700, 1, torch.float32),
        "1x4000": (1, 4000, 1, torch.float32),
        "8x700 bf16": (8, 700, 1, torch.bfloat16),
        "prefill 700": (1, 700, 700, torch.float32),
        "prefill 2000": (1, 2000, 2000, torch.float32),
    }
    for name, (sequences, context, queries, dtype) in cases.items():
        case = Attention(kernels, sequences, context, queries, layers, dtype)
        read = torch.ones(case.bytes // 4)
        best = fastest_ms(rounds if queries == 1 else 4, native=case.native, torch=case.torch, one=read.sum)
        rows[name] = {"native": best["native"], "torch SDPA": best["torch"], "one read": best["one"]}
    table(f"attention, {layers} layers, ms", rows)


def bench_rows(kernels: Kernels, rounds: int) -> None:
    rows = {}
    weight = torch.ones(HIDDEN)
    for m in (1, 8, 64, 700):
        x, r, out = torch.randn(m, HIDDEN), torch.randn(m, HIDDEN), torch.empty(m, HIDDEN)
        calls: dict[str, Callable[[], object]] = {
            "add_rms_norm": lambda x=x, r=r, out=out: kernels.add_rms_norm(r, x, weight, 1e-5, out),
            "torch norm": lambda x=x: F.rms_norm(x, (HIDDEN,), weight, 1e-5),
        }
        rows[f"M={m}"] = {name: ms * 1e3 for name, ms in fastest_ms(rounds * 20, **calls).items()}
    table("rows, microseconds", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "segue-kernels")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--only", choices=["linear", "attention", "rows"])
    options = parser.parse_args()
    kernels = load(options.cache)
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    if options.only in (None, "linear"):
        bench_linear(kernels, options.layers, options.rounds)
    if options.only in (None, "attention"):
        bench_attention(kernels, options.rounds)
    if options.only in (None, "rows"):
        bench_rows(kernels, options.rounds)


if __name__ == "__main__":
    main()
