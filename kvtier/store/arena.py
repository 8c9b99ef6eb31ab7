"""The DRAM tier: where every block passes on its way up or down."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.abc.medium import SlotMedium
from kvtier.abc.policy import EntryMeta, EvictionPolicy
from kvtier.codec.frame import FrameHeader
from kvtier.key import Address, Lot, address
from kvtier.pool import BlockPool, Slot
from kvtier.store.headers import HeaderTable
from kvtier.tier.pins import Pins


def entry_meta(header: FrameHeader, priority: int = 0) -> EntryMeta:
    """What a policy may know of a block, its expiry still on the wall's clock."""
    parent = address(header.parent, header.shard) if header.depth else None
    return EntryMeta(
        parent,
        header.depth,
        header.raw_bytes,
        priority=priority,
        expires_at=header.expires_at,
        tenant=header.tenant,
    )


@dataclass(frozen=True, slots=True)
class Gone:
    """A block that had to leave DRAM, and whether every lower tier had declined it."""

    address: Address
    declined: bool


class Arena:
    """Slots of DRAM, what each holds, and which lower tiers each is still owed to. Called under the store's lock."""

    def __init__(self, medium: SlotMedium, policy: EvictionPolicy) -> None:
        self.medium = medium
        self.pool = BlockPool(medium.slots, policy)
        self.headers = HeaderTable(medium.slots)
        self.owed = bytearray(medium.slots)
        """Per slot a bit per lower tier that is still to be offered, or is being written."""
        self.below = bytearray(medium.slots)
        """Per slot a bit per lower tier that took it."""
        self.pins = Pins(self.pool)
        self.priorities: dict[Slot, int] = {}
        """Of blocks that have another than 0: tiers below are told."""
        self._quarantined: list[Slot] = []
        self._most_quarantined = max(1, medium.slots // 100)

    def view(self, slot: Slot) -> memoryview:
        """The whole place, padding included: a medium that moves pages moves it in one piece, whatever a block's size."""
        view = self.medium.view(slot)
        assert view is not None, "DRAM is addressable"
        return view

    def take(self, count: int, now: float) -> tuple[list[Slot], list[Gone]]:
        """Up to ``count`` WRITING slots: free ones, or those of clean victims. Never waits for a demotion."""
        self.pins.expire(now)
        victims = self.pool.victims(max(0, count - self.pool.free), now, self.owed, fewer=True) or []
        gone = [self.drop(slot, evicted=True) for slot in victims]
        self.pool.release(victims, now)
        allocation = self.pool.allocate(min(count, self.pool.free), now, evict=False)
        assert allocation is not None
        return allocation.slots, gone

    def has_room(self, count: int) -> bool:
        """Whether ``take`` would give ``count`` slots."""
        return count <= self.pool.free or count <= self.pool.room(self.owed)

    def coldest_owing(self, count: int, now: float) -> list[Slot]:
        """Up to ``count`` slots that some lower tier is still to be offered, in the order in which they will want to go."""
        paid = bytearray((np.frombuffer(self.owed, np.uint8) == 0).tobytes())
        return self.pool.coldest(count, now, paid)

    def show(self, slot: Slot, address: Address, header: FrameHeader, now: float, priority: int = 0) -> bool:
        """Commit a WRITING slot; False where the block is there already."""
        meta = entry_meta(header, priority).shifted(now - time.time())
        if not self.pool.commit(slot, address, meta, now):
            return False
        if priority:
            self.priorities[slot] = priority
        above = None if meta.parent is None else self.pool.slot(meta.parent)
        self.headers.put(slot, header, meta.parent if above is None else self.pool.entry(above))
        for below in self.pool.children(slot):  # chains are shown tail first
            self.headers.share_parent(below, address)
        self.owed[slot] = 0
        self.below[slot] = 0
        return True

    def drop(self, slot: Slot, *, evicted: bool) -> Gone:
        """Take a READY slot off the map, with one reference of the caller's to release."""
        gone = Gone(self.pool.retire(slot, evicted=evicted), self.below[slot] == 0)
        self.headers.drop(slot)
        self.pins.drop(slot)
        self.priorities.pop(slot, None)
        self.owed[slot] = 0
        return gone

    def quarantine(self, slot: Slot) -> None:
        """Take a READY slot whose content did not prove off the map, and out of use while that is affordable."""
        self.drop(slot, evicted=False)
        self._quarantined.append(slot)
        while len(self._quarantined) > self._most_quarantined:
            self.pool.release([self._quarantined.pop(0)], 0.0)

    @property
    def owing_count(self) -> int:
        return len(self.owed) - self.owed.count(0)

    @property
    def quarantined(self) -> list[Slot]:
        return list(self._quarantined)

    def header(self, slot: Slot) -> FrameHeader:
        entry = self.pool.entry(slot)
        header = entry and self.headers.get(slot, entry)
        assert header, f"slot {slot} is resident"
        return header

    def check(self) -> list[str]:
        """Disagreements between the pool and what is known of its slots, in words."""
        found = self.pool.check() + self.pins.check()
        for entry in self.pool.entries():
            slot = self.pool.slot(entry)
            assert slot is not None
            if self.headers.get(slot, entry) is None:
                found.append(f"dram slot {slot} has an entry and no header")
        if self.headers.count != self.pool.ready:
            found.append(f"dram has {self.headers.count} headers for {self.pool.ready} blocks")
        return found

    def cleared(self, start: int, stop: int, cleared: Callable[[Lot], bool]) -> list[Address]:
        """The blocks in slots from ``start`` to before ``stop`` whose lots have been cleared."""
        entries = map(self.pool.entry, self.headers.slots_of(start, stop, cleared))
        return [entry for entry in entries if entry is not None]

    def not_below(self, bit: int) -> None:
        """A lower tier has lost all that it took."""
        for slot, below in enumerate(self.below):
            if below & bit:
                self.below[slot] = below & ~bit

    def clean(self, slots: Sequence[Slot], bit: int, *, taken: bool) -> None:
        """A lower tier took the blocks, or declined them: either way they are owed to it no more."""
        for slot in slots:
            self.owed[slot] &= ~bit
            if taken:
                self.below[slot] |= bit
