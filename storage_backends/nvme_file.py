"""A file of equal slots that is read and written directly where the file system allows it, buffered where not."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvtier.abc.medium import Iovec, Outcome, Status
from kvtier.errors import DISK_FULL
from kvtier.storage_backends.iovec import total

_log = logging.getLogger(__name__)

PAGE_BYTES = 4096
_READ_AHEAD = 256
"""Header pages that the device is asked for before they are read: one at a time a scan takes five times as long."""
_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02
_libc = ctypes.CDLL(None, use_errno=True)


class SlotFile:
    """Slots of ``stride`` bytes, a multiple of 4 KiB. Thread-safe as far as callers keep to different slots."""

    def __init__(self, path: Path, stride: int, *, direct: bool = True) -> None:
        self.path = path
        self.stride = stride
        self._buffered = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._direct: int | None = None
        self._opened = [self._buffered]
        if direct and hasattr(os, "O_DIRECT"):
            try:
                self._direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
                self._opened.append(self._direct)
            except OSError as error:
                self._fall_back(error)

    @property
    def direct(self) -> bool:
        return self._direct is not None

    @property
    def slots(self) -> int:
        """Slots up to the end of the file, taken or not."""
        return -(-os.fstat(self._buffered).st_size // self.stride)

    @property
    def held_bytes(self) -> int:
        """What the file system counts."""
        return os.fstat(self._buffered).st_blocks * 512

    def take(self, first: int, count: int) -> None:
        """Have the file system set the room of ``count`` slots aside. Raises ``OSError`` (ENOSPC)."""
        start, size = first * self.stride, count * self.stride
        if not _fallocate(self._buffered, 0, start, size) and os.fstat(self._buffered).st_size < start + size:
            os.ftruncate(self._buffered, start + size)

    def give_back(self, first: int, count: int) -> bool:
        """Return the room of ``count`` slots; whether the file system can do that."""
        end = (first + count) * self.stride
        if end >= os.fstat(self._buffered).st_size:
            os.ftruncate(self._buffered, min(first * self.stride, os.fstat(self._buffered).st_size))
            return True
        return _fallocate(self._buffered, _KEEP_SIZE_PUNCH_HOLE, first * self.stride, count * self.stride)

    def read(self, slot: int, into: Iovec) -> Outcome:
        size, start = total(into), slot * self.stride
        if size > self.stride:
            return Outcome(Status.FAILED, 0, f"{size} bytes asked of a slot of {self.stride}")
        try:
            done = self._moved(os.preadv, into, start)
            while 0 < done < size:  # short: the rest buffered, where no alignment is asked for
                more = os.preadv(self._buffered, _after(into, done), start + done)
                if more == 0:
                    break
                done += more
        except OSError as error:
            return failed(error)
        return (
            Outcome(Status.DONE, done)
            if done == size
            else Outcome(Status.FAILED, done, "the file ends inside the slot")
        )

    def write(self, slot: int, data: Iovec) -> Outcome:
        size, start = total(data), slot * self.stride
        if size > self.stride:
            return Outcome(Status.FAILED, 0, f"{size} bytes do not fit a slot of {self.stride}")
        try:
            done = self._moved(os.pwritev, data, start)
            while done < size:
                more = os.pwritev(self._buffered, _after(data, done), start + done)
                if more == 0:
                    return Outcome(Status.FAILED, 0, f"only {done} of {size} bytes were taken")
                done += more
        except OSError as error:
            return failed(error)
        return Outcome(Status.DONE, size)

    def _moved(self, move: Callable[[int, Iovec, int], int], buffers: Iovec, start: int) -> int:
        direct = self._direct
        if direct is not None:
            try:
                return move(direct, buffers, start)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                if all(_address(buffer) % PAGE_BYTES == 0 == len(buffer) % PAGE_BYTES for buffer in buffers):
                    self._fall_back(error)  # else only these buffers are refused, not the file
        return move(self._buffered, buffers, start)

    def _fall_back(self, error: OSError) -> None:
        _log.warning(
            "direct I/O is refused on %s (errno %s: %s); its I/O is buffered from now on",
            self.path,
            error.errno,
            os.strerror(error.errno or 0),
        )
        self._direct = None  # its descriptor may be in use by another thread: closed with the rest

    def sync(self) -> None:
        os.fdatasync(self._buffered)

    def drop_page_cache(self) -> None:
        """Make the next buffered reads come from the device."""
        os.fdatasync(self._buffered)
        os.posix_fadvise(self._buffered, 0, 0, os.POSIX_FADV_DONTNEED)

    def used_slots(self) -> Iterator[int]:
        """Slots whose first page may hold something, ascending."""
        os.posix_fadvise(self._buffered, 0, 0, os.POSIX_FADV_RANDOM)
        slot, count, ahead = 0, self.slots, 0
        while slot < count:
            if slot >= ahead - _READ_AHEAD:
                first, ahead = max(slot, ahead), min(count, slot + 2 * _READ_AHEAD)
                for coming in range(first, ahead):
                    os.posix_fadvise(self._buffered, coming * self.stride, PAGE_BYTES, os.POSIX_FADV_WILLNEED)
            try:
                data = os.lseek(self._buffered, slot * self.stride, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole is left
                    return
                data = slot * self.stride
            slot = max(slot, data // self.stride)
            yield slot
            slot += 1

    def head(self, slot: int, nbytes: int) -> bytes:
        return os.pread(self._buffered, nbytes, slot * self.stride)

    def wipe(self, slot: int) -> None:
        """Make the slot's header page no header."""
        os.pwrite(self._buffered, bytes(PAGE_BYTES), slot * self.stride)

    def close(self) -> None:
        for descriptor in self._opened:
            os.close(descriptor)
        self._opened = []


def _fallocate(descriptor: int, mode: int, start: int, size: int) -> bool:
    """Whether the file system knows this; raises ``OSError`` where it does and cannot."""
    if _libc.fallocate(descriptor, mode, ctypes.c_int64(start), ctypes.c_int64(size)) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EOPNOTSUPP, errno.ENOSYS):
        return False
    raise OSError(number, os.strerror(number))


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def _after(buffers: Iovec, done: int) -> list[memoryview]:
    rest = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(0, done - len(buffer))
    return rest


def failed(error: OSError, what: str = "") -> Outcome:
    """What an error of the system means for one item; ``what`` begins the words."""
    full = error.errno in DISK_FULL
    return Outcome(Status.FULL if full else Status.FAILED, 0, f"{what}errno {error.errno}: {error.strerror}")
