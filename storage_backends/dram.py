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
from kvtier.errors import CapacityError, ConfigError, MediumError
from kvtier.machine import require_memory
from kvtier.quantity import Bytes, rounded_bytes
from kvtier.storage_backends import cuda_copy
from kvtier.storage_backends.iovec import gather, scatter
from kvtier.url import TierUrl

_log = logging.getLogger(__name__)

PAGE_BYTES = 4096
_MADV_POPULATE_WRITE = 23
_PREFAULT_BYTES = 32 << 20
"""Faulted in per system call: some 30 ms, so that closing does not wait."""
_PIN_BYTES = 128 << 20
"""Page-locked per call: few calls, and closing waits for one of them at most."""
_libc = ctypes.CDLL(None, use_errno=True)


def _stride_of(slot_bytes: int) -> int:
    """Bytes from slot to slot."""
    return -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES


class DramMedium(SlotMedium):
    """Slots in one anonymous mapping, each rounded up to 4 KiB so that direct I/O works straight from it.

    First touch of new memory is ten times slower than a copy; a background thread goes ahead of the first writes. Where there
    is a CUDA device it page-locks the memory as it goes: the store serves meanwhile, by slower copies.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Params:
        capacity: Bytes
        """Size of the arena; resident memory stays within 2 % of it."""
        prefault: bool = True
        """Fault the arena in from the start, in the background."""
        pin: bool = True
        """Page-lock what has been faulted in, where there is a CUDA device to copy from and to."""

    def __init__(self, slots: int, slot_bytes: int, *, prefault: bool = True, pin: bool = False) -> None:
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
        self._pinned: list[int] = []
        self._prefault = threading.Thread(target=self._fault_in, args=(pin,), name="kvtier-prefault", daemon=True)
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
        return cls(slots, context.slot_bytes, prefault=params.prefault, pin=params.pin)

    def wait_prefaulted(self, timeout: float) -> bool:
        """Whether the whole arena is resident, and page-locked where it is to be, within ``timeout`` seconds."""
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
        """Stops the prefault and unlocks pages; the memory itself goes when the last view of it does."""
        self._closing.set()
        if self._prefault.ident is not None:
            self._prefault.join()
        while self._pinned:
            try:
                cuda_copy.pinned.unpin(self._pinned.pop())
            except MediumError as error:
                _log.warning("a part of the DRAM arena stays page-locked: %s", error)

    def _fault_in(self, pin: bool) -> None:
        if pin and not cuda_copy.device_count():
            _log.debug("the DRAM arena is not page-locked: no CUDA device is in use")
            pin = False
        address, size = self._bytes.ctypes.data, self._bytes.nbytes
        # Whole slots, because a copy must not reach from a page-locked range into another one.
        part = max(1, (_PIN_BYTES if pin else _PREFAULT_BYTES) // self._stride) * self._stride
        faults = True
        for start in range(0, size, part):
            if self._closing.is_set():
                return
            length = min(part, size - start)
            # ctypes lets the GIL go, mmap.madvise does not; the kernel faults pages in without changing what they hold.
            where = ctypes.c_void_p(address + start), ctypes.c_size_t(length)
            if faults and _libc.madvise(*where, _MADV_POPULATE_WRITE):
                _log.info("this kernel cannot prefault the DRAM arena (errno %d): first writes pay", ctypes.get_errno())
                faults = False
            if pin:
                pin = self._pin(address + start, length)
            if not (faults or pin):
                return

    def _pin(self, address: int, nbytes: int) -> bool:
        try:
            cuda_copy.pinned.pin(address, nbytes)
        except (ConfigError, MediumError) as error:
            _log.warning(
                "the DRAM arena is page-locked up to %s of %s; copies beyond are slower: %s",
                rounded_bytes(address - self._bytes.ctypes.data),
                rounded_bytes(self._bytes.nbytes),
                error,
            )
            return False
        self._pinned.append(address)
        return True
