"""What a load test has seen of its requests, and what it says of the server: percentiles, goodput, the rate that holds.

Goodput counts the requests that meet a target for the time to the first token and one for the time per further token
(Zhong et al., "DistServe", OSDI'24).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

PERCENTILES = (50, 90, 99)
MOST_RATE = 1e6
"""Requests per second: more nobody sends, and nobody looks for."""


@dataclass(slots=True)
class Call:
    """One request and its answer. Times are seconds of one clock."""

    due: float
    """When it was to be sent; where a user asks again when answered, when he was."""
    sent: float = 0.0
    """Latencies count from here; how much later than due that was is told beside them."""
    ended: float | None = None
    times: array[float] = field(default_factory=lambda: array("d"))
    """When each piece of text came."""
    completion_tokens: int | None = None
    """As the server's usage says; None where it says nothing: then pieces are counted."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    fault: str | None = None
    """Why it failed, in words; what had come until then stays."""

    @property
    def ok(self) -> bool:
        return self.fault is None and self.ended is not None

    @property
    def tokens(self) -> int:
        return len(self.times) if self.completion_tokens is None else self.completion_tokens

    @property
    def ttft(self) -> float | None:
        """Seconds to the first piece of text."""
        return self.times[0] - self.sent if self.times else None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None where there is but one."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.times and self.tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request has to meet to count."""

    ttft: float
    """Seconds to the first token."""
    tpot: float
    """Seconds per token after it."""

    def met(self, call: Call) -> bool:
        first, further = call.ttft, call.tpot
        return call.ok and first is not None and first <= self.ttft and (further is None or further <= self.tpot)


def summary(calls: Sequence[Call], targets: Targets) -> dict[str, object]:
    """The figures of one run. Percentiles are of the requests that ended well; shares are of all that were sent."""
    well = [call for call in calls if call.ok]
    began = min((call.sent for call in calls), default=0.0)
    ended = max((call.ended for call in calls if call.ended is not None), default=began)
    seconds = ended - began
    met = sum(map(targets.met, calls))
    prompt, cached = sum(call.prompt_tokens for call in calls), sum(call.cached_tokens for call in calls)
    tokens = sum(call.tokens for call in calls)
    gaps = np.concatenate([np.diff(call.times) for call in well]) if well else np.empty(0)
    return {
        "requests": len(calls),
        "ok": len(well),
        "without_text": sum(not call.times for call in well),
        "without_usage": sum(call.completion_tokens is None for call in well),
        "failed": dict(Counter(call.fault for call in calls if call.fault is not None).most_common()),
        "seconds": seconds,
        "ttft_s": _percentiles(call.ttft for call in well),
        "tpot_s": _percentiles(call.tpot for call in well),
        "itl_s": _percentiles(gaps),
        "e2e_s": _percentiles(call.ended - call.sent for call in well if call.ended is not None),
        "requests_per_s": _rate(len(well), seconds),
        "output_tokens_per_s": _rate(tokens, seconds),
        "output_tokens": tokens,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_share": cached / prompt if prompt else None,
        "goodput": {
            "ttft_target_s": targets.ttft,
            "tpot_target_s": targets.tpot,
            "share": met / len(calls) if calls else None,
            "requests_per_s": _rate(met, seconds),
        },
        "late_s": _percentiles(call.sent - call.due for call in calls),
    }


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def _percentiles(values: Iterable[float | None]) -> dict[str, float] | None:
    """Nearest ranks, so that each is a value that was seen; None where nothing was."""
    seen = np.fromiter((value for value in values if value is not None), np.float64)
    if not len(seen):
        return None
    found = np.percentile(seen, PERCENTILES, method="inverted_cdf")
    return {f"p{rank}": float(value) for rank, value in zip(PERCENTILES, found, strict=True)}


class RateSearch:
    """The highest rate at which a share of requests still meets the targets, by doubling and then halving the interval.

    It ends after ``most_runs`` runs, when the interval is narrower than a tenth of the rate, or where it would pass `MOST_RATE`.
    """

    def __init__(self, first: float, share: float = 0.9, most_runs: int = 8) -> None:
        """``first``: requests per second to begin with."""
        self.share = share
        self.most_runs = most_runs
        self.runs: list[tuple[float, float]] = []
        """(rate, share that met the targets)."""
        self._next = first

    @property
    def held(self) -> float | None:
        """The highest rate that held below any that did not; None where none has."""
        return max((rate for rate, _ in self.runs if rate < (self.broken or float("inf"))), default=None)

    @property
    def broken(self) -> float | None:
        """The lowest rate that did not hold; None where all have."""
        return min((rate for rate, share in self.runs if share < self.share), default=None)

    def next_rate(self) -> float | None:
        """The rate to try now; None: it is found as well as it will be."""
        if len(self.runs) >= self.most_runs:
            return None
        if self.runs:
            held, broken = self.held, self.broken
            if held is not None and broken is not None and broken - held < 0.1 * broken:
                return None
            if broken is None:
                self._next = 2 * max(rate for rate, _ in self.runs)
            else:
                self._next = broken / 2 if held is None else (held + broken) / 2
        return self._next if self._next < MOST_RATE else None

    def note(self, rate: float, share: float) -> None:
        """A run at ``rate`` has ended."""
        self.runs.append((rate, share))

    def report(self) -> dict[str, object]:
        return {
            "share": self.share,
            "requests_per_s": self.held,
            "no_longer_at": self.broken,
            "runs": [{"requests_per_s": rate, "share": share} for rate, share in self.runs],
        }
