"""A frame header gives back what was packed, and nothing else passes for one."""

from __future__ import annotations

import dataclasses
import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.codec.frame import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    PIECE_BYTES,
    PLAIN,
    Asked,
    FrameHeader,
    content_sum,
    copy_with_sum,
    keyed_summer,
)
from kvtier.errors import CorruptFrame
from kvtier.key import BlockKey, Origin, Shard, Span

ORIGIN = Origin(b"i" * 32, b"s" * 32, b"t" * 16, b"a" * 16, 5)
SPAN = Span(ORIGIN, BlockKey(b"r" * 32), 7, (BlockKey(b"a" * 32), BlockKey(b"b" * 32)))
LAYOUT = b"l" * 16


def header(**changes: object) -> FrameHeader:
    made = FrameHeader.of(
        SPAN, 1, Shard(1, 2, 3, 4), LAYOUT, raw_bytes=368640, content=b"c" * 16, created=5.5, expires_at=99.0
    )
    return made._replace(**changes)  # type: ignore[arg-type]


def page(of: FrameHeader | None = None) -> memoryview:
    made = memoryview(bytearray(b"\xff" * 4096))
    (of or header()).pack_into(made)
    return made


def asked(**changes: object) -> Asked:
    made = Asked(SPAN.keys[1], Shard(1, 2, 3, 4), LAYOUT, ORIGIN.identity, 368640)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_header_comes_back_as_it_was_packed() -> None:
    assert FrameHeader.parse(page()) == header()
    assert (header().parent, header().depth) == (SPAN.keys[0], 8)
    first = FrameHeader.of(SPAN, 0, Shard(), LAYOUT, raw_bytes=1, content=b"c" * 16, created=1.0)
    assert (first.parent, first.depth, first.expires_at) == (SPAN.parent, 7, None)
    assert FrameHeader.parse(page(first)) == first


def test_pack_leaves_what_follows_the_header_alone() -> None:
    assert bytes(page()[HEADER_BYTES:]) == b"\xff" * (4096 - HEADER_BYTES)


@pytest.mark.parametrize("bit", range(0, HEADER_BYTES * 8, 97))
def test_any_flipped_bit_is_seen(bit: int) -> None:
    made = page()
    made[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptFrame):
        FrameHeader.parse(made)


def resealed(made: memoryview) -> memoryview:
    made[HEADER_BYTES - 16 : HEADER_BYTES] = PLAIN.of(made[: HEADER_BYTES - 16])
    return made


def test_a_lying_length_is_refused_before_anything_is_made_of_it() -> None:
    for offset in (200, 208):
        made = page()
        struct.pack_into("<Q", made, offset, 1 << 62)
        with pytest.raises(CorruptFrame, match="exceed"):
            FrameHeader.parse(resealed(made))
    with pytest.raises(CorruptFrame, match="exceed 1000"):
        FrameHeader.parse(page(), most_bytes=1000)
    assert header().raw_bytes < MAX_PAYLOAD_BYTES


def test_impossible_times_and_shards_are_refused() -> None:
    for offset, layout, value in ((184, "<d", float("nan")), (192, "<d", float("inf")), (160, "<H", 2)):
        made = page()
        struct.pack_into(layout, made, offset, value)
        with pytest.raises(CorruptFrame, match="not possible"):
            FrameHeader.parse(resealed(made))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda made: made[:100], "512 bytes, got 100"),
        (lambda made: memoryview(b"\x80\x04cos\nsystem\n" + bytes(600)), "not a frame"),
        (lambda made: resealed(_put(made, 6, 9)), "version 9"),
        (lambda made: resealed(_put(made, 8, 1)), "keyed sums"),
        (lambda made: _put(made, 12, 1), "header's sum"),
    ],
)
def test_the_reason_is_named(spoil: object, says: str) -> None:
    assert callable(spoil)
    with pytest.raises(CorruptFrame, match=says):
        FrameHeader.parse(spoil(page()))


def _put(made: memoryview, offset: int, value: int) -> memoryview:
    struct.pack_into("<H", made, offset, value)
    return made


@settings(max_examples=200, derandomize=True)
@given(st.binary(max_size=700))
def test_no_bytes_are_taken_for_a_frame(junk: bytes) -> None:
    for made in (junk, bytes(page()[: HEADER_BYTES - len(junk[:300])]) + junk[:300]):
        if made[:HEADER_BYTES] == bytes(page()[:HEADER_BYTES]):
            continue
        with pytest.raises(CorruptFrame):
            FrameHeader.parse(memoryview(made))


def test_disproof_names_the_first_thing_that_is_not_as_asked() -> None:
    assert header().disproof(asked(), 0) is None
    cases: dict[str, tuple[Asked, int]] = {
        "key": (asked(key=SPAN.keys[0]), 0),
        "Shard": (asked(shard=Shard(0, 2, 3, 4)), 0),
        "layout": (asked(layout=b"m" * 16), 0),
        "identity": (asked(identity=b"j" * 32), 0),
        "raw bytes": (asked(raw_bytes=2), 0),
        "codec": (asked(), 1),
        "depth 8, asked for 9": (asked(parent=SPAN.keys[0], depth=9), 0),
        "another place": (asked(parent=SPAN.keys[1], depth=8), 0),
    }
    assert header().disproof(asked(parent=SPAN.keys[0], depth=8), 0) is None
    for word, (wanted, codec) in cases.items():
        reason = header().disproof(wanted, codec)
        assert reason is not None
        assert word in reason


def test_expiry_is_a_moment_of_the_wall_clock() -> None:
    assert not header().expired(98.9)
    assert header().expired(99.0)
    assert not header(expires_at=None).expired(1e12)


def test_keyed_headers_are_closed_to_whoever_lacks_the_key() -> None:
    mine, other = keyed_summer(b"mine"), keyed_summer(b"other")
    made = memoryview(bytearray(HEADER_BYTES))
    header().pack_into(made, mine)
    assert FrameHeader.parse(made, mine) == header()
    with pytest.raises(CorruptFrame, match="header's sum"):
        FrameHeader.parse(made, other)
    with pytest.raises(CorruptFrame, match="keyed sums where plain"):
        FrameHeader.parse(made)
    with pytest.raises(CorruptFrame, match="plain sums where keyed"):
        FrameHeader.parse(page(), mine)


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7])
def test_copy_with_sum_copies_and_sums_at_any_size(size: int, seed: int) -> None:
    source = np.frombuffer(random.Random(seed).randbytes(size), np.uint8)
    into = np.zeros(size, np.uint8)
    assert copy_with_sum(source, into) == content_sum(source.data)
    assert np.array_equal(source, into)
