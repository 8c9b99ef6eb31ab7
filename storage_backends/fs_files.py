"""Files of a shared folder: made whole under a temporary name, read straight into buffers, errors in words."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from kvtier.abc.medium import Iovec
from kvtier.errors import DISK_FULL, MediumError, MediumFull, MediumRefused, MediumUnavailable

TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.kvtier\.tmp", re.ASCII)
"""A file that is being written. Not whoever is named in it, but its age tells whether its writer is dead."""
GONE = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENXIO}
)
"""What one file's absence looks like: removed by another host, or a link, folder or foreign file in its place."""
AWAY = frozenset(
    {
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ESHUTDOWN,
        errno.ENODEV,
        errno.ECONNRESET,
    }
)
"""What a mount whose server does not answer says of every file."""
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP})
_BUFFERS_PER_CALL = 1024
"""IOV_MAX of Linux."""


@contextlib.contextmanager
def translated(where: str) -> Iterator[None]:
    """Turn an ``OSError`` raised inside into the ``MediumError`` that it means for the whole folder."""
    try:
        yield
    except OSError as error:
        text = f"{where}: {error.strerror or error}"
        if error.errno in DISK_FULL:
            raise MediumFull(f"{text}; make room there, raise the quota, or lower capacity") from error
        if error.errno in _REFUSED:
            raise MediumRefused(f"{text}; it must be writable for this user, and no link") from error
        if error.errno in GONE | AWAY | {errno.EIO}:
            raise MediumUnavailable(f"{text}; is it mounted?") from error
        raise MediumError(text) from error


def temporary_name() -> str:
    return f".{secrets.token_hex(8)}.kvtier.tmp"


def create(path: str) -> int:
    """Descriptor of a file that was not there, mode 0600."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def open_to_read(path: str) -> int | None:
    """Descriptor of a file, never through a link; None where it is gone. Does not wait where a pipe lies in its place."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in GONE:
            return None
        raise


def put(folder: str, name: str, content: bytes, *, sync: bool) -> None:
    """Put a small file in place whole. Its time is ours to the nanosecond: a file system's clock may tick in milliseconds."""
    path = f"{folder}/{temporary_name()}"
    descriptor = create(path)
    try:
        try:
            pour(descriptor, [memoryview(content)])
            now = time.time_ns()
            os.utime(descriptor, ns=(now, now))
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        Path(path).rename(f"{folder}/{name}")
    except BaseException:
        remove(path)
        raise
    if sync:
        sync_folder(folder)


def sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def content_of(path: str, most: int) -> bytes | None:
    """A small file's content; None where it is absent, or longer than ``most``."""
    descriptor = open_to_read(path)
    if descriptor is None:
        return None
    try:
        content = os.pread(descriptor, most + 1, 0)
    finally:
        os.close(descriptor)
    return content if len(content) <= most else None


def remove(path: str) -> bool:
    """Remove a file; whether it was there and ours to remove."""
    try:
        Path(path).unlink()
    except OSError as error:
        if error.errno in GONE:
            return False
        raise
    return True


def pour(descriptor: int, data: Iovec) -> None:
    """Write all buffers, end to end, from the start of a file."""
    rest, done = [each for each in data if each.nbytes], 0
    while rest:
        moved = os.pwritev(descriptor, rest[:_BUFFERS_PER_CALL], done)
        done += moved
        rest = _after(rest, moved)


def fill(descriptor: int, into: Iovec, nbytes: int) -> int:
    """Read the first ``nbytes`` of a file into buffers that have room for them; how many came before its end."""
    rest, done = _first(into, nbytes), 0
    while rest:
        moved = os.preadv(descriptor, rest[:_BUFFERS_PER_CALL], done)
        if moved == 0:
            break
        done += moved
        rest = _after(rest, moved)
    return done


def _first(buffers: Iovec, nbytes: int) -> list[memoryview]:
    first = []
    for each in buffers:
        if nbytes and each.nbytes:
            first.append(each[:nbytes])
            nbytes -= first[-1].nbytes
    return first


def _after(buffers: list[memoryview], nbytes: int) -> list[memoryview]:
    for index, each in enumerate(buffers):
        if nbytes < each.nbytes:
            return [each[nbytes:], *buffers[index + 1 :]]
        nbytes -= each.nbytes
    return []
