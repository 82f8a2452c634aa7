"""Puts a model together: from its name to spec, weights, tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from segue.base.errors import ModelError
from segue.model.catalog import ModelSource, Progress, resolve
from segue.model.chat import CHATML, ChatTemplate, template_from_folder
from segue.model.spec import ModelSpec
from segue.model.tokenizer import ByteTokenizer, Tokenizer
from segue.model.weights import Weights, fingerprint, weights_from_gguf, weights_from_hf

if TYPE_CHECKING:
    from torch import Tensor

    from segue.model.gguf_file import GGUFFile


@dataclass(frozen=True)
class LoadedModel:
    """Everything about a model but its execution. `weights` are still on disk: each is read when it is taken."""

    name: str
    spec: ModelSpec
    weights: Mapping[str, Tensor]
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    fingerprint: str


def open_model(name: str, cache_dir: Path, *, fetch: bool = True, progress: Progress | None = None) -> LoadedModel:
    """`spec.eos_ids` and `spec.bos_id` of the result are the tokenizer's, which know more than a config does."""
    source = resolve(name, cache_dir, fetch=fetch, progress=progress)
    if source.path is None:
        return _tiny(source)
    return _from_folder(source.name, source.path) if source.path.is_dir() else _from_gguf(source.name, source.path)


def _tiny(source: ModelSource) -> LoadedModel:
    from segue.model.tiny import random_weights, tiny_spec

    spec, tokenizer = tiny_spec(), ByteTokenizer()
    weights = Weights.in_memory(random_weights(spec))
    template = ChatTemplate(CHATML, "<|bos|>", "<|im_end|>")
    return LoadedModel(source.name, spec, weights, tokenizer, template, fingerprint(spec, weights))


def _from_folder(name: str, folder: Path) -> LoadedModel:
    from segue.model.json_file import read_json
    from segue.model.safetensors_folder import open_folder
    from segue.model.tokenizer_files import tokenizer_from_folder

    spec = ModelSpec.from_hf_config(read_json(folder / "config.json"))
    weights = weights_from_hf(open_folder(folder), spec, folder.name)
    tokenizer = tokenizer_from_folder(folder)
    template = template_from_folder(folder, *_edges(tokenizer))
    return _fitted(name, spec, weights, tokenizer, template)


def _from_gguf(name: str, path: Path) -> LoadedModel:
    from segue.model.gguf_file import GGUFFile
    from segue.model.tokenizer_files import tokenizer_from_gguf

    file = GGUFFile.open(path)
    spec = ModelSpec.from_gguf_metadata(file.metadata, file.tensors, _rope_divisors(file))
    weights = weights_from_gguf(file, spec)
    tokenizer = tokenizer_from_gguf(file.metadata)
    source = file.metadata.get("tokenizer.chat_template")
    template = ChatTemplate(source if isinstance(source, str) else None, *_edges(tokenizer))
    return _fitted(name, spec, weights, tokenizer, template)


def _fitted(name: str, spec: ModelSpec, weights: Weights, tokenizer: Tokenizer, template: ChatTemplate) -> LoadedModel:
    if tokenizer.vocab_size > spec.vocab_size:
        raise ModelError(f"the tokenizer of {name} has {tokenizer.vocab_size} tokens, and the model {spec.vocab_size}.")
    identity = fingerprint(spec, weights)
    spec = replace(
        spec,
        bos_id=spec.bos_id if tokenizer.bos_id is None else tokenizer.bos_id,
        eos_ids=tokenizer.eos_ids or spec.eos_ids,
    )
    return LoadedModel(name, spec, weights, tokenizer, template, identity)


def _rope_divisors(file: GGUFFile) -> list[float] | None:
    from segue.model.gguf_tensors import dequantize

    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    divisors: list[float] = dequantize(file.raw(tensor), tensor).flatten().tolist()
    return divisors


def _edges(tokenizer: Tokenizer) -> tuple[str, str]:
    """The texts of bos and eos, which templates write out."""
    bos = "" if tokenizer.bos_id is None else tokenizer.token_bytes(tokenizer.bos_id).decode("utf-8", "replace")
    eos = tokenizer.token_bytes(tokenizer.eos_ids[0]).decode("utf-8", "replace") if tokenizer.eos_ids else ""
    return bos, eos
