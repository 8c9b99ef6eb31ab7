"""Threads and time that a test turns by hand: transfer jobs run in any order it likes, and the clock moves when it says so."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.transfer.workers import Job, Urgency, Workers


class ManualClock:
    """A clock that stands still: call it for the time in seconds, ``advance`` it to let time pass."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass. Also a ``sleep`` for whatever is given one."""
        self.now += seconds


class _Turned(Workers):
    """Workers without threads. A job that raises, which none may, raises here: threads would only log it."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 0)
        self._raised: list[Exception] = []

    def submit(self, urgency: Urgency, job: Job, otherwise: Job | None = None) -> bool:
        def watched() -> None:
            try:
                job()
            except Exception as raised:
                self._raised.append(raised)
                raise

        return super().submit(urgency, watched, otherwise)

    def run_one(self, choose: Callable[[int], int] | None = None) -> bool:
        there = super().run_one(choose)
        if self._raised:
            raise self._raised.pop()
        return there


class HandTurned:
    """The ``Workers`` of one store, none of which has a thread: whoever holds this is the scheduler.

    A stalled one keeps its jobs until it is released, as a device does that has stopped to answer.
    """

    def __init__(self) -> None:
        self.workers: list[Workers] = []
        self._stalled: set[int] = set()

    def add(self, name: str) -> Workers:
        """Workers without threads, turned from here."""
        self.workers.append(_Turned(name))
        return self.workers[-1]

    @property
    def queued(self) -> int:
        """Jobs that wait, stalled ones among them."""
        return sum(workers.queued for workers in self.workers)

    def run_one(self, choose: Callable[[int], int] | None = None) -> bool:
        """Run one job: the next of the first that has any, or by ``choose(count)``: which workers, then which of their jobs.

        False where none is left to run.
        """
        able = [workers for index, workers in enumerate(self.workers) if workers.queued and index not in self._stalled]
        if not able:
            return False
        return able[choose(len(able)) if choose else 0].run_one(choose)

    def turn(self, choose: Callable[[int], int] | None = None, most: int = 10_000) -> int:
        """Run jobs, and those that they bring about, until none is left or ``most`` have run; how many have."""
        count = 0
        while count < most and self.run_one(choose):
            count += 1
        return count

    def stall(self, index: int) -> None:
        """Run no job of ``workers[index]`` until ``release``."""
        self._stalled.add(index)

    def release(self) -> None:
        """Let all workers go on."""
        self._stalled.clear()
