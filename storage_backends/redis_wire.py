"""One connection to a Redis-compatible server: redis-py's for everything small, its bare socket for payloads.

Payloads go from and into the caller's buffers, each in one system call: the socket blocks, with the kernel's time-outs, because
one with Python's polls ahead of every part of a value and takes the GIL again after it. Every reply is read here, because
redis-py's parser believes the lengths that it is told. Between two calls the stream stands at the start of a reply: whatever is
sent is answered and drained in the same call, and any error closes the connection.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis.exceptions as foreign
from redis.connection import Connection

from kvtier.abc.medium import Iovec, Outcome, Status
from kvtier.codec.frame import MAX_PAYLOAD_BYTES
from kvtier.errors import MediumError, MediumFull, MediumRefused, MediumUnavailable
from kvtier.storage_backends.iovec import total

IN_FLIGHT_BYTES = 8 << 20
"""Values that one connection has on the way at a time."""
REQUESTS_AHEAD = 2
"""GETs on the way at a time: the server prepares one while the other is received. More is slower."""
_PIECES = 1024
"""As many as a kernel takes in one call."""
_LINE_BYTES = 1 << 10
"""Longest line of a reply; a little more than it is received with it, past which values go to their own buffers."""
_SOCKET_BYTES = 1 << 20
"""Buffers of a Unix socket."""
_RECEIVE_BYTES = 2 << 20
"""Buffer of a TCP socket for values of half of that or more, where the kernel lets it be so large: what waits in one that the
kernel has sized is out of the cache when it is received, and takes a tenth more CPU time. Of smaller values less waits there."""
_RMEM_MAX = Path("/proc/sys/net/core/rmem_max")
_WORD_BYTES = 1 << 20
"""Longest string in a reply that is not a value."""
_REPLY_BYTES = 64 << 20
"""Longest reply that is not a value: more cannot be an answer to anything that is asked here."""
_ELEMENT_BYTES = 64
"""What an element of an array takes here besides its own bytes: of empty ones a short reply has very many."""
_DEPTH = 4
"""Arrays within arrays."""

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
    "NOSCRIPT": foreign.NoScriptError,
    "EXECABORT": foreign.ExecAbortError,
    "CLUSTERDOWN": foreign.ClusterDownError,
}

_SENSELESS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""What comes of a reply of another kind than its command has."""
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
    """Turn whatever redis-py or a socket raises inside, or a senseless reply brings about, into a ``MediumError``."""
    try:
        yield
    except FOREIGN as error:
        raise medium_error(error, where) from error
    except _SENSELESS as error:
        raise MediumRefused(f"{where}: not an answer to what was asked ({type(error).__name__}: {error})") from error


class Wire:
    """A connection that is opened when it is first used, and again after an error. For one thread at a time."""

    def __init__(self, make: Callable[[], Any], value_bytes: int = 0) -> None:
        """``make`` gives a redis-py connection that is not connected yet; ``value_bytes``: of most values that it will move."""
        self._make = make
        self._large = value_bytes >= _RECEIVE_BYTES // 2
        self._connection: Any = None
        self._scratch = bytearray(_LINE_BYTES)

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
        except BlockingIOError as late:
            self.close()
            raise TimeoutError("timed out") from late
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
        elif self._large and _most_received() >= _RECEIVE_BYTES:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        if not isinstance(sock, ssl.SSLSocket):
            _block(sock)
        return connection

    def call(self, *words: Any) -> Any:  # noqa: ANN401 - a command's words and its reply
        """One command; an error reply is raised."""
        with self._opened() as connection:
            _send(connection._sock, connection.pack_command(*words))
            stream = self._stream(connection)
            reply = stream.reply()
            stream.end()
            if isinstance(reply, Exception):
                raise reply
            return reply

    def pipeline(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Replies in order; an error reply is returned, not raised."""
        with self._opened() as connection:
            _send(connection._sock, connection.pack_commands(commands))
            stream = self._stream(connection)
            replies = [stream.reply() for _ in commands]
            stream.end()
            for reply in replies:
                if isinstance(reply, Exception) and not isinstance(reply, foreign.ResponseError):
                    raise reply  # holds for the connection, not for one command
        return replies

    def set_all(self, items: Sequence[tuple[bytes, Iovec]], ttl_ms: int) -> Iterator[Exception | None]:
        """SET every (name, value); per item, in order, None or the error reply."""
        expiry = b"\r\n$2\r\nPX\r\n$%d\r\n%d\r\n" % (len(str(ttl_ms)), ttl_ms)
        sent: deque[int] = deque()
        with self._opened() as connection:
            sock, stream = connection._sock, self._stream(connection)
            for name, value in items:
                size = total(value)
                while sent and sum(sent) + size > IN_FLIGHT_BYTES:
                    sent.popleft()
                    yield stream.error()
                head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, size)
                _send(sock, [head, *value, expiry])
                sent.append(size)
            for _ in sent:
                yield stream.error()
            stream.end()

    def get_all(self, items: Sequence[tuple[bytes, Iovec]]) -> Iterator[Outcome | Exception]:
        """GET every name into its buffers; per item, in order, what came or the error reply."""
        requests = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name) for name, _ in items]
        with self._opened() as connection:
            stream = self._stream(connection)
            connection._sock.sendall(b"".join(requests[:REQUESTS_AHEAD]))
            for index, (_, into) in enumerate(items):
                if index + REQUESTS_AHEAD < len(requests):
                    connection._sock.sendall(requests[index + REQUESTS_AHEAD])
                yield stream.value(into)
            stream.end()

    def _stream(self, connection: Any) -> _Stream:  # noqa: ANN401 - see _opened
        return _Stream(connection._sock, self._scratch)


class _Stream:
    """Replies: lines through a small buffer, values past it. Nothing is allocated by a length that is not believable."""

    def __init__(self, sock: socket.socket, scratch: bytearray) -> None:
        self._sock = sock
        self._whole = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
        self._scratch = scratch
        self._buffer = memoryview(scratch)
        self._start = self._end = 0
        self._read_bytes = 0
        self._behind = 0
        """Bytes that end the value before, and have not been taken."""

    @property
    def left(self) -> int:
        """Bytes that have come and have not been taken."""
        return self._end - self._start

    def end(self) -> None:
        """All replies have been taken. Raises where more has come."""
        self._skip(self._behind)
        self._behind = 0
        if self.left:
            raise foreign.InvalidResponse("more came than was asked for")

    def error(self) -> Exception | None:
        """A reply of which only matters whether it is an error."""
        reply = self.reply()
        return reply if isinstance(reply, Exception) else None

    def reply(self, depth: int = 0) -> Any:  # noqa: ANN401 - a command's reply
        """One reply, error replies as exceptions. Raises ``InvalidResponse`` for what no answer of a server to us is."""
        line = self._line()
        self._read_bytes = len(line) + (self._read_bytes + _ELEMENT_BYTES if depth else 0)
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            return _error_of(rest)
        if kind == b"+":
            return rest
        number = _number(line)
        if kind == b":":
            return number
        self._read_bytes += max(0, number) if kind == b"$" else 0
        if self._read_bytes > _REPLY_BYTES or number > _WORD_BYTES or depth > _DEPTH or kind not in b"$*":
            raise foreign.InvalidResponse(repr(line[:64]))
        if number < 0:
            return None
        if kind == b"*":
            return [self.reply(depth + 1) for _ in range(number)]
        word = bytearray(number)
        self._fill(memoryview(word))
        self._skip(2)
        return bytes(word)

    def value(self, into: Iovec) -> Outcome | Exception:
        """One value. Of one that fills ``into`` all buffers but the first go past the small one, from their first bytes on."""
        room, head = total(into), len(into[0]) if into else 0
        if not self.left:
            self._more(self._behind + len(b"$%d\r\n" % room) + head)
        self._skip(self._behind)
        self._behind = 0
        line = self._line()
        if line[:1] == b"-":
            return _error_of(line[1:])
        size = _number(line)
        if line[:1] != b"$" or size > MAX_PAYLOAD_BYTES:
            raise foreign.InvalidResponse(repr(line[:64]))
        if size < 0:
            return Outcome(Status.ABSENT)
        if size > room:
            self._skip(size + 2)
            return Outcome(Status.FAILED, 0, f"a value of {size} bytes does not fit {room}")
        rest = size
        for buffer in into:
            self._fill(buffer[:rest])
            rest -= min(rest, len(buffer))
        self._behind = 2
        return Outcome(Status.DONE, size)

    def _more(self, most: int = _LINE_BYTES) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        self._end += _received(self._sock, self._buffer[self._end : self._end + most])

    def _line(self) -> bytes:
        while (end := self._scratch.find(b"\r\n", self._start, self._end)) < 0:
            if self._end == len(self._buffer):
                rest = bytes(self._buffer[self._start : self._end])
                self._buffer[: len(rest)] = rest
                self._start, self._end = 0, len(rest)
            if self._end == len(self._buffer):
                raise foreign.InvalidResponse(f"a line of more than {self._end} bytes")
            self._more()
        line = bytes(self._buffer[self._start : end])
        self._start = end + 2
        return line

    def _fill(self, into: memoryview) -> None:
        taken = min(self.left, len(into))
        into[:taken] = self._buffer[self._start : self._start + taken]
        self._start += taken
        while taken < len(into):
            taken += _received(self._sock, into[taken:], self._whole)

    def _skip(self, count: int) -> None:
        while count:
            if not self.left:
                self._more()
            taken = min(self.left, count)
            self._start += taken
            count -= taken


def _error_of(text: bytes) -> Exception:
    word, _, rest = text.decode("utf-8", "replace").partition(" ")
    return _ERROR_KINDS.get(word, foreign.ResponseError)(f"{word} {rest}")


def _number(line: bytes) -> int:
    """The number behind the kind of a reply."""
    digits = line[1:]
    if not digits.removeprefix(b"-").isdigit() or len(digits) > 20:
        raise foreign.InvalidResponse(repr(line[:64]))
    return int(digits)


def _most_received() -> int:
    """The largest buffer that a socket is given, and then keeps, when it asks for one; 0 where that is not known."""
    try:
        return int(_RMEM_MAX.read_text())
    except (OSError, ValueError):
        return 0


def _block(sock: socket.socket) -> None:
    """Let the kernel keep the time-out that Python has kept. A call that brings a part of its bytes by then is made again."""
    timeout = sock.gettimeout()
    if not timeout:
        return
    waits = struct.pack("@ll", int(timeout), max(1, int(timeout % 1 * 1e6)))
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, waits)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, waits)


def _send(sock: socket.socket, pieces: Sequence[bytes | memoryview]) -> None:
    """All of the pieces, end to end and without a copy of ours."""
    if isinstance(sock, ssl.SSLSocket):
        for piece in pieces:
            sock.sendall(piece)
        return
    while pieces:
        sent = sock.sendmsg(pieces[:_PIECES])
        whole = 0
        while whole < len(pieces) and sent >= len(pieces[whole]):
            sent -= len(pieces[whole])
            whole += 1
        pieces = pieces[whole:]
        if sent:
            pieces = [memoryview(pieces[0])[sent:], *pieces[1:]]


def _received(sock: socket.socket, into: memoryview, flags: int = 0) -> int:
    came = sock.recv_into(into, 0, flags)
    if not came:
        raise foreign.ConnectionError("Connection closed by server.")
    return came
