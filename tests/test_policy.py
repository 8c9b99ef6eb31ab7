"""The policy contract fits more than LRU: one that remembers ghosts, and one that weighs cost."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Container

import pytest

from kvtier.abc.policy import EntryMeta, EvictionPolicy
from kvtier.key import Address
from kvtier.policy.lru import LruPolicy
from kvtier.pool import BlockPool


def entry(number: int) -> Address:
    return Address(number.to_bytes(40, "little"))


class GhostPolicy(EvictionPolicy):
    """2Q in small: what comes for the first time is on probation; what comes back after its eviction is protected."""

    def __init__(self, capacity: int) -> None:
        self._probation: OrderedDict[Address, None] = OrderedDict()
        self._protected: OrderedDict[Address, None] = OrderedDict()
        self._ghosts: OrderedDict[Address, None] = OrderedDict()
        self._most_ghosts = capacity

    @property
    def ghosts(self) -> int:
        return len(self._ghosts)

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        returned = entry in self._ghosts
        self._ghosts.pop(entry, None)
        (self._protected if returned else self._probation)[entry] = None

    def touch(self, entry: Address, now: float) -> None:
        if entry in self._protected:
            self._protected.move_to_end(entry)

    def remove(self, entry: Address, *, evicted: bool) -> None:
        (self._protected if entry in self._protected else self._probation).pop(entry)
        if evicted:
            self._ghosts[entry] = None
            while len(self._ghosts) > self._most_ghosts:
                self._ghosts.popitem(last=False)

    def victims(self, count: int, protected: Container[Address], now: float) -> list[Address] | None:
        order = [each for queue in (self._probation, self._protected) for each in queue if each not in protected]
        return order[:count] if len(order) >= count else None


class CostPolicy(EvictionPolicy):
    """GreedyDual in small: what is cheap to make again for the bytes it takes goes first."""

    def __init__(self, capacity: int) -> None:
        del capacity
        self._worth: dict[Address, float] = {}

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        self._worth[entry] = meta.cost / max(1, meta.nbytes)

    def touch(self, entry: Address, now: float) -> None:
        pass

    def remove(self, entry: Address, *, evicted: bool) -> None:
        del self._worth[entry]

    def victims(self, count: int, protected: Container[Address], now: float) -> list[Address] | None:
        order = sorted((each for each in self._worth if each not in protected), key=self._worth.__getitem__)
        return order[:count] if len(order) >= count else None


def put(pool: BlockPool, number: int, meta: EntryMeta | None = None) -> list[Address]:
    """Commit one entry and let it go; what was evicted for it."""
    allocation = pool.allocate(1, 0.0)
    assert allocation is not None
    assert pool.commit(allocation.slots[0], entry(number), meta or EntryMeta(), 0.0)
    pool.release(allocation.slots, 0.0)
    return allocation.evicted


def test_a_ghost_that_comes_back_outlives_what_comes_once() -> None:
    policy = GhostPolicy(4)
    pool = BlockPool(4, policy)
    for number in range(5):
        put(pool, number)
    assert pool.slot(entry(0)) is None
    assert policy.ghosts == 1
    put(pool, 0)  # it was evicted too early, and is protected now
    for number in range(100, 110):
        put(pool, number)
    assert pool.slot(entry(0)) is not None
    assert policy.ghosts <= 4


def test_a_dropped_entry_leaves_no_ghost() -> None:
    policy = GhostPolicy(4)
    pool = BlockPool(4, policy)
    put(pool, 1)
    slot = pool.slot(entry(1))
    assert slot is not None
    pool.retire(slot, evicted=False)
    pool.release([slot], 0.0)
    assert policy.ghosts == 0


def test_what_is_dear_to_make_again_stays() -> None:
    pool = BlockPool(3, CostPolicy(3))
    for number, cost in ((1, 5.0), (2, 0.1), (3, 1.0)):
        put(pool, number, EntryMeta(nbytes=100, cost=cost))
    assert put(pool, 4, EntryMeta(nbytes=100, cost=2.0)) == [entry(2)]
    assert put(pool, 5, EntryMeta(nbytes=100, cost=2.0)) == [entry(3)]


@pytest.mark.parametrize("make", [LruPolicy, GhostPolicy, CostPolicy])
def test_any_policy_under_a_pool_evicts_only_what_may_go_and_tails_before_heads(
    make: Callable[[int], EvictionPolicy],
) -> None:
    seed = 7
    print(f"seed {seed}")
    rng = random.Random(seed)
    pool = BlockPool(32, make(32))
    for step in range(400):
        family = 1000 * rng.randrange(6)
        chain = [entry(family + depth) for depth in range(rng.randrange(1, 10))]
        have = pool.lookup(chain)
        pool.acquire(have)
        allocation = pool.allocate(len(chain) - len(have), float(step))
        if allocation is not None:
            assert not set(allocation.evicted) & set(chain[: len(have)]), "what is referenced was evicted"
            for index in range(len(chain) - 1, len(have) - 1, -1):
                meta = EntryMeta(chain[index - 1] if index else None, index, 100, cost=rng.random())
                slot = allocation.slots[index - len(have)]
                if not pool.commit(slot, chain[index], meta, float(step)):
                    assert pool.slot(chain[index]) is not None
            pool.touch(pool.lookup(chain), float(step))
            pool.release(allocation.slots, float(step))
        pool.release(have, float(step))
        assert pool.check() == []
        for number in (int.from_bytes(resident, "little") for resident in pool.entries()):
            has_parent = number % 1000 == 0 or pool.slot(entry(number - 1)) is not None
            assert has_parent, "a head went before its tail"
