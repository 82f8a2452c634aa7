"""An executor that computes nothing: a plan costs time on a virtual clock, and answers are what was written beforehand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, cast

from segue.base.clock import VirtualClock
from segue.base.errors import InvalidRequest
from segue.engine.beam import Candidates, SearchStep
from segue.engine.executor import StepPlan, StepResult
from segue.kv import KVLayout
from segue.kv.tiers import Codec
from segue.sim.costs import StepCosts, Work


class Nowhere:
    """Memory that has a size and no content."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def __len__(self) -> int:
        return self._num_bytes

    def __getitem__(self, part: slice) -> Nowhere:
        first, last, _ = part.indices(self._num_bytes)
        return Nowhere(max(last - first, 0))


class SimulatedExecutor:
    """`answers[seed]` is what a request with that seed says; one without says 0."""

    def __init__(self, costs: StepCosts, clock: VirtualClock, block_size: int) -> None:
        self.costs = costs
        self.answers: dict[int, Sequence[int]] = {}
        self.num_computed = 0  # tokens
        self.busy_seconds = 0.0
        self._clock = clock
        self._block_bytes = costs.kv_bytes * block_size
        shape = costs.shape
        per_layer = shape.kv_values_per_token // max(shape.num_kv_layers, 1)
        dtype = costs.dtype if costs.dtype in ("float32", "bfloat16", "float16") else "bfloat16"
        self._layout = KVLayout(dtype, (shape.num_kv_layers, per_layer))

    def execute(self, plan: StepPlan) -> StepResult:
        work = Work.of(plan)
        seconds = self.costs.seconds(work)
        self._clock.advance(seconds)
        self.num_computed += work.num_tokens
        self.busy_seconds += seconds
        tokens, found, answers = [], [], self.answers
        for _, _, _, stop, _, sampling, search in plan.rows:
            if sampling is not None:
                answer, at = answers.get(sampling.seed), stop - sampling.num_prompt
                tokens.append(answer[at] if answer is not None and at < len(answer) else 0)
            elif search is not None:
                found.append(_made_up(search))
        return StepResult(tokens, candidates=found)

    @property
    def kv_layout(self) -> KVLayout:
        return self._layout

    def host_memory(self, num_bytes: int) -> memoryview:
        return cast(memoryview, Nowhere(num_bytes))

    def blocks_out(self, blocks: Sequence[int], slots: Sequence[int], memory: memoryview) -> None:
        self._copy(len(blocks))

    def blocks_in(self, blocks: Sequence[int], slots: Sequence[int], memory: memoryview) -> None:
        self._copy(len(blocks))

    def _copy(self, num_blocks: int) -> None:
        self._clock.advance(self.costs.copy_seconds(num_blocks * self._block_bytes))

    def read_kv(self, blocks: Sequence[int], start: int, stop: int, out: memoryview) -> None:
        raise InvalidRequest("state", "a simulated engine has no KV to give away")

    def write_kv(self, blocks: Sequence[int], start: int, stop: int, data: memoryview, first: int, last: int) -> None:
        raise InvalidRequest("state", "a simulated engine has no room for KV")

    def codec(self) -> Codec:
        raise InvalidRequest("tier", "the simulator's tiers have one precision: leave int8 out")

    def close(self) -> None:
        pass


def _made_up(search: SearchStep) -> Candidates:
    """Continuations of all beams alike, and none that ends."""
    count = search.num_candidates
    width = max(len(search.tails), 1)
    beams = array("i", (number % width for number in range(count)))
    tokens = array("i", (1 + number // width for number in range(count)))
    scores = [float(search.scores[beam]) - 0.01 * number for number, beam in enumerate(beams)] if search.scores else []
    made: Any = Candidates(beams, tokens, scores or [-0.01 * n for n in range(count)], [0] * count, [False] * count)
    return cast(Candidates, made)
