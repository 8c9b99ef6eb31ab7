"""The pool: slots, references, order over the tree, and the equation of its states."""

from __future__ import annotations

import random
import time
from collections.abc import Container

import pytest

from kvtier.abc.policy import EntryMeta
from kvtier.key import Address
from kvtier.policy.lru import LruPolicy
from kvtier.pool import BlockPool, Slot


def entry(name: str) -> Address:
    return Address(name.encode().ljust(40, b"."))


def make_pool(slots: int) -> BlockPool:
    return BlockPool(slots, LruPolicy(slots))


def put(pool: BlockPool, chain: list[Address], parent: Address | None = None, now: float = 0.0) -> list[Slot]:
    """Commit a chain tail first and let it go, as a finished request does."""
    slots = committed(pool, chain, parent, now)
    assert not pool.check()
    return slots


def committed(pool: BlockPool, chain: list[Address], parent: Address | None = None, now: float = 0.0) -> list[Slot]:
    """The same without looking the whole pool through."""
    got = pool.allocate(len(chain), now)
    assert got is not None
    parents = [parent, *chain[:-1]]
    for slot, name, above in reversed(list(zip(got.slots, chain, parents, strict=True))):
        assert pool.commit(slot, name, EntryMeta(parent=above), now)
    pool.release(got.slots, now)
    return got.slots


def names(prefix: str, count: int) -> list[Address]:
    return [entry(f"{prefix}{index}") for index in range(count)]


def test_lookup_is_the_longest_resident_prefix() -> None:
    pool = make_pool(8)
    chain = names("a", 4)
    slots = put(pool, chain)
    assert pool.lookup(chain + names("b", 1)) == slots
    assert pool.lookup([chain[0], entry("hole"), chain[2]]) == slots[:1]


def test_a_slot_in_writing_is_invisible_and_its_abort_leaves_no_trace() -> None:
    pool = make_pool(2)
    got = pool.allocate(2, 0.0)
    assert got is not None and pool.writing == 2 and pool.ready == 0
    assert pool.allocate(1, 0.0) is None
    pool.release(got.slots, 0.0)
    assert pool.free == 2 and not pool.check()


def test_the_first_committed_copy_wins() -> None:
    pool = make_pool(2)
    first = put(pool, [entry("a")])
    again = pool.allocate(1, 0.0)
    assert again is not None
    assert not pool.commit(again.slots[0], entry("a"), EntryMeta(), 0.0)
    assert pool.writing == 1 and pool.lookup([entry("a")]) == first
    pool.release(again.slots, 0.0)
    assert pool.free == 1 and not pool.check()


def test_referenced_blocks_are_never_evicted() -> None:
    pool = make_pool(4)
    slots = put(pool, names("a", 4))
    pool.acquire(slots[:2])
    got = pool.allocate(2, 1.0)
    assert got is not None and got.evicted == [entry("a3"), entry("a2")]
    assert pool.allocate(1, 1.0) is None
    pool.release(slots[:2], 1.0)
    assert pool.allocate(1, 1.0) is not None


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_shared_preamble_outlives_its_branches(share: float) -> None:
    pool = make_pool(1010)
    preamble = names("p", 10)
    put(pool, preamble)
    for branch in range(100):
        put(pool, names(f"b{branch}-", 10), parent=preamble[-1], now=1.0 + branch)
    gone = pool.allocate(int(1010 * share), 1000.0)
    assert gone is not None
    assert len(pool.lookup(preamble)) == 10
    assert not pool.check()


def test_children_go_before_parents_even_where_the_policy_names_heads() -> None:
    pool = make_pool(300)
    chain = names("a", 300)
    got = pool.allocate(300, 0.0)
    assert got is not None
    for slot, name, above in zip(got.slots, chain, [None, *chain[:-1]], strict=True):  # head first: heads are oldest
        pool.commit(slot, name, EntryMeta(parent=above), 0.0)
    pool.release(got.slots, 0.0)
    victims = pool.victims(200, 1.0)
    assert victims is not None
    assert [pool.entry(slot) for slot in victims] == chain[:99:-1]


def test_a_parent_with_a_referenced_descendant_stays() -> None:
    pool = make_pool(6)
    trunk = names("t", 2)
    put(pool, trunk)
    left = put(pool, names("l", 2), parent=trunk[-1])
    put(pool, names("r", 2), parent=trunk[-1])
    pool.acquire(left[-1:])
    assert pool.victims(3, 1.0) is None
    got = pool.allocate(2, 1.0)
    assert got is not None and set(got.evicted) == set(names("r", 2))
    assert len(pool.lookup([*trunk, *names("l", 2)])) == 4


def test_orphans_find_their_parent_when_it_comes_back() -> None:
    pool = make_pool(4)
    chain = names("a", 3)
    slots = put(pool, chain)
    retired = pool.retire(slots[0], evicted=False)
    assert retired == chain[0] and pool.retiring == 1
    pool.release([slots[0]], 1.0)
    assert pool.lookup(chain) == [] and not pool.check()
    back = pool.allocate(1, 2.0)
    assert back is not None and pool.commit(back.slots[0], chain[0], EntryMeta(), 2.0)
    assert len(pool.lookup(chain)) == 3 and not pool.check()
    pool.release(back.slots, 2.0)
    pool.touch(slots[1:], 3.0)
    assert pool.victims(1, 4.0) == [slots[2]], "the coldest has its descendants under it again"


def test_states_always_add_up_under_random_use() -> None:
    seed = 20
    print(f"seed {seed}")
    rng = random.Random(seed)
    pool = make_pool(64)
    held: list[list[Slot]] = []
    for step in range(5000):
        now = float(step)
        choice = rng.random()
        if choice < 0.4:
            root = rng.randrange(12)
            length = rng.randrange(1, 12)
            chain = names(f"{root}-", length)
            have = pool.lookup(chain)
            pool.acquire(have)
            got = pool.allocate(length - len(have), now)
            if got is None:
                pool.release(have, now)
                continue
            parents = [None, *chain[:-1]]
            for slot, name, above in reversed(
                list(zip(got.slots, chain[len(have) :], parents[len(have) :], strict=True))
            ):
                pool.commit(slot, name, EntryMeta(parent=above), now)
            pool.touch(have + got.slots, now)
            held.append(have + got.slots)
        elif choice < 0.8 and held:
            pool.release(held.pop(rng.randrange(len(held))), now)
        elif pool.ready:
            victim = pool.slot(rng.choice(pool.entries()))
            assert victim is not None
            pool.retire(victim, evicted=False)
            pool.release([victim], now)
        assert pool.free + pool.writing + pool.ready + pool.retiring == pool.capacity
        assert pool.check() == []
    for slots in held:
        pool.release(slots, 5000.0)
    assert pool.referenced == 0 and pool.writing == 0 and pool.retiring == 0


def test_match_and_eviction_are_batch_work() -> None:
    pool = make_pool(20_000)
    chain = names("a", 20_000)
    put(pool, chain)
    start = time.perf_counter()
    slots = pool.lookup(chain[:6250])
    pool.acquire(slots)
    pool.release(slots, 1.0)
    print(f"match + references of 6,250: {1e3 * (time.perf_counter() - start):.2f} ms")
    start = time.perf_counter()
    assert pool.victims(64, 1.0) is not None
    print(f"64 victims of 20,000: {1e3 * (time.perf_counter() - start):.2f} ms")


@pytest.mark.parametrize("length", [1, 2, 5])
def test_blocks_that_name_themselves_as_ancestors_end_no_eviction_in_a_circle(length: int) -> None:
    """An index or a frame that was tampered with: the search for a childless descendant never ended, under the lock."""
    pool = make_pool(8)
    ring = names("ring", length)
    got = pool.allocate(length, 0.0)
    assert got is not None
    for slot, name, above in zip(got.slots, ring, [ring[-1], *ring[:-1]], strict=True):
        pool.commit(slot, name, EntryMeta(parent=above), 0.0)
    pool.release(got.slots, 0.0)
    put(pool, names("a", 3))
    all_of_it = pool.allocate(8, 1.0)
    assert all_of_it is not None
    assert pool.ready == 0
    pool.release(all_of_it.slots, 1.0)
    assert pool.free == 8
    assert not pool.check()


def test_a_pool_full_of_chains_whose_tails_must_stay_says_so_at_once() -> None:
    """Nothing could go, and finding that out took minutes under the owner's lock: every chain was tried again and again."""
    pool, keep = make_pool(20_480), bytearray(20_480)
    for number in range(320):
        keep[committed(pool, names(f"{number}-", 64))[-1]] = 1
    start = time.thread_time()
    assert pool.victims(64, 1.0, keep) is None
    assert pool.victims(64, 1.0, keep, fewer=True) == []
    assert pool.room(keep) == 0
    assert time.thread_time() - start < 1.0
    keep[:] = bytes(len(keep))
    start = time.thread_time()
    everything = pool.victims(20_480, 1.0)
    assert everything is not None
    assert len(set(everything)) == 20_480
    assert time.thread_time() - start < 5.0
    assert not pool.check()


def test_as_many_as_may_go_are_given_where_fewer_will_do() -> None:
    pool = make_pool(8)
    slots = put(pool, names("a", 8))
    pool.acquire(slots[:1])
    assert pool.victims(8, 1.0) is None
    assert pool.victims(8, 1.0, fewer=True) == slots[:0:-1]
    assert pool.room() == 7


@pytest.mark.parametrize("seed", range(20))
def test_victims_are_what_an_oracle_says_may_go(seed: int) -> None:
    """What may go: unreferenced, not kept, and nothing below it is either. Children go before their parents."""
    rng = random.Random(seed)
    pool = make_pool(60)
    parents: dict[Slot, Slot | None] = {}
    for index in range(60):
        got = pool.allocate(1, float(index))
        assert got is not None
        above = rng.choice([None, *parents]) if rng.random() < 0.9 else None
        parent = None if above is None else pool.entry(above)
        pool.commit(got.slots[0], entry(f"{index}"), EntryMeta(parent=parent), float(index))
        pool.release(got.slots, float(index))
        parents[got.slots[0]] = above
    held = rng.sample(sorted(parents), rng.randrange(12))
    keep = bytearray(60)
    for slot in held[::2]:
        keep[slot] = 1
    pool.acquire(held[1::2])
    pool.touch(rng.sample(sorted(parents), 20), 100.0)
    may_go = set(parents)
    for slot in held:
        above = slot
        while above is not None:
            may_go.discard(above)
            above = parents[above]
    assert pool.room(keep) == len(may_go)
    for count in (1, len(may_go) // 2, len(may_go)):
        chosen = pool.victims(count, 200.0, keep)
        assert chosen is not None
        assert len(chosen) == len(set(chosen)) == count
        assert set(chosen) <= may_go
        order = {slot: at for at, slot in enumerate(chosen)}
        for slot in chosen:
            for child in [child for child, above in parents.items() if above == slot]:
                assert order[child] < order[slot]
    assert pool.victims(len(may_go) + 1, 200.0, keep) is None


@pytest.mark.parametrize("seed", range(30))
def test_a_chain_that_is_committed_at_once_is_one_committed_tail_first(seed: int) -> None:
    """Chains that share trunks, blocks that are there already, orphans that wait for one of them, an entry that names itself."""
    rng = random.Random(seed)
    one_by_one, at_once = make_pool(200), make_pool(200)
    tree = {
        name: rng.choice([None, entry("gone"), *names("a", index + 1)]) for index, name in enumerate(names("a", 60))
    }
    for turn in range(12):
        now = float(turn)
        batch = rng.sample(sorted(tree), rng.randrange(1, 15))
        metas = [EntryMeta(tree[name], index) for index, name in enumerate(batch)]
        first, second = one_by_one.allocate(len(batch), now), at_once.allocate(len(batch), now)
        assert first is not None and first == second
        for slot, name, meta in reversed(list(zip(first.slots, batch, metas, strict=True))):
            one_by_one.commit(slot, name, meta, now)
        at_once.commit_all(first.slots, batch, metas, now)
        for pool in (one_by_one, at_once):
            pool.release(first.slots, now)
            assert pool.check() == []
        assert at_once.places(sorted(tree)) == one_by_one.places(sorted(tree))
        for name in at_once.entries():
            at = at_once.slot(name)
            assert at is not None
            assert list(at_once.children(at)) == list(one_by_one.children(at))
        for name in rng.sample(sorted(at_once.entries()), min(at_once.ready, 6)) if turn % 3 == 2 else ():
            for pool in (one_by_one, at_once):  # some go, and may leave orphans
                gone = pool.slot(name)
                assert gone is not None
                pool.retire(gone, evicted=False)
                pool.release([gone], now)
    assert at_once.victims(at_once.ready, 20.0) == one_by_one.victims(one_by_one.ready, 20.0)


@pytest.mark.parametrize("by", ["references", "pins"])
def test_what_is_held_for_long_is_not_passed_by_every_eviction(by: str) -> None:
    looked_at: list[int] = []

    class Counted(LruPolicy):
        def victims(self, count: int, protected: Container[Address], now: float) -> list[Address] | None:
            looked_at.append(0)

            class Seen(Container[Address]):
                def __contains__(self, one: object) -> bool:
                    looked_at[-1] += 1
                    return one in protected

            return super().victims(count, Seen(), now)

    pool = BlockPool(300, Counted(300))
    held = put(pool, names("held", 100))
    put(pool, names("cold", 200))
    if by == "references":
        pool.acquire(held)
    else:
        for slot in held:
            pool.pinned[slot] = 1
    for round_ in range(5):
        assert pool.evict(10, 1.0) == names("cold", 200 - 10 * round_)[-1:-11:-1]
        put(pool, names(f"new{round_}x", 10))
    assert looked_at[0] == 110
    assert sum(looked_at[1:]) == 40
    assert pool.resident(names("held", 100)) == held


def test_what_is_evicted_is_named_and_its_slots_are_free() -> None:
    pool = make_pool(8)
    slots = put(pool, names("a", 6))
    pool.acquire(slots[:1])
    assert pool.evict(6, 1.0) is None
    assert pool.evict(2, 1.0) == [entry("a5"), entry("a4")]
    assert pool.counts() == {"free": 4, "writing": 0, "ready": 4, "retiring": 0}
    assert pool.check() == []


@pytest.mark.parametrize("seed", range(10))
def test_a_pool_that_adopts_all_at_once_is_one_that_committed_each(seed: int) -> None:
    """Trees, heads, orphans whose parent is gone and an entry that names itself, in any order and in any slots."""
    rng = random.Random(seed)
    entries = names("a", 40)
    metas = {
        name: EntryMeta(rng.choice([None, entry("gone"), *entries[: index + 1]]), index)
        for index, name in enumerate(entries)
    }
    rng.shuffle(entries)
    slots = [Slot(slot) for slot in rng.sample(range(50), 40)]
    one_by_one, at_once = make_pool(50), make_pool(50)
    got = one_by_one.allocate(50, 0.0)
    assert got is not None
    for slot, name in zip(slots, entries, strict=True):
        one_by_one.commit(slot, name, metas[name], 0.0)
    one_by_one.release(got.slots, 0.0)
    at_once.adopt(slots, entries, (metas[name] for name in entries), 0.0)
    assert at_once.check() == []
    assert at_once.counts() == one_by_one.counts()
    assert at_once.places(entries) == slots
    for pool in (one_by_one, at_once):
        for name in entries[:10]:
            pool.release(
                [slot for slot in [pool.slot(name)] if slot is not None and pool.retire(slot, evicted=False)], 0.0
            )
    assert at_once.check() == []
    chosen = at_once.victims(30, 1.0)
    order = {slot: at for at, slot in enumerate(chosen or [])}
    assert set(order) == set(one_by_one.victims(30, 1.0) or [])
    place = dict(zip(entries, slots, strict=True))
    for name in entries[10:]:
        above = metas[name].parent
        if above in place and place[above] in order and above != name:
            assert order[place[name]] < order[place[above]]
