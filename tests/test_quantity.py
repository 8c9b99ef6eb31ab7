"""Sizes, durations and counts: read, and written for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.quantity import counted, format_bytes, parse_bytes, parse_seconds


def test_one_of_a_thing_is_not_called_by_its_plural() -> None:
    assert [counted(count, "block") for count in (0, 1, 2)] == ["0 blocks", "1 block", "2 blocks"]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("4096", 4096), ("4096B", 4096), ("8GiB", 8 << 30), ("8 GiB", 8 << 30), ("1.5KiB", 1536), ("2kB", 2000),
        ("2KB", 2000), ("3MB", 3_000_000), ("1.5GB", 1_500_000_000), ("1TiB", 1 << 40), ("1TB", 10**12), ("7MiB", 7 << 20),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "8Gigs", "-1", "1e9", "8 G i B", "10%", "0.3KiB", "0x10", "1_000", "８"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a (size|whole number of bytes)"):
        parse_bytes(text)


@given(st.integers(0, 1 << 60))
def test_a_formatted_size_reads_back(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("24h", 86400),
        ("500ms", 0.5),
        ("2", 2),
        ("0.25", 0.25),
        ("1.5 s", 1.5),
        ("250us", 0.00025),
        ("3m", 180),
        ("7d", 604800),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1h30m", "1 week", "inf", "nan"])
def test_what_is_not_a_duration(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_seconds(text)
