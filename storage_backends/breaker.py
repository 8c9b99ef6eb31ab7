"""A circuit breaker: after a failure nobody waits for a remote medium again until it is worth a try."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from kvtier.errors import MediumUnavailable


class CircuitBreaker:
    """Closed while calls succeed. A failure opens it for an exponentially growing, jittered time; then one call may try.

    Thread-safe. ``name`` goes into messages.
    """

    def __init__(
        self,
        name: str,
        *,
        first: float = 0.1,
        longest: float = 3.0,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._name = name
        self._first = first
        self._longest = longest
        self._clock = clock
        self._chance = chance
        self._lock = threading.Lock()
        self._failures = 0
        self._until = 0.0
        self._why = ""

    @property
    def why(self) -> str | None:
        """Why the breaker is open; None while it is closed."""
        return self._why if self._failures else None

    def check(self) -> None:
        """Raise ``MediumUnavailable`` while open. The call that is let through first keeps the others out for a while."""
        with self._lock:
            if not self._failures:
                return
            left = self._until - self._clock()
            if left > 0:
                raise MediumUnavailable(f"{self._name}: next try in {left:.1f} s; {self._why}")
            self._until = self._clock() + self._first * 2

    def failed(self, error: Exception) -> None:
        with self._lock:
            pause = min(self._longest, self._first * 2.0 ** min(self._failures, 16))
            self._failures += 1
            self._why = str(error)
            self._until = self._clock() + pause * (0.5 + 0.5 * self._chance())

    def succeeded(self) -> None:
        if self._failures:
            with self._lock:
                self._failures = 0
                self._why = ""
