"""How a block's bytes are written at rest."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Codec(ABC):
    """A reversible (or declared lossy) transform of one payload. Thread-safe and without state between calls."""

    name: str
    """At most 15 ASCII characters; stands in every frame."""
    number: int
    """uint16 that stands for it in a frame header."""
    lossy: bool = False
    fixed_ratio: bool = False
    """Whether ``encoded_bytes`` is the exact size: slot-addressed tiers take only such codecs."""

    @abstractmethod
    def encoded_bytes(self, raw_bytes: int) -> int:
        """Size of the encoding of ``raw_bytes``: exact for a fixed ratio, else the most it can be."""

    @abstractmethod
    def encode(self, raw: memoryview, into: memoryview) -> int:
        """Encode ``raw`` into ``into`` (at least ``encoded_bytes`` long); returns the bytes used."""

    @abstractmethod
    def decode(self, payload: memoryview, into: memoryview) -> None:
        """Decode ``payload`` so that it fills ``into`` exactly. Raises ``CorruptFrame`` where it does not."""
