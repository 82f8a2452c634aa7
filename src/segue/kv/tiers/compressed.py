"""A slow tier whose copies have fewer bits: what comes back is close to what was stored, and not the same."""

from __future__ import annotations

from typing import Protocol

from segue.base.errors import TierError
from segue.kv.tiers.courier import SlowTier


class Codec(Protocol):
    """Of blocks of one engine. Threads may use it together."""

    num_bytes: int  # of an encoded block

    def encode(self, block: memoryview) -> memoryview: ...
    def decode(self, data: memoryview, out: memoryview) -> None: ...


class CompressedTier:
    """Encodes on the way in and decodes on the way out; all else is the tier's own."""

    def __init__(self, tier: SlowTier, codec: Codec) -> None:
        self._tier = tier
        self._codec = codec
        self.kind, self.num_bytes = tier.kind, tier.num_bytes
        self.most_at_once, self.is_shared = tier.most_at_once, tier.is_shared
        self.find, self.look, self.drop, self.verify = tier.find, tier.look, tier.drop, tier.verify

    def __len__(self) -> int:
        return len(self._tier)

    @property
    def size_bytes(self) -> int:
        return self._tier.size_bytes

    def store_all(self, blocks: list[tuple[bytes, memoryview]]) -> None:
        self._tier.store_all([(name, self._codec.encode(block)) for name, block in blocks])

    def load_all(self, blocks: list[tuple[bytes, memoryview]]) -> list[bool | TierError]:
        encoded = [(name, memoryview(bytearray(self._codec.num_bytes))) for name, _ in blocks]
        outcomes = self._tier.load_all(encoded)
        for (_, data), (_, out), outcome in zip(encoded, blocks, outcomes, strict=True):
            if outcome is True:
                self._codec.decode(data, out)
        return outcomes
