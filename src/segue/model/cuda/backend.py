"""Layers on CUDA: library products, and kernels of ours for all between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from segue.model.backend import Layer
from segue.model.batch import Batch
from segue.model.cuda import attention, kernels, products, tiles
from segue.model.cuda.driver import CompilerMissing
from segue.model.cuda.fused import LANES, BeamItems, Fused, Given, Listed
from segue.model.cuda.products import Products
from segue.model.cuda.tiles import TileKernel
from segue.model.spec import ModelSpec
from segue.model.torch_backend import TorchBackend

FEW_ROWS = 256  # of logits, that all recorded steps write to the same memory
_MOST_LANES = 128  # query heads times rows, of a group's piece


class Pieces(NamedTuple):
    """Lists of pieces, of each of which the first few are to be done: rows' own, and those that groups share."""

    own: Tensor | None  # [pieces, FIELDS]
    shared: Tensor | None
    counts: Tensor  # of each
    group_rows: int  # of a shared piece, at most
    has_many: bool = False  # own ones, for a program to do one each, or some of several rows: they are for warps


class Tiles(NamedTuple):
    """Of prompts: the first few are to be done."""

    tiles: Tensor  # [tiles, TILE_FIELDS]
    num_tiles: Tensor  # [1]


class Attention(NamedTuple):
    """All that attention must know of a step, the same for every layer. The last three are for what pieces give.

    `tails`: slots that beams have for themselves, and how many each row has, if they are not in `items`. `merged_rows`: the first
    so many have pieces that are still to be put together; 0 if pieces do so themselves, because none is shared, and no row has
    such a tail."""

    pieces: Pieces | None
    tails: tuple[Tensor, Tensor] | None
    merged_rows: int
    results: Tensor
    starts: Tensor
    contexts: Tensor
    tiles: Tiles | None
    items: BeamItems | None
    tables: Tensor
    sums: Tensor  # [results, heads, dim] fp32
    logs: Tensor  # [results, heads, 2] fp32
    arrivals: Tensor  # [rows, kv heads], zeros

    @property
    def listed(self) -> Listed | None:
        """Where all there is are pieces."""
        if self.pieces is None or self.tiles is not None or self.tails is not None:
            return None
        own, shared, counts, *_ = self.pieces
        return Listed(own, shared, counts, self.starts, self.sums, self.logs, self.arrivals)


class CudaBackend(TorchBackend):
    """Library products as in plain torch; norms, rotation, softmax and sums in fp32, by kernels.

    If `exact`, what becomes of a token does not depend on what else is in its step: products and attention are in tiles whose
    sums have one order, and no library chooses another by the number of rows."""

    name = "cuda"

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        *,
        exact: bool = False,
        kv_dtype: torch.dtype | None = None,
        fused: Fused | None = None,
        tile_kernel: TileKernel | None = None,
    ) -> None:
        """`fused` and `tile_kernel`: what do attention where they can; all else is by Triton's kernels."""
        super().__init__(spec, dtype, device, max_len)
        self.exact = exact
        self.kv_dtype = kv_dtype or dtype
        self.few_logits: Tensor | None = None  # where those of up to FEW_ROWS rows are, once there were any
        self._fused, self._tile_kernel = fused, tile_kernel
        lanes = LANES if fused is not None else _MOST_LANES
        self.group_rows = max(lanes // (spec.num_heads // spec.num_kv_heads), 1)
        self.has_rows = fused is not None and fused.rows is not None
        self.own_rows = fused.rows.kind.own_rows if fused is not None and fused.rows is not None else 1
        self.item_rows = fused.beams.kind.group_rows if fused is not None and fused.beams is not None else 0
        self.tile_rows = 32 if dtype == torch.float32 else 64 if exact or spec.head_dim > 128 else 128
        units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
        self._programs = self.few_pieces = max(2 * units // spec.num_kv_heads, 1)  # which all are there at once
        self._products: Products | None = None
        self.missing: str | None = None  # why products of few rows are a library's, where they need not be
        try:
            self._products = products.products_for(spec, dtype, device) if not exact else None
        except CompilerMissing as error:
            self.missing = str(error)

    def linear(self, x: Tensor, matrix: Tensor, bias: Tensor | None, into: str) -> Tensor:
        """Logits of a few rows always go to the same memory."""
        if into != "logits" or len(x) > FEW_ROWS:
            return self._product(x, matrix, bias)
        if self.few_logits is None:
            self.few_logits = torch.empty(FEW_ROWS, len(matrix), dtype=self._dtype, device=self.device)
        out = self.few_logits[: len(x)]
        return kernels.product(x, matrix, None, out) if self.exact else torch.mm(x, matrix.t(), out=out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, into: str) -> Tensor:
        out = torch.empty_like(x)
        kernels.add_norm(None, x, weight, eps, out)
        return out

    def _run_layers(
        self, layers: Sequence[Layer], norms: Sequence[Tensor], x: Tensor, residual: Tensor, batch: Batch, kv: Tensor
    ) -> Tensor:
        spec, eps = self._spec, self._spec.rms_eps
        q = torch.empty(len(x), spec.num_heads, spec.head_dim, dtype=self._dtype, device=self.device)
        out = torch.empty_like(q)
        for layer, norm, (k_cache, v_cache) in zip(layers, norms, kv, strict=True):
            qkv = self._of_layer(x, layer.qkv, layer.qkv_bias)
            self._attend(layer, qkv, q, batch, k_cache, v_cache, out)
            mixed = out.view(len(out), -1)
            if layer is layers[-1]:  # nobody reads what the others become after their last KV
                mixed, residual = mixed[batch.sample_rows], residual[batch.sample_rows]
                x = torch.empty_like(residual)
            kernels.add_norm(self._of_layer(mixed, layer.o, layer.o_bias), residual, layer.post_norm, eps, x)
            kernels.add_norm(self._of_layer(self._gated(x, layer.gate_up), layer.down, None), residual, norm, eps, x)
        return x

    def _product(self, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        if not self.exact:
            return F.linear(x, matrix, bias)
        return kernels.product(x, matrix, bias, torch.empty(len(x), len(matrix), dtype=x.dtype, device=x.device))

    def _of_layer(self, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """Of one of a layer's matrices, whose sizes `Products` are known to be for."""
        if self._products is not None and len(x) <= products.MOST_ROWS:
            return self._products.product(x, matrix, bias)
        return self._product(x, matrix, bias)

    def _gated(self, x: Tensor, gate_up: Tensor) -> Tensor:
        """silu of what comes of the first matrix, times what comes of the second."""
        if self._products is not None and len(x) <= products.MOST_ROWS:
            return self._products.gated(x, gate_up)
        pair = self._product(x, gate_up, None)
        gated = torch.empty(len(pair), pair.shape[1] // 2, dtype=self._dtype, device=self.device)
        kernels.gate(pair, gated)
        return gated

    def _attend(
        self, layer: Layer, qkv: Tensor, q: Tensor, batch: Batch, k_cache: Tensor, v_cache: Tensor, out: Tensor
    ) -> None:
        step: Attention = batch.attention  # type: ignore[assignment]
        norms = (layer.q_norm, layer.k_norm) if layer.q_norm is not None and layer.k_norm is not None else None
        tables, scale, eps = (self._cos, self._sin), self._spec.softmax_scale, self._spec.rms_eps
        given = Given(qkv, k_cache, v_cache, out, norms, *tables, batch.positions, batch.slots, step.tables)
        if step.items is not None:
            assert self._fused is not None and self._fused.beams is not None
            self._fused.beams.attend(given, step.items, scale=scale, eps=eps)
        elif self._fused is not None and (listed := step.listed) is not None:
            assert step.pieces is not None
            kernel = self._fused.rows if step.pieces.has_many else self._fused.pieces
            assert kernel is not None
            kernel.attend(given, listed, scale=scale, eps=eps)
        else:
            kernels.rope_store(qkv, q, k_cache, v_cache, norms, tables, batch.positions, batch.slots, eps)
            self._attend_lists(step, q, k_cache, v_cache, layer.window, out)
        if step.merged_rows:
            attention.merge_pieces(
                q,
                k_cache,
                v_cache,
                step.sums,
                step.logs,
                step.results,
                step.starts,
                step.tails,
                out[: step.merged_rows],
                scale=scale,
                window=layer.window,
            )

    def _attend_lists(
        self, step: Attention, q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None, out: Tensor
    ) -> None:
        scale = self._spec.softmax_scale
        if step.pieces is not None:
            own, shared, counts, group_rows, _ = step.pieces
            attention.attend_pieces(
                q,
                k_cache,
                v_cache,
                step.tables,
                own,
                shared,
                counts,
                step.contexts,
                step.sums,
                step.logs,
                step.starts,
                step.arrivals,
                out,
                scale=scale,
                window=window,
                group_rows=group_rows,
                programs=self._programs,
                merges=not step.merged_rows,
            )
        if step.tiles is not None and self._tile_kernel is not None:
            self._tile_kernel.attend(tiles.Given(q, k_cache, v_cache, step.tables, *step.tiles, out), scale=scale)
        elif step.tiles is not None:
            attention.attend_tiles(
                q, k_cache, v_cache, step.tables, *step.tiles, out, scale=scale, window=window, rows=self.tile_rows
            )
