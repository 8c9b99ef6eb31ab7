"""Virtual time: what would happen later happens next, and threads that wait in it take turns.

One call runs at a time, the one that is due first, of those that are due together the one that was asked for first. So a
simulation gives the same result on any machine, and hours pass in seconds. What may wait (a transfer job inside a medium's
call) has a real thread, which is parked until its moment; everything else is a call of the schedule's.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from functools import partial

from kvtier.transfer.workers import Job, Urgency, Workers

Act = Callable[[], None]


def _closed() -> threading.Lock:
    """A door: whoever acquires it waits until somebody releases it, once for each. (A ``Semaphore`` is many times dearer.)"""
    door = threading.Lock()
    door.acquire()
    return door


class _Thread:
    """A thread that does one job after another, each when the schedule says so."""

    def __init__(self, schedule: Schedule) -> None:
        self.turn = _closed()
        self.job: Act | None = None
        self._schedule = schedule
        self._real = threading.Thread(target=self._work, name="kvtier-simulated", daemon=True)
        self._real.start()

    def _work(self) -> None:
        self._schedule.here.thread = self
        self.turn.acquire()
        while self.job is not None:
            self.job()
            self.job = None
            self._schedule.parked.append(self)
            self._schedule.back.release()
            self.turn.acquire()

    def join(self) -> None:
        """End it; it must be parked."""
        self.turn.release()
        self._real.join(timeout=10)


class Schedule:
    """A clock, and what is due. Call it for the time in seconds. All of it belongs to the thread that calls ``run``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.here = threading.local()
        self.parked: list[_Thread] = []
        self.back = _closed()
        """Given by a thread that goes to sleep or has ended its job."""
        self._due: list[tuple[float, int, Act]] = []
        self._count = itertools.count()

    def __call__(self) -> float:
        return self.now

    def at(self, when: float, act: Act) -> None:
        """Call ``act`` when the clock says ``when``, or now where that has passed."""
        heapq.heappush(self._due, (max(when, self.now), next(self._count), act))

    def run(self) -> None:
        """Let time pass until nothing is due any more."""
        while self._due:
            self.now, _, act = heapq.heappop(self._due)
            act()

    def spawn(self, job: Act) -> None:
        """Run ``job`` now, on a thread on which it may sleep."""
        self.at(self.now, partial(self._begin, job))

    def sleep_until(self, when: float) -> None:
        """Let others go on until ``when``. For threads of ``spawn``."""
        thread: _Thread = self.here.thread
        self.at(when, partial(self._resume, thread))
        self.back.release()
        thread.turn.acquire()

    def close(self) -> None:
        """End the threads; nothing may be due."""
        for thread in self.parked:
            thread.join()
        self.parked.clear()

    def _begin(self, job: Act) -> None:
        thread = self.parked.pop() if self.parked else _Thread(self)
        thread.job = job
        self._resume(thread)

    def _resume(self, thread: _Thread) -> None:
        thread.turn.release()
        self.back.acquire()


class TimedWorkers(Workers):
    """Workers whose threads take turns in virtual time; as with real ones, of several one never takes a save."""

    def __init__(self, name: str, threads: int, schedule: Schedule, *, most_saves: int = 1024) -> None:
        super().__init__(name, 0, most_saves=most_saves)
        self._schedule = schedule
        self._most = threads
        self._busy = 0
        self._most_saving = max(1, threads - 1)
        self._since: dict[Job, float] = {}

    def submit(self, urgency: Urgency, job: Job, otherwise: Job | None = None) -> bool:
        taken = super().submit(urgency, job, otherwise)
        self._start()
        return taken

    @property
    def longest_load(self) -> float:
        return self._schedule.now - min(self._since.values(), default=self._schedule.now)

    def _start(self) -> None:
        while self._busy < self._most and (taken := self._next()) is not None:
            job, urgency = taken
            self._busy += 1
            self._running += 1
            self._saving += urgency is Urgency.SAVE
            if urgency is not Urgency.SAVE:
                self._since[job] = self._schedule.now
            self._schedule.spawn(partial(self._turn, job, urgency))

    def _turn(self, job: Job, urgency: Urgency) -> None:
        self._run(job, urgency)
        self._busy -= 1
        self._saving -= urgency is Urgency.SAVE
        self._since.pop(job, None)
        self._start()
