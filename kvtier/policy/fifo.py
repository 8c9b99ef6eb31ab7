"""First in, first out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from itertools import islice

from kvtier.abc.policy import EntryMeta, EvictionPolicy
from kvtier.key import Address


class FifoPolicy(EvictionPolicy):
    """Evicts what came first, used or not."""

    def __init__(self, capacity: int) -> None:
        del capacity  # keeps no ghosts
        self._order: OrderedDict[Address, None] = OrderedDict()

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        self._order[entry] = None

    def touch(self, entry: Address, now: float) -> None:
        pass

    def pass_over(self, entries: Sequence[Address], now: float) -> None:
        for entry in entries:
            self._order.move_to_end(entry)

    def remove(self, entry: Address, *, evicted: bool) -> None:
        del self._order[entry]

    def victims(self, count: int, protected: Container[Address], now: float) -> list[Address] | None:
        chosen = list(islice((entry for entry in self._order if entry not in protected), count))
        return chosen if len(chosen) == count else None
