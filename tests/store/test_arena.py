"""DRAM's slots: what may be taken, and in what order."""

from __future__ import annotations

from pathlib import Path

from kvtier.config import WriteMode

from .builders import chain, make_bench


def test_a_save_takes_every_clean_slot_there_is(tmp_path: Path) -> None:
    """Where one slot too few was clean, half of what was asked for was tried: blocks were dropped beside clean slots."""
    bench = make_bench(dram=16, nvme=tmp_path / "n", nvme_write=WriteMode.BACK)
    for number in range(1, 9):
        bench.save(chain(number, 2))
    clean = bench.arena.pool.places([a for n in (1, 2, 3) for a in bench.store.geometry.addresses(chain(n, 2))])
    for slot in range(16):
        bench.arena.owed[slot] = slot not in clean
    slots, gone = bench.arena.take(8, 200.0)
    assert (len(slots), len(gone)) == (6, 6)
    bench.arena.pool.release(slots, 200.0)
