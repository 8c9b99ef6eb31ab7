"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from itertools import islice

from kvtier.abc.policy import EntryMeta, EvictionPolicy
from kvtier.key import Address


class LruPolicy(EvictionPolicy):
    """Evicts what was used longest ago; entries touched together go in the order they were touched in."""

    def __init__(self, capacity: int) -> None:
        del capacity  # keeps no ghosts
        self._order: OrderedDict[Address, None] = OrderedDict()

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        self._order[entry] = None

    def touch(self, entry: Address, now: float) -> None:
        self._order.move_to_end(entry)

    def refresh(self, entry: Address, now: float) -> None:
        self.touch(entry, now)

    def touch_all(self, entries: Sequence[Address], now: float) -> None:
        to_end = self._order.move_to_end
        for entry in entries:
            to_end(entry)

    def refresh_all(self, entries: Sequence[Address], now: float) -> None:
        self.touch_all(entries, now)

    def remove(self, entry: Address, *, evicted: bool) -> None:
        del self._order[entry]

    def victims(self, count: int, protected: Container[Address], now: float) -> list[Address] | None:
        chosen = list(islice((entry for entry in self._order if entry not in protected), count))
        return chosen if len(chosen) == count else None
