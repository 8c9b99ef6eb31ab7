"""``fs:///mnt/shared/kvtier?capacity=2TiB&ttl=24h``: one file per block in a folder that many hosts share.

The folder is on NFS, Lustre or any POSIX file system. A block is ``ab/c/<hex of its address>.<generation>``, 0600, written
under a temporary name and renamed: readers see all of it or nothing. No process waits for another one: what two hosts could
disagree on is decided by the names of files (``fs_state``), and room is made where a block goes (``fs_space``).
A file that another host has removed is a miss. A hit renews the modification time, from which ``ttl`` counts.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvtier.abc.medium import Arrived, Iovec, KeyMedium, MediumContext, Outcome, Status
from kvtier.errors import DISK_FULL, ConfigError, MediumRefused, MediumUnavailable
from kvtier.key import Address
from kvtier.quantity import Bytes, Seconds
from kvtier.storage_backends.fs_audit import FolderAuditor
from kvtier.storage_backends.fs_files import (
    AWAY,
    GONE,
    create,
    fill,
    open_to_read,
    pour,
    remove,
    temporary_name,
    translated,
)
from kvtier.storage_backends.fs_space import NAME, TOPS, FolderSpace, NoRoom, leaf_of, leaves_below
from kvtier.storage_backends.fs_state import RECORDS, STATE, FolderState
from kvtier.url import TierUrl

_T = TypeVar("_T")
_LOOKERS = 8
_NAMES_PER_LOOKER = 64
_ROUND_S = 1800.0
"""Longest time in which all groups of folders are looked through for what has expired."""
_TRIES = 8
"""Times that a folder may be removed, as empty, between making it and making a file in it."""


class FsMedium(KeyMedium):
    """Files below one root. A call that finds the root gone, or silent for ``timeout``, raises ``MediumUnavailable``."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Params:
        capacity: Bytes
        """Most bytes of the folder, as its file system counts them, foreign files among them."""
        ttl: Seconds = Seconds(86400.0)
        """Life of a block after its last write or hit."""
        sync: bool = True
        """Wait until the device or server has a block before it becomes visible."""
        timeout: Seconds = Seconds(5.0)
        """Longest wait for a look at the folder, and for other writes into the same group of folders."""

        def __post_init__(self) -> None:
            if self.ttl <= 0 or self.timeout <= 0:
                raise ValueError("ttl and timeout must be more than 0")
            if self.capacity < 1 << 20:
                raise ValueError("capacity must be at least 1MiB")

    io = "buffered"

    def __init__(self, root: str, params: Params, *, make: bool = True) -> None:
        """``make``: the folder, where there is none yet."""
        self._root = root
        self._makes = make
        self._where = f"fs://{root}"
        self.ttl = params.ttl
        self._sync = params.sync
        self._timeout = params.timeout
        self._state = FolderState(root, sync=params.sync)
        self._space = FolderSpace(root, params.capacity, lambda: self.generation, params.timeout)
        self._lock = threading.Lock()
        self._lookers = ThreadPoolExecutor(_LOOKERS, thread_name_prefix="kvtier-fs")
        self._closed = threading.Event()
        self._sweeper: threading.Thread | None = None
        self._device: int | None = None
        self._folders: set[str] = set()

    @classmethod
    def open(cls, location: TierUrl, params: Params, context: MediumContext) -> FsMedium:
        return cls(_root(location), params, make=context.slot_bytes > 0)

    @classmethod
    def auditor(cls, location: TierUrl, params: Params) -> FolderAuditor:
        del params
        return FolderAuditor(_root(location))

    def close(self) -> None:
        self._closed.set()
        self._lookers.shutdown(wait=False, cancel_futures=True)
        if self._sweeper is not None:
            self._sweeper.join(self._timeout)

    def ping(self) -> None:
        self._looked(self._usable)

    def _usable(self) -> None:
        self._seen()
        if not os.access(f"{self._root}/{STATE}", os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            raise MediumRefused(
                f"{self._where} may not be read and written by user {os.geteuid()}: mount it so, or chown it"
            )

    # Looking: everything that has to answer in time goes through a few threads of our own, and is waited for.

    def _looked(self, look: Callable[[], _T]) -> _T:
        return self._answers([self._ask(look)], time.monotonic() + self._timeout)[0]

    def _ask(self, look: Callable[[], _T]) -> Future[_T]:
        try:
            return self._lookers.submit(look)
        except RuntimeError as error:  # closed, or the interpreter ends
            raise MediumUnavailable(f"{self._where} is closed") from error

    def _answers(self, asked: Sequence[Future[_T]], deadline: float) -> list[_T]:
        late = wait_for(asked, max(0.0, deadline - time.monotonic())).not_done
        for each in late:
            each.cancel()
        if late:
            raise MediumUnavailable(f"{self._where} has not answered for {self._timeout:g} s; is its server up?")
        with translated(self._where):
            return [each.result() for each in asked]

    def _seen(self) -> int:
        """The generation as of now, and the epochs' version with it. Makes the folders where there are none yet."""
        if self._closed.is_set():
            raise MediumUnavailable(f"{self._where} is closed")
        with translated(self._where):
            try:
                seen = self._state.look()
            except FileNotFoundError:
                if not self._makes:
                    raise MediumUnavailable(f"{self._where}: no folder of kvtier's is there; is it mounted?") from None
                self._make()
                seen = self._state.look()
            if seen.generation < self.generation:  # somebody has removed what says so; what was cleared stays so
                self._state.begin(self.generation)
        self._start()
        with self._lock:
            self.generation, self.epochs_version = max(self.generation, seen.generation), seen.version
            return self.generation

    def _make(self) -> None:
        """Make the root and what is in it, but nothing on another file system than before: that is a mount that is gone."""
        root = Path(self._root)
        device = (root if root.exists() else root.parent).stat().st_dev
        if self._device is not None and device != self._device:
            raise MediumUnavailable(f"{self._where} is on another file system than before; mount it again")
        for path in (root, root / STATE, root / RECORDS):
            with contextlib.suppress(FileExistsError):
                path.mkdir(0o700)
        self._device = root.stat().st_dev

    def _start(self) -> None:
        with self._lock:
            if self._device is None:
                self._device = Path(self._root).stat().st_dev
            if self._sweeper is None and not self._closed.is_set():
                self._sweeper = threading.Thread(target=self._sweep, name="kvtier-fs-sweep", daemon=True)
                self._sweeper.start()

    def _sweep(self) -> None:
        """Go round the groups for as long as the medium is open, one every now and then."""
        pause = min(self.ttl / 2, _ROUND_S) / TOPS
        while not self._closed.wait(pause):
            with contextlib.suppress(OSError):  # whatever it is, those who read and write meet it too
                for groups in self._space.occupied():
                    for number in groups:
                        self._space.tend(number, time.time() - self.ttl)
                        if self._closed.wait(pause / len(groups)):
                            return

    # Blocks.

    def probe(self, names: Sequence[Address]) -> int:
        deadline = time.monotonic() + self._timeout
        (generation,) = self._answers([self._ask(self._seen)], deadline)
        parts = [names[start : start + _NAMES_PER_LOOKER] for start in range(0, len(names), _NAMES_PER_LOOKER)]
        asked = [self._ask(partial(self._present, part, generation)) for part in parts]
        there = 0
        for part, found in zip(parts, self._answers(asked, deadline), strict=True):
            there += found
            if found < len(part):
                break
        return there

    def _present(self, names: Sequence[Address], generation: int) -> int:
        oldest = time.time() - self.ttl
        for index, name in enumerate(names):
            path = self._path(name, generation)
            if not self._real(path):
                return index
            try:
                status = os.lstat(path)
            except OSError as error:
                if error.errno in GONE:
                    return index
                raise
            if not stat.S_ISREG(status.st_mode) or status.st_mtime <= oldest:
                return index
        return len(names)

    def read(self, names: Sequence[Address], into: Sequence[Iovec], arrived: Arrived | None = None) -> list[Outcome]:
        generation = self._seen()
        outcomes = []
        for index, (name, buffers) in enumerate(zip(names, into, strict=True)):
            outcome = self._read(self._path(name, generation), buffers)
            if outcome.done and arrived is not None:
                outcome = arrived(index, outcome)
            outcomes.append(outcome)
        with self._lock:
            self.bytes_read += sum(outcome.nbytes for outcome in outcomes if outcome.done)
        return outcomes

    def _read(self, path: str, into: Iovec) -> Outcome:
        try:
            descriptor = self._opened(path)
            if descriptor is None:
                return Outcome(Status.ABSENT)
            try:
                size, room = os.fstat(descriptor).st_size, sum(each.nbytes for each in into)
                if size > room:
                    return Outcome(Status.FAILED, 0, f"a value of {size} bytes does not fit {room}")
                return Outcome(Status.DONE, fill(descriptor, into, size))
            finally:
                os.close(descriptor)
        except OSError as error:
            return self._failed(error)

    def _opened(self, path: str) -> int | None:
        """Descriptor of a block that is there, a file and not expired."""
        if not self._real(path):
            return None
        descriptor = open_to_read(path)
        if descriptor is None:
            return None
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_mtime > time.time() - self.ttl:
            return descriptor
        os.close(descriptor)
        return None

    def _failed(self, error: OSError) -> Outcome:
        """One item's failure; raised where it is the whole folder's."""
        if error.errno in GONE:
            return Outcome(Status.ABSENT)
        if error.errno in AWAY:
            with translated(self._where):
                raise error
        return Outcome(Status.FAILED, 0, f"{self._where}: {error.strerror}")

    def write(self, names: Sequence[Address], data: Sequence[Iovec]) -> list[Outcome]:
        generation = self._seen()
        outcomes = []
        for name, buffers in zip(names, data, strict=True):
            outcome = self._write(name, buffers, generation)
            with self._lock:
                self.bytes_written += outcome.nbytes
            outcomes.append(outcome)
        return outcomes

    def _write(self, name: Address, data: Iovec, generation: int) -> Outcome:
        nbytes = sum(each.nbytes for each in data)
        folder, final = os.path.split(self._path(name, generation))
        temporary = temporary_name()
        try:
            with self._space.room(leaf_of(name), final, temporary, nbytes):
                descriptor = self._created(folder, temporary)
                try:
                    try:
                        pour(descriptor, data)
                        if self._sync:
                            os.fsync(descriptor)
                    finally:
                        os.close(descriptor)
                    Path(f"{folder}/{temporary}").rename(f"{folder}/{final}")
                except BaseException:
                    with contextlib.suppress(OSError):
                        remove(f"{folder}/{temporary}")
                    raise
        except NoRoom as error:
            return Outcome(Status.FULL, 0, f"{self._where}: {error}")
        except OSError as error:
            if error.errno is None or error.errno in DISK_FULL | AWAY:
                with translated(self._where):
                    raise
            return Outcome(Status.FAILED, 0, f"{self._where}: {error.strerror}")
        return Outcome(Status.DONE, nbytes)

    def _created(self, folder: str, temporary: str) -> int:
        path = f"{folder}/{temporary}"
        for _ in range(_TRIES):
            try:
                if self._real(path):
                    return create(path)
                for each in (Path(folder).parent, Path(folder)):
                    with contextlib.suppress(FileExistsError):
                        each.mkdir(0o700)
                if not self._real(path):
                    raise NotADirectoryError(20, f"a link or a file lies at {folder}")
            except FileNotFoundError:
                self._folders.discard(folder)
                Path(self._root).stat()
        raise FileNotFoundError(2, f"{folder} is removed as often as it is made")

    def _real(self, path: str) -> bool:
        """Whether the two folders above a block are folders, and no links. Looked at once: only we may write there."""
        folder = path.rpartition("/")[0]
        if folder not in self._folders:
            try:
                for each in (folder.rpartition("/")[0], folder):
                    if not stat.S_ISDIR(os.lstat(each).st_mode):
                        return False
            except OSError as error:
                if error.errno in GONE:
                    return False
                raise
            self._folders.add(folder)
        return True

    def _path(self, name: Address, generation: int) -> str:
        text = name.hex()
        return f"{self._root}/{text[:2]}/{text[2]}/{text}.{generation}"

    def touch(self, names: Sequence[Address]) -> None:
        self._each(names, lambda path: os.utime(path, follow_symlinks=False))

    def delete(self, names: Sequence[Address]) -> None:
        self._each(names, remove)

    def _each(self, names: Sequence[Address], act: Callable[[str], object]) -> None:
        generation = self._seen()
        with translated(self._where):
            for name in names:
                path = self._path(name, generation)
                try:
                    if self._real(path):
                        act(path)
                except OSError as error:
                    if error.errno not in GONE:
                        raise

    def scan(self) -> Iterator[Address]:
        generation, oldest = self._seen(), time.time() - self.ttl
        for path, name, written in self._blocks():
            if written == generation:
                with contextlib.suppress(FileNotFoundError):
                    if os.lstat(path).st_mtime > oldest:
                        yield name

    def _blocks(self) -> Iterator[tuple[str, Address, int]]:
        """Path, name and generation of every block, a folder at a time."""
        for folders in leaves_below(self._root):
            for path in folders:
                for name in self._listed(path):
                    if (found := NAME.fullmatch(name)) and name.startswith(path[-4:].replace("/", "")):
                        yield f"{path}/{name}", Address(bytes.fromhex(found[1])), int(found[2])

    def _listed(self, path: str) -> list[str]:
        try:
            with os.scandir(path) as entries:
                return sorted(entry.name for entry in entries)
        except OSError as error:
            if error.errno in GONE:
                return []
            with translated(self._where):
                raise

    def heads(self, names: Sequence[Address], nbytes: int) -> list[bytes]:
        generation = self._seen()
        with translated(self._where):
            return [self._head(self._path(name, generation), nbytes) for name in names]

    def _head(self, path: str, nbytes: int) -> bytes:
        descriptor = self._opened(path)
        if descriptor is None:
            return b""
        try:
            return os.pread(descriptor, nbytes, 0)
        finally:
            os.close(descriptor)

    # What has been cleared, and the records.

    def clear(self) -> None:
        with self._changing():
            generation = self._state.clear()
            with self._lock:
                self.generation = max(self.generation, generation)

    def reclaim(self) -> int:
        generation = self._seen()
        with translated(self._where):
            return sum(written < generation and remove(path) for path, _name, written in self._blocks())

    def epochs(self) -> dict[str, int]:
        self._seen()
        with translated(self._where):
            return self._state.epochs()

    def raise_epochs(self, wanted: Mapping[str, int], implied: Mapping[str, int]) -> None:
        with self._changing():
            self._state.raise_epochs(wanted, implied)

    def remember(self, kind: str, digest: bytes, text: str) -> None:
        with self._changing():
            self._state.remember(kind, digest, text)

    def records(self, kind: str) -> dict[bytes, str]:
        self._seen()
        with translated(self._where):
            return self._state.records(kind)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        self._seen()
        with translated(self._where):
            yield
        self._space.changed()


def _root(location: TierUrl) -> str:
    root = os.path.normpath(location.path) if location.path else ""
    if location.host or not root.strip("/"):
        raise ConfigError(f"{location}: name a folder, with three slashes: fs:///mnt/shared/kvtier")
    return root
