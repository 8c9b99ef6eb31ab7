"""Page-aligned buffers that are lent and come back, so that no copy allocates its header pages or its encoded bytes."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PAGE_BYTES = mmap.PAGESIZE


class Staging:
    """Buffers by size. Thread-safe; keeps at most ``keep_bytes`` of idle ones."""

    def __init__(self, keep_bytes: int = 64 << 20) -> None:
        self._lock = threading.Lock()
        self._idle: dict[int, list[memoryview]] = {}
        self._idle_bytes = 0
        self._keep_bytes = keep_bytes

    @contextmanager
    def lend(self, count: int, nbytes: int) -> Iterator[list[memoryview]]:
        """``count`` buffers of ``nbytes``, rounded up to whole pages and page-aligned, with old bytes in them."""
        size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            idle = self._idle.setdefault(size, [])
            cut = max(0, len(idle) - count)
            lent = idle[cut:]
            del idle[cut:]
            self._idle_bytes -= size * len(lent)
        if len(lent) < count:
            lent += _fresh(count - len(lent), size)
        try:
            yield lent
        finally:
            with self._lock:
                kept = min(len(lent), max(0, self._keep_bytes - self._idle_bytes) // size) if size else 0
                self._idle.setdefault(size, []).extend(lent[:kept])
                self._idle_bytes += size * kept


def _fresh(count: int, size: int) -> list[memoryview]:
    whole = memoryview(mmap.mmap(-1, count * size))
    return [whole[index * size : index * size + size] for index in range(count)]
