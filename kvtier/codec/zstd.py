"""Byte planes, each through Zstandard at level 1: the high bytes of 16-bit KV (sign, exponent) shrink to less than half.

Payload: element size (uint8), then per byte plane, lowest first, the length of its encoding (uint32 little-endian) and the
encoding: a Zstandard frame that states its content size, or the plane as it is where the length is the plane's own.
Mantissas are noise: a plane whose beginning does not shrink is kept as it is, which is most of the speed. All sizes follow
from the caller's block, so a frame that states other ones is refused before anything is allocated for it.
"""

from __future__ import annotations

import struct
import threading

import numpy as np
import zstandard

from kvtier.abc.codec import Codec
from kvtier.codec.frame import ByteArray
from kvtier.errors import CorruptFrame

ELEMENT_BYTES = 2
"""Of bf16 and fp16, which is what nearly all KV is."""
LEVEL = 1
PROBE_BYTES = 8 << 10
"""Bytes of a plane that are tried first."""
PROBE_SHARE = 0.98
"""A plane whose beginning does not shrink to less than this is kept as it is."""
_LENGTH = struct.Struct("<I")
_MOST_WINDOW = 1 << 20
"""Level 1 looks back over at most half of it; a decoder's window is allocated by the frame's word."""


class ZstdCodec(Codec):
    name = "zstd"
    number = 2

    def __init__(self) -> None:
        self._local = threading.local()  # contexts are large, and one belongs to one thread at a time

    def encoded_bytes(self, raw_bytes: int) -> int:
        """Every plane as it is, its length, and the element size."""
        return 1 + _element(raw_bytes) * _LENGTH.size + raw_bytes

    def encode(self, raw: memoryview, into: memoryview) -> int:
        size = _element(len(raw))
        planes = np.frombuffer(raw, np.uint8).reshape(-1, size)
        into[0] = size
        end = 1
        for index in range(size):
            packed = self._packed(np.ascontiguousarray(planes[:, index]))
            start = end + _LENGTH.size
            _LENGTH.pack_into(into, end, len(packed))
            end = start + len(packed)
            np.copyto(np.frombuffer(into, np.uint8)[start:end], np.frombuffer(packed, np.uint8))
        return end

    def decode(self, payload: memoryview, into: memoryview) -> None:
        size = payload[0] if payload else 0
        if size == 0 or size != _element(len(into)):
            raise CorruptFrame(f"element size {size} does not fit a block of {len(into)} bytes")
        planes = np.frombuffer(into, np.uint8).reshape(-1, size)
        end = 1
        for index in range(size):
            start = end + _LENGTH.size
            if start > len(payload):
                raise CorruptFrame(f"Zstandard payload ends before plane {index}")
            end = start + int(_LENGTH.unpack_from(payload, start - _LENGTH.size)[0])
            if end > len(payload):
                raise CorruptFrame(f"Zstandard payload ends inside plane {index}")
            np.copyto(planes[:, index], self._plane(payload[start:end], len(planes)))
        if end != len(payload):
            raise CorruptFrame(f"{len(payload) - end} bytes follow the last plane")

    def _packed(self, plane: ByteArray) -> ByteArray | bytes:
        compressor: zstandard.ZstdCompressor | None = getattr(self._local, "compressor", None)
        if compressor is None:
            compressor = self._local.compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
        probe = plane[:PROBE_BYTES]
        if len(plane) > PROBE_BYTES and len(compressor.compress(probe.data)) > PROBE_SHARE * len(probe):
            return plane
        packed = compressor.compress(plane.data)
        return packed if len(packed) < len(plane) else plane

    def _plane(self, packed: memoryview, nbytes: int) -> ByteArray:
        if len(packed) == nbytes:
            return np.frombuffer(packed, np.uint8)
        decompressor: zstandard.ZstdDecompressor | None = getattr(self._local, "decompressor", None)
        if decompressor is None:
            decompressor = self._local.decompressor = zstandard.ZstdDecompressor()
        try:
            stated = zstandard.get_frame_parameters(packed)
            if stated.content_size != nbytes or stated.window_size > max(nbytes, _MOST_WINDOW):
                raise CorruptFrame(
                    f"Zstandard frame of {stated.content_size} bytes and a window of {stated.window_size}, "
                    f"the plane has {nbytes} bytes"
                )
            plain = decompressor.decompress(packed, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CorruptFrame(f"Zstandard payload does not decode: {error}") from error
        if len(plain) != nbytes:
            raise CorruptFrame(f"Zstandard frame decodes to {len(plain)} bytes, the plane has {nbytes}")
        return np.frombuffer(plain, np.uint8)


def _element(raw_bytes: int) -> int:
    return 1 if raw_bytes % ELEMENT_BYTES else ELEMENT_BYTES
