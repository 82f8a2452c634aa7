"""What a decoder model is made of: the numbers, and nothing about where they were read.

`hf_config.py` and `gguf_config.py` turn the two file formats into a `ModelSpec`. A spec that exists is one
the decoder can run: whatever it cannot run is refused while reading, with the value named.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from segue.base.errors import ModelError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")

# Far above any real model; a config that says more is garbage, and must not make us allocate by its numbers.
_MAX_WHOLE = 2**31 - 1
MAX_LAYERS = 4096


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rope: slow rotations are divided by `factor`, fast ones kept, those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def divisor(self, inverse_frequency: float) -> float:
        """What one rotary inverse frequency is divided by: from 1 (fast) to `factor` (slow)."""
        wavelength = 2 * math.pi / inverse_frequency
        if wavelength < self.original_max_positions / self.high_freq_factor:
            return 1.0
        if wavelength > self.original_max_positions / self.low_freq_factor:
            return self.factor
        span = self.high_freq_factor - self.low_freq_factor
        smooth = (self.original_max_positions / wavelength - self.low_freq_factor) / span
        return 1 / ((1 - smooth) / self.factor + smooth)


@dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by `factor`, which is the same as dividing every inverse frequency by it."""

    factor: float


RopeScaling = Llama3Scaling | LinearScaling


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only model of the Llama shape: RMS norms, rotary positions, grouped KV heads, gated SiLU MLP.

    `windows[i]` is how many of the latest positions layer i sees, its own included; None sees all.
    `qkv_bias` and `o_bias` say which projections carry a bias; `qk_norm` is an RMS norm over each head's q and k.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_eps: float
    rope_theta: float
    windows: tuple[int | None, ...]
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    attention_scale: float | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly.")
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}, and rotary positions need an even one.")
        if len(self.windows) != self.num_layers:
            raise ModelError(f"{len(self.windows)} attention windows are given for {self.num_layers} layers.")

    @property
    def softmax_scale(self) -> float:
        """What q·k is multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """From a parsed `config.json`; raises UnsupportedModel or ModelError."""
        from segue.model.hf_config import spec_from_hf_config

        return spec_from_hf_config(config)

    @classmethod
    def from_gguf_metadata(
        cls,
        metadata: Mapping[str, Any],
        tensor_names: Collection[str],
        rope_divisors: Sequence[float] | None = None,
    ) -> ModelSpec:
        """From a GGUF header. Biases and an untied head show only in `tensor_names`, and Llama 3's rope only in
        the `rope_freqs.weight` tensor, whose values are `rope_divisors`."""
        from segue.model.gguf_config import spec_from_gguf_metadata

        return spec_from_gguf_metadata(metadata, tensor_names, rope_divisors)


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor the model needs under our own names, in the order a forward pass meets them."""
    hidden, mlp = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer: dict[str, tuple[int, ...]] = {"input_norm": (hidden,), "q": (q_rows, hidden)}
    layer |= {"k": (kv_rows, hidden), "v": (kv_rows, hidden), "o": (hidden, q_rows)}
    if spec.qkv_bias:
        layer |= {"q_bias": (q_rows,), "k_bias": (kv_rows,), "v_bias": (kv_rows,)}
    if spec.o_bias:
        layer |= {"o_bias": (hidden,)}
    if spec.qk_norm:
        layer |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    layer |= {"post_norm": (hidden,), "gate": (mlp, hidden), "up": (mlp, hidden), "down": (hidden, mlp)}
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab_size, hidden)}
    for index in range(spec.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["final_norm"] = (hidden,)
    if not spec.tie_embeddings:
        shapes["head"] = (spec.vocab_size, hidden)
    return shapes


class ConfigFields:
    """Reads checked numbers out of untrusted JSON or metadata; every complaint names the field."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def get(self, name: str) -> Any:
        return self._values.get(self._prefix + name)

    def whole(self, name: str, default: int | None = None, most: int = _MAX_WHOLE) -> int:
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise ModelError(f"{self._prefix}{name} must be a whole number from 1 to {most}, not {_shown(value)}.")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(f"{self._prefix}{name} must be a positive number, not {_shown(value)}.")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self._prefix}{name} must be true or false, not {_shown(value)}.")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, a list of ids, or nothing."""
        value = self.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= _MAX_WHOLE for item in ids):
            raise ModelError(f"{self._prefix}{name} must be a token id or a list of them, not {_shown(value)}.")
        return tuple(dict.fromkeys(ids))

    def _present(self, name: str, default: object) -> Any:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self._prefix}{name} is missing.")
        return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
