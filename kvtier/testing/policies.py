"""What every eviction policy must do, as a test class to inherit from.

A new policy's test file is a subclass that says how one is made::

    class TestMine(PolicySuite):
        def make(self, capacity): return MyPolicy(capacity)

The reference beside it is naive on purpose: a dict of what is resident. Who goes first is the policy's own business; that
whoever goes may go, and that nothing is forgotten or kept for ever, is not.
"""

from __future__ import annotations

import gc
import random
import types
from collections.abc import Container, Iterable, Iterator

from kvtier.abc.policy import EntryMeta, EvictionPolicy
from kvtier.key import Address
from kvtier.pool import BlockPool

_ADDRESS_BYTES = 40


def entry(number: int) -> Address:
    """An address that follows from ``number``."""
    return Address(number.to_bytes(_ADDRESS_BYTES, "little"))


def drawn_meta(rng: random.Random, parent: Address | None = None, depth: int = 0) -> EntryMeta:
    """Whatever a block may be."""
    return EntryMeta(
        parent,
        depth,
        nbytes=rng.choice([4096, 368_640]),
        cost=rng.choice([0.0, 0.001, 1.0]),
        priority=rng.choice([-1, 0, 5]),
        expires_at=rng.choice([None, 50.0]),
        tenant=rng.choice([b"", b"t" * 16]),
    )


def reachable(root: object) -> Iterator[object]:
    """Everything that ``root`` keeps alive, as the garbage collector sees it; classes, modules and functions left out."""
    skipped = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
    seen: set[int] = set()
    todo: list[object] = [root]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, skipped):
            continue
        seen.add(id(one))
        yield one
        todo += gc.get_referents(one)


class _Asked(Container[Address]):
    """Protects some, and knows which of them it has been asked for."""

    def __init__(self, held: Iterable[Address]) -> None:
        self._held = frozenset(held)
        self.passed: list[Address] = []

    def __contains__(self, one: object) -> bool:
        if one not in self._held:
            return False
        self.passed.append(one)  # type: ignore[arg-type]  # a policy asks of its entries
        return True


class PolicySuite:
    """For eviction policies."""

    steps = 3000
    """Random calls of one walk."""

    def make(self, capacity: int) -> EvictionPolicy:
        """A policy for a pool of ``capacity`` entries."""
        raise NotImplementedError("a suite's subclass makes the policy")

    def walk(self, policy: EvictionPolicy, capacity: int, seed: int, steps: int) -> Iterator[set[Address]]:
        """Random inserts, touches, evictions and drops within ``capacity``; after each, what is resident by the reference."""
        rng = random.Random(seed)
        resident: dict[Address, None] = {}
        numbers = 3 * capacity
        for step in range(steps):
            now = float(step // 3)  # several calls at one moment are allowed
            one = entry(rng.randrange(numbers))
            if one in resident and rng.random() < 0.2:
                policy.remove(one, evicted=False)
                del resident[one]
            elif one in resident and rng.random() < 0.2:
                policy.refresh(one, now)
            elif one in resident:
                policy.touch(one, now)
            else:
                if len(resident) == capacity:
                    count = rng.randrange(1, capacity // 2 + 1)
                    for gone in policy.victims(count, frozenset(), now) or ():
                        policy.remove(gone, evicted=True)
                        del resident[gone]
                policy.insert(one, drawn_meta(rng), now)
                resident[one] = None
            yield set(resident)

    def test_victims_are_resident_distinct_unprotected_and_all_or_nothing(self) -> None:
        policy, rng = self.make(32), random.Random(1)
        for step, resident in enumerate(self.walk(policy, 32, 1, self.steps)):
            protected = frozenset(rng.sample(sorted(resident), rng.randrange(len(resident) + 1)))
            able = len(resident) - len(protected)
            count = rng.randrange(able + 2)
            victims = policy.victims(count, protected, float(step))
            if count > able:
                assert victims is None, f"{able} may go, {count} were asked for: none, or all of them"
                continue
            assert victims is not None, f"{able} may go and {count} were asked for"
            assert len(victims) == count
            assert len(set(victims)) == count, "a victim is named twice"
            assert not set(victims) & protected, "a protected entry is named"
            assert set(victims) <= resident, "an entry is named that is not resident"

    def test_everything_inserted_can_go_in_the_end(self) -> None:
        policy = self.make(32)
        resident: set[Address] = set()
        for resident in self.walk(policy, 32, 2, self.steps):  # noqa: B007 - the last one is wanted
            pass
        everything = policy.victims(len(resident), frozenset(), 1e6)
        assert everything is not None
        assert set(everything) == resident
        for gone in everything:
            policy.remove(gone, evicted=True)
        assert policy.victims(1, frozenset(), 1e6) is None
        assert policy.victims(0, frozenset(), 1e6) == []

    def test_asking_for_victims_changes_nothing(self) -> None:
        asked, other = self.make(16), self.make(16)
        walks = zip(self.walk(asked, 16, 3, 1000), self.walk(other, 16, 3, 1000), strict=True)
        for step, (resident, same) in enumerate(walks):
            assert resident == same, "the same calls have led to other victims"
            for count in (1, len(resident)):
                first = asked.victims(count, frozenset(), float(step))
                assert asked.victims(count, frozenset(), float(step)) == first

    def test_a_chain_at_once_is_each_of_it_in_turn(self) -> None:
        at_once, one_by_one = self.make(16), self.make(16)
        rng = random.Random(5)
        for number in range(16):
            for policy in (at_once, one_by_one):
                policy.insert(entry(number), EntryMeta(nbytes=4096, cost=0.001), 0.0)
        for now in range(1, 100):
            chain = [entry(number) for number in rng.sample(range(16), rng.randrange(16))]
            if now % 3:
                at_once.touch_all(chain, now)
            else:
                at_once.refresh_all(chain, now)
            for one in chain:
                (one_by_one.touch if now % 3 else one_by_one.refresh)(one, now)
            everything = one_by_one.victims(16, frozenset(), now)
            assert at_once.victims(16, frozenset(), now) == everything, f"another order at {now}"

    def test_what_a_search_has_passed_over_is_behind_the_next_one(self) -> None:
        policy, held = self.make(128), [entry(number) for number in range(64)]
        for number in range(128):
            policy.insert(entry(number), EntryMeta(nbytes=4096), 0.0)
        asked = _Asked(held)
        for turn in range(1, 9):
            policy.pass_over(list(dict.fromkeys(asked.passed)), float(turn))
            asked.passed.clear()
            for gone in policy.victims(1, asked, float(turn)) or ():
                policy.remove(gone, evicted=True)
            policy.insert(entry(128 + turn), EntryMeta(nbytes=4096), float(turn))
        assert len(asked.passed) < 8, f"{len(asked.passed)} of {len(held)} are passed by each search"

    def test_what_is_protected_is_asked_of_the_container_only(self) -> None:
        """A pool protects by a rule, not by a set: the container may have no length and cannot be gone through."""

        class Odd:
            def __contains__(self, one: object) -> bool:
                assert isinstance(one, bytes)
                return int.from_bytes(one, "little") % 2 == 1

        policy = self.make(8)
        for number in range(8):
            policy.insert(entry(number), EntryMeta(), 0.0)
        victims = policy.victims(4, Odd(), 1.0)
        assert victims is not None
        assert set(victims) == {entry(number) for number in (0, 2, 4, 6)}
        assert policy.victims(5, Odd(), 1.0) is None

    def test_keeps_no_more_than_its_capacity_asks_for(self) -> None:
        """However much passes through: what is alive afterwards is bounded by residents and as many ghosts again."""
        capacity = 64
        policy = self.make(capacity)
        for number in range(100 * capacity):
            if number >= capacity:
                for gone in policy.victims(1, frozenset(), float(number)) or ():
                    policy.remove(gone, evicted=True)
            policy.insert(entry(number), EntryMeta(nbytes=4096, cost=0.001), float(number))
            policy.touch(entry(number), float(number))
        alive = {one for one in reachable(policy) if isinstance(one, bytes) and len(one) == _ADDRESS_BYTES}
        assert len(alive) <= 4 * capacity, f"{len(alive)} entries are alive in a policy for {capacity}"
        assert sum(1 for _ in reachable(policy)) <= 100 * capacity + 1000

    def test_what_is_dropped_leaves_no_ghost(self) -> None:
        policy = self.make(8)
        mark = entry(987_654_321)
        for number in range(4):
            policy.insert(entry(number), EntryMeta(), 0.0)
        policy.insert(mark, EntryMeta(), 0.0)
        policy.touch(mark, 0.0)
        policy.remove(mark, evicted=False)
        assert not any(isinstance(one, bytes) and one == mark for one in reachable(policy))

    def test_an_evicted_entry_may_come_back(self) -> None:
        policy = self.make(4)
        for turn in range(20):
            policy.insert(entry(1), EntryMeta(), float(turn))
            assert policy.victims(1, frozenset(), float(turn)) == [entry(1)]
            policy.remove(entry(1), evicted=bool(turn % 2))

    def test_under_a_pool_tails_go_before_heads_and_what_is_held_stays(self) -> None:
        rng = random.Random(4)
        pool = BlockPool(32, self.make(32))
        for step in range(400):
            now = float(step)
            family = 1000 * rng.randrange(6)
            chain = [entry(family + depth) for depth in range(rng.randrange(1, 10))]
            have = pool.lookup(chain)
            pool.acquire(have)
            allocation = pool.allocate(len(chain) - len(have), now)
            if allocation is not None:
                assert not set(allocation.evicted) & set(chain[: len(have)]), "what is held was evicted"
                for index in range(len(chain) - 1, len(have) - 1, -1):
                    meta = drawn_meta(rng, chain[index - 1] if index else None, index)
                    pool.commit(allocation.slots[index - len(have)], chain[index], meta, now)
                pool.touch(pool.lookup(chain), now)
                pool.release(allocation.slots, now)
            pool.release(have, now)
            assert pool.check() == []
            for number in (int.from_bytes(one, "little") for one in pool.entries()):
                has_parent = number % 1000 == 0 or pool.slot(entry(number - 1)) is not None
                assert has_parent, "a head went before its tail"
