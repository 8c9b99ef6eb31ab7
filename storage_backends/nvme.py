"""``nvme:///var/cache/kvtier?capacity=200GiB``: slots in files of one directory, under one byte budget.

A slot is one header page (4 KiB) and the payload rounded up to 4 KiB. Slots of one size are a size class: one file, made
of extents that are taken from the budget as slots in them are first written. Only the class of the current block size is
active; the others keep what they have until the active one needs the room, and then give it back extent by extent, least
recently used first. The budget counts what the file system counts: slot files, database and write-ahead log.

A batch is payload first, then one fdatasync; the caller then commits its rows (``journal``) in one transaction. So what
is in the index was on the disk, and what is torn was never in the index; headers and sums prove the rest at first read.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvtier.abc.audit import Auditor
from kvtier.abc.medium import Arrived, Iovec, MediumContext, Outcome, PersistentSlotMedium, Record, Status
from kvtier.codec.frame import HEADER_BYTES, FrameHeader
from kvtier.errors import CapacityError, ConfigError, CorruptFrame, MediumError, MediumFull
from kvtier.key import Address, address
from kvtier.quantity import Bytes, rounded_bytes
from kvtier.storage_backends.nvme_directory import (
    DATABASE,
    SHARE,
    file_name,
    fullest_payload,
    held_bytes,
    stride_of,
    taken,
    used,
)
from kvtier.storage_backends.nvme_file import PAGE_BYTES, SlotFile, failed
from kvtier.storage_backends.nvme_journal import ROW_BYTES, WAL_BYTES, NvmeJournal, nowhere
from kvtier.transfer.deal import dealt
from kvtier.url import TierUrl

_log = logging.getLogger(__name__)

_EXTENT_BYTES = 256 << 20
_EXTENTS_OF_A_SMALL_BUDGET = 16
_OVERHEAD_BYTES = WAL_BYTES + (1 << 20)
"""Write-ahead log, its index, an empty database, lock file and directory."""


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Slots of one size, and how a byte budget divides for them."""

    stride: int
    """Bytes from slot to slot."""
    extent_slots: int
    extents: int

    @classmethod
    def of(cls, budget: int, payload_bytes: int) -> SizeClass:
        """``extents`` is 0 where the budget does not suffice for one."""
        stride = PAGE_BYTES + -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES
        wanted = min(_EXTENT_BYTES, budget // _EXTENTS_OF_A_SMALL_BUDGET)
        extent_slots = max(1, wanted // stride)
        each = extent_slots * (stride + ROW_BYTES)
        return cls(stride, extent_slots, max(0, budget - _OVERHEAD_BYTES) // each)

    @property
    def slots(self) -> int:
        return self.extents * self.extent_slots

    @property
    def extent_bytes(self) -> int:
        """Budget that one extent takes, its rows included."""
        return self.extent_slots * (self.stride + ROW_BYTES)


class NvmeMedium(PersistentSlotMedium):
    """Slots of the active size class of one directory. One process at a time."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Params:
        capacity: Bytes
        """Budget for everything in the directory."""
        direct: bool = True
        """Go around the page cache where the file system allows it."""
        threads: int = 4
        """Slots that one batch reads or writes at the same time."""

        def __post_init__(self) -> None:
            if self.threads < 1:
                raise ValueError("threads must be at least 1")

    header_bytes = PAGE_BYTES
    journal: NvmeJournal

    def __init__(self, directory: Path, slot_bytes: int, params: Params, advice: str = SHARE) -> None:
        """``advice``: what to do where another process has the directory."""
        self.at: Callable[[str], None] = nowhere
        self.slot_bytes = slot_bytes
        self._directory = directory
        self._active = SizeClass.of(params.capacity, slot_bytes)
        self._budget = params.capacity
        if not self._active.extents:
            need = self._active.extent_bytes + _OVERHEAD_BYTES
            raise CapacityError(
                f"nvme tier {directory}: capacity={rounded_bytes(params.capacity)} does not hold one block of "
                f"{rounded_bytes(slot_bytes)} and the index; it needs {rounded_bytes(need)}"
            )
        self.slots = self._active.slots
        self._lock = threading.Lock()
        self._extents_lock = threading.Lock()
        self._closed = False
        self._lock_file = taken(directory, advice)
        try:
            self._check_disk()
            self._file = SlotFile(directory / file_name(self._active.stride), self._active.stride, direct=params.direct)
            self._workers = ThreadPoolExecutor(params.threads, "kvtier-nvme") if params.threads > 1 else None
            self._threads = params.threads
            self.journal = NvmeJournal(directory / DATABASE, self._active.stride)
            self._others = self._other_classes()
            if self.journal.fresh:
                self._rebuild()
            self._taken = self._recovered()
            self._make_room(0)
        except BaseException:
            os.close(self._lock_file)
            raise

    @classmethod
    def open(cls, location: TierUrl, params: Params, context: MediumContext) -> NvmeMedium:
        if not location.path or location.host:
            raise ConfigError(f"{location}: name a directory, with three slashes: nvme:///var/cache/kvtier")
        directory = Path(location.path)
        try:
            if not context.slot_bytes and not used(directory):
                raise ConfigError(f"{location}: no tier has been there; check the path")
            slot_bytes = context.slot_bytes or fullest_payload(directory)
            return cls(directory, slot_bytes, params, context.advice or SHARE)
        except OSError as error:
            raise ConfigError(f"{location}: {error.strerror or error} ({error.filename or location.path})") from error

    @classmethod
    def auditor(cls, location: TierUrl, params: Params) -> Auditor:
        from kvtier.storage_backends.nvme_audit import NvmeAuditor  # noqa: PLC0415 - which opens this class, to repair

        return NvmeAuditor(Path(location.path), params)

    @property
    def io(self) -> str:  # type: ignore[override]  # it changes when the file system refuses direct I/O
        return "direct" if self._file.direct else "buffered"

    def read(self, slots: Sequence[int], into: Sequence[Iovec], arrived: Arrived | None = None) -> list[Outcome]:
        def read(index: int) -> Outcome:
            outcome = self._read(slots[index], into[index])
            return outcome if arrived is None or not outcome.done else arrived(index, outcome)

        outcomes = self._each(read, len(slots))
        with self._lock:
            self.bytes_read += sum(outcome.nbytes for outcome in outcomes)
        return outcomes

    def write(self, slots: Sequence[int], data: Sequence[Iovec]) -> list[Outcome]:
        refused = self._take_extents({slot // self._active.extent_slots for slot in slots})

        def write(index: int) -> Outcome:
            outcome = refused.get(slots[index] // self._active.extent_slots)
            if outcome is not None:
                return outcome
            self.at("before payload")
            outcome = self._file.write(slots[index], data[index])
            self.at("after payload")
            return outcome

        outcomes = self._each(write, len(slots))
        try:
            self._file.sync()
        except OSError as error:
            return [failed(error, "fdatasync: ")] * len(slots)
        self.at("after sync")
        with self._lock:
            self.bytes_written += sum(outcome.nbytes for outcome in outcomes)
        return outcomes

    def remember(self, kind: str, digest: bytes, text: str) -> None:
        self.journal.remember(kind, digest, text)

    def records(self, kind: str) -> dict[bytes, str]:
        return self.journal.records(kind)

    def epochs(self) -> dict[str, int]:
        return self.journal.epochs()

    def raise_epochs(self, wanted: Mapping[str, int], implied: Mapping[str, int]) -> None:
        self.journal.raise_epochs(wanted, implied)

    def drop_others(self) -> int:
        with self._extents_lock:
            freed = sum(file.held_bytes for file in self._others.values())
            for stride in list(self._others):
                self._drop_class(stride)
        return freed

    def drop_page_cache(self) -> None:
        """Make the next buffered reads come from the device, for measurements."""
        self._file.drop_page_cache()

    def check(self) -> list[str]:
        with self._extents_lock:
            counted = len(self._taken) * self._active.extent_slots * self._active.stride
            there, held = self._file.held_bytes, self.held_bytes()
        found = []
        if there > counted + _OVERHEAD_BYTES:
            found.append(f"wrong byte count: {counted} bytes of slots are counted, the file system has {there}")
        if held > self._budget:
            found.append(f"wrong byte count: the budget is {self._budget} bytes, the file system has {held}")
        return found

    def held_bytes(self) -> int:
        """What the file system counts in the directory, now."""
        return held_bytes(self._directory)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._workers is not None:
            self._workers.shutdown()
        try:
            self.journal.close()
        except MediumError as error:
            _log.warning("%s", error)
        for file in [self._file, *self._others.values()]:
            file.close()
        os.close(self._lock_file)

    def _read(self, slot: int, into: Iovec) -> Outcome:
        if slot // self._active.extent_slots not in self._taken:
            return Outcome(Status.ABSENT)
        return self._file.read(slot, into)

    def _each(self, move: Callable[[int], Outcome], count: int) -> list[Outcome]:
        """``move`` for every index, a few at a time, this thread among them: bytes in flight are ``threads`` slots."""
        return dealt(move, count, self._workers, self._threads - 1)

    def _check_disk(self) -> None:
        disk = os.statvfs(self._directory)
        available = disk.f_bavail * disk.f_frsize + self.held_bytes()
        if disk.f_blocks and self._budget > available:  # some file systems do not say how large they are
            raise CapacityError(
                f"nvme tier {self._directory}: asked for {rounded_bytes(self._budget)}, "
                f"{rounded_bytes(available)} are available on its file system"
            )

    def _other_classes(self) -> dict[int, SlotFile]:
        found = {}
        for path in self._directory.glob("slots-*.kvt"):
            stride = stride_of(path.name)
            if stride is not None and stride != self._active.stride:
                found[stride] = SlotFile(path, stride, direct=False)
        return found

    def _class_of(self, stride: int) -> SizeClass:
        return SizeClass.of(self._budget, stride - PAGE_BYTES)

    def _rebuild(self) -> None:
        """Fill the index from the header pages; a slot whose header does not parse is free."""
        if self.journal.lost is not None:
            _log.warning("NVMe index in %s was unusable (%s): rebuilt", self._directory, self.journal.lost)
        for file in [self._file, *self._others.values()]:
            newest: dict[Address, Record] = {}
            for slot in file.used_slots():
                record = _record(slot, file.head(slot, HEADER_BYTES))
                if record is not None and record.used > newest.get(record.address, _NEVER).used:
                    newest[record.address] = record
            self.journal.insert(file.stride, list(newest.values()))
        self.journal.seal()

    def _recovered(self) -> set[int]:
        """Extents of the active class that hold anything; whatever else the slot files have goes back."""
        self.journal.drop(self._active.stride, min(self.slots, self._file.slots))
        for stride, file in list(self._others.items()):
            if not self._only_held(file, self._class_of(stride)):
                self._drop_class(stride)
        return {extent for extent in self._only_held(self._file, self._active) if extent < self._active.extents}

    def _only_held(self, file: SlotFile, size_class: SizeClass) -> set[int]:
        """Extents that have rows, and those that the file system cannot take back."""
        held = set(self.journal.extents(file.stride, size_class.extent_slots))
        for extent in range(-(-file.slots // size_class.extent_slots) - 1, -1, -1):
            if extent not in held and not file.give_back(extent * size_class.extent_slots, size_class.extent_slots):
                held.add(extent)
        return held

    def _take_extents(self, extents: set[int]) -> dict[int, Outcome]:
        """Take those that are not taken yet; returns the ones that cannot be, and why."""
        refused: dict[int, Outcome] = {}
        if extents <= self._taken:
            return refused
        with self._extents_lock:
            for extent in sorted(extents - self._taken):
                try:
                    self._make_room(self._active.extent_bytes)
                    self._file.take(extent * self._active.extent_slots, self._active.extent_slots)
                    self._taken.add(extent)
                except OSError as error:
                    refused[extent] = failed(error)
                except MediumError as error:
                    full = isinstance(error, MediumFull)  # of the index
                    refused[extent] = Outcome(Status.FULL if full else Status.FAILED, 0, str(error))
        return refused

    def _make_room(self, wanted: int) -> None:
        """Have other size classes give extents back until ``wanted`` bytes more are within the budget."""
        own = len(self._taken) * self._active.extent_bytes + max(_OVERHEAD_BYTES, self.journal.held_bytes()) + wanted
        while self._others and own + sum(file.held_bytes for file in self._others.values()) > self._budget:
            self._give_back_oldest()

    def _give_back_oldest(self) -> None:
        ages = [
            (used, stride, extent)
            for stride in self._others
            for extent, used in self.journal.extents(stride, self._class_of(stride).extent_slots).items()
        ]
        if not ages:
            for stride in list(self._others):
                self._drop_class(stride)
            return
        _, stride, extent = min(ages)
        each = self._class_of(stride).extent_slots
        self.journal.drop(stride, extent * each, (extent + 1) * each)
        last_one = [age[1] for age in ages].count(stride) == 1
        if last_one or not self._others[stride].give_back(extent * each, each):
            self._drop_class(stride)

    def _drop_class(self, stride: int) -> None:
        self.journal.drop(stride, 0)
        file = self._others.pop(stride)
        file.close()
        file.path.unlink(missing_ok=True)


_NEVER = Record(0, Address(b""), Address(b""), 0, b"", float("-inf"))


def _record(slot: int, page: bytes) -> Record | None:
    try:
        return record_of(slot, FrameHeader.parse(memoryview(page)))
    except CorruptFrame:
        return None


def record_of(slot: int, header: FrameHeader) -> Record:
    """The row that a slot's header makes."""
    return Record(
        slot=slot,
        address=address(header.key, header.shard),
        parent=address(header.parent, header.shard),
        depth=header.depth,
        tenant=header.tenant,
        used=header.created,
        expires_at=header.expires_at,
        identity=header.identity,
        adapter=header.adapter,
        epoch=header.epoch,
    )
