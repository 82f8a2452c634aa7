"""A decoder's layers in one call: `layers.cpp`, whose structures are mirrored here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from segue.model.backend import Layer
from segue.model.batch import Batch
from segue.model.native import Kernels, PackedWeight, expect, expect_heads
from segue.model.spec import ModelSpec

Buffer = Callable[[str, int, int], Tensor]  # name, rows, width -> memory that is its caller's until the next call


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("lanes", "scales", "bias")),
        *((name, ctypes.c_int64) for name in ("storage", "n", "k")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm", "post_norm", "next_norm", "k_cache", "v_cache")),
        ("window", ctypes.c_int64),
    )


_POINTERS = (
    "cos sin positions slots tables starts lengths sampled tails shared tail_starts"
    " residual normed qkv attended hidden gated"
)
_NUMBERS = "rows sequences num_sampled table_stride heads kv_heads dim block_size half_cache threads"


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
        *((name, ctypes.c_int64) for name in _NUMBERS.split()),
        *((name, ctypes.c_double) for name in ("eps", "scale")),
    )


class _Beams:
    """`Tails` of kernels.h."""

    def __init__(self, batch: Batch) -> None:
        count = len(batch.contexts)
        self._shared = torch.full((count,), -1, dtype=torch.int32)
        self._starts = torch.zeros(count, dtype=torch.int32)
        self._slots = torch.cat([group.tails.flatten() for group in batch.groups])
        at = 0
        for group in batch.groups:
            self._shared[group.sequence], self._starts[group.sequence] = group.num_shared, at
            at += group.tails.numel()

    @classmethod
    def of(cls, batch: Batch) -> _Beams | None:
        return cls(batch) if batch.groups else None

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Valid as long as this is."""
        return self._slots.data_ptr(), self._shared.data_ptr(), self._starts.data_ptr()


class LayerStack:
    """Layers of one shape, which are bound to KV memory when they first run over it. Rows that are not sampled from leave the
    last one after their KV is written."""

    def __init__(
        self,
        kernels: Kernels,
        spec: ModelSpec,
        layers: Sequence[Layer],
        norms: Sequence[Tensor],
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        """`norms[i]` is what follows layer i."""
        expect_heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._kernels = kernels
        self._spec = spec
        self._layers = layers
        self._norms = norms
        self._rotation = cos, sin
        self._bound: ctypes.Array[_Layer] | None = None
        self._kv: tuple[int, torch.Size] | None = None  # what they are bound to
        self._step = _Step(cos=cos.data_ptr(), sin=sin.data_ptr(), eps=spec.rms_eps, scale=spec.softmax_scale)
        self._step.heads, self._step.kv_heads, self._step.dim = spec.num_heads, spec.num_kv_heads, spec.head_dim

    def run(self, x: Tensor, residual: Tensor, batch: Batch, kv: Tensor, buffer: Buffer) -> Tensor:
        """`x` is the first layer's input, normed; it is overwritten, as `residual` is. Returns the last norm of the rows that
        are sampled from. Positions, slots, table entries and lengths are trusted: they come from the scheduler."""
        if self._kv != (kv.data_ptr(), kv.shape):
            self._bind(kv)
        spec, step, rows = self._spec, self._step, len(x)
        attention = spec.num_heads * spec.head_dim
        expect("x", x, (rows, spec.hidden_size))
        expect("residual", residual, (rows, spec.hidden_size))
        expect("positions", batch.positions, (rows,), torch.int32)
        expect("slots", batch.slots, (rows,), torch.int64)
        step.residual, step.normed = residual.data_ptr(), x.data_ptr()
        qkv = buffer("qkv", rows, attention + 2 * spec.num_kv_heads * spec.head_dim)
        attended, hidden = buffer("attended", rows, attention), buffer("hidden", rows, spec.hidden_size)
        gated = buffer("gated", rows, spec.intermediate_size)
        step.qkv, step.attended = qkv.data_ptr(), attended.data_ptr()
        step.hidden, step.gated = hidden.data_ptr(), gated.data_ptr()
        step.positions, step.slots = batch.positions.data_ptr(), batch.slots.data_ptr()
        step.tables, step.table_stride = batch.tables.data_ptr(), batch.tables.stride(0)
        step.starts, step.lengths = batch.starts.data_ptr(), batch.contexts.data_ptr()
        step.sampled, step.num_sampled = batch.sample_rows.data_ptr(), len(batch.sample_rows)
        beams = _Beams.of(batch)
        step.tails, step.shared, step.tail_starts = beams.addresses if beams is not None else (None, None, None)
        step.rows, step.sequences, step.threads = rows, len(batch.contexts), self._kernels.num_threads
        self._kernels.run_layers(self._bound, len(self._layers), ctypes.byref(step))
        return x[: step.num_sampled]

    def _bind(self, kv: Tensor) -> None:
        spec = self._spec
        dtype = kv.dtype
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"KV is fp32 or bf16, not {dtype}")
        shape = (len(self._layers), 2, kv.shape[2], spec.num_kv_heads, kv.shape[4], spec.head_dim)
        expect("kv", kv, shape, dtype)
        half = kv[0, 0].nbytes
        bound = (_Layer * len(self._layers))()
        for at, (layer, norm) in enumerate(zip(self._layers, self._norms, strict=True)):
            caches = kv.data_ptr() + 2 * at * half
            bound[at] = _Layer(
                _matrix(layer.qkv, layer.qkv_bias),
                _matrix(layer.o, layer.o_bias),
                _matrix(layer.gate_up, None),
                _matrix(layer.down, None),
                _address(layer.q_norm),
                _address(layer.k_norm),
                _address(layer.post_norm),
                _address(norm),
                caches,
                caches + half,
                layer.window or 0,
            )
        self._step.block_size, self._step.half_cache = kv.shape[4], dtype == torch.bfloat16
        self._bound, self._kv = bound, (kv.data_ptr(), kv.shape)


def _matrix(weight: PackedWeight, bias: Tensor | None) -> _Matrix:
    n, k = weight.shape
    return _Matrix(weight.address, weight.scales_address, _address(bias), weight.code, n, k)


def _address(tensor: Tensor | None) -> int | None:
    return tensor.data_ptr() if tensor is not None else None
