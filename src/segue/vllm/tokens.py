"""The model's tokenizer in the engine's process: policies read tool calls in answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def decoder(config: Any) -> Callable[[Sequence[int]], str] | None:
    """Loaded when it is first needed; None if the engine was told to do without."""
    model = config.model_config
    if model.skip_tokenizer_init:
        return None
    loaded: list[Any] = []

    def decode(tokens: Sequence[int]) -> str:
        if not loaded:
            from transformers import AutoTokenizer

            name, revision = model.tokenizer, model.tokenizer_revision
            loaded.append(
                AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=model.trust_remote_code)
            )
        return str(loaded[0].decode(list(tokens), skip_special_tokens=False))

    return decode
