"""vLLM's block pool, as our leases see one."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from segue.base.types import Scope
from segue.kv import KVEvent, Lease, Revoked
from segue.kv.leases import Leases


class _Holders:
    """How many hold a block, by its id."""

    def __init__(self, blocks: Any) -> None:
        self._blocks = blocks

    def __getitem__(self, block: int) -> int:
        return int(self._blocks[block].ref_cnt)


class PoolView:
    """References to vLLM's blocks. What is released keeps its content, and its place in the prefix cache, until it is reused."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.ref_count = _Holders(pool.blocks)
        self._asked = 0

    @property
    def num_free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    @property
    def num_releases(self) -> int:
        """Never the same twice: others release blocks of this pool without our knowing."""
        self._asked += 1
        return self._asked

    def retain(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def release(self, blocks: Sequence[int]) -> None:
        """A sequence's last blocks are the first to be reused."""
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])


class VLLMBlocks:
    """What the job desk asks of a KV manager, over vLLM's own."""

    def __init__(self, manager: Any, block_size: int) -> None:
        self.block_size = block_size
        self._manager = manager
        self._pool = manager.block_pool
        self.num_blocks = int(self._pool.num_gpu_blocks)
        self.num_revoked = 0
        self.leases = Leases(PoolView(self._pool), block_size, self._heard)

    @property
    def num_free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def hold(self, request_id: str, scope: Scope, num_computed: int, **terms: Any) -> Lease | None:
        """A lease on what a request has computed, while the request still has it."""
        blocks = self._manager.get_blocks(request_id).blocks[0][: self.blocks_for(num_computed)]
        if not blocks:
            return None
        held = array("i", (block.block_id for block in blocks))
        return self.leases.grant(scope, held, num_computed, indexed=True, **terms)

    def blocks_of(self, lease: Lease, num_tokens: int) -> list[Any]:
        return [self._pool.blocks[block] for block in lease.blocks[: self.blocks_for(num_tokens)]]

    @contextmanager
    def kept(self, blocks: Sequence[Any]) -> Iterator[None]:
        """Nobody gets these meanwhile."""
        self._pool.touch(blocks)
        try:
            yield
        finally:
            self._pool.free_blocks(reversed(blocks))

    def _heard(self, event: KVEvent) -> None:
        if isinstance(event, Revoked):
            self.num_revoked += event.num_blocks
