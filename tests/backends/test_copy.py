"""Moving a batch: what arrives is what was sent, or says that it is not."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kvtier.abc.medium import Iovec, Outcome, SlotMedium, Status
from kvtier.codec.catalogue import codec_named
from kvtier.codec.frame import HEADER_BYTES, content_sum
from kvtier.errors import MediumUnavailable
from kvtier.storage_backends.dram import DramMedium
from kvtier.storage_backends.hbm import HbmMedium
from kvtier.storage_backends.memory import MemoryMedium
from kvtier.testing.faults import Faulty, wrapped
from kvtier.transfer.copy import load_blocks, read_frames, save_blocks, write_frames
from kvtier.transfer.deal import dealt
from kvtier.transfer.staging import PAGE_BYTES, Staging

from .support import Batch

BLOCK = 70_000


class Unseen(SlotMedium):
    """Device memory as on a GPU: no place can be addressed by the CPU."""

    def __init__(self, inner: DramMedium) -> None:
        self.inner, self.slots, self.slot_bytes = inner, inner.slots, inner.slot_bytes

    def read(self, slots: Sequence[int], into: Sequence[Iovec]) -> list[Outcome]:
        return self.inner.read(slots, into)

    def write(self, slots: Sequence[int], data: Sequence[Iovec]) -> list[Outcome]:
        return self.inner.write(slots, data)

    def close(self) -> None:
        self.inner.close()


@pytest.fixture(params=[False, True], ids=["alone", "with a worker"])
def workers(request: pytest.FixtureRequest) -> Iterator[Executor | None]:
    if not request.param:
        yield None
        return
    with ThreadPoolExecutor(1) as pool:
        yield pool


def engine_memory(kind: str, count: int) -> SlotMedium:
    if kind == "hbm":
        hbm = HbmMedium.allocate(count, (BLOCK // 2,), torch.bfloat16)
        hbm.tensor.normal_()
        return hbm
    dram = DramMedium(count, BLOCK, prefault=False)
    for slot in range(count):
        dram.view(slot)[:BLOCK] = np.random.default_rng(slot).integers(0, 256, BLOCK, np.uint8).data
    return Unseen(dram)


def content(medium: SlotMedium, slot: int) -> bytes:
    into = memoryview(bytearray(BLOCK))
    assert medium.read([slot], [[into]])[0].done
    return bytes(into)


@pytest.mark.parametrize("kind", ["hbm", "unseen"])
def test_save_and_load_between_shuffled_slots(kind: str, workers: Executor | None) -> None:
    count = 300  # some parts' worth
    engine, dram = engine_memory(kind, 2 * count), DramMedium(count, BLOCK, prefault=False)
    order = np.random.default_rng(1).permutation(2 * count).tolist()
    origin, back, places = order[:count], order[count:], list(reversed(range(count)))
    outcomes, sums = save_blocks(engine, origin, dram, places, workers=workers)
    assert outcomes == [Outcome(Status.DONE, BLOCK)] * count
    assert sums == [content_sum(content(engine, slot)) for slot in origin]
    given = [made if index % 2 else None for index, made in enumerate(sums)]
    assert load_blocks(dram, places, given, engine, back, workers=workers) == [Outcome(Status.DONE, BLOCK)] * count
    assert [content(engine, slot) for slot in back] == [content(engine, slot) for slot in origin]


@pytest.mark.parametrize("kind", ["hbm", "unseen"])
def test_a_load_proves_the_blocks_whose_sum_is_given(kind: str) -> None:
    engine, dram = engine_memory(kind, 4), DramMedium(4, BLOCK, prefault=False)
    _, sums = save_blocks(engine, [0, 1, 2, 3], dram, [0, 1, 2, 3])
    dram.view(1)[BLOCK - 1] ^= 1
    dram.view(2)[0] ^= 1
    outcomes = load_blocks(dram, [0, 1, 2, 3], [sums[0], sums[1], None, sums[3]], engine, [3, 2, 1, 0])
    assert [one.status for one in outcomes] == [Status.DONE, Status.CORRUPT, Status.DONE, Status.DONE]


def test_empty_batches_are_no_batches() -> None:
    engine, dram = engine_memory("hbm", 1), DramMedium(1, BLOCK, prefault=False)
    assert save_blocks(engine, [], dram, []) == ([], [])
    assert load_blocks(dram, [], [], engine, []) == []
    for name in ("raw", "shuffle+lz4", "zstd"):
        assert write_frames(MemoryMedium(), [], [], [], codec_named(name)) == []
        assert read_frames(MemoryMedium(), [], [], [], codec_named(name), now=0.0) == ([], [])


@pytest.mark.parametrize("name", ["raw", "shuffle+lz4", "zstd"])
def test_frames_come_back_through_any_codec(name: str) -> None:
    medium, batch, codec = MemoryMedium(), Batch(40, 300_000), codec_named(name)
    assert all(one.done for one in write_frames(medium, batch.names, batch.sources, batch.headers, codec))
    outcomes, headers = read_frames(medium, batch.names, batch.into, batch.asked, codec, now=0.0)
    assert all(one.done for one in outcomes)
    assert all(batch.arrived_whole(index) for index in range(40))
    assert [header.content for header in headers if header is not None] == batch.sums


def test_frames_of_another_codec_are_not_decoded() -> None:
    medium, batch = MemoryMedium(), Batch(1, 5000)
    write_frames(medium, batch.names, batch.sources, batch.headers, codec_named("shuffle+lz4"))
    outcomes, _ = read_frames(medium, batch.names, batch.into, batch.asked, codec_named("raw"), now=0.0)
    assert not outcomes[0].done


def test_every_single_corrupted_byte_is_noticed(seed: int) -> None:
    for name in ("raw", "shuffle+lz4", "zstd"):
        medium, batch, codec = MemoryMedium(), Batch(1, 3000, seed=seed), codec_named(name)
        write_frames(medium, batch.names, batch.sources, batch.headers, codec)
        whole = medium.values[batch.names[0]]
        for at in range(0, len(whole), 13):
            medium.values[batch.names[0]] = whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]
            (outcome,), (header,) = read_frames(medium, batch.names, batch.into, batch.asked, codec, now=0.0)
            assert (outcome.status, header) == (Status.CORRUPT, None)
            assert outcome.detail


def test_one_bad_block_of_a_batch_is_the_one_that_is_named() -> None:
    medium, batch, codec = MemoryMedium(), Batch(6, 3000), codec_named("raw")
    write_frames(medium, batch.names, batch.sources, batch.headers, codec)
    first, second, third, fourth = (medium.values[name] for name in batch.names[:4])
    medium.values[batch.names[0]] = first[:-1] + bytes([first[-1] ^ 1])
    medium.values[batch.names[1]] = second[:HEADER_BYTES] + third[HEADER_BYTES:]
    medium.values[batch.names[2]] = fourth
    medium.values[batch.names[3]] = fourth[:-1]
    del medium.values[batch.names[4]]
    outcomes, headers = read_frames(medium, batch.names, batch.into, batch.asked, codec, now=0.0)
    assert [outcome.detail[:16] for outcome in outcomes] == [
        "stored sum does ",
        "stored sum does ",
        f"key {batch.asked[3].key.hex()[:12]}",
        "2999 bytes came ",
        "",
        "",
    ]
    assert [outcome.status for outcome in outcomes] == [*[Status.CORRUPT] * 4, Status.ABSENT, Status.DONE]
    assert headers == [None] * 5 + [batch.headers[5]]
    assert batch.arrived_whole(5)


def test_a_medium_that_is_gone_is_reported(workers: Executor | None) -> None:
    gone = Faulty("write", "read", error=MediumUnavailable("gone"))
    batch, medium = Batch(40, 300_000), wrapped(MemoryMedium(), gone)
    for name in ("raw", "shuffle+lz4", "zstd"):
        with pytest.raises(MediumUnavailable):
            write_frames(medium, batch.names, batch.sources, batch.headers, codec_named(name))
        with pytest.raises(MediumUnavailable):
            read_frames(medium, batch.names, batch.into, batch.asked, codec_named(name), now=0.0)
    count = 300  # some parts' worth
    engine, dram = wrapped(engine_memory("unseen", count), gone), DramMedium(count, BLOCK, prefault=False)
    with pytest.raises(MediumUnavailable):
        save_blocks(engine, range(count), dram, range(count), workers=workers)
    with pytest.raises(MediumUnavailable):
        load_blocks(dram, range(count), [None] * count, engine, range(count), workers=workers)


def test_staging_lends_aligned_pages_and_keeps_a_bounded_number() -> None:
    staging = Staging(keep_bytes=4 * PAGE_BYTES)
    with staging.lend(3, 100) as pages, staging.lend(3, 100) as others:
        assert {len(page) for page in [*pages, *others]} == {PAGE_BYTES}
        addresses = {np.frombuffer(page, np.uint8).ctypes.data for page in [*pages, *others]}
        assert len(addresses) == 6
        assert all(address % PAGE_BYTES == 0 for address in addresses)
        pages[0][:4] = b"mine"
    with staging.lend(6, 100) as again:
        kept = {np.frombuffer(page, np.uint8).ctypes.data for page in again} & addresses
    assert len(kept) == 4


def test_bytes_that_rotted_before_a_keyed_sum_was_made_are_not_believed() -> None:
    """The keyed sum was right for the rotten bytes, and nobody compared them with the sum of what had been saved."""
    medium, batch = MemoryMedium(), Batch(3, BLOCK)
    medium.auth_key = b"k" * 32
    batch.sources[1][77] ^= 1
    assert all(o.done for o in write_frames(medium, batch.names, batch.sources, batch.headers, codec_named("raw")))
    read, headers = read_frames(medium, batch.names, batch.into, batch.asked, codec_named("raw"), now=0.0)
    assert [outcome.status for outcome in read] == [Status.DONE, Status.CORRUPT, Status.DONE]
    assert headers[1] is None


def test_what_another_thread_raises_is_raised_once_nothing_is_under_way() -> None:
    here, began, ended = threading.current_thread(), threading.Event(), []

    def work(index: int) -> int:
        if threading.current_thread() is not here:
            began.set()
            raise OSError(f"item {index}")
        assert began.wait(10)
        ended.append(index)
        return index

    with ThreadPoolExecutor(1) as pool, pytest.raises(OSError, match="item"):
        dealt(work, 4, pool)
    assert len(ended) == 3, "this thread has done all the others"
