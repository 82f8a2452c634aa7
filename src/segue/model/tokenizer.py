"""Text to token ids and back.

Every token stands for bytes, and text is those bytes joined and read as UTF-8. That one rule makes decoding
incremental at a fixed cost per token (`TextStream`) and the same for every vocabulary. It differs from the
`tokenizers` decoders in one case only: where a SentencePiece vocabulary's byte tokens do not form UTF-8, the
characters around them survive here and are replaced there.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from segue.base.errors import UnsupportedModel

if TYPE_CHECKING:
    from pathlib import Path

    import tokenizers


class Tokenizer(ABC):
    """What `TextTokenizer` and `ByteTokenizer` share: decoding, and the ids with a meaning."""

    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]
    drops_leading_space = False
    """SentencePiece writes a space before the first word; decoding takes it away again."""

    @abstractmethod
    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Special tokens written out in `text` become their ids; `add_special` adds what the model wants around."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id outside the vocabulary, which a padded head can sample."""

    def stream(self, skip_special: bool = True, state: StreamState | None = None) -> TextStream:
        """A new stream, or one that goes on from `state`."""
        return TextStream(self, skip_special, state)

    def answer_stream(self, skip_special: bool = True) -> TextStream:
        """For text that follows a prompt: its first space is the model's own, and stays."""
        return TextStream(self, skip_special, StreamState(started=True))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        stream = self.stream(skip_special)
        return stream.push(ids) + stream.flush()


@dataclass(frozen=True)
class StreamState:
    """All a `TextStream` remembers: the bytes of an unfinished character, and whether any text came yet."""

    pending: tuple[int, ...] = ()
    started: bool = False


class TextStream:
    """Turns ids into text as they come.

    Invariant: the pushes joined, plus `flush()`, equal `decode` of all ids. A character split over tokens is
    held back until it is whole; at most three bytes are ever held.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, state: StreamState | None = None) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._started = False
        if state is not None:
            self._decoder.setstate((bytes(state.pending), 0))
            self._started = state.started

    def push(self, ids: Iterable[int]) -> str:
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        data = b"".join([token_bytes(token_id) for token_id in ids if token_id not in skipped])
        if not self._started and data:
            self._started = True
            if self._tokenizer.drops_leading_space:
                data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The unfinished character, if any, as U+FFFD. Later pushes start a new character."""
        return self._decoder.decode(b"", final=True)

    def state(self) -> StreamState:
        """For snapshots: `tokenizer.stream(skip_special, state)` goes on from here."""
        return StreamState(tuple(self._decoder.getstate()[0]), self._started)


class ByteTokenizer(Tokenizer):
    """One token per byte, and four special tokens written as in ChatML. For the `tiny` model and for tests."""

    SPECIALS = ("<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")

    def __init__(self) -> None:
        self._special_by_text = {text: 256 + index for index, text in enumerate(self.SPECIALS)}
        self._text_by_special = {id: text.encode() for text, id in self._special_by_text.items()}
        self._splitter = re.compile("(" + "|".join(map(re.escape, self.SPECIALS)) + ")")
        self.vocab_size = 256 + len(self.SPECIALS)
        self.special_ids = frozenset(self._text_by_special)
        self.bos_id = self._special_by_text["<|bos|>"]
        self.eos_ids = (self._special_by_text["<|endoftext|>"], self._special_by_text["<|im_end|>"])

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        ids: list[int] = [] if self.bos_id is None or not add_special else [self.bos_id]
        for index, piece in enumerate(self._splitter.split(text)):
            if index % 2:
                ids.append(self._special_by_text[piece])
            else:
                ids.extend(_utf8(piece))
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < 256:
            return bytes((token_id,))
        return self._text_by_special.get(token_id, b"")


class TextTokenizer(Tokenizer):
    """A vocabulary in the `tokenizers` library: byte-level BPE, or SentencePiece-style BPE with byte tokens."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        prepend_bos: bool = False,
    ) -> None:
        """`prepend_bos` is for a backend without a post-processor of its own that would add it."""
        backend.no_truncation()  # what a file asks for here is for training: a prompt is never cut or padded
        backend.no_padding()
        self._backend = backend
        self._prefix = [bos_id] if prepend_bos and bos_id is not None else []
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._added = {id: token.content for id, token in added.items()}
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        decoder = _decoder_state(backend)
        self._byte_level = b'"ByteLevel"' in decoder
        self.drops_leading_space = not self._byte_level and _drops_leading_space(decoder)
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        ids: list[int] = self._backend.encode_batch_fast([_utf8(text).decode()], add_special_tokens=add_special)[0].ids
        return self._prefix + ids if add_special else ids

    def save(self, path: Path) -> None:
        """Writes it as a `tokenizer.json`, which any library built on `tokenizers` reads."""
        self._backend.save(str(path))

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell_out(token_id)
        return found

    def _spell_out(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            return b""
        text = self._backend.id_to_token(token_id)
        if text is None:
            return b""
        if token_id in self._added and self._byte_level:
            return text.encode()
        if self._byte_level:
            spelled = _byte_of_character()
            return bytes(spelled[c] for c in text) if all(c in spelled for c in text) else text.encode()
        if token_id not in self._added and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes((int(text[3:5], 16),))
        return text.replace("▁", " ").encode()


def _utf8(text: str) -> bytes:
    """A lone surrogate, which JSON can carry and UTF-8 cannot, becomes the replacement character."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _decoder_state(backend: tokenizers.Tokenizer) -> bytes:
    state: bytes = b"none" if backend.decoder is None else backend.decoder.__getstate__()
    if not any(kind in state for kind in (b'"ByteLevel"', b'"ByteFallback"', b'"Metaspace"')):
        raise UnsupportedModel(
            f"the tokenizer's decoder is {state[:80].decode('utf-8', 'replace')}; byte-level and SentencePiece "
            "vocabularies can be read."
        )
    return state


def _drops_leading_space(decoder: bytes) -> bool:
    return b'"Strip"' in decoder or (b'"Metaspace"' in decoder and b'"never"' not in decoder)
