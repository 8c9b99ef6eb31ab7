"""What a call costs does not grow with the pool: counted in executed lines of the policies, not in seconds."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from kvtier import policy
from kvtier.abc.policy import EntryMeta, EvictionPolicy
from kvtier.testing.policies import entry
from tests.policy.reference import REFERENCES, Fifo, S3Fifo

SMALL, LARGE = 64, 1024
ROOMS = (str(Path(policy.__file__).parent), str(Path(__file__).with_name("reference.py")))


def lines_of(act: Callable[[], None]) -> int:
    """Lines of the policies that ``act`` executes; a comprehension counts one per item."""
    count = 0

    def traced(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(ROOMS):
            return None
        count += 1
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def mixed(one: EvictionPolicy, capacity: int) -> Callable[[], int]:
    """Uses of a few that come often and many that come once; each eviction names its victim and lets it go."""
    rng, resident = random.Random(11), dict[int, None]()

    def run() -> int:
        for step in range(4 * SMALL):
            number = min(int(capacity * rng.paretovariate(0.7) / 8), 10**9)
            if number in resident:
                one.touch(entry(number), float(step))
                continue
            if len(resident) == capacity:
                for gone in one.victims(1, frozenset(), float(step)) or ():
                    one.remove(gone, evicted=True)
                    del resident[int.from_bytes(gone, "little")]
            one.insert(entry(number), EntryMeta(nbytes=100, priority=number % 3, expires_at=number % 97), float(step))
            resident[number] = None
        return 4 * SMALL

    while len(resident) < capacity:
        run()
    return run


def hot(one: EvictionPolicy, capacity: int) -> Callable[[], int]:
    """Everything is used, then as much comes as goes: whatever a use has put off falls due here."""
    resident = [entry(number) for number in range(capacity)]
    for each in resident:
        one.insert(each, EntryMeta(nbytes=100, expires_at=1.0), 0.0)
    number = capacity

    def run() -> int:
        nonlocal number
        for each in resident * 3:
            one.touch(each, 0.0)
        for _ in range(capacity):
            gone = (one.victims(1, frozenset(), 0.0) or [])[0]
            one.remove(gone, evicted=True)
            resident.remove(gone)
            resident.append(entry(number))
            one.insert(resident[-1], EntryMeta(nbytes=100), 0.0)
            number += 1
        return 6 * capacity

    return run


def cost(
    make: Callable[[int], EvictionPolicy], work: Callable[[EvictionPolicy, int], Callable[[], int]], capacity: int
) -> float:
    """Lines per call in the steady state."""
    run = work(make(capacity), capacity)
    calls = 0

    def act() -> None:
        nonlocal calls
        calls = run()

    return lines_of(act) / calls


WORKS = {"mixed": mixed, "hot": hot}
NAMES = sorted(REFERENCES)


@pytest.mark.parametrize("work", sorted(WORKS))
@pytest.mark.parametrize("name", NAMES)
def test_a_call_costs_as_much_in_a_large_pool(name: str, work: str) -> None:
    growth = 2.0 if name in {"gdsf", "ttl"} else 1.5  # those two keep a heap: log2(1024) / log2(64) is 1.7
    small, large = (cost(lambda capacity: policy.make(name, capacity), WORKS[work], each) for each in (SMALL, LARGE))
    assert large <= growth * small, f"{small:.1f} lines per call in a pool of {SMALL}, {large:.1f} in one of {LARGE}"


def test_the_count_tells_what_looks_at_everything_from_what_does_not() -> None:
    """Against a count that sees nothing."""
    small, large = (cost(S3Fifo, hot, each) for each in (16, 64))
    assert large > 2 * small
    assert cost(Fifo, hot, 64) > 0
