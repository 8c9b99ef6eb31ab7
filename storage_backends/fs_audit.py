"""The audit of a shared folder, which may be in use meanwhile."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from functools import partial

from kvtier.abc.audit import Auditor, Finding, FindingKind, Progress
from kvtier.codec.audit import Flaw, payload_flaw, read_value, repair_of
from kvtier.codec.frame import HEADER_BYTES, MAX_PAYLOAD_BYTES, summer_of
from kvtier.errors import ConfigError
from kvtier.storage_backends.fs_files import TEMPORARY, open_to_read, remove
from kvtier.storage_backends.fs_space import NAME, leaves_below
from kvtier.storage_backends.fs_state import FolderState


class FolderAuditor(Auditor):
    """Reads one block at a time; one that goes meanwhile is no fault, and what is not ours is left as it is."""

    def __init__(self, root: str) -> None:
        self.where = f"fs://{root}"
        self.notes: list[str] = []
        self._root = root
        self._summer = summer_of(None)
        try:
            self._generation = FolderState(root, sync=True).look().generation
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(f"{self.where}: no folder of kvtier's is there; is it mounted?") from error

    def look(self, progress: Progress) -> Iterator[Finding]:
        hidden = unfinished = 0
        for folders in leaves_below(self._root):
            for folder in folders:
                with os.scandir(folder) as entries:
                    names = sorted(entry.name for entry in entries)
                for name in names:
                    if self.looked_at >= self.most:
                        self.notes.append(f"stopped after {self.looked_at} files")
                        return
                    found = NAME.fullmatch(name)
                    if found is None or not name.startswith(folder[-4:].replace("/", "")):
                        unfinished += TEMPORARY.fullmatch(name) is not None
                        if not TEMPORARY.fullmatch(name):
                            place = f"{folder}/{name}"
                            yield Finding(FindingKind.FOREIGN_FILE, place, "is not kvtier's; it is left as it is")
                    elif int(found[2]) < self._generation:
                        hidden += 1
                    elif (flaw := self._flaw(f"{folder}/{name}", bytes.fromhex(found[1]))) is not None:
                        repair = repair_of(flaw, partial(_delete, f"{folder}/{name}"), self.seals)
                        yield Finding(flaw.kind, f"{folder}/{name}", flaw.detail, repair)
                    self.looked_at += 1
                    progress(self.looked_at, self.looked_at)
        if hidden:
            self.notes.append(f"{hidden} blocks have been cleared and wait to be reclaimed")
        if unfinished:
            self.notes.append(f"{unfinished} files are being written, or go by themselves where their writers are dead")

    def close(self) -> None:
        pass

    def _flaw(self, path: str, block: bytes) -> Flaw | None:
        descriptor = open_to_read(path)
        if descriptor is None:
            return None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return Flaw(FindingKind.FOREIGN_FILE, "is no file; it is left as it is", ours=False)
            if status.st_size > HEADER_BYTES + MAX_PAYLOAD_BYTES:
                return Flaw(FindingKind.UNDECODABLE, f"{status.st_size} bytes, which no frame has")
            value = memoryview(os.pread(descriptor, status.st_size, 0))
        finally:
            os.close(descriptor)
        header = read_value(value, block, self._summer)
        if isinstance(header, Flaw):
            return header
        return payload_flaw(header, value, value[HEADER_BYTES:], self._summer, self.seals)


def _delete(path: str) -> str:
    remove(path)
    return "file deleted"
