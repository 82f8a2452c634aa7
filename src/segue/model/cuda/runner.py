"""The executor on CUDA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from segue.base.config import EngineConfig
from segue.base.errors import DeviceLost
from segue.engine import Candidates, Row, SearchStep, StepPlan, StepResult
from segue.kv import Copy
from segue.model.cuda import search
from segue.model.cuda.backend import CudaBackend
from segue.model.cuda.moves import CudaMoves
from segue.model.cuda.sampling import draw_now
from segue.model.cuda.steps import CudaSteps, Launched
from segue.model.decoder import Decoder
from segue.model.kv_copies import KVCopies
from segue.model.runner import ModelRunner
from segue.model.sampler import is_plain, sample


class CudaRunner(ModelRunner):
    """Steps of few tokens are replayed, tokens are chosen on the device, and only those come back."""

    _is_lost = False
    _draw = staticmethod(draw_now)

    def __init__(self, decoder: Decoder, backend: CudaBackend, config: EngineConfig) -> None:
        super().__init__(decoder, backend, config)
        self._moves: CudaMoves | None = None
        if self.kv.device.type == "cuda":
            self._moves = CudaMoves(self.kv)
            self._copies = KVCopies(self.kv, self._moves)
        blocks = -(-config.max_sequence_len // config.block_size)
        self._steps = CudaSteps(decoder, backend, self.kv, config.max_running, blocks, config.max_step_tokens)
        self._sweeps = search.Sweeps(decoder, self._steps, self._searcher, config.block_size)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        with self._watching():
            searches = [row.search for row in plan.rows if row.search is not None]
            carry_out = self._carry_out if any(step.passes > 1 for step in searches) else self._execute
            result = carry_out(plan.rows, plan.copies, searches)
            if self._moves is not None:
                self._moves.step_ended()
            return result

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """A step that finds no memory, or a kernel that fails, is that step's misfortune; but a device that gives no answer any
        more is everybody's."""
        try:
            yield
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise
        except RuntimeError as error:  # torch's CUDA errors are
            try:
                if self.kv.device.type == "cuda":
                    torch.cuda.synchronize(self.kv.device)
            except RuntimeError:
                self._is_lost = True
                raise DeviceLost(f"{self.kv.device} is of no use any more: {error}") from error
            raise

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record the usual steps, so that no request waits for it."""
        if self.kv.device.type == "cuda":
            self._steps.warm_up()

    def can_finish(self, step: SearchStep, num_passes: int) -> bool:
        return search.can_finish(step, num_passes, self._decoder.spec.vocab_size)

    def _carry_out(self, rows: Sequence[Row], copies: Sequence[Copy], _: Sequence[SearchStep]) -> StepResult:
        """Some searches go to their ends; what else there is takes a step."""
        whole = [row for row in rows if row.search is not None and row.search.passes > 1]
        others = [row for row in rows if row.search is None or row.search.passes == 1]
        found = iter(self._sweeps.found(self._sweeps.launch(whole, copies)))
        if not others:
            return StepResult((), candidates=list(found))
        result = self._execute(others, (), [row.search for row in others if row.search is not None])
        apart = iter(result.candidates)
        searches = [row.search for row in rows if row.search is not None]
        return replace(result, candidates=[next(found if step.passes > 1 else apart) for step in searches])

    def _execute(self, plan_rows: Sequence[Row], copies: Sequence[Copy], searches: Sequence[SearchStep]) -> StepResult:
        if searches and len(searches) == len(plan_rows) and all(map(search.is_plain, searches)):
            count = max(each.num_candidates for each in searches)
            step = self._steps.run(plan_rows, copies, needs_head=True, num_candidates=count)
            assert step.best is not None
            return StepResult((), candidates=search.expand(step.best, searches))
        step = self._steps.run(plan_rows, copies, needs_head=not searches)
        if searches:
            return self._choose(step.hidden, plan_rows)
        rows = [row for row in plan_rows if row.sampling is not None]
        if not rows:
            return StepResult(())
        if step.tokens is not None and all(map(is_plain, rows)):
            return _checked(self._steps.tokens(step, rows).tolist())
        logits = self._decoder.logits(step.hidden) if step.logits is None else step.logits.float()
        return sample(logits, rows, self._draw)

    def _expand(self, x: Tensor, step: SearchStep) -> Candidates:
        return self._sweeps.expand(x, step) or super()._expand(x, step)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, after: Launched | None) -> Launched | search.Swept | None:
        if self._moves is None:
            return None
        with self._watching():
            if all(row.search is not None and row.search.passes > 1 for row in plan.rows):
                return self._sweeps.launch(plan.rows, plan.copies)
            if after is None and not all(
                row.sampling is not None and row.search is None and is_plain(row) for row in plan.rows
            ):
                return None
            return self._steps.launch(plan.rows, plan.copies, after)

    def land(self, ticket: Launched | search.Swept) -> StepResult:
        if isinstance(ticket, search.Swept):
            with self._watching():
                return StepResult((), candidates=self._sweeps.found(ticket))
        with self._watching():
            ticket.done.synchronize()
        return _checked(ticket.arrived.tolist())

    def read_kv(self, blocks: Sequence[int], start: int, stop: int, out: memoryview) -> None:
        with self._watching():
            if self._moves is not None:
                self._moves.take(blocks, start, stop, out)
            else:
                super().read_kv(blocks, start, stop, out)

    def write_kv(self, blocks: Sequence[int], start: int, stop: int, data: memoryview, first: int, last: int) -> None:
        with self._watching():
            super().write_kv(blocks, start, stop, data, first, last)

    def blocks_out(self, blocks: Sequence[int], slots: Sequence[int], memory: memoryview) -> None:
        with self._watching():
            super().blocks_out(blocks, slots, memory)

    def blocks_in(self, blocks: Sequence[int], slots: Sequence[int], memory: memoryview) -> None:
        with self._watching():
            super().blocks_in(blocks, slots, memory)

    def forward(self, plan: StepPlan) -> Tensor:
        return self._decoder.logits(self._steps.run(plan.rows, plan.copies, needs_head=False).hidden)

    def close(self) -> None:
        if self._is_lost:
            return  # nothing can be given back to it; the process is to end
        if self.kv.device.type == "cuda":
            torch.cuda.synchronize(self.kv.device)
        self._moves = None
        del self._steps, self._sweeps
        super().close()


def _checked(tokens: list[int]) -> StepResult:
    if tokens and min(tokens) < 0:
        raise ValueError("the model gave logits that are not numbers")
    return StepResult(tokens)
