"""Codecs give back what they took, and refuse what they did not make."""

from __future__ import annotations

import random
import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.abc.codec import Codec
from kvtier.codec.catalogue import codec_named, codec_names
from kvtier.errors import ConfigError, CorruptFrame

NAMES = codec_names()
PACKED = ["shuffle+lz4", "zstd"]


def encoded(codec: Codec, raw: bytes) -> memoryview:
    into = memoryview(bytearray(codec.encoded_bytes(len(raw))))
    return into[: codec.encode(memoryview(raw), into)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 7, 4096, 70_001])
def test_round_trip(name: str, size: int, seed: int) -> None:
    codec = codec_named(name)
    rng = random.Random(seed)
    for raw in (rng.randbytes(size), bytes(size), np.arange(size, dtype=np.uint8).tobytes()):
        into = memoryview(bytearray(size))
        codec.decode(encoded(codec, raw), into)
        assert into == raw


@pytest.mark.parametrize("name", PACKED)
def test_bytes_apart_shrink_where_bytes_in_turn_do_not(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codec = codec_named(name)
    raw = rng.integers(0, 256, 1 << 16, np.uint8)
    raw[1::2] = rng.integers(60, 64, 1 << 15, np.uint8)  # exponents of small numbers repeat, mantissas do not
    assert len(encoded(codec, raw.tobytes())) < 0.9 * len(raw)


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_of_another_block_size_is_corrupt(name: str) -> None:
    codec = codec_named(name)
    payload = encoded(codec, bytes(4096))
    for size in (4094, 4098, 1 << 20):
        with pytest.raises(CorruptFrame):
            codec.decode(payload, memoryview(bytearray(size)))


@pytest.mark.parametrize("name", PACKED)
@settings(max_examples=100, derandomize=True)
@given(junk=st.binary(max_size=300))
def test_junk_never_passes(name: str, junk: bytes) -> None:
    codec = codec_named(name)
    into = memoryview(bytearray(1024))
    try:
        codec.decode(memoryview(junk), into)
    except CorruptFrame:
        return
    again = memoryview(bytearray(1024))
    codec.decode(encoded(codec, bytes(into)), again)
    assert again == into


@pytest.mark.parametrize("name", PACKED)
def test_a_payload_cut_or_flipped_anywhere_passes_as_nothing_else(name: str, seed: int) -> None:
    """The frame's sums are what proves content; a codec must only never crash, overrun or hang on what they let through."""
    rng = random.Random(seed)
    codec = codec_named(name)
    payload = encoded(codec, bytes(rng.choices(range(40), k=20_000)))
    into = memoryview(bytearray(20_000))
    for _ in range(300):
        wrong = bytearray(payload)
        if rng.random() < 0.5:
            wrong = wrong[: rng.randrange(len(wrong))]
        else:
            wrong[rng.randrange(len(wrong))] ^= 1 << rng.randrange(8)
        try:
            codec.decode(memoryview(wrong), into)
        except CorruptFrame:
            continue
        assert len(wrong) == len(payload), "what was cut is refused"


def zstd_frame(content_bytes: int, window_byte: int | None) -> bytes:
    """The head of a frame that promises ``content_bytes``; with a window of its own, or with the content as one segment."""
    magic, size = b"\x28\xb5\x2f\xfd", struct.pack("<Q", content_bytes)
    window = b"" if window_byte is None else bytes([window_byte])
    return magic + bytes([0b1100_0000 | (window_byte is None) << 5]) + window + size + bytes(64)


@pytest.mark.parametrize(
    "frame",
    [
        zstd_frame(1 << 40, None),
        zstd_frame(1 << 30, None),
        zstd_frame(2048, 0xF8),
        zstandard.ZstdCompressor().compress(bytes(1 << 24)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2048)),
        zstandard.ZstdCompressor().compress(bytes(2048)) * 2,
        b"\x50\x2a\x4d\x18" + struct.pack("<I", 1 << 31) + bytes(64),
    ],
    ids=["1 TiB", "1 GiB", "a window of gigabytes", "a bomb", "no size", "two frames", "a skippable frame"],
)
def test_a_zstd_frame_that_lies_is_refused_before_it_costs_memory(frame: bytes) -> None:
    payload = b"\x02" + (struct.pack("<I", len(frame)) + frame) * 2
    into = memoryview(bytearray(4096))
    codec_named("zstd").decode(encoded(codec_named("zstd"), bytes(4096)), into)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFrame):
            codec_named("zstd").decode(memoryview(payload), into)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_catalogue_finds_by_name_and_lists_what_it_knows() -> None:
    assert [codec_named(name).name for name in NAMES] == NAMES
    assert len({codec_named(name).number for name in NAMES}) == len(NAMES), "frames tell codecs apart by number"
    with pytest.raises(ConfigError, match="'zip'; known: raw, shuffle"):
        codec_named("zip")
