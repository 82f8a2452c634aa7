"""A catalogue: items, each with the tokens that stand for it, as a table of prefixes that a beam search walks.

Items are sorted by their tokens, so that those with a common prefix are neighbours. Level l has a node for every prefix of l + 1
tokens; its children are a run of level l + 1:

    items    a: 7 1 4    b: 7 1 9    c: 7 5 2    d: 8 3 3
    level 0  tokens 7 8          children  0 2 3     (of 7: nodes 0 and 1; of 8: node 2)
    level 1  tokens 1 5 3        children  0 2 3 4
    level 2  tokens 4 9 2 3      rows      0 1 2 3       (the items, in this order)

A node without children is an item, or several that have the same tokens. No item's tokens may begin another's: where a line ends
could not be told. The arrays are written as they are to a compiled file, and mapped into memory from there.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from segue.base.errors import InvalidRequest

Ints = npt.NDArray[np.int32]
_FORMAT = "segue-catalogue-1"
_ARRAYS = ("tokens", "children", "rows", "row_ends")
_NONE = -1  # behind the tokens of an item that has fewer than others


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Its nodes' last tokens; where each one's children begin in the next level, which is where the one's before it end; and its
    rows in the order of items, from the first to one past the last."""

    tokens: Ints
    children: Ints
    rows: Ints
    row_ends: Ints

    def __len__(self) -> int:
        return len(self.tokens)


class Catalogue:
    """Immutable. `Catalogue({"item": (3, 17, 5), …})`, or from a file: `Catalogue.read`."""

    def __init__(self, items: Mapping[str, Sequence[int]]) -> None:
        names = list(items)
        if any(not isinstance(name, str) for name in names):
            raise InvalidRequest("catalogue", "items' names must be strings")
        self._set(*compiled(_as_matrix(names, [items[name] for name in names])), _Names.of(names))

    @classmethod
    def from_arrays(cls, tokens: Ints, names: Sequence[str]) -> Catalogue:
        """`tokens` [items, levels]; -1 behind the tokens of a shorter item."""
        self = cls.__new__(cls)
        if np.size(tokens) and np.max(tokens) > 2**31 - 1:
            raise InvalidRequest("catalogue", f"{np.max(tokens)} is no token id")
        matrix = np.ascontiguousarray(tokens, np.int32)
        if matrix.ndim != 2 or len(matrix) != len(names) or not matrix.size:
            raise InvalidRequest("catalogue", f"{len(names)} names, and tokens of shape {matrix.shape}")
        self._set(*compiled(matrix), _Names.of(names))
        return self

    def _set(self, levels: list[Level], order: Ints, names: _Names) -> None:
        self.levels = levels
        self._order = order
        self._names = names
        self.max_token = max(int(level.tokens.max()) for level in levels)
        counts = [np.diff(level.children) for level in levels[:-1]]
        self.most_children = [len(levels[0]), *(int(count.max()) for count in counts)]  # of a node of the level before
        self.is_even = all(count.min() > 0 for count in counts)  # all items have equally many tokens

    # Files

    @classmethod
    def read(cls, path: str | Path) -> Catalogue:
        """A compiled file, or JSON ({"item": [ids], …}), or CSV (item, id, id, …; a first line without numbers is a heading)."""
        path = Path(path)
        try:
            if path.suffix == ".json":
                items = json.loads(path.read_text())
                if not isinstance(items, dict):
                    raise InvalidRequest("catalogue", f"{path.name}: must be an object with token ids for each item")
                return cls(items)
            if path.suffix == ".csv":
                return cls(_read_csv(path))
            return cls._map(path)
        except (OSError, ValueError, SafetensorError) as error:
            raise InvalidRequest("catalogue", f"{path.name}: {error}") from error

    def write(self, path: str | Path) -> None:
        """Compiled: `read` takes seconds for millions of items."""
        arrays: dict[str, Any] = {"order": self._order, **self._names.arrays()}
        for number, level in enumerate(self.levels):
            for name in _ARRAYS:
                arrays[f"{number}.{name}"] = getattr(level, name)
        about = {"format": _FORMAT, "levels": str(len(self.levels)), "digest": _digest(arrays)}
        save_file(arrays, path, metadata=about)

    @classmethod
    def _map(cls, path: Path) -> Catalogue:
        with safe_open(path, "numpy") as file:
            about = file.metadata() or {}
            if about.get("format") != _FORMAT:
                raise ValueError("is no compiled catalogue")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        if about.get("digest") != _digest(arrays):
            raise ValueError("is damaged")
        levels = [Level(*(arrays[f"{number}.{name}"] for name in _ARRAYS)) for number in range(int(about["levels"]))]
        self = cls.__new__(cls)
        _check(levels, arrays["order"])
        self._set(levels, arrays["order"], _Names(arrays["names"], arrays["name_ends"], arrays["name_order"]))
        return self

    # What there is

    def __len__(self) -> int:
        return len(self._order)

    @property
    def depth(self) -> int:
        return len(self.levels)

    def find(self, tokens: Sequence[int]) -> tuple[int, ...] | None:
        """The nodes of a prefix, from the first level on; None if no item begins so."""
        begin, end = 0, len(self.levels[0])
        nodes: list[int] = []
        for level, token in zip(self.levels, tokens, strict=False):
            at = begin + int(np.searchsorted(level.tokens[begin:end], token))
            if at >= end or level.tokens[at] != token:
                return None
            nodes.append(at)
            begin, end = (int(level.children[at]), int(level.children[at + 1]))
        return tuple(nodes) if len(nodes) == len(tokens) else None

    def are_ends(self, nodes: Sequence[int], level: int) -> list[bool]:
        """Whether nothing can follow these nodes of a level."""
        if level + 1 == self.depth or not len(nodes):
            return [True] * len(nodes)
        at, children = np.asarray(nodes), self.levels[level].children
        return [bool(is_end) for is_end in children[at] == children[at + 1]]

    def names(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """Of the items with exactly these tokens."""
        nodes = self.find(tokens)
        if not nodes:
            return ()
        return self.names_at(len(nodes) - 1, nodes[-1])

    def names_at(self, number: int, node: int) -> tuple[str, ...]:
        """Of the items that end at a node of a level."""
        level = self.levels[number]
        if number + 1 < self.depth and level.children[node] < level.children[node + 1]:
            return ()
        rows = range(int(level.rows[node]), int(level.row_ends[node]))
        return tuple(self._names[int(self._order[row])] for row in rows)

    def tokens(self, name: str) -> tuple[int, ...]:
        """Of an item. Raises `InvalidRequest` if there is none of this name."""
        return self._tokens_of(self._number(name, "catalogue"))

    def _tokens_of(self, number: int) -> tuple[int, ...]:
        row = self._row_of(number)
        found: list[int] = []
        for level in self.levels:
            node = int(np.searchsorted(level.rows, row, side="right")) - 1
            if node < 0 or level.row_ends[node] <= row:
                break
            found.append(int(level.tokens[node]))
        return tuple(found)

    def _row_of(self, number: int) -> int:
        if not hasattr(self, "_row_of_item"):
            rows = np.empty_like(self._order)
            rows[self._order] = np.arange(len(rows), dtype=np.int32)
            self._row_of_item = rows
        return int(self._row_of_item[number])

    # For a request

    def restricted(self, allow: Sequence[str] | None, deny: Sequence[str]) -> Walk:
        """As if there were only the items of these names, and none of those others."""
        denied = frozenset(deny)
        for name in denied:
            self._number(name, "deny")
        if allow is not None:
            wanted = {name: self._tokens_of(self._number(name, "allow")) for name in allow if name not in denied}
            if not wanted:
                raise InvalidRequest("allow", "leaves no item")
            return Walk(Catalogue(wanted))
        return Walk(self, self._denied(deny), denied) if deny else Walk(self)

    def _denied(self, names: Sequence[str]) -> tuple[Ints, ...]:
        """The nodes of each level that no item is left of."""
        rows = np.array(sorted({self._row_of(self._number(name, "deny")) for name in names}), np.int32)
        gone = []
        for level in self.levels:
            nodes = np.searchsorted(level.rows, rows, side="right") - 1
            nodes = nodes[(nodes >= 0) & (level.row_ends[nodes] > rows)]
            nodes, counts = np.unique(nodes, return_counts=True)
            gone.append(nodes[counts == level.row_ends[nodes] - level.rows[nodes]].astype(np.int32))
        if len(gone[0]) == len(self.levels[0]):
            raise InvalidRequest("deny", "leaves no item")
        return tuple(gone)

    def _number(self, name: str, field: str) -> int:
        number = self._names.find(name)
        if number is None:
            raise InvalidRequest(field, f"the catalogue has no item {name!r:.60}")
        return number


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """A catalogue as one request sees it: without the nodes that are `denied`, by level, and without items of these names."""

    catalogue: Catalogue
    denied: tuple[Ints, ...] | None = None
    denied_names: frozenset[str] = frozenset()

    @property
    def depth(self) -> int:
        return self.catalogue.depth

    @property
    def max_token(self) -> int:
        return self.catalogue.max_token

    def names(self, num_tokens: int, node: int) -> tuple[str, ...]:
        found = self.catalogue.names_at(num_tokens - 1, node)
        return tuple(name for name in found if name not in self.denied_names) if self.denied_names else found


class _Names:
    """Strings end to end, and their order, to find one by."""

    def __init__(self, text: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64], order: Ints) -> None:
        self._text, self._ends, self._order = text, ends, order

    @classmethod
    def of(cls, names: Sequence[str]) -> _Names:
        encoded = [name.encode() for name in names]
        ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
        order = sorted(range(len(encoded)), key=encoded.__getitem__)
        for one, other in pairwise(order):
            if encoded[one] == encoded[other]:
                raise InvalidRequest("catalogue", f"has two items {names[one]!r:.60}")
        return cls(np.frombuffer(b"".join(encoded) or b"\0", np.uint8), ends, np.array(order, np.int32))

    def arrays(self) -> dict[str, Any]:
        return {"names": self._text, "name_ends": self._ends, "name_order": self._order}

    def _bytes(self, number: int) -> bytes:
        begin = int(self._ends[number - 1]) if number else 0
        return self._text[begin : int(self._ends[number])].tobytes()

    def __getitem__(self, number: int) -> str:
        return self._bytes(number).decode(errors="replace")

    def find(self, name: str) -> int | None:
        wanted, low, high = name.encode(), 0, len(self._order)
        while low < high:
            middle = (low + high) // 2
            if self._bytes(int(self._order[middle])) < wanted:
                low = middle + 1
            else:
                high = middle
        if low < len(self._order) and self._bytes(int(self._order[low])) == wanted:
            return int(self._order[low])
        return None


def compiled(matrix: Ints) -> tuple[list[Level], Ints]:
    """The levels, and which item each row is."""
    if (matrix[:, 0] < 0).any() or ((matrix[:, 1:] >= 0) & (matrix[:, :-1] < 0)).any() or matrix.min() < _NONE:
        raise InvalidRequest("catalogue", "each item needs at least one token id, and none may be negative")
    order = np.lexsort(matrix.T[::-1]).astype(np.int32)
    rows = matrix[order]
    depth = rows.shape[1]
    while depth > 1 and (rows[:, depth - 1] < 0).all():
        depth -= 1
    changed = np.zeros(len(rows), bool)  # a row whose first tokens are not those of the row before it
    changed[0] = True
    extents = []  # of each level: the rows with which its nodes begin and end
    for at in range(depth):
        if at:
            _check_prefixes(rows, changed, at)
        changed[1:] |= rows[1:, at] != rows[:-1, at]
        bounds = np.append(np.flatnonzero(changed), len(rows)).astype(np.int32)
        are_nodes = rows[bounds[:-1], at] >= 0
        extents.append((bounds[:-1][are_nodes], bounds[1:][are_nodes]))
    levels = []
    for at, (first, end) in enumerate(extents):
        children = np.zeros(len(first) + 1, np.int32)
        if at + 1 < depth:
            children = np.searchsorted(extents[at + 1][0], np.append(first, len(rows))).astype(np.int32)
        levels.append(Level(np.ascontiguousarray(rows[first, at]), children, first, end))
    return levels, order


def _check_prefixes(rows: Ints, changed: npt.NDArray[np.bool_], at: int) -> None:
    """No row that ends before this level may be followed by one with the same tokens that goes on."""
    wrong = ~changed[1:] & (rows[:-1, at] < 0) & (rows[1:, at] >= 0)
    if wrong.any():
        tokens = [int(token) for token in rows[int(np.flatnonzero(wrong)[0])] if token >= 0]
        raise InvalidRequest("catalogue", f"the item with tokens {tokens} begins another: give each an end of its own")


def _digest(arrays: Mapping[str, Any]) -> str:
    digest = blake2b(digest_size=16)
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def _check(levels: list[Level], order: Ints) -> None:
    """A file's arrays lead nowhere outside: somebody else may have made it."""
    if not levels or not len(order) or order.min() < 0 or order.max() >= len(order):
        raise ValueError("its items are damaged")
    for at, level in enumerate(levels):
        limit = len(levels[at + 1]) if at + 1 < len(levels) else 0
        for name, array, extra, most in (
            ("children", level.children, 1, limit),
            ("rows", level.rows, 0, len(order)),
            ("row_ends", level.row_ends, 0, len(order)),
        ):
            fits = len(array) == len(level) + extra and len(array) and array[0] >= 0 and array[-1] <= most
            if not fits or (np.diff(array) < 0).any():
                raise ValueError(f"the {name} of level {at} are damaged")
        if not len(level) or level.tokens.min() < 0:
            raise ValueError(f"the tokens of level {at} are damaged")


def _as_matrix(names: list[str], items: Iterable[Sequence[int]]) -> Ints:
    lists = list(items)
    if not lists:
        raise InvalidRequest("catalogue", "has no items")
    for name, ids in zip(names, lists, strict=True):
        whole = not isinstance(ids, str) and all(
            isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in ids
        )
        if not whole or not len(ids) or min(ids) < 0 or max(ids) > 2**31 - 1:
            raise InvalidRequest("catalogue", f"item {name!r:.60} must have a list of token ids, not {ids!r:.60}")
    matrix = np.full((len(lists), max(map(len, lists))), _NONE, np.int32)
    for row, ids in zip(matrix, lists, strict=True):
        row[: len(ids)] = ids
    return matrix


def _read_csv(path: Path) -> dict[str, list[int]]:
    items: dict[str, list[int]] = {}
    with path.open(newline="") as file:
        for number, row in enumerate(csv.reader(file), 1):
            cells = [cell.strip() for cell in row if cell.strip()]
            if not cells or (number == 1 and not any(cell.lstrip("-").isdigit() for cell in cells[1:])):
                continue
            if cells[0] in items:
                raise InvalidRequest("catalogue", f"{path.name}, line {number}: {cells[0]!r:.60} is there twice")
            try:
                items[cells[0]] = [int(cell) for cell in cells[1:]]
            except ValueError as error:
                raise InvalidRequest("catalogue", f"{path.name}, line {number}: {error}") from error
    return items
