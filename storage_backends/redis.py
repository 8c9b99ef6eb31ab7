"""``redis://host:6379/0?ttl=24h``, ``rediss://`` (TLS) and ``redis+unix:///path/to/socket``: one framed value per address.

Names are ``kvt:1:`` and the 40 raw bytes of the address. Every value has a TTL, and a hit pushes it back for the whole
prefix, because a head that expires first would orphan its tail. Clearing raises a generation, and from the first on names
are ``kvt:1:g<generation>:`` and the address. ``kvt:clear`` is a hash of what has been cleared: the generation, an epoch per
name, and a version that changes with every epoch; every probe reads generation and version.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar, cast

import redis.exceptions as foreign
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

from kvtier.abc.medium import MOST_RECORDS, Arrived, Iovec, KeyMedium, MediumContext, Outcome, Status
from kvtier.errors import ConfigError, MediumError, MediumFull, MediumRefused, MediumUnavailable
from kvtier.key import Address
from kvtier.quantity import Seconds
from kvtier.storage_backends.breaker import CircuitBreaker
from kvtier.storage_backends.iovec import total
from kvtier.storage_backends.redis_audit import RedisAuditor
from kvtier.storage_backends.redis_connections import CORES, Connections
from kvtier.storage_backends.redis_names import (
    ABOUT,
    ADDRESS_BYTES,
    CLEAR,
    MOST_EPOCHS,
    PREFIX,
    merged,
    number_of,
    pairs_of,
    parsed,
    prefix_of,
    raised,
)
from kvtier.storage_backends.redis_wire import Wire, medium_error, translated
from kvtier.url import TierUrl

__all__ = ["PREFIX", "RedisMedium", "connection_maker"]

_KINDS = (b"identity", b"scope")
"""Records that live as long as the values that they explain."""
_NAMES_PER_COMMAND = 512
_PROBE = f"""
local names, count, i = ARGV[1], #ARGV[1] / {ADDRESS_BYTES}, 0
while i < count do
  local some = {{}}
  for j = i, math.min(count, i + 64) - 1 do
    some[#some + 1] = KEYS[1] .. string.sub(names, j * {ADDRESS_BYTES} + 1, (j + 1) * {ADDRESS_BYTES})
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
for j = 0, #names / {ADDRESS_BYTES} - 1 do
  redis.call('PEXPIRE', KEYS[1] .. string.sub(names, j * {ADDRESS_BYTES} + 1, (j + 1) * {ADDRESS_BYTES}), ttl)
end
return 0
"""

F = TypeVar("F", bound=Callable[..., Any])
_MOST_CLEARS = 20
"""Clears by others that one probe follows; what is cleared more often than that is empty."""


def _sensible(method: F) -> F:
    """What goes wrong with a reply of another kind than was asked for is the server's fault, and a ``MediumError``."""

    @wraps(method)
    def guarded(self: RedisMedium, *given: Any, **named: Any) -> Any:  # noqa: ANN401 - the method's own
        with translated(self._where):
            return method(self, *given, **named)

    return cast("F", guarded)


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
        """Connections, and so values that move at the same time; a batch uses no more of them than there are cores."""
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

    def __init__(
        self, where: str, make: Callable[[], Any], params: Params, value_bytes: int, *, hands: int = CORES
    ) -> None:
        """``hands``: threads that a batch has at most; each is a copy that fills a core."""
        self._where = where
        self.ttl = params.ttl
        self._ttl_ms = int(params.ttl * 1000)
        self.auth_key = _sum_key(params.auth_key)
        self._server = Connections(
            where,
            make,
            params.connections,
            hands=hands,
            value_bytes=value_bytes,
            timeout=params.timeout,
            scripts=params.scripts,
        )
        self._writes = CircuitBreaker(f"{where}: writes paused", first=0.5)
        self._lock = threading.Lock()

    @classmethod
    def open(cls, location: TierUrl, params: Params, context: MediumContext) -> RedisMedium:
        # Over plain TCP one core is better left to a server on the same host. A Unix socket holds too little for that: while
        # one thread makes sums, another has to take what comes. Under TLS each thread also decrypts.
        hands = max(1, CORES - 1) if location.scheme == "redis" else CORES
        make = connection_maker(location, params)
        return cls(_named(location), make, params, context.slot_bytes, hands=hands)

    @classmethod
    def auditor(cls, location: TierUrl, params: Params) -> RedisAuditor:
        return RedisAuditor(_named(location), connection_maker(location, params), params.ttl, _sum_key(params.auth_key))

    @_sensible
    def probe(self, names: Sequence[Address]) -> int:
        """Of no names it still brings version and generation up to date."""
        marks = [("HMGET", CLEAR, "version", "generation")]
        for _ in range(_MOST_CLEARS):
            generation, prefix = self.generation, prefix_of(self.generation)

            def by_commands(wire: Wire, prefix: bytes = prefix) -> tuple[int, list[Any]]:
                *found, read = raised(wire.pipeline([*(("EXISTS", prefix + name) for name in names), *marks]))
                return next((index for index, there in enumerate(found) if not there), len(names)), [read]

            present, ((version, there),) = self._server.evaluate(_PROBE, prefix, [b"".join(names)], marks, by_commands)
            self.epochs_version = version or b""
            if self._same_generation(generation, number_of(there)):
                return present
        return 0

    def _same_generation(self, asked: int, there: int) -> bool:
        """Whether what was probed is of the generation that holds; one that the server has lost is given back to it."""
        if there < asked:
            self._server.call(lambda wire: merged(wire, {b"generation": asked}, {}))
        elif there > asked:
            with self._lock:
                self.generation = max(self.generation, there)
        return there <= asked

    def read(self, names: Sequence[Address], into: Sequence[Iovec], arrived: Arrived | None = None) -> list[Outcome]:
        prefix = prefix_of(self.generation)

        def read(wire: Wire, part: range, outcomes: list[Outcome]) -> None:
            items = [(prefix + names[index], into[index]) for index in part]
            for index, came in zip(part, wire.get_all(items), strict=True):
                outcome = self._failed(came) if isinstance(came, Exception) else came
                outcomes[index] = outcome if arrived is None or not outcome.done else arrived(index, outcome)

        outcomes = self._server.deal(read, len(names))
        with self._lock:
            self.bytes_read += sum(outcome.nbytes for outcome in outcomes)
        return outcomes

    def write(self, names: Sequence[Address], data: Sequence[Iovec]) -> list[Outcome]:
        try:
            self._writes.check()
        except MediumUnavailable as paused:
            return [Outcome(Status.FULL, 0, str(paused))] * len(names)
        full: list[MediumFull] = []
        prefix = prefix_of(self.generation)

        def write(wire: Wire, part: range, outcomes: list[Outcome]) -> None:
            items = [(prefix + names[index], data[index]) for index in part]
            for index, error in zip(part, wire.set_all(items, self._ttl_ms), strict=True):
                if error is None:
                    outcomes[index] = Outcome(Status.DONE, total(data[index]))
                    continue
                if isinstance(error, foreign.OutOfMemoryError):
                    full.append(MediumFull(str(medium_error(error, self._where))))
                outcomes[index] = self._failed(error)

        outcomes = self._server.deal(write, len(names))
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
        prefix = prefix_of(self.generation)
        records = [("PEXPIRE", ABOUT + kind, self._ttl_ms) for kind in _KINDS]

        def by_commands(wire: Wire) -> tuple[int, list[Any]]:
            return 0, raised(wire.pipeline([*(("PEXPIRE", prefix + name, self._ttl_ms) for name in names), *records]))

        self._server.evaluate(_TOUCH, prefix, [b"".join(names), self._ttl_ms], records, by_commands)

    def delete(self, names: Sequence[Address]) -> None:
        prefix = prefix_of(self.generation)
        self._unlink([prefix + name for name in names])

    def _unlink(self, names: Sequence[bytes]) -> None:
        commands = [
            ("UNLINK", *names[start : start + _NAMES_PER_COMMAND]) for start in range(0, len(names), _NAMES_PER_COMMAND)
        ]
        if commands:
            self._server.call(lambda wire: raised(wire.pipeline(commands)))

    def scan(self) -> Iterator[Address]:
        for found in self._scanned():
            yield from (name for generation, name, _ in found if generation == self.generation)

    def _scanned(self) -> Iterator[list[tuple[int, Address, bytes]]]:
        """Batches of all values of any generation: (generation, address, the server's own name)."""
        cursor: Any = 0
        while True:
            with translated(self._where):
                cursor, found = self._server.call(partial(_scanned, cursor))
                batch = [(generation, address, name) for name in found for generation, address in parsed(name)]
                last = int(cursor) == 0
            yield batch
            if last:
                return

    @_sensible
    def heads(self, names: Sequence[Address], nbytes: int) -> list[bytes]:
        prefix = prefix_of(self.generation)
        commands = [("GETRANGE", prefix + name, 0, nbytes - 1) for name in names]
        found = self._server.call(lambda wire: wire.pipeline(commands)) if commands else []
        return [head[:nbytes] if isinstance(head, bytes) else b"" for head in found]

    @_sensible
    def clear(self) -> None:
        """Of clears that meet the later one may find that the other has done it all."""
        there = self._server.call(lambda wire: number_of(wire.call("HGET", CLEAR, "generation")))
        generation = max(self.generation, there) + 1  # and not HINCRBY: what stands there may be no number of ours
        if generation >= 1 << 32:
            raise MediumFull(f"{self._where}: no generation is left: all 2^32 are used")
        self._server.call(lambda wire: merged(wire, {b"generation": generation}, {}))
        with self._lock:
            self.generation = max(self.generation, generation)

    @_sensible
    def reclaim(self) -> int:
        count = 0
        for found in self._scanned():
            hidden = [name for generation, _, name in found if generation < self.generation]
            self._unlink(hidden)
            count += len(hidden)
        return count

    def ping(self) -> None:
        self._server.attempt(lambda wire: wire.call("PING"))
        try:
            self._server.call(lambda wire: wire.call("HLEN", CLEAR))  # every probe reads it
        except (MediumUnavailable, MediumRefused):
            raise
        except MediumError as other:
            raise MediumRefused(f"{other}; {CLEAR.decode()} is not ours: delete it or use another database") from other

    @_sensible
    def remember(self, kind: str, digest: bytes, text: str) -> None:
        table = ABOUT + kind.encode()
        stamped = b"%d %b" % (time.time(), text.encode())
        keep = ("PEXPIRE", table, self._ttl_ms)
        commands = [("HSET", table, digest, stamped), keep, ("HLEN", table)]
        (*_, count) = self._server.call(lambda wire: raised(wire.pipeline(commands)))
        if count > MOST_RECORDS:
            oldest = sorted((value, name) for name, value in self._hash(table, 2 * MOST_RECORDS).items())[
                : count - MOST_RECORDS
            ]
            self._server.call(lambda wire: wire.call("HDEL", table, *(name for _, name in oldest)))

    @_sensible
    def records(self, kind: str) -> dict[bytes, str]:
        table = self._hash(ABOUT + kind.encode(), 2 * MOST_RECORDS)
        return {digest: value.partition(b" ")[2].decode("utf-8", "replace") for digest, value in table.items()}

    @_sensible
    def epochs(self) -> dict[str, int]:
        rows = self._hash(CLEAR, MOST_EPOCHS)
        self.epochs_version = rows.pop(b"version", b"")
        rows.pop(b"generation", None)
        return {name.decode("utf-8", "replace"): number_of(epoch) for name, epoch in rows.items()}

    def raise_epochs(self, wanted: Mapping[str, int], implied: Mapping[str, int]) -> None:
        rows, gone = [{name.encode(): epoch for name, epoch in each.items()} for each in (wanted, implied)]
        self._server.call(lambda wire: merged(wire, rows, gone))

    def _hash(self, table: bytes, most: int) -> dict[bytes, bytes]:
        """A hash of ours, if it is not longer than ours ever are."""
        if (count := self._server.call(lambda wire: int(wire.call("HLEN", table)))) > most:
            raise MediumError(f"{self._where}: {table.decode()} has {count} fields, which cannot be ours")
        found = self._server.call(lambda wire: wire.call("HGETALL", table))
        return pairs_of(found)

    def close(self) -> None:
        self._server.close()

    def _failed(self, error: Exception) -> Outcome:
        """One item's error reply; those that hold for every item are raised."""
        meaning = medium_error(error, self._where)
        if isinstance(meaning, (MediumUnavailable, MediumRefused)):
            raise meaning from error
        return Outcome(Status.FULL if isinstance(meaning, MediumFull) else Status.FAILED, 0, str(meaning))


def _scanned(cursor: Any, wire: Wire) -> Any:  # noqa: ANN401 - words of a command and its reply
    return wire.call("SCAN", cursor, "MATCH", PREFIX + b"*", "COUNT", 1000)


def _named(location: TierUrl) -> str:
    """For messages: without parameters, which may be secret."""
    return str(location).partition("?")[0]


def _sum_key(secret: str | None) -> bytes | None:
    return None if secret is None else hashlib.blake2b(secret.encode()).digest()


def connection_maker(location: TierUrl, params: RedisMedium.Params) -> Callable[[], Any]:
    """Makes redis-py connections that are not connected yet. Raises ``ConfigError`` where the URL cannot be one."""
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
