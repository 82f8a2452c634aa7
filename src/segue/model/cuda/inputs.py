"""What a step needs on the device, worked out on the host: one array of int32, in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from segue.engine import Row, SearchStep
from segue.model.cuda.work import FIELDS, Group, IntArray, Work, num_pieces, plan_items, plan_work

MUCH = 256  # tokens that sequences must have in common, to be read once for all of them
FEW = 16  # new tokens of a sequence, up to which each is a row of its own
TILE_FIELDS = 4  # of a tile: first row, rows, table, first position


class Inputs(NamedTuple):
    """A step's rows one after the other. Rows of long prompts are done in `tiles`, all others in pieces: `own` through a
    sequence's table, `shared` for groups of rows; or, where all rows are beams, in `items`. What beams have for themselves is
    in the slots of their `tails`."""

    tokens: IntArray  # [rows], as are the next three
    positions: IntArray
    slots: IntArray
    contexts: IntArray
    samples: IntArray  # rows to sample or search from
    starts: IntArray  # [rows + 1]
    tail_counts: IntArray  # [rows]
    counts: IntArray  # how many of own, shared, tiles, items
    own: IntArray
    shared: IntArray
    results: IntArray
    tiles: IntArray
    tables: IntArray  # [sequences, blocks]
    items: IntArray
    tails: IntArray  # [rows, tokens]: slots; nothing if no row has any


def make_inputs(
    rows: Sequence[Row],
    block_size: int,
    group_rows: int,
    tile_rows: int,
    *,
    own_rows: int = 1,
    few_pieces: int = 0,
    item_rows: int = 0,
    alone: bool = False,
) -> Inputs:
    """`group_rows`: of a group's piece, at most; `own_rows`: of one of a sequence's own, where a step has no others, and more
    than `few_pieces` if each row has its own; `tile_rows`: of a tile; `item_rows`: of an item, 0 if there are to be none.
    Sequences whose first blocks are the same are put side by side, in whatever order they are in the plan; `samples` is in the
    plan's.

    `alone`: each token is computed in the same way whatever comes with it. All but beams are in tiles, and none in groups."""
    if len(rows) == 1 and not alone and rows[0].stop - rows[0].start <= FEW and _beams(rows[0]) is None:
        return _of_one(rows[0], block_size, own_rows, few_pieces)
    return _of_many(rows, block_size, group_rows, tile_rows, own_rows, few_pieces, item_rows, alone=alone)


def _of_many(
    rows: Sequence[Row],
    block_size: int,
    group_rows: int,
    tile_rows: int,
    own_rows: int,
    few_pieces: int,
    item_rows: int,
    *,
    alone: bool,
) -> Inputs:
    order = _side_by_side(rows, block_size) if not alone else None
    placed = [rows[at] for at in order] if order is not None else rows
    counts = np.array([row.stop - row.start for row in placed], np.int32)
    offsets = np.zeros(len(placed) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    total, bounds = int(offsets[-1]), offsets.tolist()
    width = max(_num_blocks(row, block_size) for row in placed)
    tables = np.zeros((len(placed), width), np.int32)
    tokens = np.zeros(total, np.int32)
    for at, row in enumerate(placed):
        known = row.tokens if _beams(row) is not None else row.tokens[row.start : row.stop]
        tokens[bounds[at] : bounds[at] + len(known)] = known
        blocks = row.blocks[: _num_blocks(row, block_size)]
        tables[at, : len(blocks)] = blocks
    firsts = np.array([row.start for row in placed], np.int32)
    sequence = np.repeat(np.arange(len(placed), dtype=np.int32), counts)
    positions = np.arange(total, dtype=np.int32) + np.repeat(firsts - offsets[:-1], counts)
    inside = np.minimum(positions // block_size, width - 1)  # of beams it is said below
    slots = tables[sequence, inside] * block_size + positions % block_size
    contexts = positions + 1
    begins, ends = np.zeros(total, np.int32), contexts.copy()
    tiles = _tiles(placed, bounds, tile_rows, 0 if alone else FEW)
    for first, length, _, _ in tiles:
        ends[first : first + length] = 0
    groups = _prefixes(placed, tables, bounds, block_size) if order is not None else []
    for group in groups:
        begins[group.first_row : group.first_row + group.num_rows] = group.num_shared
    tail_counts = np.zeros(total, np.int32)
    tails: list[tuple[int, IntArray]] = []
    for at, row in enumerate(placed):
        step = _beams(row)
        if step is None:
            continue
        begin, end = bounds[at], bounds[at + 1]
        own = _slots_of(row, step, block_size)
        positions[begin:end], slots[begin:end] = step.num_shared + own.shape[1] - 1, own[:, -1]
        contexts[begin:end] = positions[begin:end] + 1
        ends[begin:end], tail_counts[begin:end] = 0, own.shape[1]
        groups.append(Group(begin, end - begin, at, step.num_shared))
        tails.append((begin, own))
    are_beams = item_rows > 0 and all(_beams(row) is not None for row in placed)
    items = plan_items(groups, item_rows) if are_beams else _NO_PIECES
    if len(items):
        work = _no_work(total)
    else:
        sets = _sets(counts, ends, own_rows, few_pieces) if not groups and not tiles else None
        work = plan_work(begins, ends, sequence, groups, group_rows, known=firsts[sequence], sets=sets, fixed=alone)
    return Inputs(
        tokens,
        positions,
        slots,
        contexts,
        _samples(rows, bounds, order),
        work.starts,
        tail_counts,
        np.array([len(work.own), len(work.shared), len(tiles), len(items)], np.int32),
        work.own,
        work.shared,
        work.results,
        np.array(tiles, np.int32).reshape(-1, TILE_FIELDS),
        tables,
        items,
        _by_row(tails, total),
    )


def _of_one(row: Row, block_size: int, own_rows: int, few_pieces: int) -> Inputs:
    """A few tokens of one sequence: somebody waits for these, and for nothing else."""
    count, table = row.stop - row.start, np.array(row.blocks[: _num_blocks(row, block_size)], np.int32)[None]
    positions = np.arange(row.start, row.stop, dtype=np.int32)
    blocks, offsets = np.divmod(positions, np.int32(block_size))
    contexts, none = positions + np.int32(1), np.zeros(count, np.int32)
    known, tokens = row.tokens[row.start : row.stop], np.zeros(count, np.int32)
    tokens[: len(known)] = known  # a last one may still be the device's secret
    sets = _sets(np.array([count], np.int32), contexts, own_rows, few_pieces)
    work = plan_work(none, contexts, none, known=np.full(count, row.start, np.int32), sets=sets)
    is_sampled = row.sampling is not None or row.search is not None
    return Inputs(
        tokens,
        positions,
        table[0, blocks] * np.int32(block_size) + offsets,
        contexts,
        np.array([count - 1] if is_sampled else [], np.int32),
        work.starts,
        none,
        np.array([len(work.own), 0, 0, 0], np.int32),
        work.own,
        work.shared,
        work.results,
        _NO_TILES,
        table,
        _NO_PIECES,
        _NONE,
    )


def _side_by_side(rows: Sequence[Row], block_size: int) -> list[int] | None:
    """An order in which those with the same first block follow each other; None if no two have, or have much in common."""
    least = MUCH // block_size
    firsts: dict[int, list[int]] = {}
    for at, row in enumerate(rows):
        if row.search is None and row.stop - row.start == 1 and len(row.blocks) > least:
            firsts.setdefault(row.blocks[0], []).append(at)
    if not any(len(group) > 1 for group in firsts.values()):
        return None
    order = [at for group in firsts.values() for at in group]
    there = set(order)
    return order + [at for at in range(len(rows)) if at not in there]


def _prefixes(rows: Sequence[Row], tables: IntArray, bounds: list[int], block_size: int) -> list[Group]:
    """Neighbours that begin with the same blocks, at least `MUCH` tokens of them."""
    groups, at = [], 0
    while at < len(rows):
        end = at + 1
        while end < len(rows) and _decodes(rows[at]) and _decodes(rows[end]) and tables[end, 0] == tables[at, 0]:
            end += 1
        if end - at > 1:
            same = (tables[at:end] == tables[at]).all(0)
            common = int(np.argmin(same)) if not same.all() else len(same)
            common = min(common, min(row.start for row in rows[at:end]) // block_size) * block_size
            if common >= MUCH:
                groups.append(Group(bounds[at], end - at, at, common))
        at = end
    return groups


def _sets(counts: IntArray, contexts: IntArray, most: int, few_pieces: int) -> IntArray | None:
    """First rows of sets of `most` rows at most, of sequences with so many rows each: as few sets as can be, and of a sequence's
    about equally large ones. None if each row is one."""
    if most == 1 or counts.max() == 1 or num_pieces(contexts) <= few_pieces:
        return None
    sets = -(-counts // most)
    sequence = np.arange(len(counts), dtype=np.int32).repeat(sets)
    number = np.arange(len(sequence), dtype=np.int32) - (sets.cumsum(dtype=np.int32) - sets)[sequence]
    offsets = counts.cumsum(dtype=np.int32) - counts
    return (offsets[sequence] + counts[sequence] * number // sets[sequence]).astype(np.int32)


def _no_work(num_rows: int) -> Work:
    return Work(_NO_PIECES, _NO_PIECES, _NO_PIECES[:, 0], np.zeros(num_rows + 1, np.int32))


def _decodes(row: Row) -> bool:
    return row.search is None and row.stop - row.start == 1


def _tiles(rows: Sequence[Row], bounds: list[int], most: int, few: int) -> list[tuple[int, int, int, int]]:
    """Those that see most come first: they take longest."""
    found = [
        (bounds[at] + done, min(most, row.stop - row.start - done), at, row.start + done)
        for at, row in enumerate(rows)
        if row.stop - row.start > few and _beams(row) is None
        for done in range(0, row.stop - row.start, most)
    ]
    return sorted(found, key=lambda tile: -tile[3])


def _beams(row: Row) -> SearchStep | None:
    return row.search if row.search is not None and row.search.tails else None


def _num_blocks(row: Row, block_size: int) -> int:
    """That a table needs: beams' own tokens are found by their slots. A search may have more already, for those to come."""
    step = _beams(row)
    return -(-(row.stop if step is None else step.num_shared) // block_size)


def _slots_of(row: Row, step: SearchStep, block_size: int) -> IntArray:
    places = np.array(step.tails, np.int32)
    slots = np.frombuffer(row.blocks, np.int32)[places // block_size] * block_size + places % block_size
    return slots.astype(np.int32)


def _samples(rows: Sequence[Row], bounds: list[int], order: list[int] | None) -> IntArray:
    """All beams; of others that sample or begin to search, the last token."""
    if order is not None:
        place = {at: new for new, at in enumerate(order)}
        ends = [bounds[place[at] + 1] - 1 for at in range(len(rows))]
        begins = [bounds[place[at]] for at in range(len(rows))]
    else:
        begins, ends = bounds, [bound - 1 for bound in bounds[1:]]
    if not any(row.search is not None for row in rows):
        return np.array([end for end, row in zip(ends, rows, strict=True) if row.sampling is not None], np.int32)
    chosen: list[int] = []
    for at, row in enumerate(rows):
        if _beams(row) is not None:
            chosen += range(begins[at], ends[at] + 1)
        elif row.sampling is not None or row.search is not None:
            chosen.append(ends[at])
    return np.array(chosen, np.int32)


def _by_row(tails: Sequence[tuple[int, IntArray]], num_rows: int) -> IntArray:
    if not tails:
        return _NONE
    found = np.zeros((num_rows, max(own.shape[1] for _, own in tails)), np.int32)
    for begin, own in tails:
        found[begin : begin + len(own), : own.shape[1]] = own
    return found


_NONE = np.zeros((0, 0), np.int32)
_NO_TILES = np.zeros((0, TILE_FIELDS), np.int32)
_NO_PIECES = np.zeros((0, FIELDS), np.int32)


class BeamInputs:
    """Of the passes of searches that go to their ends together: what changes from one to the next is a few numbers."""

    def __init__(
        self,
        rows: Sequence[Row],
        steps: Sequence[SearchStep],
        block_size: int,
        group_rows: int,
        *,
        item_rows: int,
        alone: bool,
    ) -> None:
        width, passes, total = steps[0].params.width, steps[0].passes, len(rows) * steps[0].params.width
        self._shared = np.repeat(np.array([step.num_shared for step in steps], np.int32), width)
        places = np.arange((passes - 1) * width).reshape(passes - 1, width)
        slots = np.empty((passes - 1, len(rows), width), np.int32)
        counts = [-(-step.num_shared // block_size) for step in steps]
        tables = np.zeros((len(rows), max(counts)), np.int32)
        for at, (row, step) in enumerate(zip(rows, steps, strict=True)):
            blocks, inside = np.frombuffer(row.blocks, np.int32), step.num_shared + places
            slots[:, at] = blocks[inside // block_size] * block_size + inside % block_size
            tables[at, : counts[at]] = blocks[: counts[at]]
        self.slots: IntArray = slots.reshape(passes - 1, total)  # of each pass but the first
        groups = [Group(at * width, width, at, step.num_shared) for at, step in enumerate(steps)]
        none = np.zeros(total, np.int32)
        items = plan_items(groups, item_rows) if item_rows else _NO_PIECES
        work = _no_work(total) if item_rows else plan_work(none, none, none, groups, group_rows, fixed=alone)
        self._same = Inputs(
            tokens=none,
            positions=none,
            slots=none,
            contexts=none,
            samples=np.arange(total, dtype=np.int32),
            starts=work.starts,
            tail_counts=none,
            counts=np.array([0, len(work.shared), 0, len(items)], np.int32),
            own=work.own,
            shared=work.shared,
            results=work.results,
            tiles=_NO_TILES,
            tables=tables,
            items=items,
            tails=_NONE,
        )

    def of(self, number: int) -> Inputs:
        """A later pass, from 1 on. Whose heir each beam is, and so its slots but the last, are the device's to fill in."""
        positions = self._shared + np.int32(number - 1)
        tails = np.zeros((len(positions), number), np.int32)
        tails[:, -1] = self.slots[number - 1]
        return self._same._replace(
            positions=positions,
            slots=self.slots[number - 1],
            contexts=positions + np.int32(1),
            tail_counts=np.full(len(positions), number, np.int32),
            tails=tails,
        )
