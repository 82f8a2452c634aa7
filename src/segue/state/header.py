"""A snapshot's header: JSON in which every field has its type and its range, and there are no others."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Set
from dataclasses import fields
from itertools import chain
from typing import Any

from segue.base.errors import InvalidRequest, SnapshotError
from segue.base.types import MAX_SEED, SamplingParams
from segue.kv.layout import ITEM_BYTES, KVLayout
from segue.state.snapshot import Progress, Snapshot

MAX_HEADER_BYTES = 4 << 20
MAX_TOKENS = 1 << 26
MAX_CHUNK_BYTES = 1 << 30
_MAX_INT32 = 2**31 - 1
_MAX_NESTING = 64
_TEXTS = ("id", "model", "scope", "adapter")
_HEADER = {*_TEXTS, "job", "created_at", "layout", "num_tokens", "num_computed", "chunk_tokens", "progress", "note"}
_PROGRESS = {"params", "seed", "num_prompt", "num_logprobs", "num_tops"}
_PARAMS = {field.name for field in fields(SamplingParams)}


def encode_header(snapshot: Snapshot) -> bytes:
    header = json.dumps(to_header(snapshot), ensure_ascii=False, separators=(",", ":")).encode()
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"its header, with the note, takes {len(header)} bytes of the allowed {MAX_HEADER_BYTES}")
    return header


def decode_header(text: bytes | bytearray) -> dict[str, Any]:
    """The header's fields, none missing and none unknown; their values are still to be checked."""
    try:
        header = json.loads(text.decode(), object_pairs_hook=_distinct)
        _check_json(header)
    except (ValueError, RecursionError) as error:
        raise invalid(f"its header is not plain JSON ({error})") from error
    return object_of("header", header, _HEADER)


def num_tokens_of(header: dict[str, Any]) -> int:
    return whole("num_tokens", header["num_tokens"], 1, MAX_TOKENS)


def to_header(snapshot: Snapshot) -> dict[str, Any]:
    progress = snapshot.progress
    return {
        **{name: getattr(snapshot, name) for name in _TEXTS},
        "job": snapshot.job,
        "created_at": snapshot.created_at,
        "layout": {"dtype": snapshot.layout.dtype, "shape": snapshot.layout.shape},
        "num_tokens": len(snapshot.tokens),
        "num_computed": snapshot.num_computed,
        "chunk_tokens": snapshot.chunk_tokens,
        "progress": None if progress is None else _progress_header(progress),
        "note": dict(snapshot.note),
    }


def _progress_header(progress: Progress) -> dict[str, Any]:
    params = {field.name: getattr(progress.params, field.name) for field in fields(progress.params)}
    params["logit_bias"] = list(progress.params.logit_bias.items())  # an object's keys would be texts, not ids
    return {
        "params": params,
        "seed": progress.seed,
        "num_prompt": progress.num_prompt,
        "num_logprobs": len(progress.logprobs),
        "num_tops": sum(len(tops) for _, _, tops in progress.logprobs),
    }


def from_header(header: dict[str, Any], num_tokens: int) -> Snapshot:
    """What the header says: a snapshot whose tokens and log-probabilities are still to come."""
    snapshot = Snapshot(
        **{name: _text(name, header[name]) for name in _TEXTS},
        job=None if header["job"] is None else _text("job", header["job"]),
        created_at=_real("created_at", header["created_at"]),
        layout=_layout(object_of("layout", header["layout"], {"dtype", "shape"})),
        tokens=array("i"),
        num_computed=whole("num_computed", header["num_computed"], 0, num_tokens),
        chunk_tokens=whole("chunk_tokens", header["chunk_tokens"], 1, _MAX_INT32),
        progress=None if header["progress"] is None else _progress(header["progress"], num_tokens),
        note=object_of("note", header["note"]),
    )
    if snapshot.num_chunks and snapshot.chunk_bytes(0) > MAX_CHUNK_BYTES:
        raise invalid(f"a chunk takes {snapshot.chunk_bytes(0)} bytes, over {MAX_CHUNK_BYTES}")
    return snapshot


def _layout(header: dict[str, Any]) -> KVLayout:
    dtype, shape = _text("dtype", header["dtype"]), header["shape"]
    if dtype not in ITEM_BYTES:
        raise invalid(f"its layout has the unknown dtype {dtype!r:.40}")
    if not isinstance(shape, list) or not 1 <= len(shape) <= 8:
        raise invalid(f"its layout's shape is {shape!r:.40}")
    layout = KVLayout(dtype, tuple(whole("shape", size, 1, _MAX_INT32) for size in shape))
    if layout.token_bytes > MAX_CHUNK_BYTES:
        raise invalid(f"the KV of one token takes {layout.token_bytes} bytes")
    return layout


def _progress(value: object, num_tokens: int) -> Progress:
    header = object_of("progress", value, _PROGRESS)
    seed, params = whole("seed", header["seed"], 0, MAX_SEED), _params(header["params"])
    if params.n != 1:
        raise invalid(f"one answer was under way, and its params ask for {params.n}")
    return Progress(params, seed, whole("num_prompt", header["num_prompt"], 1, num_tokens))


def _params(value: object) -> SamplingParams:
    """A field that an older version did not know has its default; one that we do not know is refused."""
    header = object_of("params", value)
    if unknown := header.keys() - _PARAMS:
        raise invalid(f"params has the unknown field {min(unknown)!r:.40}")
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "logit_bias"):
        if not isinstance(header.setdefault(name, []), list):
            raise invalid(f"{name} must be a list")
    pairs = header["logit_bias"]
    if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int) for pair in pairs):
        raise invalid("logit_bias must be pairs of a token and a number")
    bias = dict(pairs)
    if len(bias) < len(pairs):
        raise invalid("logit_bias names a token twice")
    try:
        return SamplingParams(**{**header, "logit_bias": bias})
    except InvalidRequest as error:
        raise invalid(str(error)) from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _check_json(header: object) -> None:
    """A ValueError for what the parser lets through: NaN, infinities, half of a surrogate pair, deep nesting."""
    json.dumps(header, ensure_ascii=False, allow_nan=False).encode()
    level = [header]
    for _ in range(_MAX_NESTING):
        lists = [
            value.values() if isinstance(value, dict) else value for value in level if isinstance(value, (dict, list))
        ]
        level = list(chain.from_iterable(lists))
    if level:
        raise ValueError(f"it is more than {_MAX_NESTING} levels deep")


def object_of(name: str, value: object, names: Set[str] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(f"{name} must be an object, not {value!r:.40}")
    if names is not None and (wrong := value.keys() ^ names):
        raise invalid(f"{name} lacks or should not have {min(wrong)!r:.40}")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise invalid(f"{name} must be text, not {value!r:.40}")
    return value


def whole(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise invalid(f"{name} must be a whole number from {low} to {high}, not {value!r:.40}")
    return value


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > sys.float_info.max:
        raise invalid(f"{name} must be a number, not {value!r:.40}")
    return float(value)


def invalid(found: str) -> SnapshotError:
    return SnapshotError(f"The snapshot is not valid: {found}.")
