"""Refuses what could never run, by field and limit, before it costs anything."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

from segue.base.config import EngineConfig
from segue.base.errors import InvalidRequest, RequestTooLong
from segue.base.types import SamplingParams
from segue.engine.beam import Search

Prompt = str | Sequence[int]


def as_token_ids(ids: Any, field: str = "prompt") -> array[int]:
    """Whole numbers of any kind that has `__index__`, numpy's too; bytes and truth values are not token ids."""
    if isinstance(ids, array) and ids.typecode == "i":
        return ids[:]
    if isinstance(ids, (bytes, bytearray)) or not isinstance(ids, Iterable):
        raise InvalidRequest(field, f"must be text or token ids, not {type(ids).__name__}")
    try:
        return array("i", [_token_id(token) for token in ids])
    except (TypeError, OverflowError) as error:
        raise InvalidRequest(field, f"must be text or token ids ({error})") from error


def _token_id(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("a truth value is not a token id")
    return index(value)


def as_list(prompts: Any) -> list[Any]:
    """One prompt or several: a list of numbers is one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Iterable):
        raise InvalidRequest("prompts", f"must be text, token ids or a list of them, not {type(prompts).__name__}")
    items = list(prompts)
    if not items:
        raise InvalidRequest("prompts", "is empty")
    return [items] if hasattr(items[0], "__index__") else items


def check_prompt(prompt: array[int]) -> None:
    if not prompt:
        raise InvalidRequest("prompt", "is empty: there must be at least one token to continue from")


def check_lengths(num_prompt: int, params: SamplingParams, search: Search | None, config: EngineConfig) -> None:
    """Refuse what the model or its memory could never hold, whatever else is going on."""
    if search is not None:
        _check_search(num_prompt, params, search, config)
    _check_length(num_prompt, params.max_tokens, config.max_model_len)
    longest = longest_answer(search, config)
    if num_prompt + params.min_tokens > longest:
        room = max(longest - num_prompt, 0)
        raise RequestTooLong("min_tokens", f"{params.min_tokens} is over the {room} tokens there is room for")
    _check_memory(num_prompt, params.max_tokens, config)


def longest_answer(search: Search | None, config: EngineConfig) -> int:
    """Tokens that a sequence may have, so that there is room for what follows it: the last token sampled needs no KV, but a
    search's prefix does, to its end."""
    if search is None or not search.thinks:
        return config.max_sequence_len
    rest = search.num_after
    return min(config.max_model_len - rest - search.max_tokens, config.kv_tokens - rest - search.num_slots)


def _check_search(num_prompt: int, params: SamplingParams, search: Search, config: EngineConfig) -> None:
    """The same for a search, and for what it follows."""
    widest = config.max_step_tokens - config.max_running
    if search.params.width > widest:
        raise InvalidRequest(
            "width",
            f"{search.params.width} is over {widest}: a step computes {config.max_step_tokens} tokens, "
            f"{config.max_running} of them for other requests",
        )
    thought = (params.max_tokens or 1) if search.thinks else 0
    prefix = num_prompt + thought + search.num_after
    if prefix + search.max_tokens > config.max_model_len:
        raise RequestTooLong(
            "max_tokens",
            f"{prefix} tokens before the search + its max_tokens={search.max_tokens} is over the limit of "
            f"{config.max_model_len}",
        )
    needed = -(-(prefix + search.num_slots) // config.block_size)
    if needed > config.num_blocks - 1:
        raise RequestTooLong(
            "width",
            f"{needed} blocks are needed for {prefix} tokens and {search.num_slots} of beams, the KV memory can never "
            f"hold more than {config.num_blocks - 1}",
        )


def check_vocabulary(
    field: str, tokens: array[int], params: SamplingParams, search: Search | None, vocab_size: int | None
) -> None:
    """Only tokens that are new here: a parent's were checked when they came."""
    if vocab_size is None:
        return
    named: dict[str, Iterable[int]] = {
        field: (min(tokens), max(tokens)) if tokens else (),
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids,
    }
    if search is not None:
        named["then.suffix"] = search.suffix
        named["then.rest"] = search.rest or ()
        named["beam.stop_token_ids"] = search.params.stop_token_ids
        named["beam.allowed_token_ids"] = search.params.allowed_token_ids
    for name, ids in named.items():
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(name, f"token id {token} is outside the vocabulary of {vocab_size}")


def _check_length(num_prompt: int, max_tokens: int | None, limit: int) -> None:
    if num_prompt >= limit:
        raise RequestTooLong("prompt", f"{num_prompt} tokens leave no room to answer: the limit is {limit} in all")
    if max_tokens is not None and num_prompt + max_tokens > limit:
        raise RequestTooLong(
            "max_tokens", f"{num_prompt} prompt tokens + max_tokens={max_tokens} is over the limit of {limit}"
        )


def _check_memory(num_prompt: int, max_tokens: int | None, config: EngineConfig) -> None:
    """The last token sampled needs no KV."""
    needed = num_prompt + (max_tokens or 1) - 1
    if needed > config.kv_tokens:
        blocks = config.num_blocks - 1
        raise RequestTooLong(
            "prompt" if num_prompt > config.kv_tokens else "max_tokens",
            f"{needed} tokens of KV are needed, the KV memory can never hold more than {config.kv_tokens} "
            f"({blocks} blocks of {config.block_size})",
        )
