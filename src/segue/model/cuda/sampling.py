"""Tokens of rows that have a temperature: what `drawing.py` is to know of them, and recordings of it that follow a step's."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from segue.engine import Row
from segue.model.cuda import choosing, recording
from segue.model.cuda.drawing import CUTS, FEW, FIELDS, Cuts, draw
from segue.model.cuda.recording import Recorded
from segue.model.cuda.work import IntArray
from segue.model.sampler import points

_BUFFERS = 8  # of the host, that steps which have not begun yet read from
_LOG2E = 1.4426950408889634


class _Buffer(NamedTuple):
    """Memory of the host, and the last copy out of it."""

    memory: Tensor
    copied: torch.cuda.Event | None


class Draws:
    """After recorded steps, whose logits and what is known of them are always in the same places."""

    def __init__(self, sizes: Sequence[int], tops: Tensor, places: Tensor) -> None:
        """`sizes`: how many rows a recording has. `tops` and `places`: where `likeliest` leaves what it found."""
        device, most = tops.device, sizes[-1]
        pin = device.type == "cuda"
        self._sizes, self._tops, self._places = sizes, tops, places
        self._told = torch.zeros(most, FIELDS, dtype=torch.int32, device=device)
        self._tokens = torch.empty(most, dtype=torch.int32, device=device)
        self._buffers = deque(
            _Buffer(torch.zeros(most, FIELDS, dtype=torch.int32, pin_memory=pin), None)
            for _ in range(_BUFFERS if pin else 1)
        )
        self._recorded: dict[tuple[int, Cuts], Recorded[tuple[Tensor]]] = {}
        self._pool: Any = None

    def tokens(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """Of the rows whose logits the last step left there; until the next ones are drawn. `logits`: all of that memory."""
        told, cuts = table(rows, logits.shape[1])
        size = next(size for size in self._sizes if size >= len(rows))
        recorded = self._recorded.get((size, cuts)) or self.record(logits, size, cuts)
        self._tell(told, size)
        recorded.graph.replay()
        return self._tokens[: len(rows)]

    def warm_up(self, logits: Tensor | None) -> None:
        """Record all that there can be."""
        if logits is not None:
            for size in self._sizes:
                for cuts in CUTS:
                    self.record(logits, size, cuts)

    def record(self, logits: Tensor, size: int, cuts: Cuts) -> Recorded[tuple[Tensor]]:
        """With rows that draw nothing."""
        self._told.zero_()

        def run() -> tuple[Tensor]:
            tokens = self._tokens[:size]
            draw(logits[:size], self._tops[:size], self._places[:size], self._told[:size], tokens, cuts)
            return (tokens,)

        recorded = self._recorded[size, cuts] = recording.capture(run, self._pool)
        self._pool = self._pool or recorded.graph.pool()
        return recorded

    def _tell(self, told: IntArray, size: int) -> None:
        """Rows beyond those there are draw nothing."""
        memory, copied = self._buffers[0]
        if copied is not None:
            copied.synchronize()
        there = memory.numpy()
        there[: len(told)] = told
        there[len(told) : size] = 0
        self._told[:size].copy_(memory[:size], non_blocking=True)
        if self._told.is_cuda:
            copied = copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._buffers.popleft()
        self._buffers.append(_Buffer(memory, copied))


def draw_now(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """From any logits, without a recording: the same tokens."""
    told, cuts = table(rows, logits.shape[1])
    count, device = len(rows), logits.device
    tops = torch.empty(count, choosing.PARTS, dtype=torch.float32, device=device)
    places, tokens = (torch.empty(shape, dtype=torch.int32, device=device) for shape in (tops.shape, count))
    choosing.likeliest(logits.contiguous(), tops, places, tokens)
    draw(logits.contiguous(), tops, places, torch.from_numpy(told).to(device), tokens, cuts)
    return tokens


def draws(row: Row) -> bool:
    return row.sampling is not None and not row.sampling.params.greedy


def table(rows: Sequence[Row], vocab_size: int) -> tuple[IntArray, Cuts]:
    """What each row is drawn by, [rows, FIELDS], and what is cut off."""
    params = [row.sampling.params for row in rows if row.sampling is not None]
    found = np.zeros((len(rows), FIELDS), np.int32)
    numbers = found.view(np.float32)
    numbers[:, 0] = [_scale(each.temperature) for each in params]
    numbers[:, 1] = [each.top_p for each in params]
    numbers[:, 2] = [each.min_p for each in params]
    found[:, 3] = [each.top_k if each.top_k < vocab_size else 0 for each in params]
    found[:, 4:] = points(rows).view(np.int32).reshape(-1, 2)
    drawn = [(int(top_k), each.top_p) for top_k, each in zip(found[:, 3], params, strict=True) if not each.greedy]
    return found, _cuts(drawn)


def _cuts(drawn: Sequence[tuple[int, float]]) -> Cuts:
    """Of rows that draw: their top-k, 0 if there is none, and top-p."""
    if all(top_k > 0 for top_k, _ in drawn):
        most = max((top_k for top_k, _ in drawn), default=0)
        return Cuts(bool(drawn), next((few for few in FEW if 0 < most <= few), None))
    return Cuts(any(top_k > 0 or top_p < 1.0 for top_k, top_p in drawn))


def _scale(temperature: float) -> float:
    """One that single precision has, whatever the temperature; the coldest leave the likeliest tokens alone, as they should."""
    return min(_LOG2E / max(temperature, 1e-30), 1e30) if temperature else 0.0
