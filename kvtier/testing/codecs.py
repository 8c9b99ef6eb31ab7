"""What every codec must do, as a test class to inherit from.

A new codec's test file is a subclass with a ``codec`` fixture; a lossy one also says in ``near`` what counts as the same::

    class TestMine(CodecSuite):
        @pytest.fixture
        def codec(self): return MyCodec()
"""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from kvtier.abc.codec import Codec
from kvtier.errors import CorruptFrame
from kvtier.testing.threads import together

GUARD = 64
"""Bytes ahead of and behind a buffer that nobody may touch."""


class CodecSuite:
    """For codecs."""

    sizes: tuple[int, ...] = (2, 4, 64, 4096, 70_000)
    """Block sizes in bytes that the codec takes."""

    @pytest.fixture
    def codec(self) -> Codec:
        raise NotImplementedError("a suite's subclass gives the codec")

    def samples(self, size: int) -> list[bytes]:
        """Blocks of ``size`` bytes: random ones, zeros, a ramp, and something like 16-bit KV."""
        rng = np.random.default_rng(size)
        kv = (rng.standard_normal(size // 4 + 1).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return [
            random.Random(size).randbytes(size),
            bytes(size),
            bytes(index % 256 for index in range(size)),
            (kv.tobytes() * 2)[:size],
        ]

    def near(self, raw: bytes, back: bytes) -> bool:
        """Whether ``back`` is what ``raw`` may become: for a codec that is not lossy, the same."""
        return raw == back

    def encoded(self, codec: Codec, raw: bytes) -> bytes:
        """The payload, made between guards: nothing outside of what ``encode`` says may be written."""
        room = codec.encoded_bytes(len(raw))
        whole = bytearray(b"\xa5" * (room + 2 * GUARD))
        used = codec.encode(memoryview(raw), memoryview(whole)[GUARD : GUARD + room])
        assert 0 < used <= room, f"{used} bytes used of {room}"
        assert whole[:GUARD] == whole[GUARD + room :] == b"\xa5" * GUARD, "bytes beyond the buffer were written"
        return bytes(whole[GUARD : GUARD + used])

    def decoded(self, codec: Codec, payload: bytes, size: int) -> bytes:
        whole = bytearray(b"\xa5" * (size + 2 * GUARD))
        try:
            codec.decode(memoryview(payload), memoryview(whole)[GUARD : GUARD + size])
        finally:
            assert whole[:GUARD] == whole[GUARD + size :] == b"\xa5" * GUARD, "bytes beyond the block were written"
        return bytes(whole[GUARD : GUARD + size])

    def test_gives_back_what_it_took(self, codec: Codec) -> None:
        for size in self.sizes:
            for raw in self.samples(size):
                assert self.near(raw, self.decoded(codec, self.encoded(codec, raw), size))

    def test_says_how_long_a_payload_is(self, codec: Codec) -> None:
        for size in self.sizes:
            lengths = {len(self.encoded(codec, raw)) for raw in self.samples(size)}
            if codec.fixed_ratio:
                assert lengths == {codec.encoded_bytes(size)}, "a fixed ratio is exact"
            assert max(lengths) <= codec.encoded_bytes(size)

    def test_has_a_name_and_a_number_that_fit_a_frame(self, codec: Codec) -> None:
        assert 0 < len(codec.name) < 16
        assert codec.name.isascii()
        assert 0 <= codec.number < 1 << 16

    def test_leaves_what_it_is_given_alone_and_takes_odd_addresses(self, codec: Codec) -> None:
        size = self.sizes[-1]
        raw = self.samples(size)[0]
        odd = bytearray(b"\0" + raw)
        into = bytearray(codec.encoded_bytes(size) + 3)
        used = codec.encode(memoryview(odd)[1:].toreadonly(), memoryview(into)[3:])
        assert odd[1:] == raw
        payload = bytes(into[3 : 3 + used])
        assert payload == self.encoded(codec, raw), "the same block has two payloads"
        back = bytearray(size + 1)
        codec.decode(memoryview(into)[3 : 3 + used].toreadonly(), memoryview(back)[1:])
        assert into[3 : 3 + used] == payload
        assert self.near(raw, bytes(back[1:]))

    def test_takes_a_room_that_is_longer_than_needed(self, codec: Codec) -> None:
        """Buffers are rounded up to whole pages."""
        raw = self.samples(4096)[3]
        into = memoryview(bytearray(codec.encoded_bytes(4096) + 5000))
        assert bytes(into[: codec.encode(memoryview(raw), into)]) == self.encoded(codec, raw)

    def test_refuses_a_payload_of_another_block_size(self, codec: Codec) -> None:
        payload = self.encoded(codec, self.samples(4096)[0])
        for size in (2, 4092, 4100, 1 << 20):
            with pytest.raises(CorruptFrame):
                self.decoded(codec, payload, size)

    def test_refuses_a_payload_that_was_cut_or_made_longer(self, codec: Codec) -> None:
        payload = self.encoded(codec, self.samples(4096)[3])
        for wrong in (b"", payload[:1], payload[: len(payload) // 2], payload[:-1], payload + b"\0"):
            with pytest.raises(CorruptFrame):
                self.decoded(codec, wrong, 4096)

    def test_any_bytes_decode_or_are_corrupt(self, codec: Codec) -> None:
        """Sums are looked at first, but a codec has to stand by itself: no other error, no hang, no byte elsewhere."""
        rng = random.Random(5)
        payload = self.encoded(codec, self.samples(4096)[3])
        for _ in range(300):
            wrong = bytearray(payload)
            for _ in range(rng.randrange(1, 4)):
                wrong[rng.randrange(min(len(wrong), rng.choice([8, 64, 1 << 20])))] = rng.randrange(256)
            self._tried(codec, bytes(wrong))
            self._tried(codec, rng.randbytes(rng.choice([0, 1, 3, 17, 400, 4096, 4097])))

    def _tried(self, codec: Codec, payload: bytes) -> None:
        try:
            self.decoded(codec, payload, 4096)
        except CorruptFrame as refused:
            assert str(refused), "says what is wrong"

    def test_allocates_by_the_block_and_not_by_what_a_payload_says(self, codec: Codec) -> None:
        payload = bytearray(self.encoded(codec, self.samples(4096)[3]))
        tracemalloc.start()
        try:
            for at in range(min(16, len(payload))):
                for value in (0x7F, 0xFF):
                    wrong = payload.copy()
                    wrong[at : at + 8] = bytes([value]) * 8
                    self._tried(codec, bytes(wrong))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 2 << 20, f"{peak} bytes were allocated for a block of 4096"

    def test_threads_do_not_mix_their_blocks_up(self, codec: Codec) -> None:
        size, wrong = self.sizes[-1], []

        def play(number: int) -> None:
            raw = random.Random(number).randbytes(size)
            expected = self.decoded(codec, self.encoded(codec, raw), size)
            again = [self.decoded(codec, self.encoded(codec, raw), size) for _ in range(10)]
            if again != [expected] * 10:
                wrong.append(number)

        together(play)
        assert not wrong
