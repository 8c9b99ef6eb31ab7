"""Where the engine's time goes, and what it reports to metrics."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.engine.request import FinishReason, RequestStats
from kvtier.metrics import EngineMetrics

LATE_SHARE = 0.01
"""With more late steps than this share a run does not say what it was made to say."""


@dataclass(slots=True)
class StepTimes:
    """Seconds that steps have spent, summed since the last ``clear``."""

    steps: int = 0
    tokens: int = 0
    plan: float = 0.0
    """Scheduling, and what the connector answers to it."""
    forward: float = 0.0
    """The model: torch operators, what leads up to them, and waiting for loads."""
    sample: float = 0.0
    note: float = 0.0
    """Publishing blocks, offering saves, text and stop strings."""

    @property
    def total(self) -> float:
        return self.plan + self.forward + self.sample + self.note

    def clear(self) -> None:
        self.steps = self.tokens = 0
        self.plan = self.forward = self.sample = self.note = 0.0


@dataclass(slots=True)
class Pace:
    """How steps that are to last a given time have kept it, and what was found in blocks that were loaded."""

    steps: int = 0
    late_steps: int = 0
    filled_blocks: int = 0
    checked_blocks: int = 0
    """Loaded blocks that were looked at."""
    wrong_loads: int = 0
    """Loaded blocks that held other bytes than their key says."""

    @property
    def valid(self) -> bool:
        """Whether the machine kept the pace: not more than 1 % of the steps were late."""
        return self.late_steps <= LATE_SHARE * self.steps

    def sentence(self) -> str:
        verdict = (
            "the pace was kept" if self.valid else "invalid: this machine cannot keep the pace, choose a larger slow"
        )
        return (
            f"paced: {self.late_steps} of {self.steps} steps were late ({verdict}); {self.filled_blocks} blocks filled, "
            f"{self.checked_blocks} loaded ones checked, {self.wrong_loads} wrong"
        )


class Tally:
    """Reports to `EngineMetrics`, or to nobody."""

    def __init__(self, metrics: EngineMetrics | None) -> None:
        self._metrics = metrics

    def queue(self, running: int, waiting: int) -> None:
        if self._metrics is not None:
            self._metrics.queue(running=running, waiting=waiting)

    def preempted(self, requests: int, demoted: int, freed: int) -> None:
        """Sequences that gave way, and their tokens: in blocks that the tiers below keep, and in those that nobody keeps."""
        if self._metrics is not None and requests:
            self._metrics.preempted(requests)
            self._metrics.preempted_tokens(demoted=demoted, freed=freed)

    def rechecked(self, *, differed: bool) -> None:
        if self._metrics is not None:
            self._metrics.rechecked(differed=differed)

    def first_token(self, stats: RequestStats) -> None:
        if self._metrics is None or stats.ttft is None:
            return
        self._metrics.first_token(stats.ttft)
        self._metrics.prompt_tokens("computed", stats.computed_tokens)
        self._metrics.prompt_tokens("hbm", stats.hbm_tokens)
        self._metrics.prompt_tokens("external", stats.external_tokens)

    def finished(self, stats: RequestStats, continuations: int, finish: FinishReason) -> None:
        if self._metrics is None:
            return
        self._metrics.finished(finish)
        self._metrics.generated(stats.completion_tokens)
        tokens = stats.completion_tokens // continuations - 1
        if tokens > 0 and stats.first_token is not None and stats.finished is not None:
            self._metrics.next_token((stats.finished - stats.first_token) / tokens)
