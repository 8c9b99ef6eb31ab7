"""What a store is made of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.cost import DRAM, Gate
from kvtier.key import Identity
from kvtier.metrics import TierMetrics
from kvtier.store.arena import Arena
from kvtier.store.geometry import Geometry
from kvtier.store.history import History
from kvtier.tier.lower import LowerTier
from kvtier.transfer.workers import Workers


@dataclass(frozen=True, slots=True)
class Parts:
    """What all that a store does works on. Each comes from outside, so that a test can turn threads and clock by hand."""

    geometry: Geometry
    arena: Arena
    dram: TierMetrics
    """What is counted of the arena."""
    tiers: tuple[LowerTier, ...]
    """Those below DRAM, fastest first."""
    workers: Workers
    """Threads for copies between DRAM and an engine."""
    gate: Gate
    lock: threading.Lock
    """The one that the tiers use too."""
    identity: Identity | None = None
    """The engine's; without it nothing can be cleared by model, and nobody says who else is there."""
    clock: Callable[[], float] = time.monotonic
    """Seconds."""
    history: History = field(default_factory=History)

    def recorders(self) -> list[tuple[str, TierMetrics]]:
        """Every tier's name and what is counted of it, DRAM first."""
        return [(DRAM, self.dram), *((tier.name, tier.metrics) for tier in self.tiers)]
