"""A connection's bytes: whatever pieces they go and come in, and a server that stops in the middle of a value."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from kvtier.abc.medium import Outcome, Status
from kvtier.storage_backends.redis_wire import Wire, _send
from kvtier.testing.media import payload, room

TIMEOUT = 0.3


def packed(*words: str) -> list[bytes]:
    return [" ".join(words).encode() + b"\r\n"]


@pytest.fixture
def ends() -> Iterator[tuple[Wire, socket.socket]]:
    """A wire and the server's end of it."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(60)
    ours.settimeout(TIMEOUT)
    connection = SimpleNamespace(_sock=ours, connect=lambda: None, disconnect=ours.close, pack_command=packed)
    wire = Wire(lambda: connection)
    yield wire, theirs
    wire.close()
    theirs.close()


class Narrow:
    """A socket that takes a few bytes of what it is given, as one does at its time-out."""

    def __init__(self, width: int) -> None:
        self._width = width
        self.came = b""

    def sendmsg(self, pieces: Sequence[bytes | memoryview]) -> int:
        taken = b"".join(pieces)[: self._width]
        self.came += taken
        return len(taken)


@pytest.mark.parametrize("width", [1, 99, 100, 250, 1 << 20])
def test_pieces_go_out_whole_however_few_bytes_the_socket_takes(width: int) -> None:
    pieces: list[bytes | memoryview] = [b"", bytes(payload(1, 100)), payload(2, 300), b"", bytes(payload(3, 57)), b""]
    sock = Narrow(width)
    _send(cast("socket.socket", sock), pieces)
    assert sock.came == b"".join(pieces)


def test_values_that_come_in_crumbs_and_of_other_sizes_are_told_apart(ends: tuple[Wire, socket.socket]) -> None:
    wire, server = ends
    values = [payload(1, 3000), payload(2, 12), payload(3, 5000), payload(4, 5000)]
    replies = b"".join(
        [
            *(b"$%d\r\n%b\r\n" % (len(value), bytes(value)) for value in values[:3]),
            b"$-1\r\n",
            b"-ERR no\r\n$5000\r\n",
            values[3],
            b"\r\n",
        ]
    )

    def crumble() -> None:
        for start in range(0, len(replies), 61):
            server.sendall(replies[start : start + 61])

    giver = threading.Thread(target=crumble)
    giver.start()
    rooms = [[room(512), room(2488)] for _ in range(6)]
    rooms[5] = [room(512), room(4488)]
    ends_of = list(wire.get_all([(b"k%d" % index, into) for index, into in enumerate(rooms)]))
    giver.join()
    assert ends_of[0] == Outcome(Status.DONE, 3000)
    assert b"".join(rooms[0]) == values[0]
    assert ends_of[1] == Outcome(Status.DONE, 12)
    assert bytes(rooms[1][0][:12]) == values[1]
    assert [end.status for end in ends_of[2:4] if isinstance(end, Outcome)] == [Status.FAILED, Status.ABSENT]
    assert "no" in str(ends_of[4])
    assert ends_of[5] == Outcome(Status.DONE, 5000)
    assert b"".join(rooms[5]) == values[3]


@pytest.mark.parametrize("came", [0, 7, 4000], ids=["before it", "in its line", "in its bytes"])
def test_a_server_that_stops_is_waited_for_twice_at_most(ends: tuple[Wire, socket.socket], came: int) -> None:
    wire, server = ends
    server.sendall((b"$100000\r\n" + bytes(100_000))[:came])
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="timed out"):
        list(wire.get_all([(b"k", [room(512), room(99_488)])]))
    assert time.monotonic() - start < 2 * TIMEOUT + 10.0
    assert not wire.open


def test_the_kernel_keeps_the_time_out(ends: tuple[Wire, socket.socket]) -> None:
    wire, server = ends
    server.sendall(b"+PONG\r\n")
    assert wire.call("PING") == b"PONG"
    sock = wire._connection._sock
    assert sock.gettimeout() is None, "Python polls ahead of every call"
    kept = struct.unpack("@ll", sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
    assert abs(kept[0] + kept[1] / 1e6 - TIMEOUT) < 0.02
