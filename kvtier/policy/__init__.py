"""Eviction policies: who goes first when a pool needs room, by the name that a setting gives them."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.abc.policy import EvictionPolicy
from kvtier.errors import ConfigError
from kvtier.params import nearest
from kvtier.policy.fifo import FifoPolicy
from kvtier.policy.lru import LruPolicy

_KINDS: dict[str, Callable[[int], EvictionPolicy]] = {"lru": LruPolicy, "fifo": FifoPolicy}


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
