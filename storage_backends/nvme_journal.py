"""The SQLite index of an NVMe directory: which slot of which size class holds what, and who was used last.

It is a cache of the header pages, which hold the truth: a database that is lost, corrupt or of another schema is
replaced and filled from them.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from kvtier.abc.medium import Journal, Record
from kvtier.errors import MediumError, MediumFull

SCHEMA = 1
"""``PRAGMA user_version``: raised whenever the tables change."""
WAL_BYTES = 2 << 20
"""The write-ahead log is kept under this: checkpointed every 256 pages, touches written 256 rows at a time."""
ROW_BYTES = 256
"""Room that one row takes at most, the tree's own slack included."""

_TABLES = """
    CREATE TABLE block (
        stride INTEGER, slot INTEGER, address BLOB, parent BLOB, depth INTEGER, tenant BLOB, used REAL, expires_at REAL,
        PRIMARY KEY (stride, slot)
    ) WITHOUT ROWID;
    CREATE TABLE about (kind TEXT, digest BLOB, text TEXT, PRIMARY KEY (kind, digest)) WITHOUT ROWID;
"""
_FLUSH_SECONDS = 5.0
_FLUSH_ROWS = 256


class NvmeJournal(Journal):
    """Rows of one directory; ``load``, ``commit`` and ``touch`` speak of the active size class, ``stride``.

    Thread-safe. ``fresh`` says that there was no usable database: whoever opens it fills it from the header pages.
    """

    def __init__(self, path: Path, stride: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._stride = stride
        self._clock = clock
        self._lock = threading.Lock()
        self._touched: dict[int, float] = {}
        self._flushed = clock()
        self.fresh = not path.exists()
        self.lost: str | None = None
        """Why an existing database could not be used."""
        try:
            self._database = self._opened()
        except sqlite3.DatabaseError as error:
            self.lost = str(error)
            self.fresh = True
            for part in self._files():
                part.unlink(missing_ok=True)
            self._database = self._opened()

    def _files(self) -> list[Path]:
        return [self._path, Path(f"{self._path}-wal"), Path(f"{self._path}-shm")]

    def _opened(self) -> sqlite3.Connection:
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite gives its other files the same mode
        database = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=5.0)
        try:
            for pragma in (
                "journal_mode=WAL",
                "synchronous=NORMAL",
                "wal_autocheckpoint=256",
                "journal_size_limit=262144",
            ):
                database.execute(f"PRAGMA {pragma}")
            (schema,) = database.execute("PRAGMA user_version").fetchone()
            if schema == 0 and not database.execute("SELECT 1 FROM sqlite_master").fetchall():
                database.executescript(f"BEGIN; {_TABLES} COMMIT;")
                self.fresh = True
            elif schema != SCHEMA:
                raise sqlite3.DatabaseError(f"schema {schema} (0: never finished), this build has {SCHEMA}")
            elif (found := database.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(found)
        except BaseException:
            database.close()
            raise
        return database

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._database.execute("BEGIN IMMEDIATE")
                try:
                    yield self._database
                    self._database.execute("COMMIT")
                except BaseException:
                    if self._database.in_transaction:
                        self._database.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                kind = MediumFull if "full" in str(error) else MediumError
                raise kind(f"NVMe index {self._path}: {error}") from error

    def load(self) -> list[Record]:
        query = "SELECT slot, address, parent, depth, tenant, used, expires_at FROM block WHERE stride = ?"
        with self._transaction() as database:
            rows = database.execute(query, (self._stride,)).fetchall()
        return list(map(Record._make, rows))

    def commit(self, added: Sequence[Record], removed: Sequence[int]) -> None:
        with self._transaction() as database:
            if removed:
                rows = [(self._stride, slot) for slot in removed]
                database.executemany("DELETE FROM block WHERE stride = ? AND slot = ?", rows)
            _insert(database, self._stride, added)
            for slot in [*removed, *(record.slot for record in added)]:
                self._touched.pop(slot, None)

    def touch(self, used: Iterable[tuple[int, float]]) -> None:
        with self._lock:
            self._touched.update(used)
            due = self._clock() - self._flushed >= _FLUSH_SECONDS
        if due:
            self.flush()

    def flush(self) -> None:
        """Write the recency that has been noted so far."""
        self._flushed = self._clock()
        with self._lock:
            touched, self._touched = self._touched, {}
        rows = ((when, self._stride, slot) for slot, when in touched.items())
        while batch := list(islice(rows, _FLUSH_ROWS)):
            with self._transaction() as database:
                database.executemany("UPDATE block SET used = ? WHERE stride = ? AND slot = ?", batch)

    def insert(self, stride: int, records: Sequence[Record]) -> None:
        """Rows of any size class, after the header pages were scanned."""
        for start in range(0, len(records), _FLUSH_ROWS):
            with self._transaction() as database:
                _insert(database, stride, records[start : start + _FLUSH_ROWS])

    def seal(self) -> None:
        """A fresh database has been filled: from now on it counts."""
        with self._transaction() as database:
            database.execute(f"PRAGMA user_version = {SCHEMA}")

    def held_bytes(self) -> int:
        """What the file system counts for the database and its log."""
        return sum(part.stat().st_blocks * 512 for part in self._files() if part.exists())

    def drop(self, stride: int, first: int, last: int | None = None) -> None:
        """Forget the slots of a size class from ``first`` to ``last``, which is not among them."""
        with self._transaction() as database:
            database.execute(
                "DELETE FROM block WHERE stride = ? AND slot >= ? AND slot < ?",
                (stride, first, 1 << 62 if last is None else last),
            )

    def extents(self, stride: int, slots_each: int) -> dict[int, float]:
        """The extents of a size class that hold anything, and when something in them was used last."""
        query = "SELECT slot / ?, max(used) FROM block WHERE stride = ? GROUP BY 1"
        with self._transaction() as database:
            return dict(database.execute(query, (slots_each, stride)).fetchall())

    def remember(self, kind: str, digest: bytes, text: str) -> None:
        with self._transaction() as database:
            database.execute("INSERT OR REPLACE INTO about VALUES (?, ?, ?)", (kind, digest, text))

    def about(self) -> dict[tuple[str, bytes], str]:
        """All readable records."""
        with self._transaction() as database:
            return {(kind, digest): text for kind, digest, text in database.execute("SELECT * FROM about")}

    def close(self) -> None:
        try:
            self.flush()
        finally:
            with self._lock:
                self._database.close()


def _insert(database: sqlite3.Connection, stride: int, records: Sequence[Record]) -> None:
    database.executemany(
        "INSERT OR REPLACE INTO block VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (stride, one.slot, one.address, one.parent, one.depth, one.tenant, one.used, one.expires_at)
            for one in records
        ],
    )
