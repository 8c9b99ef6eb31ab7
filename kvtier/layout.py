"""Geometry of a block and the arithmetic of its bytes."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, replace

import msgpack

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1}
"""Bytes of one element of each dtype that K and V may have at rest."""


class GroupKind(enum.Enum):
    """How attention heads share keys and values."""

    MHA = "mha"
    GQA = "gqa"
    MQA = "mqa"
    MLA = "mla"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same state per token."""

    kind: GroupKind
    layers: int
    kv_heads: int
    """KV heads of one layer; 1 for MQA and for MLA's single latent."""
    head_dim: int
    """Elements per head; for MLA the latent plus the rope part (512 + 64 in DeepSeek-V3)."""
    dtype: str
    window: int | None = None
    """Sliding window in tokens; None for full attention."""

    def __post_init__(self) -> None:
        if min(self.layers, self.kv_heads, self.head_dim) < 1:
            raise ValueError(f"a cache group needs at least one layer, head and element: {self}")
        if self.kind in (GroupKind.MQA, GroupKind.MLA) and self.kv_heads != 1:
            raise ValueError(f"{self.kind.value} has one KV head, got {self.kv_heads}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown KV dtype {self.dtype!r}; known: {', '.join(DTYPE_BYTES)}")

    @property
    def tensors(self) -> int:
        """Tensors per layer: K and V, or MLA's one latent."""
        return 1 if self.kind is GroupKind.MLA else 2

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.tensors * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def fields(self) -> list[object]:
        return [self.kind.value, self.layers, self.kv_heads, self.head_dim, self.dtype, self.window]


@dataclass(frozen=True, slots=True)
class Layout:
    """Geometry of the whole model's block, before sharding."""

    groups: tuple[CacheGroup, ...]
    block_tokens: int

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("a layout needs at least one cache group")
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens must be positive, got {self.block_tokens}")

    @property
    def bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.bytes_per_token

    def fields(self) -> list[object]:
        """The layout as plain values, in the order that identity and fingerprint use."""
        return [[group.fields() for group in self.groups], self.block_tokens]

    def fingerprint(self) -> bytes:
        """16 bytes that guard every frame against another geometry of the same size."""
        return hashlib.blake2b(msgpack.packb(self.fields()), digest_size=16, person=b"kvtier-layout").digest()

    def shard(self, tp_size: int, group: int = 0) -> Layout:
        """The layout that one of ``tp_size`` ranks keeps of one group: KV heads are split, or repeated where they do not suffice.

        Raises ``ValueError`` where the heads cannot be split evenly.
        """
        whole = self.groups[group]
        if whole.kv_heads >= tp_size:
            if whole.kv_heads % tp_size:
                raise ValueError(f"{whole.kv_heads} KV heads do not split over {tp_size} ranks")
            part = replace(whole, kv_heads=whole.kv_heads // tp_size)
        elif tp_size % whole.kv_heads:
            raise ValueError(f"{whole.kv_heads} KV heads do not repeat evenly over {tp_size} ranks")
        else:
            part = replace(whole, kv_heads=1)
        return Layout((part,), self.block_tokens)
