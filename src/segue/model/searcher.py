"""A beam search's candidates: from hidden states and scores to the best continuations that are allowed."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from segue.engine import Candidates, SearchStep
from segue.model.decoder import Decoder
from segue.model.items import Catalogue, Walk
from segue.model.sampler import uniforms

_RUN = 64


class _Legal(NamedTuple):
    """Continuations that may follow: `tokens[i]` after beam `beams[i]`, which leads to node `nodes[i]`."""

    beams: Tensor
    tokens: Tensor
    nodes: Tensor


class Searcher:
    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._levels: WeakKeyDictionary[Catalogue, list[DeviceLevel]] = WeakKeyDictionary()

    def expand(self, x: Tensor, step: SearchStep) -> Candidates:
        """`x[i]` is beam i's last hidden state."""
        scores = torch.tensor(step.scores, dtype=torch.float32, device=x.device)
        if step.constraint is None and not step.params.allowed_token_ids:
            return self._best_of_all(self._decoder.logits(x), scores, step)
        legal = self._legal(x, step)
        if not len(legal.tokens):
            return Candidates((), (), (), (), ())
        totals = self._logprobs(x, legal, step) + scores[legal.beams]
        best = _choose(totals, step)
        values = totals[best].tolist()
        _check_numbers(values)
        nodes, ends = legal.nodes[best].tolist(), [False] * len(best)
        if step.constraint is not None:
            ends = _walk(step).catalogue.are_ends(nodes, step.depth)
        return Candidates(legal.beams[best].tolist(), legal.tokens[best].tolist(), values, nodes, ends)

    def _best_of_all(self, logits: Tensor, scores: Tensor, step: SearchStep) -> Candidates:
        """Of each beam's whole vocabulary."""
        totals = logits.log_softmax(-1).add_(scores[:, None])
        best = _choose(totals.flatten(), step)
        count, vocab_size = len(best), totals.shape[1]
        values, places = totals.flatten()[best].tolist(), best.tolist()
        _check_numbers(values)
        beams, tokens = [at // vocab_size for at in places], [at % vocab_size for at in places]
        return Candidates(beams, tokens, values, [0] * count, [False] * count)

    def _legal(self, x: Tensor, step: SearchStep) -> _Legal:
        if step.constraint is None:
            allowed = torch.tensor(sorted(set(step.params.allowed_token_ids)), device=x.device)
            beams = torch.arange(len(x), device=x.device).repeat_interleave(len(allowed))
            tokens = allowed.repeat(len(x))
            return _Legal(beams, tokens, torch.zeros_like(tokens))
        walk = _walk(step)
        levels = self.levels_of(walk.catalogue, x.device)
        here = levels[step.depth]
        if step.depth == 0:
            nodes = torch.arange(len(here.tokens), device=x.device)
            beams = torch.zeros_like(nodes)
        else:
            nodes, beams = levels[step.depth - 1].children_of(torch.tensor(step.nodes, device=x.device))
        if walk.denied is not None and len(denied := walk.denied[step.depth]):
            kept = torch.isin(nodes, torch.from_numpy(denied).to(nodes), invert=True)
            nodes, beams = nodes[kept], beams[kept]
        return _Legal(beams, here.tokens[nodes].long(), nodes)

    def _logprobs(self, x: Tensor, legal: _Legal, step: SearchStep) -> Tensor:
        """Of each legal continuation, over the whole vocabulary, or over those of the same beam; then nothing outside the part of
        the vocabulary where they lie has to be computed."""
        if step.params.scoring == "full":
            logits = self._decoder.logits(x)
            return logits[legal.beams, legal.tokens] - logits.logsumexp(-1)[legal.beams]
        first, last = int(legal.tokens.min()), int(legal.tokens.max()) + 1
        own = self._decoder.logits(x, first, last)[legal.beams, legal.tokens - first]
        peak = torch.full((len(x),), -torch.inf, device=x.device).scatter_reduce_(0, legal.beams, own, "amax")
        mass = torch.zeros(len(x), device=x.device).index_add_(0, legal.beams, (own - peak[legal.beams]).exp())
        return own - (peak + mass.log())[legal.beams]

    def levels_of(self, catalogue: Catalogue, device: torch.device) -> list[DeviceLevel]:
        if (levels := self._levels.get(catalogue)) is None:
            levels = [DeviceLevel.on(device, level.tokens, level.children) for level in catalogue.levels]
            self._levels[catalogue] = levels
        return levels


class DeviceLevel(NamedTuple):
    """A level of a catalogue on the device."""

    tokens: Tensor
    children: Tensor

    @classmethod
    def on(cls, device: torch.device, tokens: object, children: object) -> DeviceLevel:
        return cls(torch.as_tensor(tokens, device=device), torch.as_tensor(children, device=device))

    def children_of(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """All of several nodes' children, and which of those nodes each belongs to."""
        begins, ends = self.children[nodes].long(), self.children[nodes + 1].long()
        counts = ends - begins
        owners = torch.arange(len(nodes), device=nodes.device).repeat_interleave(counts)
        before = counts.cumsum(0) - counts
        return torch.arange(len(owners), device=nodes.device) + (begins - before)[owners], owners


def _walk(step: SearchStep) -> Walk:
    assert isinstance(step.constraint, Walk)
    return step.constraint


def _check_numbers(values: list[float]) -> None:
    """One logit that is no number makes all of its beam's none, and those are larger than any to `topk`."""
    if values and values[0] != values[0]:
        raise ValueError("the model gave logits that are not numbers")


def _choose(totals: Tensor, step: SearchStep) -> Tensor:
    """The best, or, with a temperature, as many drawn without replacement: each time by what is left, the probability of a line
    being in proportion to exp(total / temperature). Noise of Gumbel's distribution on each makes the best ones such a draw."""
    count = min(step.num_candidates, len(totals))
    if step.params.temperature == 0.0:
        return _largest(totals, count)
    point = uniforms([step.seed], [step.num_shared + step.depth])[0]
    generator = torch.Generator().manual_seed(int(point * 2**53))
    noise = torch.rand(len(totals), generator=generator, dtype=torch.float64).clamp_(min=1e-300).log_().neg_().log_()
    return _largest(totals.double() / step.params.temperature - noise.to(totals.device), count)


def _largest(values: Tensor, count: int) -> Tensor:
    """Where the largest are, in order. On a CPU they are sought in runs: the n largest values are in the n runs with the largest
    maxima, and a run's maximum is found many times faster than a value's rank."""
    if values.device.type != "cpu" or len(values) % _RUN or len(values) < _RUN * max(count, 64):
        return values.topk(count).indices
    runs = values.view(-1, _RUN)
    chosen = runs.amax(-1).topk(count).indices
    best = runs[chosen].flatten().topk(count).indices
    return chosen[best // _RUN] * _RUN + best % _RUN
