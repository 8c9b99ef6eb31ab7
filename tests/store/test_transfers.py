"""Transfers that are interrupted: whoever waits gets an answer, and no slot is used by two."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvtier.abc.medium import Iovec, Outcome
from kvtier.abc.store import Reason, SlotRange
from kvtier.key import Address
from kvtier.storage_backends.memory import MemoryMedium
from kvtier.transfer.workers import Urgency

from .builders import EngineMemory, chain, make_bench


class BrokenFence:
    def wait(self) -> None:
        raise RuntimeError("an illegal memory access was encountered")


class BrokenMemory(EngineMemory):
    """An engine's memory whose copies raise what is no ``MediumError``."""

    def view(self, slot: int) -> memoryview:
        raise RuntimeError("device lost")


@pytest.mark.parametrize("broken", ["fence", "memory"])
def test_a_load_that_raises_is_answered(broken: str) -> None:
    """Nobody caught it: the engine waited for the transfer for ever, and the blocks stayed leased."""
    bench = make_bench()
    keys = chain(1, 3)
    bench.save(keys)
    memory = BrokenMemory(3) if broken == "memory" else bench.memory
    fence = BrokenFence() if broken == "fence" else None
    transfer = bench.store.load(bench.match(keys), SlotRange(memory, range(3)), fence)
    bench.turn()
    assert [outcome.done for outcome in transfer.result(0)] == [False] * 3
    assert "RuntimeError" in transfer.result(0)[0].detail
    bench.idle()
    assert bench.load(keys, "again") == 3


@pytest.mark.parametrize("broken", ["fence", "memory"])
def test_a_save_that_raises_is_answered(broken: str) -> None:
    """Nobody caught it: the engine's slots were held for ever, and the blocks could never be saved again."""
    bench = make_bench()
    keys = chain(1, 3)
    memory = BrokenMemory(3) if broken == "memory" else bench.memory
    fence = BrokenFence() if broken == "fence" else None
    transfer = bench.store.save(keys, SlotRange(memory, range(3)), fence)
    bench.turn()
    assert [outcome.done for outcome in transfer.result(0)] == [False] * 3
    bench.idle()
    bench.save(keys)
    assert bench.load(keys) == 3


def test_a_save_that_is_taken_back_reads_nothing() -> None:
    """Its future said cancelled, and so that the slots may be reused; the copy was made all the same, of what came next."""
    bench = make_bench()
    keys = chain(1, 3)
    transfer = bench.store.save(keys, bench.source(keys))
    assert transfer.cancel()
    bench.memory.bytes[:] = 0xEE
    bench.turn()
    assert bench.load(keys) == 0
    bench.save(keys)
    assert bench.load(keys, "again") == 3


@pytest.mark.parametrize("end", ["close", "cancel"])
def test_transfers_that_are_queued_when_the_store_closes_are_answered(end: str) -> None:
    bench = make_bench()
    bench.save(chain(1, 3))
    memory = bench.memory
    load = bench.store.load(bench.match(chain(1, 3)), SlotRange(memory, range(3)))
    save = bench.store.save(chain(2, 3), SlotRange(memory, range(3)))
    if end == "cancel":
        assert load.cancel()
        assert save.cancel()
    bench.store.close()
    for transfer in (load, save):
        assert transfer.done()
        assert transfer.cancelled() or not any(outcome.done for outcome in transfer.result(0))
    closing = bench.metrics.value("kvtier_tier_saves_dropped_total", tier="dram", reason="closing")
    assert closing == (0 if end == "cancel" else 3), "what was taken back is not counted"
    bench.idle()


def test_what_a_full_queue_of_copies_into_dram_declines_is_counted_and_let_go() -> None:
    bench = make_bench()
    bench.workers[0]._most_saves = 1
    first = bench.store.save(chain(1, 3), bench.source(chain(1, 3)))
    (declined, *_) = bench.store.save(chain(2, 3), bench.source(chain(2, 3))).result(0)
    assert (declined.done, declined.detail) == (False, "the queue of saves was full")
    assert bench.metrics.value("kvtier_tier_saves_dropped_total", tier="dram", reason="queue_full") == 3
    bench.turn()
    assert first.done()
    bench.idle()


def test_a_block_dropped_while_it_is_saved_can_be_saved_again_at_once() -> None:
    """The end of the first save crossed out the second, which then was dropped without a word."""
    bench = make_bench()
    keys = chain(1, 2)
    source = bench.source(keys)
    first = bench.store.save(keys, source)
    bench.store.drop(keys, Reason.CLEARED)
    second = bench.store.save(keys, source)
    bench.turn()
    assert first.done()
    assert all(outcome.done for outcome in second.result(0))
    assert bench.load(keys) == 2


class Watched(MemoryMedium):
    """Calls back in the middle of a write."""

    during: Callable[[], None] | None = None

    def write(self, names: Sequence[Address], data: Sequence[Iovec]) -> list[Outcome]:
        if self.during is not None:
            self.during()
        return super().write(names, data)


def test_a_block_dropped_while_it_is_written_down_does_not_stay_below() -> None:
    """The tier took it after the drop: it was there for others, and for us after a restart."""
    shared = Watched()
    bench = make_bench(shared=shared)
    keys = chain(1, 4)

    def drop_and_delete() -> None:
        shared.during = None
        bench.store.drop(keys, Reason.CLEARED)
        assert bench.workers[1].run_one(), "another thread deletes before the write has ended"

    shared.during = drop_and_delete
    bench.save(keys)
    assert not shared.values
    assert not any(bench.tiers[0].holds(address) for address in bench.store.geometry.addresses(keys))
    bench.save(keys)
    assert len(shared.values) == 4
    bench.idle()


def test_what_a_full_queue_of_saves_declines_is_counted_and_let_go() -> None:
    shared = MemoryMedium()
    bench = make_bench(dram=16, shared=shared)
    bench.workers[1]._most_saves = 1
    bench.workers[1].submit(Urgency.SAVE, lambda: None)
    bench.store.save(chain(1, 4), bench.source(chain(1, 4)))
    bench.workers[0].run_one()
    assert bench.store.stats()["waiting"] == {"shared": 0}
    dropped = bench.metrics.value("kvtier_tier_saves_dropped_total", tier="shared", reason="queue_full")
    assert dropped == 4
    bench.turn()
    bench.idle()
