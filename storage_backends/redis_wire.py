"""One connection to a Redis-compatible server: redis-py's for everything small, its bare socket for payloads.

Payloads go from and into the caller's buffers. Between two calls the stream stands at the start of a reply: whatever is
sent is answered and drained in the same call, and any error closes the connection.
"""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis.exceptions as foreign
from redis.connection import Connection

from kvtier.abc.medium import Iovec, Outcome, Status
from kvtier.errors import MediumError, MediumFull, MediumRefused, MediumUnavailable
from kvtier.storage_backends.iovec import total

IN_FLIGHT_BYTES = 8 << 20
"""Values that one connection has on the way at a time."""
_SMALL_BYTES = 16 << 10
REQUESTS_AHEAD = 2
"""GETs on the way at a time: the server prepares one while the other is received. More is slower."""
_LINE_BYTES = 1 << 10
"""Longest line of a reply; a little more than it is received with it, past which values go to their own buffers."""
_SOCKET_BYTES = 1 << 20

FOREIGN: tuple[type[Exception], ...] = (
    *(kind for kind in vars(foreign).values() if isinstance(kind, type) and issubclass(kind, Exception)),
    OSError,
)
"""Every exception that redis-py or a socket raises."""

_ERROR_KINDS: dict[str, type[foreign.RedisError]] = {
    "OOM": foreign.OutOfMemoryError,
    "NOAUTH": foreign.AuthenticationError,
    "WRONGPASS": foreign.AuthenticationError,
    "NOPERM": foreign.NoPermissionError,
    "READONLY": foreign.ReadOnlyError,
    "LOADING": foreign.BusyLoadingError,
}

_UNAVAILABLE = (foreign.BusyLoadingError, foreign.TimeoutError, foreign.ConnectionError, foreign.ClusterDownError)


def medium_error(error: Exception, where: str) -> MediumError:
    """What a foreign exception means to us, in words that say what to change. Never repeats a credential."""
    text = str(error) or type(error).__name__
    tls = _caused_by(error, ssl.SSLError)
    if isinstance(error, foreign.OutOfMemoryError):
        return MediumFull(f"{where}: the server is out of memory ({text}); raise maxmemory or set an eviction policy")
    if isinstance(error, (foreign.AuthenticationError, foreign.AuthenticationWrongNumberOfArgsError)):
        return MediumRefused(f"{where}: the server refuses the user name or password of this URL ({text})")
    if isinstance(error, (foreign.NoPermissionError, foreign.AuthorizationError)):
        return MediumRefused(f"{where}: the user of this URL may not do that ({text}); extend its ACL")
    if isinstance(error, foreign.ReadOnlyError):
        return MediumRefused(f"{where}: this server is a read-only replica ({text}); name the primary")
    if tls is not None:
        return MediumRefused(
            f"{where}: TLS failed ({tls}); a plain server needs redis://, a private CA needs ?ca=file.pem"
        )
    if isinstance(error, foreign.InvalidResponse):
        return MediumRefused(f"{where}: the answer is not RESP; a TLS port needs rediss:// ({text[:80]})")
    if isinstance(error, (*_UNAVAILABLE, OSError)):
        return MediumUnavailable(f"{where}: {text}")
    return MediumError(f"{where}: {text}")


def _caused_by(error: BaseException | None, kind: type[BaseException]) -> BaseException | None:
    for _ in range(8):
        if error is None or isinstance(error, kind):
            return error
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Turn whatever redis-py or a socket raises inside into a ``MediumError``."""
    try:
        yield
    except FOREIGN as error:
        raise medium_error(error, where) from error


class Wire:
    """A connection that is opened when it is first used, and again after an error. For one thread at a time."""

    def __init__(self, make: Callable[[], Any]) -> None:
        """``make`` gives a redis-py connection that is not connected yet."""
        self._make = make
        self._connection: Any = None
        self._scratch = memoryview(bytearray(_LINE_BYTES))

    @property
    def open(self) -> bool:
        return self._connection is not None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.disconnect()
            self._connection = None

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """The connection; closed when anything goes wrong except an error reply, which leaves the stream in order."""
        try:
            if self._connection is None:
                self._connection = self._connected()
            yield self._connection
        except foreign.ResponseError:
            raise
        except BaseException:
            self.close()
            raise

    def _connected(self) -> Any:  # noqa: ANN401 - redis-py types its connections by halves
        connection = self._make()
        try:
            connection.connect()
        except foreign.ConnectionError as error:
            connection.disconnect()
            hung_up = "closed by server" in str(error).lower() or _caused_by(error, ConnectionResetError) is not None
            if hung_up and type(connection) is Connection:  # over TCP, without TLS
                raise foreign.InvalidResponse("it closed the connection at the first command") from error
            raise
        sock: socket.socket = connection._sock  # redis-py has no public name for it
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
        return connection

    def call(self, *words: Any) -> Any:  # noqa: ANN401 - a command's words and its reply
        """One command; an error reply is raised."""
        with self._opened() as connection:
            connection.send_command(*words, check_health=False)
            return connection.read_response(disable_decoding=True)

    def pipeline(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Replies in order; an error reply is returned, not raised."""
        replies: list[Any] = []
        with self._opened() as connection:
            connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            for _ in commands:
                try:
                    replies.append(connection.read_response(disable_decoding=True))
                except foreign.ResponseError as error:
                    replies.append(error)
        return replies

    def set_all(self, items: Sequence[tuple[bytes, Iovec]], ttl_ms: int) -> Iterator[Exception | None]:
        """SET every (name, value); per item, in order, None or the error reply."""
        expiry = b"\r\n$2\r\nPX\r\n$%d\r\n%d\r\n" % (len(str(ttl_ms)), ttl_ms)
        sent: deque[int] = deque()
        with self._opened() as connection:
            sock = connection._sock
            for name, value in items:
                size = total(value)
                while sent and sum(sent) + size > IN_FLIGHT_BYTES:
                    sent.popleft()
                    yield _reply(connection)
                _send(sock, b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, size), value, expiry)
                sent.append(size)
            for _ in sent:
                yield _reply(connection)

    def get_all(self, items: Sequence[tuple[bytes, Iovec]]) -> Iterator[Outcome | Exception]:
        """GET every name into its buffers; per item, in order, what came or the error reply."""
        requests = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name) for name, _ in items]
        with self._opened() as connection:
            stream = _Stream(connection._sock, self._scratch)
            connection._sock.sendall(b"".join(requests[:REQUESTS_AHEAD]))
            for index, (_, into) in enumerate(items):
                if index + REQUESTS_AHEAD < len(requests):
                    connection._sock.sendall(requests[index + REQUESTS_AHEAD])
                yield stream.value(into)
            if stream.left:
                raise foreign.InvalidResponse("more came than was asked for")


class _Stream:
    """Replies of a run of GETs: lines through a small buffer, values past it."""

    def __init__(self, sock: socket.socket, buffer: memoryview) -> None:
        self._sock = sock
        self._buffer = buffer
        self._start = self._end = 0

    @property
    def left(self) -> int:
        """Bytes that have come and have not been taken."""
        return self._end - self._start

    def value(self, into: Iovec) -> Outcome | Exception:
        line = self._line()
        if line[:1] == b"-":
            word, _, text = line[1:].decode("utf-8", "replace").partition(" ")
            return _ERROR_KINDS.get(word, foreign.ResponseError)(f"{word} {text}")
        if line[:1] != b"$" or not line[1:].lstrip(b"-").isdigit():
            raise foreign.InvalidResponse(repr(line[:64]))
        size = int(line[1:])
        if size < 0:
            return Outcome(Status.ABSENT)
        room = total(into)
        if size > room:
            self._skip(size + 2)
            return Outcome(Status.FAILED, 0, f"a value of {size} bytes does not fit {room}")
        rest = size
        for buffer in into:
            self._fill(buffer[:rest])
            rest -= min(rest, len(buffer))
        self._skip(2)
        return Outcome(Status.DONE, size)

    def _more(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        self._end += _received(self._sock, self._buffer[self._end :])

    def _line(self) -> bytes:
        while (end := bytes(self._buffer[self._start : self._end]).find(b"\r\n")) < 0:
            if self._end == len(self._buffer):
                rest = bytes(self._buffer[self._start : self._end])
                self._buffer[: len(rest)] = rest
                self._start, self._end = 0, len(rest)
            if self._end == len(self._buffer):
                raise foreign.InvalidResponse(f"a line of more than {self._end} bytes")
            self._more()
        line = bytes(self._buffer[self._start : self._start + end])
        self._start += end + 2
        return line

    def _fill(self, into: memoryview) -> None:
        taken = min(self.left, len(into))
        into[:taken] = self._buffer[self._start : self._start + taken]
        self._start += taken
        while taken < len(into):
            taken += _received(self._sock, into[taken:])

    def _skip(self, count: int) -> None:
        while count:
            if not self.left:
                self._more()
            taken = min(self.left, count)
            self._start += taken
            count -= taken


def _reply(connection: Any) -> Exception | None:  # noqa: ANN401 - see Wire._opened
    try:
        connection.read_response(disable_decoding=True)
    except foreign.ResponseError as error:
        return error
    return None


def _send(sock: socket.socket, head: bytes, value: Iovec, tail: bytes) -> None:
    pending = [head]
    for buffer in value:
        if len(buffer) <= _SMALL_BYTES:
            pending.append(bytes(buffer))
        else:
            sock.sendall(b"".join(pending))
            sock.sendall(buffer)
            pending = []
    sock.sendall(b"".join([*pending, tail]))


def _received(sock: socket.socket, into: memoryview) -> int:
    came = sock.recv_into(into)
    if not came:
        raise foreign.ConnectionError("Connection closed by server.")
    return came
