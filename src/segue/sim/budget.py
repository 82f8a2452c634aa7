"""How many blocks of KV fit beside a model's weights, and how many jobs that is."""

from __future__ import annotations

from dataclasses import dataclass

from segue.base.errors import InvalidRequest
from segue.sim.hardware import GIB
from segue.sim.shapes import ModelShape, dtype_bytes

OTHER_BYTES = 0.09 * GIB  # what a CUDA context and its libraries take, as vLLM's log has it
_LOGIT_ROWS = 256  # sequences that sample in one step, at most
_LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes. `assumed` says what was not given."""

    total: float
    usable: float
    weights: float
    activations: float
    other: float
    block: float
    num_blocks: int
    block_size: int
    assumed: tuple[str, ...]

    @property
    def kv(self) -> float:
        return self.usable - self.weights - self.activations - self.other

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def num_jobs(self, context: int) -> int:
        """That fit with so many tokens each."""
        return self.num_blocks // max(-(-context // self.block_size), 1)


def budget(
    shape: ModelShape,
    memory_bytes: float,
    *,
    utilization: float = 0.9,
    block_size: int = 16,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    weights: float | None = None,
    activations: float | None = None,
    other: float | None = None,
    max_step_tokens: int = 8192,
) -> Budget:
    """What is given counts; the rest is worked out from the shape. A model that does not fit is refused."""
    if not 0 < utilization <= 1:
        raise InvalidRequest("utilization", f"must be above 0 and at most 1, got {utilization:g}")
    if block_size < 1 or max_step_tokens < 1:
        raise InvalidRequest("block_size", "and the tokens of a step must be at least 1")
    assumed = list(shape.assumed)
    if weights is None:
        weights = shape.weight_bytes(dtype)
        assumed.append(f"weights: {shape.num_params:,} parameters of {dtype_bytes(dtype or shape.dtype):g} bytes")
    if activations is None:
        activations = activation_bytes(shape, max_step_tokens)
        assumed.append(
            f"activations: one layer's widest tensors for {max_step_tokens} tokens, and logits of {_LOGIT_ROWS} rows"
        )
    if other is None:
        other = OTHER_BYTES
        assumed.append("0.09 GiB for the driver and libraries")
    kv_type = kv_dtype or (shape.dtype if dtype_bytes(shape.dtype) >= 2 else "bfloat16")
    block = block_size * shape.kv_bytes_per_token(kv_type)
    usable = memory_bytes * utilization
    left = usable - weights - activations - other
    if left < block:
        raise InvalidRequest(
            "memory",
            f"{usable / GIB:.2f} GiB hold no KV beside {weights / GIB:.2f} of weights and {activations / GIB:.2f} of activations",
        )
    return Budget(
        memory_bytes, usable, weights, activations, other, block, int(left // block), block_size, tuple(assumed)
    )


def activation_bytes(shape: ModelShape, max_step_tokens: int) -> float:
    """At a step's peak: a layer's gate and up projections, the hidden state a few times over, logits in 32 bits twice."""
    wide = max_step_tokens * shape.intermediate_size * 2 * 2
    hidden = max_step_tokens * shape.hidden_size * 2 * 4
    return float(wide + hidden + 2 * _LOGIT_ROWS * shape.vocab_size * _LOGIT_BYTES)
