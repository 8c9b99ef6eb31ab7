"""The audit of a store that runs: leases that nobody holds, slots that two name, bytes that nobody counts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.abc.policy import EntryMeta
from kvtier.key import Address
from kvtier.pool import Slot
from kvtier.quantity import Bytes
from kvtier.storage_backends.nvme import NvmeMedium
from kvtier.testing.tiers import lone_tier
from tests.backends.nvme import demoted
from tests.backends.support import Batch

from .builders import GEOMETRY, Bench, Told, chain, make_bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Four blocks in DRAM and on NVMe, and nothing under way."""
    made = make_bench(nvme=tmp_path / "tier")
    made.save(chain(1, 4))
    assert made.tiers[0].counts()["ready"] == 4
    made.idle()
    return made


def dram_slot(bench: Bench) -> Slot:
    slot = bench.arena.pool.slot(GEOMETRY.addresses(chain(1, 4))[2])
    assert slot is not None
    return slot


def medium(bench: Bench) -> NvmeMedium:
    made = bench.tiers[0].medium
    assert isinstance(made, NvmeMedium)
    return made


def forgotten_lease(bench: Bench) -> str:
    """A match that the store has lost sight of, and that was never released."""
    match = bench.match(chain(1, 4))
    assert match.hits == 4
    bench.store._promoter.matches.clear()
    return f"leaked lease: dram slot {dram_slot(bench)} has 1 references, 0 are held"


def reference_too_many(bench: Bench) -> str:
    """A lease that holds a slot twice."""
    bench.match(chain(1, 4))
    bench.arena.pool.acquire([dram_slot(bench)])
    return f"leaked lease: dram slot {dram_slot(bench)} has 2 references, 1 are held"


def reference_too_few(bench: Bench) -> str:
    bench.match(chain(1, 4))
    bench.arena.pool.release([dram_slot(bench)], 0.0)
    return f"lost lease: dram slot {dram_slot(bench)} has 0 references, 1 are held"


def reader_that_never_let_go(bench: Bench) -> str:
    pool = bench.tiers[0].pool  # type: ignore[attr-defined]  # a slot tier
    pool.acquire([pool.slot(GEOMETRY.addresses(chain(1, 4))[0])])
    return "nvme: leaked lease: 1 slots are referenced, 0 have a reason to be"


def slot_of_two(bench: Bench) -> str:
    pool = bench.arena.pool
    pool._slot_of[Address(b"\1" * 40)] = dram_slot(bench)
    return f"double slot: entry 01010101 names slot {dram_slot(bench)}, which holds another"


def bytes_that_nobody_counts(bench: Bench) -> str:
    file = medium(bench)._file
    os.posix_fallocate(file._buffered, file.slots * file.stride, 8 << 20)
    return "nvme: wrong byte count: "


@pytest.mark.parametrize(
    "plant",
    [
        forgotten_lease,
        reference_too_many,
        reference_too_few,
        reader_that_never_let_go,
        slot_of_two,
        bytes_that_nobody_counts,
    ],
)
def test_a_planted_fault_is_named(bench: Bench, plant: Callable[[Bench], str]) -> None:
    expected = plant(bench)
    assert any(found.startswith(expected) for found in bench.store.check_integrity()), bench.store.check_integrity()


def test_live_matches_loads_and_demotions_are_no_faults(bench: Bench) -> None:
    match = bench.match(chain(1, 4))
    assert bench.store.check_integrity() == []
    bench.store.save(chain(2, 4), bench.source(chain(2, 4)))
    assert bench.store.check_integrity() == []
    match.release()
    bench.turn()
    bench.idle()


def test_a_restart_tells_the_policy_all_that_it_knew(tmp_path: Path) -> None:
    """Size, place in the chain, tenant and expiry of each block come back with the index."""
    batch = Batch(3, GEOMETRY.block_bytes, expires_at=5e9)
    params = NvmeMedium.Params(capacity=Bytes(8 << 20))
    before = NvmeMedium(tmp_path / "tier", GEOMETRY.block_bytes, params)
    demoted(before, batch, [0, 1, 2])
    before.close()
    policy = Told(3)
    lone_tier(NvmeMedium(tmp_path / "tier", GEOMETRY.block_bytes, params), lambda _: policy).close()
    expected = [
        EntryMeta(above, depth, GEOMETRY.block_bytes, tenant=b"t" * 16)
        for depth, above in enumerate([None, *batch.names[:2]])
    ]
    told = [policy.told[name] for name in batch.names]
    assert [meta._replace(expires_at=None) for meta in told] == expected
    on_our_clock = 5e9 - time.time() + time.monotonic()
    assert [meta.expires_at for meta in told] == pytest.approx([on_our_clock] * 3, abs=60)
