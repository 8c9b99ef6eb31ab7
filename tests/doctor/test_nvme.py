"""``kvtier doctor`` on NVMe: one fault of each kind is planted in a real directory, and named."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvtier.abc.medium import Status
from kvtier.cli import main as cli
from kvtier.codec.frame import HEADER_BYTES
from tests.backends.nvme import BLOCK, MIB, demoted, opened, promoted
from tests.backends.support import Batch

from .support import SEALED, doctor, kinds

STRIDE = 106_496
SLOTS = list(range(6))


@dataclass
class Directory:
    """Six blocks of a chain in slots 0 to 5 of a closed directory, and ways to get at it from behind."""

    path: Path
    batch: Batch = field(default_factory=lambda: Batch(6, BLOCK))
    whole: set[int] = field(default_factory=lambda: set(SLOTS))
    """Blocks of which an audit must leave nothing but good."""
    capacity: int = 64 * MIB

    @property
    def url(self) -> str:
        return f"nvme://{self.path}?capacity={self.capacity}"

    def sql(self, *statements: str) -> None:
        with sqlite3.connect(self.path / "index.sqlite") as database:
            for statement in statements:
                database.execute(statement)
        database.close()

    def read(self, slot: int, nbytes: int = STRIDE) -> bytes:
        with (self.path / f"slots-{STRIDE}.kvt").open("rb") as file:
            file.seek(slot * STRIDE)
            return file.read(nbytes)

    def write(self, slot: int, data: bytes, at: int = 0) -> None:
        with (self.path / f"slots-{STRIDE}.kvt").open("r+b") as file:
            file.seek(slot * STRIDE + at)
            file.write(data)

    def flip(self, slot: int, at: int) -> None:
        (byte,) = self.read(slot)[at : at + 1]
        self.write(slot, bytes([byte ^ 1]), at)


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    made = Directory(tmp_path / "tier")
    medium = opened(made.path)
    demoted(medium, made.batch, SLOTS)
    medium.close()
    return made


def row_of_nothing(it: Directory) -> None:
    it.write(1, bytes(HEADER_BYTES))
    it.whole -= {1}


def row_of_another(it: Directory) -> None:
    it.write(1, it.read(2))
    it.whole -= {1}


def row_of_one_that_has_none(it: Directory) -> None:
    it.write(1, it.read(2))
    it.sql("DELETE FROM block WHERE slot = 2")
    it.write(2, bytes(HEADER_BYTES))
    it.whole -= {1}


def row_without_a_file(it: Directory) -> None:
    it.sql(
        "INSERT INTO block SELECT 8192, 3, zeroblob(40), parent, depth, origin, used, NULL FROM block WHERE slot = 3"
    )


def slot_without_a_row(it: Directory) -> None:
    it.sql(f"DELETE FROM block WHERE slot = 3 AND stride = {STRIDE}")


def row_twice(it: Directory) -> None:
    it.write(9, it.read(2))
    it.sql("INSERT INTO block SELECT stride, 9, address, parent, depth, origin, 0.5, NULL FROM block WHERE slot = 2")


def slot_twice(it: Directory) -> None:
    it.sql(
        "ALTER TABLE block RENAME TO before",
        "CREATE TABLE block AS SELECT * FROM before",
        "DROP TABLE before",
        "INSERT INTO block SELECT stride, 2, zeroblob(40), parent, depth, origin, 0.5, NULL FROM block WHERE slot = 2",
    )


def other_row(it: Directory) -> None:
    it.sql("UPDATE block SET depth = 77 WHERE slot = 4")


def reheaded(it: Directory, **changes: Any) -> None:
    page = bytearray(HEADER_BYTES)
    it.batch.headers[3]._replace(**changes).pack_into(memoryview(page))
    it.write(3, bytes(page))
    it.whole -= {3}


def length_of_another_class(it: Directory) -> None:
    reheaded(it, payload_bytes=BLOCK - 8192, raw_bytes=BLOCK - 8192)


def length_beyond_the_slot(it: Directory) -> None:
    reheaded(it, payload_bytes=2 * STRIDE, raw_bytes=2 * STRIDE)


def budget_below_what_is_there(it: Directory) -> None:
    it.capacity = 3800 << 10


def room_that_nobody_counts(it: Directory) -> None:
    """More than the budget at the end of the slot file, as a lost truncation leaves it."""
    it.capacity = 16 * MIB
    with (it.path / f"slots-{STRIDE}.kvt").open("r+b") as file:
        os.posix_fallocate(file.fileno(), 50 * STRIDE, 20 * MIB)


def payload_bit(it: Directory) -> None:
    it.flip(2, 50_000)
    it.whole -= {2}


def header_bit(it: Directory) -> None:
    it.flip(2, 100)
    it.whole -= {2}


def foreign_file(it: Directory) -> None:
    (it.path / "thesis.tex").write_text("precious")


def slot_file_of_no_size(it: Directory) -> None:
    (it.path / "slots-007.kvt").write_text("precious")


def old_tables(it: Directory) -> None:
    it.sql("PRAGMA user_version = 1")


def old_frame(it: Directory) -> None:
    it.write(5, b"\0\0", 6)
    it.whole -= {5}


def lost_index(it: Directory) -> None:
    for path in it.path.glob("index.sqlite*"):
        path.unlink()


def spoilt_index(it: Directory) -> None:
    with (it.path / "index.sqlite").open("r+b") as file:
        file.write(b"junk" * 500)


PLANTED = [
    (row_of_nothing, "orphan row", "slot 1 "),
    (row_of_another, "orphan row", "slot 1 "),
    (row_of_one_that_has_none, "orphan row", "slot 1 "),
    (row_without_a_file, "orphan row", "slot 3 of slots-8192.kvt"),
    (slot_without_a_row, "orphan slot", "slot 3 "),
    (row_twice, "double slot", "slot 9 "),
    (slot_twice, "double slot", "index.sqlite"),
    (other_row, "wrong row", "slot 4 "),
    (length_of_another_class, "wrong byte count", "slot 3 "),
    (length_beyond_the_slot, "wrong byte count", "slot 3 "),
    (budget_below_what_is_there, "wrong byte count", ""),
    (room_that_nobody_counts, "wrong byte count", ""),
    (payload_bit, "flipped bit", "slot 2 "),
    (header_bit, "flipped bit", "slot 2 "),
    (foreign_file, "foreign file", "thesis.tex"),
    (slot_file_of_no_size, "foreign file", "slots-007.kvt"),
    (old_tables, "old schema", "index.sqlite"),
    (old_frame, "old schema", "slot 5 "),
    (lost_index, "lost index", "index.sqlite"),
    (spoilt_index, "lost index", "index.sqlite"),
]


@pytest.mark.parametrize(("plant", "kind", "place"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_fault_is_named_repaired_and_gone(
    directory: Directory,
    plant: Callable[[Directory], None],
    kind: str,
    place: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, told, _ = doctor(capsys, "--tier", directory.url)
    assert told.pop("looked_at") >= len(SLOTS)
    assert (code, told) == (0, {"tier": f"nvme://{directory.path}", "error": None, "notes": [], "findings": []})
    plant(directory)
    before = {path: path.read_bytes() for path in directory.path.iterdir() if path.name.startswith("slots-")}
    code, told, _ = doctor(capsys, "--tier", directory.url)
    assert (code, kinds(told)) == (1, [kind])
    assert place in told["findings"][0]["place"]
    for path, was in before.items():
        assert path.read_bytes() == was, "without --fix nothing is changed"
    code, told, _ = doctor(capsys, "--tier", directory.url, "--fix")
    assert (code, kinds(told)) == (1, [kind])
    assert told["findings"][0]["repaired"], told
    code, told, _ = doctor(capsys, "--tier", directory.url)
    assert (code, kinds(told)) == (0, [])
    medium = opened(directory.path, directory.capacity)
    rows = {row.address: row for row in medium.journal.load()}
    names = directory.batch.names
    status = promoted(medium, directory.batch, [rows[name].slot if name in rows else 99 for name in names])
    assert {index for index, one in enumerate(status) if one is Status.DONE} >= directory.whole
    assert all((name in rows) == (one is Status.DONE) for name, one in zip(names, status, strict=True))
    assert all(rows[name].depth == index for index, name in enumerate(names) if name in rows)
    medium.close()


def test_every_fault_of_one_directory_is_named_in_one_run(
    directory: Directory, capsys: pytest.CaptureFixture[str]
) -> None:
    for plant in (
        row_without_a_file,
        row_of_nothing,
        payload_bit,
        slot_without_a_row,
        other_row,
        old_frame,
        foreign_file,
    ):
        plant(directory)
    code, told, _ = doctor(capsys, "--tier", directory.url, "--fix")
    assert code == 1
    assert sorted(kinds(told)) == sorted(
        ["orphan row", "flipped bit", "orphan slot", "wrong row", "old schema", "foreign file", "orphan row"]
    )
    assert all(finding["repaired"] for finding in told["findings"])
    assert doctor(capsys, "--tier", directory.url)[:1] == (0,)
    assert (directory.path.parent / "tier.foreign" / "thesis.tex").read_text() == "precious"


def test_what_is_not_ours_is_never_overwritten(directory: Directory, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("first", "second"):
        (directory.path / "notes").write_text(text)
        assert doctor(capsys, "--tier", directory.url, "--fix")[0] == 1
    aside = directory.path.parent / "tier.foreign"
    assert {path.name: path.read_text() for path in aside.iterdir()} == {"notes": "first", "notes.1": "second"}


def test_slots_that_were_freed_or_evicted_are_no_orphans(
    directory: Directory, capsys: pytest.CaptureFixture[str]
) -> None:
    medium = opened(directory.path)
    medium.journal.commit([], [3, 4])
    medium.journal.commit(Batch(1, BLOCK, seed=9).rows([4]), [])
    medium.journal.commit([], [4])
    medium.close()
    assert doctor(capsys, "--tier", directory.url)[0] == 0


def test_sealed_frames_are_proven_as_far_as_that_goes_without_their_key(
    directory: Directory, capsys: pytest.CaptureFixture[str]
) -> None:
    reheaded(directory, nonce=b"n" * 12)
    code, told, _ = doctor(capsys, "--tier", directory.url)
    assert (code, told["notes"]) == (0, [SEALED])
    directory.flip(3, 100)
    code, told, _ = doctor(capsys, "--tier", directory.url)
    assert (code, kinds(told), told["notes"]) == (1, ["flipped bit"], [])


def test_a_directory_in_use_is_said_to_be_and_by_whom(directory: Directory, capsys: pytest.CaptureFixture[str]) -> None:
    medium = opened(directory.path)
    code, told, err = doctor(capsys, "--tier", directory.url)
    medium.close()
    assert code == 2
    assert f"process {os.getpid()} is using it" in told["error"]
    assert "--base-url" in told["error"]
    assert err == ""


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--tier", "nvme:///no/such/directory?capacity=1GiB"], "there is no such directory"),
        (["--tier", "dram://?capacity=1MiB"], "no tier that outlives its process"),
        (["--base-url", "http://127.0.0.1:1"], "no answer"),
        (["--uds", "/no/such/socket"], "no answer"),
        (["--base-url", "ftp://x"], "give the server's address"),
        (["--base-url", "http://127.0.0.1:1", "--fix"], "stop the server"),
    ],
)
def test_what_cannot_be_run_is_a_line_and_exit_code_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *argv]) == 2
    _, err = capsys.readouterr()
    assert said in err
    assert err.count("\n") == 1


def test_a_folder_that_no_tier_has_used_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A slip in the path, and everything in somebody's home would have been moved beside it."""
    (tmp_path / "thesis.tex").write_text("precious")
    assert cli.main(["doctor", "--fix", "--tier", f"nvme://{tmp_path}?capacity=1MiB"]) == 2
    assert "check the path" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_person_reads_it_and_sees_a_bar_on_a_terminal(directory: Directory) -> None:
    row_of_nothing(directory)
    parent, child = os.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "kvtier", "doctor", "--tier", directory.url, "--fix"],
        stdout=subprocess.PIPE,
        stderr=child,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        text=True,
        check=False,
        timeout=60,
    )
    os.close(child)
    shown = os.read(parent, 1 << 16).decode()
    os.close(parent)
    assert done.returncode == 1
    first, second, third = done.stdout.splitlines()
    assert first.startswith(f"nvme://{directory.path}: ") and first.endswith(" places looked at, 1 fault")
    assert second.startswith("  orphan row: slot 1 of slots-106496.kvt: the index names block ")
    assert third == "    repaired: slot freed"
    assert f"nvme://{directory.path}"[:40] in shown
