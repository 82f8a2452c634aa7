"""A model that needs no torch and notices every wrong block.

`FakeExecutor` keeps, for every KV slot, the token written there and a digest of everything before it. A row's digest is read
*through the block table*, so a table that points at stale, foreign or unwritten memory gives another token than `expected`,
which is computed from the tokens alone.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Sequence

from segue.engine.beam import Candidates, SearchStep
from segue.engine.executor import Row, StepPlan, StepResult
from segue.kv import KVLayout

VOCAB = 50
_START = 0x5E60E
_SLOT = struct.Struct("<iQ")  # a token, and the digest of all up to it


def _mix(digest: int, token: int) -> int:
    digest = (digest ^ (token + 0x9E3779B9)) * 0xFF51AFD7ED558CCD % 2**64
    return digest ^ (digest >> 29)


def _token_of(digest: int, seed: int, temperature: float) -> int:
    return (digest ^ (seed * 0xC4CEB9FE1A85EC53 if temperature else 0)) % 2**64 % VOCAB


def expected(prompt: Sequence[int], count: int, seed: int = 0, temperature: float = 0.0) -> list[int]:
    """What an engine with a correct KV core answers."""
    digest = _START
    for token in prompt:
        digest = _mix(digest, token)
    output = []
    for _ in range(count):
        output.append(_token_of(digest, seed, temperature))
        digest = _mix(digest, output[-1])
    return output


class StaleRead(AssertionError):
    pass


class FakeExecutor:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self.num_computed = 0
        self.num_copied = 0
        self.fail_next: Exception | None = None
        self.closed = False

    def execute(self, plan: StepPlan) -> StepResult:
        self._copy(plan)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            for row in plan.rows[: len(plan.rows) // 2]:
                self._compute(row)  # a step may die half way
            raise error
        tokens, candidates = [], []
        for row in plan.rows:
            if row.search is not None and row.search.tails:
                candidates.append(_best(row.search, self._compute_beams(row)))
                continue
            digest = self._compute(row)
            if row.search is not None:
                assert row.stop == len(row.tokens)
                candidates.append(self._search(row, row.search, digest))
            if row.sampling is not None:
                assert row.stop == len(row.tokens)
                tokens.append(_token_of(digest, row.sampling.seed, row.sampling.params.temperature))
        return StepResult(tokens, candidates=candidates)

    @property
    def kv_layout(self) -> KVLayout:
        return KVLayout("uint8", (_SLOT.size,))

    def read_kv(self, blocks: Sequence[int], start: int, stop: int, out: memoryview) -> None:
        for position in range(start, stop):
            held = self.slots[self._slot(blocks, position)]
            assert held is not None, f"position {position} has no KV"
            _SLOT.pack_into(out, (position - start) * _SLOT.size, *held)

    def write_kv(self, blocks: Sequence[int], start: int, stop: int, data: memoryview, first: int, last: int) -> None:
        assert start <= first < last <= stop and len(data) == (stop - start) * _SLOT.size
        for position in range(first, last):
            self.slots[self._slot(blocks, position)] = _SLOT.unpack_from(data, (position - start) * _SLOT.size)

    def host_memory(self, num_bytes: int) -> memoryview:
        return memoryview(bytearray(num_bytes))

    def blocks_out(self, blocks: Sequence[int], slots: Sequence[int], memory: memoryview) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            self.read_kv([block], 0, self.block_size, self._part(memory, slot))

    def blocks_in(self, blocks: Sequence[int], slots: Sequence[int], memory: memoryview) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            self.write_kv([block], 0, self.block_size, self._part(memory, slot), 0, self.block_size)

    def _part(self, memory: memoryview, slot: int) -> memoryview:
        size = self.block_size * _SLOT.size
        return memory[slot * size : (slot + 1) * size]

    def close(self) -> None:
        self.closed = True

    def _copy(self, plan: StepPlan) -> None:
        sources = {copy.src for copy in plan.copies}
        for src, dst in plan.copies:
            assert dst not in sources, "a copy's source is another's destination"
            size = self.block_size
            self.slots[dst * size : (dst + 1) * size] = self.slots[src * size : (src + 1) * size]
            self.num_copied += 1

    def _slot(self, blocks: Sequence[int], position: int) -> int:
        return blocks[position // self.block_size] * self.block_size + position % self.block_size

    def _compute(self, row: Row) -> int:
        assert row.start < row.stop <= len(row.tokens)
        digest = _START
        for position in range(row.start):
            held = self.slots[self._slot(row.blocks, position)]
            digest = _mix(digest, row.tokens[position])
            if held != (row.tokens[position], digest):
                raise StaleRead(f"sequence {row.sequence_id} reads {held} at position {position}")
        for position in range(row.start, row.stop):
            digest = _mix(digest, row.tokens[position])
            self.slots[self._slot(row.blocks, position)] = (row.tokens[position], digest)
            self.num_computed += 1
        return digest

    def _search(self, row: Row, step: SearchStep, digest: int) -> Candidates:
        """As many passes as there may be, each with the best of the one before."""
        found, width = [_best(step, [digest])], step.params.width
        tails = [array("i")] * width
        for number in range(1, step.passes):
            last = found[-1]
            start = step.num_shared + (number - 1) * width
            tails = [tails[beam] + array("i", [start + at]) for at, beam in enumerate(last.beams[:width])]
            step = step._replace(tails=tails, scores=last.scores[:width], depth=number)
            tokens = array("i", last.tokens[:width])
            beams = row._replace(tokens=tokens, start=start, stop=start + width, search=step)
            found.append(_best(step, self._compute_beams(beams)))
        chain = found.pop()
        while found:
            chain = found.pop()._replace(then=chain)
        return chain

    def _compute_beams(self, row: Row) -> list[int]:
        """Each beam's digest, read through its tail: every token there must follow the one before it."""
        step = row.search
        assert step is not None and len(row.tokens) == row.stop - row.start == len(step.tails)
        before = self.slots[self._slot(row.blocks, step.num_shared - 1)]
        assert before is not None
        digests = []
        for at, (token, tail) in enumerate(zip(row.tokens, step.tails, strict=True)):
            assert tail[-1] == row.start + at
            digest = before[1]
            for position in tail[:-1]:
                held = self.slots[self._slot(row.blocks, position)]
                if held is None or held[1] != _mix(digest, held[0]):
                    raise StaleRead(f"sequence {row.sequence_id}, beam {at} reads {held} at {position}")
                digest = held[1]
            digests.append(_mix(digest, token))
        for at, (token, digest) in enumerate(zip(row.tokens, digests, strict=True)):
            self.slots[self._slot(row.blocks, row.start + at)] = (token, digest)
            self.num_computed += 1
        return digests


class PipelinedFake(FakeExecutor):
    """Begins steps before it is asked for what came of the last one, as a device does: in order, with the tables of the moment,
    and with tokens that nobody has seen yet. Carries searches to their ends."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.num_ahead = 0
        self.num_in_flight = self.num_beside = 0  # steps of searches; those that began while another one ran

    def can_finish(self, step: SearchStep, num_passes: int) -> bool:
        return True

    def launch(self, plan: StepPlan, after: dict[int, int] | None) -> dict[int, int] | list[Candidates] | None:
        if plan.rows and all(row.search is not None and row.search.passes > 1 for row in plan.rows):
            assert after is None
            self.num_beside += self.num_in_flight
            self.num_in_flight += 1
            failing, self.fail_next = self.fail_next, None
            found = self.execute(plan).candidates
            self.fail_next = failing
            return found
        if any(row.search is not None or row.sampling is None for row in plan.rows):
            assert after is None
            return None
        rows = []
        for row in plan.rows:
            tokens, blocks = row.tokens[:], row.blocks[:]
            if after is not None:
                assert len(tokens) == row.start
                tokens.append(after[row.sequence_id])
            rows.append(row._replace(tokens=tokens, blocks=blocks))
        self.num_ahead += after is not None
        failing, self.fail_next = self.fail_next, None
        found = self.execute(StepPlan(rows, plan.copies))
        self.fail_next = failing
        return dict(zip([row.sequence_id for row in rows], found.tokens, strict=True))

    def land(self, ticket: dict[int, int] | list[Candidates]) -> StepResult:
        self.num_in_flight -= isinstance(ticket, list)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        if isinstance(ticket, list):
            return StepResult((), candidates=ticket)
        return StepResult(list(ticket.values()))


def logprob(digest: int, token: int) -> float:
    """Of a token after everything that led to a digest; a model's, but for their sum."""
    return -10 * (_mix(digest, token) / 2**64) - 0.1


def digest_of(tokens: Sequence[int]) -> int:
    digest = _START
    for token in tokens:
        digest = _mix(digest, token)
    return digest


def _best(step: SearchStep, digests: list[int]) -> Candidates:
    assert len(digests) == len(step.scores)
    found = [
        (score + logprob(digest, token), beam, token)
        for beam, (digest, score) in enumerate(zip(digests, step.scores, strict=True))
        for token in range(VOCAB)
    ]
    found.sort(reverse=True)
    scores, beams, tokens = zip(*found[: step.num_candidates], strict=True)
    return Candidates(beams, tokens, scores, [0] * len(scores), [False] * len(scores))


def settle(engine):
    """Let copies end that were to be made when there is time."""
    deadline = time.monotonic() + 30
    while engine.has_work or any(courier.has_work for courier in engine._tiers._couriers):
        engine.step()
        time.sleep(0.001)
        assert time.monotonic() < deadline
    engine.check()


def cut_chunks(monkeypatch, num_bytes):
    """Engines send and save KV in chunks of about so many bytes: even a small state has several."""
    for name in ("FILE_CHUNK", "WIRE_CHUNK"):
        monkeypatch.setattr(f"segue.engine.core.{name}", num_bytes)
