"""The SQLite index of an NVMe directory: which slot of which size class holds what, and who was used last.

It is a cache of the header pages, which hold the truth: a database that is lost, corrupt or of another schema is
replaced and filled from them. A freed slot keeps its frame until it is written again; ``freed`` tells it from a slot whose
row was lost.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from kvtier.abc.medium import MOST_RECORDS, Journal, Record
from kvtier.errors import DISK_FULL, MediumError, MediumFull
from kvtier.key import Address

SCHEMA = 3
"""``PRAGMA user_version``: raised whenever the tables change."""
WAL_BYTES = 2 << 20
"""The write-ahead log is kept under this: checkpointed every 256 pages, touches written 256 rows at a time."""
ROW_BYTES = 288
"""Room that one row takes at most, the tree's own slack and a row of ``origin`` for each block included."""

_TABLES = """
    CREATE TABLE block (
        stride INTEGER, slot INTEGER, address BLOB, parent BLOB, depth INTEGER, origin INTEGER, used REAL,
        expires_at REAL, PRIMARY KEY (stride, slot)
    ) WITHOUT ROWID;
    CREATE TABLE freed (stride INTEGER, slot INTEGER, PRIMARY KEY (stride, slot)) WITHOUT ROWID;
    CREATE TABLE origin (id INTEGER PRIMARY KEY, tenant BLOB, identity BLOB, adapter BLOB, epoch INTEGER);
    CREATE TABLE about (kind TEXT, digest BLOB, text TEXT, seen REAL, PRIMARY KEY (kind, digest)) WITHOUT ROWID;
    CREATE TABLE epoch (name TEXT PRIMARY KEY, epoch INTEGER) WITHOUT ROWID;
"""
_NOT_OURS = {
    "block": """
        typeof(stride) != 'integer' OR typeof(slot) != 'integer' OR slot NOT BETWEEN 0 AND 4294967295 OR
        typeof(address) != 'blob' OR length(address) != 40 OR
        typeof(parent) != 'blob' OR length(parent) != 40 OR typeof(depth) != 'integer' OR
        depth NOT BETWEEN 0 AND 4294967295 OR typeof(used) != 'real' OR typeof(expires_at) NOT IN ('real', 'null') OR
        typeof(origin) != 'integer' OR origin NOT IN (SELECT id FROM origin)
    """,
    "freed": "typeof(stride) != 'integer' OR typeof(slot) != 'integer' OR slot NOT BETWEEN 0 AND 4294967295",
    "origin": """
        typeof(tenant) != 'blob' OR length(tenant) != 16 OR typeof(identity) != 'blob' OR length(identity) != 32 OR
        typeof(adapter) != 'blob' OR length(adapter) != 16 OR typeof(epoch) != 'integer' OR
        epoch NOT BETWEEN 0 AND 4294967295 OR
        id NOT IN (SELECT min(id) FROM origin GROUP BY tenant, identity, adapter, epoch)
    """,
    "about": "typeof(kind) != 'text' OR typeof(digest) != 'blob' OR typeof(text) != 'text' OR typeof(seen) != 'real'",
    "epoch": "typeof(name) != 'text' OR typeof(epoch) != 'integer' OR epoch NOT BETWEEN 1 AND 4294967295",
}
"""Per table what no row of ours is. SQLite keeps any value in any column: one such row, and the header pages are believed."""
EPOCHS_COPY = "epochs.json"
"""File beside the database that outlives it."""
_FLUSH_SECONDS = 5.0
_FLUSH_ROWS = 256
_MOST_ORIGINS = 1 << 14
"""Origins that are added before those that no block has any more are looked for."""
_Origin: TypeAlias = tuple[bytes, bytes, bytes, int]
"""Tenant, identity, adapter and epoch: what most blocks have in common with many others."""


def nowhere(point: str) -> None:
    """Called at each named point of the write path; a test puts a function of its own in this one's place.

    In order: ``after delete`` (its slots may be reused), ``before payload`` and ``after payload`` (per slot), ``after sync``,
    ``after commit``.
    """


def _schema(database: sqlite3.Connection) -> list[tuple[str, str, str | None]]:
    return database.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()


def look_through(database: sqlite3.Connection) -> None:
    """Raises ``sqlite3.DatabaseError`` where there is a table, or a row, that no build of this schema writes."""
    with closing(sqlite3.connect(":memory:")) as ours:
        ours.executescript(_TABLES)
        if _schema(database) != _schema(ours):
            raise sqlite3.DatabaseError("its tables are not those of this schema")
    for table, not_ours in _NOT_OURS.items():
        if database.execute(f"SELECT 1 FROM {table} WHERE {not_ours} LIMIT 1").fetchone():  # noqa: S608 - words of ours
            raise sqlite3.DatabaseError(f"a row of {table} is none of ours")
    for table in ("about", "epoch"):
        database.execute(f"SELECT * FROM {table}").fetchall()  # noqa: S608 - raises where a text is not UTF-8


_PASSING = {"SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE", "SQLITE_IOERR_SHMOPEN", "SQLITE_IOERR_SHMMAP"}
"""Errors of a write, and of the log's index, which a full disk has no room for."""


def passes(error: Exception) -> bool:
    """Whether an error says nothing of what the database holds: another process has it locked, or the disk takes nothing."""
    return str(error) in ("database is locked", "database or disk is full") or (
        getattr(error, "sqlite_errorname", None) in _PASSING  # from Python 3.11 on
    )


def meant(error: Exception, path: Path) -> MediumError:
    """What SQLite's error means for the tier."""
    kind = MediumFull if "full" in str(error) else MediumError
    return kind(f"NVMe index {path}: {error}")


_MAGIC = b"SQLite format 3\0"


class NvmeJournal(Journal):
    """Rows of one directory; ``load``, ``commit`` and ``touch`` speak of the active size class, ``stride``.

    Thread-safe. ``fresh`` says that there was no usable database: whoever opens it fills it from the header pages.
    """

    def __init__(self, path: Path, stride: int) -> None:
        self.at: Callable[[str], None] = nowhere
        self._path = path
        self._stride = stride
        self._lock = threading.Lock()
        self._copying = threading.Lock()
        self._unsafe: frozenset[str] = frozenset()
        """Names of epochs that the copy may lack."""
        self._touched: dict[int, float] = {}
        self._flushed = time.monotonic()
        self._origins: dict[_Origin, int] | None = None
        """Numbers of the origins that the table has; None: to be read again."""
        self._epochs_copy = path.with_name(EPOCHS_COPY)
        self.fresh = not path.exists()
        self.lost: str | None = None
        """Why an existing database could not be used."""
        try:
            self._database = self._opened_or_anew()
        except sqlite3.Error as error:
            raise meant(error, path) from error
        try:
            self._drop_origins()
            self._take_copied_epochs()
        except BaseException:
            self._database.close()
            raise

    def _files(self) -> list[Path]:
        return [self._path, Path(f"{self._path}-wal"), Path(f"{self._path}-shm")]

    def _opened_or_anew(self) -> sqlite3.Connection:
        try:
            return self._opened()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the latter is of a damaged schema
            if passes(error):
                raise
            self.lost = str(error)
            self.fresh = True
            for part in self._files():
                part.unlink(missing_ok=True)
            return self._opened()

    def _opened(self) -> sqlite3.Connection:
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite gives its other files the same mode
        with self._path.open("rb") as file:
            head = file.read(20)
        if head.startswith(_MAGIC) and not {*head[18:]} <= {1, 2}:  # SQLite would open it, and write nothing
            raise sqlite3.DatabaseError(f"file format {max(head[18:])}, which is not known")
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
            else:
                look_through(database)
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
                    self._origins = None
                    if self._database.in_transaction:
                        self._database.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise meant(error, self._path) from error

    def load(self) -> Iterator[Record]:
        once: dict[Address, Address] = {}
        with self._transaction() as database:
            origins = {number: origin for origin, number in self._known_origins(database).items()}
            query = "SELECT slot, address, parent, depth, origin, used, expires_at FROM block WHERE stride = ?"
            for slot, name, above, depth, origin, used, expires_at in database.execute(query, (self._stride,)):
                address, parent = once.setdefault(name, name), once.setdefault(above, above)
                tenant, identity, adapter, epoch = origins[origin]
                yield Record(slot, address, parent, depth, tenant, used, expires_at, identity, adapter, epoch)
            database.execute("PRAGMA shrink_memory")  # of pages that are read once

    def identities(self) -> set[bytes]:
        with self._transaction() as database:
            return {identity for (identity,) in database.execute("SELECT DISTINCT identity FROM origin")}

    def commit(self, added: Sequence[Record], removed: Sequence[int]) -> None:
        with self._transaction() as database:
            if removed:
                rows = [(self._stride, slot) for slot in removed]
                database.executemany("DELETE FROM block WHERE stride = ? AND slot = ?", rows)
                database.executemany("INSERT OR REPLACE INTO freed VALUES (?, ?)", rows)
            self._insert(database, self._stride, added)
            for slot in [*removed, *(record.slot for record in added)]:
                self._touched.pop(slot, None)
        self.at("after commit" if added else "after delete")

    def touch(self, used: Iterable[tuple[int, float]]) -> None:
        with self._lock:
            self._touched.update(used)
            due = time.monotonic() - self._flushed >= _FLUSH_SECONDS
        if due:
            self.flush()

    def flush(self) -> None:
        """Write the recency that has been noted so far."""
        self._flushed = time.monotonic()
        with self._lock:
            touched, self._touched = self._touched, {}
        rows = ((when, self._stride, slot) for slot, when in touched.items())
        while batch := list(islice(rows, _FLUSH_ROWS)):
            with self._transaction() as database:
                database.executemany("UPDATE block SET used = ? WHERE stride = ? AND slot = ?", batch)
        if self._origins is not None and len(self._origins) > self._kept_origins + _MOST_ORIGINS:
            self._drop_origins()

    def insert(self, stride: int, records: Sequence[Record]) -> None:
        """Rows of any size class, after the header pages were scanned."""
        for start in range(0, len(records), _FLUSH_ROWS):
            with self._transaction() as database:
                self._insert(database, stride, records[start : start + _FLUSH_ROWS])

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
            for table in ("block", "freed"):
                database.execute(
                    f"DELETE FROM {table} WHERE stride = ? AND slot >= ? AND slot < ?",  # noqa: S608 - two names of ours
                    (stride, first, 1 << 62 if last is None else last),
                )

    def extents(self, stride: int, slots_each: int) -> dict[int, float]:
        """The extents of a size class that hold anything, and when something in them was used last."""
        query = "SELECT slot / ?, max(used) FROM block WHERE stride = ? GROUP BY 1"
        with self._transaction() as database:
            return dict(database.execute(query, (slots_each, stride)).fetchall())

    def remember(self, kind: str, digest: bytes, text: str) -> None:
        with self._transaction() as database:
            database.execute("INSERT OR REPLACE INTO about VALUES (?, ?, ?, ?)", (kind, digest, text, time.time()))
            database.execute(
                "DELETE FROM about WHERE kind = ? AND digest NOT IN "
                "(SELECT digest FROM about WHERE kind = ? ORDER BY seen DESC LIMIT ?)",
                (kind, kind, MOST_RECORDS),
            )

    def records(self, kind: str) -> dict[bytes, str]:
        with self._transaction() as database:
            return dict(database.execute("SELECT digest, text FROM about WHERE kind = ?", (kind,)))

    def epochs(self) -> dict[str, int]:
        """Those that would outlive the database: whoever has raised one that is not here has to raise it again."""
        unsafe = self._unsafe
        return {name: epoch for name, epoch in self._epochs().items() if name not in unsafe}

    def _epochs(self) -> dict[str, int]:
        with self._transaction() as database:
            return dict(database.execute("SELECT name, epoch FROM epoch"))

    def raise_epochs(self, wanted: Mapping[str, int], implied: Mapping[str, int]) -> None:
        with self._copying:
            self._unsafe = self._unsafe | wanted.keys()
            self._raise(wanted, implied)
            if wanted:
                self._copy_epochs()
                self._unsafe = frozenset()

    def _raise(self, wanted: Mapping[str, int], implied: Mapping[str, int]) -> None:
        with self._transaction() as database:
            database.executemany(
                "INSERT INTO epoch VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET epoch = max(epoch, excluded.epoch)",
                wanted.items(),
            )
            database.executemany("DELETE FROM epoch WHERE name = ? AND epoch <= ?", implied.items())

    def _copy_epochs(self) -> None:
        """A copy outside the database, on the disk when this returns: what was cleared must not come back from header pages."""
        fresh = self._epochs_copy.with_suffix(".new")
        try:
            file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(file, "w", encoding="utf-8") as text:
                json.dump(self._epochs(), text)
                text.flush()
                os.fsync(text.fileno())
            fresh.replace(self._epochs_copy)
            folder = os.open(fresh.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            kind = MediumFull if error.errno in DISK_FULL else MediumError
            raise kind(f"{self._epochs_copy}: {error.strerror}") from error

    def _take_copied_epochs(self) -> None:
        """A database that is new has none, and one whose machine lost its power may lack the last ones."""
        try:
            copied = self._copied_epochs()
        except MediumError:
            if self.fresh:
                raise
            copied = {}
        rows = self._epochs()
        lacking = {name: epoch for name, epoch in copied.items() if rows.get(name, 0) < epoch}
        if lacking:  # else a disk that is full to the last byte is not to be written to
            self._raise(lacking, {})
        if rows | lacking != copied:
            with suppress(MediumFull):
                self._copy_epochs()

    def _copied_epochs(self) -> dict[str, int]:
        try:
            found: dict[str, int] = json.loads(self._epochs_copy.read_text(encoding="utf-8"))
            for name, epoch in found.items():
                name.encode()
                if type(epoch) is not int or not 0 < epoch < 1 << 32:
                    raise ValueError(f"{name[:80]!r} has the epoch {str(epoch)[:20]}")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise MediumError(
                f"{self._epochs_copy}: cannot be read ({error}); what was cleared is not known"
            ) from error
        return found

    def _known_origins(self, database: sqlite3.Connection) -> dict[_Origin, int]:
        if self._origins is None:
            rows = database.execute("SELECT tenant, identity, adapter, epoch, id FROM origin")
            self._origins = {row[:4]: row[4] for row in rows}
        return self._origins

    def _drop_origins(self) -> None:
        """Forget origins that no block has any more."""
        with self._transaction() as database:
            database.execute("DELETE FROM origin WHERE id NOT IN (SELECT DISTINCT origin FROM block)")
            self._origins = None
            self._kept_origins = len(self._known_origins(database))

    def _insert(self, database: sqlite3.Connection, stride: int, records: Sequence[Record]) -> None:
        known = self._known_origins(database)
        rows = []
        for one in records:
            origin = (one.tenant, one.identity, one.adapter, one.epoch)
            number = known.get(origin)
            if number is None:
                added = database.execute(
                    "INSERT INTO origin (tenant, identity, adapter, epoch) VALUES (?, ?, ?, ?)", origin
                )
                number = known[origin] = int(added.lastrowid or 0)
            rows.append((stride, one.slot, one.address, one.parent, one.depth, number, one.used, one.expires_at))
        database.executemany("INSERT OR REPLACE INTO block VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        database.executemany("DELETE FROM freed WHERE stride = ? AND slot = ?", [row[:2] for row in rows])

    def close(self) -> None:
        try:
            self.flush()
        finally:
            with self._lock:
                self._database.close()
