"""Priority with a time to live: what has expired goes first, then the lower priority, then what was used longest ago."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Container

from kvtier.abc.policy import EntryMeta, EvictionPolicy
from kvtier.key import Address
from kvtier.policy.heap import RisingHeap


class TtlPolicy(EvictionPolicy):
    """An LRU list per priority, and a heap of what expires, O(log n). A use does not put an expiry off."""

    def __init__(self, capacity: int) -> None:
        del capacity  # keeps no ghosts
        self._priority: dict[Address, int] = {}
        self._lists: dict[int, OrderedDict[Address, None]] = {}
        self._priorities: list[int] = []
        """Those that have entries, sorted."""
        self._expiring = RisingHeap()

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        self._priority[entry] = meta.priority
        order = self._lists.get(meta.priority)
        if order is None:
            order = self._lists[meta.priority] = OrderedDict()
            self._priorities.insert(bisect_left(self._priorities, meta.priority), meta.priority)
        order[entry] = None
        if meta.expires_at is not None:
            self._expiring.put(entry, meta.expires_at)

    def touch(self, entry: Address, now: float) -> None:
        self._lists[self._priority[entry]].move_to_end(entry)

    def refresh(self, entry: Address, now: float) -> None:
        self.touch(entry, now)

    def remove(self, entry: Address, *, evicted: bool) -> None:
        priority = self._priority.pop(entry)
        order = self._lists[priority]
        del order[entry]
        if not order:
            del self._lists[priority]
            del self._priorities[bisect_left(self._priorities, priority)]
        if entry in self._expiring:
            self._expiring.drop(entry)

    def victims(self, count: int, protected: Container[Address], now: float) -> list[Address] | None:
        chosen = dict.fromkeys(self._expiring.least(count, protected, now))
        order = (entry for priority in self._priorities for entry in self._lists[priority])
        while len(chosen) < count:
            entry = next(order, None)
            if entry is None:
                return None
            if entry not in protected:
                chosen[entry] = None
        return list(chosen)
