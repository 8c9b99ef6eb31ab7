"""Room in a shared folder: one bound for all who write, a disk that is full, and what goes to make room."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.abc.medium import Outcome, Status
from kvtier.errors import MediumFull, MediumUnavailable
from kvtier.quantity import Bytes, Seconds
from kvtier.testing.media import names, payload, room
from kvtier.testing.requirements import require_machine

from .fs import WRITER, opened, place, spread, taken, whole


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A small file system of our own, 4 MiB."""
    root = tmp_path / "small"
    root.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", root], capture_output=True, check=False)
    require_machine(done.returncode == 0, "the right to mount a tmpfs")
    yield root
    subprocess.run(["umount", "-l", root], check=True)


def test_a_full_disk_is_full_and_nothing_is_left_of_what_did_not_fit(tmpfs: Path) -> None:
    medium = opened(tmpfs / "shared")
    wanted = spread(8, seed=1)
    with pytest.raises(MediumFull, match=r"No space left on device; make room there"):
        medium.write(wanted, [[payload(1, 1 << 20)]] * 8)
    there = set(medium.scan())
    assert 1 <= len(there) < 8
    assert not list(tmpfs.rglob("*.tmp"))
    assert medium.bytes_written == len(there) << 20
    medium.ping()  # it can still be read
    medium.delete(list(there))
    assert medium.write(wanted[:1], [[payload(1, 1 << 20)]])[0].done
    medium.close()


def test_a_mount_that_goes_is_not_written_beneath(tmpfs: Path) -> None:
    medium = opened(tmpfs)
    medium.write(names(1), [[payload(1, 10)]])
    subprocess.run(["umount", "-l", tmpfs], check=True)
    for call in (medium.ping, lambda: medium.probe(names(1)), lambda: medium.write(names(1), [[payload(1, 10)]])):
        with pytest.raises(MediumUnavailable, match="another file system than before"):
            call()
    assert list(tmpfs.iterdir()) == []
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmpfs], check=True)
    medium.close()


def test_one_writer_never_exceeds_its_capacity(tmp_path: Path) -> None:
    """Ten times the capacity, blocks of all sizes, written again, foreign files and records among them."""
    root, source = tmp_path / "shared", random.Random(3)
    medium = opened(root, capacity=Bytes(4 << 20), sync=False)
    medium.ping()
    (root / "foreign").mkdir()
    (root / "foreign" / "file").write_bytes(bytes(600_000))
    wanted = spread(200, seed=3)
    for turn in range(400):
        size = source.choice([1, 4096, 70_000, 200_000])
        assert medium.write([wanted[source.randrange(200)]], [[payload(turn, size)]])[0].done
        if turn % 50 == 0:
            medium.remember("scope", source.randbytes(32), "x" * 3000)
        assert taken(root) <= 4 << 20, f"after {turn} writes"
    assert taken(root) > 3 << 20, "it makes use of its capacity"
    assert (root / "foreign" / "file").stat().st_size == 600_000
    (outcome,) = medium.write(wanted[:1], [[payload(1, 5 << 20)]])
    assert outcome.status is Status.FULL
    assert "raise capacity" in outcome.detail
    medium.close()


def test_four_threads_never_exceed_the_capacity_at_any_time(tmpfs: Path) -> None:
    """The file system's own count, which is of one moment, looked at all the while."""
    medium = opened(tmpfs, capacity=Bytes(3 << 20))
    medium.ping()
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            now = os.statvfs(tmpfs)
            most[0] = max(most[0], (now.f_blocks - now.f_bfree) * now.f_frsize)

    def write(seed: int) -> None:
        for name in spread(75, seed):
            assert medium.write([name], [[payload(seed, 100_000)]])[0].done

    watcher = threading.Thread(target=watch)
    watcher.start()
    writers = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for each in writers:
        each.start()
    for each in writers:
        each.join(60)
    done.set()
    watcher.join(10)
    assert 2 << 20 < most[0] <= 3 << 20
    assert len(list(medium.scan())) > 15
    medium.close()


def test_four_processes_exceed_the_capacity_by_what_is_on_its_way_at_most(tmpfs: Path) -> None:
    """Nobody locks anybody out: two that look at once may both find room for what only one can have."""
    medium = opened(tmpfs, capacity=Bytes(2 << 20))
    medium.ping()
    program = WRITER.replace("capacity=1 << 40", "capacity=2 << 20")
    writers = [subprocess.Popen([sys.executable, "-c", program, tmpfs, "any", str(seed), "50"]) for seed in range(4)]
    most = 0
    while any(each.poll() is None for each in writers):
        now = os.statvfs(tmpfs)
        most = max(most, (now.f_blocks - now.f_bfree) * now.f_frsize)
    assert [each.returncode for each in writers] == [0] * 4
    assert 1 << 20 < most <= (2 << 20) + 3 * 217_088, (
        "a block of each other process, in whole pages and what goes with it"
    )
    assert whole(medium) >= 4
    medium._space.tend(0, 0.0)
    assert taken(tmpfs) <= 2 << 20
    medium.close()


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    medium = opened(tmp_path, capacity=Bytes(1 << 20))
    wanted = spread(12, seed=5)
    medium.write(wanted[:4], [[payload(1, 100_000)]] * 4)
    for age, name in enumerate(wanted[:4]):
        os.utime(place(tmp_path, name), (time.time() - 100 + age,) * 2)
    medium.write(wanted[4:5], [[payload(1, 1000)]])  # now it knows them all
    medium.touch(wanted[:1])
    for name in wanted[5:]:
        medium.write([name], [[payload(1, 100_000)]])
    there = set(medium.scan())
    assert wanted[0] in there
    assert wanted[1] not in there
    assert wanted[11] in there
    medium.clear()
    for name in wanted[:3]:  # what is hidden goes before what was written just now, however often
        medium.write([name], [[payload(1, 100_000)]])
        os.utime(place(tmp_path, name, 1), (1, 1))
    medium.write(wanted[3:4], [[payload(1, 100_000)]])
    assert set(tmp_path.glob("??/?/*.1")) == {place(tmp_path, name, 1) for name in wanted[:4]}
    assert 0 < len(list(tmp_path.rglob("*.0"))) < len(there)
    medium.close()


def test_groups_share_the_capacity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large place has several groups, each looked through on its own."""
    monkeypatch.setattr("kvtier.storage_backends.fs_space.GROUP_BYTES", 8 << 20)
    medium = opened(tmp_path, capacity=Bytes(32 << 20), sync=False)
    assert medium._space.groups == 4
    for name in spread(1500, seed=6):
        assert medium.write([name], [[payload(1, 30_000)]])[0].done
    assert 26 << 20 < taken(tmp_path) <= 32 << 20
    assert len(list(medium.scan())) > 600
    medium.close()


def test_what_nobody_uses_goes_and_a_touch_keeps_it(tmp_path: Path) -> None:
    medium = opened(tmp_path, capacity=Bytes(8 << 20))  # one group
    wanted = names(3)
    medium.write(wanted, [[payload(1, 10)]] * 3)
    for name in wanted:
        os.utime(place(tmp_path, name), (1, 1))
    assert medium.probe(wanted) == 0
    assert medium.heads(wanted, 4) == [b""] * 3
    assert medium.read(wanted[:1], [[room(10)]]) == [Outcome(Status.ABSENT)]
    medium.touch(wanted[:1])
    assert medium.probe(wanted) == 1
    medium.close()
    medium = opened(tmp_path, capacity=Bytes(8 << 20))
    medium._space.tend(0, time.time() - 86400)
    assert [place(tmp_path, name).exists() for name in wanted] == [True, False, False]
    medium.close()


def test_the_sweep_comes_round_by_itself(tmp_path: Path) -> None:
    medium = opened(tmp_path, ttl=Seconds(0.2))
    medium.write(names(3), [[payload(1, 10)]] * 3)
    until = time.monotonic() + 20
    while any(path.is_file() for path in tmp_path.rglob("*.0")):
        assert time.monotonic() < until
        time.sleep(0.01)
    medium.close()
