"""What a step needs on the device, worked out on the host: one array of int32, in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from segue.engine import Row, SearchStep
from segue.model.cuda.work import Group, IntArray, plan_work

FEW = 16  # new tokens of a sequence, up to which each is a row of its own


class Inputs(NamedTuple):
    """A step's rows one after the other. Rows of long prompts are done in `tiles`, all others in pieces: `own` through a
    sequence's table, `shared` for groups of rows, `last` through the slots that beams have for themselves."""

    tokens: IntArray  # [rows], as are the next three
    positions: IntArray
    slots: IntArray
    contexts: IntArray
    samples: IntArray  # rows to sample or search from
    starts: IntArray  # [rows + 1]
    counts: IntArray  # how many of own, shared, last
    own: IntArray
    shared: IntArray
    last: IntArray
    results: IntArray
    tables: IntArray  # [sequences, blocks]
    tails: IntArray  # [beams, tokens]: slots
    tiles: IntArray


def make_inputs(rows: Sequence[Row], block_size: int, group_rows: int, tile_rows: int) -> Inputs:
    """`group_rows`: of a group's piece, at most; `tile_rows`: of a tile."""
    counts = np.array([row.stop - row.start for row in rows], np.int32)
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    total, bounds = int(offsets[-1]), offsets.tolist()
    width = max(_num_blocks(row, block_size) for row in rows)
    tables = np.zeros((len(rows), width), np.int32)
    tokens = np.zeros(total, np.int32)
    for at, row in enumerate(rows):
        known = row.tokens if _beams(row) is not None else row.tokens[row.start : row.stop]
        tokens[bounds[at] : bounds[at] + len(known)] = known
        blocks = row.blocks[: _num_blocks(row, block_size)]
        tables[at, : len(blocks)] = blocks
    firsts = np.array([row.start for row in rows], np.int32)
    sequence = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
    positions = np.arange(total, dtype=np.int32) + np.repeat(firsts - offsets[:-1], counts)
    inside = np.minimum(positions // block_size, width - 1)  # of beams it is said below
    slots = tables[sequence, inside] * block_size + positions % block_size
    contexts = positions + 1
    begins, ends, of = np.zeros(total, np.int32), contexts.copy(), sequence
    tiles = _tiles(rows, bounds, tile_rows)
    for first, length, _, _ in tiles:
        ends[first : first + length] = 0
    groups, tails = [], []
    for at, row in enumerate(rows):
        step = _beams(row)
        if step is None:
            continue
        begin, end = bounds[at], bounds[at + 1]
        own = _slots_of(row, step, block_size)
        positions[begin:end], slots[begin:end] = step.num_shared + own.shape[1] - 1, own[:, -1]
        contexts[begin:end] = positions[begin:end] + 1
        ends[begin:end] = own.shape[1]
        of[begin:end] = np.arange(len(own)) + sum(len(each) for each in tails)
        groups.append(Group(begin, end - begin, at, step.num_shared))
        tails.append(own)
    work = plan_work(begins, ends, of, groups, group_rows)
    is_beam = np.zeros(total, bool)
    for group in groups:
        is_beam[group.first_row : group.first_row + group.num_rows] = True
    mine = is_beam[work.own[:, 0]]
    plain, last = (work.own[~mine], work.own[mine]) if groups else (work.own, work.own[:0])
    return Inputs(
        tokens,
        positions,
        slots,
        contexts,
        _samples(rows, bounds),
        work.starts,
        np.array([len(plain), len(work.shared), len(last)], np.int32),
        plain,
        work.shared,
        last,
        work.results,
        tables,
        _padded(tails),
        np.array(tiles, np.int32).reshape(-1, 4),
    )


def _tiles(rows: Sequence[Row], bounds: list[int], most: int) -> list[tuple[int, int, int, int]]:
    """Those that see most come first: they take longest."""
    found = [
        (bounds[at] + done, min(most, row.stop - row.start - done), at, row.start + done)
        for at, row in enumerate(rows)
        if row.stop - row.start > FEW and _beams(row) is None
        for done in range(0, row.stop - row.start, most)
    ]
    return sorted(found, key=lambda tile: -tile[3])


def _beams(row: Row) -> SearchStep | None:
    return row.search if row.search is not None and row.search.tails else None


def _num_blocks(row: Row, block_size: int) -> int:
    """That a table needs: beams' own tokens are found by their slots."""
    step = _beams(row)
    return len(row.blocks) if step is None else -(-step.num_shared // block_size)


def _slots_of(row: Row, step: SearchStep, block_size: int) -> IntArray:
    places = np.array(step.tails, np.int32)
    slots = np.frombuffer(row.blocks, np.int32)[places // block_size] * block_size + places % block_size
    return slots.astype(np.int32)


def _samples(rows: Sequence[Row], bounds: list[int]) -> IntArray:
    """All beams; of others that sample or begin to search, the last token."""
    if not any(row.search is not None for row in rows):
        return np.array([bounds[at + 1] - 1 for at, row in enumerate(rows) if row.sampling is not None], np.int32)
    chosen: list[int] = []
    for at, row in enumerate(rows):
        if _beams(row) is not None:
            chosen += range(bounds[at], bounds[at + 1])
        elif row.sampling is not None or row.search is not None:
            chosen.append(bounds[at + 1] - 1)
    return np.array(chosen, np.int32)


def _padded(tails: Sequence[IntArray]) -> IntArray:
    width = max((each.shape[1] for each in tails), default=0)
    return np.concatenate([np.pad(each, ((0, 0), (0, width - each.shape[1]))) for each in tails] or [_NONE])


_NONE = np.zeros((0, 0), np.int32)
