"""The model on CUDA: kernels in Triton, and in C++ for Hopper devices, lists of work for them, recorded steps."""

from __future__ import annotations

import importlib.util

from segue.model.spec import ModelSpec

HEAD_DIMS = (16, 32, 64, 128, 256)


def why_not(spec: ModelSpec) -> str | None:
    """Why a model cannot run here; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if spec.head_dim not in HEAD_DIMS:
        return f"heads of {spec.head_dim} are not a power of two"
    return None
