"""What has been cleared in a shared folder, and its records: small files, one value each, that no lock guards.

A generation and an epoch are the *names* of empty or tiny files: to raise one is to add a file, the highest counts, and
lower ones are removed once it is there. So writers on any number of hosts need no lock, and a reader lists one small
folder (whose listing NFS makes afresh with each opening of it).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from kvtier.abc.medium import MOST_RECORDS, RECORD_BYTES
from kvtier.storage_backends.fs_files import content_of, create, put, remove, sync_folder

STATE = "state"
RECORDS = "records"
_GENERATION = re.compile(r"generation\.(\d{1,18})", re.ASCII)
_EPOCH = re.compile(r"epoch\.([0-9a-f]{32})\.(\d{1,18})", re.ASCII)
_RECORD = re.compile(r"(?:[0-9a-f]{2}){1,100}", re.ASCII)
_MOST = (1 << 32) - 1
"""Highest generation and epoch: a file that says more is none of ours, and passed by."""
_ONE_CALL = 128
"""Names that one ``getdents`` lists for sure: under the folder's lock, and so as of one moment."""
_LISTINGS = 8


class Seen(NamedTuple):
    """The state of a folder as of one listing."""

    generation: int
    epochs: Mapping[str, int]
    """Digest of a name to its epoch, the highest of those listed."""

    @property
    def version(self) -> bytes:
        """Another value with each change of the epochs; empty where there are none."""
        if not self.epochs:
            return b""
        text = " ".join(f"{name}={epoch}" for name, epoch in sorted(self.epochs.items()))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


class FolderState:
    """Generation, epochs and records below one root. Any thread; raises ``OSError``."""

    def __init__(self, root: str, *, sync: bool) -> None:
        self._root = root
        self._folder = f"{root}/{STATE}"
        self._sync = sync
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}

    def look(self) -> Seen:
        generation, epochs = 0, dict[str, int]()
        for name in self._listed():
            if (found := _EPOCH.fullmatch(name)) and int(found[2]) <= _MOST:
                epochs[found[1]] = max(int(found[2]), epochs.get(found[1], 0))
            elif (found := _GENERATION.fullmatch(name)) and int(found[1]) <= _MOST:
                generation = max(int(found[1]), generation)
        return Seen(generation, epochs)

    def _listed(self) -> list[str]:
        names = _names_in(self._folder)
        for _ in range(_LISTINGS):
            if len(names) <= _ONE_CALL:
                break
            before, names = names, _names_in(self._folder)
            if before == names:
                break
        return names

    def clear(self) -> int:
        """Begin the next generation; which it is."""
        generation = self.look().generation + 1
        while generation <= _MOST and not self.begin(generation):  # another host has cleared meanwhile
            generation += 1
        if generation > _MOST:
            raise OSError(None, "no generation is left: all 2^32 are used")
        return generation

    def begin(self, generation: int) -> bool:
        """Begin a generation; whether nobody else had."""
        try:
            os.close(create(f"{self._folder}/generation.{generation}"))
        except FileExistsError:
            return False
        if self._sync:
            sync_folder(self._folder)
        self._remove(_GENERATION, {"": generation - 1})
        return True

    def epochs(self) -> dict[str, int]:
        for _ in range(_LISTINGS):
            seen = self.look().epochs
            names = {digest: self._name(digest, epoch) for digest, epoch in seen.items()}
            if None not in names.values():
                return {name: seen[digest] for digest, name in names.items() if name is not None}
        raise OSError(None, f"{self._folder} changes faster than it can be read")

    def _name(self, digest: str, epoch: int) -> str | None:
        with self._lock:
            known = self._names.get(digest)
        if known is None:
            content = content_of(f"{self._folder}/epoch.{digest}.{epoch}", RECORD_BYTES)
            if content is None:  # raised or dropped meanwhile
                return None
            known = content.decode("utf-8", "replace")
            with self._lock:
                self._names[digest] = known
        return known

    def raise_epochs(self, wanted: Mapping[str, int], implied: Mapping[str, int]) -> None:
        now = self.look().epochs
        lower = dict[str, int]()
        for name, epoch in wanted.items():
            digest = _digest(name)
            if epoch > now.get(digest, -1):
                put(self._folder, f"epoch.{digest}.{epoch}", name.encode(), sync=self._sync)
            lower[digest] = max(epoch, now.get(digest, -1)) - 1
        for name, epoch in implied.items():
            lower[_digest(name)] = epoch
        self._remove(_EPOCH, lower)
        with self._lock:
            for name in implied:
                self._names.pop(_digest(name), None)

    def _remove(self, pattern: re.Pattern[str], highest: Mapping[str, int]) -> None:
        """Remove the files of each thing whose value is at most what is given for it."""
        for name in _names_in(self._folder):
            found = pattern.fullmatch(name)
            if found is not None:
                *thing, value = found.groups()
                if int(value) <= highest.get("".join(thing), -1):
                    remove(f"{self._folder}/{name}")

    def remember(self, kind: str, digest: bytes, text: str) -> None:
        folder, content = self._records(kind), text.encode()
        with contextlib.suppress(FileExistsError):
            Path(folder).mkdir(0o700)
        path = f"{folder}/{digest.hex()}"
        if content_of(path, RECORD_BYTES) == content:
            now = time.time_ns()
            os.utime(path, ns=(now, now), follow_symlinks=False)
        else:
            put(folder, digest.hex(), content, sync=False)  # losing it loses an explanation
        ours = [name for name in _names_in(folder) if _RECORD.fullmatch(name)]
        if len(ours) > MOST_RECORDS:
            for name in sorted(ours, key=lambda name: _modified(f"{folder}/{name}"))[: len(ours) - MOST_RECORDS]:
                remove(f"{folder}/{name}")

    def records(self, kind: str) -> dict[bytes, str]:
        folder = self._records(kind)
        try:
            ours = [name for name in _names_in(folder) if _RECORD.fullmatch(name)]
        except FileNotFoundError:
            return {}
        contents = {name: content_of(f"{folder}/{name}", RECORD_BYTES) for name in ours}
        return {
            bytes.fromhex(name): one.decode("utf-8", "replace") for name, one in contents.items() if one is not None
        }

    def _records(self, kind: str) -> str:
        return f"{self._root}/{RECORDS}/{quote(kind, safe='')}"


def _names_in(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)


def _digest(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def _modified(path: str) -> int:
    try:
        return os.lstat(path).st_mtime_ns
    except FileNotFoundError:
        return 0
