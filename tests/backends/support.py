"""Builders that the tests of persistent media share."""

from __future__ import annotations

import random

import numpy as np

from kvtier.abc.medium import Record
from kvtier.codec.frame import Asked, FrameHeader, content_sum
from kvtier.key import Address, BlockKey, Origin, Shard, Span, address
from kvtier.storage_backends.dram import DramMedium

SHARD = Shard()
LAYOUT = b"l" * 16
ORIGIN = Origin(b"i" * 32, b"s" * 32, b"t" * 16, b"a" * 16, 3)


class Batch:
    """Blocks of one chain in DRAM, ready to be written as frames, with as many slots to read back into."""

    def __init__(self, count: int, block_bytes: int, seed: int = 0, *, expires_at: float | None = None) -> None:
        rng = random.Random(seed)
        keys = tuple(BlockKey(rng.randbytes(32)) for _ in range(count))
        self.span = Span(ORIGIN, BlockKey(bytes(32)), 0, keys)
        self.names = [address(key, SHARD) for key in keys]
        self.dram = DramMedium(2 * count, block_bytes, prefault=False)
        self.block_bytes = block_bytes
        fill = np.random.default_rng(seed)
        self.sources = [self.dram.view(slot) for slot in range(count)]
        self.into = [self.dram.view(slot) for slot in range(count, 2 * count)]
        for view in self.sources:
            view[:block_bytes] = fill.integers(0, 256, block_bytes, np.uint8).data
        self.sums = [content_sum(view[:block_bytes]) for view in self.sources]
        self.headers = [
            FrameHeader.of(
                self.span,
                index,
                SHARD,
                LAYOUT,
                raw_bytes=block_bytes,
                content=self.sums[index],
                created=1000.0 + index,
                expires_at=expires_at,
            )
            for index in range(count)
        ]
        self.asked = [Asked(key, SHARD, LAYOUT, ORIGIN.identity, block_bytes) for key in keys]

    def rows(self, slots: list[int], used: float = 1.0) -> list[Record]:
        parents = [Address(header.parent + SHARD.packed()) for header in self.headers]
        return [
            Record(
                slot,
                self.names[i],
                parents[i],
                i,
                ORIGIN.tenant,
                used,
                self.headers[i].expires_at,
                ORIGIN.identity,
                ORIGIN.adapter,
                ORIGIN.epoch,
            )
            for i, slot in enumerate(slots)
        ]

    def arrived_whole(self, index: int) -> bool:
        return self.into[index][: self.block_bytes] == self.sources[index][: self.block_bytes]
