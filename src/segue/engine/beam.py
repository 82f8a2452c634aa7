"""Beam search: which beams live, which are done, and when it is over. What beams are worth, an executor says.

All beams of a group share the KV of what they go on from, the prefix. A step feeds each beam's last token, and writes its KV
behind the prefix in the group's one table, side by side:

    table     |0 --- prefix, shared --- num_shared|  a  b  c  d  |  e  f  g  h  |  …
    tails                                          beam 0: a, f     beam 1: a, e     beam 2: d, h   …

A beam's own KV is the slots of its ancestors: they stay where they are, and what changes from step to step is who counts them
as his own. So beams cost memory for what they do not share, and reordering them copies nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import NamedTuple, Protocol, runtime_checkable

from segue.base.types import BeamParams, FinishReason

_NO_TAIL = array("i")
_NO_NODE = 0


@runtime_checkable
class Catalogued(Protocol):
    """Items that a search can be limited to."""

    def __len__(self) -> int: ...
    def restricted(self, allow: Sequence[str] | None, deny: Sequence[str]) -> Constraint:
        """To items of these names, if any are given, and without those others."""
        ...


class Constraint(Protocol):
    """What beams may say. An executor that is given one knows its kind; `depth` is the most tokens there are."""

    @property
    def depth(self) -> int: ...
    @property
    def max_token(self) -> int: ...

    def names(self, num_tokens: int, node: int) -> tuple[str, ...]:
        """Of the items that end at a node so many tokens deep, if it is a catalogue."""
        ...


@dataclass(frozen=True, slots=True)
class Search:
    """A search that a turn asks for, from its prompt or, if it `thinks`, from each of its answers followed by `suffix`."""

    params: BeamParams
    max_tokens: int
    constraint: Constraint | None
    thinks: bool
    suffix: array[int]
    rest: array[int] | None = None  # what follows instead a thought that ended in a stop string

    @property
    def num_after(self) -> int:
        """Tokens that follow a thought, at most."""
        return max(len(self.suffix), len(self.rest or ()))

    @property
    def num_slots(self) -> int:
        """Of KV that it takes besides the prefix, at most: what the last step adds is not fed."""
        return self.params.width * (self.max_tokens - 1)

    def begin(self, eos_ids: frozenset[int], seed: int, answer: int) -> BeamSearch:
        own = frozenset(self.params.stop_token_ids) | (frozenset() if self.params.ignore_eos else eos_ids)
        return BeamSearch(self.params, own, seed, self.max_tokens, self.constraint, answer)

    def suffix_after(self, thought: array[int], *, stopped: bool) -> array[int]:
        """What of the suffix is still to come: a thought that was stopped may have ended in the first part of it."""
        suffix = self.suffix
        for length in range(min(len(suffix), len(thought)) if stopped else 0, 0, -1):
            if thought[-length:] == suffix[:length]:
                return suffix[length:]
        return suffix


class SearchStep(NamedTuple):
    """What an executor needs to find a group's best continuations: `scores[i]` is beam i's so far, `tails[i]` where its own
    tokens' KV lies, this step's last, as positions in the row's blocks. In a search's first step there is one beam, and its
    tail is empty: the row computes the end of the prefix.

    With `passes`, the row's blocks have room for all that so many passes write, and an executor may go on by itself: each pass
    with the `width` best of the one before, in their order, where `step` would put them."""

    num_shared: int
    tails: Sequence[array[int]]
    scores: Sequence[float]
    nodes: Sequence[int]  # how far each beam is in the constraint
    depth: int  # tokens that each beam has
    num_candidates: int
    params: BeamParams
    seed: int
    constraint: Constraint | None
    passes: int = 1


class Candidates(NamedTuple):
    """The best continuations, the best first; where beams are drawn, in the order in which they were. `ends`: there is nothing
    that could follow. `then`: what came of the next pass, if the executor went on."""

    beams: Sequence[int]
    tokens: Sequence[int]
    scores: Sequence[float]
    nodes: Sequence[int]
    ends: Sequence[bool]
    then: Candidates | None = None


class Beam(NamedTuple):
    """A line that a search found. `score` is its log-probability over its length to the power of the length penalty."""

    token_ids: tuple[int, ...]
    score: float
    logprob: float
    finish_reason: FinishReason
    logprobs: tuple[float, ...] = ()  # of each token
    text: str = ""
    items: tuple[str, ...] = ()  # of the catalogue, that have these tokens
    answer: int = 0  # the thought it followed
    node: int = 0  # of the catalogue, until its items are known


class _Added(NamedTuple):
    """What one step added: for each beam that lived on, which one it goes on from, its token, and that one's log-probability."""

    parents: list[int]
    tokens: list[int]
    logprobs: list[float]


class BeamSearch:
    """One group. `step` says what the next step computes, `take` what has come of it. Lines are kept as what each step added:
    only those that end are put together."""

    def __init__(
        self,
        params: BeamParams,
        stop_ids: frozenset[int],
        seed: int,
        max_tokens: int,
        constraint: Constraint | None,
        answer: int = 0,
    ) -> None:
        self.params = params
        self.max_tokens = max_tokens
        self.constraint = constraint
        self._answer = answer
        self._stop_ids = stop_ids
        self._seed = seed
        self.restart()

    def restart(self) -> None:
        """From the prefix on: what comes is the same."""
        self._history: list[_Added] = []
        self._scores: Sequence[float] = [0.0]
        self._nodes: Sequence[int] = [_NO_NODE]
        self._tails: Sequence[array[int]] = [_NO_TAIL]
        self.num_written = 0  # tail slots
        self.found: list[Beam] = []  # the best first

    @property
    def width(self) -> int:
        """Rows of the next step, once the prefix is computed."""
        return len(self._scores)

    @property
    def has_begun(self) -> bool:
        return bool(self._history)

    @property
    def is_straight(self) -> bool:
        """Whether which beams go on after a pass follows from their scores alone, up to the last one."""
        return (
            not self.has_begun and not self.params.temperature and (self.constraint is not None or not self._stop_ids)
        )

    def tokens(self) -> array[int]:
        """That the next step feeds."""
        return array("i", self._history[-1].tokens)

    def step(self, num_shared: int) -> SearchStep:
        """Each beam's last token goes behind what was written before."""
        tails: list[array[int]] = []
        if self._history:
            first = num_shared + self.num_written
            slots = array("i", range(first, first + len(self._tails)))
            tails = [tail + slots[at : at + 1] for at, tail in enumerate(self._tails)]
        depth, kept = len(self._history), max(2, 1 + len(self._stop_ids)) * self.params.width
        return SearchStep(
            num_shared, tails, self._scores, self._nodes, depth, kept, self.params, self._seed, self.constraint
        )

    def take(self, step: SearchStep, candidates: Candidates) -> bool:
        """Whether the search goes on. The order in which lines end and live on is that of Hugging Face's `generate`."""
        self.num_written += len(step.tails)
        width, stop_ids = self.params.width, self._stop_ids
        is_full_length = step.depth + 1 >= self.max_tokens
        if is_full_length or True in candidates.ends or not stop_ids.isdisjoint(candidates.tokens):
            going = self._end_some(step, candidates, is_full_length=is_full_length)
        else:
            going = list(range(len(candidates.tokens)))
        if self.params.temperature:  # else they are in this order
            going.sort(key=lambda at: -candidates.scores[at])
        self._go_on(step, candidates, going[:width])
        return self._can_improve()

    def _end_some(self, step: SearchStep, candidates: Candidates, *, is_full_length: bool) -> list[int]:
        """End the lines that do; which of the candidates go on."""
        going, ending, stop_ids, width = [], [], self._stop_ids, self.params.width
        if self.constraint is not None:
            stop_ids = frozenset()  # a line ends where the item does
        for at, (token, ends) in enumerate(zip(candidates.tokens, candidates.ends, strict=True)):
            has_stopped = ends or token in stop_ids
            if not (is_full_length or has_stopped):
                going.append(at)
            elif at < width:
                ending.append((at, FinishReason.STOP if has_stopped else FinishReason.LENGTH))
        self._finish(step, candidates, ending)
        self.found.sort(key=lambda beam: -beam.score)
        del self.found[width:]
        return going

    def _finish(self, step: SearchStep, candidates: Candidates, ending: list[tuple[int, FinishReason]]) -> None:
        """Put lines together, all of them a step at a time."""
        places = [at for at, _ in ending]
        beams, totals = [candidates.beams[at] for at in places], [candidates.scores[at] for at in places]
        tokens = [[candidates.tokens[at] for at in places]]
        logprobs = [[total - step.scores[beam] for total, beam in zip(totals, beams, strict=True)]]
        for added in reversed(self._history):
            tokens.append([added.tokens[beam] for beam in beams])
            logprobs.append([added.logprobs[beam] for beam in beams])
            beams = [added.parents[beam] for beam in beams]
        length, answer, nodes = (step.depth + 1) ** self.params.length_penalty, self._answer, candidates.nodes
        lines = zip(*reversed(tokens), strict=True), zip(*reversed(logprobs), strict=True)
        for (at, reason), total, line, own in zip(ending, totals, *lines, strict=True):
            self.found.append(Beam(line, total / length, total, reason, own, answer=answer, node=nodes[at]))

    def _go_on(self, step: SearchStep, candidates: Candidates, going: list[int]) -> None:
        beams, scores, had = candidates.beams, candidates.scores, step.scores
        parents = [beams[at] for at in going]
        self._scores = [scores[at] for at in going]
        own = [score - had[beam] for score, beam in zip(self._scores, parents, strict=True)]
        self._history.append(_Added(parents, [candidates.tokens[at] for at in going], own))
        self._nodes = [candidates.nodes[at] for at in going]
        self._tails = [step.tails[beam] for beam in parents] if step.tails else [_NO_TAIL] * len(parents)

    def _can_improve(self) -> bool:
        if not self._scores:
            return False
        if len(self.found) < self.params.width:
            return True
        if self.params.early_stopping is True:
            return False
        penalty = self.params.length_penalty
        longest = self.max_tokens if self.params.early_stopping == "never" and penalty > 0 else len(self._history)
        return bool(self._scores[0] / longest**penalty > self.found[-1].score)


def merged(groups: Sequence[Sequence[Beam]], how: str, num_groups: int, count: int) -> list[Beam]:
    """The best of several searches, each line once. `best`: with its best score; `sum`: with the logarithm of the mean over
    the groups of what its score is the logarithm of, where it was not found nothing."""
    if num_groups == 1:
        return list(groups[0][:count])  # each line is in it once, and the best come first
    by_line: dict[tuple[int, ...], list[Beam]] = {}
    for beam in (beam for group in groups for beam in group):
        by_line.setdefault(beam.token_ids, []).append(beam)
    best: list[Beam] = []
    for beams in by_line.values():
        top = max(beams, key=lambda beam: beam.score)
        if how == "sum":
            mass = sum(exp(beam.score - top.score) for beam in beams)
            top = top._replace(score=top.score + log(mass / num_groups))
        best.append(top)
    best.sort(key=lambda beam: -beam.score)
    return best[:count]
