"""Every codec that ships passes the codec suite, and codecs with one fault each do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.abc.codec import Codec
from kvtier.codec.catalogue import codec_named, codec_names
from kvtier.codec.raw import RawCodec
from kvtier.testing.codecs import CodecSuite


class TestCatalogue(CodecSuite):
    @pytest.fixture(params=codec_names())
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        return codec_named(request.param)


class TestAnyByteCodecsTakeAnySize(CodecSuite):
    sizes = (1, 2, 7, 4096, 70_001)

    @pytest.fixture(params=[name for name in codec_names() if not codec_named(name).lossy])
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        return codec_named(request.param)


class Spills(RawCodec):
    """Writes a byte behind what it says."""

    def encode(self, raw: memoryview, into: memoryview) -> int:
        used = super().encode(raw, into)
        whole = into.obj
        if isinstance(whole, bytearray):
            whole[-1] = 1
        return used


class Crashes(RawCodec):
    """Any other error than the one that it may raise."""

    def decode(self, payload: memoryview, into: memoryview) -> None:
        into[: len(payload)] = payload


class Believes(RawCodec):
    """Allocates what the payload asks for."""

    def decode(self, payload: memoryview, into: memoryview) -> None:
        bytearray(min(4 << 20, int.from_bytes(payload[:4], "little")))
        super().decode(payload, into)


class Overstates(RawCodec):
    """A fixed ratio that is not."""

    def encoded_bytes(self, raw_bytes: int) -> int:
        return raw_bytes + 1


@pytest.mark.parametrize(
    ("broken", "guard"),
    [
        (Spills, CodecSuite.test_gives_back_what_it_took),
        (Crashes, CodecSuite.test_any_bytes_decode_or_are_corrupt),
        (Crashes, CodecSuite.test_refuses_a_payload_that_was_cut_or_made_longer),
        (Believes, CodecSuite.test_allocates_by_the_block_and_not_by_what_a_payload_says),
        (Overstates, CodecSuite.test_says_how_long_a_payload_is),
    ],
)
def test_the_suite_catches(broken: Callable[[], Codec], guard: Callable[[CodecSuite, Codec], None]) -> None:
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        guard(CodecSuite(), broken())
