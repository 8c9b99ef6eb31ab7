"""Segmented LRU (Karedla, Love, Wherry: Caching strategies to improve disk system performance, 1994)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from itertools import chain, islice

from kvtier.abc.policy import EntryMeta, EvictionPolicy
from kvtier.key import Address

PROTECTED_SHARE = 0.8
"""Of the capacity; the rest is for what has been used once. The usual choice: a larger one lets one-off prompts push less."""


class SlruPolicy(EvictionPolicy):
    """What comes is on probation; a use protects it; what is protected too long without one is on probation again."""

    def __init__(self, capacity: int) -> None:
        self._most_protected = max(1, int(capacity * PROTECTED_SHARE))
        self._probation: OrderedDict[Address, None] = OrderedDict()
        self._protected: OrderedDict[Address, None] = OrderedDict()

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        self._probation[entry] = None

    def touch(self, entry: Address, now: float) -> None:
        if entry in self._protected:
            self._protected.move_to_end(entry)
            return
        del self._probation[entry]
        self._protected[entry] = None
        if len(self._protected) > self._most_protected:
            self._probation[self._protected.popitem(last=False)[0]] = None

    def refresh(self, entry: Address, now: float) -> None:
        (self._protected if entry in self._protected else self._probation).move_to_end(entry)

    def remove(self, entry: Address, *, evicted: bool) -> None:
        del (self._protected if entry in self._protected else self._probation)[entry]

    def victims(self, count: int, protected: Container[Address], now: float) -> list[Address] | None:
        order = chain(self._probation, self._protected)
        chosen = list(islice((entry for entry in order if entry not in protected), count))
        return chosen if len(chosen) == count else None
