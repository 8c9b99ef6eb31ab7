"""Bytes as they are."""

from __future__ import annotations

import numpy as np

from kvtier.abc.codec import Codec
from kvtier.errors import CorruptFrame


class RawCodec(Codec):
    name = "raw"
    number = 0
    fixed_ratio = True

    def encoded_bytes(self, raw_bytes: int) -> int:
        return raw_bytes

    def encode(self, raw: memoryview, into: memoryview) -> int:
        np.copyto(np.frombuffer(into, np.uint8, len(raw)), np.frombuffer(raw, np.uint8))
        return len(raw)

    def decode(self, payload: memoryview, into: memoryview) -> None:
        if len(payload) != len(into):
            raise CorruptFrame(f"raw payload of {len(payload)} bytes for a block of {len(into)}")
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(payload, np.uint8))
