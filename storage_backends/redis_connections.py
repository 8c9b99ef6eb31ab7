"""A few connections to one Redis-compatible server, behind a circuit breaker."""

from __future__ import annotations

import hashlib
import os
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeAlias, TypeVar

import redis.exceptions as foreign

from kvtier.abc.medium import Outcome, Status
from kvtier.errors import MediumError, MediumRefused, MediumUnavailable
from kvtier.storage_backends.breaker import CircuitBreaker
from kvtier.storage_backends.redis_names import raised
from kvtier.storage_backends.redis_wire import Wire, translated

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

T = TypeVar("T")
Commands: TypeAlias = "list[tuple[Any, ...]]"


class Connections:
    """Each carries one call at a time. A failure opens the breaker for all of them. Thread-safe.

    Calls raise ``MediumUnavailable`` where the server does not answer or may not be tried yet, ``MediumRefused`` where it
    refuses, and ``MediumError`` for what else it says.
    """

    def __init__(
        self,
        where: str,
        make: Callable[[], Any],
        count: int,
        *,
        hands: int,
        value_bytes: int,
        timeout: float,
        scripts: bool,
    ) -> None:
        """``make`` gives a redis-py connection that is not connected yet. A call waits ``timeout`` seconds for a free one.

        ``hands``: threads that a batch has at most.
        """
        self._where = where
        self._count = count
        self._hands = hands
        self._timeout = timeout
        self._scripts = scripts
        self._wires: queue.LifoQueue[Wire] = queue.LifoQueue()
        for _ in range(count):
            self._wires.put(Wire(make, value_bytes))
        self._workers = ThreadPoolExecutor(count, "kvtier-redis")
        self._breaker = CircuitBreaker(where)

    def call(self, job: Callable[[Wire], T]) -> T:
        """``job`` on a free connection, behind the breaker."""
        self._breaker.check()
        return self.attempt(job)

    def attempt(self, job: Callable[[Wire], T]) -> T:
        """``call`` whatever the breaker says."""
        try:
            with translated(self._where):
                done = self._with_wire(job)
        except (MediumUnavailable, MediumRefused) as error:
            self._breaker.failed(error)
            raise
        self._breaker.succeeded()
        return done

    def deal(self, job: Callable[[Wire, range, list[Outcome]], None], count: int) -> list[Outcome]:
        """``job`` for indices dealt out over the connections; raises where none of them got through."""
        outcomes = [Outcome(Status.FAILED, 0, "not tried")] * count
        hands = min(self._count, count, self._hands)
        if not hands:
            return outcomes
        self._breaker.check()  # once: behind a breaker that lets one call try, a batch is one call
        parts = [range(hand, count, hands) for hand in range(hands)]

        def play(part: range) -> MediumError | None:
            try:
                self.attempt(lambda wire: job(wire, part, outcomes))
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

    def evaluate(
        self,
        script: str,
        prefix: bytes,
        arguments: list[Any],
        then: Commands,
        by_commands: Callable[[Wire], tuple[int, list[Any]]],
    ) -> tuple[int, list[Any]]:
        """A script over packed names and the commands behind it, in one round trip; or the same by commands alone where the
        server lets us run no script. All replies.
        """
        if self._scripts:
            try:
                return self.call(lambda wire: _evaluated(wire, script, prefix, arguments, then))
            except _NoScripts:
                self._scripts = False
        return self.call(by_commands)

    def close(self) -> None:
        self._workers.shutdown()
        while not self._wires.empty():
            self._wires.get().close()

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


class _NoScripts(Exception):
    """The server, or our ACL, lets no script run."""


def _evaluated(wire: Wire, script: str, prefix: bytes, arguments: list[Any], then: Commands) -> tuple[int, list[Any]]:
    digest = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
    count, *replies = wire.pipeline([("EVALSHA", digest, 1, prefix, *arguments), *then])
    if isinstance(count, foreign.NoScriptError):
        count, *replies = wire.pipeline([("EVAL", script, 1, prefix, *arguments), *then])
    if isinstance(count, foreign.NoPermissionError):
        raise _NoScripts from count
    if isinstance(count, foreign.ResponseError) and "unknown command" in str(count).lower():
        raise _NoScripts from count
    return int(raised([count])[0]), raised(replies)
