"""``dram://?capacity=8GiB``: one arena of host memory, usable at once and faulted in behind the scenes."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.abc.medium import Iovec, MediumContext, Outcome, SlotMedium
from kvtier.errors import CapacityError
from kvtier.machine import require_memory
from kvtier.quantity import Bytes, rounded_bytes
from kvtier.storage_backends.iovec import gather, scatter
from kvtier.url import TierUrl

_log = logging.getLogger(__name__)

PAGE_BYTES = 4096
_MADV_POPULATE_WRITE = 23
_PREFAULT_BYTES = 32 << 20
"""Faulted in per system call: some 30 ms, so that closing does not wait."""
_libc = ctypes.CDLL(None, use_errno=True)


def _stride_of(slot_bytes: int) -> int:
    """Bytes from slot to slot."""
    return -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES


class DramMedium(SlotMedium):
    """Slots in one anonymous mapping, each rounded up to 4 KiB so that direct I/O works straight from it.

    First touch of new memory is ten times slower than a copy; a background thread goes ahead of the first writes.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Params:
        capacity: Bytes
        """Size of the arena; resident memory stays within 2 % of it."""
        prefault: bool = True
        """Fault the arena in from the start, in the background."""

    def __init__(self, slots: int, slot_bytes: int, *, prefault: bool = True) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._stride = _stride_of(slot_bytes)
        self._arena = mmap.mmap(-1, slots * self._stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._arena.madvise(mmap.MADV_HUGEPAGE)
            except OSError as error:
                _log.info("no huge pages for the DRAM arena: %s", error)
        self._bytes = np.frombuffer(self._arena, np.uint8).reshape(slots, self._stride)
        self._views = memoryview(self._arena)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._prefault = threading.Thread(target=self._fault_in, name="kvtier-prefault", daemon=True)
        if prefault:
            self._prefault.start()

    @classmethod
    def open(cls, location: TierUrl, params: Params, context: MediumContext) -> DramMedium:
        stride = _stride_of(context.slot_bytes)
        slots = params.capacity // stride
        if slots < 1:
            raise CapacityError(
                f"{location}: capacity={rounded_bytes(params.capacity)} does not hold one block of {rounded_bytes(stride)}"
            )
        require_memory(params.capacity, str(location))
        return cls(slots, context.slot_bytes, prefault=params.prefault)

    def wait_prefaulted(self, timeout: float) -> bool:
        """Whether the whole arena is resident within ``timeout`` seconds."""
        if self._prefault.ident is not None:
            self._prefault.join(timeout)
        return not self._prefault.is_alive()

    def view(self, slot: int) -> memoryview:
        start = slot * self._stride
        return self._views[start : start + self._stride]

    def read(self, slots: Sequence[int], into: Sequence[Iovec]) -> list[Outcome]:
        outcomes = [scatter(self._bytes[slot], buffers) for slot, buffers in zip(slots, into, strict=True)]
        with self._lock:
            self.bytes_read += sum(outcome.nbytes for outcome in outcomes)
        return outcomes

    def write(self, slots: Sequence[int], data: Sequence[Iovec]) -> list[Outcome]:
        outcomes = [gather(buffers, self._bytes[slot]) for slot, buffers in zip(slots, data, strict=True)]
        with self._lock:
            self.bytes_written += sum(outcome.nbytes for outcome in outcomes)
        return outcomes

    def close(self) -> None:
        """Stops the prefault; the memory itself goes when the last view of it does."""
        self._closing.set()
        if self._prefault.ident is not None:
            self._prefault.join()

    def _fault_in(self) -> None:
        address, size = self._bytes.ctypes.data, self._bytes.nbytes
        for start in range(0, size, _PREFAULT_BYTES):
            if self._closing.is_set():
                return
            # ctypes lets the GIL go, mmap.madvise does not; the kernel faults pages in without changing what they hold.
            length = ctypes.c_size_t(min(_PREFAULT_BYTES, size - start))
            if _libc.madvise(ctypes.c_void_p(address + start), length, _MADV_POPULATE_WRITE):
                _log.info("this kernel cannot prefault the DRAM arena (errno %d): first writes pay", ctypes.get_errno())
                return
