"""Steps whose prompts are in tiles, and what is to come of them."""

import numpy as np
import torch

from segue.model.cuda.inputs import make_inputs
from segue.model.cuda.tiles import ROWS, Given, Kind
from tests.fused import Blocks, sequences

WIDE, NARROW, LARGE = Kind(2, 1, 128, 16), Kind(3, 1, 64, 32), Kind(2, 2, 128, 128)


class Case:
    """Prompts of which `spans` are computed, and in the cache all that they see; nothing else in it is a number. The last rows
    are nobody's, and the last tiles nothing."""

    def __init__(self, kind, spans, *, dtype=torch.bfloat16, device="cpu", padding=(0, 0), seed=0):
        self.kind, self.spans, self.dtype, self.device = kind, spans, dtype, torch.device(device)
        size, num_blocks = kind.size, 1 + sum(-(-stop // kind.size) for _, stop in spans)
        rows = sequences(spans, Blocks(num_blocks, seed), size)
        self.inputs = make_inputs(rows, size, 1, ROWS)
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return (torch.randn(*shape, generator=generator) * 1.5).to(dtype)

        num_rows = len(self.inputs.tokens)
        self.q = random(num_rows + padding[0], kind.heads, kind.dim)
        self.q[num_rows:] = torch.nan
        self.tiles = np.concatenate([self.inputs.tiles, np.full((padding[1], 4), 1 << 20, np.int32)])
        self.cache = torch.full((2, num_blocks, kind.kv_heads, size, kind.dim), torch.nan, dtype=dtype)
        for table, (_, stop) in zip(self.inputs.tables, spans, strict=True):
            places = np.arange(stop)
            blocks, inside = (torch.from_numpy(each).long() for each in (table[places // size], places % size))
            self.cache[:, blocks, :, inside] = random(stop, 2, kind.kv_heads, kind.dim)

    def run(self, kernel):
        """Output; None if it never ended."""
        arrays = self.inputs.tables, self.tiles, np.array([len(self.inputs.tiles)], np.int32)
        tables, tiles, count = (torch.from_numpy(np.ascontiguousarray(each)).to(self.device) for each in arrays)
        q, k_cache, v_cache = (each.to(self.device) for each in (self.q, *self.cache))
        out = torch.full_like(q, torch.nan)
        if kernel.attend(Given(q, k_cache, v_cache, tables, tiles, count, out), scale=self.kind.dim**-0.5) is False:
            return None
        return out.cpu().double()

    def wanted(self):
        """Of rows that are in no tile, nothing."""
        kind, size, out = self.kind, self.kind.size, torch.full(self.q.shape, torch.nan, dtype=torch.double)
        for first_row, count, table, first in self.inputs.tiles.tolist():
            places = np.arange(first + count)
            blocks = torch.from_numpy(self.inputs.tables[table, places // size]).long()
            keys, values = (
                each[blocks, :, torch.from_numpy(places % size)]
                .double()
                .repeat_interleave(kind.heads // kind.kv_heads, 1)
                for each in self.cache
            )
            q = self.q[first_row : first_row + count].double()
            weights = torch.einsum("rhd,chd->hrc", q, keys) * kind.dim**-0.5
            unseen = torch.arange(first + count) > torch.arange(first, first + count)[:, None]
            weights = weights.masked_fill(unseen, -torch.inf).softmax(-1)
            out[first_row : first_row + count] = torch.einsum("hrc,chd->rhd", weights, values)
        return out

    def is_right(self, kernel):
        found, wanted = self.run(kernel), self.wanted()
        if found is None or not torch.equal(found.isnan(), wanted.isnan()):
            return False
        found, wanted = found.nan_to_num(), wanted.nan_to_num()
        bound = 1e-2 if self.dtype == torch.bfloat16 else 1.5e-3
        errors = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-9)
        return float(errors.max()) < 3 * bound and float((found - wanted).norm() / wanted.norm()) < bound


SPANS = {
    "a short beginning": [(0, 20)],
    "a tile": [(0, 128)],
    "one row more than 64": [(0, 65)],
    "several tiles": [(0, 300)],
    "from the middle": [(37, 137)],
    "from a chunk's last tokens": [(100, 228)],
    "rows of which half see less": [(300, 428)],
    "a few after many": [(512, 540)],
    "two, and one after the other": [(0, 70), (150, 190)],
}
