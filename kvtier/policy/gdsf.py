"""GreedyDual-Size-Frequency (Cherkasova: Improving WWW proxies performance with GreedyDual-Size-Frequency caching, 1998)."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from kvtier.abc.policy import EntryMeta, EvictionPolicy
from kvtier.key import Address
from kvtier.policy.heap import RisingHeap


class GdsfPolicy(EvictionPolicy):
    """Evicts the lowest ``age + uses * cost / bytes``, where ``age`` is the value of what was evicted last. O(log n).

    ``cost`` is in seconds. Where nobody said, a byte costs one: blocks of one size then go by how often they were used. So it
    is in the engine's and the store's tiers: what the gate knows of computing is the same for every block of a pool.
    """

    def __init__(self, capacity: int) -> None:
        del capacity  # keeps no ghosts
        self._age = 0.0
        self._uses: dict[Address, tuple[int, float]] = {}
        """Uses, and cost per byte."""
        self._values = RisingHeap()

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        self._stand(entry, 1, meta.cost / max(1, meta.nbytes) if meta.cost > 0 else 1.0)

    def touch(self, entry: Address, now: float) -> None:
        uses, worth = self._uses[entry]
        self._stand(entry, uses + 1, worth)

    def pass_over(self, entries: Sequence[Address], now: float) -> None:
        for entry in entries:
            self._stand(entry, *self._uses[entry])

    def _stand(self, entry: Address, uses: int, worth: float) -> None:
        self._uses[entry] = (uses, worth)
        self._values.put(entry, self._age + uses * worth)

    def remove(self, entry: Address, *, evicted: bool) -> None:
        if evicted:
            self._age = max(self._age, self._values.value(entry))
        self._values.drop(entry)
        del self._uses[entry]

    def victims(self, count: int, protected: Container[Address], now: float) -> list[Address] | None:
        chosen = self._values.least(count, protected, math.inf)
        return chosen if len(chosen) == count else None
