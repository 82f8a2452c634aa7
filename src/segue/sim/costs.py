"""What a step costs on given hardware: a roofline, with a few coefficients that measured steps can be fitted with.

seconds = step + row · rows                                     host and launches
        + max(products / peak·compute, weights / reads·bandwidth)   the layers, for all tokens of the step
        + the same for the output head, for the rows that sample
        + attention's products / peak·attention                 each new token with all before it
        + KV read / reads·kv                                    once for each row
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from segue.base.errors import InvalidRequest
from segue.engine.executor import StepPlan
from segue.sim.hardware import Hardware
from segue.sim.shapes import ModelShape, dtype_bytes


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Shares of the hardware's peaks, and seconds. The defaults were fitted to what is published of one card (docs/simulator.md)
    and are used for all."""

    compute: float = 0.85
    bandwidth: float = 0.88
    attention: float = 0.4
    kv: float = 0.75
    step_seconds: float = 0.0012
    row_seconds: float = 4e-5
    copy: float = 0.75
    copy_seconds: float = 2e-5  # each call, however many blocks

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            least = 0.0 if each.name.endswith("_seconds") else 1e-9
            if not isinstance(value, (int, float)) or not least <= value < float("inf"):
                raise InvalidRequest(
                    "coefficients", f"{each.name} must be a number of at least {least:g}, got {value!r}"
                )

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Coefficients:
        known = {each.name for each in fields(cls)}
        if not isinstance(data, dict) or not data.keys() <= known:
            raise InvalidRequest("coefficients", f"must be an object with some of {', '.join(sorted(known))}")
        return cls(**data)


class Work(NamedTuple):
    """What a step has to do, in the cost's terms."""

    num_tokens: int
    num_rows: int
    num_sampled: int
    num_pairs: float  # of a new token and one it attends to
    num_kv_tokens: int  # that are read, each row's

    @classmethod
    def of(cls, plan: StepPlan) -> Work:
        tokens = sampled = kv_tokens = pairs = 0
        for _, _, start, stop, _, sampling, search in plan.rows:
            if search is not None and search.tails:  # the prefix is read once for all beams
                width = stop - start
                sampled += width
                kv_tokens += search.num_shared + width * (search.depth + 1)
                pairs += 2 * width * (search.num_shared + search.depth + 1)
            else:
                sampled += sampling is not None or search is not None
                kv_tokens += stop
                pairs += (stop - start) * (stop + start + 1)
            tokens += stop - start
        return cls(tokens, len(plan.rows), sampled, pairs / 2, kv_tokens)


class StepCosts:
    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        coefficients: Coefficients | None = None,
        *,
        dtype: str | None = None,
    ) -> None:
        self.shape = shape
        self.hardware = hardware
        self.coefficients = chosen = coefficients or Coefficients()
        self.dtype = dtype or shape.dtype
        size = dtype_bytes(self.dtype)
        peak, reads = hardware.flops, hardware.bytes_per_second
        self.token_flops = 2.0 * shape.num_active
        self.head_flops = 2.0 * shape.num_head_params
        self._active_bytes = shape.num_active * size
        self._body_bytes = max(shape.num_params - shape.num_head_params, shape.num_active) * size
        self._head_bytes = shape.num_head_params * size
        self.pair_flops = 4.0 * shape.num_kv_layers * shape.num_heads * shape.head_dim
        self.kv_bytes = shape.kv_bytes_per_token("bfloat16" if size < 2 else self.dtype)
        self._flop = 1 / (peak * chosen.compute)
        self._byte = 1 / (reads * chosen.bandwidth)
        self._pair = self.pair_flops / (peak * chosen.attention)
        self._kv_token = self.kv_bytes / (reads * chosen.kv)
        self._copied_byte = 1 / (hardware.host_bytes_per_second * chosen.copy)

    def seconds(self, work: Work) -> float:
        chosen = self.coefficients
        seconds = chosen.step_seconds + work.num_rows * chosen.row_seconds
        seconds += max(work.num_tokens * self.token_flops * self._flop, self.body_bytes(work.num_tokens) * self._byte)
        if work.num_sampled:
            seconds += max(work.num_sampled * self.head_flops * self._flop, self._head_bytes * self._byte)
        return seconds + work.num_pairs * self._pair + work.num_kv_tokens * self._kv_token

    def body_bytes(self, num_tokens: int) -> float:
        """Weights that are read for so many tokens: of experts no more than they can have chosen."""
        return min(self._active_bytes * max(num_tokens, 1), self._body_bytes)

    def head_bytes(self) -> float:
        return self._head_bytes

    def copy_seconds(self, num_bytes: float) -> float:
        """Between the device and the host's memory."""
        return self.coefficients.copy_seconds + num_bytes * self._copied_byte

    def prefill_seconds(self, num_tokens: int, start: int = 0) -> float:
        """Of so many tokens after `start` others, in one step that has nothing else to do."""
        stop = start + num_tokens
        pairs = (stop * (stop + 1) - start * (start + 1)) / 2
        return self.seconds(Work(num_tokens, 1, 1, pairs, stop))

    def decode_seconds(self, num_rows: int, context: int) -> float:
        """Of one step that gives each of so many sequences a token."""
        return self.seconds(Work(num_rows, num_rows, num_rows, num_rows * context, num_rows * context))
