"""What loading costs beside computing: the estimate of a tier, and the gate that compares the two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Time of a load as ``t0 + bytes / bandwidth``."""

    t0: float
    """Seconds before the first byte."""
    bandwidth: float
    """Bytes per second."""

    def __post_init__(self) -> None:
        if self.t0 < 0 or self.bandwidth <= 0:
            raise ValueError(f"a load takes t0 >= 0 seconds at a bandwidth > 0, got {self}")

    def seconds(self, nbytes: int) -> float:
        return self.t0 + nbytes / self.bandwidth


class Gate(ABC):
    """Whether a run of blocks is worth loading. Called under the store's lock: no I/O."""

    @abstractmethod
    def admits(self, tier: str, nbytes: int, tokens: int) -> bool:
        """Whether loading ``nbytes`` from ``tier`` is expected to take less time than computing their ``tokens``."""

    @abstractmethod
    def seconds(self, tier: str, nbytes: int) -> float:
        """Estimated time to load ``nbytes`` from ``tier``; 0 where nothing is known."""


class OpenGate(Gate):
    """Admits everything."""

    def admits(self, tier: str, nbytes: int, tokens: int) -> bool:
        return True

    def seconds(self, tier: str, nbytes: int) -> float:
        return 0.0


class StaticGate(Gate):
    """Compares fixed load costs with a fixed prefill speed."""

    def __init__(self, costs: dict[str, LoadCost], prefill_seconds_per_token: float) -> None:
        self._costs = costs
        self._prefill = prefill_seconds_per_token

    def admits(self, tier: str, nbytes: int, tokens: int) -> bool:
        return self.seconds(tier, nbytes) < tokens * self._prefill

    def seconds(self, tier: str, nbytes: int) -> float:
        cost = self._costs.get(tier)
        return 0.0 if cost is None else cost.seconds(nbytes)
