"""The NVMe directory: what it survives, what it may take, and what it refuses."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvtier.abc.medium import MediumContext, Status
from kvtier.errors import ConfigError, MediumError, MediumFull
from kvtier.quantity import Bytes
from kvtier.storage_backends import nvme_audit, nvme_journal
from kvtier.storage_backends.nvme import NvmeMedium
from kvtier.storage_backends.nvme_audit import NvmeAuditor
from kvtier.testing.media import LastingMediumSuite, SlotMediumSuite
from kvtier.testing.requirements import require_machine
from kvtier.transfer.copy import read_frames, write_frames
from kvtier.url import TierUrl

from .nvme import BLOCK, MIB, RAW, demoted, opened, promoted
from .support import ORIGIN, Batch


class TestWhatLasts(LastingMediumSuite[NvmeMedium]):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Iterator[NvmeMedium]:
        made = opened(tmp_path / "tier", 16 * MIB)
        yield made
        made.close()


@pytest.mark.parametrize("loss", ["none", "corrupt", "gone"])
def test_epochs_outlive_the_process_and_the_database(tmp_path: Path, loss: str) -> None:
    medium = opened(tmp_path)
    batch = Batch(3, BLOCK)
    demoted(medium, batch, [0, 1, 2])
    medium.raise_epochs({'["m", null, null]': 4}, {})
    medium.close()
    if loss == "corrupt":
        (tmp_path / "index.sqlite").write_bytes(b"not a database" * 1000)
    elif loss == "gone":
        (tmp_path / "index.sqlite").unlink()
    again = opened(tmp_path)
    assert again.epochs() == {'["m", null, null]': 4}
    rows = list(again.journal.load())
    assert {(row.identity, row.tenant, row.adapter, row.epoch) for row in rows} == {
        (ORIGIN.identity, ORIGIN.tenant, ORIGIN.adapter, ORIGIN.epoch)
    }
    assert stat.S_IMODE((tmp_path / "epochs.json").stat().st_mode) == 0o600
    again.close()


@pytest.mark.parametrize(
    "text",
    ["[1, 2", "[" * 5000, "[]", '{"a": Infinity}', '{"a": -5}', '{"a": 1e3}', '{"a": 4294967296}', '{"\\ud800": 5}'],
    ids=["cut", "nested", "list", "infinite", "negative", "real", "large", "half a character"],
)
def test_epochs_that_cannot_be_read_stop_the_tier_and_are_not_taken_for_none(tmp_path: Path, text: str) -> None:
    opened(tmp_path).close()
    (tmp_path / "index.sqlite").unlink()
    (tmp_path / "epochs.json").write_text(text)
    with pytest.raises(MediumError, match="what was cleared is not known"):
        opened(tmp_path)


@pytest.mark.parametrize("slot", [1 << 32, 1 << 62, (1 << 63) - 1])
@pytest.mark.parametrize("block", [BLOCK, 50_000], ids=["this size", "another size"])
def test_a_slot_that_no_file_has_is_no_row_of_ours(tmp_path: Path, slot: int, block: int) -> None:
    medium = opened(tmp_path, block=block)
    demoted(medium, Batch(3, block), [0, 1, 2])
    medium.close()
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as database, database:
        database.execute("UPDATE block SET slot = ? WHERE slot = 2", (slot,))
    again = opened(tmp_path)
    assert [row.slot for row in again.journal.load()] == ([0, 1, 2] if block == BLOCK else [])
    again._make_room(again._budget)  # others give all of theirs back
    assert not again._others
    again.close()


class TestSuite(SlotMediumSuite[NvmeMedium]):
    @pytest.fixture(params=["direct", "buffered"])
    def medium(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NvmeMedium]:
        made = opened(tmp_path / "tier", 16 * MIB, direct=request.param == "direct")
        yield made
        made.close()

    def _place(self, medium: NvmeMedium, slot: int) -> tuple[Path, int]:
        (path,) = medium._directory.glob("slots-*.kvt")
        return path, slot * int(path.stem.removeprefix("slots-")) + 4096

    def peek(self, medium: NvmeMedium, slot: int, nbytes: int) -> bytes:
        path, start = self._place(medium, slot)
        with path.open("rb") as file:
            file.seek(start)
            return file.read(nbytes)

    def poke(self, medium: NvmeMedium, slot: int, data: bytes) -> None:
        path, start = self._place(medium, slot)
        with path.open("r+b") as file:
            file.seek(start)
            file.write(data)


def test_a_restart_finds_everything_again(tmp_path: Path) -> None:
    batch = Batch(5, BLOCK)
    with_rows = opened(tmp_path)
    demoted(with_rows, batch, [3, 0, 9, 4, 7])
    with_rows.journal.touch([(9, 50.0)])
    with_rows.remember("identity", b"d" * 32, '{"model": "m"}')
    with_rows.close()
    again = opened(tmp_path)
    rows = {row.slot: row for row in again.journal.load()}
    assert {row.address: slot for slot, row in rows.items()} == dict(zip(batch.names, [3, 0, 9, 4, 7], strict=True))
    assert (rows[9].used, rows[9].depth, rows[9].parent) == (50.0, 2, batch.names[1])
    assert promoted(again, batch, [3, 0, 9, 4, 7]) == [Status.DONE] * 5
    assert again.records("identity") == {b"d" * 32: '{"model": "m"}'}
    again.close()


def test_files_are_private_and_their_names_say_nothing(tmp_path: Path) -> None:
    medium = opened(tmp_path / "tier")
    demoted(medium, Batch(2, BLOCK), [0, 1])
    assert stat.S_IMODE((tmp_path / "tier").stat().st_mode) == 0o700
    modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in (tmp_path / "tier").iterdir()}
    assert set(modes.values()) == {0o600}
    assert sorted(modes) == ["index.sqlite", "index.sqlite-shm", "index.sqlite-wal", "lock", "slots-106496.kvt"]
    medium.close()


def test_what_was_committed_outlives_kill_9_and_what_is_torn_is_not_believed(tmp_path: Path) -> None:
    """A writer is killed in the middle of its batches, several times, at whatever point that is."""
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from tests.backends.support import Batch
        from tests.backends.nvme import demoted, opened
        medium = opened(Path(sys.argv[1]))
        for number in range(1000):
            slots = [(number * 4 + i) % 200 for i in range(4)]
            medium.journal.commit([], slots)
            demoted(medium, Batch(4, 100_000, seed=number), slots)
            print(number, flush=True)
    """)
    for kill_after in (0, 3, 11):
        writer = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            text=True,
        )
        reported = -1
        with writer:
            for line in writer.stdout or ():
                reported = int(line)
                if reported >= kill_after:
                    break
            writer.send_signal(signal.SIGKILL)
        medium = opened(tmp_path)
        batch = Batch(4, BLOCK, seed=reported)
        rows = {row.address: row.slot for row in medium.journal.load()}
        assert promoted(medium, batch, [rows[name] for name in batch.names]) == [Status.DONE] * 4
        for number in range(reported + 3):  # later and earlier ones: whole or not there
            other = Batch(4, BLOCK, seed=number)
            there = [i for i, name in enumerate(other.names) if name in rows]
            status = promoted(medium, other, [rows.get(name, 0) for name in other.names])
            assert all(status[i] is Status.DONE for i in there)
        assert medium.held_bytes() <= 64 * MIB
        medium.close()


def test_a_row_proves_nothing_until_header_and_sum_are_checked(tmp_path: Path) -> None:
    batch, suite = Batch(4, BLOCK), TestSuite()
    medium = opened(tmp_path)
    demoted(medium, batch, [0, 1, 2, 3])
    suite.poke(medium, 1, b"torn")
    path, start = suite._place(medium, 2)
    with path.open("r+b") as file:
        file.seek(start - 4096 + 20)
        file.write(b"another key")
    wrong = [0, 1, 2, 0]  # the last row points to another block's slot
    assert promoted(medium, batch, wrong) == [Status.DONE, Status.CORRUPT, Status.CORRUPT, Status.CORRUPT]
    medium.close()


def test_expired_frames_are_absent(tmp_path: Path) -> None:
    batch = Batch(1, BLOCK, expires_at=10.0)
    medium = opened(tmp_path)
    demoted(medium, batch, [0])
    assert read_frames(medium, [0], batch.into, batch.asked, RAW, now=9.0)[0][0].done
    (outcome,), (header,) = read_frames(medium, [0], batch.into, batch.asked, RAW, now=11.0)
    assert (outcome.status, outcome.detail, header) == (Status.ABSENT, "expired", None)
    medium.close()


def lose(path: Path) -> None:
    for part in path.parent.glob(path.name + "*"):
        part.unlink()


def corrupt(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"junk" * 500)


def other_schema(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()


def unfinished(path: Path) -> None:
    """As a rebuild leaves it that was killed half-way."""
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 0")
        database.execute("DELETE FROM block WHERE slot = 5")
    database.close()


def other_format(database: Path) -> None:
    content = bytearray(database.read_bytes())
    content[18] = 3
    database.write_bytes(content)


@pytest.mark.parametrize(
    ("says", "named", "kind"),
    [
        ("database is locked", "SQLITE_BUSY", MediumError),
        ("database or disk is full", "SQLITE_FULL", MediumFull),
        ("disk I/O error", "SQLITE_IOERR_SHMSIZE", MediumError),
    ],
)
def test_a_database_that_cannot_be_opened_for_now_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, named: str, kind: type[MediumError]
) -> None:
    """It was deleted and made anew from header pages, and blocks that had been dropped were back."""

    def error(_: sqlite3.Connection) -> None:
        failed = sqlite3.OperationalError(says)
        vars(failed).update(sqlite_errorname=named)  # as Python does from 3.11 on
        raise failed

    batch = Batch(3, BLOCK)
    medium = opened(tmp_path)
    demoted(medium, batch, [0, 1, 2])
    medium.journal.commit([], [1])
    medium.close()
    with monkeypatch.context() as patched:
        patched.setattr(nvme_journal, "look_through", error)
        patched.setattr(nvme_audit, "look_through", error)
        with pytest.raises(kind, match=says):
            opened(tmp_path)
        with (
            pytest.raises(kind, match=says),
            closing(NvmeAuditor(tmp_path, NvmeMedium.Params(capacity=Bytes(MIB)))) as audit,
        ):
            list(audit.look(lambda _done, _of: None))
    again = opened(tmp_path)
    assert {row.slot for row in again.journal.load()} == {0, 2}
    again.close()


@pytest.mark.parametrize("spoil", [lose, corrupt, other_schema, other_format, unfinished])
def test_a_lost_or_corrupt_database_is_rebuilt_from_the_header_pages(
    tmp_path: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    medium = opened(tmp_path)
    batch, slots = Batch(4, BLOCK), [5, 2, 8, 0]
    demoted(medium, batch, slots)
    older = Batch(4, BLOCK)
    older.headers = [header._replace(created=1.0) for header in older.headers]
    write_frames(medium, [20, 21, 22, 23], older.sources, older.headers, RAW)  # the same blocks, freed: stale copies
    path, start = TestSuite()._place(medium, 2)
    with path.open("r+b") as file:
        file.seek(start - 4096)
        file.write(b"x" * 100)  # this header does not parse: the slot is free
    medium.close()
    spoil(tmp_path / "index.sqlite")
    again = opened(tmp_path)
    rows = {row.address: row for row in again.journal.load()}
    assert {address: row.slot for address, row in rows.items()} == {
        batch.names[0]: 5,
        batch.names[1]: 21,
        batch.names[2]: 8,
        batch.names[3]: 0,
    }
    assert (rows[batch.names[2]].parent, rows[batch.names[2]].depth) == (batch.names[1], 2)
    assert promoted(again, batch, [5, 21, 8, 0]) == [Status.DONE] * 4
    assert ("rebuilt" in caplog.text) == (spoil is not lose)
    again.close()
    third = opened(tmp_path)
    assert len(list(third.journal.load())) == 4
    third.close()


def test_a_second_process_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    medium = opened(tmp_path)
    script = "import sys; from tests.backends.nvme import opened; from pathlib import Path; opened(Path(sys.argv[1]))"
    second = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert second.returncode != 0
    assert f"ConfigError: nvme tier {tmp_path}: process {os.getpid()} is using it" in second.stderr
    assert "give each engine a directory of its own" in second.stderr
    medium.close()
    opened(tmp_path).close()


def test_a_lock_that_cannot_be_opened_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(ConfigError, match="cannot open its lock: Is a directory"):
        opened(tmp_path)


def test_other_peoples_directories_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        opened(tmp_path)
    with pytest.raises(ConfigError, match="three slashes"):
        NvmeMedium.open(
            TierUrl.parse("nvme://var/cache"),
            NvmeMedium.Params(capacity=Bytes(64 * MIB)),
            MediumContext(BLOCK),
        )
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="nvme://"):
        opened(tmp_path / "file")


def test_reads_of_places_that_were_never_written_are_absent(tmp_path: Path) -> None:
    medium = opened(tmp_path)
    assert promoted(medium, Batch(1, BLOCK), [5]) == [Status.ABSENT]
    medium.close()


@pytest.mark.parametrize("where", ["open", "write"])
def test_direct_io_that_is_refused_falls_back_once_and_says_so(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """File systems refuse O_DIRECT at open, or take it there and refuse the first write."""
    real_open, real_write = os.open, os.pwritev

    def refusing_open(path: Path, flags: int, *rest: int) -> int:
        if where == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest)

    def refusing_write(descriptor: int, buffers: object, offset: int) -> int:
        if where == "write" and _flags(descriptor) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(descriptor, buffers, offset)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refusing_open)
    monkeypatch.setattr(os, "pwritev", refusing_write)
    medium = opened(tmp_path)
    batch = Batch(4, BLOCK)
    with caplog.at_level(logging.WARNING):
        demoted(medium, batch, [0, 1, 2, 3])
        demoted(medium, batch, [4, 5, 6, 7])
    assert promoted(medium, batch, [0, 1, 6, 7]) == [Status.DONE] * 4
    assert medium.io == "buffered"
    lines = {record.getMessage() for record in caplog.records if "direct I/O is refused" in record.getMessage()}
    assert len(lines) == 1
    assert f"errno {errno.EINVAL}" in lines.pop()
    medium.close()


def _flags(descriptor: int) -> int:
    text = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    return int(text.split("flags:")[1].split()[0], 8)


def test_works_on_tmpfs_whatever_that_thinks_of_direct_io() -> None:
    require_machine(os.access("/dev/shm", os.W_OK), "a writable tmpfs at /dev/shm")
    directory = Path(f"/dev/shm/kvtier-test-{os.getpid()}")
    try:
        medium = opened(directory, 16 * MIB)
        batch = Batch(3, BLOCK)
        demoted(medium, batch, [0, 1, 2])
        assert promoted(medium, batch, [0, 1, 2]) == [Status.DONE] * 3
        assert medium.held_bytes() <= 16 * MIB
        medium.close()
    finally:
        for path in sorted(directory.glob("*")):
            path.unlink()
        directory.rmdir()


def test_short_reads_and_writes_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_read, real_write = os.preadv, os.pwritev

    def cut(buffers: list[memoryview]) -> list[memoryview]:
        size = sum(map(len, buffers))
        return buffers if size <= 8192 else [buffers[0], buffers[1][: max(4096, len(buffers[1]) // 2 // 4096 * 4096)]]

    def short_read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return real_read(descriptor, cut(buffers) if len(buffers) == 2 else buffers, offset)

    def short_write(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return real_write(descriptor, cut(buffers) if len(buffers) == 2 else buffers, offset)

    monkeypatch.setattr(os, "preadv", short_read)
    monkeypatch.setattr(os, "pwritev", short_write)
    medium = opened(tmp_path)
    batch = Batch(3, BLOCK)
    demoted(medium, batch, [0, 1, 2])
    assert promoted(medium, batch, [0, 1, 2]) == [Status.DONE] * 3
    medium.close()
