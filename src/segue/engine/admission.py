"""Refuses what could never run, by field and limit, before it costs anything."""

from __future__ import annotations

from array import array

from segue.base.config import EngineConfig
from segue.base.errors import InvalidRequest, RequestTooLong
from segue.base.types import SamplingParams


def check_request(tokens: array[int], params: SamplingParams, config: EngineConfig, vocab_size: int | None) -> None:
    if not tokens:
        raise InvalidRequest("prompt", "is empty: there must be at least one token to continue from")
    if vocab_size is not None:
        _check_vocabulary(tokens, params, vocab_size)
    _check_length(len(tokens), params.max_tokens, config.max_model_len)
    _check_memory(len(tokens), params.max_tokens, config)


def _check_vocabulary(tokens: array[int], params: SamplingParams, vocab_size: int) -> None:
    named = {
        "prompt": (min(tokens), max(tokens)),
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": params.logit_bias,
    }
    for field, ids in named.items():
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(field, f"token id {token} is outside the vocabulary of {vocab_size}")


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
