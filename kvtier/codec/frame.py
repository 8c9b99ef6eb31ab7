"""The frame: a block's bytes at rest, as a header of fixed size and a payload.

    offset  size  field                          offset  size  field
         0     6  magic "KVTIER"                    160     8  shard
         6     2  version                           168    16  layout fingerprint
         8     2  flags (1: keyed sums, 2: sealed)   184     8  created (float64, wall clock)
        10     2  codec number                      192     8  expires_at (float64, 0 = never)
        12     4  depth                             200     8  raw bytes
        16    32  key                               208     8  payload bytes
        48    32  parent key                        216    16  content sum (XXH3-128 of the raw bytes)
        80    32  identity digest                   232    16  stored sum (of the encoded payload)
       112    32  scope digest                      248    16  adapter id
       144    16  tenant id                         264     4  clear epoch
                                                    268    12  nonce of a sealed frame, else zero
                                                    280   216  zero
                                                    496    16  sum of bytes 0 to 495

Integers are little-endian. With the raw codec and plain sums, content and stored are the same number. Where others can
write to a medium its stored and header sums are keyed blake2b; the content sum stays XXH3-128, under the header's sum. In a
sealed frame (``seal.py``) the content sum is encrypted, the tag of the seal stands for the stored sum, and the header's
own sum is there as ever, so that an index can be rebuilt without the key.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import xxhash

from kvtier.errors import CorruptFrame
from kvtier.key import BlockKey, Lot, Shard, Span

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

HEADER_BYTES = 512
SUM_BYTES = 16
NONCE_BYTES = 12
FRAME_VERSION = 1
MAX_PAYLOAD_BYTES = 1 << 30
"""No frame is longer; a header that says so is corrupt."""

MAGIC = b"KVTIER"
_KEYED = 1
SEALED = 2
_FIELDS = struct.Struct("<6sHHHI32s32s32s32s16s4H16sddQQ16s16s16sI12s")
_SUMS_AT = 216
"""Where content and stored sum stand, one behind the other."""
_BODY_BYTES = HEADER_BYTES - SUM_BYTES
_WHOLE = struct.Struct(f"{_FIELDS.format}{_BODY_BYTES - _FIELDS.size}x{SUM_BYTES}s")
_ZEROS = bytes(_BODY_BYTES - _FIELDS.size)
PIECE_BYTES = 384 << 10
"""Bytes copied and then hashed while they are still in a core's L2 cache."""


@dataclass(frozen=True, slots=True)
class Summer:
    """How the stored and header sums of a medium's frames are made."""

    of: Callable[[ReadableBuffer], bytes]
    """Sum of some bytes: 16 bytes."""
    flags: int = 0


PLAIN = Summer(xxhash.xxh3_128_digest)
"""XXH3-128: proves against decay and mix-ups, not against an adversary."""


def keyed_summer(auth_key: bytes) -> Summer:
    """Keyed blake2b: nobody without ``auth_key`` (1 to 64 bytes) can make a frame that proves."""
    return Summer(lambda data: hashlib.blake2b(data, key=auth_key, digest_size=SUM_BYTES).digest(), _KEYED)


def summer_of(auth_key: bytes | None) -> Summer:
    return PLAIN if auth_key is None else keyed_summer(auth_key)


def content_sum(raw: ReadableBuffer) -> bytes:
    """XXH3-128 of raw bytes: 16 bytes, made once at save and carried from then on."""
    return xxhash.xxh3_128_digest(raw)


ByteArray: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"


def copy_with_sum(source: ByteArray, into: ByteArray) -> bytes:
    """Copy bytes (equal lengths, contiguous) and return the content sum of what arrived. Releases the GIL."""
    if len(source) <= PIECE_BYTES:
        np.copyto(into, source)
        return xxhash.xxh3_128_digest(into.data)
    digester = xxhash.xxh3_128()
    for start in range(0, len(source), PIECE_BYTES):
        piece = into[start : start + PIECE_BYTES]
        np.copyto(piece, source[start : start + PIECE_BYTES])
        digester.update(piece.data)
    return digester.digest()


def associated_data(page: memoryview) -> bytes:
    """What the seal of the frame with this header vouches for besides what it hides: all but the sums."""
    return bytes(page[:_SUMS_AT]) + bytes(page[_SUMS_AT + 2 * SUM_BYTES : _BODY_BYTES])


@dataclass(frozen=True, slots=True)
class Asked:
    """What a frame has to be, for a reader to believe it."""

    key: BlockKey
    shard: Shard
    layout: bytes
    """Fingerprint of the shard's layout, 16 bytes."""
    identity: bytes
    """Digest of the identity, 32 bytes."""
    raw_bytes: int
    parent: BlockKey | None = None
    """Key of the block before it; None: neither parent nor depth is looked at."""
    depth: int = 0


_shard = lru_cache(maxsize=256)(Shard)
"""A process meets few, and each very often."""


class FrameHeader(NamedTuple):
    """Everything that is known of a block at rest.

    A tuple and no dataclass: every promotion makes one per block, right after a block's bytes have pushed the interpreter's
    own out of the nearer caches, and a tuple touches a fifth of the memory.
    """

    key: BlockKey
    parent: BlockKey
    depth: int
    identity: bytes
    """Digest, 32 bytes."""
    scope: bytes
    """Digest, 32 bytes."""
    tenant: bytes
    """Tenant id, 16 bytes."""
    shard: Shard
    layout: bytes
    """Fingerprint of the shard's layout, 16 bytes."""
    created: float
    """Wall-clock seconds."""
    expires_at: float | None
    """Wall-clock seconds, or never."""
    raw_bytes: int
    content: bytes
    """Content sum, 16 bytes."""
    codec: int
    """Number of the codec that made the payload."""
    payload_bytes: int
    stored: bytes
    """Sum over the payload, 16 bytes."""
    adapter: bytes = bytes(16)
    """Adapter id, 16 bytes; zeros for none."""
    epoch: int = 0
    """Clear epoch of the scope."""
    nonce: bytes = b""
    """Of a sealed frame, 12 bytes: its content sum is then encrypted, and its stored sum is the tag."""

    @classmethod
    def of(
        cls,
        span: Span,
        index: int,
        shard: Shard,
        layout: bytes,
        *,
        raw_bytes: int,
        content: bytes,
        created: float,
        expires_at: float | None = None,
    ) -> FrameHeader:
        """The header of ``span.keys[index]``, raw; whoever encodes the payload replaces the last three fields."""
        return cls(
            key=span.keys[index],
            parent=span.keys[index - 1] if index else span.parent,
            depth=span.depth + index,
            identity=span.origin.identity,
            scope=span.origin.scope,
            tenant=span.origin.tenant,
            shard=shard,
            layout=layout,
            created=created,
            expires_at=expires_at,
            raw_bytes=raw_bytes,
            content=content,
            codec=0,
            payload_bytes=raw_bytes,
            stored=content,
            adapter=span.origin.adapter,
            epoch=span.origin.epoch,
        )

    def pack_into(self, page: memoryview, summer: Summer = PLAIN) -> None:
        """Write the header into the first 512 bytes of ``page``; the rest of it stays as it is."""
        shard = self.shard
        _FIELDS.pack_into(
            page,
            0,
            MAGIC,
            FRAME_VERSION,
            summer.flags | (SEALED if self.nonce else 0),
            self.codec,
            self.depth,
            self.key,
            self.parent,
            self.identity,
            self.scope,
            self.tenant,
            shard.tp_rank,
            shard.tp_size,
            shard.pp_stage,
            shard.group,
            self.layout,
            self.created,
            self.expires_at or 0.0,
            self.raw_bytes,
            self.payload_bytes,
            self.content,
            self.stored,
            self.adapter,
            self.epoch,
            self.nonce,
        )
        page[_FIELDS.size : _BODY_BYTES] = _ZEROS
        page[_BODY_BYTES:HEADER_BYTES] = summer.of(page[:_BODY_BYTES])

    @classmethod
    def parse(cls, page: memoryview, summer: Summer = PLAIN, *, most_bytes: int = MAX_PAYLOAD_BYTES) -> FrameHeader:
        """The header in the first 512 bytes of ``page``.

        Raises ``CorruptFrame`` that says what is wrong: too short, not a frame, another version, other sums, a sum that
        does not match, or lengths beyond ``most_bytes``. Nothing is allocated by the lengths it states.
        """
        if len(page) < HEADER_BYTES:
            raise CorruptFrame(f"a frame header has {HEADER_BYTES} bytes, got {len(page)}")
        fields = _WHOLE.unpack_from(page)
        magic, version, flags, codec, depth, key, parent, identity, scope, tenant = fields[:10]
        if magic != MAGIC:
            raise CorruptFrame(f"not a frame: begins with {magic!r}")
        if version != FRAME_VERSION:
            raise CorruptFrame(f"frame version {version}, this build reads {FRAME_VERSION}")
        if flags & ~SEALED != summer.flags:
            raise CorruptFrame(
                "keyed sums where plain ones are set up" if flags & _KEYED else "plain sums where keyed ones are set up"
            )
        tp_rank, tp_size, pp_stage, group, layout, created, expires_at, raw_bytes, payload_bytes = fields[10:19]
        content, stored, adapter, epoch, nonce, own = fields[19:]
        if summer.of(page[:_BODY_BYTES]) != own:
            raise CorruptFrame("the header's sum does not match")
        if raw_bytes > most_bytes or payload_bytes > most_bytes:
            raise CorruptFrame(f"lengths {raw_bytes} and {payload_bytes} exceed {most_bytes} bytes")
        if not (math.isfinite(created) and math.isfinite(expires_at)) or tp_rank >= tp_size:
            raise CorruptFrame("times or shard are not possible ones")
        return cls(
            BlockKey(key),
            BlockKey(parent),
            depth,
            identity,
            scope,
            tenant,
            _shard(tp_rank, tp_size, pp_stage, group),
            layout,
            created,
            expires_at or None,
            raw_bytes,
            content,
            codec,
            payload_bytes,
            stored,
            adapter,
            epoch,
            nonce if flags & SEALED else b"",
        )

    @property
    def lot(self) -> Lot:
        return Lot(self.identity, self.tenant, self.adapter, self.epoch)

    def expired(self, now: float) -> bool:
        """Whether the frame's time is up at ``now`` (wall-clock seconds)."""
        return self.expires_at is not None and now >= self.expires_at

    def disproof(self, asked: Asked, codec: int) -> str | None:
        """Why this is not the frame that was asked for, in words; None where it is."""
        if self.key != asked.key:
            return f"key {self.key.hex()[:16]}, asked for {asked.key.hex()[:16]}"
        if self.shard != asked.shard:
            return f"{self.shard}, asked for {asked.shard}"
        if self.layout != asked.layout:
            return f"layout {self.layout.hex()}, asked for {asked.layout.hex()}"
        if self.identity != asked.identity:
            return f"identity {self.identity.hex()[:16]}, asked for {asked.identity.hex()[:16]}"
        if self.raw_bytes != asked.raw_bytes:
            return f"{self.raw_bytes} raw bytes, asked for {asked.raw_bytes}"
        if self.codec != codec:
            return f"codec number {self.codec}, asked for {codec}"
        if asked.parent is not None and (self.parent, self.depth) != (asked.parent, asked.depth):
            return f"another place in its chain (depth {self.depth}, asked for {asked.depth})"
        return None
