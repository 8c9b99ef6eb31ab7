"""After any number of lookups, aborts and failures every slot is free or evictable again, and nothing waits for ever."""

from __future__ import annotations

import gc
import random
import threading
from pathlib import Path

import pytest

from kvtier.abc.store import Match, SlotRange
from kvtier.config import WriteMode
from kvtier.connectors.bundled import BundledConnector
from kvtier.errors import MediumUnavailable
from kvtier.storage_backends.memory import MemoryMedium
from kvtier.testing.blocks import EngineMemory
from kvtier.testing.faults import Faulty
from tests.store.builders import Bench, chain, make_bench
from tests.support import until

from .support import Tiers, dram, nvme, prompt


def expect_all_of_dram(bench: Bench) -> None:
    """Nothing is held, and all of DRAM can be filled at once."""
    bench.turn()
    bench.idle()
    pool = bench.arena.pool
    assert pool.referenced == 0
    assert pool.free + pool.evictable == pool.capacity
    keys = chain(10_000, pool.capacity)
    transfer = bench.store.save(keys, SlotRange(EngineMemory(len(keys)), range(len(keys))))
    bench.turn()
    assert all(outcome.done for outcome in transfer.result(0))


def test_lookups_that_are_never_loaded_pin_nothing(seed: int) -> None:
    """The engine has the tokens already, the client goes, or it asks again, ten thousand times."""
    rng = random.Random(seed)
    shared = MemoryMedium()
    bench = make_bench(32, shared=shared)
    scheduler = BundledConnector(bench.store, 16, 64, 64).scheduler
    spans = [chain(number, 5) for number in range(8)]
    for span in spans:
        bench.save(span)
    for number in range(10_000):
        span, name = rng.choice(spans), f"r{number}"
        start = rng.choice([0, 0, 2, 5])
        for _ in range(rng.choice([1, 1, 3])):  # "ask later", and the engine does
            scheduler.get_num_new_matched_tokens(name, span, start)
            bench.turn(rng.randrange(3))
        if rng.random() < 0.5:
            scheduler.update_state_after_alloc(name, (), 0)  # it has them itself
        scheduler.request_finished(name)
    print(f"seed {seed}: {bench.metrics.value('kvtier_tier_hits_total', tier='shared'):.0f} blocks came up")
    expect_all_of_dram(bench)


@pytest.mark.parametrize("how", ["items", "call"])
def test_a_thousand_failed_writes_leave_no_buffer_behind(tmp_path: Path, how: str) -> None:
    fault = Faulty("write", error=MediumUnavailable("ordered") if how == "call" else None)
    bench = make_bench(32, nvme=tmp_path, nvme_fault=fault)
    tier = bench.tiers[0]
    before = tier.counts()
    for number in range(250):
        bench.save(chain(number, 4))
        tier.degraded = None  # as if it had been found well at once: the next write is tried again
    bench.turn()
    reason = "tier_degraded" if how == "call" else "write_failed"
    assert bench.metrics.value("kvtier_tier_saves_dropped_total", tier="nvme", reason=reason) == 1000
    assert tier.counts() == before
    assert bench.metrics.value("kvtier_tier_written_bytes_total", tier="nvme") == 0
    assert bench.store.stats()["waiting"] == {"nvme": 0}
    assert bench.hand.queued == 0
    fault.active = False
    expect_all_of_dram(bench)
    bench.store.drain(0.0)
    bench.turn()
    assert bench.tiers[0].counts()["ready"] > 0, "and it is written to again"
    bench.store.close()


def test_garbage_that_is_collected_under_the_stores_lock_does_not_lock_it_again() -> None:
    """Matches and transfers, in cycles, die while the thread that collects them holds the lock."""
    bench = make_bench()
    keys = chain(1, 4)
    bench.save(keys)

    def collect() -> None:
        for number in range(50):
            cycle: list[object] = [bench.store.match(f"r{number}", keys)]
            cycle += [bench.store.save(chain(2, 2), SlotRange(bench.memory, range(2))), cycle]
            bench.store.forget(f"r{number}")
            del cycle
        with bench.store._lock:
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive(), "it waits for a lock that it holds"
    expect_all_of_dram(bench)


@pytest.mark.parametrize("where", ["nvme", "shared"])
def test_requests_that_go_while_blocks_come_up_do_not_wear_promotion_out(tmp_path: Path, where: str, seed: int) -> None:
    """Five hundred rounds in which every request goes half-way; the next one is served as the first would have been."""
    rng = random.Random(seed)
    bench = (
        make_bench(16, nvme=tmp_path, nvme_write=WriteMode.THROUGH)
        if where == "nvme"
        else make_bench(16, shared=MemoryMedium())
    )
    spans = [chain(number, 4) for number in range(6)]
    for span in spans:
        bench.save(span)
    bench.empty_dram()
    for number in range(500):
        names = [f"r{number}.{each}" for each in range(3)]
        live: list[Match] = []
        for name in names:
            live.append(bench.store.match(name, rng.choice(spans)))
            bench.turn(rng.randrange(3))
        bench.store.prefetch(rng.choice(spans))
        for name, match in zip(names, live, strict=True):
            match.release() if rng.random() < 0.5 else bench.store.forget(name)
            bench.turn(rng.randrange(2))
        bench.empty_dram()
    bench.turn()
    bench.idle()
    assert bench.metrics.value("kvtier_tier_queue_depth", tier=where, kind="load") == 0
    bench.empty_dram()
    assert bench.load(spans[0]) == 4
    assert [block.tier for block in bench.store.explain("r")] == [where] * 4
    expect_all_of_dram(bench)


def test_long_loads_through_little_dram_all_end(tmp_path: Path) -> None:
    """Eight requests of ten blocks each through six slots, at once: each is cut to its share, and none starves another."""
    spans = [prompt(number, 10) for number in range(8)]
    with Tiers(dram(128), nvme(tmp_path)) as roomy:
        for span in spans:
            roomy.save(span)
        roomy.only_below()
    with Tiers(dram(6), nvme(tmp_path)) as tiers:
        came: list[int] = []
        threads = [threading.Thread(target=lambda span=span: came.append(tiers.load(span))) for span in spans]
        for thread in threads:
            thread.start()
        until(lambda: len(came) == 8, 10.0, "all requests have an answer")
        for thread in threads:
            thread.join()
        print(f"blocks that each was given: {came}")
        assert all(0 <= count <= 3 for count in came), "at most half of DRAM"
        assert sum(came) > 8
        assert tiers.count("read_blocks", "nvme") <= 8 * 3, "nothing is read again and again"
        tiers.expect_idle()


def test_who_waits_for_room_does_no_work_meanwhile(tmp_path: Path) -> None:
    bench = make_bench(dram=6, nvme=tmp_path)
    first, second = chain(1, 3), chain(2, 3)
    bench.save(first)
    bench.save(second)
    bench.empty_dram()
    holding, waiting = bench.store.match("first", first), bench.store.match("second", second)
    bench.turn()
    assert holding.hits == 3
    for _ in range(100):
        assert bench.store.match("second", second) is waiting
        assert waiting.pending
        assert bench.turn() == 0, "asking again sets nothing in motion"
    holding.release()
    bench.turn()
    assert not waiting.pending
    assert waiting.hits == 3
    waiting.release()
    expect_all_of_dram(bench)


def test_who_leaves_the_line_holds_up_nobody_behind(tmp_path: Path) -> None:
    """The client of the next in line goes while it waits for room: the one behind it has the next turn."""
    bench = make_bench(dram=6, nvme=tmp_path)
    spans = [chain(number, 3) for number in range(3)]
    for span in spans:
        bench.save(span)
    bench.empty_dram()
    holding, leaving, waiting = (bench.store.match(f"r{number}", span) for number, span in enumerate(spans))
    bench.turn()
    assert holding.hits == 3
    leaving.release()
    holding.release()
    bench.turn()
    assert not waiting.pending
    assert waiting.hits == 3
    waiting.release()
    expect_all_of_dram(bench)
