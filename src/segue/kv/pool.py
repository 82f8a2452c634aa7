"""Which blocks are free, and how often each of the others is held."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NULL_BLOCK = 0


class BlockPool:
    """Parallel int arrays, one entry a block; the free ones form a doubly linked list threaded through `_prev` and `_next`.

    The null block is never handed out, so it serves as the list's sentinel: `_next[0]` is the block to be reused next,
    `_prev[0]` the one freed last. A freed block keeps its content until it comes round, which is what makes a prefix
    cache of free memory.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError("a pool needs the null block and at least one more")
        self.num_blocks = num_blocks
        self.ref_count = [0] * num_blocks
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]
        self.num_free = num_blocks - 1
        self.num_releases = (
            0  # how often blocks were let go: whoever remembers it can tell whether that has happened since
        )

    @property
    def usage(self) -> float:
        """Share of the blocks that somebody holds."""
        return 1.0 - self.num_free / (self.num_blocks - 1)

    def allocate(self, count: int) -> list[int]:
        """Take the `count` blocks that were freed longest ago, each with one holder. The caller has checked `num_free`."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} free")
        links, refs = self._next, self.ref_count
        taken = []
        block = links[NULL_BLOCK]
        for _ in range(count):
            taken.append(block)
            refs[block] = 1
            block = links[block]
        links[NULL_BLOCK] = block
        self._prev[block] = NULL_BLOCK
        self.num_free -= count
        return taken

    def retain(self, blocks: Iterable[int]) -> None:
        """One more holder for each; a free block leaves the free list with its content intact."""
        refs, after, before = self.ref_count, self._next, self._prev
        for block in blocks:
            count = refs[block]
            if not count:
                left, right = before[block], after[block]
                after[left] = right
                before[right] = left
                self.num_free -= 1
            refs[block] = count + 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder fewer for each, last block first: of two blocks freed together the earlier one in the sequence
        is reused later, so prefixes outlive tails."""
        self.num_releases += 1
        refs, after, before = self.ref_count, self._next, self._prev
        last = before[NULL_BLOCK]
        freed = 0
        for block in reversed(blocks):
            count = refs[block] - 1
            if count < 0:
                raise ValueError(f"block {block} released more often than held")
            refs[block] = count
            if not count:
                after[last] = block
                before[block] = last
                last = block
                freed += 1
        after[last] = NULL_BLOCK
        before[NULL_BLOCK] = last
        self.num_free += freed

    def free_blocks(self) -> list[int]:
        """The free list from first to be reused to last; for `check()` and tests."""
        found = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            found.append(block)
            if len(found) > self.num_blocks or self._prev[self._next[block]] != block:
                raise ValueError(f"the free list is broken at block {block}")
            block = self._next[block]
        return found
