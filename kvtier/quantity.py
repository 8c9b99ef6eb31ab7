"""Sizes and durations as people write them: ``8GiB``, ``1.5GB``, ``24h``, ``500ms``."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import NewType

Bytes = NewType("Bytes", int)
"""A size in bytes."""

Seconds = NewType("Seconds", float)
"""A duration in seconds."""

_SIZES = {
    "": 1, "B": 1,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}  # fmt: skip
_DURATIONS = {
    "": Decimal(1), "us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1),
    "m": Decimal(60), "h": Decimal(3600), "d": Decimal(86400),
}  # fmt: skip
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", re.ASCII)


def _parts(text: str) -> tuple[Decimal, str] | None:
    found = _QUANTITY.fullmatch(text.strip())
    return None if found is None else (Decimal(found[1]), found[2])


def parse_bytes(text: str) -> Bytes:
    """``"8GiB"`` -> 8589934592. Binary (KiB, MiB, GiB, TiB) and decimal (kB, MB, GB, TB) units; without one, bytes.

    Raises ``ValueError`` for anything else, fractions of a byte included.
    """
    parts = _parts(text)
    if parts is None or parts[1] not in _SIZES:
        raise ValueError(f"{text!r} is not a size; write bytes or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB")
    size = parts[0] * _SIZES[parts[1]]
    if size != size.to_integral_value():
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return Bytes(int(size))


def parse_seconds(text: str) -> Seconds:
    """``"24h"`` -> 86400.0. Units us, ms, s, m, h, d; without one, seconds. Raises ``ValueError`` for anything else."""
    parts = _parts(text)
    if parts is None or parts[1] not in _DURATIONS:
        raise ValueError(f"{text!r} is not a duration; write seconds or a number with us, ms, s, m, h or d")
    seconds = float(parts[0] * _DURATIONS[parts[1]])
    if not math.isfinite(seconds):
        raise ValueError(f"{text[:20]!r}... is longer than any time")
    return Seconds(seconds)


def counted(count: int, noun: str) -> str:
    """``1 block``, ``2 blocks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def rounded_bytes(size: int) -> str:
    """The size for people: one decimal of the largest unit that fits."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _SIZES[unit]:
            return f"{size / _SIZES[unit]:.1f}".removesuffix(".0") + unit
    return str(size)


def format_bytes(size: int) -> str:
    """The shortest text that ``parse_bytes`` reads back exactly."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _SIZES[unit] == 0:
            return f"{size // _SIZES[unit]}{unit}"
    return str(size)
