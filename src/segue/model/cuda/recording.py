"""Work that is recorded once, and replayed as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class Recorded(NamedTuple, Generic[T]):
    """`result` is where what comes of each replay is."""

    graph: torch.cuda.CUDAGraph
    result: T


def capture(run: Callable[[], T], pool: Any) -> Recorded[T]:
    """Once as it is, so that nothing is compiled or set up while it is recorded."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # What other threads do meanwhile, such as page-locking memory for a tier or recording for another engine, is their affair.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = run()
    return Recorded(graph, result)
