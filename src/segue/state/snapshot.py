"""A state that has left its engine: pure data, without its KV, which travels beside it in chunks."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from segue.base.types import SamplingParams
from segue.kv.layout import KVLayout

Logprobs = tuple[float, int, tuple[tuple[int, float], ...]]
"""One token's: the chosen one's own, its rank, and the likeliest tokens with theirs."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What an unfinished request needs, besides its tokens, to go on as if it had never stopped.

    The random state is `seed` and the position, penalties count `tokens` from `num_prompt` on, and the text so far, with
    a character or a stop string that is still open, follows from the tokens: nothing else has to travel.
    """

    params: SamplingParams
    seed: int
    num_prompt: int
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`num_computed` leading tokens come with KV, in chunks of `chunk_tokens` tokens, the last one perhaps shorter:

        tokens   |0 -- chunk 0 --|-- chunk 1 --|- 2 -| num_computed ---- without KV ----| len(tokens)

    `scope` is a digest of the tenant's salt, empty for none: the salt itself never leaves the engine. `note` belongs to
    whoever saved the state; a session keeps its messages there.
    """

    id: str
    model: str  # fingerprint of the weights and their precision
    layout: KVLayout
    tokens: array[int]
    num_computed: int
    chunk_tokens: int
    created_at: float  # seconds since 1970
    scope: str = ""
    adapter: str = ""
    job: str | None = None
    progress: Progress | None = None  # None: the request had finished
    note: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_chunks(self) -> int:
        return -(-self.num_computed // self.chunk_tokens)

    def chunk(self, index: int) -> tuple[int, int]:
        """The positions of one chunk: first, and one past the last."""
        start = index * self.chunk_tokens
        return start, min(start + self.chunk_tokens, self.num_computed)

    def chunk_bytes(self, index: int) -> int:
        start, stop = self.chunk(index)
        return (stop - start) * self.layout.token_bytes

    @property
    def kv_bytes(self) -> int:
        return self.num_computed * self.layout.token_bytes
