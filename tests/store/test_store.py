"""The life of a block: saved, found, loaded, demoted, explained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.abc.store import Found, Hints, Reason, SlotRange
from kvtier.config import WriteMode
from kvtier.errors import MediumFull
from kvtier.key import Address
from kvtier.pool import Slot
from kvtier.storage_backends.memory import MemoryMedium
from kvtier.store import demotion
from kvtier.testing.faults import Faulty, wrapped

from .builders import chain, make_bench, span


def test_saved_blocks_come_back_from_dram() -> None:
    bench = make_bench()
    keys = chain(1, 5)
    assert all(outcome.done for outcome in bench.save(keys).result(0))
    assert bench.load(keys) == 5
    assert [block.tier for block in bench.store.explain("r")] == ["dram"] * 5


def test_saving_a_present_block_is_a_no_op() -> None:
    bench = make_bench()
    bench.save(chain(1, 3))
    again = bench.save(chain(1, 3)).result(0)
    assert [outcome.nbytes for outcome in again] == [0, 0, 0]
    assert bench.arena.pool.ready == 3


def test_a_block_is_invisible_until_its_copy_is_whole() -> None:
    bench = make_bench()
    keys = chain(1, 2)
    transfer = bench.store.save(keys, SlotRange(bench.memory, [0, 1]))
    assert bench.store.match("r", keys).hits == 0
    bench.store.forget("r")
    bench.turn()
    assert transfer.done()
    assert bench.match(keys).hits == 2


def test_what_was_never_stored_says_so() -> None:
    bench = make_bench()
    bench.save(chain(1, 2))
    match = bench.match(span(list(range(1, 64))))
    assert [block.reason for block in match.blocks] == [Reason.NEVER_STORED, Reason.BEHIND_A_MISS, Reason.BEHIND_A_MISS]


def test_asking_again_is_one_match_one_lease_one_count() -> None:
    bench = make_bench()
    keys = chain(1, 4)
    bench.save(keys)
    first = bench.store.match("r", keys)
    assert all(bench.store.match("r", keys) is first for _ in range(5))
    assert bench.arena.pool.referenced == 4
    assert bench.metrics.value("kvtier_tier_hits_total", tier="dram") == 4
    bench.store.forget("r")
    bench.store.forget("r")
    first.release()
    bench.idle()
    assert bench.arena.pool.referenced == 0


def test_leased_blocks_survive_pressure() -> None:
    bench = make_bench(dram=8)
    keys = chain(1, 4)
    bench.save(keys)
    match = bench.match(keys)
    for other in range(2, 8):
        bench.save(chain(other, 4))
    assert match.hits == 4
    transfer = bench.store.load(match, SlotRange(bench.memory, range(4)))
    bench.turn()
    assert all(outcome.done for outcome in transfer.result(0))


def test_a_full_dram_without_lower_tiers_evicts_tails_first() -> None:
    bench = make_bench(dram=8)
    bench.save(chain(1, 6))
    bench.clock.advance(1)
    bench.save(chain(2, 6))
    assert bench.match(chain(1, 6), "old").hits == 2
    assert [block.reason for block in bench.store.explain("old")][2] is Reason.EVICTED


@pytest.mark.parametrize("where", ["nvme", "shared"])
def test_blocks_written_through_come_back_when_dram_has_lost_them(tmp_path: Path, where: str) -> None:
    bench = make_bench(nvme=tmp_path / "n") if where == "nvme" else make_bench(shared=MemoryMedium())
    keys = chain(1, 6)
    bench.save(keys)
    bench.empty_dram()
    assert bench.arena.pool.ready == 0
    match = bench.store.match("r", keys)
    assert match.pending
    assert {block.found for block in match.blocks} == {Found.PENDING}
    assert bench.load(keys) == 6
    assert [block.tier for block in bench.store.explain("r")] == [where] * 6
    assert bench.load(keys, "again") == 6
    assert [block.tier for block in bench.store.explain("again")] == ["dram"] * 6


def test_nvme_outlives_the_process(tmp_path: Path) -> None:
    keys = chain(1, 6)
    first = make_bench(nvme=tmp_path / "n")
    first.save(keys)
    first.store.close()
    second = make_bench(nvme=tmp_path / "n")
    assert second.load(keys) == 6
    second.store.close()


def test_back_is_written_when_the_slot_is_wanted_and_at_drain(tmp_path: Path) -> None:
    bench = make_bench(dram=16, nvme=tmp_path / "n", nvme_write=WriteMode.BACK)
    nvme = bench.tiers[0].medium
    bench.save(chain(1, 4))
    assert nvme.bytes_written == 0
    bench.save(chain(2, 11))
    assert nvme.bytes_written > 0, "the reserve fell under its low mark"
    before = nvme.bytes_written
    while not bench.store.drain(0.0):
        assert bench.turn(), "what is not drained yet is queued"
    assert nvme.bytes_written > before
    assert bench.arena.owing_count == 0
    bench.idle()


def test_the_reserve_is_restored_a_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once is done under the store's lock, which a scheduler waits for."""
    monkeypatch.setattr(demotion, "MOST_OFFERED", 3)
    bench = make_bench(dram=64, nvme=tmp_path / "n", nvme_write=WriteMode.BACK)
    offered, coldest = [], bench.arena.coldest_owing

    def noted(count: int, now: float) -> list[Slot]:
        offered.append(count)
        return coldest(count, now)

    monkeypatch.setattr(bench.arena, "coldest_owing", noted)
    for number in range(16):
        assert all(outcome.done for outcome in bench.save(chain(number, 8)).result(0)), "there is room all the same"
    assert max(offered) <= 8, "what came in, but for the mark itself"
    assert len(offered) > 8
    bench.idle()


def test_selective_is_written_at_the_second_use() -> None:
    shared = MemoryMedium()
    bench = make_bench(shared=shared, shared_write=WriteMode.SELECTIVE)
    keys = chain(1, 4)
    bench.save(keys)
    assert shared.bytes_written == 0
    bench.load(span([1, *range(1, 16 * 2)]))
    assert sum(1 for _ in shared.scan()) == 2, "only what the later match reached"


def test_a_save_that_finds_no_room_is_dropped_and_said() -> None:
    bench = make_bench(dram=4)
    bench.save(chain(1, 2))
    held = bench.match(chain(1, 2), "held")
    outcomes = bench.save(chain(2, 4)).result(0)
    assert [outcome.done for outcome in outcomes] == [True, True, False, False]
    assert "DRAM" in outcomes[2].detail
    held.release()
    match = bench.match(chain(2, 4), "other")
    assert [block.reason for block in match.blocks][2] is Reason.SAVE_DROPPED


def test_a_corrupt_block_is_a_miss_and_stays_one_until_saved_again() -> None:
    shared = MemoryMedium()
    bench = make_bench(shared=shared)
    keys = chain(1, 4)
    bench.save(keys)
    bench.empty_dram()
    name = bench.store.geometry.addresses(keys)[2]
    value = bytearray(shared.values[name])
    value[-1] ^= 1
    shared.values[name] = bytes(value)
    assert bench.load(keys) == 2
    assert [block.reason for block in bench.store.explain("r")][2] is Reason.SUM_FAILED
    assert bench.load(keys, "again") == 2
    bench.save(keys)
    assert bench.load(keys, "healed") == 4


def test_a_flipped_bit_in_dram_is_never_served() -> None:
    bench = make_bench()
    keys = chain(1, 4)
    bench.save(keys)
    slot = bench.arena.pool.slot(bench.store.geometry.addresses(keys)[1])
    assert slot is not None
    view = bench.arena.medium.view(slot)
    assert view is not None
    view[7] ^= 1
    assert bench.load(keys) == 3, "the transfer says which block failed"
    assert bench.match(keys, "next").hits == 1
    bench.store.forget("next")
    assert bench.arena.pool.retiring == 1


def test_no_load_finds_nothing_and_says_so() -> None:
    bench = make_bench()
    keys = chain(1, 3)
    bench.save(keys)
    assert bench.store.match("r", keys, hints=Hints(no_load=True)).hits == 0
    assert bench.store.explain("r")[0].reason is Reason.NO_LOAD


def test_dropped_blocks_are_gone_everywhere_for_the_reason_given(tmp_path: Path) -> None:
    shared = MemoryMedium()
    bench = make_bench(nvme=tmp_path / "n", shared=shared)
    keys = chain(1, 4)
    bench.save(keys)
    bench.store.drop(keys, Reason.CLEARED)
    assert bench.match(keys).hits == 0
    assert bench.store.explain("r")[0].reason is Reason.CLEARED
    bench.turn()
    assert not list(shared.scan())
    bench.store.forget("r")
    bench.idle()


def test_a_use_refreshes_the_prefix_that_the_engine_itself_has() -> None:
    bench = make_bench(dram=8)
    keys = chain(1, 4)
    bench.save(keys)
    bench.save(chain(2, 4))
    bench.clock.advance(1)
    bench.match(keys, "r", start=4).release()
    bench.save(chain(3, 4))
    assert bench.match(keys, "after").hits == 4, "the other chain was colder"


@pytest.mark.parametrize("codec", ["raw", "shuffle+lz4"])
def test_codecs_give_back_the_same_bytes(codec: str) -> None:
    bench = make_bench(shared=MemoryMedium(), codec=codec)
    keys = chain(1, 3)
    bench.save(keys)
    bench.empty_dram()
    assert bench.load(keys) == 3


def test_gauges_say_what_is_held_now(tmp_path: Path) -> None:
    bench = make_bench(nvme=tmp_path)
    bench.save(chain(1, 3))
    bench.empty_dram()
    match = bench.store.match("r", chain(1, 3))
    bench.store.stats()
    held = {"kvtier_tier_matches": 1.0, "kvtier_tier_leased_blocks": 3.0}
    assert {name: bench.metrics.value(name, tier="dram") for name in held} == held
    assert bench.metrics.value("kvtier_tier_queue_depth", tier="nvme", kind="load") == 3.0
    assert bench.metrics.value("kvtier_tier_blocks", tier="nvme", state="ready") == 3.0
    bench.turn()
    match.release()
    bench.idle()
    assert [bench.metrics.value(name, tier="dram") for name in held] == [0.0, 0.0]
    assert bench.metrics.value("kvtier_tier_queue_depth", tier="nvme", kind="load") == 0.0


def test_a_hit_pushes_back_the_expiry_of_its_whole_prefix_but_not_at_every_hit() -> None:
    class Counting(MemoryMedium):
        touched: list[int] = []  # noqa: RUF012 - of this one medium

        def touch(self, names: Sequence[Address]) -> None:
            self.touched.append(len(names))

    shared = Counting()
    bench = make_bench(shared=shared)
    keys = chain(1, 4)
    bench.save(keys)
    bench.match(keys, "a", start=3).release()
    bench.match(keys, "b").release()
    bench.turn()
    assert shared.touched == [4], "what the engine itself has counts as used; a minute has not passed"
    bench.clock.advance(61)
    bench.match(keys, "c").release()
    bench.turn()
    assert shared.touched == [4, 4]


def test_clean_blocks_above_owed_ones_are_no_reserve(tmp_path: Path) -> None:
    """Chats whose first turns are written down and whose last ones are not: nothing could go, and saves were dropped."""
    bench = make_bench(dram=16, nvme=tmp_path / "n", nvme_write=WriteMode.BACK)
    for number in (1, 2):
        bench.save(chain(number, 7))
    for _ in range(10):
        bench.store.drain(0.0)
        bench.turn()
    assert bench.arena.owing_count == 0
    for number in (1, 2):
        bench.save(chain(number, 8))
    assert bench.arena.pool.free == 0
    outcomes = bench.save(chain(3, 4)).result(0)
    assert [outcome.done for outcome in outcomes] == [True] * 4
    bench.idle()


def test_a_tier_that_goes_on_failing_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Ten batches that do not fit: one line, and every block counted."""
    full = wrapped(MemoryMedium(), Faulty("write", error=MediumFull("no space left")))
    bench = make_bench(dram=64, shared=full)
    for number in range(10):
        bench.save(chain(number, 2))
    assert caplog.messages == ["shared: 1 block could not be written: no space left"]
    assert bench.metrics.value("kvtier_tier_saves_dropped_total", tier="shared", reason="no_room") == 20
    bench.idle()


def test_drain_does_not_wait_for_a_tier_that_is_out_of_use(tmp_path: Path) -> None:
    """A server that hangs is tried again and again: each shutdown waited for that to its deadline."""
    bench = make_bench(dram=8, nvme=tmp_path / "n", shared=MemoryMedium(), shared_write=WriteMode.BACK)
    bench.save(chain(1, 3))
    bench.tiers[1].degrade("it hangs")
    bench.store.keep()
    assert bench.workers[2].queued, "it is to be tried again"
    assert bench.store.drain(0.0)
    assert bench.arena.owing_count == 0
