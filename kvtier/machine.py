"""What this machine, or the container around this process, has left; what this process has, and how it keeps it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import CapacityError
from kvtier.quantity import Bytes, rounded_bytes

HEAPS = 2
"""Of the C library, for all threads of a process of ours: most of what they allocate is Python's, one at a time."""
_M_ARENA_MAX = -8
"""Of glibc's malloc.h."""
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Available:
    """An amount of memory and what sets it."""

    nbytes: Bytes
    where: str
    """``memory`` or the path of the cgroup whose limit is the tightest."""


def _meminfo(root: Path) -> int | None:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _reclaimable(stat: Path) -> int:
    """Page cache that the kernel gives back before it kills: counted as used by the cgroup, free to us."""
    try:
        rows = dict(line.split() for line in stat.read_text().splitlines())
        return int(rows.get("inactive_file", rows.get("total_inactive_file", 0)))
    except (OSError, ValueError):
        return 0


def _cgroups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """(folder, limit file, usage file) of this process's memory cgroup and each of its parents, versions 1 and 2."""
    try:
        rows = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for row in rows:
        if len(row) != 3 or not (row[1] == "" or "memory" in row[1].split(",")):
            continue
        unified = row[1] == ""
        top = root / ("sys/fs/cgroup" if unified else "sys/fs/cgroup/memory")
        names = ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        inside = top / row[2].lstrip("/")
        # In a container the path may be the host's: then only the mount's own root says something.
        for folder in [inside, *inside.parents]:
            yield folder, *names
            if folder == top:
                break


def available_memory(root: Path = Path("/")) -> Available:
    """Memory that this process may still take: the least of what the machine and each cgroup around it have left.

    ``root`` stands for ``/`` in tests. Where the kernel says nothing, 1 GiB is assumed.
    """
    machine = _meminfo(root)
    least = Available(Bytes(1 << 30 if machine is None else machine), "memory")
    for folder, limit_name, usage_name in _cgroups(root):
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is None:
            continue
        left = max(0, limit - max(0, (usage or 0) - _reclaimable(folder / "memory.stat")))
        if left < least.nbytes:
            least = Available(Bytes(left), str(folder / limit_name))
    return least


def require_memory(asked: int, what: str) -> None:
    """Raise ``CapacityError`` where ``asked`` bytes are more than this process may take; the message begins with ``what``."""
    available = available_memory()
    if asked > available.nbytes:
        raise CapacityError(
            f"{what}: asked for {rounded_bytes(asked)} of memory, "
            f"{rounded_bytes(available.nbytes)} are available ({available.where})"
        )


def resident_bytes() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def use_few_heaps() -> None:
    """Let glibc keep `HEAPS` heaps from now on, unless ``MALLOC_ARENA_MAX`` or ``GLIBC_TUNABLES`` says something else.

    By default each thread has one of its own, up to eight per core, and each grows to the most that its thread ever held at
    once. To be called before threads are started; does nothing with another C library.
    """
    mallopt = getattr(_libc, "mallopt", None)
    asked = "MALLOC_ARENA_MAX" in os.environ or "malloc.arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    if mallopt is not None and not asked:
        mallopt(_M_ARENA_MAX, HEAPS)


def give_back_memory() -> None:
    """Return what glibc has free to the kernel: after much was held for a moment. Does nothing with another C library."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
