"""A persistent slot medium below DRAM."""

from __future__ import annotations

import logging
import math
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from kvtier.abc.codec import Codec
from kvtier.abc.medium import Outcome, PersistentSlotMedium, Record, Status
from kvtier.abc.policy import Choice, EntryMeta, EvictionPolicy
from kvtier.abc.store import Reason
from kvtier.codec.frame import Asked, FrameHeader
from kvtier.config import TierOptions
from kvtier.errors import MediumFull
from kvtier.key import Address, Lot, address
from kvtier.machine import give_back_memory
from kvtier.metrics import TierMetrics
from kvtier.pool import BlockPool, Slot
from kvtier.tier.lower import LowerTier, Parcel
from kvtier.tier.pins import Pins
from kvtier.transfer.copy import read_frames, write_frames
from kvtier.transfer.workers import Workers

_log = logging.getLogger(__name__)

STEP = 256
"""Slots that are looked at while the lock is held once: some 3 ms where all of them go."""
STEPS = 64
"""Of these a search for cleared blocks makes so many at a time."""
ROWS = 4096
"""Rows that are deleted in one transaction."""
_MOST_LOTS = 1 << 16
"""Lots that are kept once; past this equal ones may be kept several times."""


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name, options, medium, codec, workers, metrics, lock, clock, medium.slots)
        self._slots = medium
        self.pool = BlockPool(medium.slots, policy)
        self._pins = Pins(self.pool)
        self._used: dict[Slot, float] = {}
        self._leaving: list[Slot] = []
        """Out of the index, and free as soon as the journal has deleted their rows."""
        self._quarantined: list[Slot] = []
        self._most_quarantined = max(1, medium.slots // 100)
        self._lots: list[Lot | None] = [None] * medium.slots
        """Per slot the lot of the block that it holds or held last."""
        self._known_lots: dict[Lot, Lot] = {}
        self._swept = 0
        """Slot up to which cleared blocks have been looked for."""
        self._recover()
        give_back_memory()

    def _recover(self) -> None:
        """Adopt the journal's rows, coldest first, so that eviction goes on where it stopped. Of two for a block the later.

        By columns: rows as objects would take more than all that is kept of them.
        """
        names, parents = list[Address](), list[Address | None]()
        slots, depths, used, expiries = array("q"), array("q"), array("d"), array("d")
        for row in self._slots.journal.load():
            names.append(row.address)
            parents.append(row.parent if row.depth else None)
            slots.append(row.slot)
            depths.append(row.depth)
            used.append(row.used)
            expiries.append(math.inf if row.expires_at is None else row.expires_at)
            self._lots[row.slot] = self._one(Lot(row.identity, row.tenant, row.adapter, row.epoch))
        order = np.lexsort((-np.frombuffer(depths, np.int64), np.frombuffer(used))) if names else ()
        last = {names[at]: int(at) for at in order}
        to_our_clock = self._clock() - time.time()

        def meta(at: int) -> EntryMeta:
            expires_at = None if math.isinf(expiries[at]) else expiries[at]
            lot = self._lots[slots[at]]
            assert lot is not None, "given above"
            told = EntryMeta(parents[at], depths[at], self._slots.slot_bytes, expires_at=expires_at, tenant=lot.tenant)
            return told.shifted(to_our_clock)

        self.pool.adopt([Slot(slots[at]) for at in last.values()], list(last), map(meta, last.values()), 0.0)

    def places(self, addresses: Sequence[Address]) -> list[Slot | None]:
        return self.pool.places(addresses)

    def holds(self, address: Address) -> bool:
        return self.pool.slot(address) is not None

    def forget(self, addresses: Sequence[Address]) -> None:
        self._leaving += self._retired(addresses)

    def _retired(self, addresses: Sequence[Address]) -> list[Slot]:
        slots = self.pool.resident(addresses)
        for slot in slots:
            self._retire(slot, evicted=False)
        return slots

    def _retire(self, slot: Slot, *, evicted: bool) -> Address:
        self._used.pop(slot, None)
        self._pins.drop(slot)
        return self.pool.retire(slot, evicted=evicted)

    def touch(self, addresses: Sequence[Address], now: float) -> Sequence[Address]:
        slots = self.pool.resident(addresses)
        self.pool.touch(slots, now)
        self._used.update(dict.fromkeys(slots, time.time()))
        return ()  # recency is written down now and then, for all

    def pin(self, addresses: Sequence[Address], until: float, now: float) -> None:
        slots = self.pool.resident(addresses)
        self.metrics.pins_refused(self._pins.pin(slots, until, now))

    def choice(self) -> Choice | None:
        return self.pool.choice()

    def pinned(self, now: float) -> int:
        self._pins.expire(now)
        return len(self._pins)

    def check(self) -> list[str]:
        found = self.pool.check() + self._slots.check() + self._pins.check()
        kept = len(self._leaving) + len(self._quarantined)
        if self.workers.idle and self.pool.retiring != kept:
            found.append(f"{self.pool.retiring} slots are retiring, {kept} have a reason to")
        if self.workers.idle and self.pool.referenced != kept:
            found.append(f"leaked lease: {self.pool.referenced} slots are referenced, {kept} have a reason to be")
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
        return self.pool.counts()

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
                self._slots,
                slots,
                [views[i] for i in at],
                [asked[i] for i in at],
                self._codec,
                now=time.time(),
                sealer=self._sealer,
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
            outcomes[index] = Outcome(Status.FULL, 0, "no slot that may be evicted")
        kept: list[tuple[Slot, Parcel]] = []
        try:
            chosen = [parcels[index] for index in new[: len(slots)]]
            written = write_frames(
                self._slots,
                slots,
                [p.view for p in chosen],
                [p.header for p in chosen],
                self._codec,
                sealer=self._sealer,
            )
            for index, slot, parcel, outcome in zip(new, slots, chosen, written, strict=False):
                outcomes[index] = outcome
                if outcome.done:
                    kept.append((slot, parcel))
            self._slots.journal.commit([self._record(slot, parcel) for slot, parcel in kept], [])
            with self._lock:
                now = self._clock()
                for slot, parcel in reversed(kept):
                    self.pool.commit(slot, parcel.address, parcel.meta.shifted(now - time.time()), now)
                    self._lots[slot] = self._one(parcel.header.lot)
                for slot, parcel in kept:
                    if parcel.pinned_until > now and self.pool.slot(parcel.address) == slot:
                        self.metrics.pins_refused(self._pins.pin([slot], parcel.pinned_until, now))
        finally:
            with self._lock:
                self.pool.release(slots, 0.0)
        return outcomes

    def _record(self, slot: Slot, parcel: Parcel) -> Record:
        header = parcel.header
        parent = address(header.parent, header.shard)
        return Record(
            slot,
            parcel.address,
            parent,
            header.depth,
            header.tenant,
            time.time(),
            header.expires_at,
            header.identity,
            header.adapter,
            header.epoch,
        )

    def _one(self, lot: Lot) -> Lot:
        """The one object that stands for equal lots."""
        if len(self._known_lots) > _MOST_LOTS:
            self._known_lots.clear()
        return self._known_lots.setdefault(lot, lot)

    def _make_room(self, count: int) -> list[Slot]:
        """Up to ``count`` slots to write to. A slot is reused only after its delete is committed.

        What left before goes first: where an index that is full takes no deletes, nothing more is to leave for nothing.
        """
        if self._leaving:
            self._let_go()
        with self._lock:
            now = self._clock()
            self._pins.expire(now)
            victims = self.pool.victims(max(0, count - self.pool.free), now, fewer=True) or []
            self.lost_room([self._retire(slot, evicted=True) for slot in victims])
            self._leaving += victims
        if victims:
            self.metrics.evicted(Reason.EVICTED, len(victims))
            self._let_go()
        with self._lock:
            got = self.pool.allocate(min(count, self.pool.free), 0.0, evict=False)
            return got.slots if got is not None else []

    def _delete(self, addresses: Sequence[Address]) -> None:
        del addresses  # whatever ``forget`` has taken out of the index goes
        self._let_go()

    def _let_go(self) -> None:
        """Free what has left the index, once its rows are deleted; what cannot be deleted now is tried again."""
        while True:
            with self._lock:
                leaving, self._leaving = self._leaving[:ROWS], self._leaving[ROWS:]
            try:
                self._slots.journal.commit([], leaving)
            except BaseException:
                with self._lock:
                    self._leaving += leaving
                raise
            with self._lock:
                self.pool.release(leaving, 0.0)
                if not self._leaving:
                    return

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
        with suppress(MediumFull):  # which is an answer: what is there can be read
            self._let_go()

    def identities(self) -> set[bytes]:
        nobody: set[bytes] = set()
        return self._guarded("identities", self._slots.journal.identities, nobody)

    def clear(self) -> bool:
        entries = self.pool.entries()
        for start in range(0, len(entries), STEP):
            with self._lock:
                self.forget(entries[start : start + STEP])
        self._guarded("clear", self._slots.drop_others, 0)
        return self.usable

    def stale(self, cleared: Callable[[Lot], bool]) -> int:
        count = 0
        for start in range(0, self.pool.capacity, STEP):
            with self._lock:
                count += len(self._stale_in(start, cleared))
        return count

    def _stale_in(self, start: int, cleared: Callable[[Lot], bool]) -> list[Address]:
        """Entries of the slots from ``start`` on whose lots have been cleared."""
        lots = self._lots[start : start + STEP]
        answers = {lot: lot is not None and cleared(lot) for lot in set(lots)}
        entries = [self.pool.entry(Slot(slot)) for slot, lot in enumerate(lots, start) if answers[lot]]
        return [entry for entry in entries if entry is not None]

    def _reclaim(self, cleared: Callable[[Lot], bool]) -> tuple[list[Address], bool]:
        gone: list[Address] = []
        for start in range(self._swept, min(self._swept + STEP * STEPS, self.pool.capacity), STEP):
            with self._lock:
                stale = self._stale_in(start, cleared)
                self.forget(stale)
            gone += stale
        self._swept += STEP * STEPS
        if self._swept >= self.pool.capacity:
            self._swept = 0
        self._let_go()
        return gone, self._swept == 0
