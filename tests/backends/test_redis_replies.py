"""A server that is no Redis, or a hostile one: an answer or a ``MediumError``, soon and within bounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.abc.medium import MediumContext
from kvtier.errors import MediumError, MediumRefused
from kvtier.params import build_params
from kvtier.storage_backends import redis_wire
from kvtier.storage_backends.redis import RedisMedium
from kvtier.testing.media import names, room
from kvtier.url import TierUrl
from tests.fuzz.targets import HostileServer, bounded

CALLS: dict[str, Callable[[RedisMedium], object]] = {
    "probe": lambda medium: medium.probe(names(3)),
    "read": lambda medium: medium.read(names(3), [[room(300)] for _ in range(3)]),
    "scan": lambda medium: list(medium.scan()),
    "epochs": lambda medium: medium.epochs(),
    "raise": lambda medium: medium.raise_epochs({"a": 1}, {}),
    "ping": lambda medium: medium.ping(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("reply", "endless"),
    [
        (b"$99999999999\r\n", True),  # a length that nobody should wait for, and bytes that never end
        (b"\0", True),
        (b"$" + b"9" * 30 + b"\r\n", False),
        (b"*1\r\n" * 3000, False),  # arrays within arrays
        (b":x\r\n", False),
        (b"*99999999\r\n:1\r\n", False),
    ],
    ids=["endless value", "endless line", "huge length", "nested", "no number", "long array"],
)
def test_what_no_server_says_is_refused(tmp_path: Path, call: str, reply: bytes, endless: bool) -> None:
    server = HostileServer(tmp_path, reply, endless=endless)
    params = build_params(RedisMedium.Params, {"timeout": 0.25, "connections": 1}, "test")
    medium = RedisMedium.open(TierUrl.parse(f"redis+unix://{server.path}"), params, MediumContext(300))
    began = time.monotonic()
    with bounded(), pytest.raises(MediumError):
        CALLS[call](medium)
    assert time.monotonic() - began < 30
    medium.close()
    server.close()


def test_elements_count_however_short_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_wire, "_REPLY_BYTES", 1 << 18)
    server = HostileServer(tmp_path, b"*5000\r\n" + b"*0\r\n" * 5000, endless=False)
    params = build_params(RedisMedium.Params, {"timeout": 0.25, "connections": 1}, "test")
    medium = RedisMedium.open(TierUrl.parse(f"redis+unix://{server.path}"), params, MediumContext(300))
    with pytest.raises(MediumRefused, match="not RESP"):
        medium.raise_epochs({"a": 1}, {})
    medium.close()
    server.close()


def test_an_answer_of_another_kind_is_refused_in_words(tmp_path: Path) -> None:
    server = HostileServer(tmp_path, b"+OK\r\n", endless=False)
    params = build_params(RedisMedium.Params, {"timeout": 0.25, "connections": 1}, "test")
    medium = RedisMedium.open(TierUrl.parse(f"redis+unix://{server.path}"), params, MediumContext(300))
    with pytest.raises(MediumRefused, match="not an answer to what was asked"):
        medium.raise_epochs({"a": 1}, {})
    medium.close()
    server.close()
