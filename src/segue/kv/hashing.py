"""Chain keys: one int that names a full block's tokens, all tokens before it, and the scope.

Python's own hash of bytes is SipHash, keyed per process, and costs a fraction of a microsecond. A key only narrows the
search: the index compares tokens on every hit, so a collision is a miss.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import accumulate

from segue.base.types import Scope

TOKEN_BYTES = 4  # tokens are array('i'): cheap to append to, slice, hash and hand to numpy
ChainHash = Callable[[int, bytes], int]


def chain_hash(parent_key: int, tokens: bytes) -> int:
    return hash((parent_key, tokens))


def root_key(scope: Scope) -> int:
    """What a scope's first block chains from."""
    return hash(scope)


def extend_keys(keys: list[int], scope: Scope, tokens: array[int], block_size: int, hash_block: ChainHash) -> None:
    """Append the keys of those full blocks of `tokens` that `keys` does not cover yet."""
    done = len(keys)
    full = len(tokens) // block_size
    if full <= done:
        return
    chunks = token_chunks(tokens[done * block_size : full * block_size], block_size)
    chained = accumulate(chunks, hash_block, initial=keys[-1] if keys else root_key(scope))
    next(chained)
    keys.extend(chained)


def token_chunks(tokens: array[int], block_size: int) -> list[bytes]:
    """The tokens of full blocks, block by block."""
    step = block_size * TOKEN_BYTES
    data = tokens.tobytes()
    return [data[offset : offset + step] for offset in range(0, len(data), step)]


def common_tokens(left: bytes, right: bytes) -> int:
    """How many leading tokens two runs of tokens share."""
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit // TOKEN_BYTES
    count = 0
    while left[count : count + TOKEN_BYTES] == right[count : count + TOKEN_BYTES]:
        count += TOKEN_BYTES
    return count // TOKEN_BYTES
