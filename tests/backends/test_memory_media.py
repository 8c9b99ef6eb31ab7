"""DRAM, HBM on a CPU and the dict: the shipped suites, and what is their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from kvtier.abc.medium import MediumContext, SlotMedium
from kvtier.errors import CapacityError, ConfigError
from kvtier.key import Address
from kvtier.machine import available_memory
from kvtier.quantity import Bytes
from kvtier.storage_backends.dram import PAGE_BYTES, DramMedium
from kvtier.storage_backends.hbm import HbmMedium
from kvtier.storage_backends.memory import MemoryMedium
from kvtier.testing.media import KeyMediumSuite, SlotMediumSuite
from kvtier.url import TierUrl

CONTEXT = MediumContext(slot_bytes=100_000)


class TestDram(SlotMediumSuite[DramMedium]):
    @pytest.fixture
    def medium(self) -> Iterator[DramMedium]:
        made = DramMedium(8, 100_000)
        yield made
        made.close()

    def peek(self, medium: DramMedium, slot: int, nbytes: int) -> bytes:
        return bytes(medium.view(slot)[:nbytes])

    def poke(self, medium: DramMedium, slot: int, data: bytes) -> None:
        medium.view(slot)[: len(data)] = data


class TestHbm(SlotMediumSuite[HbmMedium]):
    @pytest.fixture
    def medium(self) -> HbmMedium:
        return HbmMedium.allocate(8, (4, 2, 16, 3, 128), torch.bfloat16)

    def peek(self, medium: HbmMedium, slot: int, nbytes: int) -> bytes:
        return medium.tensor[slot].view(torch.uint8).flatten()[:nbytes].numpy().tobytes()

    def poke(self, medium: HbmMedium, slot: int, data: bytes) -> None:
        medium.tensor[slot].view(torch.uint8).flatten()[: len(data)] = torch.frombuffer(
            bytearray(data), dtype=torch.uint8
        )


class TestMemory(KeyMediumSuite[MemoryMedium]):
    @pytest.fixture
    def medium(self) -> MemoryMedium:
        return MemoryMedium()

    def peek(self, medium: MemoryMedium, name: Address) -> bytes | None:
        return medium.values.get(name)

    def poke(self, medium: MemoryMedium, name: Address, value: bytes) -> None:
        medium.values[name] = value


def dram(capacity: int, slot_bytes: int = 100_000) -> SlotMedium:
    params = DramMedium.Params(capacity=Bytes(capacity))
    return DramMedium.open(TierUrl.parse("dram://"), params, MediumContext(slot_bytes))


def test_dram_slots_are_whole_aligned_pages() -> None:
    medium = dram(1 << 20, slot_bytes=70_001)
    assert medium.slots == (1 << 20) // (18 * PAGE_BYTES)
    views = [medium.view(slot) for slot in range(medium.slots)]
    assert {len(view) for view in views if view is not None} == {18 * PAGE_BYTES}
    medium.close()


def test_dram_refuses_more_than_there_is_and_says_how_much_and_where() -> None:
    with pytest.raises(CapacityError, match=r"asked for .*, .* are available \(.*\)"):
        dram(available_memory().nbytes * 2)
    with pytest.raises(CapacityError, match="does not hold one block"):
        dram(50_000)


def test_dram_keeps_resident_memory_within_its_capacity() -> None:
    """A budget is a budget: no rounding to powers of two, no second copy."""
    script = """
from kvtier.machine import resident_bytes
from kvtier.storage_backends.dram import DramMedium
DramMedium(1, 4096).close()
before = resident_bytes()
medium = DramMedium(130, 1 << 20)
assert medium.wait_prefaulted(60)
for slot in range(130):
    medium.view(slot)[:1] = b"x"
grown = resident_bytes() - before
print(grown / (130 << 20))
assert 0.95 * (130 << 20) < grown < 1.02 * (130 << 20), grown
medium.close()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_dram_is_usable_while_it_is_faulted_in_and_closes_at_once() -> None:
    medium = DramMedium(64, 1 << 20)
    for slot in range(64):
        medium.view(slot)[:5] = b"early"
    medium.wait_prefaulted(30)
    assert all(bytes(medium.view(slot)[:5]) == b"early" for slot in range(64))
    medium.close()
    late = DramMedium(2048, 1 << 20)
    late.close()
    assert late.wait_prefaulted(0)


def test_hbm_belongs_to_the_engine() -> None:
    with pytest.raises(ConfigError, match="engine"):
        HbmMedium.open(TierUrl.parse("hbm://"), HbmMedium.Params(), CONTEXT)
    with pytest.raises(ValueError, match="contiguous"):
        HbmMedium(torch.zeros(4, 8).T)
    with pytest.raises(CapacityError, match="asked for"):
        HbmMedium.allocate(1 << 40, (1 << 20,), torch.uint8)
