"""How many bytes of a shared folder are taken, and which blocks go to make room: no ledger, no lock between hosts.

Blocks lie in 256 x 16 folders by the first digits of their names, which are evenly spread. Neighbouring folders form
*groups*, each with an equal part of the capacity and some hundred blocks, as a set-associative cache has sets. Whoever
writes a block looks through the folders of its group alone, removes what was used longest ago there, and writes. So every
host sees what all others have written, and a write costs a bounded listing however large the whole is.

A folder is listed again only where its modification time says that something came or went, and a file's size is asked for
once. Two changes may share one tick of that clock: a listing made within a tick of a change is not trusted.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.storage_backends.fs_files import GONE, TEMPORARY, remove

NAME = re.compile(r"([0-9a-f]{80})\.(\d{1,18})", re.ASCII)
"""A block: its address, and the generation it was written in."""
TOPS = 256
"""Folders in the root, two hex digits each."""
LEAVES = TOPS * 16
"""Folders in those, one more digit each: where the blocks are."""
_TOP = re.compile(r"[0-9a-f]{2}", re.ASCII)
_LEAF = re.compile(r"[0-9a-f]", re.ASCII)
STALE_S = 900.0
"""A temporary file that has not grown for so long has a dead writer."""
_SECTOR = 512
GROUP_BYTES = 256 << 20
"""Least part of the capacity that a group has: some hundred blocks."""
_SLACK_PAGES = 4
"""A write may add two folders, let one grow, and need a page for its extents."""
_OUTSIDE_S = 30.0
_OUTSIDE_MOST = 16384
_TICK_S = 0.02
_MOST_REMEMBERED = 1 << 16
_AHEAD_PART = 64
"""Removing goes on for this part more, so that not every write has to look for what is oldest."""
_FOLDERS_PART = 8
"""Empty folders are removed where they take more than this part of what their group may."""


class NoRoom(Exception):
    """A block does not fit, whatever is removed."""


@dataclass(frozen=True, slots=True)
class _File:
    taken: int
    """Bytes, as the file system counts them."""
    used: int
    """Nanoseconds; a lower bound, for others may have touched it since."""


@dataclass(slots=True)
class _Folder:
    taken: int = 0
    """Bytes of the folder itself."""
    modified: int = -1
    seen_at: float = 0.0
    """When this modification time was first seen, monotonic."""
    listed_at: float = 0.0
    files: dict[str, _File] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Group:
    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    promised: int = 0
    """Bytes that writes under way may yet take."""
    writing: set[str] = field(default_factory=set)
    """Their temporary files, which are not counted a second time."""
    folders: dict[str, _Folder] = field(default_factory=dict)
    counted: int = 0
    """Its share of what all groups remember."""

    @property
    def size(self) -> int:
        return sum(len(folder.files) + 1 for folder in self.folders.values())


class FolderSpace:
    """Room below one root. Any thread; raises ``OSError`` (``TimeoutError`` where a group is held too long) and ``NoRoom``."""

    def __init__(self, root: str, capacity: int, generation: Callable[[], int], timeout: float) -> None:
        self._root = root
        self._capacity = capacity
        self._generation = generation
        self._timeout = timeout
        most = max(1, min(LEAVES, capacity // GROUP_BYTES))
        self.groups = 1 << (most.bit_length() - 1)
        """From capacity alone, so that all who share a folder divide it alike, whatever the size of their blocks."""
        self._lock = threading.Lock()
        self._known: OrderedDict[int, _Group] = OrderedDict()
        self._remembered = 0
        self._page = 0
        self._outside_lock = threading.Lock()
        self._outside = 0
        self._outside_until = 0.0

    @contextlib.contextmanager
    def room(self, leaf: int, final: str, temporary: str, nbytes: int) -> Iterator[None]:
        """Room for one file of ``nbytes``, promised while it is written. Raises ``NoRoom``."""
        with self._entered(leaf * self.groups // LEAVES) as group:
            wanted = self._pages(nbytes)
            with self._held(group):
                excess = self._excess(group, leaf * self.groups // LEAVES) + wanted
                if excess > 0 and (excess := self._evict(group, excess)) > 0:
                    raise NoRoom(self._why(nbytes))
                group.promised += wanted
                group.writing.add(temporary)
            try:
                yield
            finally:
                with group.lock:
                    group.promised -= wanted
                    group.writing.discard(temporary)
                    for folder in group.folders.values():
                        if folder.files.pop(final, None) is not None:  # its size may be another one now
                            folder.modified = -1

    def changed(self) -> None:
        """Something beside the blocks was written: count it again at the next write."""
        self._outside_until = 0.0

    def tend(self, number: int, expired_before: float) -> None:
        """Look through one group: remove what has expired and what dead writers left, then what is over capacity."""
        with self._entered(number) as group, self._held(group):
            excess = self._excess(group, number)
            for path, folder in group.folders.items():
                for name, file in list(folder.files.items()):
                    oldest = expired_before if NAME.fullmatch(name) else time.time() - STALE_S
                    if file.used < oldest * 1e9 and (NAME.fullmatch(name) or TEMPORARY.fullmatch(name)):
                        used = _used(f"{path}/{name}")
                        if used is not None and used < oldest * 1e9 and remove(f"{path}/{name}"):
                            excess -= folder.files.pop(name).taken
            if excess > 0:
                self._evict(group, excess)

    @contextlib.contextmanager
    def _entered(self, number: int) -> Iterator[_Group]:
        with self._lock:
            group = self._known.setdefault(number, _Group())
            self._known.move_to_end(number)
            group.users += 1
        try:
            yield group
        finally:
            with self._lock:
                group.users -= 1
                self._remembered += group.size - group.counted
                group.counted = group.size
                for key, idle in list(self._known.items()) if self._remembered > _MOST_REMEMBERED else ():
                    if idle.users == 0:
                        self._remembered -= self._known.pop(key).counted
                    if self._remembered <= _MOST_REMEMBERED * 3 // 4:
                        break

    @contextlib.contextmanager
    def _held(self, group: _Group) -> Iterator[None]:
        if not group.lock.acquire(timeout=self._timeout):
            raise TimeoutError
        try:
            yield
        finally:
            group.lock.release()

    def _pages(self, nbytes: int) -> int:
        if not self._page:
            self._page = max(4096, os.statvfs(self._root).f_frsize)
        return (-(-nbytes // self._page) + _SLACK_PAGES) * self._page

    def _why(self, nbytes: int) -> str:
        return (
            f"no room for {nbytes} bytes: capacity leaves {self._part()} to each of {self.groups} groups of folders, "
            f"after {self._outside} for what is not kvtier's blocks; raise capacity or remove foreign files"
        )

    def _excess(self, group: _Group, number: int) -> int:
        """Bytes that a group has above its part of the capacity, by a look at its folders."""
        self._survey(group, number)
        taken = sum(
            folder.taken + sum(file.taken for file in folder.files.values()) for folder in group.folders.values()
        )
        return taken + group.promised - self._part()

    def _survey(self, group: _Group, number: int) -> None:
        first, last = number * LEAVES // self.groups, (number + 1) * LEAVES // self.groups - 1
        there = dict[str, _Folder]()
        for top in range(first >> 4, (last >> 4) + 1):
            path = f"{self._root}/{top:02x}"
            folder = self._listed(group, path, there)
            if folder is not None:
                for name in folder.folders:
                    if first <= int(f"{top:02x}{name}", 16) <= last:
                        self._listed(group, f"{path}/{name}", there)
        group.folders = there

    def _listed(self, group: _Group, path: str, there: dict[str, _Folder]) -> _Folder | None:
        """The folder as it is now, put into ``there``; None where it is absent, or no folder."""
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
        if not stat.S_ISDIR(status.st_mode):
            return None
        folder = there[path] = group.folders.get(path) or _Folder()
        folder.taken = status.st_blocks * _SECTOR
        now = time.monotonic()
        changed = status.st_mtime_ns != folder.modified
        if changed:
            folder.modified, folder.seen_at = status.st_mtime_ns, now
        if changed or folder.listed_at - folder.seen_at < _TICK_S:
            folder.listed_at = now
            self._list(path, folder, group.writing)
        return folder

    def _list(self, path: str, folder: _Folder, writing: set[str]) -> None:
        files, folders = dict[str, _File](), list[str]()
        with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
            for entry in entries:
                file = folder.files.get(entry.name)
                if entry.name in writing:
                    continue
                if file is None or not NAME.fullmatch(entry.name):
                    try:
                        if _LEAF.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                            folders.append(entry.name)
                            continue
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    file = _File(status.st_blocks * _SECTOR, status.st_mtime_ns)
                files[entry.name] = file
        folder.files, folder.folders = files, folders

    def _evict(self, group: _Group, excess: int) -> int:
        """Remove what was used longest ago, hidden generations first, until ``excess`` is gone; what is left of it."""
        excess -= self._remove_empty(group)
        ahead = self._part() // _AHEAD_PART
        live = self._generation()
        heap = [
            (int(found[2]) >= live, file.used, path, name)
            for path, folder in group.folders.items()
            for name, file in folder.files.items()
            if (found := NAME.fullmatch(name))
        ]
        heapq.heapify(heap)
        excess += ahead if excess > 0 else 0
        while excess > 0 and heap:
            lives, used, path, name = heapq.heappop(heap)
            now = _used(f"{path}/{name}")
            if now is not None and now > used:  # touched since it was listed
                heapq.heappush(heap, (lives, now, path, name))
                continue
            if not remove(f"{path}/{name}") and now is not None and _used(f"{path}/{name}") is not None:
                continue  # it may not be removed
            excess -= group.folders[path].files.pop(name).taken
        return excess - ahead

    def _remove_empty(self, group: _Group) -> int:
        """Remove folders without files where they take much of the group's part (it costs milliseconds each); the bytes."""
        empty = {
            path: folder.taken for path, folder in group.folders.items() if not folder.files and not folder.folders
        }
        freed = 0
        if sum(empty.values()) > self._part() // _FOLDERS_PART:
            for path, taken in empty.items():
                with contextlib.suppress(OSError):  # another host has just put something there
                    Path(path).rmdir()
                    freed += taken
        return freed

    def _part(self) -> int:
        """Bytes that each group may take."""
        return (self._capacity - self._beside()) // self.groups

    def _beside(self) -> int:
        """Bytes of everything but the blocks and their folders: state, records, foreign files. Counted every half minute."""
        with self._outside_lock:
            if time.monotonic() >= self._outside_until:
                self._outside_until = time.monotonic() + _OUTSIDE_S
                self._outside = self._counted_beside() + _SLACK_PAGES * self._pages(0)
            return self._outside

    def _counted_beside(self) -> int:
        taken, waiting, left = Path(self._root).stat().st_blocks * _SECTOR, [self._root], _OUTSIDE_MOST
        while waiting and left > 0:
            folder = waiting.pop()
            with contextlib.suppress(OSError), os.scandir(folder) as entries:  # foreign folders may be closed to us
                for entry in itertools.islice(entries, left):
                    left -= 1
                    is_folder = entry.is_dir(follow_symlinks=False)
                    if not (is_folder and folder == self._root and _TOP.fullmatch(entry.name)):
                        taken += entry.stat(follow_symlinks=False).st_blocks * _SECTOR
                        waiting += [entry.path] * is_folder
        return taken

    def occupied(self) -> Iterator[list[int]]:
        """The groups that have folders, those of one upper folder at a time. None comes twice in a row."""
        last = -1
        for folders in leaves_below(self._root):
            leaves = [int(path[-4:].replace("/", ""), 16) for path in folders]
            groups = sorted({leaf * self.groups // LEAVES for leaf in leaves} - {last})
            last = groups[-1] if groups else last
            yield groups


def leaf_of(name: bytes) -> int:
    """Which of the leaves a block lies in."""
    return int.from_bytes(name[:2], "big") >> 4


def leaves_below(root: str) -> Iterator[list[str]]:
    """Paths of the folders of blocks, those of one upper folder at a time."""
    for top in _folders(root, _TOP):
        yield _folders(top, _LEAF)


def _folders(path: str, named: re.Pattern[str]) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(
                each.path for each in entries if named.fullmatch(each.name) and each.is_dir(follow_symlinks=False)
            )
    except FileNotFoundError:
        return []


def _used(path: str) -> int | None:
    try:
        return os.lstat(path).st_mtime_ns
    except OSError as error:
        if error.errno in GONE:
            return None
        raise
