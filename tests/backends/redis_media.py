"""Builders for tests of Redis: a medium from its URL, and a port that nobody has."""

from __future__ import annotations

import socket
from typing import Any

from kvtier.abc.medium import MediumContext
from kvtier.params import build_params
from kvtier.storage_backends.redis import RedisMedium
from kvtier.url import TierUrl


def opened(url: str, **params: Any) -> RedisMedium:
    location = TierUrl.parse(url)
    given = build_params(RedisMedium.Params, {**location.params, **params}, "test")
    medium = RedisMedium.open(location, given, MediumContext(1000))
    assert isinstance(medium, RedisMedium)
    return medium


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
