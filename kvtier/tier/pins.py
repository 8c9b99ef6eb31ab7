"""Blocks that requests have asked not to be evicted for a while."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvtier.pool import BlockPool, Slot

PIN_SHARE = 0.25
"""Share of a tier's slots that pins may take. With the half that leases may take, room is left for what is saved."""
EXPIRY_SECONDS = 1.0
"""Pins are looked through for ended ones at most so often: one lasts up to this much longer than asked."""


class Pins:
    """The pinned slots of one pool. Called under its owner's lock; a slot that loses its block is to be dropped here."""

    def __init__(self, pool: BlockPool) -> None:
        self._most = int(pool.capacity * PIN_SHARE)
        self._until: dict[Slot, float] = {}
        self._marks = pool.pinned
        self._due = math.inf

    def __len__(self) -> int:
        return len(self._until)

    def pin(self, slots: Sequence[Slot], until: float, now: float) -> int:
        """Pin READY slots, heads of chains first, until that time at least; how many were refused because the share is full."""
        self.expire(now)
        refused = 0
        for slot in slots:
            known = self._until.get(slot)
            if known is None and len(self._until) >= self._most:
                refused += 1
            elif known is None or known < until:
                self._until[slot] = until
                self._marks[slot] = 1
        self._due = min(self._due, until)
        return refused

    def until(self, slot: Slot) -> float:
        """When the slot's pin ends; 0 where it has none."""
        return self._until.get(slot, 0.0)

    def drop(self, slot: Slot) -> None:
        """The slot no longer holds the block that was pinned."""
        if self._until.pop(slot, None) is not None:
            self._marks[slot] = 0

    def expire(self, now: float) -> None:
        """Let go of pins whose time is up."""
        if now < self._due:
            return
        for slot in [slot for slot, until in self._until.items() if until <= now]:
            self.drop(slot)
        left = min(self._until.values(), default=math.inf)
        self._due = max(left, now + EXPIRY_SECONDS)

    def check(self) -> list[str]:
        """Disagreements between the pins and their marks, in words."""
        marked = {slot for slot, mark in enumerate(self._marks) if mark}
        found = [] if marked == self._until.keys() else [f"{len(marked)} slots are marked as pinned, {len(self)} are"]
        if len(self) > self._most:
            found.append(f"{len(self)} slots are pinned, {self._most} may be")
        return found
