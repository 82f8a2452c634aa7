"""What kernels for Hopper devices (`hopper.h`) have in common on the host."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from segue.model.cuda import driver
from segue.model.cuda.driver import Boxes
from segue.model.spec import ModelSpec

LOG2E = 1.4426950408889634  # scales are for exponentials to base 2
CHUNK = 64  # tokens of a block that are copied at once, at most


def kernel(name: str, macros: Mapping[str, int], cluster: int, threads: int, device: torch.device) -> driver.Kernel:
    """Of a source in this folder. `CompilerMissing` if nothing here compiles or loads it."""
    return _kernel(name, tuple(sorted(macros.items())), cluster, threads, device)


@cache
def _kernel(
    name: str, macros: tuple[tuple[str, int], ...], cluster: int, threads: int, device: torch.device
) -> driver.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    binary = driver.compile_cuda(name, f"sm_{major}{minor}a", dict(macros))
    try:
        return driver.Kernel(binary, "compute", cluster, threads)
    except RuntimeError as error:  # the driver does not take it
        raise driver.CompilerMissing(str(error)) from error


def kv_boxes(cache: Tensor, tokens: int = CHUNK) -> Boxes:
    """So many of a block's tokens of one head, or all of them, and 64 numbers of each."""
    blocks, kv_heads, size, dim = cache.shape
    return Boxes(cache.data_ptr(), (dim, blocks * kv_heads * size), (2 * dim,), (64, min(size, tokens)))


def addresses(*tensors: Tensor | None) -> list[int | None]:
    """Of what is contiguous, or not there."""
    assert all(each is None or each.is_contiguous() for each in tensors)
    return [each.data_ptr() if each is not None else None for each in tensors]


def why_no_attention(spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """What such a model, its blocks or the device would need for attention by these kernels; None if nothing is missing."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):  # what multiplies is on no other
        return f"needs a device of compute capability 9.0; {device} has another"
    if dtype not in (torch.bfloat16, torch.float16):
        return "computes in bf16 or fp16"
    if spec.head_dim not in (64, 128) or any(spec.windows):
        return "is for heads of 64 or 128 numbers, which see all that came before"
    if block_size not in (16, 32) and block_size % CHUNK:
        return f"needs a block_size of 16, 32 or a multiple of {CHUNK}"
    return None
