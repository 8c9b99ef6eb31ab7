"""Every policy names, call for call, what a naive one made from the text of its source names."""

from __future__ import annotations

import random

import pytest

from kvtier import policy
from kvtier.key import Address
from kvtier.policy.sketch import MOST, SAMPLE, FrequencySketch
from kvtier.testing.policies import drawn_meta, entry
from tests.policy.reference import REFERENCES

STEPS = 3000
"""Of the smallest pool; a step costs as much as the pool is large."""


class Pair:
    """A policy and its reference under the same calls."""

    def __init__(self, name: str, capacity: int, rng: random.Random) -> None:
        self.both = (policy.make(name, capacity), REFERENCES[name](capacity))
        self.resident: list[Address] = []
        self.rng = rng

    def insert(self, one: Address, now: float) -> None:
        meta = drawn_meta(self.rng)
        for each in self.both:
            each.insert(one, meta, now)
        self.resident.append(one)

    def touch(self, one: Address, now: float) -> None:
        """Some uses come in one call, as those of a chain do."""
        more = [one, *self.rng.sample(self.resident, min(2, len(self.resident)))] if self.rng.random() < 0.2 else [one]
        mine, naive = self.both
        mine.touch_all(more, now)
        for each in more:
            naive.touch(each, now)

    def refresh(self, one: Address, now: float) -> None:
        for each in self.both:
            each.refresh(one, now)

    def pass_over(self, now: float) -> None:
        passed = self.rng.sample(self.resident, self.rng.randrange(len(self.resident) + 1))
        for each in self.both:
            each.pass_over(passed, now)

    def remove(self, one: Address, *, evicted: bool) -> None:
        for each in self.both:
            each.remove(one, evicted=evicted)
        self.resident.remove(one)

    def named(self, count: int, protected: frozenset[Address], now: float) -> list[Address] | None:
        mine, naive = (one.victims(count, protected, now) for one in self.both)
        assert mine == naive
        return mine

    def evict(self, count: int, now: float) -> None:
        """What is named goes, or, as under a pool, something else in its place."""
        protected = frozenset(self.rng.sample(self.resident, self.rng.randrange(len(self.resident) - count + 1)))
        for one in self.named(count, protected, now) or ():
            able = [other for other in self.resident if other not in protected]
            self.remove(one if one in able and self.rng.random() < 0.7 else self.rng.choice(able), evicted=True)


@pytest.mark.parametrize("name", sorted(REFERENCES))
@pytest.mark.parametrize("capacity", [1, 3, 24])
def test_a_policy_names_what_its_reference_names(name: str, capacity: int) -> None:
    seed = 100 + capacity
    print(f"seed {seed}")
    rng = random.Random(seed)
    pair = Pair(name, capacity, rng)
    over = rng.choice([0, 2])
    for step in range(STEPS * 3 // (capacity + 3)):
        now = float(step // 3)
        one = entry(rng.choice([rng.randrange(capacity + 2), rng.randrange(4 * capacity)]))
        draw = rng.random()
        if one in pair.resident and draw < 0.1:
            pair.remove(one, evicted=False)
        elif one in pair.resident and draw < 0.3:
            pair.refresh(one, now)
        elif one in pair.resident and draw < 0.4:
            pair.pass_over(now)
        elif one in pair.resident:
            pair.touch(one, now)
        else:
            if len(pair.resident) >= capacity + over:
                pair.evict(rng.randrange(1, len(pair.resident) // 2 + 2), now)
            pair.insert(one, now)
        assert pair.named(len(pair.resident), frozenset(), now) is not None
        assert pair.named(len(pair.resident) + 1, frozenset(), now) is None


def test_every_policy_has_a_reference() -> None:
    assert set(policy.names()) - {"adaptive"} == set(REFERENCES)


def test_the_sketch_never_counts_too_low_and_seldom_too_high() -> None:
    seed = 5
    print(f"seed {seed}")
    rng = random.Random(seed)
    capacity = 1000
    sketch = FrequencySketch(capacity)
    exact: dict[Address, int] = {}
    for _ in range(SAMPLE * capacity - 1):
        one = entry(int(rng.paretovariate(0.6)))
        sketch.add(one)
        exact[one] = exact.get(one, 0) + 1
    wrong = 0
    for one, count in exact.items():
        assert sketch.count(one) >= min(count, MOST), "an entry counts as used less often than it was"
        wrong += sketch.count(one) > min(count, MOST + 1)
    assert wrong <= 0.15 * len(exact), f"{wrong} of {len(exact)} count as used more often than they were"
    often, before = max(exact, key=exact.__getitem__), MOST
    sketch.add(entry(1 << 70))  # the sample is full
    assert sketch.count(often) == before // 2
