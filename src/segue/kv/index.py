"""From tokens to the blocks that already hold their KV."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from segue.base.types import Scope
from segue.kv.hashing import TOKEN_BYTES, common_tokens

Parent = int | Scope  # the block before, or the scope of a first block


@dataclass(frozen=True, slots=True)
class Match:
    """The longest reusable prefix, to the token. Valid until the next change to the pool.

    `blocks` are full blocks to take by reference; the first `tail_tokens` tokens of `tail_block` are to be had by copying it.
    """

    blocks: Sequence[int]
    tail_block: int | None
    tail_tokens: int
    num_tokens: int
    indexed: bool = True  # the full blocks are in the index, each below the one before
    num_borrowed: int = 0  # leading blocks that a lease holds, and lends

    def without_tail(self, block_size: int) -> Match:
        """Full blocks alone."""
        return Match(self.blocks, None, 0, len(self.blocks) * block_size, self.indexed, self.num_borrowed)


class PrefixIndex:
    """A tree of committed blocks. A node is (parent, tokens); full blocks are also found by chain key.

    Two rules make a hit exact without trusting a hash: a node is entered with its parent, and it is believed only if its
    tokens *and* its parent are equal to what is looked for. A parent is always reused after its children: whoever holds
    a child holds the parent, and a table is released tail first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._block_of_key: dict[int, int] = {}
        self._children: dict[Parent, list[int]] = {}  # sorted by their tokens, which differ
        self.parent: list[Parent | None] = [None] * num_blocks  # None: the block is not indexed
        self.tokens: list[bytes] = [b""] * num_blocks
        self.key: list[int | None] = [None] * num_blocks  # None: not indexed, or a partial tail

    def match(self, keys: Sequence[int], tokens: array[int], parent: Parent, skip: int = 0) -> Match:
        """Mutates nothing. Leaves at least one token to compute. The first `skip` blocks are known already, the last of them is
        `parent`, and they are not in the result.

        tokens   |---- skipped ----|---- full blocks hit ----|-- tail --|------ to compute ------|
                 0          skip*block_size             n*block_size  num_tokens             len(tokens)
        """
        size = self.block_size
        limit = len(tokens) - 1
        most = limit // size
        blocks = self._match_full(keys[skip:most], tokens[skip * size : most * size].tobytes(), parent)
        start = (skip + len(blocks)) * size
        parent = blocks[-1] if blocks else parent
        tail_block, tail_tokens = self._match_tail(parent, tokens[start : min(start + size, limit)].tobytes())
        return Match(blocks, tail_block, tail_tokens, start + tail_tokens)

    def _match_full(self, keys: Sequence[int], data: bytes, parent: Parent) -> list[int]:
        """What the keys name, as far as parents and tokens bear it out; all at once, and one by one only if they
        do not."""
        found = list(map(self._block_of_key.get, keys))
        blocks = cast("list[int]", found[: found.index(None)] if None in found else found)
        step = self.block_size * TOKEN_BYTES
        parents: list[Parent] = [parent, *blocks]
        while blocks:
            if [self.parent[block] for block in blocks] == parents[: len(blocks)]:
                held = b"".join([self.tokens[block] for block in blocks])
                if held == data[: len(blocks) * step]:
                    break
            blocks = blocks[: self._num_true(blocks, parents, data)]
        return blocks

    def _num_true(self, blocks: Sequence[int], parents: Sequence[Parent], data: bytes) -> int:
        step = self.block_size * TOKEN_BYTES
        for at, block in enumerate(blocks):
            if self.parent[block] != parents[at] or self.tokens[block] != data[at * step : (at + 1) * step]:
                return at
        return len(blocks)

    def _match_tail(self, parent: Parent, wanted: bytes) -> tuple[int | None, int]:
        """Children are sorted, so the longest common prefix is with a neighbour of the place where `wanted` would go."""
        children = self._children.get(parent)
        if not children or not wanted:
            return None, 0
        at = bisect_left(children, wanted, key=self.tokens.__getitem__)
        best, best_tokens = None, 0
        for block in children[max(at - 1, 0) : at + 1]:
            shared = common_tokens(self.tokens[block], wanted)
            if shared > best_tokens:
                best, best_tokens = block, shared
        return best, best_tokens

    def add(self, blocks: Sequence[int], keys: Sequence[int], contents: Sequence[bytes], parent: Parent) -> list[int]:
        """Enter a run of full blocks below `parent`. Returns, for each, the block that serves its content: itself, or
        the one that had it before. The list ends early at a key that stands for other content (a collision)."""
        block_of_key, parents, tokens = self._block_of_key, self.parent, self.tokens
        serving: list[int] = []
        for block, key, content in zip(blocks, keys, contents, strict=True):
            there = block_of_key.setdefault(key, block)
            if parents[there] is None:
                self.key[block] = key
                self._enter(block, content, parent)
            elif tokens[there] != content or parents[there] != parent:
                break
            serving.append(there)
            parent = there
        return serving

    def add_tail(self, block: int, content: bytes, parent: Parent) -> bool:
        """Enter a partly filled block, unless what it holds can be had already."""
        if self._match_tail(parent, content)[1] * TOKEN_BYTES == len(content):
            return False
        self._enter(block, content, parent)
        return True

    def _enter(self, block: int, content: bytes, parent: Parent) -> None:
        self.parent[block] = parent
        self.tokens[block] = content
        siblings = self._children.get(parent)
        if siblings is None:
            self._children[parent] = [block]
        else:
            insort(siblings, block, key=self.tokens.__getitem__)

    def remove(self, block: int) -> None:
        """Forget a block that is about to be written."""
        parent, key = self.parent[block], self.key[block]
        assert parent is not None
        siblings = self._children[parent]
        if len(siblings) == 1:
            del self._children[parent]
        else:
            del siblings[bisect_left(siblings, self.tokens[block], key=self.tokens.__getitem__)]
        if key is not None:
            del self._block_of_key[key]
        self.parent[block] = self.key[block] = None
        self.tokens[block] = b""

    def indexed_blocks(self) -> list[int]:
        return [block for block, parent in enumerate(self.parent) if parent is not None]

    def scopes(self) -> list[Scope]:
        """That have blocks here."""
        return [parent for parent in self._children if isinstance(parent, Scope)]

    def block_of(self, key: int) -> int | None:
        return self._block_of_key.get(key)

    def children_of(self, parent: Parent) -> Sequence[int]:
        return self._children.get(parent, ())
