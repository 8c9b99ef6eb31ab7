"""What an audit says of a frame, which it reads without knowing which block should be there."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvtier.abc.audit import FindingKind, Seals
from kvtier.codec.frame import FRAME_VERSION, HEADER_BYTES, MAGIC, SEALED, FrameHeader, Summer
from kvtier.errors import CorruptFrame
from kvtier.key import address

_BEGIN = struct.Struct(f"<{len(MAGIC)}sHH")


@dataclass(frozen=True, slots=True)
class Flaw:
    """Why bytes are not a frame that proves."""

    kind: FindingKind
    detail: str
    ours: bool = True
    """False where another configuration may well prove them: they are not to be deleted."""
    shut: bool = False
    """A seal does not open, so that the frame is ours to delete only where the key is the right one."""


def read_header(page: memoryview, summer: Summer) -> FrameHeader | Flaw:
    """The header in the first 512 bytes of ``page``, or what is wrong with it."""
    if len(page) < HEADER_BYTES or not has_magic(page):
        return Flaw(FindingKind.UNDECODABLE, f"not a frame: begins with {bytes(page[: len(MAGIC)])!r}")
    _, version, flags = _BEGIN.unpack_from(page)
    try:
        return FrameHeader.parse(page, summer)
    except CorruptFrame as wrong:
        if version < FRAME_VERSION:
            return Flaw(FindingKind.OLD_SCHEMA, str(wrong))
        if version > FRAME_VERSION:
            return Flaw(FindingKind.UNDECODABLE, str(wrong), ours=False)
        if flags & ~SEALED != summer.flags:
            return Flaw(FindingKind.UNDECODABLE, str(wrong), ours=False)
        return Flaw(FindingKind.FLIPPED_BIT, str(wrong), ours=not summer.flags)


def read_value(value: memoryview, block: bytes, summer: Summer) -> FrameHeader | Flaw:
    """The header of a whole frame under the name of ``block`` (an address), or what is wrong with it but for its payload."""
    header = read_header(value, summer)
    if isinstance(header, Flaw):
        return header
    if address(header.key, header.shard) != block:
        return Flaw(FindingKind.WRONG_NAME, f"its frame names block {header.key[:8].hex()}")
    if len(value) > HEADER_BYTES + header.payload_bytes:
        more = len(value) - HEADER_BYTES - header.payload_bytes
        return Flaw(FindingKind.WRONG_BYTES, f"{more} bytes more than its frame says")
    return header


def has_magic(page: memoryview) -> bool:
    return page[: len(MAGIC)] == MAGIC


def payload_flaw(
    header: FrameHeader, page: memoryview, payload: memoryview, summer: Summer, seals: Seals
) -> Flaw | None:
    """What is wrong with a payload; ``payload`` is all that the place has behind its header in ``page``, or holds."""
    if header.codec == 0 and header.payload_bytes != header.raw_bytes:
        return Flaw(
            FindingKind.WRONG_BYTES, f"raw payload of {header.payload_bytes} bytes for a block of {header.raw_bytes}"
        )
    if header.payload_bytes > len(payload):
        return Flaw(
            FindingKind.WRONG_BYTES, f"the frame says {header.payload_bytes} bytes of payload, {len(payload)} are there"
        )
    if header.nonce:
        return _seal_flaw(header, page, payload[: header.payload_bytes], seals)
    if summer.of(payload[: header.payload_bytes]) != header.stored:
        return Flaw(FindingKind.FLIPPED_BIT, "the payload's sum does not match")
    return None


def repair_of(flaw: Flaw, repair: Callable[[], str], seals: Seals) -> Callable[[], str] | None:
    """``repair`` as far as it is ours to do."""
    if not flaw.ours:
        return None
    return partial(seals.repaired, repair) if flaw.shut else repair


def _seal_flaw(header: FrameHeader, page: memoryview, payload: memoryview, seals: Seals) -> Flaw | None:
    if seals.unseal is None:
        seals.unproven += 1
        return None
    plain = memoryview(bytearray(payload))
    try:
        content, came = seals.unseal(header.tenant, header.nonce, page, header.content, header.stored, plain)
    except CorruptFrame as wrong:
        return Flaw(FindingKind.FLIPPED_BIT, str(wrong), shut=True)
    seals.opened += 1
    if header.codec == 0 and came != content:
        return Flaw(FindingKind.FLIPPED_BIT, "the sum of what was sealed does not match")
    return None
