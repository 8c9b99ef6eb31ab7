"""Sends requests when they are due, on one event loop, and keeps what became of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvtier.bench.arrivals import Arrivals, MadeUp, OfTrace, Prompt, Spell, Users
from kvtier.bench.client import Client, clock
from kvtier.bench.goodput import Call
from kvtier.errors import ConfigError

GONE_AFTER = 20
"""So many failures in a row, and the server is taken to be gone for all further requests as well."""
AHEAD = 64
"""Requests that are written before they are due."""

_Written: TypeAlias = "asyncio.Queue[tuple[Prompt, bytes] | None]"
"""Requests in order; None: there is no further one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run sends, and when."""

    source: MadeUp | OfTrace
    arrivals: Arrivals
    spell: Spell
    seed: int
    requests: int
    """At most so many in one run."""
    duration: float | None = None
    """Seconds after which nothing more is sent."""

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ConfigError(f"--requests {self.requests}: at least one has to be sent")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"--seed {self.seed}: give a number from 0 on, below 2^63")


class Sender:
    """Runs of one plan against one server. A run begins where the prompts of the one before ended."""

    def __init__(self, client: Client, model: str, plan: Plan, progress: Callable[[int], None] | None = None) -> None:
        """``progress`` is told how many requests have ended, each time one does."""
        self.plan = plan
        self.ended: str | None = None
        """Why the last run ended before its time."""
        self.interrupted: int | None = None
        """By which signal."""
        self.cpu_seconds = 0.0
        """That this process has spent on the last run."""
        self._client, self._model, self._progress = client, model, progress
        self._prompts = plan.source.prompts(plan.spell, plan.seed)
        self._calls: list[Call] = []
        self._answered = self._failures = 0
        self._sending: list[asyncio.Task[None]] = []
        self._asking: set[asyncio.Task[None]] = set()

    def interrupt(self, number: int) -> None:
        """Send nothing more and give up what is under way, because of a signal; what has been measured stays."""
        self.interrupted = number
        self._end("interrupted")
        for task in self._asking:
            task.cancel()

    async def run(self, arrivals: Arrivals) -> list[Call]:
        """One run; the calls that were sent, in that order. One that was given up has a ``fault``."""
        self._calls, self._sending, self._asking = [], [], set()
        self._answered = self._failures = 0
        before = time.process_time()
        written: _Written = asyncio.Queue(AHEAD)
        writer = asyncio.ensure_future(self._write(written))
        if isinstance(arrivals, Users):
            sending = [self._user(written) for _ in range(arrivals.count)]
        else:
            sending = [self._on_time(written, arrivals.times(self.plan.seed))]
        self._sending = [asyncio.ensure_future(each) for each in sending]
        await _all(self._sending)
        await _all(list(self._asking))
        writer.cancel()
        await _all([writer])
        self.cpu_seconds = time.process_time() - before
        for call in self._calls:
            if call.ended is None:
                call.ended, call.fault = clock(), "given up when the run was interrupted"
        return self._calls

    async def _write(self, written: _Written) -> None:
        """Write requests down ahead of time, so that nothing but sending is left to do when they are due."""
        count = 0
        try:
            while count < self.plan.requests:
                prompt = await anext(self._prompts, None)
                if prompt is None:
                    self._prompts = self.plan.source.prompts(self.plan.spell, self.plan.seed)
                    if count:
                        break
                    continue  # the run before has ended with the trace: this one begins it again
                await written.put((prompt, self._client.body(self._model, prompt.tokens, prompt.output_tokens)))
                count += 1
        except ConfigError as broken:  # the trace, at some line
            self.ended = str(broken)
        await written.put(None)

    async def _on_time(self, written: _Written, due_after: Callable[[Prompt], float]) -> None:
        began: float | None = None
        while (one := await written.get()) is not None:
            began = clock() if began is None else began
            after = due_after(one[0])
            if self.plan.duration is not None and after > self.plan.duration:
                return
            wait = began + after - clock()
            if wait > 0:
                await asyncio.sleep(wait)
            self._start(self._ask(began + after, one[1]))

    async def _user(self, written: _Written) -> None:
        began: float | None = None
        while (one := await written.get()) is not None:
            now = clock()
            began = now if began is None else began
            if self.plan.duration is not None and now - began > self.plan.duration:
                break
            await self._start(self._ask(now, one[1]))
        written.put_nowait(None)  # for the other users: whoever took one has made room for one

    def _start(self, asking: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(asking)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return task

    async def _ask(self, due: float, body: bytes) -> None:
        call = Call(due)
        self._calls.append(call)
        await self._client.ask(body, call)
        self._answered += 1
        self._failures = 0 if call.ok else self._failures + 1
        if self._failures == GONE_AFTER:
            self._end(f"{GONE_AFTER} requests in a row failed, the last one: {call.fault}")
        if self._progress is not None:
            self._progress(self._answered)

    def _end(self, why: str) -> None:
        self.ended = why
        for task in self._sending:
            task.cancel()


async def _all(tasks: list[asyncio.Task[None]]) -> None:
    """Wait for all of them; what one raised is raised, a cancellation is not."""
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, BaseException) and not isinstance(ended, asyncio.CancelledError):
            raise ended
