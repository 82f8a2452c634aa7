"""Ids equal the reference's, and text comes back whole however it is cut into tokens and pushes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.base.errors import ModelError, UnsupportedModel
from segue.model.loading import LoadedModel
from segue.model.tokenizer import ByteTokenizer, TextTokenizer, Tokenizer
from segue.model.tokenizer_files import tokenizer_from_folder, tokenizer_from_gguf

CORPUS = [
    "",
    "Hello, world!",
    "  two leading spaces, a tab\t, and\n\n\nthree newlines   ",
    "don't I'll WE'VE you'd",
    "In 2024, 1234567 people paid 3.14159 or 1,000.00; 1 2  3   4",
    "²³ ½ Ⅷ ٣ 四",
    "def f(x: int) -> int:\n\treturn x ** 2  # naïve\n\n\nif __name__ == '__main__':\r\n    f(3)",
    "日本語のテキスト、中文文本。한국어 العربية עברית हिन्दी",
    "😀 👩‍👩‍👧 🇩🇪 e\u0301 é \u00a0\u2003 zero\u200bwidth",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <repo_name>x<file_sep> <|not_special|> <|im_end",
    "\U00010348 \U00020000",
    "x" * 300 + " " * 70 + "\x00\x01\x7f\ufffd",
]


@pytest.fixture(scope="session")
def reference(smollm2_path: Path, quick_reference: None) -> Any:
    """transformers' tokenizer, with the one thing repaired that it does not take from a GGUF file.

    It does not know the file's `tokenizer.ggml.pre = smollm` and cuts as GPT-2 does. The model's own tokenizer.json
    takes every digit alone before that cut; so does llama.cpp, and so does Segue.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), tokenizer.backend_tokenizer.pre_tokenizer]
    )
    return tokenizer


@pytest.mark.parametrize("text", CORPUS)
def test_smollm2_ids_equal_the_reference(smollm2: LoadedModel, reference: Any, text: str) -> None:
    ids = smollm2.tokenizer.encode(text, add_special=True)
    assert ids == reference(text)["input_ids"]
    assert smollm2.tokenizer.decode(ids, skip_special=False) == reference.decode(ids) == text
    assert smollm2.tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, 49151), max_size=40))
def test_smollm2_decodes_any_ids_as_the_reference(smollm2: LoadedModel, reference: Any, ids: list[int]) -> None:
    assert smollm2.tokenizer.decode(ids, skip_special=False) == reference.decode(ids)
    assert smollm2.tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=60))
def test_text_survives_a_round_trip(smollm2: LoadedModel, reference: Any, text: str) -> None:
    check_round_trip(ByteTokenizer(), text)
    assert smollm2.tokenizer.encode(text) == reference(text)["input_ids"]
    # Some control characters and byte 0xF1 are no tokens of SmolLM2; it loses them, with any library.
    check_round_trip(smollm2.tokenizer, "".join(c for c in text if " " <= c <= "\U0003ffff"))


def check_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_digits_are_single_tokens_in_smollm2(smollm2: LoadedModel) -> None:
    assert len(smollm2.tokenizer.encode("20251234", add_special=False)) == 8


def test_special_tokens(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer.encode("<|im_start|>x<|im_end|>") == [1, *tokenizer.encode("x"), 2]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2,), 49152)
    assert (smollm2.spec.bos_id, smollm2.spec.eos_ids) == (1, (2,))
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(49152) == tokenizer.token_bytes(2**40) == tokenizer.token_bytes(-1) == b""


def test_a_prompt_is_never_cut_and_added_tokens_keep_their_letters() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({chr(c): c - 97 for c in range(97, 123)}, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<é>"])
    backend.enable_truncation(4)
    backend.enable_padding(length=20)
    tokenizer = TextTokenizer(backend)
    assert len(tokenizer.encode("abcdefghij<é>")) == 11
    assert tokenizer.decode(tokenizer.encode("a<é>b"), skip_special=False) == "a<é>b"


def test_byte_tokenizer() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é<|im_end|>", add_special=True) == [tokenizer.bos_id, 0xC3, 0xA9, tokenizer.eos_ids[1]]
    assert tokenizer.encode("<|im_end|") == [tokenizer.bos_id, *b"<|im_end|"]
    assert tokenizer.vocab_size == 260


@pytest.mark.parametrize("kind", ["bytes", "smollm2"])
def test_lone_surrogates_do_not_raise(smollm2: LoadedModel, kind: str) -> None:
    tokenizer = ByteTokenizer() if kind == "bytes" else smollm2.tokenizer
    assert tokenizer.decode(tokenizer.encode("a\ud800b", add_special=False)) == "a\ufffdb"


# Streams


@st.composite
def pushes(draw: st.DrawFn, vocab_size: int) -> list[list[int]]:
    return draw(st.lists(st.lists(st.integers(0, vocab_size + 5), max_size=4), max_size=30))


@given(st.data(), st.booleans())
def test_stream_equals_decode(smollm2: LoadedModel, data: st.DataObject, skip_special: bool) -> None:
    for tokenizer in (smollm2.tokenizer, ByteTokenizer()):
        check_stream(tokenizer, data.draw(pushes(tokenizer.vocab_size)), skip_special)


@given(st.text(max_size=30))
def test_stream_of_bytes_never_shows_half_a_character(text: str) -> None:
    stream = ByteTokenizer().stream()
    shown = [stream.push([byte]) for byte in text.encode()]
    assert "".join(shown) == text
    assert stream.flush() == ""


def check_stream(tokenizer: Tokenizer, chunks: list[list[int]], skip_special: bool) -> None:
    """Saved and restored after every push, on top of the stream's own promise."""
    state, shown = None, ""
    for chunk in chunks:
        stream = tokenizer.stream(skip_special, state)
        shown += stream.push(chunk)
        state = stream.state()
        assert len(state.pending) <= 3
    whole = tokenizer.decode([token for chunk in chunks for token in chunk], skip_special)
    assert shown + tokenizer.stream(skip_special, state).flush() == whole
    assert whole.startswith(shown)


# Other vocabularies


def gguf_vocabulary(tokens: list[str], merges: list[str], pre: str, **more: Any) -> dict[str, Any]:
    fields = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges} | more
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


DIGITS = [*"0123456789", "12", "123", "1234", "Ġ", "a"]
DIGIT_MERGES = ["1 2", "12 3", "123 4"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["1234", "a"]),
        ("default", ["1234", "a"]),
        ("smollm", ["1", "2", "3", "4", "a"]),
        ("llama-bpe", ["123", "4", "a"]),
        ("qwen2", ["1", "2", "3", "4", "a"]),
        ("tekken", ["1", "2", "3", "4", "a"]),
    ],
)
def test_each_vocabulary_cuts_digits_its_way(pre: str, pieces: list[str]) -> None:
    tokenizer = tokenizer_from_gguf(gguf_vocabulary(DIGITS, DIGIT_MERGES, pre))
    assert tokenizer.encode("1234a") == [DIGITS.index(piece) for piece in pieces]


def test_llama3_adds_a_bos_and_takes_known_words_whole() -> None:
    tokens = [*"abc", "ab", "abc", "<|bos|>"]
    kinds = [1, 1, 1, 1, 1, 3]
    fields = gguf_vocabulary(tokens, ["a b"], "llama-bpe", token_type=kinds, bos_token_id=5)
    tokenizer = tokenizer_from_gguf(fields)
    assert tokenizer.encode("abc", add_special=True) == [5, 4]
    assert tokenizer.encode("abc", add_special=False) == [4]
    assert tokenizer_from_gguf(fields | {"tokenizer.ggml.add_bos_token": False}).encode("abc") == [4]


SPM = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁",
    *"helowrd",
    "he",
    "ll",
    "hell",
    "hello",
]
SPM += ["▁hello", "or", "▁w", "wor", "▁wor", "ld", "▁world"]


def sentencepiece() -> dict[str, Any]:
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(SPM) - 259)
    scores = [0.0] * 259 + [-float(len(SPM) - len(token)) for token in SPM[259:]]
    more = {"model": "llama", "token_type": kinds, "scores": scores, "bos_token_id": 1, "eos_token_id": 2}
    return gguf_vocabulary(SPM, [], "default", **more)


def test_sentencepiece_vocabulary() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece())
    ids = tokenizer.encode("hello world")
    assert [SPM[token] for token in ids] == ["<s>", "▁hello", "▁world"]
    assert tokenizer.decode(ids) == "hello world"
    text = "hello 你好 é"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.stream(True).push(tokenizer.encode(text)) == text


@given(st.lists(st.lists(st.integers(0, len(SPM) - 1), max_size=3), max_size=20), st.booleans())
def test_sentencepiece_stream_equals_decode(chunks: list[list[int]], skip_special: bool) -> None:
    check_stream(tokenizer_from_gguf(sentencepiece()), chunks, skip_special)


@pytest.mark.parametrize("text", ["hello world", "he he", "world 你好", "hello  world\n", "wor ld"])
def test_sentencepiece_equals_transformers(text: str) -> None:
    from transformers import LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    fields = sentencepiece()
    vocabulary = {token: index for index, token in enumerate(SPM)}
    scores = dict(zip(SPM, fields["tokenizer.ggml.scores"], strict=True))
    theirs = LlamaTokenizer(vocab=vocabulary, merges=generate_merges(vocabulary, scores), legacy=True)
    ours = tokenizer_from_gguf(fields)
    ids = ours.encode(text, add_special=False)
    assert ids == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids) == text


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({}, ModelError),
        (gguf_vocabulary(["a"], ["a b"], "gpt-2"), ModelError),
        (gguf_vocabulary(["a"], ["ab"], "gpt-2"), ModelError),
        (gguf_vocabulary(["a"], [], "gpt-2", token_type=[1, 1]), ModelError),
        (gguf_vocabulary(["a"], [], "gpt-2", eos_token_id="</s>"), ModelError),
        (gguf_vocabulary(["a"], [], "gpt-2", model="llama"), ModelError),
        (gguf_vocabulary(["a"], [], "gpt-2", model="llama", scores=[0.0], unknown_token_id=4), ModelError),
        (gguf_vocabulary(["a"], [], "falcon"), UnsupportedModel),
        (gguf_vocabulary(["a"], [], "gpt-2", model="bert"), UnsupportedModel),
    ],
)
def test_bad_vocabularies_are_refused(fields: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        tokenizer_from_gguf(fields)


# Folders


@pytest.fixture
def folder(tmp_path: Path, smollm2: LoadedModel) -> Path:
    assert isinstance(smollm2.tokenizer, TextTokenizer)
    smollm2.tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"})
    )
    return tmp_path


def test_folder_gives_the_same_tokenizer(folder: Path, smollm2: LoadedModel) -> None:
    tokenizer = tokenizer_from_folder(folder)
    for text in CORPUS:
        assert tokenizer.encode(text) == smollm2.tokenizer.encode(text)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.special_ids) == (1, (2,), smollm2.tokenizer.special_ids)


def test_ends_come_from_generation_config_then_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"eos_token_id": 7}')
    assert tokenizer_from_folder(folder).eos_ids == (7, 2)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert tokenizer_from_folder(folder).eos_ids == (2, 0)
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<repo_name>"}')
    assert tokenizer_from_folder(folder).eos_ids == (2, 0, 3)


def test_bad_folders_are_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        tokenizer_from_folder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        tokenizer_from_folder(folder)
