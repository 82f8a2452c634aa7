"""How much KV memory there is to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from segue.base.config import available_memory_bytes
from segue.base.errors import InvalidRequest, RequestTooLong, UnsupportedModel
from segue.base.sizes import parse_bytes
from segue.model.spec import ModelSpec, tensor_shapes

_HOST_SHARE = 0.25  # of available memory: others live here too
_DEVICE_SHARE = 0.90  # of what the weights left free, if what a step takes is not known
_MARGIN_SHARE, _MARGIN_BYTES = (
    0.02,
    512 << 20,
)  # of a device's memory, or so much: for recorded steps, and what others do
_WORTHWHILE_SEQUENCES = 64  # full-length sequences beyond which more KV memory on a host is not taken unasked
_MOST_BLOCKS = 2**20  # a very small model on a very large device: bookkeeping would outweigh the KV


@dataclass(frozen=True, slots=True)
class KVBudget:
    """Blocks (the null block included) and what they cost."""

    num_blocks: int
    block_size: int
    block_bytes: int
    reason: str

    def __str__(self) -> str:
        usable = self.num_blocks - 1
        return (
            f"KV memory: {usable:,} blocks of {self.block_size} tokens = {usable * self.block_size:,} tokens, "
            f"{self.num_blocks * self.block_bytes / 2**20:,.0f} MiB ({self.reason})"
        )


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """K and V of one block in every layer."""
    return dtype.itemsize * spec.num_layers * block_size * 2 * spec.num_kv_heads * spec.head_dim


def check_weights_fit(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a model that a device cannot hold, before it has been half loaded."""
    if device.type != "cuda":
        return
    size = sum(prod(shape) for shape in tensor_shapes(spec).values()) * dtype.itemsize
    free, total = torch.cuda.mem_get_info(device)
    if size > free:
        needed, there, whole = (f"{number / 2**30:.1f}" for number in (size, free, total))
        raise UnsupportedModel(
            f"the weights take {needed} GiB in {str(dtype).removeprefix('torch.')}, and {device} has {there} free of {whole}: "
            "take a smaller model, or another device"
        )


def kv_budget(
    spec: ModelSpec,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int,
    *,
    num_blocks: int | None = None,
    kv_memory: int | str | None = None,
    step_bytes: Callable[[], int | None] = lambda: None,
) -> KVBudget:
    """By count, by size, or by what the machine has; in this order. `step_bytes` measures what a step takes, on a device."""
    each = block_bytes(spec, block_size, dtype)
    if num_blocks is not None and kv_memory is not None:
        raise InvalidRequest("kv_memory", "num_blocks is given too, and says the same thing in blocks: give one")
    if num_blocks is not None:
        if num_blocks < 2:
            raise InvalidRequest("num_blocks", f"must be at least 2 (block 0 is the null block), got {num_blocks}")
        return KVBudget(num_blocks, block_size, each, "as asked")
    if kv_memory is not None:
        size = parse_bytes(kv_memory) if isinstance(kv_memory, str) else kv_memory
        if size < 2 * each:
            raise RequestTooLong(
                "kv_memory", f"{size} bytes hold less than the 2 blocks of {each} bytes that are the least"
            )
        return KVBudget(size // each, block_size, each, "as asked")
    if device.type == "cuda":
        taken = step_bytes()
        free, total = torch.cuda.mem_get_info(device)
        size, reason = int(free * _DEVICE_SHARE), f"{_DEVICE_SHARE:.0%} of the free device memory"
        if taken is not None:
            size = free - taken - max(int(total * _MARGIN_SHARE), _MARGIN_BYTES)
            reason = f"the device memory that weights and a step, {taken / 2**20:,.0f} MiB, leave free"
    else:
        useful = _WORTHWHILE_SEQUENCES * max_len // block_size * each
        size = min(int(available_memory_bytes() * _HOST_SHARE), useful)
        reason = f"automatic, at most {_HOST_SHARE:.0%} of the available memory"
    if size < 2 * each:
        raise RequestTooLong("kv_memory", f"{max(size, 0)} bytes are free, the least KV memory is {2 * each}")
    return KVBudget(min(size // each, _MOST_BLOCKS), block_size, each, reason)
