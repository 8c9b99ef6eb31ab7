"""A tier below DRAM: a medium with a write mode, an index of what it holds, a state of health and its numbers.

``places``, ``holds`` and ``forget`` are called under the store's lock and answer from memory. ``probe``, ``fetch``, ``put``,
``delete``, ``refresh`` and ``revive`` are called from transfer threads without it, may block, and take it for the moments in
which state changes. A medium's failure never leaves this module: it becomes outcomes, a reason and a metric.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvtier.abc.codec import Codec
from kvtier.abc.medium import KeyMedium, Medium, Outcome, PersistentSlotMedium, Record, Status
from kvtier.abc.policy import EntryMeta, EvictionPolicy
from kvtier.abc.store import Reason
from kvtier.codec.frame import Asked, FrameHeader
from kvtier.config import TierOptions
from kvtier.errors import KvtierError, MediumError, MediumFull
from kvtier.key import Address
from kvtier.metrics import TierMetrics
from kvtier.pool import BlockPool, Slot
from kvtier.transfer.copy import read_frames, write_frames
from kvtier.transfer.workers import Workers

_log = logging.getLogger(__name__)

T = TypeVar("T")
Answer = TypeVar("Answer", bound="tuple[Sequence[object], Sequence[object]]")

REVIVE_SECONDS = 1.0
"""How often a degraded tier is tried."""
SILENT_SECONDS = 2.0
"""Nobody waits for a tier while one of its reads has been running for so long."""
REFRESH_SECONDS = 60.0
"""A block's expiry is pushed back at most so often."""
COMPLAIN_SECONDS = 10.0
MOST_KNOWN = 1 << 18
"""Names that a key tier remembers to have written or seen."""


def _trim(oldest_first: OrderedDict[Address, T], most: int) -> None:
    while len(oldest_first) > most:
        oldest_first.popitem(last=False)


def _whole(answer: Answer, count: int) -> Answer:
    """An answer with an entry per item: a medium that gives more or fewer has said nothing of any."""
    if any(len(part) != count for part in answer):
        raise MediumError(f"the medium answered for {len(answer[0])} of {count} blocks")
    return answer


@dataclass(frozen=True, slots=True)
class Parcel:
    """One block on its way down: its name, what a policy may know of it, what its frame says, and its bytes in DRAM."""

    address: Address
    meta: EntryMeta
    header: FrameHeader
    view: memoryview


class LowerTier(ABC):
    """What the store asks of every tier below DRAM."""

    probes: bool
    """Whether only the medium itself knows what is there."""

    def __init__(
        self,
        name: str,
        options: TierOptions,
        medium: Medium,
        codec: Codec,
        workers: Workers,
        metrics: TierMetrics,
        lock: threading.Lock,
    ) -> None:
        self.name = name
        self.write = options.write
        self.workers = workers
        self.metrics = metrics
        self.degraded: str | None = None
        self._codec = codec
        self._lock = lock
        self._tried = 0.0
        self._complained: dict[str, float] = {}
        self._medium = medium

    @property
    def medium(self) -> Medium:
        return self._medium

    @property
    def usable(self) -> bool:
        return self.degraded is None

    @property
    def silent(self) -> str | None:
        """Why nothing is read from the tier for now although nothing has failed: a read hangs. None where none does."""
        seconds = self.workers.longest_load
        return f"a read has not returned for {seconds:.0f} s" if seconds > SILENT_SECONDS else None

    @abstractmethod
    def places(self, addresses: Sequence[Address]) -> list[Slot | None]:
        """Per address the place where it is known to be; a tier that probes knows none."""

    @abstractmethod
    def holds(self, address: Address) -> bool:
        """Whether the tier is believed to have the block, so that it need not be written."""

    @abstractmethod
    def forget(self, addresses: Sequence[Address]) -> None:
        """Stop serving these at once; ``delete`` makes it so in the medium."""

    @abstractmethod
    def touch(self, addresses: Sequence[Address], now: float) -> Sequence[Address]:
        """Note a use of a chain (head first) for eviction; returns what ``refresh`` is to be called with now."""

    def probe(self, addresses: Sequence[Address]) -> int:
        """Length of the present prefix; 0 where the tier fails."""
        return max(0, min(self._guarded("probe", lambda: int(self._probe(addresses)), 0), len(addresses)))

    def fetch(
        self, addresses: Sequence[Address], views: Sequence[memoryview], asked: Sequence[Asked]
    ) -> tuple[list[Outcome], list[FrameHeader | None]]:
        """Read blocks into DRAM views and prove them. Whatever did not prove or read is no longer held."""
        start = time.perf_counter()
        nothing: tuple[list[Outcome], list[FrameHeader | None]] = ([], [])
        outcomes, headers = self._guarded(
            "read", lambda: _whole(self._fetch(addresses, views, asked), len(addresses)), nothing
        )
        if not outcomes:
            outcomes = [Outcome(Status.FAILED, 0, self.degraded or "read failed")] * len(addresses)
            headers = [None] * len(addresses)
        done = sum(outcome.done for outcome in outcomes)
        corrupt = [a for a, outcome in zip(addresses, outcomes, strict=True) if outcome.status is Status.CORRUPT]
        failed = [a for a, outcome in zip(addresses, outcomes, strict=True) if outcome.status is Status.FAILED]
        if done:
            nbytes = sum(one.raw_bytes for one, outcome in zip(asked, outcomes, strict=True) if outcome.done)
            self.metrics.read(done, nbytes, time.perf_counter() - start)
        if corrupt:
            self.metrics.sum_failed(len(corrupt))
            first = next(outcome for outcome in outcomes if outcome.status is Status.CORRUPT)
            self._complain("sum", f"{len(corrupt)} blocks did not prove and are recomputed: {first.detail}")
        if failed and self.usable:
            self.metrics.failed("read", len(failed))
            first = next(outcome for outcome in outcomes if outcome.status is Status.FAILED)
            self._complain("read", f"{len(failed)} blocks could not be read and are recomputed: {first.detail}")
        lost = [a for a, outcome in zip(addresses, outcomes, strict=True) if not outcome.done]
        if lost and self.usable:
            self._guarded("delete", lambda: self._lost(lost, corrupt), None)
        return outcomes, headers

    def put(self, parcels: Sequence[Parcel]) -> list[Outcome]:
        """Write blocks. DONE means that the block would be found after a restart of this process."""
        start = time.perf_counter()
        nothing: list[Outcome] = []
        outcomes = self._guarded("write", lambda: _whole((self._put(parcels), parcels), len(parcels))[0], nothing)
        if not outcomes:
            outcomes = [Outcome(Status.FAILED, 0, self.degraded or "write failed")] * len(parcels)
        done = sum(outcome.done for outcome in outcomes)
        if done:
            nbytes = sum(p.header.raw_bytes for p, outcome in zip(parcels, outcomes, strict=True) if outcome.done)
            self.metrics.written(done, nbytes, time.perf_counter() - start)
        if done < len(outcomes):
            self.metrics.save_dropped(Reason.SAVE_DROPPED, len(outcomes) - done)
            if self.usable:
                first = next(outcome for outcome in outcomes if not outcome.done)
                self._complain("write", f"{len(outcomes) - done} blocks were not written: {first.detail}")
        return outcomes

    def delete(self, addresses: Sequence[Address]) -> None:
        """Remove from the medium what ``forget`` has hidden."""
        self._guarded("delete", lambda: self._delete(addresses), None)

    def refresh(self, addresses: Sequence[Address]) -> None:
        """Push back what would expire, or write recency down."""
        self._guarded("touch", lambda: self._refresh(addresses), None)

    def greet(self, identity: bytes, text: str) -> None:
        """See at start that the medium answers, and leave a readable record of the identity. Raises ``MediumError``."""
        self._ping()
        self._remember(identity, text)

    def revive(self) -> None:
        """Try a degraded tier, at most every ``REVIVE_SECONDS``."""
        if self.usable or time.monotonic() - self._tried < REVIVE_SECONDS:
            return
        self._tried = time.monotonic()
        try:
            self._ping()
        except Exception as still:  # noqa: BLE001 - as in ``_guarded``
            self.degraded = str(still) or type(still).__name__
            return
        self._returned()
        self.degraded = None
        self.metrics.set_degraded(False)
        _log.warning("%s: back in use", self.name)

    def degrade(self, why: str) -> None:
        """Take the tier out of use until ``revive`` finds it well."""
        self._tried = time.monotonic()
        if self.usable:
            _log.warning("%s: degraded, its blocks are misses until it is back: %s", self.name, why)
        self.degraded = why
        self.metrics.set_degraded(True)

    def _returned(self) -> None:  # noqa: B027 - most tiers know as much as before
        """The medium answers again, perhaps without what it had."""

    @abstractmethod
    def empty(self) -> int:
        """Remove every block that nobody holds; how many."""

    def drop_page_cache(self) -> None:  # noqa: B027 - most media use none
        """Make the next reads come from the device where the medium goes through the page cache."""

    def close(self) -> None:
        self.workers.close()
        self._medium.close()

    def check(self) -> list[str]:
        """Disagreements inside the tier, in words. Called under the store's lock."""
        return []

    def counts(self) -> dict[str, int]:
        """Slots by state, where the tier has slots. Called under the store's lock."""
        return {}

    def _complain(self, about: str, text: str) -> None:
        """Log at most once about the same in ``COMPLAIN_SECONDS``: a full disk fails every write, and the metrics count."""
        now = time.monotonic()
        with self._lock:
            due = now - self._complained.get(about, now - COMPLAIN_SECONDS) >= COMPLAIN_SECONDS
            if due:
                self._complained[about] = now
        if due:
            _log.warning("%s: %s", self.name, text)

    def _guarded(self, verb: str, act: Callable[[], T], otherwise: T) -> T:
        if not self.usable:
            return otherwise
        try:
            return act()
        except MediumFull as full:
            self.metrics.failed(verb)
            self._complain(verb, f"{verb} failed: {full}")
        except KvtierError as failed:
            self.metrics.failed(verb)
            self.degrade(str(failed))
        except Exception as bug:  # noqa: BLE001 - a third party's medium may raise anything; the engine must not notice
            self.metrics.failed(verb)
            self.degrade(f"{type(bug).__name__}: {bug}")
        return otherwise

    @abstractmethod
    def _probe(self, addresses: Sequence[Address]) -> int: ...

    @abstractmethod
    def _fetch(
        self, addresses: Sequence[Address], views: Sequence[memoryview], asked: Sequence[Asked]
    ) -> tuple[list[Outcome], list[FrameHeader | None]]: ...

    @abstractmethod
    def _put(self, parcels: Sequence[Parcel]) -> list[Outcome]: ...

    @abstractmethod
    def _delete(self, addresses: Sequence[Address]) -> None: ...

    @abstractmethod
    def _refresh(self, addresses: Sequence[Address]) -> None: ...

    @abstractmethod
    def _lost(self, addresses: Sequence[Address], corrupt: Sequence[Address]) -> None:
        """Stop serving blocks that did not come; ``corrupt`` are those of them whose bytes came and did not prove."""

    @abstractmethod
    def _ping(self) -> None: ...

    @abstractmethod
    def _remember(self, identity: bytes, text: str) -> None: ...


class SlotTier(LowerTier):
    """A persistent slot medium: the pool over it is its index, the journal makes the pool outlive the process."""

    probes = False

    def __init__(
        self,
        name: str,
        options: TierOptions,
        medium: PersistentSlotMedium,
        codec: Codec,
        workers: Workers,
        metrics: TierMetrics,
        lock: threading.Lock,
        policy: EvictionPolicy,
    ) -> None:
        super().__init__(name, options, medium, codec, workers, metrics, lock)
        self._slots = medium
        self.pool = BlockPool(medium.slots, policy)
        self._used: dict[Slot, float] = {}
        self._leaving: list[Slot] = []
        """Out of the index, and free as soon as the journal has deleted their rows."""
        self._quarantined: list[Slot] = []
        self._most_quarantined = max(1, medium.slots // 100)
        self._recover()

    def _recover(self) -> None:
        """Adopt the journal's rows, coldest first, so that eviction goes on where it stopped. Of two for a block the later."""
        records = sorted(self._slots.journal.load(), key=lambda record: (record.used, -record.depth))
        for record in {record.address: record for record in records}.values():
            meta = EntryMeta(record.parent if record.depth else None, record.depth, tenant=record.tenant)
            self.pool.adopt(Slot(record.slot), record.address, meta, 0.0)
        self.pool.adopted()

    def places(self, addresses: Sequence[Address]) -> list[Slot | None]:
        return self.pool.places(addresses)

    def holds(self, address: Address) -> bool:
        return self.pool.slot(address) is not None

    def forget(self, addresses: Sequence[Address]) -> None:
        self._leaving += self._retired(addresses)

    def _retired(self, addresses: Sequence[Address]) -> list[Slot]:
        slots = [slot for slot in self.pool.places(addresses) if slot is not None]
        for slot in slots:
            self.pool.retire(slot, evicted=False)
            self._used.pop(slot, None)
        return slots

    def touch(self, addresses: Sequence[Address], now: float) -> Sequence[Address]:
        slots = [slot for slot in self.pool.places(addresses) if slot is not None]
        self.pool.touch(slots, now)
        self._used.update(dict.fromkeys(slots, time.time()))
        return ()  # recency is written down now and then, for all

    def check(self) -> list[str]:
        found = self.pool.check()
        kept = len(self._leaving) + len(self._quarantined)
        if self.workers.idle and self.pool.retiring != kept:
            found.append(f"{self.pool.retiring} slots are retiring, {kept} have a reason to")
        return found

    def empty(self) -> int:
        with self._lock:
            entries = [entry for entry in self.pool.entries() if not self._referenced(entry)]
            self.forget(entries)
        self.delete(entries)
        return len(entries)

    def drop_page_cache(self) -> None:
        if self._slots.io == "buffered":
            self._slots.drop_page_cache()

    def _referenced(self, entry: Address) -> bool:
        slot = self.pool.slot(entry)
        return slot is not None and self.pool.references(slot) > 0

    def counts(self) -> dict[str, int]:
        pool = self.pool
        return {"free": pool.free, "writing": pool.writing, "ready": pool.ready, "retiring": pool.retiring}

    def _probe(self, addresses: Sequence[Address]) -> int:
        with self._lock:
            return len(self.pool.lookup(addresses))

    def _fetch(
        self, addresses: Sequence[Address], views: Sequence[memoryview], asked: Sequence[Asked]
    ) -> tuple[list[Outcome], list[FrameHeader | None]]:
        with self._lock:
            found = self.pool.places(addresses)
            at = [index for index, slot in enumerate(found) if slot is not None]
            slots = [slot for slot in found if slot is not None]
            self.pool.acquire(slots)
        outcomes = [Outcome(Status.ABSENT)] * len(addresses)
        headers: list[FrameHeader | None] = [None] * len(addresses)
        try:
            read, seen = read_frames(
                self._slots, slots, [views[i] for i in at], [asked[i] for i in at], self._codec, now=time.time()
            )
            for index, outcome, header in zip(at, read, seen, strict=True):
                outcomes[index], headers[index] = outcome, header
        finally:
            with self._lock:
                self.pool.release(slots, 0.0)
        return outcomes, headers

    def _put(self, parcels: Sequence[Parcel]) -> list[Outcome]:
        outcomes = [Outcome(Status.DONE)] * len(parcels)
        with self._lock:
            new = [index for index, parcel in enumerate(parcels) if not self.holds(parcel.address)]
        slots = self._make_room(len(new))
        for index in new[len(slots) :]:
            outcomes[index] = Outcome(Status.FAILED, 0, "no slot that may be evicted")
        kept: list[tuple[Slot, Parcel]] = []
        try:
            chosen = [parcels[index] for index in new[: len(slots)]]
            written = write_frames(
                self._slots, slots, [p.view for p in chosen], [p.header for p in chosen], self._codec
            )
            for index, slot, parcel, outcome in zip(new, slots, chosen, written, strict=False):
                outcomes[index] = outcome
                if outcome.done:
                    kept.append((slot, parcel))
            self._slots.journal.commit([self._record(slot, parcel) for slot, parcel in kept], [])
            with self._lock:
                now = time.monotonic()
                for slot, parcel in reversed(kept):
                    self.pool.commit(slot, parcel.address, parcel.meta, now)
        finally:
            with self._lock:
                self.pool.release(slots, 0.0)
        return outcomes

    def _record(self, slot: Slot, parcel: Parcel) -> Record:
        header = parcel.header
        parent = Address(header.parent + header.shard.packed())
        return Record(slot, parcel.address, parent, header.depth, header.tenant, time.time(), header.expires_at)

    def _make_room(self, count: int) -> list[Slot]:
        """Up to ``count`` slots to write to. A slot is reused only after its delete is committed."""
        with self._lock:
            victims = self.pool.victims(max(0, count - self.pool.free), 0.0, fewer=True) or []
            for slot in victims:
                self.pool.retire(slot, evicted=True)
                self._used.pop(slot, None)
            self._leaving += victims
            leaving = bool(self._leaving)
        if victims:
            self.metrics.evicted(Reason.EVICTED, len(victims))
        if leaving:
            self._let_go()
        with self._lock:
            got = self.pool.allocate(min(count, self.pool.free), 0.0, evict=False)
            return got.slots if got is not None else []

    def _delete(self, addresses: Sequence[Address]) -> None:
        del addresses  # whatever ``forget`` has taken out of the index goes
        self._let_go()

    def _let_go(self) -> None:
        """Free what has left the index, once its rows are deleted; what cannot be deleted now is tried again."""
        with self._lock:
            leaving, self._leaving = self._leaving, []
        try:
            self._slots.journal.commit([], leaving)
        except BaseException:
            with self._lock:
                self._leaving += leaving
            raise
        with self._lock:
            self.pool.release(leaving, 0.0)

    def _lost(self, addresses: Sequence[Address], corrupt: Sequence[Address]) -> None:
        """The slots of what did not prove or read stay out of use while that is affordable."""
        del corrupt
        with self._lock:
            slots = self._retired(addresses)
        try:
            self._slots.journal.commit([], slots)
        except BaseException:
            with self._lock:
                self._leaving += slots
            raise
        with self._lock:
            self._quarantined += slots
            freed, self._quarantined = (
                self._quarantined[: -self._most_quarantined],
                self._quarantined[-self._most_quarantined :],
            )
            self.pool.release(freed, 0.0)

    def _refresh(self, addresses: Sequence[Address]) -> None:
        with self._lock:
            used, self._used = self._used, {}
            leaving = bool(self._leaving)
        if used:
            self._slots.journal.touch(used.items())
        if leaving:
            self._let_go()

    def _ping(self) -> None:
        self._let_go()

    def _remember(self, identity: bytes, text: str) -> None:
        self._slots.remember("identity", identity, text)


class KeyTier(LowerTier):
    """A place per name, shared with others: what is there only the medium knows, so presence is probed."""

    probes = True

    def __init__(
        self,
        name: str,
        options: TierOptions,
        medium: KeyMedium,
        codec: Codec,
        workers: Workers,
        metrics: TierMetrics,
        lock: threading.Lock,
    ) -> None:
        super().__init__(name, options, medium, codec, workers, metrics, lock)
        self._names = medium
        self._known: OrderedDict[Address, None] = OrderedDict()
        self._refreshed: OrderedDict[Address, float] = OrderedDict()

    def places(self, addresses: Sequence[Address]) -> list[Slot | None]:
        return [None] * len(addresses)

    def holds(self, address: Address) -> bool:
        return address in self._known

    def forget(self, addresses: Sequence[Address]) -> None:
        for address in addresses:
            self._known.pop(address, None)

    def touch(self, addresses: Sequence[Address], now: float) -> Sequence[Address]:
        """The server evicts by itself; what lives is the TTL of the whole prefix, pushed back once a minute at most."""
        every = min(REFRESH_SECONDS, self._names.ttl / 4)
        due = [a for a in addresses if now - self._refreshed.get(a, -every) >= every]
        self._refreshed.update(dict.fromkeys(due, now))
        _trim(self._refreshed, MOST_KNOWN)
        return due

    def empty(self) -> int:
        entries = list(self._names.scan())
        with self._lock:
            self.forget(entries)
        self.delete(entries)
        return len(entries)

    def _returned(self) -> None:
        with self._lock:
            self._known.clear()
            self._refreshed.clear()

    def _note(self, addresses: Sequence[Address]) -> None:
        with self._lock:
            self._known.update(dict.fromkeys(addresses))
            _trim(self._known, MOST_KNOWN)

    def _probe(self, addresses: Sequence[Address]) -> int:
        present = self._names.probe(addresses)
        self._note(addresses[:present])
        with self._lock:
            self.forget(addresses[present:])  # what follows the first gap may be gone as well: it is written again
        return present

    def _fetch(
        self, addresses: Sequence[Address], views: Sequence[memoryview], asked: Sequence[Asked]
    ) -> tuple[list[Outcome], list[FrameHeader | None]]:
        return read_frames(self._names, addresses, views, asked, self._codec, now=time.time())

    def _put(self, parcels: Sequence[Parcel]) -> list[Outcome]:
        addresses = [parcel.address for parcel in parcels]
        outcomes = write_frames(
            self._names, addresses, [p.view for p in parcels], [p.header for p in parcels], self._codec
        )
        self._note([a for a, outcome in zip(addresses, outcomes, strict=True) if outcome.done])
        return outcomes

    def _delete(self, addresses: Sequence[Address]) -> None:
        self._names.delete(addresses)

    def _lost(self, addresses: Sequence[Address], corrupt: Sequence[Address]) -> None:
        with self._lock:
            self.forget(addresses)
        if corrupt:  # what only could not be read now may be good, for us later and for others at once
            self._delete(corrupt)

    def _refresh(self, addresses: Sequence[Address]) -> None:
        self._names.touch(addresses)

    def _ping(self) -> None:
        self._names.ping()

    def _remember(self, identity: bytes, text: str) -> None:
        self._names.remember("identity", identity, text)
