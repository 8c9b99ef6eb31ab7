"""What is thrown at everything that reads bytes from outside: no crash, no hang, no allocation from an unverified length.

Each target is one Hypothesis test without settings: the suite runs them briefly, ``python -m tests.fuzz`` as long as it is told.
"""

from __future__ import annotations

import math
import shutil
import socket
import sqlite3
import struct
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvtier.abc.medium import MediumContext, Outcome
from kvtier.codec.catalogue import codec_named, codec_names
from kvtier.codec.frame import HEADER_BYTES, PLAIN, FrameHeader
from kvtier.codec.raw import RawCodec
from kvtier.errors import CorruptFrame, MediumError
from kvtier.key import Adapter, BlockKey, Extra, Identity, Scope, chain_keys, root_key
from kvtier.params import build_params
from kvtier.pool import Slot
from kvtier.quantity import Bytes
from kvtier.storage_backends.memory import MemoryMedium
from kvtier.storage_backends.nvme import NvmeMedium
from kvtier.storage_backends.redis import RedisMedium
from kvtier.testing.blocks import LAYOUT
from kvtier.testing.media import names, payload, room
from kvtier.testing.tiers import lone_tier
from kvtier.transfer.copy import read_frames, write_frames
from kvtier.url import TierUrl
from tests.backends.support import Batch

MOST_BYTES = 8 << 20
"""Memory that one hostile input may make us take: far more than any of them has, far less than what they claim to have."""
TIMEOUT = 0.25
"""Seconds without a byte after which a reply is given up."""
MOST_SECONDS = 80 * TIMEOUT

Target = Callable[[], None]
_edits = st.lists(st.tuples(st.integers(0, HEADER_BYTES - 17), st.integers(0, 255)), max_size=12)
_numbers = st.sampled_from([0, 1, 2, 4095, (1 << 30) + 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]) | st.integers(
    0, (1 << 64) - 1
)


@contextmanager
def bounded() -> Iterator[None]:
    """Fails where what happens inside takes more memory than any input is worth."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES, f"{peak} bytes were allocated"


def _resealed(page: bytearray) -> bytearray:
    page[HEADER_BYTES - 16 : HEADER_BYTES] = PLAIN.of(memoryview(page)[: HEADER_BYTES - 16])
    return page


@given(st.binary(max_size=700), _edits, st.booleans(), _numbers, _numbers, st.sampled_from([5, 0, 1]))
def frame_headers(junk: bytes, edits: list[tuple[int, int]], sealed: bool, raw: int, stored: int, lie: int) -> None:
    """Any bytes, and headers whose own sum is right although what they say is not."""
    page = memoryview(bytearray(HEADER_BYTES))
    Batch(1, 5000).headers[0].pack_into(page)
    spoilt = bytearray(page)
    for at, value in edits:
        spoilt[at] = value
    if lie:
        struct.pack_into("<QQ", spoilt, 200, raw, stored)
    for made in (
        bytearray(junk),
        bytearray(junk[:HEADER_BYTES]) + spoilt[len(junk) :],
        _resealed(spoilt) if sealed else spoilt,
    ):
        try:
            header = FrameHeader.parse(memoryview(made))
        except CorruptFrame:
            continue
        assert max(header.raw_bytes, header.payload_bytes) <= 1 << 30
        again = memoryview(bytearray(HEADER_BYTES))
        header.pack_into(again)
        assert FrameHeader.parse(again) == header


@given(st.sampled_from(codec_names()), st.binary(max_size=6000), _edits, st.booleans(), _numbers, st.integers(0, 7000))
def frames_at_rest(name: str, junk: bytes, edits: list[tuple[int, int]], sealed: bool, length: int, cut: int) -> None:
    """Values that somebody has written to a shared medium: whatever they are, a reader gets the right block or none."""
    codec = codec_named(name)
    medium, batch = MemoryMedium(), Batch(3, 5000)
    write_frames(medium, batch.names, batch.sources, batch.headers, codec)
    whole = bytearray(medium.values[batch.names[0]])
    for at, value in edits:
        whole[at] = value
    if length:
        struct.pack_into("<Q", whole, 208, length)
    medium.values[batch.names[0]] = bytes(_resealed(whole) if sealed else whole)
    medium.values[batch.names[1]] = (medium.values[batch.names[1]][:HEADER_BYTES] + junk)[:cut]
    with bounded():
        outcomes, _ = read_frames(medium, batch.names, batch.into, batch.asked, codec, now=0.0)
    for index, outcome in enumerate(outcomes):
        assert not outcome.done or codec.lossy or batch.arrived_whole(index), "wrong bytes were called DONE"
    assert outcomes[2].done


_extras = st.lists(
    st.builds(
        Extra, st.sampled_from(["image", "embedding"]), st.integers(0, 15), st.binary(max_size=40), st.integers(0, 40)
    ),
    max_size=3,
)
_tokens = st.lists(st.integers(0, (1 << 32) - 1), min_size=32, max_size=32)


@given(_tokens, _tokens, _extras, _extras, st.text(max_size=20) | st.none(), st.binary(max_size=9) | st.none())
def keys_and_extras(
    tokens: list[int], others: list[int], extras: list[Extra], more: list[Extra], salt: str | None, tenant: bytes | None
) -> None:
    """Equal keys mean equal content: what differs anywhere has another key from there on."""
    identity = Identity("m", "r", "bf16", LAYOUT)
    scope = Scope(tenant=tenant, salt=salt, adapter=Adapter("a", b"d"))
    root = root_key(identity, scope)
    assert (root == root_key(identity, Scope(adapter=scope.adapter))) == (tenant is None and salt is None)
    one, two = (chain_keys(root, given, 16, {1: held}) for given, held in ((tokens, extras), (others, more)))
    assert (one[0] == two[0]) == (tokens[:16] == others[:16])
    assert (one[1] == two[1]) == (tokens == others and extras == more)
    assert one == chain_keys(BlockKey(bytes(root)), tokens, 16, {1: list(extras)})


_cells = (
    st.none()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.sampled_from([0, 1, 5, 8192, 104448, -1, math.inf, -math.inf, 1e300])
    | st.floats(allow_nan=False)
    | st.text(max_size=12).filter(lambda text: text.isprintable())
    | st.binary(max_size=48)
    | st.sampled_from([bytes(40), b"x" * 40, b"x" * 32, b"t" * 16])
)
_TABLES = {"block": 8, "origin": 5, "epoch": 2, "about": 4, "freed": 2}
_rows = st.lists(
    st.sampled_from(sorted(_TABLES)).flatmap(
        lambda table: st.tuples(st.just(table), st.lists(_cells, min_size=8, max_size=8))
    ),
    max_size=8,
)
_nvme = NvmeMedium.Params(capacity=Bytes(4 << 20), threads=1, direct=False)


def _nvme_with_blocks(directory: Path, batch: Batch) -> None:
    medium = NvmeMedium(directory, batch.block_bytes, _nvme)
    write_frames(medium, list(range(len(batch.names))), batch.sources, batch.headers, codec_named("raw"))
    medium.journal.commit(batch.rows(list(range(len(batch.names)))), [])
    medium.raise_epochs({'["m", null, null]': 3}, {})
    medium.remember("scope", b"d" * 32, "{}")
    medium.close()


@given(
    _rows,
    st.lists(
        st.tuples(st.sampled_from(["address", "parent", "depth", "origin", "used", "expires_at", "slot"]), _cells),
        max_size=3,
    ),
    st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=4),
)
def nvme_index(
    rows: list[tuple[str, list[object]]], cells: list[tuple[str, object]], bytes_: list[tuple[int, int]]
) -> None:
    """Rows, cells and bytes of the index that nobody of us wrote: the tier opens, and reads right blocks or none."""
    batch = Batch(4, 5000)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "n"
        _nvme_with_blocks(directory, batch)
        database = sqlite3.connect(directory / "index.sqlite", isolation_level=None)
        (stride,) = database.execute("SELECT DISTINCT stride FROM block").fetchone()
        for column, value in cells:
            _try(database, f"UPDATE block SET {column} = ? WHERE slot = 1", [value])
        for table, values in rows:
            given_row = [stride, *values][: _TABLES[table]] if table in ("block", "freed") else values[: _TABLES[table]]
            _try(database, f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(given_row))})", given_row)
        database.close()
        if bytes_:
            whole = bytearray((directory / "index.sqlite").read_bytes())
            for at, value in bytes_:
                whole[at % len(whole)] = value
            (directory / "index.sqlite").write_bytes(whole)
        _read_back(directory, batch)


def _try(database: sqlite3.Connection, query: str, values: list[object]) -> None:
    with suppress(sqlite3.IntegrityError, OverflowError):  # SQLite itself refuses that one
        database.execute(query, values)


def _read_back(directory: Path, batch: Batch) -> None:
    with bounded():
        medium = NvmeMedium(directory, batch.block_bytes, _nvme)
        tier = lone_tier(medium)
    outcomes, _ = tier.fetch(batch.names, [view[:8192] for view in batch.into], batch.asked)
    for index, outcome in enumerate(outcomes):
        assert not outcome.done or batch.arrived_whole(index)
    for answer in (tier.epochs(), medium.epochs(), medium.records("scope")):
        assert answer is None or all(type(value) in (int, str) for value in answer.values())
    assert tier.pool.check() == []
    fresh = Batch(2, batch.block_bytes, seed=9)
    places = [slot for slot in range(medium.slots) if tier.pool.entry(Slot(slot)) is None][:2]
    write_frames(medium, places, fresh.sources, fresh.headers, RawCodec())
    medium.journal.commit(fresh.rows(places), [])
    assert {record.address for record in medium.journal.load()} >= set(fresh.names), "new rows do not stay"
    tier.close()
    shutil.rmtree(directory)


class HostileServer:
    """Answers a client's greeting as a Redis server does, and whatever it asks after that with given bytes."""

    GREETINGS = (b"CLIENT", b"HELLO", b"AUTH", b"SELECT")

    def __init__(self, directory: Path, reply: bytes, *, endless: bool) -> None:
        self.path = directory / "redis.sock"
        self._reply = reply
        self._endless = endless
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self.path))
        self._socket.listen(8)
        self._closing = threading.Event()
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                came, _ = self._socket.accept()
            except OSError:
                return
            self._open.append(came)
            threading.Thread(target=self._serve, args=(came,), daemon=True).start()

    def _serve(self, came: socket.socket) -> None:
        try:
            while data := came.recv(1 << 16):
                if any(word in data for word in self.GREETINGS):
                    came.sendall(b"+OK\r\n" * sum(data.count(b"\r\n" + word) for word in self.GREETINGS))
                    continue
                came.sendall(self._reply)
                while self._endless and not self._closing.is_set():
                    came.sendall(bytes(1 << 16))
        except OSError:
            pass

    def close(self) -> None:
        self._closing.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for each in self._open:
            each.close()
        self._thread.join(5)


_lengths = st.sampled_from(
    [b"-1", b"0", b"3", b"10", b"1000", b"99999999999", b"-7", b"1" * 30, b"", b"x", b"+5", b" 3", b"0x10"]
)
_replies = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.builds(
            lambda kind, length: kind + length + b"\r\n",
            st.sampled_from([b"$", b"*", b":", b"+", b"-", b"%", b"_"]),
            _lengths,
        ),
        st.sampled_from(
            [b"+OK\r\n", b":1\r\n", b"$3\r\nabc\r\n", b"-ERR no\r\n", b"-OOM no\r\n", b"-NOSCRIPT no\r\n", b"*0\r\n"]
        ),
        st.sampled_from(
            [b"-LOADING no\r\n", b"-WRONGPASS no\r\n", b"\r\n", b"$-1\r\n", b"*-1\r\n", b"*1\r\n" * 3000, b"A" * 5000]
        ),
    ),
    max_size=12,
).map(b"".join)


@given(_replies, st.booleans(), st.sampled_from(["true", "false"]), st.integers(0, 10))
def redis_replies(reply: bytes, endless: bool, scripts: str, which: int) -> None:
    """Whatever a server says: an answer or a ``MediumError``, in bounded time and memory."""
    with tempfile.TemporaryDirectory() as folder:
        server = HostileServer(Path(folder), reply, endless=endless)
        url = TierUrl.parse(f"redis+unix://{server.path}")
        params = build_params(RedisMedium.Params, {"timeout": TIMEOUT, "connections": 1, "scripts": scripts}, "fuzz")
        wanted = names(3)
        calls: list[Callable[[RedisMedium], object]] = [
            lambda medium: medium.probe(wanted),
            lambda medium: _as_said(medium.read(wanted, [[room(300)] for _ in wanted])),
            lambda medium: _as_said(medium.write(wanted, [[payload(1, 300)] for _ in wanted])),
            lambda medium: medium.touch(wanted),
            lambda medium: medium.delete(wanted),
            lambda medium: [next(medium.scan(), None) for _ in range(3)],
            lambda medium: medium.heads(wanted, 512),
            lambda medium: medium.epochs(),
            lambda medium: medium.raise_epochs({"a": 1}, {}),
            lambda medium: medium.records("scope"),
            lambda medium: medium.ping(),
        ]
        try:
            medium = RedisMedium.open(url, params, MediumContext(300))
            began = time.monotonic()
            with bounded(), suppress(MediumError):
                calls[which](medium)
            took = time.monotonic() - began
            medium.close()
            assert took < MOST_SECONDS, f"it took {took:.1f} s"
        finally:
            server.close()


def _as_said(outcomes: list[Outcome]) -> None:
    assert len(outcomes) == 3


TARGETS: dict[str, Target] = {
    each.__name__: each for each in (frame_headers, frames_at_rest, keys_and_extras, nvme_index, redis_replies)
}
"""By name."""
EXAMPLES = {"frame_headers": 200, "frames_at_rest": 60, "keys_and_extras": 40, "nvme_index": 25, "redis_replies": 60}
"""Of each in the suite."""
