"""Which entry leaves a tier that is full: S3-FIFO (Yang et al., SOSP 2023), which a single pass over much else does not empty.

    new ──▶ small, a third ──used since──▶ main ──used since──▶ main again, with one use fewer
                 │                          │
                 └──not used──▶ gone ◀──not used──┘

A name that left `small` is remembered for a while (`ghosts`); if it comes back, it goes to `main` at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice

_SMALL_SHARE = 0.3  # a tenth in the paper; chats and agents come back soon, so the young are worth more (docs/log.md)
_MOST_USES = 3
_MOST_LOOKS = 1024  # before it is given up: what is looked at comes up last the next time


class Replacement:
    """Entries with their sizes. It only decides; what leaves is for the caller to delete."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size = 0
        self._sizes: dict[bytes, int] = {}
        self._uses: dict[bytes, int] = {}
        self._small: OrderedDict[bytes, None] = OrderedDict()
        self._main: OrderedDict[bytes, None] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._small_size = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: bytes) -> bool:
        return name in self._sizes

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._sizes))

    def use(self, name: bytes) -> None:
        self._uses[name] = min(self._uses[name] + 1, _MOST_USES)

    def add(self, name: bytes, size: int) -> None:
        """A new entry. The caller makes room first."""
        self._sizes[name] = size
        self._uses[name] = 0
        self.size += size
        if self._ghosts.pop(name, 0) is None:
            self._main[name] = None
        else:
            self._small[name] = None
            self._small_size += size

    def remove(self, name: bytes) -> None:
        size = self._sizes.pop(name)
        del self._uses[name]
        self.size -= size
        if name in self._small:
            del self._small[name]
            self._small_size -= size
        else:
            del self._main[name]

    def evict(self, is_free: Callable[[bytes], bool] = lambda name: True) -> bytes | None:
        """Take out the entry that is to leave next, of those that are free to; None if there is none."""
        if self._small_size > self.capacity * _SMALL_SHARE or not self._main:
            return self._evict_small(is_free) or self._evict_main(is_free)
        return self._evict_main(is_free) or self._evict_small(is_free)

    def _evict_small(self, is_free: Callable[[bytes], bool]) -> bytes | None:
        for name in list(islice(self._small, _MOST_LOOKS)):
            if not is_free(name):
                self._small.move_to_end(name)
            elif self._uses[name]:
                self._to_main(name)
            else:
                self.remove(name)
                self._remember(name)
                return name
        return None

    def _evict_main(self, is_free: Callable[[bytes], bool]) -> bytes | None:
        for _ in range(min((_MOST_USES + 1) * len(self._main), _MOST_LOOKS)):
            name = next(iter(self._main))
            if is_free(name) and not self._uses[name]:
                self.remove(name)
                return name
            self._uses[name] = max(self._uses[name] - is_free(name), 0)
            self._main.move_to_end(name)
        return None

    def _to_main(self, name: bytes) -> None:
        del self._small[name]
        self._small_size -= self._sizes[name]
        self._uses[name] = 0
        self._main[name] = None

    def _remember(self, name: bytes) -> None:
        self._ghosts[name] = None
        while len(self._ghosts) > len(self._sizes) + 1:
            self._ghosts.popitem(last=False)
