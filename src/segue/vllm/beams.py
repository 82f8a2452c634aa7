"""Beam search as a continuation: of a request that has ended, with vLLM's own engine below.

vLLM runs a new request for each beam and token, each with the whole prompt: sent, hashed and looked up again. Here each sends
what it adds to the parent, whose tokens and hashes the engine has, and is computed on the parent's KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from segue.base.errors import SegueError


@dataclass(frozen=True, slots=True)
class FoundBeam:
    """`logprob` is the sum over its tokens; `score` has the length penalty in it."""

    token_ids: tuple[int, ...]
    logprob: float
    score: float


def beam_search(
    llm: Any,
    parent: str,
    suffix: list[int],
    *,
    width: int,
    max_tokens: int,
    eos_id: int | None = None,
    length_penalty: float = 1.0,
    cache_salt: str | None = None,
) -> list[FoundBeam]:
    """The best `width` lines after `parent` and `suffix`, the best first, as vLLM's own search finds them. `parent` is the id of
    a request of this `vllm.LLM` that was held. Without `eos_id` no line ends early."""
    from vllm import SamplingParams

    if width < 1 or max_tokens < 1 or not suffix:
        raise ValueError("a search needs a width, tokens to find, and a suffix that it follows")
    params = SamplingParams(
        logprobs=2 * width,
        flat_logprobs=True,  # lists of numbers, instead of an object for each
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        skip_clone=True,
        extra_args={"continuation_of": parent},
    )
    salt = {"cache_salt": cache_salt} if cache_salt is not None else {}
    beams: list[FoundBeam] = [FoundBeam((), 0.0, 0.0)]
    ended: list[FoundBeam] = []
    for _ in range(max_tokens):
        prompts = [{"prompt_token_ids": [*suffix, *beam.token_ids], **salt} for beam in beams]
        candidates: list[FoundBeam] = []
        for beam, output in zip(beams, llm.generate(prompts, params, use_tqdm=False), strict=True):
            for token, logprob in _candidates(output):
                tokens, total = (*beam.token_ids, token), beam.logprob + logprob
                found = FoundBeam(tokens, total, total / len(tokens) ** length_penalty)
                (ended if token == eos_id else candidates).append(found)
        beams = sorted(candidates, key=lambda beam: -beam.logprob)[:width]
        if not beams:
            break
    return sorted([*ended, *beams], key=lambda beam: -beam.score)[:width]


def _candidates(output: Any) -> list[tuple[int, float]]:
    answer = output.outputs[0]
    if answer.finish_reason == "error":
        raise SegueError((output.kv_transfer_params or {}).get("segue", {}).get("error", "the engine gave no reason"))
    found = answer.logprobs
    return list(dict(zip(found.token_ids, found.logprobs, strict=True)).items())  # the sampled token comes twice
