"""A Hypothesis state machine over a store: any order of verbs, transfers, faults, clock jumps and restarts.

Subclass it, say how a rig is made, and run it::

    class Machine(StoreMachine):
        def make(self, rng): return MyRig(...)

    TestMachine = Machine.TestCase

What is asserted after every step stands in ``kvtier.testing.oracle``; what fails is shrunk to a short list of verbs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeAlias

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.abc.store import Hints, Selection
from kvtier.testing.oracle import ASKED, MOST_BLOCKS, PROMPTS, Oracle
from kvtier.testing.rig import Mishap, Rig

Verb: TypeAlias = Callable[[Oracle], None]

_prompts = st.tuples(st.integers(0, PROMPTS - 1), st.integers(1, MOST_BLOCKS))
_which = st.integers(0, 20)
_choices = st.lists(st.integers(0, 20), min_size=1, max_size=8)


def _chosen(numbers: list[int]) -> Callable[[int], int]:
    """A choice per number, the first in order when they are used up."""
    left = iter(numbers)
    return lambda count: next(left, 0) % count


def _verbs() -> st.SearchStrategy[Verb]:
    """What another thread may do in the middle of a transfer."""
    return st.one_of(
        st.builds(lambda asked: lambda oracle: oracle.save(oracle.prompt(*asked)), _prompts),
        st.builds(lambda asked: lambda oracle: oracle.match(oracle.prompt(*asked)), _prompts),
        st.builds(lambda which: lambda oracle: oracle.load(which, MOST_BLOCKS), _which),
        st.builds(lambda which: lambda oracle: oracle.give_up(which, by_name=True), _which),
        st.builds(lambda which: lambda oracle: oracle.take_back(which), _which),
        st.builds(lambda which: lambda oracle: oracle.drop_asked(which, which), _which),
        st.builds(lambda numbers: lambda oracle: oracle.turn(_chosen(numbers)), _choices),
        st.just(lambda oracle: oracle.wait(3.0)),
    )


class StoreMachine(RuleBasedStateMachine):
    """For any store of which there is a rig."""

    oracle: Oracle

    def make(self, rng: random.Random) -> Rig:
        """A rig over a fresh store; whatever of it may vary is drawn from ``rng``."""
        raise NotImplementedError("a subclass makes the rig")

    @initialize(rng=st.integers(0, 1 << 16).map(random.Random))
    def build(self, rng: random.Random) -> None:
        self.oracle = Oracle(self.make(rng))
        self._between: list[Verb] = []
        self.oracle.rig.meanwhile = self._meanwhile

    def _meanwhile(self) -> None:
        if self._between and not self.oracle.rig.dead:
            self._between.pop()(self.oracle)

    @rule(asked=_prompts)
    def save(self, asked: tuple[int, int]) -> None:
        self.oracle.save(self.oracle.prompt(*asked))

    @rule(blocks=st.integers(1, 32))
    def fill(self, blocks: int) -> None:
        self.oracle.fill(blocks)

    @rule(
        asked=_prompts,
        start=st.sampled_from([0, 0, 1, 4, 9]),
        hints=st.sampled_from(ASKED),
        turns=st.sampled_from([None, None, 0, 1, 2]),
    )
    def match(self, asked: tuple[int, int], start: int, hints: Hints, turns: int | None) -> None:
        self.oracle.match(self.oracle.prompt(*asked), start, hints=hints, turns=turns)

    @precondition(lambda self: self.oracle.matches)
    @rule(which=_which)
    def ask_again(self, which: int) -> None:
        self.oracle.ask_again(which)

    @precondition(lambda self: self.oracle.matches)
    @rule(which=_which, most=st.sampled_from([1, MOST_BLOCKS]))
    def load(self, which: int, most: int) -> None:
        self.oracle.load(which, most)

    @precondition(lambda self: self.oracle.matches)
    @rule(which=_which, by_name=st.booleans())
    def give_up(self, which: int, by_name: bool) -> None:
        self.oracle.give_up(which, by_name=by_name)

    @precondition(lambda self: self.oracle.loads or self.oracle.saves)
    @rule(which=_which)
    def take_back(self, which: int) -> None:
        self.oracle.take_back(which)

    @rule(asked=_prompts)
    def drop(self, asked: tuple[int, int]) -> None:
        self.oracle.drop(self.oracle.prompt(*asked))

    @precondition(lambda self: self.oracle.matches)
    @rule(which=_which)
    def save_asked(self, which: int) -> None:
        self.oracle.save_asked(which)

    @rule(tenant=st.sampled_from([None, bytes(16)]))
    def clear(self, tenant: bytes | None) -> None:
        self.oracle.clear(Selection(tenant=tenant))

    @rule(which=_which)
    def clear_tier(self, which: int) -> None:
        names = ["dram", *self.oracle.rig.lasting]
        self.oracle.clear_tier(names[which % len(names)])

    @precondition(lambda self: self.oracle.matches)
    @rule(which=_which, first=st.integers(0, MOST_BLOCKS))
    def drop_asked(self, which: int, first: int) -> None:
        self.oracle.drop_asked(which, first)

    @rule(asked=_prompts)
    def prefetch(self, asked: tuple[int, int]) -> None:
        self.oracle.prefetch(self.oracle.prompt(*asked))

    @rule(numbers=_choices)
    def turn_one(self, numbers: list[int]) -> None:
        self.oracle.turn(_chosen(numbers))

    @rule(numbers=_choices)
    def turn_some(self, numbers: list[int]) -> None:
        self.oracle.turn(_chosen(numbers), 20)

    @rule(numbers=_choices, verbs=st.lists(_verbs(), min_size=1, max_size=3))
    def turn_with_others_between(self, numbers: list[int], verbs: list[Verb]) -> None:
        self._between = verbs
        self.oracle.turn(_chosen(numbers), 3)
        self._between = []

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.oracle.wait(seconds)

    @rule(mishap=st.sampled_from(Mishap), medium=st.integers(0, 1))
    def befall(self, mishap: Mishap, medium: int) -> None:
        self.oracle.befall(mishap, medium)

    @rule(seed=st.integers(0, 1 << 16))
    def flip(self, seed: int) -> None:
        self.oracle.flip(random.Random(seed).randrange)

    @rule(which=st.integers(0, 2))
    def stall(self, which: int) -> None:
        self.oracle.stall(which)

    @rule()
    def calm(self) -> None:
        self.oracle.calm()

    @rule()
    def restart(self) -> None:
        self.oracle.restart(kill=False)

    @rule()
    def kill(self) -> None:
        self.oracle.restart(kill=True)

    @invariant()
    def holds(self) -> None:
        self.oracle.check()

    def teardown(self) -> None:
        if hasattr(self, "oracle"):
            try:
                self.oracle.come_to_rest()
            finally:
                self.oracle.rig.close()
