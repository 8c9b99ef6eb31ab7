"""Room on NVMe: what a budget buys, block sizes that change, and disks that are full."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from kvtier.abc.medium import Status
from kvtier.errors import CapacityError, MediumError, MediumFull
from kvtier.storage_backends import nvme_file
from kvtier.storage_backends.nvme_journal import NvmeJournal
from kvtier.testing.requirements import require_machine
from kvtier.transfer.copy import write_frames

from .nvme import BLOCK, MIB, RAW, demoted, opened, promoted
from .support import Batch


def test_blocks_of_other_sizes_are_given_back_when_all_is_cleared(tmp_path: Path) -> None:
    other = opened(tmp_path, block=50_000)
    demoted(other, Batch(3, 50_000), [0, 1, 2])
    other.close()
    medium = opened(tmp_path)
    assert medium.drop_others() > 150_000
    assert medium.drop_others() == 0
    assert [path.name for path in tmp_path.glob("slots-*.kvt")] == [medium._file.path.name]
    medium.close()
    other = opened(tmp_path, block=50_000)
    assert list(other.journal.load()) == []
    other.close()


def test_the_budget_is_what_the_file_system_counts(tmp_path: Path) -> None:
    """Four times the budget goes through; the directory never holds more than it."""
    capacity = 24 * MIB
    medium = opened(tmp_path, capacity)
    assert medium.slots * (BLOCK + 4096) > 0.8 * (capacity - 3 * MIB)
    batch = Batch(16, BLOCK)
    for start in range(0, 4 * medium.slots, 16):
        slots = [(start + i) % medium.slots for i in range(16)]
        medium.journal.commit([], slots)
        demoted(medium, batch, slots)
        assert medium.held_bytes() <= capacity
    for _ in range(50):
        medium.journal.touch([(slot, 9.0) for slot in range(medium.slots)])
        medium.journal.flush()
        assert medium.held_bytes() <= capacity
    medium.close()


def test_a_lowered_budget_applies_at_start(tmp_path: Path) -> None:
    medium = opened(tmp_path, 48 * MIB)
    slots = list(range(0, medium.slots - 1, 20))
    batch = Batch(len(slots), BLOCK)
    demoted(medium, batch, slots)
    assert medium.held_bytes() > 40 * MIB
    medium.close()
    smaller = opened(tmp_path, 20 * MIB)
    assert smaller.held_bytes() <= 20 * MIB
    rows = {row.address: row.slot for row in smaller.journal.load()}
    assert rows
    assert max(rows.values()) < smaller.slots
    kept = [i for i, name in enumerate(batch.names) if name in rows]
    status = promoted(smaller, batch, slots)
    assert all(status[i] is Status.DONE for i in kept)
    smaller.close()


def test_another_block_size_gets_room_as_it_needs_it_oldest_extents_first(tmp_path: Path) -> None:
    capacity = 32 * MIB
    first = opened(tmp_path, capacity)
    slots = list(range(0, first.slots, 10))
    batch = Batch(len(slots), BLOCK)
    for index, slot in enumerate(slots):
        demoted_one = [batch.rows(slots)[index]]
        assert write_frames(first, [slot], batch.sources[index : index + 1], batch.headers[index : index + 1], RAW)[
            0
        ].done
        first.journal.commit(demoted_one, [])
        first.journal.touch([(slot, float(slot))])
    first.close()
    second = opened(tmp_path, capacity, block=300_000)
    assert list(second.journal.load()) == []
    wide = Batch(8, 300_000, seed=5)
    for start in range(0, 32, 8):
        demoted(second, wide, list(range(start, start + 8)))
        assert second.held_bytes() <= capacity
    second.close()
    third = opened(tmp_path, capacity)
    survivors = sorted(row.slot for row in third.journal.load())
    assert survivors
    assert survivors != slots
    assert survivors == slots[-len(survivors) :]
    rows = {row.address: row.slot for row in third.journal.load()}
    status = promoted(third, batch, [rows.get(name, 0) for name in batch.names])
    assert status[-len(survivors) :] == [Status.DONE] * len(survivors)
    third.close()


def test_a_file_that_goes_while_bytes_are_counted_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a clear's copy of the epochs does, or the log of a database that is closed."""
    medium = opened(tmp_path)
    scandir, before = os.scandir, medium.held_bytes()
    (tmp_path / "epochs.new").write_bytes(bytes(4096))

    def meanwhile(path: Path) -> AbstractContextManager[list[os.DirEntry[str]]]:
        with scandir(path) as entries:
            found = list(entries)
        (tmp_path / "epochs.new").unlink()
        return nullcontext(found)

    monkeypatch.setattr(os, "scandir", meanwhile)
    assert medium.held_bytes() == before
    monkeypatch.undo()
    medium.close()


def test_too_much_or_too_little_capacity_is_refused_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"asked for 1024TiB, .* are available on its file system"):
        opened(tmp_path, 1 << 50)
    with pytest.raises(CapacityError, match="it needs"):
        opened(tmp_path, MIB)
    opened(tmp_path).close()


def test_a_full_disk_fails_blocks_and_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is within the disk at start; others fill the disk later."""

    def full(*arguments: object) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    medium = opened(tmp_path)
    batch = Batch(2, BLOCK)
    demoted(medium, batch, [0, 1])
    monkeypatch.setattr(nvme_file, "_fallocate", full)
    far = medium.slots - 1
    outcomes = write_frames(medium, [0, far], batch.sources, batch.headers, RAW)
    assert [outcome.status for outcome in outcomes] == [Status.DONE, Status.FULL]
    assert "No space left" in outcomes[1].detail
    assert promoted(medium, batch, [0, far]) == [Status.DONE, Status.ABSENT]
    medium.close()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "disk"
    mount.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount)], check=False)
    require_machine(mounted.returncode == 0, "the right to mount a small tmpfs")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_disk_that_others_really_fill(tiny_disk: Path) -> None:
    medium = opened(tiny_disk / "tier", 20 * MIB)
    batch = Batch(8, BLOCK)
    (tiny_disk / "other").write_bytes(bytes(14 * MIB))
    seen = set()
    for start in range(0, medium.slots - 8, 8):
        slots = list(range(start, start + 8))
        outcomes = write_frames(medium, slots, batch.sources, batch.headers, RAW)
        seen |= {outcome.status for outcome in outcomes}
        assert promoted(medium, batch, slots) == [
            Status.DONE if outcome.done else Status.ABSENT for outcome in outcomes
        ]
    assert seen == {Status.DONE, Status.FULL}
    medium.close()


def test_a_tier_that_cannot_commit_says_so(tmp_path: Path) -> None:
    medium = opened(tmp_path)
    batch = Batch(1, BLOCK)
    medium.journal._database.execute("PRAGMA query_only = 1")
    with pytest.raises(MediumError, match="NVMe index"):
        medium.journal.commit(batch.rows([0]), [])
    medium.journal._database.execute("PRAGMA query_only = 0")
    assert list(medium.journal.load()) == []
    medium.close()


def test_a_clear_that_a_full_disk_did_not_take_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database had it and the copy never got it, so that a database that was lost brought cleared blocks back."""
    journal = NvmeJournal(tmp_path / "index.sqlite", 8192)
    journal.raise_epochs({"narrow": 1}, {})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(MediumFull, match="No space left"):
            journal.raise_epochs({"wide": 2}, {"narrow": 2})
        assert journal.epochs() == {}, "whoever asks sees that it is still to be told"
        journal.seal()
        journal.close()
        journal = NvmeJournal(tmp_path / "index.sqlite", 8192)
        assert journal.epochs() == {"narrow": 1, "wide": 2}, "what the copy has kept does no harm"
        with pytest.raises(MediumFull, match="No space left"):
            journal.raise_epochs({"other": 3}, {})
    journal.raise_epochs({"other": 3}, {})
    assert journal.epochs() == {"narrow": 1, "wide": 2, "other": 3}
    journal.close()
    for part in tmp_path.glob("index.sqlite*"):
        part.unlink()
    again = NvmeJournal(tmp_path / "index.sqlite", 8192)
    assert again.epochs() == {"narrow": 1, "wide": 2, "other": 3}
    again.close()


def test_a_clear_outlives_a_database_that_lost_its_last_transactions(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    journal = NvmeJournal(path, 8192)
    journal.raise_epochs({"all": 1}, {})
    journal.seal()
    journal.close()
    before = path.read_bytes()
    journal = NvmeJournal(path, 8192)
    journal.raise_epochs({"all": 2}, {})
    journal.close()
    path.write_bytes(before)  # as after a power cut: the write-ahead log is not waited for
    journal = NvmeJournal(path, 8192)
    assert journal.fresh is False
    assert journal.epochs() == {"all": 2}
    journal.close()
    (tmp_path / "epochs.json").write_text("damaged")
    journal = NvmeJournal(path, 8192)
    assert journal.epochs() == {"all": 2}, "a copy is needed only where the database is not enough"
    journal.close()
