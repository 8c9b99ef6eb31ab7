"""Blocks for tests: a small model's identity, spans of chains that are named by a number, and an engine's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvtier.abc.medium import Iovec, Outcome, SlotMedium
from kvtier.abc.store import SlotRange
from kvtier.codec.frame import ByteArray
from kvtier.key import Identity, Origin, Scope, Shard, Span, chain_keys, root_key
from kvtier.layout import CacheGroup, GroupKind, Layout
from kvtier.store.geometry import Geometry

LAYOUT = Layout((CacheGroup(GroupKind.GQA, 2, 2, 16, "bf16"),), 16)
IDENTITY = Identity("test-model", "r1", "bf16", LAYOUT)
SHARD = Shard()
GEOMETRY = Geometry(SHARD, LAYOUT.fingerprint(), LAYOUT.block_bytes, LAYOUT.block_tokens)


def span(
    tokens: Sequence[int], *, salt: str | None = None, identity: Identity = IDENTITY, scope: Scope | None = None
) -> Span:
    """The whole blocks of a prompt, from depth 0; ``scope`` in place of a salt."""
    scope = scope or Scope(salt=salt)
    root = root_key(identity, scope)
    origin = Origin.of(identity.digest(), scope)
    return Span(origin, root, 0, tuple(chain_keys(root, list(tokens), LAYOUT.block_tokens)))


def chain(number: int, blocks: int) -> Span:
    """A chain of its own, ``blocks`` long."""
    return span([number, *range(1, LAYOUT.block_tokens * blocks)])


def content(keys: Span, index: int) -> ByteArray:
    """Bytes that follow from a block's key, so that wrong ones show."""
    seed = int.from_bytes(keys.keys[index][:8], "little")
    return np.random.default_rng(seed).integers(0, 256, GEOMETRY.block_bytes, np.uint8)


class EngineMemory(SlotMedium):
    """Stands for HBM: slots whose bytes a test can fill and read."""

    def __init__(self, slots: int, slot_bytes: int = GEOMETRY.block_bytes) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.bytes = np.zeros((slots, slot_bytes), np.uint8)

    def view(self, slot: int) -> memoryview:
        return memoryview(self.bytes[slot])

    def read(self, slots: Sequence[int], into: Sequence[Iovec]) -> list[Outcome]:
        raise AssertionError("its views are used")

    def write(self, slots: Sequence[int], data: Sequence[Iovec]) -> list[Outcome]:
        raise AssertionError("its views are used")

    def close(self) -> None:
        pass


def filled(memory: EngineMemory, keys: Span, made: Callable[[Span, int], ByteArray] = content) -> SlotRange:
    """The first slots of ``memory``, with the blocks of ``keys`` in them."""
    for index in range(len(keys)):
        memory.bytes[index] = made(keys, index)
    return SlotRange(memory, range(len(keys)))
