"""Least frequently used, where every use counts less as time goes on.

The count of an entry is the sum of 2^-(age/half-life) over its uses: LRFU with that weighing function (Lee and others: LRFU: a
spectrum of policies that subsumes the least recently used and least frequently used policies, IEEE ToC 2001).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Container, Sequence
from itertools import islice

from kvtier.abc.policy import EntryMeta, EvictionPolicy
from kvtier.key import Address

HALF_LIFE = 4.0
"""In references per entry of capacity: long enough to tell often from seldom, short enough that yesterday's favourites go."""
STEPS = 4
"""Buckets per doubling of the count; within one the entry used longest ago goes first."""


class LfuPolicy(EvictionPolicy):
    """Evicts the lowest decayed count.

    All counts fall at one rate, so their order changes only when an entry is used: an entry stands in the bucket of
    ``log2(count) + references / half-life`` as of its last use, and nothing has to be halved now and then.
    """

    def __init__(self, capacity: int) -> None:
        self._half_life = HALF_LIFE * capacity
        self._references = 0
        self._score: dict[Address, float] = {}
        self._buckets: dict[int, OrderedDict[Address, None]] = {}
        self._order: list[int] = []
        """Numbers of the buckets, sorted."""

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        self._references += 1
        self._put(entry, self._references / self._half_life)

    def touch(self, entry: Address, now: float) -> None:
        self._references += 1
        time, score = self._references / self._half_life, self._score[entry]
        self._out(entry, score)
        self._put(entry, time + math.log2(1.0 + 2.0 ** (score - time)))

    def pass_over(self, entries: Sequence[Address], now: float) -> None:
        time = self._references / self._half_life
        for entry in entries:
            score = self._score[entry]
            self._out(entry, score)
            self._put(entry, max(score, time))  # as if used just now, and never before

    def remove(self, entry: Address, *, evicted: bool) -> None:
        self._out(entry, self._score.pop(entry))

    def victims(self, count: int, protected: Container[Address], now: float) -> list[Address] | None:
        order = (entry for number in self._order for entry in self._buckets[number])
        chosen = list(islice((entry for entry in order if entry not in protected), count))
        return chosen if len(chosen) == count else None

    def _put(self, entry: Address, score: float) -> None:
        self._score[entry] = score
        number = math.floor(score * STEPS)
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = OrderedDict()
            self._order.insert(bisect_left(self._order, number), number)
        bucket[entry] = None

    def _out(self, entry: Address, score: float) -> None:
        number = math.floor(score * STEPS)
        bucket = self._buckets[number]
        del bucket[entry]
        if not bucket:
            del self._buckets[number]
            del self._order[bisect_left(self._order, number)]
