"""Copies are ordered against compute: on a device that runs nothing before it must, every byte is still right.

Nothing here needs a GPU: `FakeDevice` is the adversary that a GPU only sometimes is.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from kvtier.abc.connector import LoadPlan, SavePlan, StepPlan
from kvtier.abc.medium import Outcome, Status
from kvtier.connectors.bundled import BundledWorker
from kvtier.errors import ConfigError, MediumError
from kvtier.key import Span
from kvtier.storage_backends import cuda_copy
from kvtier.storage_backends.cuda_copy import Mark, Pairs, PinnedMemory, Way
from kvtier.storage_backends.dram import DramMedium
from kvtier.storage_backends.hbm import LAYER_GROUPS, HbmMedium, address_of
from kvtier.testing.media import SlotMediumSuite

from ..store.builders import Bench, chain, make_bench  # noqa: TID252 - tests are no package of their own name
from .device import COMPUTE, FakeDevice

SHAPE = (2, 2, 16, 2, 16)
"""``[layer, K/V, token, kv_head, head_dim]`` of the layout that the store's builders use."""
SAVED = "TO_HOST 3 x 4096"


def hbm_of(device: FakeDevice, slots: int = 16, shape: tuple[int, ...] = SHAPE) -> HbmMedium:
    return HbmMedium(torch.zeros(slots, *shape, dtype=torch.bfloat16), device)


class TestHbmOfADevice(SlotMediumSuite[HbmMedium]):
    @pytest.fixture
    def medium(self) -> HbmMedium:
        return hbm_of(FakeDevice(), 8, (4, 2, 16, 3, 128))

    def peek(self, medium: HbmMedium, slot: int, nbytes: int) -> bytes:
        return medium.tensor[slot].view(torch.uint8).flatten()[:nbytes].numpy().tobytes()

    def poke(self, medium: HbmMedium, slot: int, data: bytes) -> None:
        medium.tensor[slot].view(torch.uint8).flatten()[: len(data)] = torch.frombuffer(
            bytearray(data), dtype=torch.uint8
        )


def bytes_of(hbm: HbmMedium, slot: int) -> bytes:
    return hbm.tensor[slot].view(torch.uint8).numpy().tobytes()


def in_dram(bench: Bench, span: Span) -> list[bytes]:
    """What DRAM shows of the span's blocks."""
    places = bench.arena.pool.places(bench.store.geometry.addresses(span))
    return [
        bytes(bench.arena.medium.view(place)[: bench.store.geometry.block_bytes])  # type: ignore[index]  # DRAM is seen
        for place in places
        if place is not None
    ]


class Scene:
    """An engine's HBM on a fake device, a worker half, and a store turned by hand or by a thread."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.bench, self.hbm = device, make_bench(), hbm_of(device)
        self.span = chain(7, 3)
        self.worker = BundledWorker(self.bench.store)
        self.worker.register_kv_caches(self.hbm)

    def step(self, value: int, slots: range) -> None:
        """Queue a step of compute that fills ``slots``."""

        def fill() -> None:
            for slot in slots:
                self.hbm.tensor[slot].view(torch.uint8).fill_(value + slot)

        self.device.compute(f"step {value}", fill)

    def save(self, slots: range, after: Mark | None) -> None:
        self.worker.wait_for_save(StepPlan(saves=(SavePlan("r", self.span, tuple(slots)),)), after)

    def saved(self) -> None:
        """Three blocks in DRAM, of the values 50, 51 and 52; HBM holds zeros again."""
        self.step(50, range(3))
        self.save(range(3), self.device.fence())
        self.bench.turn()
        self.step(0, range(16))
        self.device.finish()
        self.hbm.tensor.zero_()
        self.device.ran.clear()

    def start_load(self, slots: tuple[int, ...]) -> None:
        assert self.bench.match(self.span).hits == 3
        self.worker.start_load_kv(StepPlan(loads=(LoadPlan("r", self.span, slots),)))

    def read_layer(self, layer: int, slots: tuple[int, ...], seen: list[bytes]) -> None:
        """Queue a layer's compute, which reads what has been loaded."""
        self.device.compute(
            f"layer {layer}",
            lambda: seen.append(self.hbm.tensor[list(slots), layer].contiguous().view(torch.uint8).numpy().tobytes()),
        )


def filled(value: int, slot: int) -> bytes:
    return bytes([value + slot]) * 4096


def test_a_save_does_not_begin_before_the_step_that_wrote_its_blocks() -> None:
    scene = Scene(FakeDevice(eager=list(Way)))
    scene.step(50, range(3))
    scene.save(range(3), scene.device.fence())
    assert scene.device.ran == [], "nothing runs on the engine's thread"
    scene.bench.turn()
    assert scene.device.ran == ["step 50", SAVED]
    assert in_dram(scene.bench, scene.span) == [filled(50, slot) for slot in range(3)]
    assert [slots for _, slots in scene.worker.get_finished().saved] == [(0, 1, 2)]


def test_without_its_fence_the_same_save_would_keep_what_was_there_before() -> None:
    """The fake can see the fault: this is what the test above guards against."""
    scene = Scene(FakeDevice(eager=list(Way)))
    scene.step(50, range(3))
    scene.save(range(3), None)
    scene.bench.turn()
    assert in_dram(scene.bench, scene.span) == [bytes(4096)] * 3


def test_a_block_is_shown_and_summed_only_when_its_copy_has_ended() -> None:
    """A save's copy is queued, then waited for on the transfer thread, then summed: the sum is of what DRAM holds."""
    scene = Scene(FakeDevice(blocks=True))
    scene.step(50, range(3))
    scene.save(range(3), scene.device.fence())
    thread = threading.Thread(target=scene.bench.turn)
    thread.start()
    assert scene.device.waiting.wait(30)
    assert in_dram(scene.bench, scene.span) == []
    assert scene.worker.get_finished().saved == (), "its slots may not be reused yet"
    scene.device.release()
    thread.join(30)
    assert in_dram(scene.bench, scene.span) == [filled(50, slot) for slot in range(3)]
    scene.device.finish()
    assert scene.bench.store.check_integrity() == []


@pytest.fixture(params=["compute eager", "all lazy"])
def loading(request: pytest.FixtureRequest) -> Iterator[Scene]:
    scene = Scene(FakeDevice(eager=[COMPUTE] if request.param == "compute eager" else ()))
    scene.saved()
    yield scene
    assert scene.bench.store.check_integrity() == []


def test_no_layer_is_computed_before_its_part_of_the_load(loading: Scene) -> None:
    slots, seen = (9, 4, 6), list[bytes]()
    loading.start_load(slots)
    loading.bench.turn()
    for layer in range(2):
        loading.worker.wait_for_layer_load(layer)
        loading.read_layer(layer, slots, seen)
    assert loading.worker.get_block_ids_with_load_errors() == frozenset()
    loading.device.finish()
    expected = b"".join(bytes([50 + index]) * 2048 for index in range(3))
    assert seen == [expected, expected]
    assert [bytes_of(loading.hbm, slot) for slot in slots] == [filled(50, index) for index in range(3)]


def test_a_layer_is_computed_while_later_layers_are_still_on_their_way() -> None:
    scene = Scene(FakeDevice(eager=[COMPUTE]))
    scene.saved()
    slow = FakeDevice(eager=[COMPUTE], blocks=True)
    scene.device, scene.hbm = slow, hbm_of(slow)
    scene.worker.register_kv_caches(scene.hbm)
    slots, seen = (9, 4, 6), list[bytes]()
    scene.start_load(slots)
    thread = threading.Thread(target=scene.bench.turn)
    thread.start()
    assert slow.waiting.wait(30), "the transfer thread waits for the last layer"
    scene.worker.wait_for_layer_load(0)
    scene.read_layer(0, slots, seen)
    assert slow.ran == ["TO_DEVICE 3 x 2048", "layer 0"], "the second layer has not arrived"
    slow.release()
    scene.worker.wait_for_layer_load(1)
    scene.read_layer(1, slots, seen)
    assert slow.ran.index("layer 1") > 2
    thread.join(30)
    assert scene.worker.get_block_ids_with_load_errors() == frozenset()
    assert len(set(seen)) == 1


def test_a_load_does_not_overwrite_slots_that_compute_still_reads() -> None:
    """The slots were another request's: its last step is queued, and the copies' stream is the faster one."""
    scene = Scene(FakeDevice(eager=list(Way)))
    scene.saved()
    before: list[bytes] = []
    scene.step(100, range(4, 7))
    scene.read_layer(0, (4, 5, 6), before)
    scene.start_load((4, 5, 6))
    scene.bench.turn()
    scene.device.finish()
    assert before == [b"".join(bytes([100 + slot]) * 2048 for slot in (4, 5, 6))]
    assert bytes_of(scene.hbm, 4) == filled(50, 0)


def test_blocks_that_do_not_prove_are_reported_and_nobody_waits_for_them(loading: Scene) -> None:
    places = loading.bench.arena.pool.places(loading.bench.store.geometry.addresses(loading.span))
    for place in places:
        assert place is not None
        view = loading.bench.arena.medium.view(place)
        assert view is not None
        view[0] ^= 1
    loading.start_load((9, 4, 6))
    loading.bench.turn()
    loading.worker.wait_for_layer_load(0)
    loading.worker.wait_for_layer_load(1)
    assert loading.worker.get_block_ids_with_load_errors() == {9, 4, 6}


def test_a_load_that_no_thread_begins_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.connectors.bundled.START_SECONDS", 0.01)
    scene = Scene(FakeDevice())
    scene.saved()
    scene.start_load((9, 4, 6))
    scene.worker.wait_for_layer_load(0)
    assert scene.worker.get_block_ids_with_load_errors() == {9, 4, 6}
    scene.bench.turn()
    scene.bench.idle()
    assert not scene.hbm.tensor.any()


class Broken(FakeDevice):
    """Takes a few copies and then refuses, as a device that has fallen off its bus."""

    def __init__(self, good: int) -> None:
        super().__init__()
        self.good = good

    def copy(self, way: Way, pairs: Pairs, nbytes: int) -> Mark:
        self.good -= 1
        if self.good < 0:
            raise MediumError("CUDA: unspecified launch failure")
        return super().copy(way, pairs, nbytes)


@pytest.mark.parametrize("good", [0, 1])
def test_a_device_that_fails_in_the_middle_of_a_load_costs_that_load(good: int) -> None:
    scene = Scene(FakeDevice())
    scene.saved()
    broken = Broken(good)
    scene.hbm = hbm_of(broken)
    scene.worker.register_kv_caches(scene.hbm)
    scene.start_load((9, 4, 6))
    scene.bench.turn()
    for layer in range(2):
        scene.worker.wait_for_layer_load(layer)
    assert scene.worker.get_block_ids_with_load_errors() == {9, 4, 6}
    scene.bench.idle()


def test_layers_come_in_groups_and_every_byte_of_them() -> None:
    layers = 19  # a last group that is shorter than the others
    device = FakeDevice()
    hbm = hbm_of(device, 8, (layers, 2, 4, 2, 8))
    arriving = hbm.layered(3)
    assert arriving is not None
    data = [np.random.default_rng(seed).integers(0, 256, hbm.slot_bytes, np.uint8) for seed in range(3)]
    assert arriving.write([5, 0, 2], [[each.data] for each in data]) == [Outcome(Status.DONE, hbm.slot_bytes)] * 3
    assert [bytes_of(hbm, slot) for slot in (5, 0, 2)] == [each.tobytes() for each in data]
    assert len(device.ran) <= LAYER_GROUPS
    assert all(arriving.wait_for_layer(layer, 0.0) for layer in range(layers))
    assert hbm.bytes_written == 3 * hbm.slot_bytes


def test_a_load_in_several_batches_lets_no_layer_through_before_the_last_of_them() -> None:
    """As where blocks are decoded on their way, a part of them at a time."""
    hbm = hbm_of(FakeDevice())
    arriving = hbm.layered(3)
    assert arriving is not None
    block = memoryview(bytes(hbm.slot_bytes))
    arriving.write([5, 0], [[block], [block]])
    assert not arriving.wait_for_layer(0, 0.0)
    arriving.write([2], [[block]])
    assert arriving.wait_for_layer(0, 0.0)
    lost = hbm.layered(2)
    assert lost is not None
    lost.write([5], [[block]])
    assert not lost.wait_for_layer(1, 0.0)
    lost.end()
    assert lost.wait_for_layer(1, 0.0), "the load has ended; its outcomes say which block never came"


def test_a_cpu_has_neither_fences_nor_layers() -> None:
    hbm = HbmMedium.allocate(2, SHAPE, torch.bfloat16)
    assert hbm.fence() is None
    assert hbm.layered(1) is None


class Runtime:
    """CuPy's calls for page-locking; refuses from the ``most``-th range on."""

    def __init__(self, most: int = 100) -> None:
        self.most = most
        self.ranges: dict[int, int] = {}

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:  # noqa: N802 - CuPy's name
        assert flags == 3, "portable and mapped"
        if len(self.ranges) == self.most:
            raise RuntimeError("cudaErrorMemoryAllocation: out of memory")
        self.ranges[address] = nbytes

    def hostUnregister(self, address: int) -> None:  # noqa: N802 - CuPy's name
        del self.ranges[address]

    def getDeviceCount(self) -> int:  # noqa: N802 - CuPy's name
        return 1


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(cuda_copy, "import_cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=made)))
    monkeypatch.setattr("kvtier.storage_backends.dram._PIN_BYTES", 3 << 20)
    return made


def test_ranges_that_are_page_locked_are_known(runtime: Runtime) -> None:
    memory = PinnedMemory()
    assert not memory.covers(0, 1)
    for start in (0x9000, 0x1000, 0x5000):
        memory.pin(start, 0x1000)
    assert memory.covers(0x5000, 0x1000)
    assert memory.covers(0x5FFF, 1)
    assert not memory.covers(0x5FFF, 2)
    assert not memory.covers(0x4FFF, 1)
    memory.unpin(0x5000)
    assert not memory.covers(0x5000, 1)
    assert memory.covers(0x9000, 16)
    assert memory.covers(0x1000, 16)


def test_dram_is_page_locked_in_whole_slots_and_let_go_at_the_end(runtime: Runtime) -> None:
    medium = DramMedium(10, (1 << 20) + 1, pin=True)
    assert medium.wait_prefaulted(30)
    slots = [medium.view(slot) for slot in range(10)]
    assert sorted(runtime.ranges.values()) == [2 * len(slots[0])] * 5
    for view in slots:
        address = address_of(view)
        assert cuda_copy.pinned.covers(address, len(view)), "a copy must not reach into another range"
    medium.close()
    assert runtime.ranges == {}
    assert not cuda_copy.pinned.covers(address_of(slots[0]), 1)


def test_dram_that_cannot_be_page_locked_to_its_end_is_used_all_the_same(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.most = 2
    medium = DramMedium(12, 1 << 20, pin=True)
    assert medium.wait_prefaulted(30)
    (record,) = caplog.records
    assert "page-locked up to 6MiB of 12MiB" in record.message
    assert "cudaErrorMemoryAllocation" in record.message
    medium.view(11)[:4] = b"used"
    medium.close()
    assert runtime.ranges == {}


def test_dram_without_a_device_says_once_that_it_is_not_page_locked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_copy, "device_count", lambda: 0)
    caplog.set_level("DEBUG")
    medium = DramMedium(4, 1 << 20, pin=True)
    assert medium.wait_prefaulted(30)
    medium.close()
    assert [record.message for record in caplog.records] == [
        "the DRAM arena is not page-locked: no CUDA device is in use"
    ]


def test_a_folder_left_behind_by_cupy_is_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))  # what importing an empty folder gives
    with pytest.raises(ConfigError, match=r"CuPy is missing .*kvtier\[cuda\]"):
        cuda_copy.import_cupy()
    assert cuda_copy.device_count() == 0
