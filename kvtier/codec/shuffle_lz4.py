"""Byte-shuffle, then LZ4: bytes of the same significance stand together, which is where 16-bit KV repeats itself.

Payload: element size (uint8), then one LZ4 block without a stored size. The size comes from the caller, never from the
payload, so that a lying one allocates nothing.
"""

from __future__ import annotations

import lz4.block
import numpy as np

from kvtier.abc.codec import Codec
from kvtier.errors import CorruptFrame

ELEMENT_BYTES = 2
"""Of bf16 and fp16, which is what nearly all KV is."""


class ShuffleLz4Codec(Codec):
    name = "shuffle+lz4"
    number = 1

    def encoded_bytes(self, raw_bytes: int) -> int:
        """LZ4's own worst case plus the element size."""
        return raw_bytes + raw_bytes // 255 + 17

    def encode(self, raw: memoryview, into: memoryview) -> int:
        size = ELEMENT_BYTES if len(raw) % ELEMENT_BYTES == 0 else 1
        shuffled = np.ascontiguousarray(np.frombuffer(raw, np.uint8).reshape(-1, size).T)
        packed = lz4.block.compress(shuffled, store_size=False)
        into[0] = size
        into[1 : 1 + len(packed)] = packed
        return 1 + len(packed)

    def decode(self, payload: memoryview, into: memoryview) -> None:
        size = payload[0] if payload else 0
        if size == 0 or len(into) % size:
            raise CorruptFrame(f"element size {size} does not fit a block of {len(into)} bytes")
        try:
            shuffled = lz4.block.decompress(payload[1:], uncompressed_size=len(into))
        except (lz4.block.LZ4BlockError, ValueError, OverflowError) as error:
            raise CorruptFrame(f"LZ4 payload does not decode: {error}") from error
        if len(shuffled) != len(into):
            raise CorruptFrame(f"LZ4 payload decodes to {len(shuffled)} bytes, the block has {len(into)}")
        np.copyto(
            np.frombuffer(into, np.uint8).reshape(-1, size), np.frombuffer(shuffled, np.uint8).reshape(size, -1).T
        )
