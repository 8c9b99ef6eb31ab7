"""The directory of an NVMe tier: whose it is, what belongs in it, and what its files are called."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.storage_backends.nvme_file import PAGE_BYTES
from kvtier.storage_backends.nvme_journal import EPOCHS_COPY

DATABASE = "index.sqlite"
_LOCK = "lock"
_NOT_SLOTS = {
    _LOCK,
    "lost+found",
    EPOCHS_COPY,
    f"{EPOCHS_COPY.partition('.')[0]}.new",
    *(f"{DATABASE}{end}" for end in ("", "-wal", "-shm", "-journal")),
}
TRIAL = ".kvtier-bench-"
"""A folder whose name begins with this is a measurement's, which removes it; nobody minds it meanwhile."""
SHARE = "give each engine a directory of its own, or stop that process first"


def file_name(stride: int) -> str:
    """Of the slots of one size class."""
    return f"slots-{stride}.kvt"


def stride_of(name: str) -> int | None:
    """The size class whose slots are in a file of that name; None where it is no slot file."""
    digits = name.removeprefix("slots-").removesuffix(".kvt")
    stride = int(digits) if digits.isdecimal() and digits.isascii() else 0
    return stride if stride > PAGE_BYTES and stride % PAGE_BYTES == 0 and name == file_name(stride) else None


def foreign_names(directory: Path) -> list[str]:
    """Names of whatever is in the directory and is not ours, sorted."""
    return sorted(
        name
        for name in (entry.name for entry in directory.iterdir())
        if name not in _NOT_SLOTS and stride_of(name) is None and not name.startswith(TRIAL)
    )


def used(directory: Path) -> bool:
    """Whether a tier has been there: it leaves an index, and mostly slots."""
    ours = (DATABASE, EPOCHS_COPY)
    return directory.is_dir() and any(
        entry.name in ours or stride_of(entry.name) is not None for entry in directory.iterdir()
    )


def nothing_ours(directory: Path) -> bool:
    """Whether it has other people's files, and no tier was ever here."""
    return bool(foreign_names(directory)) and not used(directory)


def locked(directory: Path, advice: str = SHARE) -> int:
    """The directory's lock, held until it is closed. Raises ``ConfigError`` that names who has it, and ``advice``."""
    try:
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"nvme tier {directory}: cannot open its lock: {error.strerror}; is it this user's?"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise ConfigError(f"nvme tier {directory}: process {holder} is using it; {advice}") from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def fullest_payload(directory: Path) -> int:
    """Payload bytes of the size class that has the most on the disk; one page where there is none."""
    files = directory.iterdir() if directory.is_dir() else ()
    held = [(path.stat().st_blocks, stride) for path in files if (stride := stride_of(path.name)) is not None]
    return max(held)[1] - PAGE_BYTES if held else PAGE_BYTES


def taken(directory: Path, advice: str = SHARE) -> int:
    """Make the directory where it is not there, and lock it. Refuses one that holds other people's files."""
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"nvme://{directory}: is a file; give it a directory of its own")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    foreign = foreign_names(directory)
    if foreign:
        raise ConfigError(
            f"nvme tier {directory}: holds what is not kvtier's ({foreign[0]}); give it a directory of its own"
        )
    directory.chmod(0o700)
    return locked(directory, advice)


def held_bytes(directory: Path) -> int:
    """What the file system counts in the directory, now. A file that goes meanwhile has no bytes."""
    count = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                count += entry.stat(follow_symlinks=False).st_blocks * 512
    return count
