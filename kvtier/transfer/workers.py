"""Threads that move bytes: jobs in order of urgency, loads before prefetches before saves, with a bound on what waits."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

Job: TypeAlias = Callable[[], None]
"""Does its work, reports to whoever made it, and does not raise."""

_log = logging.getLogger(__name__)


class Urgency(enum.IntEnum):
    """What goes first."""

    LOAD = 0
    PREFETCH = 1
    SAVE = 2


class Workers:
    """Threads over three queues.

    Of several threads one never takes a save, so that a load does not wait behind slow writes. With ``threads=0`` nothing
    runs by itself: a test runs each queued job by hand, in any order it likes.
    """

    def __init__(self, name: str, threads: int, *, most_saves: int = 1024) -> None:
        """``most_saves`` bounds the queue of saves; loads and prefetches are bounded by the leases they stand for."""
        self._name = name
        self._most_saves = most_saves
        self._queues: tuple[deque[tuple[Job, Job | None]], ...] = tuple(deque() for _ in Urgency)
        self._changed = threading.Condition()
        self._running = 0
        self._begun: dict[object, float] = {}
        self._saving = 0
        self._most_saving = max(1, threads - 1)
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kvtier-{name}-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, urgency: Urgency, job: Job, otherwise: Job | None = None) -> bool:
        """Queue a job; never blocks. False where the queue of saves is full or the workers are closed: it will not run.

        ``otherwise`` runs in its place where the workers are closed before its turn comes.
        """
        with self._changed:
            if self._closed or (urgency is Urgency.SAVE and len(self._queues[urgency]) >= self._most_saves):
                return False
            self._queues[urgency].append((job, otherwise))
            self._changed.notify()
            return True

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def queued(self) -> int:
        return sum(len(queue) for queue in self._queues)

    @property
    def longest_load(self) -> float:
        """Seconds for which the oldest load or prefetch that has not returned has been running; 0 where none runs."""
        with self._changed:
            now = time.monotonic()
            return now - min(self._begun.values(), default=now)

    @property
    def idle(self) -> bool:
        with self._changed:
            return not self._running and not self.queued

    def run_one(self, choose: Callable[[int], int] | None = None) -> bool:
        """Run one queued job in the caller's thread: the next in order, or number ``choose(count)`` of all."""
        with self._changed:
            waiting = [(queue, job) for queue in self._queues for job in queue]
            if not waiting:
                return False
            queue, job = waiting[choose(len(waiting)) if choose else 0]
            queue.remove(job)
            self._running += 1
        self._run(job[0], Urgency.LOAD)
        return True

    def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing is queued or running (seconds); whether that came true."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running and not self.queued, timeout)

    def close(self) -> None:
        """Drop what is queued, wait for what runs. Idempotent."""
        with self._changed:
            self._closed = True
            dropped = [otherwise for queue in self._queues for _, otherwise in queue if otherwise is not None]
            for queue in self._queues:
                queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=10)
        for otherwise in dropped:
            otherwise()

    def _next(self) -> tuple[Job, Urgency] | None:
        for urgency, queue in zip(Urgency, self._queues, strict=True):
            if queue and (urgency is not Urgency.SAVE or self._saving < self._most_saving):
                return queue.popleft()[0], urgency
        return None

    def _work(self) -> None:
        while True:
            with self._changed:
                taken = self._next()
                while taken is None:
                    if self._closed:
                        return
                    self._changed.wait()
                    taken = self._next()
                job, urgency = taken
                self._running += 1
                self._saving += urgency is Urgency.SAVE
            self._run(job, urgency)

    def _run(self, job: Job, urgency: Urgency) -> None:
        this = object()
        if urgency is not Urgency.SAVE:
            with self._changed:
                self._begun[this] = time.monotonic()
        try:
            job()
        except Exception:  # noqa: BLE001 - a bug of ours must not take the thread, and with it the tier, down
            _log.exception("%s: a transfer job failed", self._name)
        finally:
            with self._changed:
                self._running -= 1
                self._begun.pop(this, None)
                self._saving -= urgency is Urgency.SAVE and bool(self._threads)
                self._changed.notify_all()
