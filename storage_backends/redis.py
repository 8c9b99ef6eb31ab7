"""``redis://host:6379/0?ttl=24h``, ``rediss://`` (TLS) and ``redis+unix:///path/to/socket``: one framed value per address.

Names are ``kvt:1:`` and the 40 raw bytes of the address. Every value has a TTL, and a hit pushes it back for the whole
prefix, because a head that expires first would orphan its tail.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import redis.exceptions as foreign
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

from kvtier.abc.medium import Arrived, Iovec, KeyMedium, MediumContext, Outcome, Status
from kvtier.errors import ConfigError, MediumError, MediumFull, MediumRefused, MediumUnavailable
from kvtier.key import KEY_BYTES, Address, Shard
from kvtier.quantity import Seconds
from kvtier.storage_backends.breaker import CircuitBreaker
from kvtier.storage_backends.iovec import total
from kvtier.storage_backends.redis_wire import Wire, medium_error, translated
from kvtier.url import TierUrl

PREFIX = b"kvt:1:"
_ABOUT = b"kvt:about:"
_ADDRESS_BYTES = KEY_BYTES + len(Shard().packed())
_NAMES_PER_COMMAND = 512
_PROBE = f"""
local names, count, i = ARGV[1], #ARGV[1] / {_ADDRESS_BYTES}, 0
while i < count do
  local some = {{}}
  for j = i, math.min(count, i + 64) - 1 do
    some[#some + 1] = KEYS[1] .. string.sub(names, j * {_ADDRESS_BYTES} + 1, (j + 1) * {_ADDRESS_BYTES})
  end
  if redis.call('EXISTS', unpack(some)) < #some then
    for j = 1, #some do
      if redis.call('EXISTS', some[j]) == 0 then return i + j - 1 end
    end
  end
  i = i + #some
end
return count
"""
"""Length of the present prefix, exactly: 3 ms for 6,250 names."""
_TOUCH = f"""
local names, ttl = ARGV[1], ARGV[2]
for j = 0, #names / {_ADDRESS_BYTES} - 1 do
  redis.call('PEXPIRE', KEYS[1] .. string.sub(names, j * {_ADDRESS_BYTES} + 1, (j + 1) * {_ADDRESS_BYTES}), ttl)
end
return 0
"""

T = TypeVar("T")


class RedisMedium(KeyMedium):
    """Values on a Redis-compatible server, over a few connections. Connects when it is first used.

    A server that is down, slow or refuses costs one timeout; until it may be tried again every call raises at once
    (circuit breaker). A server that is out of memory pauses writes only.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Params:
        ttl: Seconds = Seconds(86400.0)
        """Life of a value after its last write or hit."""
        connections: int = 4
        """Connections, and so values that move at the same time."""
        connect_timeout: Seconds = Seconds(1.0)
        timeout: Seconds = Seconds(2.0)
        """Longest wait for the next bytes of a reply."""
        username: str | None = None
        """Where the URL has no place for it (Unix sockets)."""
        password: str | None = None
        """Where the URL has no place for it (Unix sockets)."""
        db: int = 0
        """Database number, where it is not the URL's path."""
        ca: str | None = None
        """PEM file of the authority that signed the server's certificate; the system's own where absent."""
        auth_key: str | None = None
        """Secret that makes the sums keyed, so that others who can write there cannot forge blocks."""
        scripts: bool = True
        """Probe and touch by Lua script; without, by pipelined commands."""

        def __post_init__(self) -> None:
            if self.connections < 1 or self.ttl < 1 or self.timeout <= 0 or self.connect_timeout <= 0:
                raise ValueError("connections and ttl must be at least 1, timeouts more than 0")

    io = "socket"

    def __init__(self, where: str, make: Callable[[], Any], params: Params) -> None:
        self._where = where
        self.ttl = params.ttl
        self._ttl_ms = int(params.ttl * 1000)
        self._timeout = params.timeout
        self._scripts = params.scripts
        self.auth_key = None if params.auth_key is None else hashlib.blake2b(params.auth_key.encode()).digest()
        self._connections = params.connections
        self._wires: queue.LifoQueue[Wire] = queue.LifoQueue()
        for _ in range(params.connections):
            self._wires.put(Wire(make))
        self._workers = ThreadPoolExecutor(params.connections, "kvtier-redis")
        self._breaker = CircuitBreaker(where)
        self._writes = CircuitBreaker(f"{where}: writes paused", first=0.5)
        self._lock = threading.Lock()

    @classmethod
    def open(cls, location: TierUrl, params: Params, context: MediumContext) -> RedisMedium:
        del context
        return cls(str(location).partition("?")[0], _connection_maker(location, params), params)

    def probe(self, names: Sequence[Address]) -> int:
        if not names:
            return 0

        def by_commands(wire: Wire) -> int:
            found = _raised(wire.pipeline([("EXISTS", PREFIX + name) for name in names]))
            return next((index for index, there in enumerate(found) if not there), len(names))

        return self._scripted(_PROBE, [b"".join(names)], by_commands)

    def read(self, names: Sequence[Address], into: Sequence[Iovec], arrived: Arrived | None = None) -> list[Outcome]:
        def read(wire: Wire, part: range, outcomes: list[Outcome]) -> None:
            items = [(PREFIX + names[index], into[index]) for index in part]
            for index, came in zip(part, wire.get_all(items), strict=True):
                outcome = self._failed(came) if isinstance(came, Exception) else came
                outcomes[index] = outcome if arrived is None or not outcome.done else arrived(index, outcome)

        outcomes = self._shared(read, len(names))
        with self._lock:
            self.bytes_read += sum(outcome.nbytes for outcome in outcomes)
        return outcomes

    def write(self, names: Sequence[Address], data: Sequence[Iovec]) -> list[Outcome]:
        try:
            self._writes.check()
        except MediumUnavailable as paused:
            return [Outcome(Status.FAILED, 0, str(paused))] * len(names)
        full: list[MediumFull] = []

        def write(wire: Wire, part: range, outcomes: list[Outcome]) -> None:
            items = [(PREFIX + names[index], data[index]) for index in part]
            for index, error in zip(part, wire.set_all(items, self._ttl_ms), strict=True):
                if error is None:
                    outcomes[index] = Outcome(Status.DONE, total(data[index]))
                    continue
                if isinstance(error, foreign.OutOfMemoryError):
                    full.append(MediumFull(str(medium_error(error, self._where))))
                outcomes[index] = self._failed(error)

        outcomes = self._shared(write, len(names))
        if full:
            self._writes.failed(full[0])
        elif any(outcome.done for outcome in outcomes):
            self._writes.succeeded()
        with self._lock:
            self.bytes_written += sum(outcome.nbytes for outcome in outcomes)
        return outcomes

    def touch(self, names: Sequence[Address]) -> None:
        if not names:
            return

        def by_commands(wire: Wire) -> int:
            _raised(wire.pipeline([("PEXPIRE", PREFIX + name, self._ttl_ms) for name in names]))
            return 0

        self._scripted(_TOUCH, [b"".join(names), self._ttl_ms], by_commands)

    def delete(self, names: Sequence[Address]) -> None:
        commands = [
            ("UNLINK", *(PREFIX + name for name in names[start : start + _NAMES_PER_COMMAND]))
            for start in range(0, len(names), _NAMES_PER_COMMAND)
        ]
        if commands:
            self._called(lambda wire: _raised(wire.pipeline(commands)))

    def scan(self) -> Iterator[Address]:
        cursor: Any = 0
        while True:
            cursor, found = self._called(partial(_scanned, cursor))
            for name in found:
                if len(name) == len(PREFIX) + _ADDRESS_BYTES:
                    yield Address(name[len(PREFIX) :])
            if int(cursor) == 0:
                return

    def ping(self) -> None:
        self._tried(lambda wire: wire.call("PING"))

    def remember(self, kind: str, digest: bytes, text: str) -> None:
        name = _ABOUT + kind.encode() + b":" + digest.hex().encode()
        self._called(lambda wire: wire.call("SET", name, text.encode(), "PX", self._ttl_ms))

    def close(self) -> None:
        self._workers.shutdown()
        while not self._wires.empty():
            self._wires.get().close()

    def _failed(self, error: Exception) -> Outcome:
        """One item's error reply; those that hold for every item are raised."""
        meaning = medium_error(error, self._where)
        if isinstance(meaning, (MediumUnavailable, MediumRefused)):
            raise meaning from error
        return Outcome(Status.FAILED, 0, str(meaning))

    def _scripted(self, script: str, arguments: list[Any], by_commands: Callable[[Wire], int]) -> int:
        """A script over packed names, or the same by commands where the server lets us run none."""
        if self._scripts:
            try:
                return int(self._called(lambda wire: _evaluated(wire, script, arguments)))
            except _NoScripts:
                self._scripts = False
        return self._called(by_commands)

    def _called(self, job: Callable[[Wire], T]) -> T:
        """``job`` on a free connection, behind the breaker."""
        self._breaker.check()
        return self._tried(job)

    def _tried(self, job: Callable[[Wire], T]) -> T:
        try:
            with translated(self._where):
                done = self._with_wire(job)
        except (MediumUnavailable, MediumRefused) as error:
            self._breaker.failed(error)
            raise
        self._breaker.succeeded()
        return done

    def _with_wire(self, job: Callable[[Wire], T]) -> T:
        try:
            wire = self._wires.get(timeout=self._timeout)
        except queue.Empty:
            raise MediumUnavailable(f"{self._where}: all connections are busy") from None
        try:
            was_open = wire.open
            try:
                return job(wire)
            except (foreign.ConnectionError, ConnectionError):
                if not was_open:
                    raise
                return job(wire)  # the server has closed it since, at a restart for instance: once more on a new one
        finally:
            self._wires.put(wire)

    def _shared(self, job: Callable[[Wire, range, list[Outcome]], None], count: int) -> list[Outcome]:
        """``job`` for indices dealt out over the connections; raises where none of them got through."""
        outcomes = [Outcome(Status.FAILED, 0, "not tried")] * count
        hands = min(self._connections, count)
        if not hands:
            return outcomes
        self._breaker.check()  # once: behind a breaker that lets one call try, a batch is one call
        parts = [range(hand, count, hands) for hand in range(hands)]

        def play(part: range) -> MediumError | None:
            try:
                self._tried(lambda wire: job(wire, part, outcomes))
            except MediumError as error:
                for index in part:
                    outcomes[index] = Outcome(Status.FAILED, 0, str(error))
                return error
            return None

        others: list[Future[MediumError | None]] = [self._workers.submit(play, part) for part in parts[1:]]
        try:
            errors = [play(parts[0])]
        finally:
            wait(others)
        errors += [other.result() for other in others]
        if all(errors) and errors[0] is not None:
            raise errors[0]
        return outcomes


class _NoScripts(Exception):
    """The server, or our ACL, lets no script run."""


def _evaluated(wire: Wire, script: str, arguments: list[Any]) -> Any:  # noqa: ANN401 - a reply
    digest = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
    try:
        try:
            return wire.call("EVALSHA", digest, 1, PREFIX, *arguments)
        except foreign.NoScriptError:
            return wire.call("EVAL", script, 1, PREFIX, *arguments)
    except foreign.NoPermissionError as error:
        raise _NoScripts from error
    except foreign.ResponseError as error:
        if "unknown command" in str(error).lower():
            raise _NoScripts from error
        raise


def _scanned(cursor: Any, wire: Wire) -> Any:  # noqa: ANN401 - words of a command and its reply
    return wire.call("SCAN", cursor, "MATCH", PREFIX + b"*", "COUNT", 1000)


def _raised(replies: list[Any]) -> list[Any]:
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def _connection_maker(location: TierUrl, params: RedisMedium.Params) -> Callable[[], Any]:
    common: dict[str, Any] = {
        "username": location.username or params.username,
        "password": location.password if location.password is not None else params.password,
        "db": params.db,
        "socket_timeout": params.timeout,
        "socket_connect_timeout": params.connect_timeout,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if location.scheme == "redis+unix":
        if location.host or not location.path:
            raise ConfigError(f"{location}: name a socket, with three slashes: redis+unix:///run/redis.sock")
        unix: Any = UnixDomainSocketConnection
        return partial(unix, path=location.path, **common)
    if not location.host:
        raise ConfigError(f"{location}: name a host: {location.scheme}://host:6379/0")
    number = location.path.strip("/")
    if number:
        if not number.isdecimal():
            raise ConfigError(f"{location}: the path is a database number, such as /0")
        common["db"] = int(number)
    common |= {"host": location.host, "port": location.port or 6379}
    if location.scheme == "rediss":
        tls: dict[str, Any] = {"ssl_ca_certs": params.ca, "ssl_cert_reqs": "required", "ssl_check_hostname": True}
        return partial(SSLConnection, **tls, **common)
    if params.ca is not None:
        raise ConfigError(f"{location}: ca= belongs to rediss://, this URL is plain text")
    return partial(Connection, **common)
