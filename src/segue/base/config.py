"""Configuration: frozen values, and the one place that reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from segue.base.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the scheduler and the KV core need to know; the hardware's own settings belong to its executor."""

    num_blocks: int  # including the null block
    block_size: int = 16
    max_step_tokens: int = 2048  # tokens computed in one step, over all sequences
    max_running: int = 256  # sequences that hold blocks at once
    max_model_len: int = 8192  # tokens of one sequence, prompt and output
    prefix_caching: bool = True
    max_states: int = 1024  # finished requests that can still be continued
    max_state_bytes: int = 64 * 2**20  # of their tokens; KV is counted in blocks
    lease_quota: int | None = None  # blocks that one tenant may hold beyond its running requests

    def __post_init__(self) -> None:
        for name in ("block_size", "max_step_tokens", "max_running", "max_model_len", "max_states", "max_state_bytes"):
            if getattr(self, name) < 1:
                raise InvalidRequest(name, f"must be at least 1, got {getattr(self, name)}")
        if self.lease_quota is not None and self.lease_quota < 0:
            raise InvalidRequest("lease_quota", f"must be at least 0, got {self.lease_quota}")
        if self.num_blocks < 2:
            raise InvalidRequest("num_blocks", "must be at least 2: block 0 is the null block")
        if self.max_running > self.max_step_tokens:
            raise InvalidRequest("max_running", f"{self.max_running} is over max_step_tokens={self.max_step_tokens}")

    @property
    def kv_tokens(self) -> int:
        """Tokens the whole pool holds."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def max_sequence_len(self) -> int:
        """The longest a sequence can get: the last token sampled needs no KV."""
        return min(self.max_model_len, self.kv_tokens + 1)


@dataclass(frozen=True, slots=True)
class Environment:
    """What the process's surroundings say, read once."""

    cache_dir: Path
    compiler: str | None
    api_keys: tuple[str, ...] = ()

    @classmethod
    def read(cls) -> Environment:
        home = os.environ.get("SEGUE_CACHE") or os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "segue"
        )
        keys = tuple(key for key in os.environ.get("SEGUE_API_KEYS", "").replace(",", " ").split() if key)
        return cls(cache_dir=Path(home), compiler=os.environ.get("CXX") or None, api_keys=keys)


def available_memory_bytes() -> float:
    """Memory this process could take without swapping, or without being ended by its container's limit."""
    return min(_host_memory_bytes(), _container_memory_bytes())


def _container_memory_bytes() -> float:
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text()
        used = Path("/sys/fs/cgroup/memory.current").read_text()
        return max(int(limit) - int(used), 0)
    except (OSError, ValueError):  # no such control group, or its limit is the word "max"
        return float("inf")


def _host_memory_bytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_PHYS_PAGES")) // 2
