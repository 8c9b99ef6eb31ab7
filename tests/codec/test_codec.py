"""Codecs give back what they took, and refuse what they did not make."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.abc.codec import Codec
from kvtier.codec.catalogue import codec_named, codec_names
from kvtier.errors import ConfigError, CorruptFrame

NAMES = codec_names()


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


def test_shuffle_finds_what_lz4_alone_does_not(seed: int) -> None:
    rng = np.random.default_rng(seed)
    codec = codec_named("shuffle+lz4")
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


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=300))
def test_junk_never_passes_and_never_allocates_by_its_own_word(junk: bytes) -> None:
    codec = codec_named("shuffle+lz4")
    into = memoryview(bytearray(1024))
    try:
        codec.decode(memoryview(junk), into)
    except CorruptFrame:
        return
    again = memoryview(bytearray(1024))
    codec.decode(encoded(codec, bytes(into)), again)
    assert again == into


def test_catalogue_finds_by_name_and_lists_what_it_knows() -> None:
    assert [codec_named(name).name for name in NAMES] == NAMES
    assert len({codec_named(name).number for name in NAMES}) == len(NAMES), "frames tell codecs apart by number"
    with pytest.raises(ConfigError, match="'zip'; known: raw, shuffle"):
        codec_named("zip")
