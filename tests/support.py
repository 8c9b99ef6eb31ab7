"""What tests of several rooms share."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from kvtier.testing.valkey import ValkeyServer

ROOT = Path(__file__).parents[1]


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for ``condition``, and fail saying ``what`` was waited for where it takes longer."""
    deadline, pause = time.monotonic() + seconds, 0.0001
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.1f} s"
        time.sleep(pause)
        pause = min(2 * pause, 0.005)


def behind(server: ValkeyServer) -> redis.Redis:
    """A client beside whatever is under test."""
    return redis.Redis(unix_socket_path=str(server.socket_path))


def script(path: str) -> Any:
    """A script of the checkout as a module: benchmarks and scripts are no packages."""
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
