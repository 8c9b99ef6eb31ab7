"""Drives an engine in this process through a workload, step by step, and notes what its requests see."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.bench.workloads import Arrival, Conversation
from kvtier.engine.engine import IDLE_SECONDS, Engine
from kvtier.engine.request import FinishReason, Output, Request, RequestStats
from kvtier.engine.sampler import SamplingParams

Watch = Callable[[], None]
"""Called after each step."""


@dataclass(slots=True)
class Played:
    """What one pass through a workload has shown."""

    stats: list[RequestStats] = field(default_factory=list)
    """Of each request, in order of submission."""
    late: list[float] = field(default_factory=list)
    """Seconds from when each was due to its submission: a step was running, and it waited for that like for any other."""
    failed: int = 0
    """Continuations that the engine gave up."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between two tokens of one continuation."""
    seconds: float = 0.0
    """From the first submission to the last token."""
    store_cpu_s: float = 0.0
    """CPU time of the store's threads meanwhile."""
    declined: int = 0
    """Tokens that the gate had computed although a tier had them."""

    @property
    def waits(self) -> list[float | None]:
        """Seconds from when each request was due to its first token; None where none came."""
        return [
            None if each.ttft is None else late + each.ttft for late, each in zip(self.late, self.stats, strict=True)
        ]

    @property
    def ttfts(self) -> list[float]:
        """Of those that got one."""
        return [wait for wait in self.waits if wait is not None]

    @property
    def tokens(self) -> int:
        return sum(each.completion_tokens for each in self.stats)

    @property
    def hit_rate(self) -> float:
        return sum(each.cached_tokens for each in self.stats) / max(1, sum(each.prompt_tokens for each in self.stats))

    @property
    def loaded_tokens(self) -> int:
        """Prompt tokens from below HBM."""
        return sum(each.external_tokens for each in self.stats)


class Drive:
    """One engine, and requests that are numbered through."""

    def __init__(self, engine: Engine, proceed: Watch = lambda: None) -> None:
        """``proceed`` is called before each step, and may raise to end the pass: what is open is aborted."""
        self._engine = engine
        self._proceed = proceed
        self._count = 0
        self._last: dict[tuple[str, int], float] = {}
        self._salt = f"bench {secrets.token_hex(8)}"
        """A tier that outlives the process may know the same prompts from an earlier run."""

    def conversations(self, conversations: Sequence[Conversation], users: int) -> Played:
        """Rounds of so many at a time. Whoever has been answered thinks, until all others have had their turn."""
        played, waiting = Played(), deque(_Talk(each, each.opening) for each in conversations)
        open_rounds: dict[str, _Talk] = {}

        def submit(talk: _Talk) -> None:
            part = talk.conversation.rounds[talk.round]
            open_rounds[self._ask(played, (*talk.said, *part.tokens), part.answer, part.n)] = talk

        def ended(output: Output) -> None:
            talk = open_rounds.pop(output.request_id)
            if talk.conversation.grows:
                talk.said += (*talk.conversation.rounds[talk.round].tokens, *talk.answer)
            talk.answer, talk.round = (), talk.round + 1
            if talk.round < len(talk.conversation.rounds):
                waiting.append(talk)
            if waiting:
                submit(waiting.popleft())

        def noted(output: Output) -> None:
            if output.index == 0:
                open_rounds[output.request_id].answer += output.tokens
            if output.last:
                ended(output)

        with _Clock(played):
            for _ in range(min(users, len(waiting))):
                submit(waiting.popleft())
            while open_rounds:
                self._step(played, noted)
        return played

    def arrivals(self, listed: Sequence[Arrival], watch: Watch = lambda: None) -> Played:
        """Each request when it is due, whatever has become of those before. ``watch`` is called after each step."""
        played, waiting, unfinished = Played(), deque(listed), 0

        def noted(output: Output) -> None:
            nonlocal unfinished
            unfinished -= int(output.last)

        with _Clock(played):
            began = time.perf_counter()
            while waiting or unfinished:
                while waiting and waiting[0].time_s <= (now := time.perf_counter() - began):
                    due = waiting.popleft()
                    self._ask(played, due.prompt, due.answer, 1, now - due.time_s)
                    unfinished += 1
                self._step(played, noted)
                watch()
        return played

    def _ask(self, played: Played, prompt: tuple[int, ...], answer: int, n: int, late: float = 0.0) -> str:
        self._count += 1
        name = f"bench {self._count}"
        sampling = SamplingParams(temperature=0.0 if n == 1 else 1.0, max_tokens=answer, ignore_eos=True, n=n, seed=1)
        played.late.append(late)
        played.stats.append(self._engine.add_request(Request(name, prompt, sampling, salt=self._salt)))
        return name

    def _step(self, played: Played, noted: Callable[[Output], None]) -> None:
        try:
            self._proceed()
        except BaseException:
            self._engine.abort_all()
            raise
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            place = output.request_id, output.index
            if output.tokens:
                before = self._last.get(place)
                if before is not None:
                    played.gaps.append(now - before)
                self._last[place] = now
            if output.finish is not None:
                self._last.pop(place, None)
                played.failed += output.finish is FinishReason.ERROR
            noted(output)
        if not self._engine.progressed:
            time.sleep(IDLE_SECONDS)


@dataclass(slots=True)
class _Talk:
    """A conversation under way."""

    conversation: Conversation
    said: tuple[int, ...]
    answer: tuple[int, ...] = ()
    round: int = 0


class _Clock:
    """Wall time of a pass, and CPU time that the store's threads have spent meanwhile."""

    def __init__(self, played: Played) -> None:
        self._played = played

    def __enter__(self) -> None:
        self._cpu, self._began = store_cpu(), time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._played.seconds = time.perf_counter() - self._began
        self._played.store_cpu_s = store_cpu_since(self._cpu)


def store_cpu() -> dict[int, float]:
    """CPU seconds so far of each living thread of this process that is kvtier's: the stores' transfers and keepers."""
    spent = {}
    for thread in threading.enumerate():
        if thread.name.startswith("kvtier-") and thread.native_id is not None:
            try:
                nanoseconds = int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0])
            except OSError:  # it has just ended, or this kernel does not say
                continue
            spent[thread.native_id] = nanoseconds / 1e9
    return spent


def store_cpu_since(before: dict[int, float]) -> float:
    """CPU seconds of those that live now; one that has ended since takes nothing away."""
    return sum(spent - before.get(thread, 0.0) for thread, spent in store_cpu().items())
