"""The way down: which lower tiers a block in DRAM is owed to, and the queues in which it waits for them.

Write mode ``through`` is offered a block as soon as DRAM shows it, ``selective`` when a later match reaches it, ``back`` when
its DRAM slot is wanted, and at drain. A tier's admission may decline it; a queue is bounded and drops rather than waits. A
block that every lower tier has declined counts as clean.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from kvtier.abc.store import Reason
from kvtier.config import WriteMode
from kvtier.key import Address
from kvtier.pool import Slot
from kvtier.store.arena import Arena, entry_meta
from kvtier.store.parts import Parts
from kvtier.tier.lower import LowerTier, Parcel
from kvtier.transfer.workers import Urgency

BATCH_BYTES = 32 << 20
"""Bytes of one write to a lower tier: one fdatasync and one index transaction stand for all of them."""
MOST_OFFERED = 512
"""Blocks offered at once beyond the low mark of the reserve: some milliseconds under the store's lock. The next call goes on."""


class Outbox:
    """Blocks that wait to be written to one tier. Each holds a reference on its DRAM slot until then."""

    def __init__(self, tier: LowerTier, arena: Arena, bit: int, lock: threading.Lock) -> None:
        self.tier = tier
        self.bit = bit
        self._arena = arena
        self._lock = lock
        self._waiting: deque[Slot] = deque()
        self.writing: list[Slot] = []
        self._held: set[Slot] = set()
        self._sending: set[Address] = set()
        self._cancelled: set[Address] = set()
        self._most = max(1, arena.pool.capacity // 2)
        self._batch = max(1, min(BATCH_BYTES // max(1, arena.medium.slot_bytes), self._most))

    @property
    def slots(self) -> set[Slot]:
        """Every slot that the outbox holds a reference on."""
        return self._held

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._most

    def offer(self, slot: Slot) -> None:
        """Queue a block; declined at once where the queue is full, the tier out of use or not in want of it. Under the lock."""
        if self.full or not self.tier.usable:
            self._arena.clean([slot], self.bit, taken=False)
            self.tier.metrics.save_dropped(Reason.TIER_DEGRADED if not self.tier.usable else Reason.QUEUE_FULL)
            return
        address = self._arena.pool.entry(slot)
        assert address is not None, "what is offered is resident"
        if not self.tier.admits(address, self._arena.medium.slot_bytes):
            self._arena.clean([slot], self.bit, taken=False)
            self.tier.metrics.save_dropped(Reason.DECLINED)
            return
        self._arena.pool.acquire([slot])
        self._held.add(slot)
        self._waiting.append(slot)
        self._start()

    def cancel(self, addresses: Sequence[Address]) -> None:
        """Blocks were dropped: what of them is being written is deleted again. Under the lock."""
        self._cancelled.update(self._sending.intersection(addresses))

    def _start(self) -> None:
        if self._waiting and not self.writing:
            self.writing = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
            if not self.tier.workers.submit(Urgency.SAVE, self._write):
                declined = [*self.writing, *self._waiting]
                self.writing = []
                self._waiting.clear()
                self._end(declined, [False] * len(declined))
                self.tier.metrics.save_dropped(Reason.QUEUE_FULL, len(declined))

    def _write(self) -> None:
        """On a transfer thread, without the lock."""
        with self._lock:
            slots = self.writing
            parcels = [self._parcel(slot) for slot in slots if self._arena.pool.entry(slot) is not None]
            live = [slot for slot in slots if self._arena.pool.entry(slot) is not None]
            self._sending = {parcel.address for parcel in parcels}
        outcomes = self.tier.put(parcels)
        with self._lock:
            done = {slot: outcome.done for slot, outcome in zip(live, outcomes, strict=True)}
            undone = [parcel.address for parcel in parcels if parcel.address in self._cancelled]
            self._sending = set()
            self._cancelled.clear()
            self.tier.forget(undone)
            self.writing = []
            self._end(slots, [done.get(slot, False) for slot in slots])
            self._start()
        if undone:
            self.tier.delete(undone)

    def _parcel(self, slot: Slot) -> Parcel:
        header = self._arena.header(slot)
        address = self._arena.pool.entry(slot)
        assert address is not None
        meta = entry_meta(header, self._arena.priorities.get(slot, 0))
        return Parcel(address, meta, header, self._arena.view(slot), self._arena.pins.until(slot))

    def _end(self, slots: Sequence[Slot], taken: Sequence[bool]) -> None:
        for slot, was_taken in zip(slots, taken, strict=True):
            if self._arena.pool.entry(slot) is not None:
                self._arena.clean([slot], self.bit, taken=was_taken)
        self._held.difference_update(slots)
        self._arena.pool.release(slots, 0.0)


class Demoter:
    """Decides what goes down, and when. Called under the store's lock."""

    def __init__(self, parts: Parts) -> None:
        self._arena = arena = parts.arena
        self._dram = parts.dram
        self._tiers = parts.tiers
        self._history = parts.history
        self._clock = parts.clock
        self.bits = {tier.name: 1 << index for index, tier in enumerate(parts.tiers)}
        self.outboxes = {tier.name: Outbox(tier, arena, self.bits[tier.name], parts.lock) for tier in parts.tiers}
        self._low = max(1, arena.pool.capacity // 8)
        self._high = max(1, arena.pool.capacity // 4)

    def make_room(self, count: int) -> list[Slot]:
        """Up to ``count`` free or clean slots of DRAM; it is remembered why a block that had to go for them went."""
        slots, gone = self._arena.take(count, self._clock())
        for one in gone:
            self._history.went([one.address], Reason.DECLINED if one.declined and self._tiers else Reason.EVICTED)
        if gone:
            self._dram.evicted(Reason.EVICTED, len(gone))
        return slots

    def owe_new(self, slot: Slot, address: Address) -> None:
        """A block was saved into DRAM: owed to every tier that takes blocks unasked and lacks it."""
        bits = 0
        for tier in self._tiers:
            if tier.holds(address):
                self._arena.below[slot] |= self.bits[tier.name]
            elif tier.write is not WriteMode.SELECTIVE:
                bits |= self.bits[tier.name]
        self._owe(slot, bits)

    def owe_promoted(self, slot: Slot, address: Address, source: LowerTier) -> None:
        """A block came up from ``source``: owed to the faster tiers that take blocks unasked and lack it."""
        self._arena.below[slot] |= self.bits[source.name]
        bits = 0
        for tier in self._tiers[: self._tiers.index(source)]:
            if tier.write is not WriteMode.SELECTIVE and not tier.holds(address):
                bits |= self.bits[tier.name]
        self._owe(slot, bits)

    def used_again(self, slot: Slot, address: Address) -> None:
        """A later match has reached the block: owed to the tiers that waited for that."""
        bits = 0
        for tier in self._tiers:
            if tier.offered_again and tier.usable and not tier.holds(address):
                bits |= self.bits[tier.name]
        self._owe(slot, bits & ~self._arena.below[slot])

    def _owe(self, slot: Slot, bits: int) -> None:
        bits &= ~self._arena.owed[slot]
        if not bits:
            return
        self._arena.owed[slot] |= bits
        for tier in self._tiers:
            if bits & self.bits[tier.name] and (tier.write is not WriteMode.BACK or not tier.usable):
                self.outboxes[tier.name].offer(slot)

    def keep_reserve(self, held: int) -> None:
        """Below the low mark of free or clean slots, offer the coldest blocks to ``back`` tiers until the high mark.

        A clean block above one that is still owed cannot go, so it does not count as reserve.
        """
        reserve = self._arena.pool.capacity - self._arena.owing_count - held
        if reserve >= self._low and not self._arena.has_room(self._low):
            reserve = 0
        coming = sum(len(outbox.slots) for outbox in self.outboxes.values())
        if reserve < self._low and reserve + coming < self._high:
            most = max(MOST_OFFERED, self._low - reserve - coming)
            for slot in self._arena.coldest_owing(min(most, self._high - reserve - coming), self._clock()):
                self._offer_back(slot)

    def flush(self) -> int:
        """Offer ``back`` tiers what they lack, as far as their queues have room; how many blocks are still owed."""
        for address in self._arena.pool.entries() if self._arena.owing_count else []:
            slot = self._arena.pool.slot(address)
            if slot is not None and self._arena.owed[slot]:
                self._offer_back(slot)
        return self._arena.owing_count

    def _offer_back(self, slot: Slot) -> None:
        for tier in self._tiers:
            outbox = self.outboxes[tier.name]
            owed = tier.write is WriteMode.BACK and self._arena.owed[slot] & outbox.bit and slot not in outbox.slots
            if owed and not (outbox.full and tier.usable):
                outbox.offer(slot)
