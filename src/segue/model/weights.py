"""A model's tensors under one set of names, whatever file they come from.

    embed · layers.{i}.{input_norm, q, k, v, o, post_norm, gate, up, down} · final_norm · head (absent when tied)
    and where the spec says so  layers.{i}.{q_bias, k_bias, v_bias, o_bias, q_norm, k_norm}

Matrices are (out, in), as torch's linear layers have them. Loading checks every name and shape against the spec
and reads nothing; a tensor is read each time it is asked for, so a caller that takes each once and keeps it needs
no more memory than the model.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from segue.base.errors import WeightsError
from segue.model.spec import ModelSpec, tensor_shapes

if TYPE_CHECKING:
    from segue.model.gguf_file import GGUFFile

_SAMPLES, _SAMPLE_BYTES = 16, 1024
_ROPE_TABLE = "rope_freqs.weight"  # read into the spec, not a weight

_HF_TOP = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
_HF_LAYER = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_GGUF_TOP = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
_GGUF_LAYER = {
    "input_norm": "attn_norm.weight",
    "post_norm": "ffn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}


class Stored(Protocol):
    """One tensor at rest: `origin` names it in messages, `raw` is its stored bytes without converting them."""

    @property
    def origin(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def raw(self) -> npt.NDArray[np.uint8]: ...
    def read(self) -> Tensor: ...


@dataclass(frozen=True)
class _InMemory:
    tensor: Tensor

    @property
    def origin(self) -> str:
        return "a tensor in memory"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def raw(self) -> npt.NDArray[np.uint8]:
        return self.tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()

    def read(self) -> Tensor:
        return self.tensor


class Weights(Mapping[str, Tensor]):
    """Tensors by our names. Each `weights[name]` reads and converts anew; take each once."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self._stored = dict(stored)

    @classmethod
    def in_memory(cls, tensors: Mapping[str, Tensor]) -> Weights:
        return cls({name: _InMemory(tensor) for name, tensor in tensors.items()})

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def stored(self, name: str) -> Stored:
        return self._stored[name]


def load_weights(path: Path, spec: ModelSpec) -> Weights:
    """From a Hugging Face folder or a GGUF file; raises WeightsError unless it is exactly the model of `spec`."""
    if path.is_dir():
        from segue.model.safetensors_folder import open_folder

        return weights_from_hf(open_folder(path), spec, path.name)
    from segue.model.gguf_file import GGUFFile

    return weights_from_gguf(GGUFFile.open(path), spec)


def weights_from_hf(tensors: Mapping[str, Stored], spec: ModelSpec, folder_name: str) -> Weights:
    names = hf_names(spec)
    extra = tensors.keys() - names.values()
    extra = {name for name in extra if not name.endswith("rotary_emb.inv_freq")}
    if spec.tie_embeddings:
        extra.discard(_HF_TOP["head"])
    return _matched(tensors, names, extra, spec, folder_name)


def weights_from_gguf(file: GGUFFile, spec: ModelSpec) -> Weights:
    from segue.model.gguf_tensors import GGUFStored

    names = gguf_names(spec)
    rotary: dict[str, int] = {}
    if spec.architecture == "llama":
        rotary = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}
    stored = {
        name: GGUFStored(file, tensor, rotary.get(name.split(".")[-2] if "." in name else name))
        for name, tensor in file.tensors.items()
    }
    if _ROPE_TABLE in stored and spec.rope_scaling is None:
        raise WeightsError(f"{file.path.name} has {_ROPE_TABLE}, and the spec has no rope scaling.")
    return _matched(stored, names, stored.keys() - names.values() - {_ROPE_TABLE}, spec, file.path.name)


def hf_names(spec: ModelSpec) -> dict[str, str]:
    """Our names to Hugging Face's, for the tensors this spec has."""
    return _names(spec, _HF_TOP, "model.layers", _HF_LAYER)


def gguf_names(spec: ModelSpec) -> dict[str, str]:
    """Our names to GGUF's, for the tensors this spec has."""
    return _names(spec, _GGUF_TOP, "blk", _GGUF_LAYER)


def fingerprint(spec: ModelSpec, weights: Mapping[str, Tensor]) -> str:
    """A model's identity as 64 hex digits: KV made under one fingerprint is never used under another.

    Hashes what the spec computes with, and for every tensor its name, shape and 16 pieces of 1 KiB spread
    evenly over its stored bytes. Any retraining, conversion or requantisation changes those; a few weights
    edited by hand between the pieces do not. Where the file lies, and its token ids, play no part.
    """
    held = weights if isinstance(weights, Weights) else Weights.in_memory(weights)
    computed = {name: value for name, value in asdict(spec).items() if name not in ("bos_id", "eos_ids")}
    digest = hashlib.sha256(repr((type(spec.rope_scaling).__name__, sorted(computed.items()))).encode())
    for name in sorted(held):
        stored = held.stored(name)
        data = stored.raw()
        digest.update(repr((name, stored.shape, len(data))).encode())
        last = max(len(data) - _SAMPLE_BYTES, 0)
        for index in range(_SAMPLES):
            start = last * index // (_SAMPLES - 1)
            digest.update(struct.pack("<Q", start))
            digest.update(data[start : start + _SAMPLE_BYTES].tobytes())
    return digest.hexdigest()


def _names(spec: ModelSpec, top: Mapping[str, str], layers: str, layer: Mapping[str, str]) -> dict[str, str]:
    names: dict[str, str] = {}
    for ours in tensor_shapes(spec):
        if ours in top:
            names[ours] = top[ours]
        else:
            _, index, part = ours.split(".")
            names[ours] = f"{layers}.{index}.{layer[part]}"
    return names


def _matched(
    tensors: Mapping[str, Stored], names: Mapping[str, str], extra: set[str], spec: ModelSpec, where: str
) -> Weights:
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        first = tensors[min(extra)]
        raise WeightsError(f"{first.origin}{more} is no part of a {spec.architecture} model as configured.")
    matched: dict[str, Stored] = {}
    for ours, shape in tensor_shapes(spec).items():
        stored = tensors.get(names[ours])
        if stored is None:
            raise WeightsError(f"{where} lacks tensor {names[ours]}.")
        if stored.shape != shape:
            raise WeightsError(f"{stored.origin} has shape {list(stored.shape)}; the config needs {list(shape)}.")
        matched[ours] = stored
    return Weights(matched)
