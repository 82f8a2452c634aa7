"""The seam between deciding and computing: plans go in, tokens come out."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from segue.engine.beam import Candidates, SearchStep
from segue.engine.sequence import Sampling
from segue.kv import Copy, KVLayout
from segue.kv.tiers import Codec


class Row(NamedTuple):
    """One sequence's share of a step: compute positions `start … stop-1`, then sample if `sampling` is there.

    With `search`, find the best continuations instead. If that has `tails`, the row is a group of beams: `tokens` are one for
    each, all at the same place of their lines, and their KV goes to positions `start … stop-1` of the blocks.

    `tokens` and `blocks` are the sequence's own arrays, to be read until the step is applied, and never kept. In a plan made
    while another step runs, `tokens` ends before `start`: the last one is still being found.
    """

    sequence_id: int
    tokens: array[int]
    start: int
    stop: int
    blocks: array[int]
    sampling: Sampling | None
    search: SearchStep | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step will do. `copies` come before any write; none reads a block that another one writes."""

    rows: Seq[Row]
    copies: Seq[Copy]

    @property
    def num_tokens(self) -> int:
        return sum(row.stop - row.start for row in self.rows)


class TokenLogprobs(NamedTuple):
    """Log-probabilities under the model's own distribution: the chosen token, its rank (1 is the likeliest) and the top."""

    chosen: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """`tokens[i]` for the i-th row that samples; `logprobs` by the same i, for those that asked."""

    tokens: Seq[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    candidates: Seq[Candidates] = ()  # for the i-th row that searches


def check_result(plan: StepPlan, result: StepResult) -> None:
    """Refuse an answer that does not fit its plan, before any of it is taken over."""
    wanted = len([row for row in plan.rows if row.sampling is not None])
    if len(result.tokens) != wanted:
        raise ValueError(f"{wanted} rows sample, and the executor gave {len(result.tokens)} tokens")
    searching = len([row for row in plan.rows if row.search is not None])
    if len(result.candidates) != searching:
        raise ValueError(f"{searching} rows search, and the executor gave candidates for {len(result.candidates)}")
    for found in result.candidates:
        chain: Candidates | None = found
        while chain is not None:
            if len({len(chain.beams), len(chain.tokens), len(chain.scores), len(chain.nodes), len(chain.ends)}) > 1:
                raise ValueError("the executor gave candidates of which something is missing")
            chain = chain.then


class Executor(Protocol):
    """All that an engine may ask of hardware. It knows nothing of jobs, leases or policies."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Write the KV of every row's positions and sample. If it raises, the step's requests fail and no other:
        it must leave blocks outside the plan's written positions as they were."""
        ...

    @property
    def kv_layout(self) -> KVLayout:
        """What the KV of a token looks like outside: the same for every engine that runs this model at this precision."""
        ...

    def read_kv(self, blocks: Seq[int], start: int, stop: int, out: memoryview) -> None:
        """Copy the KV of positions `start … stop-1` of a sequence with these blocks into `out`, in logical order."""
        ...

    def write_kv(self, blocks: Seq[int], start: int, stop: int, data: memoryview, first: int, last: int) -> None:
        """`data` is the KV of positions `start … stop-1` in logical order: store that of `first … last-1`.

        Between two steps, other threads may call it too, each for positions of its own."""
        ...

    def host_memory(self, num_bytes: int) -> memoryview:
        """Writable memory of the host that blocks are copied to and from at full speed; on a GPU, page-locked."""
        ...

    def blocks_out(self, blocks: Seq[int], slots: Seq[int], memory: memoryview) -> None:
        """Copy whole blocks, each to its slot of `memory`: the first begins where `memory` does, and each is as long as the KV
        of a block in logical order."""
        ...

    def blocks_in(self, blocks: Seq[int], slots: Seq[int], memory: memoryview) -> None:
        """The other way round. Complete when it returns."""
        ...

    def codec(self) -> Codec:
        """For blocks in fewer bits: int8 values with scales."""
        ...

    def close(self) -> None: ...


Ticket = object
"""A step under way, as its executor knows it."""


@runtime_checkable
class Pipelined(Protocol):
    """An executor that can begin a step before the one ahead of it has ended, so that its device never waits for a plan."""

    def launch(self, plan: StepPlan, after: Ticket | None) -> Ticket | None:
        """Begin a step. None, and nothing has begun, if this plan cannot run so. `after` is the one under way, whose tokens the
        rows of the same sequences are fed; what may follow a step that could be launched is not refused."""
        ...

    def land(self, ticket: Ticket) -> StepResult:
        """Wait for its end."""
        ...


@runtime_checkable
class Persistent(Protocol):
    """An executor that can carry a search to its end without coming back after each pass."""

    def can_finish(self, step: SearchStep, num_passes: int) -> bool:
        """Whether it can for this one, if what goes on after a pass are its `width` best."""
        ...
