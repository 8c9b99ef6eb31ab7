"""URLs of tiers: what is understood, what is refused, and that no password is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import (
    resolve,
)
from kvtier.errors import ConfigError
from kvtier.url import TierUrl


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("dram://", TierUrl("dram")),
        ("dram://?capacity=8GiB", TierUrl("dram", params={"capacity": "8GiB"})),
        (
            "nvme:///var/cache/kvtier?capacity=200GiB&write=back",
            TierUrl("nvme", path="/var/cache/kvtier", params={"capacity": "200GiB", "write": "back"}),
        ),
        ("redis://cache:6379/0?ttl=24h", TierUrl("redis", host="cache", port=6379, path="/0", params={"ttl": "24h"})),
        ("rediss://u:p%40ss%2F@cache", TierUrl("rediss", "u", "p@ss/", "cache")),
        ("redis://:only@[::1]:7000/1", TierUrl("redis", None, "only", "::1", 7000, "/1")),
        ("redis://:@cache", TierUrl("redis", None, "", "cache")),
        ("redis+unix:///run/r.sock?db=0", TierUrl("redis+unix", path="/run/r.sock", params={"db": "0"})),
        ("nvme:///with%20space/a@b?name=a%26b%3D", TierUrl("nvme", path="/with space/a@b", params={"name": "a&b="})),
        ("  dram://?a=  ", TierUrl("dram", params={"a": ""})),
    ],
)
def test_urls(text: str, parts: TierUrl) -> None:
    assert TierUrl.parse(text) == parts
    assert TierUrl.parse(parts.reveal()) == parts


SECRET = "hunter2"


@pytest.mark.parametrize(
    "text",
    [
        "redis://:hunter2",
        "redis://:hunter2@",
        "redis://:hunter2@:6379",
        "redis://:hunter2@host:port",
        "redis://:hunter2@host:0",
        "redis://:hunter2@host:65536",
        "redis://:hunter2@host:",
        "redis://:hunter2@ho st/0",
        "redis://:hunter2@[::1/0",
        "redis://:hunter2@h@ost/0",
        "redis://:hunter2/x@host/0",
        "redis://:hunter2?x@host/0",
        "redis://:hunter2#x@host/0",
        "redis://user:123/hunter2@host/0",
        "redis://:hunter2%zz@host/0",
        "redis://:hunter2%ff@host/0",
        "redis://:hunter2@host/0?flag",
        "redis://:hunter2@host/0?ttl=1h&ttl=2h",
        "redis://:hunter2@host/0?=x",
        "redis:/:hunter2@host/0",
        "redis:hunter2@host",
        "://:hunter2@host",
        "Redis://:hunter2@host",
        "//:hunter2@host",
    ],
)
def test_a_malformed_url_is_refused_without_its_password(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        TierUrl.parse(text)
    assert SECRET not in str(refused.value)
    assert refused.value.__cause__ is None


def test_a_bare_word_is_shown_for_what_it_is() -> None:
    with pytest.raises(ConfigError, match="'dram' is not a tier URL; one looks like scheme://"):
        TierUrl.parse("dram")


@given(st.text())
def test_any_text_is_a_url_or_a_config_error(text: str) -> None:
    try:
        parsed = TierUrl.parse("redis://" + text)
    except ConfigError:
        return
    assert TierUrl.parse(parsed.reveal()) == parsed


def test_secrets_are_masked_wherever_a_url_is_shown() -> None:
    url = TierUrl.parse(f"redis://user:{SECRET}@host:6379/0?auth_key={SECRET}&ttl=24h")
    for shown in (str(url), repr(url), f"{url}", repr([url]), str(resolve({"tiers": [url]}, {}))):
        assert SECRET not in shown
        assert "ttl=24h" in shown
    assert url.reveal() == f"redis://user:{SECRET}@host:6379/0?auth_key={SECRET}&ttl=24h"


def test_a_url_with_other_parameters() -> None:
    assert str(TierUrl.parse("dram://?capacity=1GiB").with_params(write="back")) == "dram://?capacity=1GiB&write=back"
