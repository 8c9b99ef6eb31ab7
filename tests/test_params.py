"""Parameters of a URL: typed by their declaration, named where they are wrong, and split between tier and medium."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

import pytest

from kvtier.config import (
    Verify,
    WriteMode,
    tier_options,
)
from kvtier.errors import ConfigError
from kvtier.params import build_params
from kvtier.quantity import Bytes, Seconds
from kvtier.url import TierUrl


class Mode(enum.Enum):
    FAST = "fast"
    SAFE = "safe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    capacity: Bytes
    ttl: Seconds = Seconds(60.0)
    connections: int = 4
    ratio: float = 0.5
    direct: bool = True
    mode: Mode = Mode.SAFE
    level: Literal["low", "high"] = "low"
    name: str = "kvtier"
    limit: int | None = None
    auth_key: str | None = None

    def __post_init__(self) -> None:
        if self.connections < 1:
            raise ValueError(f"connections: at least 1, got {self.connections}")


def test_parameters_take_their_types_from_the_annotations() -> None:
    raw = {
        "capacity": "1GiB", "ttl": "500ms", "connections": "8", "ratio": "0.25", "direct": "off", "mode": "fast",
        "level": "high", "name": "7", "limit": "3", "auth_key": "none",
    }  # fmt: skip
    assert build_params(Params, raw, "x://") == Params(
        capacity=Bytes(1 << 30), ttl=Seconds(0.5), connections=8, ratio=0.25, direct=False, mode=Mode.FAST,
        level="high", name="7", limit=3, auth_key="none",
    )  # fmt: skip
    assert build_params(Params, {"capacity": "1", "limit": "none"}, "x://") == Params(capacity=Bytes(1))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"capcity": "1"}, r"x://: unknown parameter 'capcity'; did you mean 'capacity'\?"),
        ({"zzz": "1"}, "x://: unknown parameter 'zzz'; valid: auth_key, capacity, "),
        ({}, r"x://: capacity is missing \(a size such as 8GiB\)"),
        ({"capacity": "8Gigs"}, "x://: capacity: '8Gigs' is not a size; write bytes or a number with kB"),
        ({"capacity": "1", "ttl": "soon"}, "x://: ttl: 'soon' is not a duration"),
        ({"capacity": "1", "connections": "many"}, "x://: connections: 'many' is not a whole number"),
        ({"capacity": "1", "connections": "1.5"}, "x://: connections: '1.5' is not a whole number"),
        ({"capacity": "1", "connections": "0"}, "x://: connections: at least 1, got 0"),
        ({"capacity": "1", "ratio": "nan"}, "x://: ratio: 'nan' is not a number"),
        ({"capacity": "1", "direct": "maybe"}, "x://: direct: 'maybe' is not true or false"),
        ({"capacity": "1", "mode": "slow"}, "x://: mode: 'slow' is not one of fast, safe"),
        ({"capacity": "1", "level": "mid"}, "x://: level: 'mid' is not one of low, high"),
        ({"capacity": "1", "limit": "few"}, "x://: limit: 'few' is not a whole number"),
    ],
)
def test_wrong_parameters_are_named(raw: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_params(Params, raw, "x://")


def test_a_secret_of_the_wrong_type_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as refused:
        build_params(Params, {"capacity": 1, "auth_key": ["hunter2"]}, "x://")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("scheme", "write", "verify"),
    [
        ("dram", WriteMode.THROUGH, Verify.SAMPLE),
        ("nvme", WriteMode.BACK, Verify.ALWAYS),
        ("redis", WriteMode.SELECTIVE, Verify.ALWAYS),
        ("redis+unix", WriteMode.SELECTIVE, Verify.ALWAYS),
        ("s3", WriteMode.SELECTIVE, Verify.ALWAYS),
    ],
)
def test_each_kind_of_tier_has_its_own_defaults(scheme: str, write: WriteMode, verify: Verify) -> None:
    options, params = tier_options(TierUrl.parse(f"{scheme}://?capacity=1MiB"), Params)
    assert (options.write, options.verify, options.codec, options.policy) == (write, verify, "raw", "lru")
    assert params == Params(capacity=Bytes(1 << 20))


def test_what_belongs_to_the_tier_is_split_from_what_belongs_to_the_medium() -> None:
    url = TierUrl.parse("redis://h?write=through&codec=shuffle-lz4&policy=arc&capacity=1&ttl=1h")
    options, params = tier_options(url, Params)
    assert (options.write, options.codec, options.policy) == (WriteMode.THROUGH, "shuffle-lz4", "arc")
    assert params.ttl == 3600.0


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "redis://:p@h?wirte=back",
            r"redis://:\*\*\*@h\?wirte=back: unknown parameter 'wirte'; did you mean 'write'\?",
        ),
        ("redis://h?capactiy=1", r"did you mean 'capacity'\?"),
        ("redis://h?write=sometimes", "write: 'sometimes' is not one of through, selective, back"),
        ("redis://h?capacity=1&verify=sample", "verify: only dram may sample"),
        ("dram://?capacity=1&verify=never", "verify: 'never' is not one of sample, always"),
    ],
)
def test_wrong_tier_parameters_are_named(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tier_options(TierUrl.parse(url), Params)
