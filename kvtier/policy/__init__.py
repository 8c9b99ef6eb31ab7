"""Eviction policies: who goes first when a pool needs room, by the name that a setting gives them."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.abc.policy import EvictionPolicy
from kvtier.errors import ConfigError
from kvtier.params import nearest
from kvtier.policy.adaptive import AdaptivePolicy
from kvtier.policy.arc import ArcPolicy
from kvtier.policy.fifo import FifoPolicy
from kvtier.policy.gdsf import GdsfPolicy
from kvtier.policy.lfu import LfuPolicy
from kvtier.policy.lru import LruPolicy
from kvtier.policy.s3fifo import S3FifoPolicy
from kvtier.policy.sieve import SievePolicy
from kvtier.policy.slru import SlruPolicy
from kvtier.policy.ttl import TtlPolicy
from kvtier.policy.wtinylfu import WTinyLfuPolicy

_KINDS: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": LruPolicy,
    "fifo": FifoPolicy,
    "lfu": LfuPolicy,
    "slru": SlruPolicy,
    "arc": ArcPolicy,
    "s3fifo": S3FifoPolicy,
    "sieve": SievePolicy,
    "wtinylfu": WTinyLfuPolicy,
    "gdsf": GdsfPolicy,
    "ttl": TtlPolicy,
    "adaptive": AdaptivePolicy,
}


def names() -> list[str]:
    """Every name that `make` knows."""
    return list(_KINDS)


def check(name: str, where: str = "policy") -> None:
    """Raises ``ConfigError`` that begins with ``where`` and names the nearest policy where ``name`` is none."""
    if name not in _KINDS:
        raise ConfigError(f"{where}: unknown policy {name!r}{nearest(name, _KINDS)}")


def make(name: str, capacity: int) -> EvictionPolicy:
    """A policy for a pool of ``capacity`` entries; raises ``ConfigError`` where the name is none."""
    check(name)
    return _KINDS[name](capacity)
