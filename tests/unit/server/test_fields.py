"""The bodies of requests, before anything is generated for them."""

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from segue.server.failures import _first
from segue.server.fields import ChatBody, CompletionBody, DetokenizeBody, ForkBody, RecommendBody, TokenizeBody
from segue.server.responses import ResponsesBody

MANY = 20_000
NAMES = {f"name-{number}": "x" for number in range(MANY)}
HELLO = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": [""] * MANY}),
        (CompletionBody, {"prompt": [-1] * MANY}),
        (CompletionBody, {"prompt": [["x"] * MANY]}),
        (CompletionBody, {"prompt": [[5]] * MANY}),
        (CompletionBody, {"prompt": "x", "stop": [1] * MANY}),
        (CompletionBody, {"prompt": "x", "allowed_token_ids": ["x"] * MANY}),
        (CompletionBody, {"prompt": "x", "deny": [1] * MANY}),
        (CompletionBody, {"prompt": "x", "logit_bias": NAMES}),
        (CompletionBody, {"prompt": "x", **NAMES}),
        (CompletionBody, {"prompt": "x", "extra_body": NAMES}),
        (CompletionBody, {"prompt": "x", "stream": True, "stream_options": NAMES}),
        (RecommendBody, {"prompt": "x", "beam": {"deny": [1] * MANY}}),
        (RecommendBody, {"prompt": ["x"] * MANY, "beam": {}}),
        (ChatBody, {"messages": [{}] * MANY}),
        (ChatBody, {"messages": [HELLO] * MANY}),
        (ChatBody, {"messages": [{"role": "user", "content": [1] * MANY}]}),
        (ChatBody, {"messages": [{"role": "user", "tool_calls": [1] * MANY}]}),
        (ChatBody, {"messages": [HELLO], "tools": [{}] * MANY}),
        (ResponsesBody, {"input": [1] * MANY}),
        (ResponsesBody, {"input": [HELLO] * MANY}),
        (ResponsesBody, {"input": "x", "metadata": dict.fromkeys(NAMES, 1)}),
        (TokenizeBody, {"messages": [1] * MANY}),
        (DetokenizeBody, {"tokens": ["x"] * MANY}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value)[:40],
)
def test_a_body_that_is_wrong_in_many_places_is_refused_for_a_few(kind, body):
    """Everybody waits while a body is looked at, and to report a million mistakes takes seconds and a gigabyte."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() <= 5  # one for each kind of value that there may be


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        (CompletionBody, {"prompt": []}, "prompt: list should have at least 1 item"),
        (CompletionBody, {"prompt": [5, -1]}, "prompt.1: input should be greater than or equal to 0"),
        (CompletionBody, {"prompt": [5, "x"]}, "prompt.1: input should be a valid integer"),
        (CompletionBody, {"prompt": ["x", 5]}, "prompt.1: input should be a valid string"),
        (CompletionBody, {"prompt": [[5], ["x"]]}, "prompt.1.0: input should be a valid integer"),
        (CompletionBody, {"prompt": 5}, "prompt: input should be a valid string"),
        (CompletionBody, {"prompt": "x", "str": 1}, "str: is not a field of this request"),
        (CompletionBody, {"prompt": "x", "stream_options": {"int": 1}}, "stream_options.int: is not a field"),
        (ChatBody, {"messages": [HELLO, {"role": "user", "content": [1]}]}, "messages.1.content.0: input should be"),
        (TokenizeBody, {"messages": [HELLO], "add_special_tokens": False}, "add_special_tokens: is for a prompt"),
        (TokenizeBody, {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt: is for messages"),
        (ForkBody, {"at": True}, "at: input should be a valid integer"),
        (ForkBody, {"at": "then"}, "at: input should be"),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_what_is_wrong_is_named_by_its_place_in_the_body(kind, body, said):
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    problems = [each | {"loc": ("body", *each["loc"])} for each in refused.value.errors()]
    assert str(_first(RequestValidationError(problems))).startswith(said)


def test_long_bodies_are_taken():
    assert len(CompletionBody.model_validate({"prompt": [5] * 100_000}).prompt) == 100_000
    assert len(ChatBody.model_validate({"messages": [HELLO] * 5000}).messages) == 5000
    assert len(CompletionBody.model_validate({"prompt": ["x"] * 256}).prompt) == 256


def test_null_is_the_default_where_openai_allows_it():
    completion = CompletionBody.model_validate({"prompt": "x", "n": None, "stream": None, "echo": None})
    assert (completion.n, completion.stream, completion.echo) == (1, False, False)
    chat = ChatBody.model_validate({"messages": [HELLO], "n": None, "stream": None})
    assert (chat.n, chat.stream) == (1, False)
    response = ResponsesBody.model_validate({"input": "x", "store": None, "stream": None})
    assert (response.store, response.stream) == (True, False)
