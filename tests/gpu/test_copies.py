"""Copies between HBM and DRAM on a GPU: every byte, in order with compute, and as fast as the bus."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kvtier.abc.connector import LoadPlan, StepPlan
from kvtier.abc.store import SlotRange
from kvtier.connectors.bundled import BundledWorker
from kvtier.storage_backends.cuda_copy import CudaQueue
from kvtier.storage_backends.dram import DramMedium
from kvtier.storage_backends.hbm import HbmMedium
from kvtier.store.store import TieredStore

from .support import make_dram, make_hbm, make_store, span

pytestmark = pytest.mark.gpu

BLOCKS = 64
LONG_CYCLES = 400_000_000
"""Of a kernel that does nothing for some 0.2 s."""
LEAST_OF_THE_BUS = 0.8


@pytest.fixture(scope="module")
def dram() -> Iterator[DramMedium]:
    made = make_dram(2 * BLOCKS, 2 << 20)
    yield made
    made.close()


def filled(hbm: HbmMedium, seed: int) -> torch.Tensor:
    """Random bytes in every slot of a device's HBM; gives them."""
    values = torch.randint(
        0, 256, (hbm.slots, hbm.slot_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    hbm.tensor.view(hbm.slots, -1).view(torch.uint8).copy_(values)
    torch.cuda.synchronize()
    return values


def rooms(dram: DramMedium, count: int, nbytes: int) -> list[list[memoryview]]:
    return [[dram.view(slot)[:nbytes]] for slot in range(count)]


@pytest.mark.parametrize("layers", [1, 2, 3, 32], ids=["64 KiB", "128 KiB", "192 KiB", "2 MiB"])
def test_every_byte_arrives_both_ways_by_engine_and_by_kernel(dram: DramMedium, layers: int) -> None:
    hbm = make_hbm(2 * BLOCKS, layers)
    assert isinstance(hbm._queue, CudaQueue)
    assert hbm._queue._kernel is not None, "the copy kernel does not compile here"
    values = filled(hbm, layers)
    order = torch.randperm(2 * BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    origin, back = order[:BLOCKS], order[BLOCKS:]
    room = rooms(dram, BLOCKS, hbm.slot_bytes)
    assert all(outcome.done for outcome in hbm.read(origin, room))
    for index, slot in enumerate(origin):
        assert np.array_equal(np.frombuffer(room[index][0], np.uint8), values[slot].numpy()), (index, slot)
    arriving = hbm.layered(BLOCKS // 2)
    assert arriving is not None
    arriving.write(back[: BLOCKS // 2], room[: BLOCKS // 2])
    hbm.write(back[BLOCKS // 2 :], room[BLOCKS // 2 :])
    rows = hbm.tensor.view(hbm.slots, -1).view(torch.uint8).cpu()
    assert torch.equal(rows[back], values[origin])
    assert torch.equal(rows[origin], values[origin])


def timed(act: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return time.perf_counter() - start


@pytest.mark.parametrize("way", ["save", "load"])
def test_64_blocks_of_2_mib_move_at_the_speed_of_one_pinned_copy(dram: DramMedium, way: str) -> None:
    hbm = make_hbm(BLOCKS)
    filled(hbm, 1)
    room = rooms(dram, BLOCKS, hbm.slot_bytes)
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(2)).tolist()
    pinned = torch.empty(BLOCKS * hbm.slot_bytes, dtype=torch.uint8).pin_memory()
    flat = torch.empty_like(pinned, device="cuda")
    if way == "save":
        ours, limit = lambda: hbm.read(order, room), lambda: pinned.copy_(flat, non_blocking=True)
    else:
        ours, limit = lambda: hbm.write(order, room), lambda: flat.copy_(pinned, non_blocking=True)
    for act in (ours, limit, ours, limit):
        act()
    times = [(timed(ours), timed(limit)) for _ in range(15)]
    mine, bare = (statistics.median(each) for each in zip(*times, strict=True))
    size = BLOCKS * hbm.slot_bytes / 1e9
    print(f"\n{way}: {size / mine:.1f} GB/s, one pinned copy {size / bare:.1f} GB/s: {bare / mine:.2f} of it")
    assert bare / mine >= LEAST_OF_THE_BUS


@pytest.fixture
def store(dram: DramMedium) -> Iterator[TieredStore]:
    """Over an arena of its own, because a store closes it."""
    made = make_store(make_dram(2 * BLOCKS, dram.slot_bytes))
    yield made
    assert made.check_integrity() == []
    made.close()


def in_dram(store: TieredStore, first: int, count: int) -> torch.Tensor:
    slots = store._arena.pool.places(store.geometry.addresses(span(first, count)))
    assert None not in slots
    return torch.stack([torch.frombuffer(store._arena.medium.view(slot), dtype=torch.uint8) for slot in slots])  # type: ignore[arg-type]


def test_a_save_is_ordered_behind_a_long_step_that_writes_its_blocks(store: TieredStore) -> None:
    """At once after the step was queued, without any synchronisation: host bytes equal a synchronised reference."""
    hbm = make_hbm(BLOCKS)
    values = torch.randint(0, 256, (BLOCKS, hbm.slot_bytes), dtype=torch.uint8).cuda()
    rows = hbm.tensor.view(BLOCKS, -1).view(torch.uint8)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]
    rows.copy_(values)
    outcomes = store.save(span(1, BLOCKS), SlotRange(hbm, range(BLOCKS)), hbm.fence())
    assert all(outcome.done for outcome in outcomes.result(60))
    assert torch.equal(in_dram(store, 1, BLOCKS), values.cpu())


def test_the_step_is_long_enough_that_a_save_without_a_fence_would_be_wrong(store: TieredStore) -> None:
    hbm = make_hbm(BLOCKS)
    values = torch.full((BLOCKS, hbm.slot_bytes), 9, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]
    hbm.tensor.view(BLOCKS, -1).view(torch.uint8).copy_(values)
    store.save(span(2, BLOCKS), SlotRange(hbm, range(BLOCKS)), None).result(60)
    assert not in_dram(store, 2, BLOCKS).any()


def test_layers_are_read_in_order_with_their_load_and_old_readers_are_waited_for(store: TieredStore) -> None:
    hbm = make_hbm(2 * BLOCKS)
    values = filled(hbm, 5)
    store.save(span(3, BLOCKS), SlotRange(hbm, range(BLOCKS)), hbm.fence()).result(60)
    slots = list(range(2 * BLOCKS - 1, BLOCKS - 1, -1))
    index = torch.tensor(slots, device="cuda")  # made now: making it would wait for the long step
    worker = BundledWorker(store)
    worker.register_kv_caches(hbm)
    assert store.match("r", span(3, BLOCKS)).hits == BLOCKS
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]
    before = hbm.tensor[index]  # a step that is queued, and still reads what these slots held
    worker.start_load_kv(StepPlan(loads=(LoadPlan("r", span(3, BLOCKS), tuple(slots)),)))
    layers = []
    for layer in range(hbm.tensor.shape[1]):
        worker.wait_for_layer_load(layer)
        layers.append(hbm.tensor[index, layer])
    assert worker.get_block_ids_with_load_errors() == frozenset()
    got = torch.stack(layers, dim=1).view(BLOCKS, -1).view(torch.uint8).cpu()
    assert torch.equal(got, values[:BLOCKS])
    assert torch.equal(before.view(BLOCKS, -1).view(torch.uint8).cpu(), values[slots])
