"""Verbs on a store beside a model that knows what they may give: a dict from address to bytes.

Whoever drives it (a Hypothesis state machine, a long random run) chooses the verbs; every verb ends with ``check``. What is
asserted of any store, whatever fails meanwhile:

- a load that says DONE gives the bytes that the model has, and nothing writes to a buffer after its transfer has ended;
- nothing is found that was never saved, nor what was dropped and has not been saved since, nor what was cleared;
- ``check_integrity`` is empty, and the slots of every pool add up;
- at rest nothing is held, nothing is being written, and the store still works.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from kvtier.abc.store import NO_HINTS, Found, Hints, Match, Reason, Selection, SlotRange, Transfer
from kvtier.codec.frame import ByteArray
from kvtier.key import Address, Origin, Scope, Span, address
from kvtier.testing.blocks import LAYOUT, SHARD, EngineMemory, content, filled, span
from kvtier.testing.rig import Mishap, Rig

BRANCH_AT = 4
"""Blocks that two neighbouring prompts share."""
ASKED = (*[NO_HINTS] * 12, Hints(no_load=True), Hints(pin_seconds=15), Hints(max_wait_ms=0), Hints(max_wait_ms=900))
"""Hints that matches come with, most of them with none."""
MOST_BLOCKS = 9
PROMPTS = 10
_FRESH = 1 << 20
"""Chains from this number on are nobody's prompts."""
_REUSED = 0xEE
"""What the engine writes over slots that it may use again."""
_ROUNDS = 40
"""Rounds of upkeep in which a store has to come to rest."""


def _in_order(count: int) -> int:
    del count
    return 0


@dataclass
class _Moving:
    """A transfer that has not been seen to end, and the memory that belongs to it until then."""

    transfer: Transfer
    keys: Span
    start: int
    memory: EngineMemory


class _Interruption:
    """A fence during which somebody else comes in between."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def wait(self) -> None:
        if self._rig.meanwhile is not None:
            self._rig.meanwhile()


@dataclass
class Oracle:
    """The model, and the verbs. ``rig`` holds the store."""

    rig: Rig
    model: dict[Address, ByteArray] = field(default_factory=dict)
    dropped: dict[Address, int] = field(default_factory=dict)
    """Address to the time (in verbs) at which it was dropped, until it is saved again."""
    seen: Counter[str] = field(default_factory=Counter)
    """How often what happened."""
    matches: dict[str, tuple[Match, int]] = field(default_factory=dict)
    loads: list[_Moving] = field(default_factory=list)
    saves: list[_Moving] = field(default_factory=list)
    cleared: dict[Address, int] = field(default_factory=dict)
    """Address to the time at which it was cleared."""
    _doubtful: set[Address] = field(default_factory=set)
    """Cleared while no tier that outlives the process could be told."""
    _origins: dict[Address, Origin] = field(default_factory=dict)
    _reused: deque[EngineMemory] = field(default_factory=lambda: deque(maxlen=8))
    _time: int = 0
    _requests: int = 0

    def prompt(self, number: int, blocks: int) -> Span:
        """The first blocks of a prompt, of today's epoch; prompt 2k + 1 branches off prompt 2k. Some have a tenant."""
        scope = Scope(tenant=b"a secret" if number % 4 > 1 else None)
        epoch = self.rig.store.epoch(scope.tenant_id)
        size = LAYOUT.block_tokens
        head = [number // 2, *range(1, size * BRANCH_AT)]
        tail = (1000 * (number % 2) + token for token in range(size * (MOST_BLOCKS - BRANCH_AT)))
        return span([*head, *tail][: size * blocks], scope=replace(scope, epoch=epoch))

    def save(self, keys: Span) -> None:
        memory = EngineMemory(len(keys))
        source = filled(memory, keys)
        for index, name in enumerate(self._names(keys)):
            self.model.setdefault(name, content(keys, index))
            self._origins[name] = keys.origin
            self.dropped.pop(name, None)
        transfer = self.rig.store.save(keys, source, _Interruption(self.rig))
        self.saves.append(_Moving(transfer, keys, 0, memory))

    def fill(self, blocks: int) -> None:
        """Save a chain that nobody asks for."""
        self.save(self._nobodys(blocks))

    def _nobodys(self, blocks: int) -> Span:
        self._requests += 1
        scope = Scope(epoch=self.rig.store.epoch(Scope().tenant_id))
        return span([_FRESH + self._requests, *range(1, LAYOUT.block_tokens * blocks)], scope=scope)

    def match(self, keys: Span, start: int = 0, *, hints: Hints = NO_HINTS, turns: int | None = None) -> None:
        """``turns``: the request is expected first, and so many queued jobs run before it is matched."""
        self._requests += 1
        name = f"r{self._requests}"
        if turns is not None:
            self.rig.store.expect(name, keys, min(start, len(keys)))
            self.turn(lambda count: count - 1, turns)
        self.matches[name] = (
            self.rig.store.match(name, keys, min(start, len(keys)), hints=hints),
            self._time,
        )

    def ask_again(self, which: int) -> None:
        if self.matches:
            name, (match, _) = self._chosen(which)
            assert self.rig.store.match(name, match.span, match.start) is match, "one request has one live match"

    def load(self, which: int, most: int) -> None:
        """Load the first hits of a match that is not pending."""
        if not self.matches:
            return
        name, (match, _) = self._chosen(which)
        if match.pending:
            return
        del self.matches[name]
        count = min(most, match.hits)
        memory = EngineMemory(count)
        memory.bytes[:] = _REUSED
        transfer = self.rig.store.load(match, SlotRange(memory, range(count)), _Interruption(self.rig))
        self.loads.append(_Moving(transfer, match.span, match.start, memory))

    def give_up(self, which: int, *, by_name: bool) -> None:
        if self.matches:
            name, (match, _) = self._chosen(which)
            del self.matches[name]
            self.rig.store.forget(name) if by_name else match.release()

    def take_back(self, which: int) -> None:
        """Cancel a transfer."""
        moving = [*self.loads, *self.saves]
        if moving:
            moving[which % len(moving)].transfer.cancel()

    def drop(self, keys: Span) -> None:
        self.dropped.update(dict.fromkeys(self._names(keys), self._time))
        self.rig.store.drop(keys, Reason.CLEARED)

    def save_asked(self, which: int) -> None:
        """Save what a live match asks for, which may have been cleared meanwhile."""
        if self.matches:
            self.save(self._chosen(which)[1][0].span)

    def clear(self, what: Selection) -> None:
        done = self.rig.store.clear(what)
        self.seen["clears"] += 1
        assert done.epoch is not None
        names = [
            name
            for name, origin in self._origins.items()
            if what.tenant in (None, origin.tenant) and origin.epoch < done.epoch
        ]
        told = any(done.tiers[name].trouble is None for name in self.rig.lasting)
        if (
            self.rig.dead or not told
        ):  # a clear that the power took, or that only the process knows of, may not outlive it
            self._doubtful.update(name for name in names if name not in self.cleared)
        else:
            self._doubtful.difference_update(names)
        self.cleared.update(dict.fromkeys(names, self._time))

    def clear_tier(self, tier: str) -> None:
        self.rig.store.clear(Selection(), tier)

    def drop_asked(self, which: int, first: int) -> None:
        """Drop the rest of what a live match asks for, from block ``first`` on, while it is perhaps on its way."""
        if self.matches:
            keys = self._chosen(which)[1][0].span
            if len(keys):
                first %= len(keys)
                self.drop(Span(keys.origin, (keys.parent, *keys.keys)[first], keys.depth + first, keys.keys[first:]))

    def prefetch(self, keys: Span) -> None:
        self.rig.store.prefetch(keys)

    def turn(self, choose: Callable[[int], int], most: int = 1) -> None:
        """Run up to ``most`` queued jobs."""
        for _ in range(most):
            if self.rig.dead or not self.rig.run_one(choose):
                break

    def wait(self, seconds: float) -> None:
        self.rig.advance(seconds)

    def befall(self, mishap: Mishap, medium: int) -> None:
        self.rig.order(mishap, medium)

    def flip(self, draw: Callable[[int], int]) -> None:
        self.rig.flip(draw)

    def stall(self, which: int) -> None:
        self.rig.stall(which)

    def calm(self) -> None:
        self.rig.calm()

    def restart(self, *, kill: bool) -> None:
        """The process ends, one way or the other, and another one opens the media."""
        if kill:
            self.loads.clear()
            self.saves.clear()
        if self.rig.restart(kill=kill):
            self.seen["kills" if kill else "restarts"] += 1
            if not kill:
                assert all(one.transfer.done() for one in [*self.loads, *self.saves]), "a transfer outlived its store"
                self._look()
            self.matches.clear()
            self.cleared = {name: when for name, when in self.cleared.items() if name not in self._doubtful}
            self._doubtful.clear()
            self.dropped.clear()  # a delete that was not done before the end is not done after it

    def check(self) -> None:
        """Everything that has to hold after every verb."""
        self._time += 1
        if self.rig.dead:
            self.restart(kill=True)
        self._look()
        for match, since in self.matches.values():
            self._believable(match, since)
        assert self.rig.store.check_integrity() == []
        for name, counts in self.rig.pools().items():
            states = counts["free"] + counts["writing"] + counts["ready"] + counts["retiring"]
            assert states == counts["capacity"], f"{name}: {counts}"

    def come_to_rest(self) -> None:
        """No more mishaps and nobody who asks: everything ends, nothing is held, and the store works."""
        self.rig.meanwhile = None
        self.rig.calm()
        self.check()
        for name in list(self.matches):
            self.rig.store.forget(name)
        self.matches.clear()
        for _ in range(_ROUNDS):
            while self.rig.run_one(_in_order):
                pass
            self.rig.advance(3.0)
            self.rig.store.drain(0.0)
        while self.rig.run_one(_in_order):
            pass
        self.check()
        assert not self.loads, "a load never ended"
        assert not self.saves, "a save never ended"
        held = {name: count for name, count in self.rig.held().items() if count}
        assert not held, f"at rest, and yet: {held}"
        self._works()

    def _works(self) -> None:
        keys = self._nobodys(2)
        self.save(keys)
        self.turn(_in_order, 1000)
        self.match(keys)
        self.turn(_in_order, 1000)
        before = self.seen["loaded"]
        self.load(len(self.matches) - 1, 2)
        self.turn(_in_order, 1000)
        self.check()
        assert self.seen["loaded"] == before + 2, "a store at rest does not give back what it was just given"

    def _chosen(self, which: int) -> tuple[str, tuple[Match, int]]:
        return list(self.matches.items())[which % len(self.matches)]

    def _names(self, keys: Span) -> list[Address]:
        return [address(key, SHARD) for key in keys.keys]

    def _look(self) -> None:
        """Compare what has arrived, and use memory that is the engine's again for something else."""
        for moving in [one for one in self.loads if one.transfer.done()]:
            self.loads.remove(moving)
            if not moving.transfer.cancelled():
                self._compare(moving)
            self._reuse(moving.memory)
        for moving in [one for one in self.saves if one.transfer.done()]:
            self.saves.remove(moving)
            if not moving.transfer.cancelled():
                outcomes = moving.transfer.result(0)
                assert len(outcomes) == len(moving.keys)
                self.seen["saved"] += sum(outcome.nbytes > 0 for outcome in outcomes)
                self.seen["not saved"] += sum(not outcome.done for outcome in outcomes)
            self._reuse(moving.memory)
        for memory in self._reused:
            assert (memory.bytes == _REUSED).all(), "a buffer was written to after its transfer had ended"

    def _compare(self, moving: _Moving) -> None:
        outcomes = moving.transfer.result(0)
        assert len(outcomes) == moving.memory.slots
        names = self._names(moving.keys)[moving.start :]
        for index, outcome in enumerate(outcomes):
            self.seen["loaded" if outcome.done else "not loaded"] += 1
            if outcome.done and not np.array_equal(moving.memory.bytes[index], self.model[names[index]]):
                self.seen["wrong"] += 1
        assert not self.seen["wrong"], "wrong bytes were called DONE"

    def _reuse(self, memory: EngineMemory) -> None:
        memory.bytes[:] = _REUSED
        self._reused.append(memory)

    def _believable(self, match: Match, since: int) -> None:
        names = self._names(match.span)[match.start :]
        blocks = match.blocks
        assert len(blocks) == len(names)
        for name, block in zip(names, blocks, strict=True):
            if block.found is Found.HIT:
                assert name in self.model, "a block is found that nobody saved"
                assert not self.cleared.get(name, since) < since, (
                    "a block is found that was cleared before it was asked for"
                )
                assert not self.dropped.get(name, since) < since, (
                    "a block is found that was dropped before it was asked for"
                )
