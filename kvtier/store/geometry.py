"""What all objects of one store have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.codec.frame import Asked
from kvtier.codec.lossy import LossyCodec
from kvtier.key import Address, Shard, Span


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shard that a store keeps, and the size of its blocks."""

    shard: Shard
    layout: bytes
    """Fingerprint of the shard's layout."""
    block_bytes: int
    """Of a block as it is kept: encoded, where the store has a lossy codec."""
    block_tokens: int
    codec: LossyCodec | None = None
    """What blocks are encoded with at save and decoded with at load; None: they are kept as they are."""

    def addresses(self, span: Span) -> list[Address]:
        suffix = self.shard.packed()
        return [key + suffix for key in span.keys]  # type: ignore[misc]  # a NewType's call would be half of it

    def asked(self, span: Span, indexes: Sequence[int]) -> list[Asked]:
        """What the frames of these blocks of the span have to be."""
        identity = span.origin.identity
        parents = (span.parent, *span.keys)
        return [
            Asked(
                span.keys[index],
                self.shard,
                self.layout,
                identity,
                self.block_bytes,
                parents[index],
                span.depth + index,
            )
            for index in indexes
        ]
