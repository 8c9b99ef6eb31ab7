"""The engine for asyncio: one thread runs the steps, coroutines wait for what they give."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.engine.engine import IDLE_SECONDS, Engine
from kvtier.engine.request import FinishReason, Output, Request, RequestStats
from kvtier.errors import RequestError

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

STEP_SECONDS = 30.0
"""A step that has begun ends within this, even on a busy machine."""


class AsyncEngine:
    """Runs `Engine.step` on a thread of its own for as long as there is work.

    ``start`` and everything asynchronous belong to one event loop. What waits is bounded: at most ``max_open`` requests
    are open, and each has at most its own tokens in its queue.
    """

    def __init__(self, engine: Engine, max_open: int = 256) -> None:
        self.engine = engine
        self.fault: str | None = None
        """Why the engine stopped; None while it runs."""
        self._max_open = max_open
        self._queues: dict[str, tuple[RequestStats, asyncio.Queue[Output]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvtier-steps", daemon=True)

    def busy(self, more: int = 1) -> bool:
        """Whether ``more`` further requests would not be taken now."""
        return self._closed or self.fault is not None or len(self._queues) + more > self._max_open

    def start(self) -> None:
        """Start the thread; called on the event loop that will wait for outputs."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def open(self, requests: Sequence[Request]) -> Stream:
        """Begin to serve ``requests`` together. Close what this returns, in whatever way it ends.

        Raises `RequestError` for a request that can never be served, or while ``busy``; then none of them is served.
        """
        if self.busy(len(requests)):
            raise RequestError(self.fault or "the engine takes no further request now")
        stream = Stream(self)
        try:
            for request in requests:
                if request.id in self._queues:
                    raise RequestError(f"a request with the id {request.id!r} is already open")
                self._queues[request.id] = self.engine.add_request(request), stream.queue
                stream.unfinished.add(request.id)
        except BaseException:
            stream.close()
            raise
        self._wake.set()
        return stream

    def abort(self, request_id: str) -> None:
        """End a request; its stream ends with ``ABORT``."""
        self.engine.abort(request_id)
        self._wake.set()

    async def close(self, timeout: float) -> bool:
        """Take no more requests, give open ones ``timeout`` seconds, abort the rest, stop the thread.

        Returns whether all of them, and the saves that they began, ended by themselves. Idempotent.
        """
        self._closed = True
        if not self._thread.is_alive():
            return self.fault is None
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._until_idle(), timeout)
        finished = not self.engine.has_work
        self.engine.abort_all()
        self._stopping.set()
        self._wake.set()
        await asyncio.to_thread(self._thread.join, timeout + STEP_SECONDS)
        return finished and not self._thread.is_alive()

    async def _until_idle(self) -> None:
        while self.engine.has_work and self.fault is None:  # noqa: ASYNC110 - what ends is on another thread
            await asyncio.sleep(IDLE_SECONDS)

    def forget(self, request_id: str) -> None:
        """Nobody waits for this request any more."""
        self._queues.pop(request_id, None)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # noqa: BLE001 - whatever it is, whoever waits for an answer is told
            _log.exception("a step failed; the engine stops")
            self.fault = f"the engine stopped: {error!r}"
            self._call(self._fail_all)

    def _turn(self) -> bool:
        """One step, or a wait for something to do; False when it is time to end."""
        self._wake.clear()
        if not self.engine.has_work:
            if self._stopping.is_set():
                return False
            self._wake.wait()
            return True
        outputs = self.engine.step()
        if outputs:
            self._call(self._deliver, outputs)
        if not self.engine.progressed:
            if self._stopping.is_set() and not self.engine.open_requests:
                return False
            self._wake.wait(IDLE_SECONDS)
        return True

    def _call(self, *call: object) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is left to tell
            self._loop.call_soon_threadsafe(*call)  # type: ignore[arg-type]  # a callable and its arguments

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            stats, queue = self._queues.get(output.request_id, (None, None))
            if queue is not None and stats is output.stats:  # else of a request that had the same id before
                queue.put_nowait(output)

    def _fail_all(self) -> None:
        for request_id, (_, queue) in list(self._queues.items()):
            queue.put_nowait(Output(request_id, 0, (), "", RequestStats(0, 0.0), FinishReason.ERROR, last=True))


class Stream:
    """Outputs of requests that were opened together, as they come, to the last one of each.

    Closing it aborts what is unfinished; idempotent.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.queue: asyncio.Queue[Output] = asyncio.Queue()
        self.unfinished: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        if not self.unfinished:
            raise StopAsyncIteration
        output = await self.queue.get()
        if output.last:
            self.unfinished.discard(output.request_id)
            self._engine.forget(output.request_id)
        return output

    def close(self) -> None:
        for request_id in self.unfinished:
            self._engine.abort(request_id)
            self._engine.forget(request_id)
        self.unfinished.clear()
