"""NVMe is killed, damaged, filled, shrunk and refused direct I/O: hits or misses, never an exception, never over its budget."""

from __future__ import annotations

import errno
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.abc.medium import Iovec
from kvtier.key import Identity
from kvtier.layout import CacheGroup, GroupKind, Layout
from kvtier.storage_backends import nvme_file
from kvtier.testing.blocks import IDENTITY
from tests.support import ROOT, until

from .support import PAGE, Tiers, dram, nvme, prompt

MIB = 1 << 20
BLOCKS = 6
WRITER = """
import sys
from tests.symptoms.support import Tiers, dram, nvme, prompt
with Tiers(dram(64), nvme(sys.argv[1], sys.argv[2])) as tiers:
    for number in range(1_000_000):
        tiers.save(prompt(number, int(sys.argv[3])))
        if number % 4 == 3:
            assert tiers.store.drain(20.0)
            print(number, flush=True)
"""


def on_disk(directory: Path) -> int:
    """What the file system counts."""
    return sum(entry.stat().st_blocks * 512 for entry in directory.iterdir())


# -- restarts


@pytest.mark.parametrize("reported", [3, 59])
def test_a_kill_in_the_middle_of_writing_loses_only_what_was_not_written(tmp_path: Path, reported: int) -> None:
    """What was drained is hit after the restart, what was torn is not, and the index says what the disk has."""
    command = [sys.executable, "-c", WRITER, str(tmp_path), "16MiB", str(BLOCKS)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) >= reported:
                break
        writer.send_signal(signal.SIGKILL)
    with Tiers(dram(64), nvme(tmp_path, "16MiB")) as tiers:
        ready = tiers.store.held("nvme")
        assert ready >= (reported + 1) * BLOCKS
        loaded = [tiers.load(prompt(number, BLOCKS)) for number in range(reported + 9)]
        assert loaded[: reported + 1] == [BLOCKS] * (reported + 1)
        assert ready >= sum(loaded)
        assert on_disk(tmp_path) <= 16 * MIB
        tiers.expect_idle()
        for number in range(1000, 1010):
            tiers.save(prompt(number, BLOCKS))
            assert tiers.store.drain(20.0)
        tiers.only_below()
        assert all(tiers.load(prompt(number, BLOCKS)) == BLOCKS for number in range(1000, 1010))


def test_a_smaller_budget_holds_from_the_start(tmp_path: Path) -> None:
    """What remains is hit; the directory is within the new budget before anything is written."""
    with Tiers(dram(64), nvme(tmp_path, "16MiB")) as tiers:
        for number in range(200):
            tiers.save(prompt(number, BLOCKS))
            assert tiers.store.drain(20.0)
        assert tiers.store.held("nvme") * 2 * PAGE > 6 * MIB
    assert on_disk(tmp_path) > 8 * MIB
    with Tiers(dram(64), nvme(tmp_path, "8MiB")) as tiers:
        assert on_disk(tmp_path) <= 8 * MIB
        kept = tiers.store.held("nvme")
        assert 0 < kept * 2 * PAGE <= 8 * MIB
        tiers.save(prompt(1000, BLOCKS))
        tiers.only_below()
        assert tiers.load(prompt(1000, BLOCKS)) == BLOCKS
        assert sum(tiers.load(prompt(number, BLOCKS)) for number in range(200)) > 0
        tiers.expect_idle()
        assert on_disk(tmp_path) <= 8 * MIB


# -- the budget


def test_four_writers_never_exceed_the_budget(tmp_path: Path) -> None:
    """Ten times the budget goes through; what the file system counts is watched all the while."""
    budget, most = 6 * MIB, 0
    with Tiers(dram(96), nvme(tmp_path, "6MiB")) as tiers:
        done = threading.Event()

        def watch() -> None:
            nonlocal most
            while not done.wait(0.002):
                most = max(most, on_disk(tmp_path))

        def write(writer: int) -> None:
            for number in range(260):
                tiers.save(prompt(1000 * writer + number, 8))

        threads = [threading.Thread(target=watch), *(threading.Thread(target=write, args=(n,)) for n in range(4))]
        for thread in threads:
            thread.start()
        for thread in threads[1:]:
            thread.join()
        written = 0
        while written < 10 * budget:
            tiers.save(prompt(10_000 + written, 64))
            assert tiers.store.drain(20.0)
            written = tiers.count("written_blocks", "nvme") * 2 * PAGE
        done.set()
        threads[0].join()
        print(f"{written / MIB:.0f} MiB were written; the directory never had more than {most / MIB:.2f} MiB")
        assert 0.5 * budget < most <= budget
        assert tiers.count("evictions", "nvme", reason="evicted") > 0
        tiers.expect_idle()


# -- files that others touch


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def locked(path: Path) -> None:
    path.chmod(0)


def scribbled(path: Path) -> None:
    """Header pages and payloads, but never both of one block."""
    with path.open("r+b") as file:
        for start in range(0, path.stat().st_size, 3 * PAGE):
            file.seek(start + 100)
            file.write(b"not what was there")


@pytest.mark.parametrize("which", ["slots-*", "index.sqlite"])
@pytest.mark.parametrize("damage", [Path.unlink, truncated, emptied, locked, scribbled])
def test_files_that_vanish_or_rot_under_a_live_tier_are_misses(
    tmp_path: Path, damage: Callable[[Path], None], which: str, seed: int
) -> None:
    """A mixed load before, during and after; then a restart on what is left of the directory."""
    rng = random.Random(seed)

    def load_some(tiers: Tiers, rounds: int) -> int:
        came = 0
        for _ in range(rounds):
            span = prompt(rng.randrange(20), BLOCKS)
            came += tiers.load(span)
            if rng.random() < 0.4:
                tiers.save(span)
            if rng.random() < 0.2:
                tiers.store.drain(5.0)
                tiers.store.empty("dram")
        return came

    with Tiers(dram(64), nvme(tmp_path)) as tiers:
        for number in range(20):
            tiers.save(prompt(number, BLOCKS))
        tiers.only_below()
        assert load_some(tiers, 20) > 0
        for path in list(tmp_path.glob(which)):
            damage(path)
        load_some(tiers, 60)
        assert tiers.store.check_integrity() == []
        assert tiers.store.stats()["matches"] == 0
        tiers.save(prompt(500, 2))
        assert tiers.load(prompt(500, 2)) == 2, "DRAM goes on whatever lies below"
    for path in tmp_path.iterdir():
        path.chmod(0o600)
    with Tiers(dram(64), nvme(tmp_path)) as tiers:
        load_some(tiers, 40)
        tiers.save(prompt(501, BLOCKS))
        tiers.only_below()
        assert tiers.load(prompt(501, BLOCKS)) == BLOCKS
        tiers.expect_idle()


def test_what_could_not_be_read_is_not_tried_again(tmp_path: Path) -> None:
    with Tiers(dram(64), nvme(tmp_path)) as tiers:
        tiers.save(prompt(1, BLOCKS))
        tiers.only_below()
        for path in tmp_path.glob("slots-*"):
            emptied(path)
        assert tiers.load(prompt(1, BLOCKS)) == 0
        failed = tiers.count("failures", "nvme", verb="read")
        assert failed == BLOCKS
        assert tiers.store.held("nvme") == 0, "the books say what there is"
        assert tiers.load(prompt(1, BLOCKS)) == 0
        assert tiers.count("failures", "nvme", verb="read") == failed
        tiers.expect_idle()


def test_an_index_that_somebody_locks_costs_no_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than the tier waits for it."""
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *given, **named: connect(*given, **{**named, "timeout": 0.05}))
    with Tiers(dram(64), nvme(tmp_path)) as tiers:
        tiers.save(prompt(1, BLOCKS))
        tiers.only_below()
        other = sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        tiers.save(prompt(2, BLOCKS))
        until(lambda: tiers.count("failures", "nvme", verb="write") > 0, 10.0, "it could not be written")
        assert tiers.load(prompt(2, BLOCKS)) == BLOCKS, "from DRAM"
        other.execute("ROLLBACK")
        other.close()
        until(lambda: tiers.store.health()["nvme"] == "ok", 20.0, "the tier is used again")
        tiers.save(prompt(3, BLOCKS))
        tiers.only_below()
        assert tiers.load(prompt(3, BLOCKS)) == BLOCKS
        tiers.expect_idle()


# -- direct I/O

ODD = Identity("test-model", "r1", "bf16", Layout((CacheGroup(GroupKind.GQA, 3, 1, 17, "bf16"),), 5))
"""Blocks of 1,020 bytes."""


@pytest.mark.parametrize("identity", [IDENTITY, ODD], ids=["even", "odd size"])
@pytest.mark.parametrize("where", ["open", "first write", "nowhere"])
def test_direct_io_that_is_refused_fails_no_store(
    tmp_path: Path, where: str, identity: Identity, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on overlays and network file systems: one line with the number of the error, and the bytes come back."""
    real_open, real_moved = os.open, nvme_file.SlotFile._moved

    def opens(path: Path, flags: int, *rest: int) -> int:
        if where == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest)

    def moves(
        file: nvme_file.SlotFile,
        move: Callable[[int, Iovec, int], int],
        buffers: Iovec,
        start: int,
    ) -> int:
        def refused(descriptor: int, data: Iovec, offset: int) -> int:
            if where == "first write" and descriptor == file._direct:
                raise OSError(errno.EINVAL, "Invalid argument")
            return move(descriptor, data, offset)

        return real_moved(file, refused, buffers, start)

    monkeypatch.setattr(os, "open", opens)
    monkeypatch.setattr(nvme_file.SlotFile, "_moved", moves)
    with Tiers(dram(64, identity), nvme(tmp_path), identity=identity) as tiers:
        for number in range(5):
            span = prompt(number, 4, identity=identity)
            tiers.save(span)
            tiers.only_below()
            assert tiers.load(span) == 4
        if where != "nowhere":
            assert tiers.store.io("nvme") == "buffered"
            assert caplog.text.count("direct I/O is refused") == 1
            assert f"errno {errno.EINVAL}" in caplog.text
        assert tiers.store.health()["nvme"] == "ok"
        assert tiers.count("saves_dropped", "nvme", reason="write_failed") == 0
