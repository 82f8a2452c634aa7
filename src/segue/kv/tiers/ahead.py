"""Memory that is had before it is needed."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading

from segue.kv.tiers.courier import give_way

_AHEAD_BYTES = 256 << 20
_PART_BYTES = 256 << 10  # at once: whoever asks the system for memory waits that long
_MADV_POPULATE_WRITE = 23  # since Linux 5.14


class Ahead:
    """Has the system give the next pages of a memory that is used from its beginning on, before they are written: a page costs up
    to thirty times its copy when it is first touched, most of all in a virtual machine.

    A tier may be promised more than it ever holds, so only `_AHEAD_BYTES` are had beyond what was used. Where the system does not
    know how, or the memory is had already, nothing is done.
    """

    def __init__(self, memory: memoryview) -> None:
        is_mapped = sys.platform == "linux" and isinstance(getattr(memory, "obj", None), mmap.mmap)
        self._memory = memory if is_mapped else None
        self._had = 0
        self._thread: threading.Thread | None = None
        self.reach(0)

    def reach(self, used: int) -> None:
        """So many bytes are used now."""
        if self._memory is None or self._had == len(self._memory) or used + _AHEAD_BYTES // 2 <= self._had:
            return
        if self._thread is None or not self._thread.is_alive():
            self._had = max(self._had, used // mmap.PAGESIZE * mmap.PAGESIZE)
            target = min(used + _AHEAD_BYTES, len(self._memory))
            self._thread = threading.Thread(
                target=self._have, args=(self._memory, target), name="segue-pages", daemon=True
            )
            self._thread.start()

    def wait(self) -> None:
        """Until the pages that were asked for are had."""
        if self._thread is not None:
            self._thread.join()

    def _have(self, memory: memoryview, target: int) -> None:
        give_way()
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        madvise = ctypes.CDLL(None).madvise  # not the mmap's own: that keeps this interpreter's other threads waiting
        while self._had < target:
            size = min(_PART_BYTES, target - self._had)
            if madvise(ctypes.c_void_p(begin + self._had), ctypes.c_size_t(size), _MADV_POPULATE_WRITE) != 0:
                self._memory = None  # an older system, or not enough memory: it comes as it is used
                return
            self._had += size
