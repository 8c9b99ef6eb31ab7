"""Builders for store scenarios: a small identity, spans of named blocks, an engine's memory, and a store turned by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvtier.abc.medium import KeyMedium
from kvtier.abc.policy import EntryMeta, EvictionPolicy
from kvtier.abc.store import NO_HINTS, Hints, Match, SlotRange, Transfer
from kvtier.codec.catalogue import codec_named
from kvtier.config import AdmissionRule, TierOptions, Verify, WriteMode
from kvtier.cost import Gate, OpenGate
from kvtier.key import Address, Identity, Span, address
from kvtier.metrics import Metrics
from kvtier.policy.lru import LruPolicy
from kvtier.quantity import Bytes
from kvtier.storage_backends.dram import DramMedium
from kvtier.storage_backends.nvme import NvmeMedium
from kvtier.store.arena import Arena
from kvtier.store.geometry import Geometry
from kvtier.store.parts import Parts
from kvtier.store.records import identity_text
from kvtier.store.store import TieredStore
from kvtier.testing.blocks import GEOMETRY, IDENTITY, SHARD, EngineMemory, chain, content, filled, span
from kvtier.testing.faults import Fault, wrapped
from kvtier.testing.hand import HandTurned, ManualClock
from kvtier.tier.key import KeyTier
from kvtier.tier.lower import LowerTier
from kvtier.tier.slot import SlotTier
from kvtier.transfer.workers import Workers

__all__ = ["GEOMETRY", "IDENTITY", "Bench", "EngineMemory", "chain", "content", "make_bench", "rotten", "span"]


def rotten(store: TieredStore, keys: Span) -> bool:
    """Flip a bit of each of the blocks in DRAM."""
    for key in keys.keys:
        slot = store._arena.pool.slot(address(key, SHARD))
        if slot is not None:
            view = store._arena.medium.view(slot)
            assert view is not None
            view[99] ^= 4
    return True


@dataclass
class Bench:
    """A store, its parts, and the engine's memory beside it."""

    store: TieredStore
    arena: Arena
    tiers: list[LowerTier]
    hand: HandTurned
    metrics: Metrics
    clock: ManualClock
    memory: EngineMemory = field(default_factory=lambda: EngineMemory(64))

    @property
    def workers(self) -> list[Workers]:
        """Of DRAM, then of each lower tier."""
        return self.hand.workers

    def turn(self, most: int = 10_000) -> int:
        """Run queued jobs by hand until none is left; how many there were."""
        return self.hand.turn(most=most)

    def source(self, keys: Span) -> SlotRange:
        """The engine's memory with the blocks of ``keys`` in it."""
        return filled(self.memory, keys)

    def save(self, keys: Span, hints: Hints = NO_HINTS) -> Transfer:
        transfer = self.store.save(keys, self.source(keys), hints=hints)
        self.turn()
        return transfer

    def match(self, keys: Span, request: str = "r", start: int = 0, hints: Hints = NO_HINTS) -> Match:
        match = self.store.match(request, keys, start, hints=hints)
        self.turn()
        assert not match.pending
        return match

    def load(self, keys: Span, request: str = "r") -> int:
        """Match and load; asserts that every byte is right, and returns how many blocks came."""
        match = self.match(keys, request)
        count = match.hits
        self.memory.bytes[:] = 0
        transfer = self.store.load(match, SlotRange(self.memory, range(count)))
        self.turn()
        outcomes = transfer.result(0)
        for index, outcome in enumerate(outcomes):
            if outcome.done:
                assert np.array_equal(self.memory.bytes[index], content(keys, index)), f"block {index} has wrong bytes"
        self.idle()
        return sum(outcome.done for outcome in outcomes)

    def idle(self) -> None:
        """Nothing is held, nothing is queued, and everything agrees."""
        assert self.store.check_integrity() == []
        stats = self.store.stats()
        assert (stats["matches"], stats["leased"], stats["arriving"], stats["saving"], stats["loading"]) == (
            0,
            0,
            0,
            0,
            0,
        )

    def empty_dram(self) -> None:
        """Evict everything that DRAM may evict."""
        self.store.empty("dram")


class Told(LruPolicy):
    """Remembers what it was told of each entry."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.told: dict[Address, EntryMeta] = {}

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        self.told[entry] = meta
        super().insert(entry, meta, now)


def make_bench(
    dram: int = 16,
    *,
    nvme: Path | None = None,
    nvme_write: WriteMode = WriteMode.THROUGH,
    shared: KeyMedium | None = None,
    shared_write: WriteMode = WriteMode.THROUGH,
    codec: str = "raw",
    verify: Verify = Verify.ALWAYS,
    gate: Gate | None = None,
    nvme_capacity: int = 4 << 20,
    nvme_fault: Fault | None = None,
    geometry: Geometry = GEOMETRY,
    identity: Identity = IDENTITY,
    policy: Callable[[int], EvictionPolicy] = LruPolicy,
    admission: AdmissionRule = AdmissionRule.ALL,
    write_budget: int | None = None,
) -> Bench:
    """A store whose transfers are turned by hand, with a clock that stands still until it is moved."""
    lock = threading.Lock()
    metrics = Metrics()
    medium = DramMedium(dram, geometry.block_bytes, prefault=False)
    arena = Arena(medium, policy(dram))
    hand, clock = HandTurned(), ManualClock()
    above = hand.add("dram")
    tiers: list[LowerTier] = []
    if nvme is not None:
        slots = NvmeMedium(nvme, geometry.block_bytes, NvmeMedium.Params(capacity=Bytes(nvme_capacity)))
        slots = slots if nvme_fault is None else wrapped(slots, nvme_fault)
        budget = None if write_budget is None else Bytes(write_budget)
        options = TierOptions(nvme_write, admission=admission, write_budget=budget)
        tiers.append(
            SlotTier(
                "nvme",
                options,
                slots,
                codec_named("raw"),
                hand.add("nvme"),
                metrics.tier("nvme"),
                lock,
                policy(slots.slots),
                clock,
            )
        )
    if shared is not None:
        options = TierOptions(shared_write)
        tiers.append(
            KeyTier(
                "shared", options, shared, codec_named(codec), hand.add("shared"), metrics.tier("shared"), lock, clock
            )
        )
    parts = Parts(geometry, arena, metrics.tier("dram"), tuple(tiers), above, gate or OpenGate(), lock, identity, clock)
    store = TieredStore(parts, verify=verify, keeper=False)
    for tier in tiers:
        tier.greet(identity.digest(), identity_text(identity))
    return Bench(store, arena, tiers, hand, metrics, clock)
