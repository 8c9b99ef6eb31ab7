"""Builders for store scenarios: a small identity, spans of named blocks, an engine's memory, and a store turned by hand."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvtier.abc.medium import Iovec, Outcome, SlotMedium
from kvtier.abc.store import Match, SlotRange, Transfer
from kvtier.codec.catalogue import codec_named
from kvtier.config import TierOptions, Verify, WriteMode
from kvtier.cost import Gate, OpenGate
from kvtier.key import Identity, Origin, Scope, Shard, Span, chain_keys, root_key
from kvtier.layout import CacheGroup, GroupKind, Layout
from kvtier.metrics import Metrics
from kvtier.policy.lru import LruPolicy
from kvtier.quantity import Bytes
from kvtier.storage_backends.dram import DramMedium
from kvtier.storage_backends.memory import MemoryMedium
from kvtier.storage_backends.nvme import NvmeMedium
from kvtier.store.arena import Arena
from kvtier.store.geometry import Geometry
from kvtier.store.store import TieredStore
from kvtier.testing.faults import Fault, wrapped
from kvtier.tier.key import KeyTier
from kvtier.tier.lower import LowerTier
from kvtier.tier.slot import SlotTier
from kvtier.transfer.workers import Workers

LAYOUT = Layout((CacheGroup(GroupKind.GQA, 2, 2, 16, "bf16"),), 16)
IDENTITY = Identity("test-model", "r1", "bf16", LAYOUT)
SHARD = Shard()
SMALL_NVME = 3300 << 10
"""Bytes of an NVMe folder that holds fewer blocks than the random walks save."""
GEOMETRY = Geometry(SHARD, LAYOUT.fingerprint(), LAYOUT.block_bytes, LAYOUT.block_tokens)


def span(tokens: list[int] | range, *, salt: str | None = None, identity: Identity = IDENTITY) -> Span:
    """The whole blocks of a prompt, from depth 0."""
    scope = Scope(salt=salt)
    root = root_key(identity, scope)
    origin = Origin(identity.digest(), scope.digest(), scope.tenant_id)
    return Span(origin, root, 0, tuple(chain_keys(root, list(tokens), LAYOUT.block_tokens)))


def chain(number: int, blocks: int) -> Span:
    """A chain of its own, ``blocks`` long."""
    return span([number, *range(1, 16 * blocks)])


class EngineMemory(SlotMedium):
    """Stands for HBM: slots whose bytes a test can fill and read."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.slot_bytes = GEOMETRY.block_bytes
        self.bytes = np.zeros((slots, self.slot_bytes), np.uint8)

    def view(self, slot: int) -> memoryview:
        return memoryview(self.bytes[slot])

    def read(self, slots: object, into: object) -> list[Outcome]:
        raise AssertionError("its views are used")

    def write(self, slots: object, data: list[Iovec]) -> list[Outcome]:  # type: ignore[override]
        raise AssertionError("its views are used")

    def close(self) -> None:
        pass


def content(keys: Span, index: int) -> np.ndarray:
    """Bytes that follow from a block's key, so that wrong ones show."""
    seed = int.from_bytes(keys.keys[index][:8], "little")
    return np.random.default_rng(seed).integers(0, 256, GEOMETRY.block_bytes, np.uint8)


@dataclass
class Bench:
    """A store, its parts, and the engine's memory beside it."""

    store: TieredStore
    arena: Arena
    tiers: list[LowerTier]
    workers: list[Workers]
    metrics: Metrics
    clock: list[float] = field(default_factory=lambda: [100.0])
    memory: EngineMemory = field(default_factory=lambda: EngineMemory(64))

    def turn(self, most: int = 10_000) -> int:
        """Run queued jobs by hand until none is left; how many there were."""
        count = 0
        while count < most and any(each.run_one() for each in self.workers):
            count += 1
        return count

    def source(self, keys: Span) -> SlotRange:
        """The engine's memory with the blocks of ``keys`` in it."""
        for index in range(len(keys)):
            self.memory.bytes[index] = content(keys, index)
        return SlotRange(self.memory, range(len(keys)))

    def save(self, keys: Span) -> Transfer:
        transfer = self.store.save(keys, self.source(keys))
        self.turn()
        return transfer

    def match(self, keys: Span, request: str = "r", start: int = 0) -> Match:
        match = self.store.match(request, keys, start)
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
        slots, gone = self.arena.take(self.arena.pool.evictable + self.arena.pool.free, self.clock[0])
        self.store._promoter.note_gone(gone)
        self.arena.pool.release(slots, self.clock[0])


def make_bench(
    dram: int = 16,
    *,
    nvme: Path | None = None,
    nvme_write: WriteMode = WriteMode.THROUGH,
    shared: MemoryMedium | None = None,
    shared_write: WriteMode = WriteMode.THROUGH,
    codec: str = "raw",
    verify: Verify = Verify.ALWAYS,
    gate: Gate | None = None,
    nvme_capacity: int = 4 << 20,
    nvme_fault: Fault | None = None,
) -> Bench:
    """A store whose transfers are turned by hand, with a clock that stands still until it is moved."""
    lock = threading.Lock()
    metrics = Metrics()
    medium = DramMedium(dram, GEOMETRY.block_bytes, prefault=False)
    arena = Arena(medium, LruPolicy(dram))
    workers = [Workers("dram", 0)]
    tiers: list[LowerTier] = []
    if nvme is not None:
        slots = NvmeMedium(nvme, GEOMETRY.block_bytes, NvmeMedium.Params(capacity=Bytes(nvme_capacity)))
        slots = slots if nvme_fault is None else wrapped(slots, nvme_fault)
        workers.append(Workers("nvme", 0))
        options = TierOptions(nvme_write)
        policy = LruPolicy(slots.slots)
        tiers.append(
            SlotTier("nvme", options, slots, codec_named("raw"), workers[-1], metrics.tier("nvme"), lock, policy)
        )
    if shared is not None:
        workers.append(Workers("shared", 0))
        options = TierOptions(shared_write)
        tiers.append(KeyTier("shared", options, shared, codec_named(codec), workers[-1], metrics.tier("shared"), lock))
    clock = [100.0]
    store = TieredStore(
        GEOMETRY,
        arena,
        metrics.tier("dram"),
        tiers,
        workers[0],
        gate or OpenGate(),
        lock,
        verify=verify,
        clock=lambda: clock[0],
        keeper=False,
    )
    return Bench(store, arena, tiers, workers, metrics, clock)
