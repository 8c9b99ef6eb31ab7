"""How two ways compare that were measured in turns: a ratio of medians with an interval, and a verdict."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

LEAST = 0.95
"""The cache may not be slower than this, beside no cache."""
WIDEST = 0.1
"""A wider interval shows nothing: as it is for a ratio up to 1, and as a share of a larger one."""
HOLDS, SLOWER, INCONCLUSIVE, TOO_FEW = "holds", "slower", "inconclusive", "too few pairs to say"
FEWEST = 7
"""Fewer pairs show nothing either."""
RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times better; ``low`` and ``high`` enclose it with 95 % confidence, by bootstrap over pairs."""

    ratio: float
    low: float
    high: float
    pairs: int

    @property
    def verdict(self) -> str:
        """``holds``: not slower than allowed, by an interval that is narrow enough. A wide one never holds, however good it
        looks; it is `SLOWER` where all of it is, and else inconclusive."""
        if self.pairs < FEWEST:
            return TOO_FEW
        if not self.high - self.low <= WIDEST * max(1.0, self.ratio):
            return INCONCLUSIVE if self.high >= LEAST else SLOWER
        return HOLDS if self.ratio >= LEAST else SLOWER

    def report(self) -> dict[str, object]:
        return {**asdict(self), "verdict": self.verdict}


def ratio_of_medians(above: Sequence[float], below: Sequence[float], seed: int) -> Ratio:
    """``above[i]`` and ``below[i]`` are of one pair; at least one pair, and nothing is 0."""
    pairs = list(zip(above, below, strict=True))
    rng = random.Random(seed)
    drawn = sorted(_ratio(rng.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    tail = int(RESAMPLES * (1 - CONFIDENCE) / 2)
    return Ratio(_ratio(pairs), drawn[tail], drawn[-1 - tail], len(pairs))


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(one for one, _ in pairs) / statistics.median(other for _, other in pairs)
