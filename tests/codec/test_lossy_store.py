"""A store with a lossy codec: encoded once at save, decoded at load, and the same encoded bytes in every tier between."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtier.abc.medium import Iovec, Outcome, Status
from kvtier.abc.store import Match, Reason, SlotRange
from kvtier.codec.catalogue import keeping, lossy_codec
from kvtier.codec.frame import HEADER_BYTES, ByteArray, FrameHeader, content_sum
from kvtier.config import StoreCodec, StoreSettings
from kvtier.connectors.bundled import BundledWorker
from kvtier.errors import ConfigError
from kvtier.key import Span
from kvtier.metrics import Metrics
from kvtier.store.open import open_store
from kvtier.store.store import TieredStore
from kvtier.testing.blocks import IDENTITY, LAYOUT, EngineMemory, filled, span
from kvtier.url import TierUrl

BLOCKS = 6
LOSSY = [StoreCodec.FP8, StoreCodec.INT8]


def opened(codec: StoreCodec, nvme: Path | None = None) -> TieredStore:
    tiers = [TierUrl.parse("dram://?capacity=1MiB")]
    if nvme is not None:
        tiers.append(TierUrl.parse(f"nvme://{nvme}?capacity=8MiB&write=through"))
    return open_store(tiers, keeping(IDENTITY, codec.value), StoreSettings(codec=codec), Metrics())


def prompt(codec: StoreCodec) -> Span:
    return span(range(16 * BLOCKS), identity=keeping(IDENTITY, codec.value))


def values(keys: Span, index: int) -> ByteArray:
    """A block of bfloat16 numbers."""
    made = np.random.default_rng(index).standard_normal(LAYOUT.block_bytes // 2).astype(np.float32)
    return (made.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


class Device(EngineMemory):
    """Memory that the CPU cannot address."""

    def view(self, slot: int) -> None:  # type: ignore[override]
        return None

    def read(self, slots: Sequence[int], into: Sequence[Iovec]) -> list[Outcome]:
        for slot, (room,) in zip(slots, into, strict=True):
            room[:] = memoryview(self.bytes[slot])
        return [Outcome(Status.DONE, self.slot_bytes)] * len(slots)

    def write(self, slots: Sequence[int], data: Sequence[Iovec]) -> list[Outcome]:
        for slot, (payload,) in zip(slots, data, strict=True):
            memoryview(self.bytes[slot])[:] = payload
        return [Outcome(Status.DONE, self.slot_bytes)] * len(slots)


def floats(raw: ByteArray) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def settled(store: TieredStore, keys: Span, request: str) -> Match:
    match = store.match(request, keys)
    while match.pending:
        store.keep()
    return match


def loaded(store: TieredStore, keys: Span, memory: EngineMemory, request: str) -> list[Outcome]:
    match = settled(store, keys, request)
    memory.bytes[:] = 0xA5
    return store.load(match, SlotRange(memory, range(match.hits))).result(10)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("kind", [EngineMemory, Device])
def test_blocks_come_back_near_and_from_every_tier_alike(
    codec: StoreCodec, kind: type[EngineMemory], tmp_path: Path
) -> None:
    keys, memory = prompt(codec), kind(BLOCKS)
    store = opened(codec, tmp_path)
    saved = store.save(keys, filled(memory, keys, values)).result(10)
    assert all(outcome.done for outcome in saved)
    before = memory.bytes.copy()
    assert all(outcome.done for outcome in loaded(store, keys, memory, "dram"))
    from_dram = memory.bytes.copy()
    assert not np.array_equal(from_dram, before), "a lossy codec that loses nothing was not applied"
    assert np.abs(floats(from_dram) - floats(before)).max() < 0.1 * np.abs(floats(before)).max()
    assert store.drain(10)
    assert store.check_integrity() == []
    store.close()

    again = opened(codec, tmp_path)
    outcomes = loaded(again, keys, memory, "nvme")
    assert len(outcomes) == BLOCKS
    assert np.array_equal(memory.bytes, from_dram), "decoded once, from the bytes that were encoded once"
    assert again.check_integrity() == []
    again.close()


@pytest.mark.parametrize("codec", LOSSY)
def test_what_stands_on_disk_is_encoded_and_half_as_long(codec: StoreCodec, tmp_path: Path) -> None:
    keys, memory = prompt(codec), EngineMemory(BLOCKS)
    lossy = lossy_codec(codec.value, LAYOUT)
    assert lossy is not None
    size = lossy.encoded_bytes(LAYOUT.block_bytes)
    store = opened(codec, tmp_path)
    store.save(keys, filled(memory, keys, values)).result(10)
    assert store.drain(10)
    store.close()
    (path,) = tmp_path.glob("slots-*.kvt")
    stride = int(path.stem.partition("-")[2])
    assert stride == 4096 + -(-size // 4096) * 4096
    whole = memoryview(path.read_bytes())
    header = FrameHeader.parse(whole[:HEADER_BYTES])
    assert (header.codec, header.raw_bytes, header.payload_bytes) == (0, size, size)
    assert header.content == content_sum(whole[4096 : 4096 + size]), "content is over what is kept"


@pytest.mark.parametrize("codec", list(StoreCodec))
def test_an_engine_registers_the_blocks_that_it_has_and_not_those_that_are_kept(codec: StoreCodec) -> None:
    store = opened(codec)
    BundledWorker(store).register_kv_caches(EngineMemory(1, LAYOUT.block_bytes))
    with pytest.raises(ValueError, match="another layout"):
        BundledWorker(store).register_kv_caches(EngineMemory(1, LAYOUT.block_bytes // 2))
    store.close()


def test_another_codec_s_blocks_never_match(tmp_path: Path) -> None:
    memory = EngineMemory(BLOCKS)
    for codec in StoreCodec:
        store = opened(codec, tmp_path)
        keys = prompt(codec)
        match = settled(store, keys, "r")
        assert (match.hits, store.explain("r")[0].reason) == (0, Reason.NEVER_STORED)
        match.release()
        store.save(keys, filled(memory, keys, values)).result(10)
        assert store.drain(10)
        store.close()


def test_a_block_that_cannot_be_encoded_is_not_saved_and_its_neighbours_are() -> None:
    codec = StoreCodec.FP8
    keys, memory, store = prompt(codec), EngineMemory(BLOCKS), opened(codec)
    source = filled(memory, keys, values)
    memory.bytes[2].view(np.uint16)[7] = 0x7FC0  # not a number
    outcomes = store.save(keys, source).result(10)
    assert [outcome.status for outcome in outcomes].count(Status.DONE) == BLOCKS - 1
    assert (outcomes[2].status, "not finite" in outcomes[2].detail) == (Status.FAILED, True)
    match = settled(store, keys, "r")
    assert (match.hits, store.explain("r")[2].reason) == (2, Reason.SAVE_DROPPED)
    match.release()
    assert store.check_integrity() == []
    store.close()


def test_a_flipped_bit_in_dram_is_noticed_in_the_encoded_bytes() -> None:
    codec = StoreCodec.INT8
    url = TierUrl.parse("dram://?capacity=1MiB&verify=always")
    keys, memory = prompt(codec), EngineMemory(BLOCKS)
    store = open_store([url], keeping(IDENTITY, codec.value), StoreSettings(codec=codec), Metrics())
    store.save(keys, filled(memory, keys, values)).result(10)
    store._arena.medium.view(store._arena.pool.slot(store.geometry.addresses(keys)[1]))[3] ^= 1  # type: ignore[arg-type, index]
    assert [outcome.status for outcome in loaded(store, keys, memory, "r")][:2] == [Status.DONE, Status.CORRUPT]
    store.close()


def test_an_identity_of_another_codec_is_refused_at_the_start() -> None:
    tiers = [TierUrl.parse("dram://?capacity=1MiB")]
    with pytest.raises(ConfigError, match="the store's is fp8, and the identity says raw"):
        open_store(tiers, IDENTITY, StoreSettings(codec=StoreCodec.FP8), Metrics())
    with pytest.raises(ConfigError, match=r"dram://\?capacity=1MiB&codec=int8: codec: .*whole store.*--codec int8"):
        open_store([TierUrl.parse("dram://?capacity=1MiB&codec=int8")], IDENTITY, StoreSettings(), Metrics())
