"""Finds and opens the `*.safetensors` of a Hugging Face folder. Pickled checkpoints are never opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from segue.base.errors import WeightsError
from segue.model.json_file import read_json

_INDEX = "model.safetensors.index.json"
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class SafetensorsStored:
    """A tensor still in its shard; `read` gives it in the type it is stored in, mapped where the format allows."""

    shard: Path
    name: str
    shape: tuple[int, ...]
    handle: Any

    @property
    def origin(self) -> str:
        return f"{self.shard.name}: tensor {self.name}"

    def raw(self) -> npt.NDArray[np.uint8]:
        return self.read().contiguous().flatten().view(torch.uint8).numpy()

    def read(self) -> Tensor:
        tensor: Tensor = self.handle.get_tensor(self.name)
        return tensor


def open_folder(folder: Path) -> dict[str, SafetensorsStored]:
    """Every tensor of the folder under its Hugging Face name."""
    found: dict[str, SafetensorsStored] = {}
    for shard, expected in _shards(folder).items():
        stored = _open_shard(shard)
        absent = sorted(expected - stored.keys())
        if absent:
            raise WeightsError(f"{shard.name} lacks tensor {absent[0]}, which {_INDEX} places there.")
        twice = sorted(found.keys() & stored.keys())
        if twice:
            raise WeightsError(f"{shard.name} repeats tensor {twice[0]} of {found[twice[0]].shard.name}.")
        found |= stored
    return found


def _shards(folder: Path) -> dict[Path, set[str]]:
    """The files to open, each with the tensors that must be in it (none are known without an index)."""
    whole = folder / "model.safetensors"
    if whole.is_file():
        return {whole: set()}
    if (folder / _INDEX).is_file():
        return _indexed_shards(folder)
    loose = sorted(folder.glob("*.safetensors"))
    if loose:
        return {path: set() for path in loose}
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise WeightsError(
            f"{folder.name} holds pickled weights only, which are never opened because unpickling can run code; "
            "convert them to safetensors."
        )
    raise WeightsError(f"{folder.name} holds no *.safetensors file.")


def _indexed_shards(folder: Path) -> dict[Path, set[str]]:
    placed = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise WeightsError(f"{_INDEX} has no weight_map.")
    shards: dict[Path, set[str]] = {}
    for tensor, shard in placed.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise WeightsError(f"{_INDEX} places {tensor} in {shard!r}, which is not a file name.")
        shards.setdefault(folder / shard, set()).add(tensor)
    for path in shards:
        if not path.is_file():
            raise WeightsError(f"{path.name} is missing, and {_INDEX} names it.")
    return shards


def _open_shard(path: Path) -> dict[str, SafetensorsStored]:
    from safetensors import SafetensorError, safe_open

    stored: dict[str, SafetensorsStored] = {}
    try:
        handle: Any = safe_open(path, framework="pt", device="cpu")
        for name in handle.keys():  # noqa: SIM118 - a handle is not a mapping
            part = handle.get_slice(name)
            if part.get_dtype() not in _FLOATS and not name.endswith("rotary_emb.inv_freq"):
                raise WeightsError(f"{path.name}: tensor {name} has type {part.get_dtype()}; floats can be read.")
            stored[name] = SafetensorsStored(path, name, tuple(part.get_shape()), handle)
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{path.name} is truncated or corrupt: {error}.") from error
    return stored
