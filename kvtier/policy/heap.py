"""Entries by a value that may only rise, least first."""

from __future__ import annotations

import heapq
from collections.abc import Container

from kvtier.key import Address


class RisingHeap:
    """A binary heap in which what has risen is put where it belongs when it comes up.

    O(log n) amortised for each call and each entry that is passed over. Of equal values the one that was put first is the
    least. The heap holds turns, not entries: nothing of a dropped one is left.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._key: dict[Address, tuple[float, int]] = {}
        self._place: dict[Address, int] = {}
        """The turn under which an entry stands in the heap: that of its key, or a former one."""
        self._entry: dict[int, Address] = {}
        """By place."""
        self._heap: list[tuple[float, int]] = []

    def put(self, entry: Address, value: float) -> None:
        """Add an entry, or let it rise to ``value``."""
        self._turn += 1
        self._key[entry] = (value, self._turn)
        if entry not in self._place:
            self._stand(entry)

    def _stand(self, entry: Address) -> None:
        key = self._key[entry]
        self._place[entry] = key[1]
        self._entry[key[1]] = entry
        heapq.heappush(self._heap, key)

    def __contains__(self, entry: Address) -> bool:
        return entry in self._key

    def value(self, entry: Address) -> float:
        return self._key[entry][0]

    def drop(self, entry: Address) -> None:
        del self._key[entry], self._entry[self._place.pop(entry)]
        if len(self._heap) > 2 * len(self._key):
            self._heap = list(self._key.values())
            heapq.heapify(self._heap)
            self._place = {entry: key[1] for entry, key in self._key.items()}
            self._entry = {turn: entry for entry, turn in self._place.items()}

    def least(self, count: int, protected: Container[Address], at_most: float) -> list[Address]:
        """Up to ``count`` entries outside ``protected`` with values up to ``at_most``, least first."""
        heap, chosen, back = self._heap, list[Address](), list[tuple[float, int]]()
        while heap and len(chosen) < count and heap[0][0] <= at_most:
            key = heapq.heappop(heap)
            entry = self._entry.get(key[1])
            if entry is None:
                continue  # it was dropped
            if self._key[entry] != key:
                del self._entry[key[1]]
                self._stand(entry)
                continue
            back.append(key)
            if entry not in protected:
                chosen.append(entry)
        for key in back:
            heapq.heappush(heap, key)
        return chosen
