"""A shop that does not exist: items with three-level ids, and people whose next purchase follows from the last one, mostly.

An item (a, b, c) is of topic a, kind b and make c; half of all such triples exist. After an item comes one of the same topic,
or of the next, of the following kind or the one after, and of a make that follows from the last; now and then, somebody buys what
is popular instead. So what comes next can be learned from the ids, and never be known for certain.
"""

from __future__ import annotations

import random

LEVELS = 16
HISTORY = 8  # purchases before the next
_JUMPS = 0.1  # to something popular


class Shop:
    def __init__(self, seed: int = 0) -> None:
        pick = random.Random(seed)
        triples = [(a, b, c) for a in range(LEVELS) for b in range(LEVELS) for c in range(LEVELS)]
        self.items = sorted(pick.sample(triples, len(triples) // 2))
        self._exists = set(self.items)
        self._popular = pick.sample(self.items, 50)

    def after(self, item: tuple[int, int, int], pick: random.Random) -> tuple[int, int, int]:
        if pick.random() < _JUMPS:
            return self._popular[min(int(pick.expovariate(0.15)), len(self._popular) - 1)]
        a, b, c = item
        a = a if pick.random() < 0.8 else (a + 1) % LEVELS
        b = (b + pick.choice((1, 2))) % LEVELS
        c = (3 * c + 1) % LEVELS
        while (a, b, c) not in self._exists:
            c = (c + 1) % LEVELS
        return a, b, c

    def life(self, pick: random.Random) -> list[tuple[int, int, int]]:
        """Purchases of one person, in order."""
        line = [pick.choice(self.items)]
        while len(line) <= HISTORY:
            line.append(self.after(line[-1], pick))
        return line


def text_of(item: tuple[int, ...]) -> str:
    return "".join(f"<{letter}_{number}>" for letter, number in zip("abcd", item, strict=False))


def thought_of(item: tuple[int, ...]) -> str:
    """What somebody who knew would think: the topic and the kind, in words of their own."""
    return f"topic{item[0]} kind{item[1]}"
