"""The trace that a server records, read back by the replay's own reader."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvtier.engine import recording
from kvtier.engine.recording import Recorder
from kvtier.engine.request import RequestStats
from kvtier.errors import ConfigError
from kvtier.key import BlockKey
from kvtier.sim.traces import open_trace
from tests.support import until

from .serving import CHAT, Running
from .support import BLOCK

SECRET = "a prompt that nobody else may read"


@dataclass
class Disk:
    """Stands for ``os.write``: it can be full, slow, or write by halves."""

    full_after: int | None = None
    halves: bool = False
    gate: threading.Event = field(default_factory=threading.Event)
    written: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    def write(self, file: int, data: memoryview) -> int:
        self.gate.wait(10.0)
        size = max(1, len(data) // 2) if self.halves else len(data)
        if self.full_after is not None and self.written + size > self.full_after:
            os.write(file, bytes(data)[: self.full_after - self.written])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.written += size
        return os.write(file, bytes(data)[:size])


@dataclass
class Clock:
    now: float = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(tmp_path: Path, disk: Disk, clock: Clock) -> Iterator[Recorder]:
    made = Recorder(tmp_path / "trace", 16, clock, disk.write)
    yield made
    disk.gate.set()
    made.close()


def keys(name: int, count: int) -> list[BlockKey]:
    return [BlockKey(bytes([name, index]) * 16) for index in range(count)]


def serve(recorder: Recorder, name: int, blocks: int = 1, out: int = 3) -> None:
    recorder.came(f"r{name}")
    recorder.began(f"r{name}", keys(name, blocks), RequestStats(16 * blocks, 0.0, completion_tokens=out))
    recorder.ended(f"r{name}")


def chains(path: Path) -> list[int]:
    """The names of the requests in a trace, in its order."""
    return [one.chain[0][0] for one in open_trace(path)]


def test_what_a_server_records_is_a_trace(tmp_path: Path, one_thread: None) -> None:
    path = tmp_path / "trace.jsonl"
    with Running() as server:
        server.core.recorder = Recorder(path, BLOCK)
        try:
            for salt in ("one", "one", "two"):
                answer = server.complete(prompt=SECRET, cache_salt=salt, n=2, max_tokens=5, ignore_eos=True)
                assert answer.status_code == 200
            server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, "stream": True})
            server.until_idle()
        finally:
            server.core.recorder.close()
    trace = open_trace(path)
    first, again, other, chat = trace
    assert trace.block_tokens == BLOCK
    assert (first.input_tokens, first.output_tokens) == (len(SECRET), 10)
    assert len(first.chain) == len(SECRET) // BLOCK
    assert first.chain == again.chain and not set(first.chain) & set(other.chain)
    assert first.time_s <= again.time_s <= other.time_s <= chat.time_s
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    raw = path.read_text(encoding="ascii")
    assert SECRET[:8] not in raw and "one" not in raw
    assert set().union(*(json.loads(line).keys() for line in raw.splitlines()[1:])) == {"t", "in", "out", "keys"}


def test_requests_stand_in_the_order_in_which_they_came(recorder: Recorder, clock: Clock, tmp_path: Path) -> None:
    recorder.came("long")
    clock.now += 1.5
    serve(recorder, 2)
    stats = RequestStats(40, 0.0, completion_tokens=1)
    recorder.began("long", keys(1, 2), stats)
    serve(recorder, 3)
    stats.completion_tokens = 500
    recorder.ended("long")
    recorder.close()
    first, second, third = open_trace(tmp_path / "trace")
    assert [one.chain[0][0] for one in (first, second, third)] == [1, 2, 3]
    assert (first.time_s, second.time_s) == (0.0, 1.5)
    assert (first.input_tokens, first.output_tokens, len(first.chain)) == (40, 500, 2)


def test_a_request_that_gave_nothing_used_nothing(recorder: Recorder, tmp_path: Path) -> None:
    recorder.came("aborted")
    serve(recorder, 1)
    recorder.ended("aborted")
    recorder.ended("unheard of")
    recorder.close()
    assert chains(tmp_path / "trace") == [1]


def test_an_id_that_is_given_again_names_another_request(recorder: Recorder, tmp_path: Path) -> None:
    """The first of the two has ended, and waits behind an earlier one to be written."""
    recorder.came("early")
    recorder.began("early", keys(9, 1), RequestStats(16, 0.0, completion_tokens=1))
    serve(recorder, 1)
    serve(recorder, 1, blocks=2)
    recorder.ended("early")
    recorder.close()
    assert [(one.chain[0][0], len(one.chain)) for one in open_trace(tmp_path / "trace")] == [(9, 1), (1, 1), (1, 2)]


def test_an_endless_request_holds_only_so_many_up(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MOST_WAITING", 4)
    recorder.came("queued")
    recorder.came("endless")
    recorder.began("endless", keys(9, 1), RequestStats(16, 0.0, completion_tokens=7))
    for name in range(5):
        serve(recorder, name)
    recorder.close()
    assert chains(tmp_path / "trace") == [9, 0, 1, 2, 3, 4]


def test_what_the_disk_does_not_take_in_time_is_left_out(
    recorder: Recorder, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recording, "MOST_KEYS", 20)
    disk.gate.clear()
    for name in range(50):
        serve(recorder, name)
    disk.gate.set()
    recorder.close()
    assert chains(tmp_path / "trace") == list(range(10))
    assert "40 requests left out of" in caplog.text


def test_a_full_disk_ends_the_recording_with_one_line(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.halves = True
    recorder = Recorder(tmp_path / "trace", 16, write=disk.write)
    serve(recorder, 1)
    until(lambda: disk.written > 100, 10.0, "the first request is written")
    disk.full_after = disk.written + 40
    for name in range(2, 20):
        serve(recorder, name)
    recorder.close()
    serve(recorder, 20)
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1 and "No space left on device; recording ends here" in errors[0].getMessage()
    assert chains(tmp_path / "trace") == [1], "what was written before is whole"


def test_a_file_grows_to_its_limit_and_no_further(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path / "trace", 16, limit=400)
    for name in range(50):
        serve(recorder, name)
    recorder.close()
    assert 0 < (tmp_path / "trace").stat().st_size <= 400
    assert chains(tmp_path / "trace") == list(range(len(chains(tmp_path / "trace"))))
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1 and errors[0].endswith("it would have more than 400 bytes; recording ends here")


def test_a_file_that_was_deleted_ends_the_recording_with_one_line(
    recorder: Recorder, disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trace").unlink()
    before = disk.written
    for name in range(5):
        serve(recorder, name)
    until(lambda: not recorder._thread.is_alive(), 10.0, "recording has ended")
    (tmp_path / "trace").write_text("another's")  # in its place, perhaps even by the number that the system knows it by
    recorder.close()
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1 and errors[0].endswith("the file was deleted; recording ends here")
    assert disk.written == before, "nothing fills a disk without a name"
    assert (tmp_path / "trace").read_text() == "another's"


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        Recorder(path, 16)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="No such file or directory"):
        Recorder(tmp_path / "no" / "trace", 16)


def test_a_recording_without_a_request_leaves_no_file(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "trace", 16)
    assert (tmp_path / "trace").exists()
    recorder.close()
    recorder.close()
    assert not (tmp_path / "trace").exists()
