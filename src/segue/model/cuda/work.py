"""Which stretch of KV is read for which query rows: lists that attention kernels work off.

    row 0   |---- shared by rows 0 … 2 ----|- own -|            a piece for each stretch of a row's own,
    row 1   |                              |--- own ---|        and one for each stretch that a group shares
    row 2   |                              |- own -|
    row 3   |-------------- own --------------|
    row 4   |--------------- own ---------------|       rows that follow each other in a sequence may have theirs together:
    row 5   |---------------- own ---------------|      each sees as much of it as it is to see

A context of more than 256 tokens is cut into pieces of 128, or into thirty-two where that would be more: by its own length
alone, or that of the last row that has pieces together with it. Pieces that many rows share take longer to put together, so long
stretches of these have fewer; and where but one group shares anything, most of the device would have none, so a short stretch has
twice as many (unless they are to be `fixed`).

Beams may be done as items instead: so many of a group at once, with all that they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

PIECE = 128
SHARED_PIECE, MUCH_SHARED = 256, 1024  # of a shared stretch of more tokens than that
ONLY_PIECE = 64  # of the only shared stretch, of fewer
WHOLE = 256  # tokens that are not cut
MOST_PIECES = 32  # of one stretch; a long one has longer pieces
FIELDS = (
    7  # of a piece: first row, rows, table, begin, end, first result, and which of its tokens came with earlier steps
)
_STEP = 64

IntArray = npt.NDArray[np.int32]


class Group(NamedTuple):
    """Query rows that see the same first tokens: these are read once for all of them."""

    first_row: int
    num_rows: int
    table: int
    num_shared: int


class Work(NamedTuple):
    """`own` and `shared` are lists of pieces; row i is the sum of `results[starts[i] … starts[i + 1] - 1]`. Of an own piece of
    several rows, the first one's result is said; the others' have the same place among the row's own."""

    own: IntArray
    shared: IntArray
    results: IntArray
    starts: IntArray

    @property
    def num_results(self) -> int:
        return len(self.results)


def piece_length(num_tokens: IntArray) -> IntArray:
    by_count = -(-num_tokens // (MOST_PIECES * _STEP)) * _STEP
    return np.where(num_tokens <= WHOLE, WHOLE, np.maximum(by_count, PIECE)).astype(np.int32)


def num_pieces(num_tokens: IntArray) -> int:
    """Of stretches of so many tokens."""
    return int((-(-num_tokens // piece_length(num_tokens))).sum())


def most_results(num_rows: int) -> int:
    """Of so many rows, whatever their contexts are."""
    return 2 * num_rows * MOST_PIECES


def plan_work(
    begins: IntArray,
    ends: IntArray,
    tables: IntArray,
    groups: Sequence[Group] = (),
    most: int = 64,
    *,
    known: IntArray | None = None,
    sets: IntArray | None = None,
    fixed: bool = False,
) -> Work:
    """Row i sees tokens `begins[i] … ends[i]-1` by itself, through table `tables[i]`, and those before with its group. Tokens
    from `known[i]` on are this step's own; all that groups share is older. A shared piece has `most` rows at most. `sets`: the
    first rows of neighbours that follow each other in one sequence, and have their own pieces together; if not said, each row is
    a set. `fixed`: how a stretch is cut does not depend on which others there are."""
    assert sets is None or not groups
    firsts = np.arange(len(ends), dtype=np.int32) if sets is None else sets
    sizes = np.diff(firsts, append=np.int32(len(ends)))
    begin, end = begins[firsts], ends[firsts + sizes - 1]
    length = end - begin
    each = piece_length(length)
    counts = -(-length // each)
    starts = np.zeros(len(ends) + 1, np.int32)
    counts.repeat(sizes).cumsum(out=starts[1:])
    which = np.arange(len(firsts), dtype=np.int32).repeat(counts)
    number = (
        np.arange(len(which), dtype=np.int32) - (counts.cumsum(dtype=np.int32) - counts)[which]
    )  # of a set's pieces
    row, each = firsts[which], each[which]
    own = np.empty((len(which), FIELDS), np.int32)
    own[:, 0], own[:, 1], own[:, 2], own[:, 5] = row, sizes[which], tables[row], starts[row] + number
    own[:, 6] = (ends if known is None else known)[row]
    own[:, 3] = begin[which] + number * each
    np.minimum(own[:, 3] + each, end[which], out=own[:, 4])
    if not groups:
        return Work(own, own[:0], np.arange(starts[-1], dtype=np.int32), starts)
    shared, rows, results = _shared(groups, int(starts[-1]), most, is_only=len(groups) == 1 and not fixed)
    rows, results = np.concatenate([rows, row]), np.concatenate([results, own[:, 5]])
    order = np.argsort(rows, kind="stable")
    starts = np.searchsorted(rows[order], np.arange(len(ends) + 1)).astype(np.int32)
    return Work(own, shared, results[order].astype(np.int32), starts)


def plan_items(groups: Sequence[Group], most: int) -> IntArray:
    """Of beams: items of `most` rows at most, written as pieces are."""
    items = [
        (first, min(most, group.first_row + group.num_rows - first), group.table, 0, group.num_shared, 0, 0)
        for group in groups
        for first in range(group.first_row, group.first_row + group.num_rows, most)
    ]
    return np.array(items, np.int32).reshape(-1, FIELDS)


def _shared(
    groups: Sequence[Group], first_result: int, most: int, *, is_only: bool
) -> tuple[IntArray, IntArray, IntArray]:
    """The groups' pieces, and which rows their results are of."""
    pieces, rows, results = [], [], []
    for group in groups:
        each = int(piece_length(np.array([group.num_shared], np.int32))[0])
        if group.num_shared > MUCH_SHARED:
            each = max(each, SHARED_PIECE)
        elif is_only and group.num_shared > WHOLE:
            each = ONLY_PIECE
        for begin in range(0, group.num_shared, each):
            end = min(begin + each, group.num_shared)
            for first in range(group.first_row, group.first_row + group.num_rows, most):
                count = min(most, group.first_row + group.num_rows - first)
                pieces.append((first, count, group.table, begin, end, first_result, end))
                rows.append(np.arange(first, first + count, dtype=np.int32))
                results.append(np.arange(first_result, first_result + count, dtype=np.int32))
                first_result += count
    made = np.array(pieces, np.int32).reshape(-1, FIELDS)
    return made, np.concatenate(rows) if rows else made[:0, 0], np.concatenate(results) if results else made[:0, 0]
