"""Tiers by themselves, without a store above them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvtier.abc.medium import PersistentSlotMedium
from kvtier.abc.policy import EvictionPolicy
from kvtier.codec.raw import RawCodec
from kvtier.config import TierOptions, WriteMode
from kvtier.metrics import Metrics
from kvtier.policy.lru import LruPolicy
from kvtier.tier.slot import SlotTier
from kvtier.transfer.workers import Workers


def lone_tier(medium: PersistentSlotMedium, policy: Callable[[int], EvictionPolicy] = LruPolicy) -> SlotTier:
    """A tier over ``medium`` that is put into and fetched from by hand: it has no threads."""
    return SlotTier(
        "nvme",
        TierOptions(WriteMode.BACK),
        medium,
        RawCodec(),
        Workers("nvme", 0),
        Metrics().tier("nvme"),
        threading.Lock(),
        policy(medium.slots),
    )
