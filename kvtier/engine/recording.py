"""A trace of what was asked, as ``kvtier replay`` and ``kvtier simulate`` read it: keys of blocks, never text or tokens.

``{"format": "kvtier-trace", "version": 1, "block_tokens": 16}``, then a line per request in the order in which they came:
``{"t": seconds, "in": tokens, "out": tokens, "keys": [first 16 bytes of each block's key in hex]}``. Keys are hashes under the
scope's secret and salt: who has the file alone can tell which prompts begin alike, and nothing of what they say.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvtier.engine.request import RequestStats
from kvtier.errors import ConfigError
from kvtier.key import BlockKey
from kvtier.quantity import counted

_log = logging.getLogger(__name__)

KEY_BYTES = 16
MOST_WAITING = 4096
"""Requests that are kept because an earlier one has not ended: then that one is written with what it has given so far."""
MOST_KEYS = 1 << 18
"""Keys, and requests, that wait to be written, some 20 MiB; what comes on top of them is left out, and counted."""

MOST_BYTES = 4 << 30
"""Of one file: tens of millions of blocks."""


@dataclass(slots=True, eq=False)
class _Entry:
    seconds: float
    stats: RequestStats | None = None
    keys: tuple[BlockKey, ...] = ()
    ended: bool = False

    @property
    def weight(self) -> int:
        return 1 + len(self.keys)

    def line(self) -> bytes:
        assert self.stats is not None, "it has begun"
        fields = {
            "t": round(self.seconds, 6),
            "in": self.stats.prompt_tokens,
            "out": self.stats.completion_tokens,
            "keys": [key[:KEY_BYTES].hex() for key in self.keys],
        }
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _place(status: os.stat_result) -> tuple[int, int]:
    """What a file is, whatever its name."""
    return status.st_dev, status.st_ino


class Recorder:
    """Writes requests to a file on a thread of its own. Whoever tells it of them, on any thread, never waits for the disk.

    Where the disk fails, the file is deleted or has ``limit`` bytes, it stops for good, with one log line; what was written
    before stays readable.
    """

    def __init__(
        self,
        path: Path,
        block_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[int, memoryview], int] = os.write,
        limit: int = MOST_BYTES,
    ) -> None:
        """Raises ``ConfigError`` where the file is there already or cannot be made. It is for this user alone."""
        self._path = path
        self._clock = clock
        self._write_some = write
        self._limit = limit
        self._began = clock()
        self._lock = threading.Condition()
        self._open: dict[str, _Entry] = {}
        """By id, which another request may be given as soon as this one has ended."""
        self._coming: dict[_Entry, None] = {}
        """Requests that are not to be written yet, in the order in which they came."""
        self._ready: list[_Entry] = []
        self._held = 0
        self._skipped = 0
        self._stopped = False
        self._size = 0
        """Bytes of whole lines in the file."""
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise ConfigError(f"record: {path} is there already; give a name that is free") from None
        except OSError as failed:
            raise ConfigError(f"record: {path}: {failed.strerror}") from failed
        self._place = _place(os.fstat(self._file))
        head = {"format": "kvtier-trace", "version": 1, "block_tokens": block_tokens}
        try:
            self._put(json.dumps(head).encode() + b"\n")
        except OSError as failed:
            os.close(self._file)
            raise ConfigError(f"record: {path}: {failed.strerror}") from failed
        self._head = self._size
        self._thread = threading.Thread(target=self._run, name="kvtier-recorder", daemon=True)
        self._thread.start()

    def came(self, request_id: str) -> None:
        """A request was taken."""
        with self._lock:
            if not self._stopped:
                entry = self._open[request_id] = _Entry(self._clock() - self._began)
                self._coming[entry] = None

    def began(self, request_id: str, keys: Sequence[BlockKey], stats: RequestStats) -> None:
        """Its first token is there, and ``keys`` name its prompt's blocks; ``stats`` go on being kept by whoever calls."""
        with self._lock:
            entry = self._open.get(request_id)
            if entry is None or entry not in self._coming:
                return
            if self._held + len(keys) >= MOST_KEYS:
                self._skip(entry)
                return
            entry.keys, entry.stats = tuple(keys), stats
            self._held += entry.weight

    def ended(self, request_id: str) -> None:
        """It gives no token any more. One that never gave any has used no block, and is not recorded."""
        with self._lock:
            entry = self._open.pop(request_id, None)
            if entry is None or entry not in self._coming:
                return
            entry.ended = True
            if entry.stats is None:
                del self._coming[entry]
            self._move_on()

    def close(self, timeout: float = 10.0) -> None:
        """Write what has come, and end; a file without a request is removed. Idempotent."""
        with self._lock:
            self._ready += [entry for entry in self._coming if entry.stats is not None]
            self._coming.clear()
            self._stopped = True
            self._lock.notify()
        self._thread.join(timeout)
        if self._skipped:
            _log.warning("record: %s left out of %s", counted(self._skipped, "request"), self._path)

    def _skip(self, entry: _Entry) -> None:
        del self._coming[entry]
        self._skipped += 1
        if self._skipped == 1:
            _log.warning("record: requests come faster than %s takes them; some are left out", self._path)

    def _move_on(self) -> None:
        """Hand on what no earlier request stands before any more."""
        while self._coming:
            first = next(iter(self._coming))
            if not first.ended and len(self._coming) <= MOST_WAITING:
                break
            if first.stats is None:
                self._skip(first)
                continue
            del self._coming[first]
            self._ready.append(first)
            self._lock.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._ready or self._stopped)
                ready, self._ready = self._ready, []
                stopped = self._stopped
            try:
                for entry in ready:
                    self._put(entry.line())
            except OSError as failed:
                _log.error("record: %s: %s; recording ends here", self._path, failed.strerror)
                self._give_up()
                stopped = True
            if stopped:
                self._end()
                return
            with self._lock:
                self._held -= sum(entry.weight for entry in ready)

    def _end(self) -> None:
        """Close the file, and remove it where it has no request: while it is open no other file is taken for it."""
        if self._size == self._head:
            with suppress(OSError):
                if _place(self._path.lstat()) == self._place:  # else it is somebody else's by now
                    self._path.unlink()
        os.close(self._file)

    def _give_up(self) -> None:
        with self._lock:
            self._stopped = True
            self._coming.clear()
            self._ready.clear()

    def _put(self, line: bytes) -> None:
        """Write a whole line, or nothing of it."""
        if not os.fstat(self._file).st_nlink:  # what is written would take room that nobody sees
            raise FileNotFoundError(errno.ENOENT, "the file was deleted")
        if self._size + len(line) > self._limit:
            raise OSError(errno.EFBIG, f"it would have more than {self._limit} bytes")
        left = memoryview(line)
        try:
            while left:
                left = left[self._write_some(self._file, left) :]
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)
