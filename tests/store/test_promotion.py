"""The way up: who waits for blocks and for room, how long, and in which order."""

from __future__ import annotations

from pathlib import Path

from kvtier.abc.store import Reason, SlotRange
from kvtier.config import WriteMode

from .builders import Bench, chain, make_bench


def test_a_pending_match_ends_at_its_deadline(tmp_path: Path) -> None:
    bench = make_bench(nvme=tmp_path / "n")
    keys = chain(1, 4)
    bench.save(keys)
    bench.empty_dram()
    match = bench.store.match("r", keys)
    assert match.pending
    bench.clock.advance(10)
    assert not match.pending
    assert match.hits == 0
    assert match.blocks[0].reason is Reason.DEADLINE
    bench.turn()  # the late answer arrives: it is kept, and nothing is left over
    bench.store.forget("r")
    assert bench.load(keys, "next") == 4


def test_a_request_takes_at_most_half_of_dram_and_others_wait_their_turn(tmp_path: Path) -> None:
    bench = make_bench(dram=8, nvme=tmp_path / "n")
    long, short = chain(1, 6), chain(2, 3)
    bench.save(long)
    bench.save(short)
    bench.empty_dram()
    first = bench.store.match("first", long)
    second = bench.store.match("second", short)
    assert first.pending and second.pending
    bench.turn()
    assert first.hits == 4
    assert [block.reason for block in first.blocks][4] is Reason.NO_ROOM
    assert second.pending, "its turn comes when the first is scheduled"
    transfer = bench.store.load(first, SlotRange(bench.memory, range(4)))
    bench.turn()
    assert transfer.done()
    bench.turn()
    assert not second.pending and second.hits == 3
    second.release()
    bench.idle()


def test_two_requests_for_one_block_read_it_once(tmp_path: Path) -> None:
    bench = make_bench(nvme=tmp_path / "n")
    keys = chain(1, 3)
    bench.save(keys)
    bench.empty_dram()
    first, second = bench.store.match("a", keys), bench.store.match("b", keys)
    bench.turn()
    assert first.hits == second.hits == 3
    assert bench.metrics.value("kvtier_tier_read_bytes_total", tier="nvme") == 3 * bench.store.geometry.block_bytes
    first.release()
    second.release()
    bench.idle()


def test_prefetch_brings_blocks_up_and_holds_nothing(tmp_path: Path) -> None:
    bench = make_bench(nvme=tmp_path / "n")
    keys = chain(1, 4)
    bench.save(keys)
    bench.empty_dram()
    bench.store.prefetch(keys)
    bench.turn()
    bench.idle()
    assert bench.load(keys) == 4
    assert [block.tier for block in bench.store.explain("r")] == ["dram"] * 4


def test_a_block_dropped_on_its_way_up_does_not_arrive(tmp_path: Path) -> None:
    bench = make_bench(nvme=tmp_path / "n")
    keys = chain(1, 4)
    bench.save(keys)
    bench.empty_dram()
    match = bench.store.match("r", keys)
    bench.store.drop(keys, Reason.CLEARED)
    bench.turn()
    assert not match.pending and match.hits == 0
    bench.store.forget("r")
    bench.idle()
    assert bench.arena.pool.ready == 0


def full_of_owed_blocks(tmp_path: Path) -> Bench:
    """Six blocks of chain 1 in NVMe alone, and DRAM full of blocks that NVMe lacks and has been offered."""
    bench = make_bench(dram=16, nvme=tmp_path / "n", nvme_write=WriteMode.BACK)
    bench.save(chain(1, 6))
    for _ in range(10):
        bench.store.drain(0.0)
        bench.turn()
    bench.empty_dram()
    for number in range(2, 6):
        bench.store.save(chain(number, 4), SlotRange(bench.memory, range(4)))
        bench.workers[0].run_one()
    assert bench.arena.pool.free == 0 and bench.arena.owing_count == 16
    return bench


def test_a_promotion_waits_for_room_that_a_demotion_makes(tmp_path: Path) -> None:
    bench = full_of_owed_blocks(tmp_path)
    match = bench.store.match("r", chain(1, 6))
    assert match.pending, "what is owed will be clean in a moment"
    bench.turn()
    match = bench.store.match("r", chain(1, 6))
    assert bench.turn() > 0, "now it is read"
    assert match.hits == 6
    match.release()
    bench.idle()


def test_who_waited_in_vain_still_gets_what_dram_has(tmp_path: Path) -> None:
    bench = full_of_owed_blocks(tmp_path)
    first = bench.store.match("first", chain(1, 6))
    second = bench.store.match("second", chain(2, 4))
    assert first.pending and second.pending
    bench.clock.advance(10)
    assert not first.pending and first.hits == 0
    assert not second.pending and second.hits == 4, "its turn has come"
    first.release()
    second.release()
    bench.turn()
    bench.idle()


def test_the_wait_behind_other_requests_is_not_the_wait_for_blocks(tmp_path: Path) -> None:
    """Leases of requests that wait for HBM outlast the deadline: those behind them would be computed for nothing."""
    bench = make_bench(dram=16, nvme=tmp_path / "n")
    bench.save(chain(1, 8))
    bench.save(chain(2, 8))
    first, second = (bench.store.match(str(number), chain(number, 8)) for number in (1, 2))
    assert first.hits == 8 and second.pending
    bench.clock.advance(10)
    bench.store.keep()
    assert second.pending
    first.release()
    assert not second.pending and second.hits == 8
    third = bench.store.match("3", chain(1, 8))
    assert third.pending
    bench.clock.advance(30)
    assert not third.pending, "no wait is for ever"
    second.release()
    third.release()
    bench.idle()


def test_room_that_comes_free_goes_to_the_next_in_line_without_being_asked(tmp_path: Path) -> None:
    bench = make_bench(dram=8, nvme=tmp_path / "n")
    long, short = chain(1, 4), chain(2, 3)
    bench.save(long)
    bench.save(short)
    bench.empty_dram()
    first, second = bench.store.match("first", long), bench.store.match("second", short)
    bench.turn()
    first.release()
    bench.turn()
    assert second.hits == 3, "nobody has asked for it again"
    second.release()
    bench.idle()
