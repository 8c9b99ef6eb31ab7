"""A store in the hands of its suite: what a new store gives it, and the steps that its tests are told in."""

from __future__ import annotations

import json
import time
from typing import Generic, TypeVar

import numpy as np
import pytest

from kvtier.abc.medium import Outcome
from kvtier.abc.store import Found, Match, Reason, SlotRange, Store, Transfer
from kvtier.key import Span
from kvtier.testing.blocks import GEOMETRY, EngineMemory, content, filled

S = TypeVar("S", bound=Store)

PATIENCE = 20.0
"""Seconds after which a transfer or a match is taken to hang."""


class StoreHands(Generic[S]):
    """A store is given by its fixture; the rest is for overriding where it has something to hook, and for telling scenarios."""

    closed: bool
    """Whether a test has closed its store, which then cannot be looked into."""

    @pytest.fixture
    def store(self) -> S:
        raise NotImplementedError("a suite's subclass gives the store")

    def turn(self, store: S) -> None:
        """Run what is queued; nothing to do where the store has threads."""

    def drained(self, store: S) -> bool:
        """Whether the store could write down everything that lower tiers still lack."""
        return store.drain(PATIENCE)

    def lose(self, store: S, keys: Span) -> bool:
        """Flip a bit of every stored copy of the blocks, behind the store; whether that was possible."""
        del store, keys
        return False

    def memory(self, slots: int) -> EngineMemory:
        """An engine's memory."""
        return EngineMemory(slots)

    @pytest.fixture(autouse=True)
    def agrees(self, store: S) -> object:
        """After every test: no disagreement inside, and plain values to show."""
        self.closed = False
        yield
        self.turn(store)
        assert self.closed or store.check_integrity() == []
        json.dumps(store.stats())
        json.dumps(store.health())
        store.close()

    def ended(self, store: S, transfer: Transfer) -> list[Outcome]:
        self.turn(store)
        return transfer.result(PATIENCE)

    def saved(self, store: S, keys: Span) -> list[Outcome]:
        return self.ended(store, store.save(keys, filled(self.memory(len(keys)), keys)))

    def matched(self, store: S, keys: Span, request: str = "r", start: int = 0) -> Match:
        """A match that is not pending any more."""
        match = store.match(request, keys, start)
        self.settle(store, match)
        return match

    def settle(self, store: S, match: Match) -> None:
        end = time.monotonic() + PATIENCE
        while match.pending:
            self.turn(store)
            assert time.monotonic() < end, "the match is pending for ever"
            time.sleep(0.001)

    def loaded(self, store: S, match: Match, count: int | None = None) -> list[Outcome]:
        """Load into slots in reverse order; whatever is called DONE has the right bytes, and no other slot was touched."""
        count = match.hits if count is None else count
        memory = self.memory(count + 2)
        memory.bytes[:] = 0xA5
        slots = list(range(count, 0, -1))
        outcomes = self.ended(store, store.load(match, SlotRange(memory, slots)))
        assert len(outcomes) == count
        for index, (slot, outcome) in enumerate(zip(slots, outcomes, strict=True)):
            if outcome.done:
                assert outcome.nbytes == GEOMETRY.block_bytes
                expected = content(match.span, match.start + index)
                assert np.array_equal(memory.bytes[slot], expected), f"block {index} has wrong bytes"
        assert (memory.bytes[[0, count + 1]] == 0xA5).all(), "a slot was written that nobody named"
        return outcomes

    def comes(self, store: S, keys: Span, request: str = "r") -> int:
        """Match and load; how many blocks came."""
        return sum(outcome.done for outcome in self.loaded(store, self.matched(store, keys, request)))

    def answers(self, match: Match) -> list[tuple[Found, Reason | None]]:
        return [(block.found, block.reason) for block in match.blocks]
