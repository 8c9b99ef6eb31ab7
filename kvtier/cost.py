"""What loading costs beside computing: both fitted to what this machine does, and the gate that compares them."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvtier.metrics import GateMetrics

_log = logging.getLogger(__name__)

T = TypeVar("T")

DRAM = "dram"
"""Name of the tier through which every load goes."""
KEPT = 5
"""Measurements that are remembered per size."""
OUTLIER = 2.0
"""A measurement counts as at most so many times the median of its size: one bad moment is no trend, three of five are."""
AGE = 64.0
"""After so many measurements of other sizes, what was measured of one counts half."""
ENOUGH = 3
"""Steps of prefill that must have been timed before anything is declined."""
REACH = 8.0
"""The time of a step says something of runs up to so many times its tokens."""
BLIND = 16
"""Runs that are loaded on no evidence in a row; then one is computed, or the tier counts as lost, to get some."""
SHARE = 0.01
"""Share of what a tier that lost could serve on which it is tried all the same."""
FIRM = 3
"""Measurements of a tier from which on it is tried on no more than its share: a first bad one is looked at again at once.
Of one size, those that outweigh what the line through all sizes says."""
LEAST_PATIENCE = 0.25
"""Seconds that a request waits for blocks in any case: a thread that is late is no slow tier."""
SMALLEST = 1e-12
"""Seconds, and seconds per byte or token, that are never undercut: what is measured as 0 is not free."""
LONGEST = 1e6
"""Seconds. What is said to have taken longer is no measurement."""


@dataclass(frozen=True, slots=True)
class Line:
    """``seconds = fixed + each * amount``, the amount in bytes or tokens."""

    fixed: float
    """Seconds before the first of it."""
    each: float
    """Seconds per byte or token."""

    def seconds(self, amount: float) -> float:
        return self.fixed + self.each * amount


class _Size:
    """Measurements of amounts between two powers of two."""

    def __init__(self) -> None:
        self.kept: deque[tuple[float, float]] = deque(maxlen=KEPT)
        self.last = 0
        """Number of the last measurement, of all sizes."""
        self.amount = self.seconds = 0.0

    def add(self, amount: float, seconds: float, number: int) -> None:
        self.kept.append((amount, seconds))
        self.last = number
        self.amount = sum(each for each, _ in self.kept) / len(self.kept)
        ordered = sorted(each for _, each in self.kept)
        most = OUTLIER * ordered[(len(ordered) - 1) // 2]
        self.seconds = sum(min(each, most) for each in ordered) / len(ordered)


class Fit:
    """A line through what was measured lately.

    Measurements are kept by size, a few of each, so that many long loads do not make it forget what a short one costs. The
    line is fitted to the sizes' means by least squares of relative errors, neither part of it negative; sizes that were not
    measured for long weigh less. One size alone fits many lines, and the benefit of the doubt goes to the cheapest of them.

    Relative errors make the fastest sizes count most, so that what became slow would hide for long behind sizes that were
    measured before. A size's own measurements therefore correct the line there, the more of them the further.
    """

    def __init__(self) -> None:
        self.count = 0
        """Measurements so far."""
        self.line = Line(0.0, SMALLEST)
        self._sizes: dict[int, _Size] = {}

    @property
    def largest(self) -> float:
        """The largest amount that is remembered; 0 where none is."""
        return max((amount for size in self._sizes.values() for amount, _ in size.kept), default=0.0)

    def observe(self, amount: float, seconds: float) -> None:
        """``amount`` (bytes or tokens, above 0) took ``seconds``; what is no time, or a negative one, is passed over."""
        if not 0.0 <= seconds <= LONGEST:
            return
        self.count += 1
        size = self._sizes.setdefault(int(amount).bit_length(), _Size())
        size.add(amount, max(seconds, SMALLEST), self.count)
        self.line = self._fitted()

    def seconds(self, amount: float) -> float:
        """What ``amount`` is expected to take; 0 where nothing was measured."""
        if not self.count:
            return 0.0
        if len(self._sizes) == 1:
            (size,) = self._sizes.values()
            return size.seconds * min(1.0, amount / size.amount)
        return self.line.seconds(amount) * self.correction(amount)

    def correction(self, amount: float) -> float:
        """How many times as long as the line says something of the size of ``amount`` takes, by its own measurements."""
        size = self._sizes.get(int(amount).bit_length())
        if size is None:
            return 1.0
        return float((size.seconds / self.line.seconds(size.amount)) ** min(1.0, len(size.kept) / FIRM))

    def _fitted(self) -> Line:
        s0 = s1 = s2 = t0 = t1 = 0.0
        for size in self._sizes.values():
            x, y = size.amount, size.seconds
            weight = len(size.kept) * 0.5 ** ((self.count - size.last) / AGE) / y
            t0, t1 = t0 + weight, t1 + weight * x
            s0, s1, s2 = s0 + weight / y, s1 + weight * x / y, s2 + weight * x * x / y
        spread = s0 * s2 - s1 * s1
        each = (s0 * t1 - s1 * t0) / spread if spread > 1e-9 * s0 * s2 else t1 / s2
        fixed = (t0 - each * s1) / s0
        if each <= SMALLEST:
            return Line(t0 / s0, SMALLEST)
        return Line(fixed, each) if fixed > 0 else Line(0.0, t1 / s2)


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks of one request that follow each other and would come from one tier."""

    tier: str
    tokens: int
    nbytes: int
    queued: int = 0
    """Bytes that the tier has to deliver before them."""
    arriving: bool = False
    """Whether they are on their way already, among the queued ones."""


class Gate(ABC):
    """Whether blocks are worth loading. Called under the store's lock: no I/O."""

    @abstractmethod
    def keeps(self, runs: Sequence[Run]) -> int:
        """How many of the first of a request's ``runs`` are worth loading. Changes nothing."""

    def decided(self, runs: Sequence[Run], kept: int, idle: Collection[str]) -> list[int]:
        """The first ``kept`` of ``runs`` will be loaded and the others computed: count that.

        Returns which of the others are to be read all the same, in the background, to see what their tier would have taken;
        only of tiers that are ``idle`` in that respect.
        """
        del runs, kept, idle
        return []

    def patience(self, runs: Sequence[Run]) -> float | None:
        """Seconds after which a request for which ``runs`` are loaded had better begin to compute; None: no opinion."""
        del runs
        return None

    @abstractmethod
    def seconds(self, tier: str, nbytes: int) -> float:
        """Estimated time to load ``nbytes`` from ``tier``; 0 where nothing is known."""

    def demotes(self, tokens: int, nbytes: int, unsaved: int) -> bool:
        """Whether saving ``unsaved`` bytes and loading ``nbytes`` again takes less time than computing their ``tokens``."""
        del tokens, nbytes, unsaved
        return True

    def observe_load(self, tier: str, nbytes: int, seconds: float, queued: int = 0) -> None:
        """``nbytes`` came from ``tier`` and proved, ``seconds`` after they were asked for, with ``queued`` bytes before them."""
        del tier, nbytes, seconds, queued

    def observe_save(self, nbytes: int, seconds: float) -> None:
        """``nbytes`` went into DRAM."""
        del nbytes, seconds

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """The engine computed ``tokens`` in one step."""
        del tokens, seconds


class OpenGate(Gate):
    """Admits everything."""

    def keeps(self, runs: Sequence[Run]) -> int:
        return len(runs)

    def seconds(self, tier: str, nbytes: int) -> float:
        del tier, nbytes
        return 0.0


class Guarded(Gate):
    """Another gate, whose faults stay here: what it raises is logged once per verb, and admits."""

    def __init__(self, inner: Gate) -> None:
        self.inner = inner
        self._faulty: set[str] = set()

    def keeps(self, runs: Sequence[Run]) -> int:
        return self._answer("keeps", lambda: self.inner.keeps(runs), len(runs))

    def decided(self, runs: Sequence[Run], kept: int, idle: Collection[str]) -> list[int]:
        nothing: list[int] = []
        return self._answer("decided", lambda: self.inner.decided(runs, kept, idle), nothing)

    def patience(self, runs: Sequence[Run]) -> float | None:
        return self._answer("patience", lambda: self.inner.patience(runs), None)

    def seconds(self, tier: str, nbytes: int) -> float:
        return self._answer("seconds", lambda: self.inner.seconds(tier, nbytes), 0.0)

    def demotes(self, tokens: int, nbytes: int, unsaved: int) -> bool:
        return self._answer("demotes", lambda: self.inner.demotes(tokens, nbytes, unsaved), True)  # noqa: FBT003 - as an open gate

    def observe_load(self, tier: str, nbytes: int, seconds: float, queued: int = 0) -> None:
        self._answer("observe_load", lambda: self.inner.observe_load(tier, nbytes, seconds, queued), None)

    def observe_save(self, nbytes: int, seconds: float) -> None:
        self._answer("observe_save", lambda: self.inner.observe_save(nbytes, seconds), None)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        self._answer("observe_prefill", lambda: self.inner.observe_prefill(tokens, seconds), None)

    def _answer(self, verb: str, ask: Callable[[], T], otherwise: T) -> T:
        try:
            return ask()
        except Exception as failed:  # noqa: BLE001 - a wrong estimate is no reason to lose a save, a load or a request
            if verb not in self._faulty:
                self._faulty.add(verb)
                _log.error("the gate failed to answer %s; going on without", verb, exc_info=failed)
            return otherwise


class _Tier:
    """What is known of one tier."""

    def __init__(self) -> None:
        self.fit = Fit()
        self.blind = 0
        """Runs admitted since the start without a measurement."""
        self.owed: dict[int, float] = {}
        """By size of run: tokens on which it may be tried."""


class FittedGate(Gate):
    """Compares ``t0 + bytes / bandwidth`` of each tier with the engine's prefill, both as measured.

    Of a request's runs those up to the point are loaded where most time is saved in sum, so that a short run that loses alone
    may still lead to a long one that wins. Nothing is declined before enough is known. A tier that lost is tried on `SHARE`
    of what it could serve, by count and not by chance. A tier below DRAM is tried in the background, where no request waits
    for it; DRAM itself can only be tried by a load, so that costs it no more than the same share of the time.
    """

    def __init__(self, metrics: GateMetrics | None = None) -> None:
        self._metrics = metrics
        self._tiers: dict[str, _Tier] = {}
        self._saves = Fit()
        self._prefill = Fit()
        self._blind = 0
        """Runs admitted in a row without evidence of what computing them takes."""

    def keeps(self, runs: Sequence[Run]) -> int:
        if not self._evident(runs):
            return 0 if self._prefill.count and self._blind >= BLIND else len(runs)
        kept, gain, best = 0, 0.0, 0.0
        for index, run in enumerate(runs):
            gain += self._gain(run)
            if gain > best:
                kept, best = index + 1, gain
        return kept

    def decided(self, runs: Sequence[Run], kept: int, idle: Collection[str]) -> list[int]:
        evident, tried = self._evident(runs), []
        if runs and not evident:
            self._blind = self._blind + 1 if kept else 0
        for index, run in enumerate(runs):
            state = self._state(run.tier)
            verdict = "admitted"
            if index < kept:
                state.blind += not state.fit.count
                if run.tier == DRAM and evident and self._due(run):
                    state.owed[run.tokens.bit_length()] = 0.0
                    verdict = "tried"
            else:
                verdict = "declined"
                if self._lost(run) and self._is_turn(run) and run.tier in idle:
                    state.owed[run.tokens.bit_length()] = 0.0
                    tried.append(index)
                    if self._metrics is not None:
                        self._metrics.decided(run.tier, "tried", run.tokens)
            if self._metrics is not None:
                self._metrics.decided(run.tier, verdict, run.tokens)
        return tried

    def patience(self, runs: Sequence[Run]) -> float | None:
        """As long as it should take, and then as long again as computing would have: nobody loses more than twice that."""
        if not self._evident(runs):
            return None
        expected = sum(map(self._expected, runs))
        return max(LEAST_PATIENCE, expected + self.prefill_seconds(sum(run.tokens for run in runs)))

    def seconds(self, tier: str, nbytes: int) -> float:
        return self._state(tier).fit.seconds(nbytes)

    def demotes(self, tokens: int, nbytes: int, unsaved: int) -> bool:
        if self._prefill.count < ENOUGH:
            return True
        save = self._saves.seconds(unsaved) if unsaved else 0.0
        return save + self.seconds(DRAM, nbytes) < self.prefill_seconds(tokens)

    def observe_load(self, tier: str, nbytes: int, seconds: float, queued: int = 0) -> None:
        if nbytes <= 0:
            return
        fit = self._state(tier).fit
        fit.observe(nbytes + queued, seconds)
        if self._metrics is not None:
            self._metrics.fitted(tier, fit.line.fixed, 1 / fit.line.each)

    def observe_save(self, nbytes: int, seconds: float) -> None:
        if nbytes > 0:
            self._saves.observe(nbytes, seconds)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        if tokens <= 0:
            return
        self._prefill.observe(tokens, seconds)
        if self._metrics is not None and self._prefill.count:
            largest = self._prefill.largest
            self._metrics.prefill(self._prefill.seconds(largest) / largest)

    def prefill_seconds(self, tokens: int) -> float:
        """What computing ``tokens`` more takes; 0 where no step was timed.

        A request has a step to itself whatever is loaded of it: what a step costs beside its tokens is only saved with each
        whole one, as long as the longest that were timed.
        """
        line, largest = self._prefill.line, self._prefill.largest
        if not largest:
            return 0.0
        each, steps = line.each * tokens, line.fixed * (tokens // largest)
        return (each + steps) * self._prefill.correction(min(tokens, largest))

    def _state(self, tier: str) -> _Tier:
        return self._tiers.setdefault(tier, _Tier())

    def _evident(self, runs: Sequence[Run]) -> bool:
        """Whether enough steps were timed, and long enough ones, to say what computing ``runs`` takes."""
        tokens = sum(run.tokens for run in runs)
        return self._prefill.count >= ENOUGH and tokens <= REACH * self._prefill.largest

    def _expected(self, run: Run) -> float:
        """Seconds that loading ``run`` takes; 0 where a tier has the benefit of the doubt."""
        state = self._state(run.tier)
        if not state.fit.count:
            return 0.0 if state.blind < BLIND else float("inf")
        if run.tier == DRAM:
            return state.fit.seconds(run.nbytes + run.queued)
        ahead = run.queued if run.arriving else run.nbytes + run.queued
        return state.fit.seconds(ahead) + self.seconds(DRAM, run.nbytes)

    def _gain(self, run: Run) -> float:
        """Seconds that loading ``run`` saves."""
        if run.tier == DRAM and self._due(run):
            return self.prefill_seconds(run.tokens)
        return self.prefill_seconds(run.tokens) - self._expected(run)

    def _lost(self, run: Run) -> bool:
        return not run.arriving and self._expected(run) >= self.prefill_seconds(run.tokens)

    def _is_turn(self, run: Run) -> bool:
        """Count a run of a tier that lost; whether the tier has been declined often enough to be tried on it."""
        state, size = self._state(run.tier), run.tokens.bit_length()
        state.owed[size] = state.owed.get(size, 0.0) + SHARE * run.tokens
        return run.tier != DRAM and (state.fit.count < FIRM or state.owed[size] >= run.tokens)

    def _due(self, run: Run) -> bool:
        """Whether DRAM, which loses on ``run``, is to be tried on it: a try costs time, so the worse it is the rarer."""
        state, computing = self._state(run.tier), self.prefill_seconds(run.tokens)
        excess = (self._expected(run) - computing) / computing
        if excess < 0:
            return False
        return state.fit.count < FIRM or state.owed.get(run.tokens.bit_length(), 0.0) >= run.tokens * max(1.0, excess)
