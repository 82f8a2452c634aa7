"""Steps whose attention is done in one kernel with what lies before it, and what is to come of them."""

from array import array
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from segue import BeamParams, SamplingParams
from segue.engine import Row, Sampling, SearchStep
from segue.model.cuda.fused import BeamItems, Given, Kind, Listed
from segue.model.cuda.inputs import make_inputs

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

    def __init__(self, kind, rows, *, dtype=torch.bfloat16, device="cpu", num_blocks=160, seed=0, spare=0, own_rows=1):
        """`spare`: room for so many more items. `own_rows`: of a piece, at most, where rows are alone."""
        self.kind, self.dtype, self.device, self.spare = kind, dtype, torch.device(device), spare
        item_rows = kind.group_rows if kind.has_beams else 0
        self.inputs = inputs = make_inputs(
            rows, kind.size, kind.group_rows, 128, own_rows=own_rows, item_rows=item_rows
        )
        assert not len(inputs.tiles) and (len(inputs.items) or not inputs.tails.size)
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
        both = np.concatenate([self.inputs.own, self.inputs.items])
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
        out = torch.full((self.num_rows, kind.heads, kind.dim), torch.nan, dtype=self.dtype, device=self.device)
        given = Given(
            qkv, cache[0], cache[1], out, norms, cosines, sines, there["positions"], there["slots"], there["tables"]
        )
        arrivals = torch.zeros(self.num_rows, kind.kv_heads, dtype=torch.int32, device=self.device)
        results = len(inputs.results), kind.heads
        sums, logs = (torch.full((*results, size), torch.nan, device=self.device) for size in (kind.dim, 2))
        if len(inputs.items):
            tails, each = (there["tails"], there["tail_counts"]), 4 if inputs.tails.shape[1] <= 4 else 16
            how = BeamItems(there["items"], there["counts"][3:], tails, len(inputs.items) + self.spare, each)
        else:
            own, shared = (there[name] if len(there[name]) else None for name in ("own", "shared"))
            how = Listed(own, shared, there["counts"], there["starts"], sums, logs, arrivals)
        if kernel.attend(given, how, scale=kind.dim**-0.5, eps=EPS) is False or arrivals.any():
            return None
        out = self.put_together(sums.cpu(), logs.cpu()) if len(inputs.shared) else out.cpu()
        return out.double(), cache.cpu()

    def put_together(self, sums, logs):
        """As `merge_pieces` does."""
        rows = []
        for begin, end in pairwise(self.inputs.starts.tolist()):
            which = torch.from_numpy(self.inputs.results[begin:end]).long()
            peaks, masses, totals = logs[which, :, 0].double(), logs[which, :, 1].double(), sums[which].double()
            gains = torch.exp2(peaks - peaks.amax(0))
            rows.append((gains[..., None] * totals).sum(0) / (gains * masses).sum(0)[:, None])
        return torch.stack(rows)

    @cached_property
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
        (out, cache), (wanted, filled) = found, self.wanted
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
        return forks(512, [512, 513, 526, 527, 528, 529, *range(530, 590, 4)], blocks, size)
    if what == "forks and others":
        rows = [*forks(288, [289, 300, 320, 321, 346], blocks, size), *forks(272, [275, 276], blocks, size)]
        return [*rows, *sequences([(0, 1), (15, 20), (40, 41)], blocks, size)]
    if what == "beams":
        return [beams(300, 30, 3, blocks, size), beams(70, 12, 3, blocks, size)]
    if what == "long beams":
        return [beams(45, 10, 21, blocks, size)]
    assert what == "many beams"
    return [beams(9 + 30 * at, 33, 1, blocks, size) for at in range(2)]


ALONE = ("one after each other", "a long one alone", "some tokens of one", "a beginning")
PIECES = (*ALONE, "forks", "forks and others")
BEAMS = ("beams", "long beams", "many beams")


def forks(num_shared, starts, blocks, size):
    """Of a state of so many tokens, whose whole blocks they share."""
    shared = blocks.take(num_shared // size)
    return sequences([(start, start + 1) for start in starts], blocks, size, shared)
