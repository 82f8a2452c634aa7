"""Steps whose attention is done in one kernel, and what is to come of them."""

from array import array

import numpy as np
import torch

from segue import BeamParams, SamplingParams
from segue.engine import Row, Sampling, SearchStep
from segue.model.cuda.inputs import make_inputs
from segue.model.cuda.pieces import Given, Kind

EPS = 1e-6
SAMPLED = Sampling(SamplingParams(temperature=0), 0, 1, frozenset())
QWEN, LLAMA, SMOL = Kind(4, 2, 128, 16, True), Kind(8, 2, 128, 64, False), Kind(3, 1, 64, 32, False)


class Blocks:
    """Hands them out in no order."""

    def __init__(self, count, seed):
        self._left = np.random.default_rng(seed).permutation(np.arange(1, count)).tolist()

    def take(self, count):
        return [self._left.pop() for _ in range(count)]


def sequences(spans, blocks, size, shared=()):
    """Of (start, stop) each; they begin with the same blocks."""
    rows = []
    for number, (start, stop) in enumerate(spans):
        own = [*shared, *blocks.take(-(-stop // size) - len(shared))]
        rows.append(Row(number, array("i", range(stop)), start, stop, array("i", own), SAMPLED))
    return rows


def beams(num_shared, width, depth, blocks, size):
    """A search in its `depth`th pass: each beam has so many tokens of its own, some of them another one's too."""
    own = blocks.take(-(-(num_shared + width * depth) // size))
    tails = [
        array(
            "i",
            [
                *(num_shared + at * width + beam // 2 for at in range(depth - 1)),
                num_shared + (depth - 1) * width + beam,
            ],
        )
        for beam in range(width)
    ]
    params = BeamParams(width=width, max_tokens=depth + 1)
    step = SearchStep(num_shared, tails, [0.0] * width, [0] * width, depth, width, params, 0, None)
    start = num_shared + (depth - 1) * width
    return Row(900 + num_shared, array("i", range(width)), start, start + width, array("i", own), None, step)


class Case:
    """A step's rows; the cache knows what came with earlier steps, and nothing else in it is a number."""

    def __init__(self, kind, rows, *, dtype=torch.bfloat16, device="cpu", num_blocks=160, seed=0):
        self.kind, self.dtype, self.device = kind, dtype, torch.device(device)
        self.inputs = inputs = make_inputs(rows, kind.size, kind.group_rows, 128)
        assert not len(inputs.tiles)
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        self.num_rows = len(inputs.tokens)
        self.qkv = random(self.num_rows, kind.heads + 2 * kind.kv_heads, kind.dim)
        self.norms = (random(kind.dim), random(kind.dim)) if kind.has_norm else None
        angles = torch.rand(1024, kind.dim // 2, generator=generator) * 6
        self.cosines, self.sines = angles.cos(), angles.sin()
        shape = num_blocks, kind.kv_heads, kind.size, kind.dim
        self.old = random(2, *shape)
        known = torch.zeros(num_blocks * kind.size, dtype=torch.bool)
        known[[slot for row in range(self.num_rows) for slot in self.seen(row)]] = True
        known[torch.from_numpy(inputs.slots).long()] = False
        unknown = ~known.view(num_blocks, 1, kind.size, 1).expand(shape)
        self.old[:, unknown] = torch.nan

    def seen(self, row):
        """The slots of all that a row sees."""
        inputs, size = self.inputs, self.kind.size
        tail = inputs.tails[row, : inputs.tail_counts[row]].tolist() if inputs.tails.size else []
        upto = int(inputs.contexts[row]) - len(tail)
        places = np.arange(upto)
        return [*(inputs.tables[self.table(row), places // size] * size + places % size).tolist(), *tail]

    def table(self, row):
        both = np.concatenate([self.inputs.own, self.inputs.shared])
        return next(int(piece[2]) for piece in both if piece[0] <= row < piece[0] + piece[1])

    @property
    def turned(self):
        """Heads normed and rotated, in double precision and rounded."""
        kind, x = self.kind, self.qkv.double()
        for which, weight in zip(
            (slice(0, kind.heads), slice(kind.heads, kind.heads + kind.kv_heads)),
            self.norms or (None, None),
            strict=True,
        ):
            part = x[:, which]
            if weight is not None:
                part = part * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()
            left, right = part.chunk(2, -1)
            positions = torch.from_numpy(self.inputs.positions).long()
            c, s = (each[positions].double()[:, None] for each in (self.cosines, self.sines))
            x[:, which] = torch.cat([left * c - right * s, right * c + left * s], -1)
        return x.to(self.dtype).double()

    def run(self, kernel):
        """Output, and the cache afterwards; None if it never ended, or left something behind."""
        kind, inputs = self.kind, self.inputs
        there = {
            name: torch.from_numpy(np.ascontiguousarray(each)).to(self.device)
            for name, each in inputs._asdict().items()
        }
        qkv, cosines, sines = (each.to(self.device) for each in (self.qkv, self.cosines, self.sines))
        norms = (self.norms[0].to(self.device), self.norms[1].to(self.device)) if self.norms is not None else None
        cache = self.old.to(self.device, copy=True)
        shape, results = (self.num_rows, kind.heads, kind.dim), (len(inputs.results), kind.heads)
        q, out = (torch.full(shape, torch.nan, dtype=self.dtype, device=self.device) for _ in range(2))
        sums, logs = (torch.full((*results, size), torch.nan, device=self.device) for size in (kind.dim, 2))
        arrivals = torch.zeros(self.num_rows, kind.kv_heads, dtype=torch.int32, device=self.device)
        own, shared = (there[name] if len(there[name]) else None for name in ("own", "shared"))
        given = Given(
            qkv, cache[0], cache[1], q, out, norms, cosines, sines, there["positions"], there["slots"], there["tables"],
            own, shared, there["counts"], there["starts"], there["tail_counts"] if inputs.tails.size else None, sums, logs,
            arrivals,
        )  # fmt: skip
        if kernel.attend(given, scale=kind.dim**-0.5, eps=EPS) is False or arrivals.any():
            return None
        q, out, cache, sums, logs = (each.cpu() for each in (q, out, cache, sums, logs))
        return (out if shared is None else self.put_together(q, cache, sums, logs)).double(), cache

    def put_together(self, q, cache, sums, logs):
        """As `merge_pieces` does."""
        inputs, group = self.inputs, self.kind.heads // self.kind.kv_heads
        rows = []
        for row in range(self.num_rows):
            which = torch.from_numpy(inputs.results[inputs.starts[row] : inputs.starts[row + 1]]).long()
            peaks, masses, totals = logs[which, :, 0].double(), logs[which, :, 1].double(), sums[which].double()
            if inputs.tails.size and inputs.tail_counts[row]:
                slots = torch.from_numpy(inputs.tails[row, : inputs.tail_counts[row]]).long()
                k, v = (
                    each[slots // self.kind.size, :, slots % self.kind.size].double().repeat_interleave(group, 1)
                    for each in cache
                )
                own = torch.einsum("hd,chd->ch", q[row].double(), k) * self.kind.dim**-0.5 * np.log2(np.e)
                peaks, masses, totals = (
                    torch.cat([peaks, own]),
                    torch.cat([masses, torch.ones_like(own)]),
                    torch.cat([totals, v]),
                )
            gains = torch.exp2(peaks - peaks.amax(0))
            rows.append((gains[..., None] * totals).sum(0) / (gains * masses).sum(0)[:, None])
        return torch.stack(rows)

    def wanted(self):
        kind, inputs = self.kind, self.inputs
        turned, cache = self.turned, self.old.double()
        q, k, v = turned.split([kind.heads, kind.kv_heads, kind.kv_heads], 1)
        slots = torch.from_numpy(inputs.slots).long()
        for each, new in zip(cache, (k, v), strict=True):
            each[slots // kind.size, :, slots % kind.size] = new
        out = torch.empty_like(q)
        for row in range(self.num_rows):
            seen = torch.tensor(self.seen(row))
            keys, values = (
                each[seen // kind.size, :, seen % kind.size].repeat_interleave(kind.heads // kind.kv_heads, 1)
                for each in cache
            )
            weights = torch.einsum("hd,chd->hc", q[row], keys) * kind.dim**-0.5
            out[row] = torch.einsum("hc,chd->hd", weights.softmax(-1), values)
        return out, cache

    def is_right(self, kernel):
        found = self.run(kernel)
        if found is None:
            return False
        (out, cache), (wanted, filled) = found, self.wanted()
        bound = 1e-2 if self.dtype == torch.bfloat16 else 1.5e-3
        errors = [
            float((x - y).norm() / y.norm())
            for x, y in ((out, wanted), (cache.double().nan_to_num(), filled.nan_to_num()))
        ]
        return errors[0] < bound and errors[1] < bound and torch.equal(cache.isnan(), filled.isnan())


def rows_of(kind, what, seed=3):
    blocks, size = Blocks(160, seed), kind.size
    if what == "one after each other":
        return sequences([(0, 1), (3, 4), (63, 64), (64, 65), (255, 256), (256, 257), (520, 521)], blocks, size)
    if what == "a long one alone":
        return sequences([(700, 701)], blocks, size)
    if what == "some tokens of one":
        return sequences([(126, 131)], blocks, size)
    if what == "a beginning":
        return sequences([(0, 16), (300, 316), (56, 70)], blocks, size)
    if what == "forks":
        shared = blocks.take(512 // size)
        rows = sequences([(512 + 3 * at, 513 + 3 * at) for at in range(20)], blocks, size, shared)
        return [*rows[:2], *sequences([(20, 21)], blocks, size), *rows[2:]]
    if what == "beams":
        return [beams(300, 30, 3, blocks, size), beams(70, 12, 1, blocks, size)]
    assert what == "all of it"
    shared = blocks.take(256 // size)
    forks = sequences([(257 + at, 258 + at) for at in range(3)], blocks, size, shared)
    return [*forks, beams(130, 4, 2, blocks, size), *sequences([(90, 97), (0, 1)], blocks, size)]


ALL = ("one after each other", "a long one alone", "some tokens of one", "a beginning", "forks", "beams", "all of it")
