"""The audit of an NVMe directory: index against header pages, payloads against their sums, bytes against the budget."""

from __future__ import annotations

import os
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvtier.abc.audit import Auditor, Finding, FindingKind, Progress
from kvtier.codec.audit import Flaw, has_magic, payload_flaw, read_header, repair_of
from kvtier.codec.frame import PLAIN, FrameHeader
from kvtier.errors import ConfigError
from kvtier.key import Address, address
from kvtier.quantity import rounded_bytes
from kvtier.storage_backends.nvme import NvmeMedium, SizeClass, record_of
from kvtier.storage_backends.nvme_directory import (
    DATABASE,
    file_name,
    foreign_names,
    fullest_payload,
    held_bytes,
    locked,
    nothing_ours,
    stride_of,
)
from kvtier.storage_backends.nvme_file import PAGE_BYTES, SlotFile
from kvtier.storage_backends.nvme_journal import SCHEMA, NvmeJournal, look_through, meant, passes

_TWICE = "SELECT stride, slot FROM block GROUP BY 1, 2 HAVING count(*) > 1"
ASK = "ask that server itself with `kvtier doctor --base-url URL` or `--uds PATH`, or stop it first"


@dataclass(frozen=True, slots=True)
class _Row:
    """What the index says of one slot."""

    stride: int
    slot: int
    address: Address
    parent: Address
    depth: int
    tenant: bytes
    used: float

    @property
    def place(self) -> str:
        return _place(self.stride, self.slot)


class NvmeAuditor(Auditor):
    """Holds the directory's lock from its opening to its end, so no server is using what it looks at."""

    def __init__(self, directory: Path, params: NvmeMedium.Params) -> None:
        if not directory.is_dir():
            raise ConfigError(f"nvme tier {directory}: there is no such directory")
        if nothing_ours(directory):
            raise ConfigError(f"nvme tier {directory}: no tier has been here, only files of others; check the path")
        self.where = f"nvme tier {directory}"
        self.notes: list[str] = []
        self._directory = directory
        self._params = params
        self._lock: int | None = locked(directory, ASK)
        self._opened: dict[int, SlotFile] = {}
        self._journals: dict[int, NvmeJournal] = {}

    def look(self, progress: Progress) -> Iterator[Finding]:
        yield from self._foreign()
        strides = sorted(filter(None, (stride_of(path.name) for path in self._directory.iterdir())))
        rows: dict[int, dict[int, _Row]] = defaultdict(dict)
        freed: set[tuple[int, int]] = set()
        index_lost = self._index_finding(bool(strides))
        if index_lost is not None:
            yield index_lost
        elif (self._directory / DATABASE).exists():
            listed, freed = self._read_index()
            for row in listed:
                rows[row.stride][row.slot] = row
            yield from self._doubles(listed)
        for stride in sorted(rows.keys() - strides):
            for row in rows[stride].values():
                detail = f"the index names block {_short(row.address)} here; there is no {file_name(stride)}"
                yield Finding(FindingKind.ORPHAN_ROW, row.place, detail, partial(self._forget, stride, row.slot))
        todo = {stride: sorted({*self._file(stride).used_slots(), *rows[stride]}) for stride in strides}
        total = sum(map(len, todo.values()))
        for stride, slots in todo.items():
            for slot in slots:
                unnamed_is_wrong = index_lost is None and (stride, slot) not in freed
                yield from self._slot(stride, slot, rows[stride].get(slot), unnamed_is_wrong)
                self.looked_at += 1
                progress(self.looked_at, total)
        held = held_bytes(self._directory)
        if held > self._params.capacity:
            detail = (
                f"the file system counts {rounded_bytes(held)}, the budget is {rounded_bytes(self._params.capacity)}"
            )
            yield Finding(FindingKind.WRONG_BYTES, str(self._directory), detail, self._reopen)

    def close(self) -> None:
        for journal in self._journals.values():
            journal.close()
        self._journals.clear()
        for file in self._opened.values():
            file.sync()
            file.close()
        self._opened.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _foreign(self) -> Iterator[Finding]:
        for name in foreign_names(self._directory):
            yield Finding(
                FindingKind.FOREIGN_FILE,
                str(self._directory / name),
                "is not kvtier's, and no tier opens beside it",
                partial(self._set_aside, name),
            )

    def _index_finding(self, slots_are_there: bool) -> Finding | None:
        """Why the index cannot be read; a directory without slots needs none."""
        path = self._directory / DATABASE
        rebuild = partial(Finding, place=str(path), repair=self._reopen)
        if not path.exists():
            return rebuild(FindingKind.LOST_INDEX, detail="there is no index") if slots_are_there else None
        try:
            with closing(sqlite3.connect(path)) as database:
                (schema,) = database.execute("PRAGMA user_version").fetchone()
                if schema != SCHEMA:
                    detail = f"the index has schema {schema}, this build has {SCHEMA}"
                    return rebuild(FindingKind.OLD_SCHEMA, detail=detail)
                (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
                if found == "ok":
                    twice = database.execute(_TWICE).fetchone()
                    if twice is not None:
                        detail = f"names slot {twice[1]} of {file_name(twice[0])} twice"
                        return rebuild(FindingKind.DOUBLE_SLOT, detail=detail)
                    look_through(database)
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            if passes(error):
                raise meant(error, path) from error
            found = str(error)
        return rebuild(FindingKind.LOST_INDEX, detail=found) if found != "ok" else None

    def _read_index(self) -> tuple[list[_Row], set[tuple[int, int]]]:
        """All rows, and the slots that were freed and may still hold a whole frame."""
        query = (
            "SELECT stride, slot, address, parent, depth, tenant, used FROM block LEFT JOIN origin ON block.origin = id"
        )
        with closing(sqlite3.connect(self._directory / DATABASE)) as database:
            rows = [_Row(*row) for row in database.execute(query)]
            return rows, set(database.execute("SELECT stride, slot FROM freed"))

    def _doubles(self, rows: list[_Row]) -> Iterator[Finding]:
        """Of several rows for one block the last used stays."""
        newest: dict[Address, _Row] = {}
        for row in sorted(rows, key=lambda row: row.used, reverse=True):
            first = newest.setdefault(row.address, row)
            if first is not row:
                detail = f"the index has block {_short(row.address)} here and in {first.place}"
                yield Finding(FindingKind.DOUBLE_SLOT, row.place, detail, partial(self._drop, row.stride, row.slot))

    def _slot(self, stride: int, slot: int, row: _Row | None, unnamed_is_wrong: bool) -> Iterator[Finding]:
        frame = memoryview(self._file(stride).head(slot, stride))
        header = read_header(frame, PLAIN)
        named = f"block {_short(row.address)}" if row is not None else "no block"
        drop = partial(self._drop, stride, slot)
        finding = partial(Finding, place=_place(stride, slot), repair=drop)
        if isinstance(header, Flaw):
            if row is not None and not has_magic(frame):
                yield finding(FindingKind.ORPHAN_ROW, detail=f"the index names {named}, the slot holds no frame")
            elif row is not None or (unnamed_is_wrong and header.kind is FindingKind.OLD_SCHEMA):
                yield finding(header.kind, detail=header.detail, repair=drop if header.ours else None)
            return  # a torn or unreadable frame that nothing names is a free slot
        flaw = _class_flaw(header, stride) or payload_flaw(header, frame, frame[PAGE_BYTES:], PLAIN, self.seals)
        found = address(header.key, header.shard)
        if flaw is not None:
            if row is not None:
                repair = repair_of(flaw, drop, self.seals)
                yield finding(flaw.kind, detail=f"{flaw.detail} ({named})", repair=repair)
        elif row is None:
            if unnamed_is_wrong:
                detail = f"holds block {_short(found)}, which the index does not name here"
                yield finding(FindingKind.ORPHAN_SLOT, detail=detail, repair=partial(self._settle, stride, slot))
        elif found != row.address:
            detail = f"the index names {named}, the header names block {_short(found)}"
            yield finding(FindingKind.ORPHAN_ROW, detail=detail, repair=partial(self._settle, stride, slot))
        else:
            told = (address(header.parent, header.shard), header.depth, header.tenant)
            if (row.parent, row.depth, row.tenant) != told:
                detail = f"parent, depth or tenant of {named} are not its frame's"
                repair = partial(self._settle, stride, slot, row.used)
                yield finding(FindingKind.WRONG_ROW, detail=detail, repair=repair)

    def _forget(self, stride: int, slot: int) -> str:
        """Delete the slot's rows."""
        self._journal(stride).commit([], [slot])
        return "row deleted"

    def _drop(self, stride: int, slot: int) -> str:
        """Delete the slot's rows and make its header page unreadable, so that no rebuild brings the frame back."""
        self._forget(stride, slot)
        self._file(stride).wipe(slot)
        return "slot freed"

    def _settle(self, stride: int, slot: int, used: float | None = None) -> str:
        """Let the frame say what the slot holds, unless that block is elsewhere as well."""
        header = read_header(memoryview(self._file(stride).head(slot, PAGE_BYTES)), PLAIN)
        within = slot < SizeClass.of(self._params.capacity, stride - PAGE_BYTES).slots
        self._forget(stride, slot)
        elsewhere = isinstance(header, Flaw) or self._rows_of(address(header.key, header.shard))
        if isinstance(header, Flaw) or elsewhere or not within:
            self._file(stride).wipe(slot)
            return "slot freed"
        record = record_of(slot, header)
        self._journal(stride).commit([record if used is None else record._replace(used=used)], [])
        return f"adopted as block {_short(record.address)}"

    def _rows_of(self, block: Address) -> int:
        with closing(sqlite3.connect(self._directory / DATABASE)) as database:
            (count,) = database.execute("SELECT count(*) FROM block WHERE address = ?", (block,)).fetchone()
        return int(count)

    def _set_aside(self, name: str) -> str:
        """Move a file that is not ours out of the directory, beside it. Nothing is overwritten."""
        aside = self._directory.with_name(self._directory.name + ".foreign")
        aside.mkdir(mode=0o700, exist_ok=True)
        target, number = aside / name, 1
        while os.path.lexists(target):
            target, number = aside / f"{name}.{number}", number + 1
        (self._directory / name).rename(target)
        return f"moved to {target}"

    def _reopen(self) -> str:
        """Open the tier as a server would, which rebuilds a lost index and gives back what is over the budget."""
        self.close()
        NvmeMedium(self._directory, fullest_payload(self._directory), self._params, ASK).close()
        self._lock = locked(self._directory, ASK)
        return "opened and brought in order as at a start"

    def _file(self, stride: int) -> SlotFile:
        if stride not in self._opened:
            self._opened[stride] = SlotFile(self._directory / file_name(stride), stride, direct=False)
        return self._opened[stride]

    def _journal(self, stride: int) -> NvmeJournal:
        if stride not in self._journals:
            self._journals[stride] = NvmeJournal(self._directory / DATABASE, stride)
        return self._journals[stride]


def _class_flaw(header: FrameHeader, stride: int) -> Flaw | None:
    needed = PAGE_BYTES + -(-header.payload_bytes // PAGE_BYTES) * PAGE_BYTES
    if header.codec == 0 and needed != stride:
        return Flaw(FindingKind.WRONG_BYTES, f"a frame of {needed} bytes in a slot of {stride}")
    return None


def _place(stride: int, slot: int) -> str:
    return f"slot {slot} of {file_name(stride)}"


def _short(block: Address) -> str:
    return block[:8].hex()
