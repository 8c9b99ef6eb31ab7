"""Every policy that ships passes the policy suite, and policies with one fault each do not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container

import pytest

from kvtier import policy
from kvtier.abc.policy import EntryMeta, EvictionPolicy
from kvtier.key import Address
from kvtier.policy.lru import LruPolicy
from kvtier.testing.policies import PolicySuite


class TestLru(PolicySuite):
    def make(self, capacity: int) -> EvictionPolicy:
        return policy.make("lru", capacity)


class TestFifo(PolicySuite):
    def make(self, capacity: int) -> EvictionPolicy:
        return policy.make("fifo", capacity)


class TestLfu(PolicySuite):
    def make(self, capacity: int) -> EvictionPolicy:
        return policy.make("lfu", capacity)


class TestSlru(PolicySuite):
    def make(self, capacity: int) -> EvictionPolicy:
        return policy.make("slru", capacity)


class TestArc(PolicySuite):
    def make(self, capacity: int) -> EvictionPolicy:
        return policy.make("arc", capacity)


class TestS3Fifo(PolicySuite):
    def make(self, capacity: int) -> EvictionPolicy:
        return policy.make("s3fifo", capacity)


class TestSieve(PolicySuite):
    def make(self, capacity: int) -> EvictionPolicy:
        return policy.make("sieve", capacity)


class TestWTinyLfu(PolicySuite):
    def make(self, capacity: int) -> EvictionPolicy:
        return policy.make("wtinylfu", capacity)


class TestGdsf(PolicySuite):
    def make(self, capacity: int) -> EvictionPolicy:
        return policy.make("gdsf", capacity)


class TestTtl(PolicySuite):
    def make(self, capacity: int) -> EvictionPolicy:
        return policy.make("ttl", capacity)


class TestAdaptive(PolicySuite):
    def make(self, capacity: int) -> EvictionPolicy:
        return policy.make("adaptive", capacity)


class Fewer(LruPolicy):
    """Gives what it has where it should say that there are not so many."""

    def victims(self, count: int, protected: Container[Address], now: float) -> list[Address] | None:
        return [one for one in self._order if one not in protected][:count]


class Blind(LruPolicy):
    """Does not look at what is protected."""

    def victims(self, count: int, protected: Container[Address], now: float) -> list[Address] | None:
        return super().victims(count, (), now)


class Twice(LruPolicy):
    """Names a victim twice."""

    def victims(self, count: int, protected: Container[Address], now: float) -> list[Address] | None:
        chosen = super().victims(count, protected, now)
        return [*chosen[:-1], chosen[0]] if chosen else chosen


class Eager(LruPolicy):
    """Forgets its victims before they have gone."""

    def victims(self, count: int, protected: Container[Address], now: float) -> list[Address] | None:
        chosen = super().victims(count, protected, now)
        for one in chosen or ():
            self._order.move_to_end(one)
        return chosen


class Hoarder(LruPolicy):
    """Keeps a ghost of everything for ever."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._ghosts: OrderedDict[Address, None] = OrderedDict()

    def remove(self, entry: Address, *, evicted: bool) -> None:
        super().remove(entry, evicted=evicted)
        self._ghosts[entry] = None


class Forgetful(LruPolicy):
    """Loses what has a tenant."""

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        if not meta.tenant:
            super().insert(entry, meta, now)

    def touch(self, entry: Address, now: float) -> None:
        if entry in self._order:
            super().touch(entry, now)

    def remove(self, entry: Address, *, evicted: bool) -> None:
        self._order.pop(entry, None)


@pytest.mark.parametrize(
    ("broken", "guard"),
    [
        (Fewer, PolicySuite.test_victims_are_resident_distinct_unprotected_and_all_or_nothing),
        (Blind, PolicySuite.test_victims_are_resident_distinct_unprotected_and_all_or_nothing),
        (Twice, PolicySuite.test_victims_are_resident_distinct_unprotected_and_all_or_nothing),
        (Forgetful, PolicySuite.test_victims_are_resident_distinct_unprotected_and_all_or_nothing),
        (Forgetful, PolicySuite.test_everything_inserted_can_go_in_the_end),
        (Eager, PolicySuite.test_asking_for_victims_changes_nothing),
        (Hoarder, PolicySuite.test_keeps_no_more_than_its_capacity_asks_for),
        (Hoarder, PolicySuite.test_what_is_dropped_leaves_no_ghost),
    ],
)
def test_the_suite_catches(broken: Callable[[int], EvictionPolicy], guard: Callable[[PolicySuite], None]) -> None:
    class Suite(PolicySuite):
        def make(self, capacity: int) -> EvictionPolicy:
            return broken(capacity)

    with pytest.raises(AssertionError):
        guard(Suite())
