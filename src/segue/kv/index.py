"""From tokens to the blocks that already hold their KV."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

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


class PrefixIndex:
    """A tree of committed blocks. A node is (parent, tokens); full blocks are also found by chain key.

    Two rules make a hit exact without trusting a hash: a node is entered with its parent, and it is believed only if its
    tokens *and* its parent are equal to what is looked for. A parent is always reused after its children: whoever holds
    a child holds the parent, and a table is released tail first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._block_of_key: dict[int, int] = {}
        self._children: dict[Parent, list[tuple[bytes, int]]] = {}
        self.parent: list[Parent | None] = [None] * num_blocks  # None: the block is not indexed
        self.tokens: list[bytes] = [b""] * num_blocks
        self.key: list[int | None] = [None] * num_blocks  # None: not indexed, or a partial tail

    def match(self, keys: Sequence[int], tokens: array[int], scope: Scope) -> Match:
        """Mutates nothing. Leaves at least one token to compute.

        tokens   |---- full blocks hit ----|-- tail --|------ to compute ------|
                 0                    n*block_size  num_tokens             len(tokens)
        """
        size = self._block_size
        limit = len(tokens) - 1
        blocks, parent = self._match_full(keys, tokens, scope, limit // size)
        start = len(blocks) * size
        tail_block, tail_tokens = self._match_tail(parent, tokens[start : min(start + size, limit)].tobytes())
        return Match(blocks, tail_block, tail_tokens, start + tail_tokens)

    def _match_full(self, keys: Sequence[int], tokens: array[int], scope: Scope, most: int) -> tuple[list[int], Parent]:
        step = self._block_size * TOKEN_BYTES
        find, held, parents = self._block_of_key.get, self.tokens, self.parent
        data = tokens[: most * self._block_size].tobytes()
        blocks: list[int] = []
        parent: Parent = scope
        offset = 0
        for key in keys[:most]:
            block = find(key)
            if block is None or held[block] != data[offset : offset + step] or parents[block] != parent:
                break
            blocks.append(block)
            parent = block
            offset += step
        return blocks, parent

    def _match_tail(self, parent: Parent, wanted: bytes) -> tuple[int | None, int]:
        """Children are sorted, so the longest common prefix is with a neighbour of the place where `wanted` would go."""
        children = self._children.get(parent)
        if not children or not wanted:
            return None, 0
        at = bisect_left(children, (wanted, 0))
        best, best_tokens = None, 0
        for held, block in children[max(at - 1, 0) : at + 1]:
            shared = common_tokens(held, wanted)
            if shared > best_tokens:
                best, best_tokens = block, shared
        return best, best_tokens

    def add(self, block: int, key: int, tokens: bytes, parent: Parent) -> int | None:
        """Enter a full block. Returns the block that serves this content: `block` itself, or the one that had it
        before; None when the key stands for other content (a collision), and nothing changes."""
        there = self._block_of_key.setdefault(key, block)
        if there != block:
            return there if self.tokens[there] == tokens and self.parent[there] == parent else None
        self.key[block] = key
        self._enter(block, tokens, parent)
        return block

    def add_tail(self, block: int, tokens: bytes, parent: Parent) -> bool:
        """Enter a partly filled block, unless what it holds can be had already."""
        if self._match_tail(parent, tokens)[1] * TOKEN_BYTES == len(tokens):
            return False
        self._enter(block, tokens, parent)
        return True

    def _enter(self, block: int, tokens: bytes, parent: Parent) -> None:
        self.parent[block] = parent
        self.tokens[block] = tokens
        siblings = self._children.get(parent)
        if siblings is None:
            self._children[parent] = [(tokens, block)]
        else:
            insort(siblings, (tokens, block))

    def remove(self, block: int) -> None:
        """Forget a block that is about to be written."""
        parent, key = self.parent[block], self.key[block]
        assert parent is not None
        siblings = self._children[parent]
        if len(siblings) == 1:
            del self._children[parent]
        else:
            del siblings[bisect_left(siblings, (self.tokens[block], block))]
        if key is not None:
            del self._block_of_key[key]
        self.parent[block] = self.key[block] = None
        self.tokens[block] = b""

    def has_children(self, block: int) -> bool:
        return block in self._children

    def is_tail(self, block: int) -> bool:
        return self.parent[block] is not None and self.key[block] is None

    def indexed_blocks(self) -> list[int]:
        return [block for block, parent in enumerate(self.parent) if parent is not None]

    def block_of(self, key: int) -> int | None:
        return self._block_of_key.get(key)

    def children_of(self, parent: Parent) -> Sequence[tuple[bytes, int]]:
        return self._children.get(parent, ())
