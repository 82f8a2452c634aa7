"""Finds a model's tokenizer: `tokenizer.json` and its neighbours in a folder, or the vocabulary inside a GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segue.base.errors import ModelError, UnsupportedModel
from segue.model.gguf_config import end_token_ids
from segue.model.json_file import read_json
from segue.model.spec import ConfigFields
from segue.model.tokenizer import TextTokenizer

if TYPE_CHECKING:
    import tokenizers

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# `tokenizer.ggml.pre` names how text is cut before merging. None is GPT-2's own cut, which the library has built in.
_SPLITS = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "tekken": _TEKKEN_SPLIT,
}
_SINGLE_DIGITS = frozenset({"smollm"})
_WHOLE_WORDS_FIRST = frozenset({"llama3", "llama-v3", "llama-bpe", "tekken"})
"""Vocabularies in which a piece that is itself a token is taken whole, whatever the merges say; all add a bos."""


def tokenizer_from_folder(folder: Path) -> TextTokenizer:
    import tokenizers

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder.name} has no tokenizer.json; a tokenizer in any other form cannot be read.")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"tokenizer.json cannot be read: {error}.") from error
    names = _optional_json(folder / "special_tokens_map.json") | _optional_json(folder / "tokenizer_config.json")
    bos, eos = (_named_token(names.get(key), backend) for key in ("bos_token", "eos_token"))
    generation = _optional_json(folder / "generation_config.json")
    told = generation if generation.get("eos_token_id") is not None else _optional_json(folder / "config.json")
    eos_ids = [*ConfigFields(told).token_ids("eos_token_id"), *([] if eos is None else [eos])]
    return TextTokenizer(backend, bos_id=bos, eos_ids=tuple(dict.fromkeys(eos_ids)))


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> TextTokenizer:
    """`add_eos_token` is not obeyed: it is meant for training, and a prompt that has ended generates nothing."""
    fields = ConfigFields(metadata, "tokenizer.ggml.")
    vocabulary, kinds = _vocabulary(fields)
    model, cut = fields.get("model"), fields.get("pre") or "default"
    if model == "gpt2":
        backend = _byte_level_backend(fields, vocabulary, cut)
    elif model == "llama":
        backend = _sentencepiece_backend(fields, vocabulary, kinds)
    else:
        raise UnsupportedModel(f"tokenizer.ggml.model {model!r} is not supported; supported are gpt2 and llama.")
    _add_whole_tokens(backend, vocabulary, kinds)
    bos = fields.token_ids("bos_token_id")
    adds_bos = fields.flag("add_bos_token", model == "llama" or cut in _WHOLE_WORDS_FIRST)
    return TextTokenizer(backend, bos_id=bos[0] if bos else None, eos_ids=end_token_ids(metadata), prepend_bos=adds_bos)


def _vocabulary(fields: ConfigFields) -> tuple[list[str], list[int]]:
    tokens = fields.get("tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelError("tokenizer.ggml.tokens is missing or is not a list of texts.")
    kinds = fields.get("token_type") or [_NORMAL] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ModelError("tokenizer.ggml.token_type does not have one value per token.")
    return tokens, kinds


def _byte_level_backend(fields: ConfigFields, vocabulary: list[str], cut: str) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    if cut not in _SPLITS:
        raise UnsupportedModel(f"tokenizer.ggml.pre {cut!r} is not supported; supported are {', '.join(_SPLITS)}.")
    backend = Tokenizer(_bpe(vocabulary, _listed_merges(fields), ignore_merges=cut in _WHOLE_WORDS_FIRST))
    split = _SPLITS[cut]
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split is not None:
        steps.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
    if cut in _SINGLE_DIGITS:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if cut == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece_backend(fields: ConfigFields, vocabulary: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, normalizers

    unknown = fields.token_ids("unknown_token_id") or (0,)
    if unknown[0] >= len(vocabulary):
        raise ModelError(f"tokenizer.ggml.unknown_token_id {unknown[0]} is outside the vocabulary.")
    merges = _scored_merges(fields, vocabulary, kinds)
    backend = Tokenizer(_bpe(vocabulary, merges, unk_token=vocabulary[unknown[0]], fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.flag("add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        backend.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = spaces
        backend.decoder = decoders.Sequence(undo)
    return backend


def _bpe(vocabulary: list[str], merges: list[tuple[str, str]], **options: Any) -> Any:
    from tokenizers.models import BPE

    try:
        return BPE({token: index for index, token in enumerate(vocabulary)}, merges, **options)
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"the vocabulary and merges of the GGUF file do not fit together: {error}.") from error


def _listed_merges(fields: ConfigFields) -> list[tuple[str, str]]:
    merges = fields.get("merges")
    if not isinstance(merges, list):
        raise ModelError("tokenizer.ggml.merges is missing.")
    pairs = []
    for merge in merges:
        left, space, right = str(merge).partition(" ")
        if not (left and space and right):
            raise ModelError(f"tokenizer.ggml.merges holds {str(merge)[:40]!r}, which is not two tokens.")
        pairs.append((left, right))
    return pairs


def _scored_merges(fields: ConfigFields, vocabulary: list[str], kinds: list[int]) -> list[tuple[str, str]]:
    """SentencePiece lists no merges: any two tokens that join to a third may, the best-scored third first."""
    scores = fields.get("scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary):
        raise ModelError("tokenizer.ggml.scores does not have one value per token.")
    known = {token for token, kind in zip(vocabulary, kinds, strict=True) if kind == _NORMAL}
    found = [
        (score, token[:cut], token[cut:])
        for token, kind, score in zip(vocabulary, kinds, scores, strict=True)
        if kind == _NORMAL
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    found.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in found]


def _add_whole_tokens(backend: tokenizers.Tokenizer, vocabulary: list[str], kinds: list[int]) -> None:
    """Control and user-defined tokens are matched whole in text; only control tokens are left out when decoding."""
    from tokenizers import AddedToken

    pairs = list(zip(vocabulary, kinds, strict=True))
    added = [AddedToken(token, normalized=False, special=True) for token, kind in pairs if kind == _CONTROL and token]
    backend.add_special_tokens(added)
    defined = [
        AddedToken(token, normalized=False, special=False) for token, kind in pairs if kind == _USER_DEFINED and token
    ]
    backend.add_tokens(defined)


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _named_token(name: object, backend: tokenizers.Tokenizer) -> int | None:
    """A special token as config files write it: its text, or an object that holds it."""
    text = name.get("content") if isinstance(name, dict) else name
    return backend.token_to_id(text) if isinstance(text, str) else None
