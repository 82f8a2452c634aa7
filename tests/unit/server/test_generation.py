"""Text from the parts of an answer, wherever they are cut."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from segue.base.types import FinishReason
from segue.model.tokenizer import ByteTokenizer
from segue.server.generation import _Choice
from segue.server.messages import Part

TOKENIZER = ByteTokenizer()  # a token is a byte, so most cuts are within a character


def read(parts, finish):
    choice = _Choice(TOKENIZER.answer_stream(), hide_stop=True)
    texts = [choice.text_of(Part("request", 0, tokens, "", [])) for tokens in parts]
    return "".join(texts) + choice.text_of(Part("request", 0, [], "", [], finish))


@given(st.text("aé→🙂", max_size=8), st.lists(st.integers(0, 32), max_size=4))
def test_however_an_answer_is_cut_its_text_is_the_same(text, cuts):
    tokens = TOKENIZER.encode(text, add_special=False)
    bounds = [0, *sorted(cuts), len(tokens)]
    parts = [tokens[start:stop] for start, stop in pairwise(bounds)]
    assert read(parts, FinishReason.LENGTH) == text


@given(st.text("aé→🙂", max_size=8), st.integers(0, 32))
def test_half_a_character_goes_with_a_request_that_moves(text, cut):
    tokens = TOKENIZER.encode(text, add_special=False)
    there = TOKENIZER.answer_stream()
    said = there.push(tokens[:cut])  # what the destination takes as said
    assert read([tokens[:cut]], FinishReason.MOVED) == said
    assert said + there.push(tokens[cut:]) + there.flush() == text
