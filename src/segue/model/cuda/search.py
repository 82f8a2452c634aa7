"""Beam searches of many requests at once: the best continuations of every group, and all passes without the host in between.

    pass 1     the prefix's end ──▶ logits ──▶ the best of each group ──┐ tokens, and whose heirs they are
    pass 2     tokens and slots of the beams, as the device knows them ◀┘ ──▶ logits ──▶ …

The host knows everything else of a pass beforehand, and prepares it while the one before runs: only which beams lived on is
the device's secret, and comes back once, for all passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from segue.engine import Candidates, Row, SearchStep
from segue.kv import Copy
from segue.model.cuda.choosing import (
    MOST_LEGAL,
    best_of_groups,
    best_tokens,
    legal_tokens,
    log_totals,
)
from segue.model.cuda.inputs import BeamInputs
from segue.model.cuda.steps import CudaSteps, Fed, Step
from segue.model.decoder import Decoder
from segue.model.items import Walk
from segue.model.sampler import largest
from segue.model.searcher import DeviceLevel, Searcher

_MOST_LEGAL = 1 << 20  # continuations of one group that are looked through
_MOST_AT_ONCE = 1 << 24  # of all groups


def is_plain(step: SearchStep) -> bool:
    """Whether nothing limits or shuffles what may follow."""
    return step.constraint is None and not step.params.allowed_token_ids and step.params.temperature == 0.0


def can_finish(step: SearchStep, num_passes: int, vocab_size: int) -> bool:
    """Whether `Sweeps` can carry a search so far: no line of it may end early."""
    walk, width = step.constraint, step.params.width
    if walk is None:
        return is_plain(step) and width <= vocab_size
    if not isinstance(walk, Walk) or not walk.catalogue.is_even or num_passes != walk.depth:
        return False
    first, *later = walk.catalogue.most_children[:num_passes]
    return first <= _MOST_LEGAL and all(width * count <= _MOST_LEGAL for count in later)


class Beams(NamedTuple):
    """Those that live after a pass, [groups, width]. Where there are fewer, the others' scores are -inf."""

    scores: Tensor
    parents: Tensor  # in the pass before
    tokens: Tensor
    nodes: Tensor

    @classmethod
    def of(cls, chosen: Tensor) -> Beams:
        """As `best_of_groups` gives them."""
        return cls(chosen[0].view(torch.float32), chosen[1], chosen[2], chosen[3])


class Swept(NamedTuple):
    """Searches on their way to their ends: which rows' they are, what arrives on the host, and a catalogue's depth."""

    parts: list[tuple[list[int], Tensor, int | None]]
    done: torch.cuda.Event | None


class Sweeps:
    """Carries searches to their ends."""

    def __init__(self, decoder: Decoder, steps: CudaSteps, searcher: Searcher, block_size: int) -> None:
        self._decoder = decoder
        self._steps = steps
        self._searcher = searcher
        self._block_size = block_size

    def launch(self, rows: Sequence[Row], copies: Sequence[Copy]) -> Swept:
        """Begin the searches whose first pass these rows are; those of one kind go together. `copies` come before all of them."""
        kinds: dict[object, list[int]] = {}
        for at, row in enumerate(rows):
            kinds.setdefault(_kind(row), []).append(at)
        parts = []
        for places in kinds.values():
            some = [rows[at] for at in places]
            packed = self._sweep(some, copies)
            copies = ()
            walk = some[0].search.constraint if some[0].search is not None else None
            arrived = packed
            if packed.device.type == "cuda":
                arrived = torch.empty(packed.shape, dtype=torch.int32, pin_memory=True)
                arrived.copy_(packed, non_blocking=True)
            parts.append((places, arrived, walk.depth if isinstance(walk, Walk) else None))
        done = torch.cuda.Event() if arrived is not packed else None  # type: ignore[no-untyped-call]
        if done is not None:
            done.record()
        return Swept(parts, done)

    def found(self, swept: Swept) -> list[Candidates]:
        """What came of them, once all passes are done."""
        if swept.done is not None:
            swept.done.synchronize()
        found: dict[int, Candidates] = {}
        for places, arrived, depth in swept.parts:
            found.update(zip(places, _as_candidates(arrived, depth), strict=True))
        return [found[at] for at in range(len(found))]

    def _sweep(self, rows: list[Row], copies: Sequence[Copy]) -> Tensor:
        """What each pass chose, [passes, 4, groups, width]."""
        steps = [row.search for row in rows if row.search is not None]
        width, passes = steps[0].params.width, steps[0].passes
        count = 0 if steps[0].constraint is not None else width
        step = self._steps.run(rows, copies, needs_head=True, num_candidates=count)
        history = torch.empty(passes, 4, len(rows), width, dtype=torch.int32, device=step.hidden.device)
        self._choose(step, steps, None, 0, history[0])
        inputs = BeamInputs(
            rows,
            steps,
            self._block_size,
            self._steps.group_rows,
            item_rows=self._steps.item_rows,
            alone=self._steps.is_exact,
        )
        tails = None
        for number in range(1, passes):
            beams = Beams.of(history[number - 1])
            fed = Fed(beams.tokens.flatten(), tails)
            step = self._steps.run_inputs(inputs.of(number), fed=fed, needs_head=True, num_candidates=count)
            self._choose(step, steps, beams, number, history[number])
            if number + 1 < passes:
                own = self._on_device(inputs.slots[number - 1][:, None], history.device)
                had = own if tails is None else torch.cat([tails, own], 1)
                begins = torch.arange(0, len(had), width, device=had.device)[:, None]
                tails = had[(begins + history[number, 1]).flatten()]
        return history

    def _on_device(self, values: npt.NDArray[np.int32], device: torch.device) -> Tensor:
        there = torch.from_numpy(values)
        return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there

    def expand(self, hidden: Tensor, step: SearchStep) -> Candidates | None:
        """One pass of one group, by the same arithmetic; None if it has to be done otherwise. `hidden[i]` is beam i's last."""
        walk = step.constraint
        if step.params.temperature or step.params.allowed_token_ids or len(hidden) * self._fan_out(step) > _MOST_LEGAL:
            return None
        logits = self._decoder.raw_logits(hidden)
        scores = torch.tensor([step.scores], dtype=torch.float32).to(hidden.device)
        nodes = torch.tensor([step.nodes], dtype=torch.int32).to(hidden.device)
        before = Beams(scores, nodes, nodes, nodes)
        chosen = torch.empty(4, 1, step.num_candidates, dtype=torch.int32, device=hidden.device)
        if walk is None:
            tokens, logprobs = best_tokens(logits, step.num_candidates)
            best_of_groups(logprobs, tokens, None, scores, chosen)
        else:
            legal = self._legal(logits, [step], before if step.depth else None, step.depth, self._fan_out(step))
            best_of_groups(*legal, scores, chosen)
        candidates = _as_candidates(chosen[None].cpu(), None)[0]
        if not isinstance(walk, Walk):
            return candidates
        return candidates._replace(ends=walk.catalogue.are_ends(candidates.nodes, step.depth))

    def _fan_out(self, step: SearchStep) -> int:
        return step.constraint.catalogue.most_children[step.depth] if isinstance(step.constraint, Walk) else 1

    def _choose(self, step: Step, steps: list[SearchStep], before: Beams | None, depth: int, chosen: Tensor) -> None:
        """The best of each group."""
        groups, walk, scores = len(steps), steps[0].constraint, before.scores if before is not None else None
        if walk is None:
            assert step.best is not None
            tokens, logprobs = step.best
            best_of_groups(logprobs, tokens, None, scores, chosen)
            return
        assert isinstance(walk, Walk)
        logits = self._decoder.raw_logits(step.hidden) if step.logits is None else step.logits
        count = walk.catalogue.most_children[depth]
        rows_each = len(logits) // groups
        at_once = max(_MOST_AT_ONCE // (count * rows_each), 1)
        for at in range(0, groups, at_once):
            part = slice(at, at + at_once)
            had = Beams(*(each[part] for each in before)) if before is not None else None
            mine = logits[at * rows_each : (at + at_once) * rows_each]
            legal = self._legal(mine, steps[part], had, depth, count)
            some = chosen if at_once >= groups else torch.empty_like(chosen[:, part])
            best_of_groups(*legal, had.scores if had is not None else None, some)
            if some is not chosen:
                chosen[:, part] = some

    def _legal(
        self, logits: Tensor, steps: list[SearchStep], before: Beams | None, depth: int, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What may follow each beam: log-probabilities, tokens and nodes, [beams, count]; -inf where there are fewer."""
        walk = steps[0].constraint
        assert isinstance(walk, Walk)
        levels, device = self._searcher.levels_of(walk.catalogue, logits.device), logits.device
        here: DeviceLevel = levels[depth]
        of_all = steps[0].params.scoring == "full"
        if count <= MOST_LEGAL and not any(_denied(step, depth) is not None for step in steps):
            if before is None:
                return legal_tokens(logits, here.tokens, None, None, count, of_all=of_all)
            return legal_tokens(
                logits, here.tokens, levels[depth - 1].children, before.nodes.flatten(), count, of_all=of_all
            )
        nodes = torch.arange(count, device=device)[None, :]
        if before is None:
            nodes = nodes.expand(len(logits), -1)
            legal = torch.ones_like(nodes, dtype=torch.bool)
        else:
            above, at = levels[depth - 1].children, before.nodes.flatten().long()
            begins, ends = above[at].long()[:, None], above[at + 1].long()[:, None]
            nodes = nodes + begins
            legal = nodes < ends
            nodes = nodes.clamp(max=len(here.tokens) - 1)
        each = len(logits) // len(steps)
        for number, step in enumerate(steps):
            denied = _denied(step, depth)
            if denied is not None:
                part = slice(number * each, (number + 1) * each)
                legal[part] &= torch.isin(nodes[part], torch.from_numpy(denied).to(device), invert=True)
        tokens = here.tokens[nodes].long()
        own = logits.gather(1, tokens).float().masked_fill_(~legal, -torch.inf)
        total = log_totals(logits) if of_all else own.logsumexp(-1)
        return own - total[:, None], tokens, nodes


def _kind(row: Row) -> tuple[object, ...]:
    """What searches that go together have in common."""
    step = row.search
    assert step is not None
    walk = step.constraint
    catalogue = id(walk.catalogue) if isinstance(walk, Walk) else None
    is_denied = any(_denied(step, depth) is not None for depth in range(step.passes))  # found in another way
    return step.params.width, step.passes, catalogue, step.params.scoring, is_denied


def _denied(step: SearchStep, depth: int) -> npt.NDArray[np.int32] | None:
    """Nodes of this depth that are not to be taken, if there are any."""
    denied = step.constraint.denied if isinstance(step.constraint, Walk) else None
    return denied[depth] if denied is not None and len(denied[depth]) else None


def _as_candidates(packed: Tensor, depth: int | None) -> list[Candidates]:
    """Of each group: each pass's candidates lead to the next one's. `depth`: of a catalogue, where lines end."""
    numbers = packed.numpy()
    scores = numbers[:, 0].view(np.float32)
    if np.isnan(scores).any():
        raise ValueError("the model gave logits that are not numbers")
    counts = (scores > -np.inf).sum(-1).tolist()
    values, (parents, tokens, nodes) = scores.tolist(), (numbers[:, at].tolist() for at in (1, 2, 3))
    found = []
    for group in range(len(counts[0])):
        chain: Candidates | None = None
        for number in reversed(range(len(counts))):
            kept = counts[number][group]
            chain = Candidates(
                parents[number][group][:kept],
                tokens[number][group][:kept],
                values[number][group][:kept],
                nodes[number][group][:kept],
                [number + 1 == depth] * kept,
                chain,
            )
        assert chain is not None
        found.append(chain)
    return found


def expand(best: tuple[Tensor, Tensor], steps: Sequence[SearchStep]) -> list[Candidates]:
    """One pass. `best` has a row for each beam, group after group. A group's candidates are among the best of each of its beams,
    so two small choices take the place of a large one; all that comes back comes in one copy."""
    tokens, logprobs = best
    device, most, groups = tokens.device, tokens.shape[1], len(steps)
    widths = [len(step.scores) for step in steps]
    widest = max(widths)
    before = torch.full((groups, widest), -torch.inf)
    for number, step in enumerate(steps):
        before[number, : widths[number]] = torch.tensor(step.scores)
    scores = before.to(device, non_blocking=True)
    if min(widths) < widest:
        place = torch.zeros((groups, widest), dtype=torch.long)
        at = 0
        for number, width in enumerate(widths):
            place[number, :width] = torch.arange(at, at + width)
            at += width
        rows = place.flatten().to(device)
        tokens, logprobs = tokens[rows], logprobs[rows]
    totals = logprobs.view(groups, widest, most) + scores[:, :, None]
    where = largest(totals.view(groups, -1), min(max(step.num_candidates for step in steps), widest * most))
    values = totals.view(groups, -1).gather(1, where)
    chosen = tokens.reshape(groups, -1).gather(1, where)
    packed = torch.stack([values.view(torch.int32), where.int(), chosen.int()]).cpu()
    numbers, places, ids = packed[0].view(torch.float32).tolist(), packed[1].tolist(), packed[2].tolist()
    found = []
    for number, (step, width) in enumerate(zip(steps, widths, strict=True)):
        kept = min(step.num_candidates, width * most)
        if numbers[number][0] != numbers[number][0]:
            raise ValueError("the model gave logits that are not numbers")
        beams = [place // most for place in places[number][:kept]]
        found.append(Candidates(beams, ids[number][:kept], numbers[number][:kept], [0] * kept, [False] * kept))
    return found
