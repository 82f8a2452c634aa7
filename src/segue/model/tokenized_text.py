"""Tokenising a text that changes at its end, without tokenising its beginning again."""

from __future__ import annotations

from array import array
from bisect import bisect
from dataclasses import dataclass, field

from segue.model.tokenizer import Tokenizer

_NEAR_CHARS = 400  # further cuts are looked for so close to a text's end, where each is checked for little


@dataclass(frozen=True, slots=True)
class Cut:
    """The place right before a special token: characters `start` to `stop` of a text, and one token."""

    start: int
    stop: int
    token: int


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text and its tokens, `tokenizer.encode(text, add_special=False)`, and where another text can take over.

    Tokenisers find special tokens before they do anything else, so what lies before one and what begins with it are
    tokenised each by itself. Nor is that taken on trust. For a cut, the text from there on must give the very tokens
    the whole text has there; and another text uses it only if it gives the same special token there. Both fail where
    a vocabulary puts a space before everything it is given, or looks for special tokens in normalised text only.
    """

    tokenizer: Tokenizer
    text: str = ""
    tokens: array[int] = field(default_factory=lambda: array("i"))
    cuts: tuple[Cut, ...] = ()

    def changed_to(self, text: str) -> TokenizedText:
        """The same of another text, tokenised from the last cut in what both have in common, or from its beginning."""
        for count in range(len(self.cuts), 0, -1):
            cut = self.cuts[count - 1]
            if text.startswith(self.text[: cut.stop]):
                rest = self._encode(text[cut.start :])
                if rest[:1] == self.tokens[cut.token : cut.token + 1]:
                    tokens = self.tokens[: cut.token] + rest
                    cuts = self.cuts[:count] + self._find_cuts(text, tokens, cut.stop, cut.token + 1)
                    return TokenizedText(self.tokenizer, text, tokens, cuts)
        tokens = self._encode(text)
        return TokenizedText(self.tokenizer, text, tokens, self._find_cuts(text, tokens, 0, 0))

    def _find_cuts(self, text: str, tokens: array[int], first_char: int, first_token: int) -> tuple[Cut, ...]:
        """Before the last special token, and before others near the end: a template may start an answer with several, and
        write only some of them when the answer is history."""
        found: list[Cut] = []
        start = len(text)
        for position in range(len(tokens) - 1, first_token - 1, -1):
            if tokens[position] in self.tokenizer.special_ids:
                marker = self.tokenizer.token_bytes(tokens[position])
                spelled = marker.decode("utf-8", "replace")
                start = text.rfind(spelled, first_char, start)
                if start < 0 or self._is_inside_another(marker) or (found and start < len(text) - _NEAR_CHARS):
                    break
                if self._encode(text[start:]) != tokens[position:]:
                    break
                found.append(Cut(start, start + len(spelled), position))
        return tuple(reversed(found))

    def _is_inside_another(self, marker: bytes) -> bool:
        """A special token that reaches over this one from both sides would be in neither half of a text."""
        spellings = map(self.tokenizer.token_bytes, self.tokenizer.special_ids)
        return any(marker in spelling[1:] for spelling in spellings)

    def _encode(self, text: str) -> array[int]:
        return array("i", self.tokenizer.encode(text, add_special=False))


def common_prefix(one: array[int], other: array[int]) -> int:
    """How many tokens two sequences begin with alike."""
    most = min(len(one), len(other))
    return bisect(range(most), False, key=lambda index: one[: index + 1] != other[: index + 1])
