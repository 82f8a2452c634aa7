"""The model's tokenizer in the engine's process: policies read tool calls in answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

_log = logging.getLogger(__name__)


def decoder(config: Any) -> Callable[[Sequence[int]], str] | None:
    """None if the engine was told to do without, or there is none to be had: then no call is read."""
    from vllm.tokenizers import cached_tokenizer_from_config

    try:
        tokenizer = cached_tokenizer_from_config(config.model_config)
    except Exception:
        _log.exception("no tool calls will be read: the tokenizer cannot be loaded")
        return None
    if tokenizer is None:
        return None

    def decode(tokens: Sequence[int]) -> str:
        """A padded vocabulary has ids that mean nothing, and not every tokenizer bears them."""
        try:
            return str(tokenizer.decode(list(tokens), skip_special_tokens=False))
        except Exception:
            _log.warning("an answer that cannot be decoded: no tool call is read in it", exc_info=True)
            return ""

    return decode
