"""Names for full blocks outside the process: what one engine stores under them, another of the same model finds, and no other.

    name = tenant (8 bytes) | digest (24 bytes) of the digest of the block before and the block's tokens

The first block's digest chains from all that decides what is in a block besides its tokens: the model and how it is computed, the
layout of its KV, the size of a block, the adapter and the whole salt. Digests are cryptographic: unlike the index, whoever
reads a tier cannot compare tokens.
"""

from __future__ import annotations

import json
import sys
from array import array
from hashlib import blake2b

from segue.base.types import Scope
from segue.kv.hashing import token_chunks
from segue.kv.layout import KVLayout

TENANT_BYTES, DIGEST_BYTES = 8, 24
NAME_BYTES = TENANT_BYTES + DIGEST_BYTES
_VERSION = 1


class BlockNames:
    """Of one engine's blocks."""

    def __init__(self, layout: KVLayout, block_size: int, compressed: bool = False) -> None:
        """`compressed`: some of the content may have been in fewer bits, and is another's for whoever has none such."""
        self.block_size = block_size
        self.block_bytes = layout.token_bytes * block_size
        self._made_of = [_VERSION, layout.dtype, list(layout.shape), block_size, sys.byteorder]
        if compressed:
            self._made_of.append("int8")

    def extend(self, names: list[bytes], scope: Scope, tokens: array[int], num_blocks: int) -> None:
        """Append names until the first `num_blocks` full blocks of `tokens` have theirs."""
        size, done = self.block_size, len(names)
        if num_blocks <= done:
            return
        tenant = tenant_tag(scope.tenant)
        digest = names[-1][TENANT_BYTES:] if names else self._root(scope)
        for chunk in token_chunks(tokens[done * size : num_blocks * size], size):
            digest = blake2b(digest + chunk, digest_size=DIGEST_BYTES).digest()
            names.append(tenant + digest)

    def _root(self, scope: Scope) -> bytes:
        made_of = json.dumps([*self._made_of, scope.model, scope.adapter, scope.salt])
        return blake2b(made_of.encode(), digest_size=DIGEST_BYTES, person=b"segue tier").digest()


def tenant_tag(tenant: str) -> bytes:
    """What all names of a tenant begin with, so that they can be found without knowing what they stand for."""
    return blake2b(tenant.encode(), digest_size=TENANT_BYTES, person=b"segue tenant").digest()
