"""Where histories come from: made up, or recorded ones with semantic ids."""

from __future__ import annotations

import ast
import csv
import gzip
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import synthetic as shop_of

_MOST_HISTORY = 10


@dataclass(frozen=True)
class Example:
    """Texts of what somebody had, and what came next."""

    history: list[str]
    thought: str
    target: str  # the item's name
    target_text: str


@dataclass(frozen=True)
class Data:
    items: dict[str, str]  # the text of each item's ids, by name
    words: list[str]  # all that texts are made of
    train: list[Example]
    test: list[Example]


def synthetic(pick: random.Random, num_train: int = 40_000, num_test: int = 500) -> Data:
    shop = shop_of.Shop()
    names = {item: f"item-{number}" for number, item in enumerate(shop.items)}
    levels = range(shop_of.LEVELS)
    words = [f"<{letter}_{n}>" for letter in "abc" for n in levels]
    words += [f"topic{n}" for n in levels] + [f"kind{n}" for n in levels]

    def example() -> Example:
        *history, target = shop.life(pick)
        texts = [shop_of.text_of(item) for item in history]
        return Example(texts, shop_of.thought_of(target), names[target], shop_of.text_of(target))

    items = {name: shop_of.text_of(item) for item, name in names.items()}
    return Data(items, words, [example() for _ in range(num_train)], [example() for _ in range(num_test)])


def recorded(folder: Path, dataset: str, pick: random.Random, num_test: int = 500) -> Data:
    """The last item of each history is for testing. A thought names the first two levels of what comes."""
    index: dict[str, list[str]] = _json(folder / f"{dataset}.index.json.gz")
    items = {name: "".join(ids) for name, ids in index.items()}
    histories = _histories(folder, dataset)
    words = sorted({word for ids in index.values() for word in ids})

    def example(history: list[str]) -> Example:
        *before, target = history[-_MOST_HISTORY - 1 :]
        thought = "".join(index[target][:2])
        return Example([items[name] for name in before], thought, target, items[target])

    train = [example(line[:end]) for line in histories for end in range(2, len(line))]
    test = [example(line) for line in pick.sample([line for line in histories if len(line) > 2], num_test)]
    return Data(items, words, train, test)


def _json(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        found: dict[str, Any] = json.load(file)
        return found


def _histories(folder: Path, dataset: str) -> list[list[str]]:
    path = folder / f"{dataset}.inter.json.gz"
    if path.exists():
        return [[str(item) for item in line] for line in _json(path).values() if len(line) > 1]
    with gzip.open(folder / f"{dataset}.valid.csv.gz", "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    return [[*map(str, ast.literal_eval(row["history_item_id"])), row["item_id"]] for row in rows]
