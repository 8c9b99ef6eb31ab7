"""The NVMe tier is killed at every named point of its write path, filled to the last byte, and refused direct I/O for real.

Afterwards the doctor looks at what is there, whatever had been committed is hit, and nothing is torn.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.abc.medium import Record, Status
from kvtier.cli import main as cli
from kvtier.store.arena import entry_meta
from kvtier.testing.requirements import require_machine
from kvtier.testing.tiers import lone_tier
from kvtier.tier.lower import Parcel

from .nvme import BLOCK, MIB, demoted, opened, promoted
from .support import Batch

EACH = 4
"""Blocks of one batch."""
CAPACITY = 6 * MIB
POINTS = ["after delete", "before payload", "after payload", "after sync", "after commit"]
"""In the order in which a batch passes them; nothing is deleted before slots are reused."""


def parcels(batch: Batch) -> list[Parcel]:
    return [
        Parcel(name, entry_meta(header), header, view)
        for name, header, view in zip(batch.names, batch.headers, batch.sources, strict=True)
    ]


def write_until_killed(directory: str, point: str, nth: int, reusing: bool) -> None:
    """Put batch after batch, saying after each what is committed by then; die at the ``nth`` pass of ``point``."""
    medium = opened(Path(directory), CAPACITY)
    tier = lone_tier(medium)
    left, number = nth, 0

    def at(reached: str) -> None:
        nonlocal left
        if reached == point and (not reusing or number * EACH >= medium.slots):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    medium.at = medium.journal.at = at
    while True:
        batch = Batch(EACH, BLOCK, seed=number)
        assert all(outcome.done for outcome in tier.put(parcels(batch)))
        print(number, flush=True)
        number += 1


def doctor(directory: Path, capsys: pytest.CaptureFixture[str], *more: str, capacity: int = CAPACITY) -> list[str]:
    """Kinds of the faults that it finds."""
    capsys.readouterr()
    code = cli.main(["doctor", "--json", "--tier", f"nvme://{directory}?capacity={capacity}", *more])
    told = json.loads(capsys.readouterr().out)["tiers"][0]
    assert (code, told["error"]) == (int(bool(told["findings"])), None)
    return [finding["kind"] for finding in told["findings"]]


@pytest.mark.slow
@pytest.mark.parametrize("nth", [0, 4])
@pytest.mark.parametrize(
    ("point", "reusing"),
    [(point, reusing) for point in POINTS for reusing in (False, True) if point != POINTS[0] or reusing],
)
def test_a_kill_at_any_point_loses_nothing_that_was_committed(
    tmp_path: Path, point: str, nth: int, reusing: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into new slots and into reused ones; with ``nth`` 4 the doctor mends before the tier is opened again."""
    script = "import sys; from tests.backends.test_nvme_crash import write_until_killed as run; "
    script += "run(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == 'True')"
    child = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), point, str(nth), str(reusing)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
        timeout=60,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    reported = len(child.stdout.split())
    found = doctor(tmp_path, capsys)
    assert set(found) <= {"orphan slot"}
    whole_but_uncommitted = EACH if point == "after sync" else 0
    if reusing or point in ("after commit", "after delete"):
        assert found == [], "a slot that is known to be free is no orphan, whatever is in it"
    elif "payload" in point:
        assert len(found) <= EACH
    else:
        assert len(found) == whole_but_uncommitted
    if nth:
        assert doctor(tmp_path, capsys, "--fix") == found
        assert doctor(tmp_path, capsys) == []

    medium = opened(tmp_path, CAPACITY)
    rows = {row.address: row.slot for row in medium.journal.load()}
    whole = 0
    for number in range(reported + 1):
        batch = Batch(EACH, BLOCK, seed=number)
        there = [name in rows for name in batch.names]
        status = promoted(medium, batch, [rows.get(name, 0) for name in batch.names])
        assert [one is Status.DONE for one in status] == there, "a row is a block that proves"
        whole += sum(there)
        if number < reported:
            kept = medium.slots - 2 * EACH  # one batch may have been evicted for the last, and one cut
            assert all(there) or (reported - number) * EACH > kept, "committed, and gone"
        else:
            expected = EACH if point == "after commit" else len(found) if nth else 0
            assert sum(there) == expected
    assert whole == len(rows)
    tier = lone_tier(medium)
    for number in range(2000, 2010):
        assert all(outcome.done for outcome in tier.put(parcels(Batch(EACH, BLOCK, seed=number))))
    tier.close()
    assert set(doctor(tmp_path, capsys)) <= ({"orphan slot"} if not nth else set())


def test_every_point_of_the_write_path_is_passed_in_order(tmp_path: Path) -> None:
    medium = opened(tmp_path, CAPACITY, threads=1)
    tier = lone_tier(medium)
    passed: list[str] = []
    medium.at = medium.journal.at = passed.append
    assert all(outcome.done for outcome in tier.put(parcels(Batch(2, BLOCK))))
    payloads = ["before payload", "after payload"] * 2
    assert passed == [*payloads, "after sync", "after commit"]
    number = 1
    while tier.pool.free >= 2:
        tier.put(parcels(Batch(2, BLOCK, seed=number)))
        number += 1
    passed.clear()
    tier.put(parcels(Batch(2, BLOCK, seed=number)))
    assert passed == ["after delete", *payloads, "after sync", "after commit"]
    assert sorted(set(passed)) == sorted(POINTS)
    tier.close()


@pytest.mark.parametrize("block", [1, 4095, 4096, 4097, (360 << 10) + 1])
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_blocks_of_any_size_come_back_after_a_restart_and_after_a_rebuild(
    tmp_path: Path, block: int, direct: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    batch, slots = Batch(5, block), [4, 0, 2, 1, 3]
    capacity = 16 * MIB
    medium = opened(tmp_path, capacity, block, direct=direct)
    demoted(medium, batch, slots)
    medium.close()
    for lost in (False, True):
        if lost:
            (tmp_path / "index.sqlite").unlink()
        medium = opened(tmp_path, capacity, block, direct=direct)
        assert {row.address: row.slot for row in medium.journal.load()} == dict(zip(batch.names, slots, strict=True))
        assert promoted(medium, batch, slots) == [Status.DONE] * 5
        medium.close()
        assert doctor(tmp_path, capsys, capacity=capacity) == []


def unlinked(index: Path) -> None:
    index.unlink()


def scribbled(index: Path) -> None:
    with index.open("r+b") as file:
        file.seek(4096)
        file.write(b"junk" * 1024)


def cut(index: Path) -> None:
    os.truncate(index, index.stat().st_size // 2)


@pytest.mark.parametrize("spoil", [unlinked, scribbled, cut])
def test_a_rebuilt_index_knows_all_that_the_lost_one_knew(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    """The tree, the tenants and what clearing asks for; only the recency is the time of writing."""
    medium = opened(tmp_path)
    tier = lone_tier(medium)
    for number in range(8):
        batch = Batch(EACH, BLOCK, seed=number, expires_at=5e9 + number)
        batch.headers = [header._replace(tenant=bytes([number]) * 16) for header in batch.headers]
        assert all(outcome.done for outcome in tier.put(parcels(batch)))
    before = known(list(medium.journal.load()))
    tier.close()
    spoil(tmp_path / "index.sqlite")
    again = opened(tmp_path)
    assert known(list(again.journal.load())) == before
    assert len({row[4] for row in before}) == 8
    assert lone_tier(again).pool.check() == []
    again.close()


def known(records: list[Record]) -> list[tuple[object, ...]]:
    """Everything but when it was used."""
    return sorted(tuple(record._replace(used=0.0)) for record in records)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a small file system, given its kind and options."""
    mounts: list[Path] = []

    def mount(kind: str, options: str) -> Path:
        place = tmp_path / kind
        place.mkdir()
        done = subprocess.run(["mount", "-t", kind, "-o", options, kind, str(place)], check=False, capture_output=True)
        require_machine(done.returncode == 0, f"the right to mount a small {kind}")
        mounts.append(place)
        return place

    yield mount
    for place in mounts:
        subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_full_to_the_last_byte_costs_blocks_and_nothing_else(
    mounted: Callable[..., Path], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = mounted("tmpfs", "size=24m")
    tier = lone_tier(opened(disk / "tier", 20 * MIB))
    assert all(outcome.done for outcome in tier.put(parcels(Batch(EACH, BLOCK))))
    other = (disk / "other").open("wb", buffering=0)
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    os.posix_fallocate(other.fileno(), 0, free)
    statuses = set()
    for number in range(1, 40):
        outcomes = tier.put(parcels(Batch(EACH, BLOCK, seed=number)))
        statuses |= {outcome.status for outcome in outcomes}
    assert Status.FULL in statuses
    assert tier.usable, tier.degraded
    assert "No space left" in caplog.text or "full" in caplog.text
    other.truncate(0)
    other.close()
    assert all(outcome.done for outcome in tier.put(parcels(Batch(EACH, BLOCK, seed=99))))
    rows = tier.pool.ready
    tier.close()
    assert set(doctor(disk / "tier", capsys, capacity=20 * MIB)) <= {"orphan slot"}
    medium = opened(disk / "tier", 20 * MIB)
    assert len(list(medium.journal.load())) == rows
    assert promoted(medium, Batch(EACH, BLOCK), [0, 1, 2, 3]) == [Status.DONE] * EACH
    medium.close()


def test_a_file_system_that_refuses_direct_io_is_used_buffered_and_said_once(
    mounted: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """ramfs refuses it at open, on every kernel, and does not say how large it is."""
    disk = mounted("ramfs", "mode=0700")
    with caplog.at_level(logging.WARNING):
        medium = opened(disk / "tier", 16 * MIB)
        batch = Batch(6, BLOCK)
        demoted(medium, batch, list(range(6)))
        assert promoted(medium, batch, list(range(6))) == [Status.DONE] * 6
    assert medium.io == "buffered"
    (line,) = [record.getMessage() for record in caplog.records if "direct I/O" in record.getMessage()]
    assert "errno 22" in line
    medium.close()
