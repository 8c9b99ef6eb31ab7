"""The adaptive policy: who decides, when that changes, and what its shadows see."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Sequence

import pytest

from kvtier import policy
from kvtier.abc.policy import EntryMeta, EvictionPolicy
from kvtier.key import Address
from kvtier.policy import adaptive
from kvtier.policy.adaptive import AdaptivePolicy
from kvtier.policy.lru import LruPolicy
from kvtier.policy.shadow import KEPT, LEAST_SHARED, LONGEST, RECENT, Branches, Shadow
from kvtier.pool import BlockPool
from kvtier.sim.replay import ReplayedTier
from kvtier.testing.policies import PolicySuite, entry, reachable

Chain = Sequence[Address]
"""Head first, as requests have it."""


def numbered(*numbers: int) -> list[Address]:
    return [entry(number) for number in numbers]


def tail_first(chain: Chain) -> list[Address]:
    return list(reversed(chain))


def serve(one: AdaptivePolicy, resident: set[Address], chain: Chain, now: float = 0.0) -> None:
    """A request in a cache that has room for all."""
    for depth in range(len(chain) - 1, -1, -1):
        if chain[depth] in resident:
            one.touch(chain[depth], now)
        else:
            one.insert(chain[depth], EntryMeta(chain[depth - 1] if depth else None, depth), now)
            resident.add(chain[depth])


class Tier:
    """A pool under a policy, served chains."""

    def __init__(self, name: str, capacity: int, chains: Sequence[Chain]) -> None:
        metas = {
            one: EntryMeta(chain[depth - 1] if depth else None, depth)
            for chain in chains
            for depth, one in enumerate(chain)
        }
        self._tier = ReplayedTier(name, capacity, max(map(len, chains)), metas)
        self.policy = self._tier.pool._policy
        self.served = 0

    def hit_rate(self, chains: Sequence[Chain]) -> float:
        hits = 0
        for chain in chains:
            self.served += 1
            hits += self._tier.request(chain, float(self.served))
        return hits / sum(map(len, chains))


@pytest.fixture
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of 64 blocks is sampled as one of 32,768 is."""
    monkeypatch.setattr(adaptive, "SAMPLED", 8)


@pytest.mark.usefixtures("small_sample")
class TestSampled(PolicySuite):
    """The suite again for a policy whose shadows see a sample."""

    def make(self, capacity: int) -> EvictionPolicy:
        return policy.make("adaptive", capacity)


def test_nothing_but_the_capacity_sets_it_up() -> None:
    assert list(inspect.signature(AdaptivePolicy).parameters) == ["capacity"]
    one = policy.make("adaptive", 1)
    assert isinstance(one, AdaptivePolicy)
    assert set(adaptive.CANDIDATES) < set(policy.names())


# -- who decides ----------------------------------------------------------------------------------------------------------------

CAPACITY = 200
PHASE = 4000


def recent(rng: random.Random, first: int) -> Iterator[Chain]:
    """A prompt comes again within the last forty prompts, or never: recency is all."""
    for number in range(PHASE):
        back = rng.randrange(40) if rng.random() < 0.6 else 0
        head = 10 * (first + max(0, number // 2 - back))
        yield numbered(*range(head, head + 4))


def frequent(rng: random.Random, first: int) -> Iterator[Chain]:
    """Forty prompts come again and again among many that come once."""
    for number in range(PHASE):
        head = 10 * (first + (rng.randrange(40) if number % 3 == 0 else 100 + number))
        yield numbered(*range(head, head + 4))


def test_it_changes_with_the_workload_and_ends_near_the_better_policy() -> None:
    rng = random.Random(5)
    phases = [list(recent(rng, 0)), list(frequent(rng, 100_000)), list(recent(rng, 200_000))]
    tiers = {
        name: Tier(name, CAPACITY, [one for phase in phases for one in phase])
        for name in ("adaptive", *adaptive.CANDIDATES)
    }
    one = tiers["adaptive"].policy
    assert isinstance(one, AdaptivePolicy)
    decided, rates = [], dict[str, float]()
    for phase in phases:
        for tier in tiers.values():
            tier.hit_rate(phase[: PHASE // 2])
        rates = {name: tier.hit_rate(phase[PHASE // 2 :]) for name, tier in tiers.items()}
        decided.append(one.current)
        best = max(rate for name, rate in rates.items() if name != "adaptive")
        print(f"seed 5: {rates}, {one.current} decides after {one.switches} changes")
        assert rates["adaptive"] > best - 0.01
    spread = rates["lru"] - rates["s3fifo"]
    assert spread > 0.03, "the phases tell the policies apart"
    assert decided[0] == decided[2] == "lru"
    assert decided[1] != "lru"
    assert one.switches <= 8


def test_a_small_lead_changes_nothing_and_a_large_one_does_at_once() -> None:
    one = AdaptivePolicy(100)
    first, second, _ = one._shadows
    resident: set[Address] = set()
    serve(one, resident, numbered(*range(100)))
    for lead, expected in ((0.9, "lru"), (1.1, "arc"), (0.0, "arc"), (-0.9, "arc"), (-1.1, "lru")):
        first.score, second.score, one._weight = 50.0, 50.0 + lead * adaptive.MARGIN * 1000, 1000.0
        one._decide()
        assert one.current == expected, f"a lead of {lead} margins"
    assert one.switches == 2


def test_whoever_decides_names_the_victims() -> None:
    """A new one among many, and one used twice that is older: LRU lets the older one go, ARC the new one."""
    one = AdaptivePolicy(8)
    for number in (1, 1, 2):
        one.touch(entry(number), 0.0) if entry(number) in one._parent else one.insert(entry(number), EntryMeta(), 0.0)
    assert one.victims(1, frozenset(), 0.0) == numbered(1)
    one._current = 1
    assert one.victims(1, frozenset(), 0.0) == numbered(2)


def test_the_end_of_a_use_is_told_to_whoever_decides_and_to_the_shadows() -> None:
    one = AdaptivePolicy(2)
    for number in (1, 2):
        one.insert(entry(number), EntryMeta(), 0.0)
    one.refresh_all(numbered(1), 0.0)
    assert one.victims(1, frozenset(), 0.0) == numbered(2)
    one.insert(entry(3), EntryMeta(), 0.0)
    (shadow, *_) = one._shadows
    assert entry(1) in shadow
    assert entry(2) not in shadow


def test_it_says_who_decides_and_what_each_would_have_hit() -> None:
    one, resident = AdaptivePolicy(100), set[Address]()
    serve(one, resident, numbered(1, 2, 3))
    serve(one, resident, numbered(1, 2, 3, 4))
    choice = one.choice()
    assert (choice.current, choice.switches, choice.references) == ("lru", 0, 7)
    assert choice.hits == {"lru": 3, "arc": 3, "s3fifo": 3}
    assert BlockPool(4, policy.make("adaptive", 4)).choice() is not None
    assert BlockPool(4, policy.make("lru", 4)).choice() is None


# -- what the shadows see -------------------------------------------------------------------------------------------------------

TRUNK = 8
CAPACITY_ABOVE = 16 * adaptive.SAMPLED


def branch(number: int, length: int = 6) -> Chain:
    """A trunk that all share, and a branch of its own."""
    return numbered(*range(TRUNK), *range(1000 + 100 * number, 1000 + 100 * number + length))


def test_up_to_4096_blocks_the_shadows_see_every_reference() -> None:
    one, resident = AdaptivePolicy(adaptive.SAMPLED), set[Address]()
    for number in range(600):
        serve(one, resident, branch(number))
    assert len(resident) == TRUNK + 600 * 6
    for shadow in one._shadows:
        assert all(known in shadow for known in resident)


def test_above_whole_branches_are_sampled_and_the_trunk_always_is() -> None:
    one, resident = AdaptivePolicy(CAPACITY_ABOVE), set[Address]()
    for number in range(3 * KEPT):
        serve(one, resident, branch(number))  # until the trunk is known
    taken = 0
    for number in range(3 * KEPT, 3 * KEPT + 1600):
        before = [shadow.score for shadow in one._shadows]
        serve(one, resident, branch(number))
        for shadow, score in zip(one._shadows, before, strict=True):
            assert shadow.score > score + TRUNK / 2, "the trunk was hit, whatever came behind it"
        seen = set()
        for shadow in one._shadows:
            assert all(shared in shadow for shared in numbered(*range(TRUNK)))
            seen.add(sum(own in shadow for own in branch(number)[TRUNK:]))
        assert seen in ({0}, {6}), "a branch is in the sample with all it has, or not at all"
        taken += 6 in seen
        serve(one, resident, branch(number, 7))
        assert {sum(own in shadow for own in branch(number, 7)[TRUNK:]) for shadow in one._shadows} == {7 * (6 in seen)}
    assert 60 <= taken <= 140, f"{taken} of 1600 branches, one in 16 was asked for"


def test_a_hit_on_a_sampled_branch_stands_for_those_that_are_not() -> None:
    one, resident = AdaptivePolicy(CAPACITY_ABOVE), set[Address]()
    for number in range(3 * KEPT):
        serve(one, resident, branch(number))
    assert one._branches is not None
    taken = next(number for number in range(KEPT, 3 * KEPT) if one._branches.is_sampled(branch(number)[TRUNK]))
    left = next(number for number in range(KEPT, 3 * KEPT) if not one._branches.is_sampled(branch(number)[TRUNK]))
    for number, expected in ((taken, TRUNK + 16 * 6), (left, TRUNK)):
        before = one.choice().hits
        serve(one, resident, branch(number))
        assert {name: hits - before[name] for name, hits in one.choice().hits.items()} == dict.fromkeys(
            before, expected
        )


def test_a_branch_goes_on_in_the_sample_as_it_began() -> None:
    """Blocks that come one by one, as decoding makes them, are where their chain is."""
    one, resident = AdaptivePolicy(CAPACITY_ABOVE), set[Address]()
    for number in range(400):
        serve(one, resident, branch(number, 3))
        start = 1000 + 100 * number
        for more in range(start + 3, start + 6):
            one.insert(entry(more), EntryMeta(entry(more - 1), 9), 0.0)
            resident.add(entry(more))
    serve(one, resident, numbered(1))  # ends the last run
    (shadow, *_) = one._shadows
    for number in range(200, 400):
        assert sum(own in shadow for own in branch(number)[TRUNK:]) in {0, 6}


def test_a_trunk_is_what_five_in_a_hundred_recent_chains_share() -> None:
    assert LEAST_SHARED / KEPT == 0.05
    branches = Branches(0.5)
    for number in range(KEPT):
        head = 1 if number % 10 < 3 else 50 + number
        branches.note(tail_first(numbered(head, 1000 + number)))
    assert branches.is_trunk(entry(1))
    assert branches.trunk == 1
    assert branches.trunk_of(tail_first(numbered(1, 1005))) == 1
    few = Branches(0.5)
    for number in range(KEPT):
        few.note(tail_first(numbered(1 if number < LEAST_SHARED - 1 else 50 + number)))
    assert not few.is_trunk(entry(1))
    few.note(tail_first(numbered(1)))  # a fifth takes the place of one of the others
    assert few.is_trunk(entry(1))


def test_a_trunk_that_is_asked_for_no_more_is_forgotten() -> None:
    branches = Branches(0.5)
    for number in range(KEPT):
        branches.note(tail_first(numbered(1, 1000 + number)))
    for number in range(6 * RECENT):
        branches.note(numbered(10_000 + number))
    assert not branches.is_trunk(entry(1))
    assert branches.trunk == 0
    assert len(branches._times) == KEPT


def test_the_sample_follows_from_names_alone() -> None:
    mine, same, other = Branches(0.3), Branches(0.3), Branches(0.3, seed=1)
    names = numbered(*range(1000))
    taken = [mine.is_sampled(name) for name in names]
    assert taken == [same.is_sampled(name) for name in names]
    assert taken != [other.is_sampled(name) for name in names]
    assert 250 < sum(taken) < 350
    assert all(Branches(0.9).is_sampled(name) for name, was in zip(names, taken, strict=True) if was), "samples nest"


@pytest.mark.usefixtures("small_sample")
def test_two_runs_are_the_same_to_the_last_victim() -> None:
    rng = random.Random(9)
    chains = [one for phase in (recent(rng, 0), frequent(rng, 100_000)) for one in phase]
    tiers = [Tier("adaptive", 64, chains) for _ in range(2)]
    assert tiers[0].hit_rate(chains) == tiers[1].hit_rate(chains)
    assert sorted(tiers[0]._tier.pool.entries()) == sorted(tiers[1]._tier.pool.entries())


# -- what is kept ---------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_sample")
def test_shadows_of_a_sample_stay_small_whatever_passes() -> None:
    capacity = 800
    chains = [branch(number) for number in range(4000)]
    tier = Tier("adaptive", capacity, chains)
    one = tier.policy
    assert isinstance(one, AdaptivePolicy)
    assert one._branches is not None
    for chain in chains:
        tier.hit_rate([chain])
        for shadow in one._shadows:
            assert len(shadow) <= 2 * adaptive.SAMPLED + one._branches.trunk
        assert len(one._sampled) <= len(one._parent) <= capacity + len(chain)
    assert len(one._branches._times) <= KEPT * 6 + TRUNK


def test_a_kept_chain_is_cut_to_its_head() -> None:
    branches = Branches(0.5)
    branches.note(tail_first(numbered(*range(LONGEST + 500))))
    assert set(branches._times) == set(numbered(*range(LONGEST)))


def test_what_is_dropped_leaves_no_ghost_in_shadows_or_trunk() -> None:
    one, resident = AdaptivePolicy(CAPACITY_ABOVE), set[Address]()
    for number in range(KEPT):
        serve(one, resident, branch(number))
    gone = entry(3)
    assert one._branches is not None
    assert one._branches.trunk == TRUNK
    one.remove(gone, evicted=False)
    one._parent = {name: parent for name, parent in one._parent.items() if parent != gone}  # its child's own memory
    assert one._branches.trunk == 3
    assert not any(isinstance(known, bytes) and known == gone for known in reachable(one))
    shadow = Shadow(adaptive.CANDIDATES["s3fifo"](4))
    for number in range(10):
        shadow.serve(numbered(number), None, 4, 0.0)
    assert entry(5) not in shadow
    assert any(known == entry(5) for known in reachable(shadow)), "a ghost of what has just gone"
    shadow.drop(entry(5))
    assert not any(isinstance(known, bytes) and known == entry(5) for known in reachable(shadow))


def test_a_shadow_hits_the_longest_prefix_that_it_holds() -> None:
    shadow = Shadow(LruPolicy(4))
    assert shadow.serve(tail_first(numbered(1, 2, 3)), None, 4, 0.0) == 0
    assert shadow.serve(tail_first(numbered(1, 2, 3, 4)), None, 4, 0.0) == 3
    assert shadow.serve(tail_first(numbered(9, 3, 4)), None, 4, 0.0) == 0, "what stands behind a miss is no hit"
    assert len(shadow) == 4
    assert entry(2) not in shadow and entry(1) in shadow, "tails go before heads"
    assert shadow.serve(tail_first(numbered(3)), entry(77), 4, 0.0) == 0, "nor what stands below one"
    assert shadow.serve(tail_first(numbered(3)), entry(9), 4, 0.0) == 1
