"""A device whose streams do nothing until they must: whoever forgets to wait gets wrong bytes, not luck."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from kvtier.storage_backends.cuda_copy import CopyQueue, Mark, Pairs, Way

COMPUTE = "compute"
Stream = str | Way


@dataclass
class _Queue:
    work: list[Callable[[], None]] = field(default_factory=list)
    done: int = 0


class FakeDevice(CopyQueue):
    """Streams over this process's memory. Work runs when somebody waits for it or, in ``eager`` streams, when it is queued.

    Each stream runs in order; what ran is in ``ran``. With ``blocks=True`` a host that waits for copies is kept waiting until
    ``release``, as by a slow bus.
    """

    def __init__(self, eager: Collection[Stream] = (), *, blocks: bool = False) -> None:
        self.ran: list[str] = []
        self._eager = list(eager)
        self._queues: dict[Stream, _Queue] = {COMPUTE: _Queue(), **{way: _Queue() for way in Way}}
        self._lock = threading.RLock()
        self._free = threading.Event()
        self.waiting = threading.Event()
        """Set as soon as a host is kept waiting."""
        if not blocks:
            self._free.set()

    def compute(self, name: str, act: Callable[[], None]) -> None:
        """Queue a step of the engine's computation."""
        self._enqueue(COMPUTE, name, act)

    def fence(self) -> Mark:
        return self._mark(COMPUTE)

    def copy(self, way: Way, pairs: Pairs, nbytes: int) -> Mark:
        def move() -> None:
            for to, source in pairs:
                ctypes.memmove(to, source, nbytes)

        self._enqueue(way, f"{way.name} {len(pairs)} x {nbytes}", move)
        return self._mark(way)

    def finish(self) -> None:
        """Run everything, as a synchronisation of the whole device does."""
        for stream in self._queues:
            self.run(stream, len(self._queues[stream].work))

    def release(self) -> None:
        self._free.set()

    def run(self, stream: Stream, upto: int) -> None:
        queue = self._queues[stream]
        with self._lock:
            while queue.done < upto:
                queue.done += 1
                queue.work[queue.done - 1]()

    def hold(self, upto: int, of: Stream) -> None:
        """Queue, in the stream that computes, a wait for another one."""
        self._enqueue(COMPUTE, "", lambda: self.run(of, upto))

    def keep_waiting(self) -> None:
        self.waiting.set()
        assert self._free.wait(30), "nobody released the device"

    def _enqueue(self, stream: Stream, name: str, act: Callable[[], None]) -> None:
        def run() -> None:
            act()
            if name:
                self.ran.append(name)

        with self._lock:
            queue = self._queues[stream]
            queue.work.append(run)
            if stream in self._eager:
                self.run(stream, len(queue.work))

    def _mark(self, stream: Stream) -> Mark:
        with self._lock:
            return _Mark(self, stream, len(self._queues[stream].work))


@dataclass(frozen=True)
class _Mark(Mark):
    device: FakeDevice
    stream: Stream
    upto: int

    def wait(self) -> None:
        if isinstance(self.stream, Way):
            self.device.keep_waiting()
        self.device.run(self.stream, self.upto)

    def hold_compute(self) -> None:
        self.device.hold(self.upto, self.stream)
