"""Lower tiers that fail at the wrong moment: nothing leaks, nothing is believed that is not so."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.abc.medium import Arrived, Iovec, Outcome, Status
from kvtier.abc.store import Reason
from kvtier.codec.frame import FrameHeader
from kvtier.config import WriteMode
from kvtier.errors import MediumFull, MediumUnavailable
from kvtier.key import Address
from kvtier.storage_backends.memory import MemoryMedium
from kvtier.testing.faults import Faulty, Stuck
from kvtier.tier.slot import SlotTier

from .builders import Bench, chain, make_bench


def revived(bench: Bench) -> None:
    """Let every degraded tier be tried."""
    bench.clock.advance(10)
    bench.store.keep()
    bench.turn()
    assert all(health == "ok" for health in bench.store.health().values())


@pytest.mark.parametrize("error", [MediumUnavailable("ordered"), MediumFull("ordered"), RuntimeError("ordered")])
def test_slots_of_dropped_blocks_come_back_after_a_failed_delete(tmp_path: Path, error: Exception) -> None:
    """Their rows could not be deleted; the slots stayed retiring for ever, and the tier shrank with every drop."""
    fault = Faulty("commit", error=error)
    fault.active = False
    bench = make_bench(nvme=tmp_path / "n", nvme_fault=fault)
    tier = bench.tiers[0]
    assert isinstance(tier, SlotTier)
    bench.save(chain(1, 6))
    fault.active = True
    bench.store.drop(chain(1, 3), Reason.CLEARED)
    bench.turn()
    bench.store.drop(chain(1, 6), Reason.CLEARED)
    bench.turn()
    assert tier.pool.retiring == 6, "a slot is free only after its delete is committed"
    fault.active = False
    revived(bench)
    bench.clock.advance(10)
    bench.store.keep()
    bench.turn()
    assert tier.pool.retiring == 0
    assert tier.pool.free == tier.pool.capacity
    assert list(tier._slots.journal.load()) == [], "a dropped block would be back after a restart"
    bench.idle()


def test_a_block_dropped_saved_and_dropped_again_before_its_delete_leaves_no_slot_behind(tmp_path: Path) -> None:
    bench = make_bench(nvme=tmp_path / "n")
    keys = chain(1, 2)
    _, nvme = bench.workers
    bench.save(keys)
    bench.store.drop(keys, Reason.CLEARED)  # the delete is queued
    bench.store.save(keys, bench.source(keys))
    bench.workers[0].run_one()
    nvme.run_one(lambda count: count - 1)  # written again ahead of it
    bench.store.drop(keys, Reason.CLEARED)
    bench.turn()
    assert bench.tiers[0].counts()["retiring"] == 0
    bench.idle()


def test_a_failing_index_does_not_leave_corrupt_blocks_pending_for_ever(tmp_path: Path) -> None:
    """The exception left the transfer job: the slots stayed taken, and every later request waited for them in vain."""
    fault = Faulty("commit", error=RuntimeError("ordered"))
    fault.active = False
    bench = make_bench(nvme=tmp_path / "n", nvme_fault=fault)
    keys = chain(1, 3)
    bench.save(keys)
    bench.empty_dram()
    for path in (tmp_path / "n").glob("slots-*"):
        path.write_bytes(b"\xff" * path.stat().st_size)
    fault.active = True
    assert bench.load(keys) == 0
    fault.active = False
    revived(bench)
    bench.save(keys)
    bench.empty_dram()
    assert bench.load(keys, "again") == 3


class Short(MemoryMedium):
    """Answers for fewer items than it was asked about."""

    active = False

    def read(self, names: Sequence[Address], into: Sequence[Iovec], arrived: Arrived | None = None) -> list[Outcome]:
        outcomes = super().read(names, into, arrived)
        return outcomes[:-1] if self.active else outcomes

    def write(self, names: Sequence[Address], data: Sequence[Iovec]) -> list[Outcome]:
        outcomes = super().write(names, data)
        return outcomes[:-1] if self.active else outcomes


def test_a_medium_that_answers_for_too_few_items_leaks_nothing() -> None:
    shared = Short()
    bench = make_bench(shared=shared)
    bench.save(chain(1, 3))
    bench.empty_dram()
    shared.active = True
    assert bench.load(chain(1, 3)) == 0
    revived(bench)
    bench.save(chain(2, 3))
    bench.idle()
    assert bench.store.stats()["waiting"] == {"shared": 0}


def test_a_read_that_fails_once_deletes_nothing_that_others_share() -> None:
    class Hiccup(MemoryMedium):
        active = False

        def read(
            self, names: Sequence[Address], into: Sequence[Iovec], arrived: Arrived | None = None
        ) -> list[Outcome]:
            outcomes = super().read(names, into, arrived)
            return [outcomes[0], Outcome(Status.FAILED, 0, "timed out"), *outcomes[2:]] if self.active else outcomes

    shared = Hiccup()
    bench = make_bench(shared=shared)
    keys = chain(1, 4)
    bench.save(keys)
    bench.empty_dram()
    shared.active = True
    assert bench.load(keys) == 1
    assert len(shared.values) == 4
    shared.active = False
    bench.empty_dram()
    assert bench.load(keys, "again") == 4


def test_blocks_that_the_server_has_evicted_are_written_again_when_they_are_saved_again() -> None:
    """Only the first gap was noticed: a chain came back by one block per request."""
    shared = MemoryMedium()
    bench = make_bench(shared=shared)
    keys = chain(1, 6)
    bench.save(keys)
    for name in bench.store.geometry.addresses(keys)[2:]:
        del shared.values[name]
    bench.empty_dram()
    assert bench.load(keys) == 2
    bench.save(keys)
    assert len(shared.values) == 6


@pytest.mark.parametrize("mode", [WriteMode.THROUGH, WriteMode.SELECTIVE])
def test_a_server_that_comes_back_empty_is_filled_again(mode: WriteMode) -> None:
    shared = MemoryMedium()
    bench = make_bench(shared=shared, shared_write=mode)
    keys = chain(1, 4)
    bench.save(keys)
    bench.load(keys)
    assert len(shared.values) == 4
    shared.values.clear()
    bench.tiers[0].degrade("stopped")
    revived(bench)
    bench.empty_dram()
    bench.save(keys)
    bench.load(keys, "again")
    assert len(shared.values) == 4


def test_a_frame_that_lies_about_its_place_in_the_chain_is_not_believed() -> None:
    """Right key, right bytes, its own key as parent: it came to hang under itself, and the next eviction never ended."""
    shared = MemoryMedium()
    bench = make_bench(dram=8, shared=shared)
    keys = chain(1, 2)
    bench.save(keys)
    bench.empty_dram()
    name = bench.store.geometry.addresses(keys)[1]
    value = bytearray(shared.values[name])
    made = FrameHeader.parse(memoryview(value))
    made._replace(parent=made.key).pack_into(memoryview(value))
    shared.values[name] = bytes(value)
    assert bench.load(keys) == 1
    assert bench.store.explain("r")[1].reason is Reason.SUM_FAILED
    bench.save(chain(2, 8))
    bench.idle()


def test_a_tier_whose_reads_hang_delays_no_request_after_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing failed, so nothing was degraded: every request waited to its deadline, and took more of DRAM with it."""
    monkeypatch.setattr("kvtier.tier.lower.SILENT_SECONDS", 0.05)
    stuck = Stuck("read")
    stuck.active = False
    bench = make_bench(nvme=tmp_path / "n", nvme_fault=stuck)
    keys, other = chain(1, 3), chain(2, 3)
    bench.save(keys)
    bench.save(other)
    bench.empty_dram()
    stuck.active = True
    first = bench.store.match("first", keys)
    assert first.pending
    reading = threading.Thread(target=bench.workers[1].run_one, daemon=True)
    reading.start()
    assert stuck.entered.wait(10)
    time.sleep(0.1)
    for request, wanted in (("same", keys), ("other", other)):
        match = bench.store.match(request, wanted)
        assert not match.pending
        assert match.blocks[0].reason is Reason.TIER_DEGRADED
        match.release()
    assert "not returned" in bench.store.health()["nvme"]
    stuck.release()
    reading.join(10)
    assert bench.store.health()["nvme"] == "ok"
    first.release()
    assert bench.load(keys, "after") == 3
    assert bench.load(other, "after too") == 3


@pytest.mark.parametrize(("codec", "auth_key"), [("raw", None), ("shuffle+lz4", None), ("raw", b"k" * 32)])
def test_blocks_from_a_tier_with_a_codec_or_a_key_of_its_own_prove_in_the_tier_above(
    tmp_path: Path, codec: str, auth_key: bytes | None
) -> None:
    """Their headers went on to NVMe as they had come: another codec, length and sum, so that none proved there."""
    shared = MemoryMedium()
    shared.auth_key = auth_key
    bench = make_bench(nvme=tmp_path / "n", shared=shared, codec=codec)
    keys = chain(1, 4)
    bench.save(keys)
    bench.empty_dram()
    assert bench.store.empty("nvme") == 4
    assert bench.load(keys) == 4
    assert [block.tier for block in bench.store.explain("r")] == ["shared"] * 4
    bench.empty_dram()
    assert bench.load(keys, "again") == 4
    assert [block.tier for block in bench.store.explain("again")] == ["nvme"] * 4
    assert bench.metrics.value("kvtier_tier_sum_failures_total", tier="nvme") == 0


def test_an_index_that_is_full_loses_no_more_blocks_than_one_batch(tmp_path: Path) -> None:
    """Each save evicted as many blocks as it had, whose slots then could not be freed: in the end nothing was left."""
    fault = Faulty("commit", error=MediumFull("ordered"))
    fault.active = False
    bench = make_bench(nvme=tmp_path / "n", nvme_fault=fault)
    tier = bench.tiers[0]
    for number in range(tier.counts()["free"] // 4):
        bench.save(chain(number, 4))
    full = tier.counts()["ready"]
    fault.active = True
    for number in range(100, 105):
        bench.save(chain(number, 4))
    assert tier.counts()["ready"] >= full - 4
    tier.degrade("for another reason")
    revived(bench)  # although nothing can be deleted: what is there can be read
    fault.active = False
    bench.save(chain(200, 4))
    assert tier.counts() == {"free": 0, "writing": 0, "ready": full, "retiring": 0}
    bench.idle()
