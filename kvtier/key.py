"""Identity, scope and the chain of block keys.

``key[i] = H(key[i-1] | tokens of block i | extras of block i)`` and ``key[-1] = H(identity | scope)``: H is blake2b with
a 32-byte digest; ``|`` joins parts, each preceded by its length as uint32 little-endian; tokens are uint32 little-endian;
identity, scope and extras are msgpack arrays with their fields in declared order, shortest encodings, absent = nil. The
golden vectors in ``tests/vectors/keys.json`` are the specification: any process, machine or language gives these bytes.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple, NewType

import msgpack
import numpy as np

from kvtier.layout import Layout

BlockKey = NewType("BlockKey", bytes)
"""32 bytes that name a block of one chain: equal keys mean interchangeable bytes."""

KEY_BYTES = 32
SCHEMA_VERSION = 1
"""Raised whenever the meaning of stored bytes changes; part of the identity."""

_LENGTH = struct.Struct("<I")


def _joined(*parts: bytes) -> bytes:
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(_joined(*parts), digest_size=KEY_BYTES).digest()


def _packed(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


@dataclass(frozen=True, slots=True)
class Identity:
    """What is fixed for an engine and must match before bytes may be reused."""

    model: str
    """Model name, never a path."""
    weights: str
    """Revision of the weights or, without one, the fingerprint of config and tensors."""
    kv_dtype: str
    """Effective dtype of K and V at rest (``auto`` is resolved before it gets here)."""
    layout: Layout
    """Geometry of the whole model's block, before sharding."""
    rope: str | None = None
    """Rope or attention overrides that change K or V, in one canonical string."""
    codec: str | None = None
    """Lossy codec applied at save; None where bytes come back as they were."""
    engine_format: str | None = None
    """How the engine packs the inside of a block where that is not the layout's plain order (for instance a CPU ISA)."""
    schema: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if not self.model or self.model.startswith("/"):
            raise ValueError(f"an identity needs a model name, not a path: {self.model!r}")
        if not self.weights:
            raise ValueError("an identity needs the weights' revision or fingerprint")

    def packed(self) -> bytes:
        return _packed(
            [
                self.model,
                self.weights,
                self.kv_dtype,
                self.layout.fields(),
                self.rope,
                self.layout.block_tokens,
                self.codec,
                self.engine_format,
                self.schema,
            ]
        )

    def digest(self) -> bytes:
        """32 bytes that stand for this identity in frames and records."""
        return _digest(self.packed())


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: its name and a digest of its content."""

    name: str
    digest: bytes


def adapter_id(name: str | None) -> bytes:
    """16 bytes that name an adapter in frames; zeros for none."""
    if name is None:
        return bytes(16)
    return hashlib.blake2b(name.encode(), digest_size=16, person=b"kvtier-adapter").digest()


@dataclass(frozen=True, slots=True)
class Scope:
    """What varies by request and separates otherwise equal prompts."""

    tenant: bytes | None = None
    """The tenant's secret: whoever does not know it cannot form the tenant's keys."""
    adapter: Adapter | None = None
    salt: str | None = None
    """Cache salt of the request. The empty string is a salt of its own, not "no salt"."""
    epoch: int = 0
    """Clear epoch (uint32), 0 until something is cleared."""

    def __post_init__(self) -> None:
        if not 0 <= self.epoch < 1 << 32:
            raise ValueError(f"clear epoch must fit uint32, got {self.epoch}")

    def __repr__(self) -> str:
        tenant = "None" if self.tenant is None else f"<secret, id {self.tenant_id.hex()}>"
        adapter = None if self.adapter is None else self.adapter.name
        salted = "None" if self.salt is None else "<set>"
        return f"Scope(tenant={tenant}, adapter={adapter!r}, salt={salted}, epoch={self.epoch})"

    @property
    def tenant_id(self) -> bytes:
        """16 bytes that name the tenant in frames and records without giving its secret away."""
        if self.tenant is None:
            return bytes(16)
        return hashlib.blake2b(self.tenant, digest_size=16, person=b"kvtier-tenant").digest()

    @property
    def adapter_id(self) -> bytes:
        """16 bytes that name the adapter in frames and records, whatever its content; zeros for none."""
        return adapter_id(None if self.adapter is None else self.adapter.name)

    def packed(self) -> bytes:
        adapter = None if self.adapter is None else list(astuple(self.adapter))
        return _packed([self.tenant, adapter, self.salt, self.epoch])

    def digest(self) -> bytes:
        """32 bytes that stand for this scope in frames and records."""
        return _digest(self.packed())


@dataclass(frozen=True, slots=True)
class Extra:
    """Content that stands behind placeholder tokens: an image or an embedding."""

    kind: str
    """``image`` or ``embedding``."""
    position: int
    """Index of its first token inside the block; 0 for a span that began in an earlier block."""
    digest: bytes
    """Digest of the whole content, never shortened."""
    offset: int = 0
    """How many of the span's tokens lie in earlier blocks."""


def root_key(identity: Identity, scope: Scope) -> BlockKey:
    """``key[-1]``: the parent of every chain's first block."""
    return BlockKey(_digest(identity.packed(), scope.packed()))


def foreign_key(identity: Identity, scope: Scope, engine_hash: bytes) -> BlockKey:
    """The key of a block that an engine with a chain of its own has already hashed."""
    return BlockKey(_digest(identity.packed(), scope.packed(), engine_hash))


def chain_keys(
    parent: BlockKey,
    tokens: Sequence[int] | np.ndarray,
    block_tokens: int,
    extras: Mapping[int, Sequence[Extra]] | None = None,
) -> list[BlockKey]:
    """Keys of the full blocks of ``tokens``, the first of which follows ``parent``.

    ``extras`` maps a block's index in this call to its extras in position order. A partly filled last block has no key.
    Token ids outside uint32 raise ``OverflowError``, anything but whole numbers ``TypeError``.
    """
    count, size = len(tokens) // block_tokens, 4 * block_tokens
    numbers = _token_numbers(tokens if len(tokens) == count * block_tokens else tokens[: count * block_tokens])
    between, none = _LENGTH.pack(size), _joined(_packed(None))
    # What surrounds the hashes is done for all blocks at once: equal parts are laid beside the tokens by numpy, and each hash
    # goes on from a copy of one that has taken its first part.
    table = np.empty((count, len(between) + size + len(none)), np.uint8)
    table[:, : len(between)] = np.frombuffer(between, np.uint8)
    table[:, len(between) : -len(none)] = numbers.view(np.uint8).reshape(count, size)
    table[:, -len(none) :] = np.frombuffer(none, np.uint8)
    tails: Iterable[tuple[bytes]] = struct.iter_unpack(f"{table.shape[1]}s", table.data)
    if extras:
        tails = list(tails)
        for index, held in extras.items():
            if held and 0 <= index < count:
                packed = _joined(_packed([list(astuple(extra)) for extra in held]))
                tails[index] = (tails[index][0][: -len(none)] + packed,)
    begun = hashlib.blake2b(_LENGTH.pack(KEY_BYTES), digest_size=KEY_BYTES).copy
    key = bytes(parent)
    keys: list[BlockKey] = []
    for (tail,) in tails:
        digest = begun()
        digest.update(key + tail)
        key = digest.digest()
        keys.append(key)  # type: ignore[arg-type]  # a NewType's call would be a fifth of the loop
    return keys


def _token_numbers(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Tokens as contiguous uint32 little-endian."""
    if not isinstance(tokens, np.ndarray):
        numbers = array("I", tokens)
        assert numbers.itemsize == 4, "an unsigned int has 32 bits wherever Python runs today"
        if sys.byteorder == "big":
            numbers.byteswap()
        return np.frombuffer(numbers, "<u4")
    if tokens.size and tokens.dtype.kind not in "iu":
        raise TypeError(f"token ids must be whole numbers, not {tokens.dtype}")
    if tokens.size and (tokens.min() < 0 or tokens.max() >= 1 << 32):
        raise OverflowError("token ids must fit uint32")
    return np.ascontiguousarray(tokens, "<u4")


Address = NewType("Address", bytes)
"""What a stored object is found by: a key followed by the shard it holds (40 bytes)."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a block one object holds."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_stage: int = 0
    group: int = 0
    """Index of the cache group in the layout."""

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size < 1 << 16:
            raise ValueError(f"tp rank {self.tp_rank} of {self.tp_size}")
        if not (0 <= self.pp_stage < 1 << 16 and 0 <= self.group < 1 << 16):
            raise ValueError(f"pp stage {self.pp_stage} and cache group {self.group} must fit uint16")

    def packed(self) -> bytes:
        """8 bytes, four uint16 little-endian, in declared order."""
        return struct.pack("<4H", self.tp_rank, self.tp_size, self.pp_stage, self.group)


def address(key: BlockKey, shard: Shard) -> Address:
    return Address(key + shard.packed())


class Lot(NamedTuple):
    """What a clear takes or leaves as one: blocks of one identity, tenant, adapter and epoch, whatever their salts."""

    identity: bytes
    """Digest of the identity."""
    tenant: bytes
    """Tenant id."""
    adapter: bytes
    """Adapter id."""
    epoch: int


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a block comes from, as its frame records it."""

    identity: bytes
    """Digest of the identity, 32 bytes."""
    scope: bytes
    """Digest of the scope, 32 bytes."""
    tenant: bytes
    """Tenant id, 16 bytes, never the secret."""
    adapter: bytes = bytes(16)
    """Adapter id, 16 bytes; zeros for none."""
    epoch: int = 0
    """Clear epoch of the scope, uint32."""

    @classmethod
    def of(cls, identity: bytes, scope: Scope) -> Origin:
        """What blocks of ``scope`` say of themselves; ``identity`` is the identity's digest."""
        return cls(identity, scope.digest(), scope.tenant_id, scope.adapter_id, scope.epoch)

    @property
    def lot(self) -> Lot:
        return Lot(self.identity, self.tenant, self.adapter, self.epoch)


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive blocks of one chain: what match, load and save talk about. Plain data, safe to send."""

    origin: Origin
    parent: BlockKey
    """Key before the first of ``keys`` (the root's key for depth 0)."""
    depth: int
    """Index of the first of ``keys`` in its chain."""
    keys: tuple[BlockKey, ...]
    former: tuple[BlockKey, ...] = ()
    """The keys that the same blocks had before their scope was cleared, where that is known: what explains their misses."""

    def __len__(self) -> int:
        return len(self.keys)

    def head(self, count: int) -> Span:
        """The first ``count`` blocks of the span, or as many as there are."""
        return Span(self.origin, self.parent, self.depth, self.keys[:count], self.former[:count])
