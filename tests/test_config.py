"""Settings: types, errors that name the nearest valid name, and where each value came from."""

from __future__ import annotations

import argparse
import enum
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import (
    Effective,
    KvDtype,
    LogLevel,
    Verify,
    WriteMode,
    add_arguments,
    redis_url,
    requires_all,
    resolve,
    tier_options,
)
from kvtier.errors import ConfigError
from kvtier.machine import available_memory
from kvtier.params import build_params
from kvtier.quantity import Bytes, Seconds, counted, format_bytes, parse_bytes, parse_seconds
from kvtier.url import TierUrl

# Quantities.


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


# URLs.


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


# Parameters.


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
        build_params(Params, {"capacity": 1, "auth_key": [SECRET]}, "x://")
    assert SECRET not in str(refused.value)


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


# Where settings come from.


def parsed(*flags: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_arguments(parser, "engine", "store", "server")
    return vars(parser.parse_args(flags))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvtier.toml"
    path.write_text(
        'tiers = ["dram://?capacity=1GiB"]\n[engine]\nhbm_blocks = 11\nkv_dtype = "fp32"\n[server]\nport = 81\n'
    )
    return path


def test_a_flag_goes_before_the_environment_before_the_file_before_the_default(file: Path) -> None:
    environment = {"KVTIER_CONFIG": str(file), "KVTIER_HBM_BLOCKS": "22", "KVTIER_PORT": "82"}
    effective = resolve(parsed("--hbm-blocks", "33"), environment)
    settings = effective.settings
    assert (settings.engine.hbm_blocks, settings.server.port, settings.engine.kv_dtype) == (33, 82, KvDtype.FP32)
    assert settings.engine.block_tokens == 16
    assert {name: effective.sources[name] for name in ("engine.hbm_blocks", "server.port", "engine.kv_dtype")} == {
        "engine.hbm_blocks": "flag --hbm-blocks",
        "server.port": "environment KVTIER_PORT",
        "engine.kv_dtype": f"file {file}",
    }
    assert effective.sources["engine.block_tokens"] == "default"


def test_a_config_flag_goes_before_its_variable(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("[engine]\nhbm_blocks = 44\n")
    assert resolve(parsed("--config", str(other)), {"KVTIER_CONFIG": str(file)}).settings.engine.hbm_blocks == 44


def test_tiers_come_whole_from_one_place(file: Path) -> None:
    one, two = "redis://h:1/0?a=b,c", "nvme:///x"
    environment = {"KVTIER_CONFIG": str(file)}
    assert [*map(str, resolve({}, environment).settings.tiers)] == ["dram://?capacity=1GiB"]
    environment["KVTIER_TIERS"] = f" {one}\n  {two} "
    assert [url.scheme for url in resolve({}, environment).settings.tiers] == ["redis", "nvme"]
    flagged = resolve(parsed("--tier", two, "--tier", one), environment)
    assert [url.scheme for url in flagged.settings.tiers] == ["nvme", "redis"]
    assert flagged.sources["tiers"] == "flag --tier"
    assert resolve({}, {"KVTIER_TIERS": ""}).settings.tiers == ()


def test_every_setting_has_a_flag_a_variable_and_a_key(tmp_path: Path) -> None:
    defaults = resolve({}, {})
    flags = argparse.ArgumentParser()
    add_arguments(flags, "engine", "store", "server")
    text = flags.format_help()
    for dotted, value, source in defaults.rows():
        name = dotted.rpartition(".")[2]
        assert source == "default"
        assert ("--tier" if name == "tiers" else "--" + name.replace("_", "-")) in text
        raw = value.value if isinstance(value, enum.Enum) else str(value)
        if isinstance(value, (tuple, type(None))):
            continue
        from_environment = resolve({}, {f"KVTIER_{name.upper()}": raw})
        # The default tiers follow the memory that is free, which changes between two calls.
        same_tiers = replace(from_environment.settings, tiers=defaults.settings.tiers)
        assert same_tiers == defaults.settings
        assert from_environment.sources[dotted] == f"environment KVTIER_{name.upper()}"


def test_booleans_have_two_flags() -> None:
    assert resolve(parsed("--no-prefix-cache"), {}).settings.engine.prefix_cache is False
    assert resolve(parsed("--longest-prefix-first"), {}).settings.engine.longest_prefix_first is True
    assert resolve({}, {"KVTIER_LONGEST_PREFIX_FIRST": "on"}).settings.engine.longest_prefix_first is True


def test_a_toml_value_keeps_its_type(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('log_level = "error"\n[store]\ndeadline = 1.5\ndrain = "1m"\n[engine]\nprefix_cache = false\n')
    settings = resolve({"config": str(path)}, {}).settings
    assert (settings.store.deadline, settings.engine.prefix_cache, settings.store.drain) == (1.5, False, 60.0)
    assert settings.log_level is LogLevel.ERROR


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"KVTIER_HBM_BLOKS": "1"},
            r"environment: unknown setting 'KVTIER_HBM_BLOKS'; did you mean 'KVTIER_HBM_BLOCKS'\?",
        ),
        ({"KVTIER_TIER": "dram://"}, "unknown setting 'KVTIER_TIER'; it is called 'KVTIER_TIERS' here"),
        ({"KVTIER_hbm_blocks": "1"}, r"did you mean 'KVTIER_HBM_BLOCKS'\?"),
        ({"KVTIER_HBM_BLOCKS": "x"}, "environment KVTIER_HBM_BLOCKS: hbm_blocks: 'x' is not a whole number"),
        ({"KVTIER_HBM_BLOCKS": "0"}, "environment KVTIER_HBM_BLOCKS: hbm_blocks: 0 is less than 2"),
        (
            {"KVTIER_RECOMPUTE_SAMPLE": "1.5"},
            "environment KVTIER_RECOMPUTE_SAMPLE: recompute_sample: 1.5 is more than 1",
        ),
        ({"KVTIER_PORT": "65536"}, "environment KVTIER_PORT: port: 65536 is more than 65535"),
        ({"KVTIER_KV_DTYPE": "int3"}, "kv_dtype: 'int3' is not one of auto, bf16, fp16, fp32"),
        ({"KVTIER_TIERS": "dram"}, "environment KVTIER_TIERS: tiers: 'dram' is not a tier URL"),
        ({"KVTIER_CONFIG": "/nowhere/kvtier.toml"}, "/nowhere/kvtier.toml: cannot read the settings: No such file"),
    ],
)
def test_a_wrong_environment_is_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve({}, environment)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hbm_blocks = 1", r"c.toml: setting 'hbm_blocks' belongs in table \[engine\]"),
        ("[server]\nhbm_blocks = 1", r"c.toml: \[server\]: setting 'hbm_blocks' belongs in table \[engine\]"),
        ("[engine]\ntiers = []", r"setting 'tiers' belongs in the top of the file, before any table"),
        ("[engine]\nhbm_bloks = 1", r"c.toml: \[engine\]: unknown setting 'hbm_bloks'; did you mean 'hbm_blocks'\?"),
        ("[engine]\nmax_batch = 1", r"unknown setting 'max_batch'; it is called 'max_num_seqs' here"),
        ("[engin]\nhbm_blocks = 1", r"c.toml: unknown setting 'engin'; did you mean 'engine'\?"),
        ("engine = 1", r"c.toml: engine is a table: write \[engine\]"),
        ("[engine]\nhbm_blocks = true", r"hbm_blocks: True is not a whole number"),
        ("[engine]\nhbm_blocks = 1.5", r"hbm_blocks: 1.5 is not a whole number"),
        ("[engine]\nmodel = 7", r"model: 7 is not a text"),
        ("[store]\ndeadline = -1", r"deadline: -1 is not a duration"),
        ("tiers = [1]", r"tiers: \[1\] is not a list whose items are each a tier URL"),
        ("tiers = ", r"c.toml: not TOML: "),
    ],
)
def test_a_wrong_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        resolve({"config": str(path)}, {})


def test_what_demo_and_tests_read_is_no_setting() -> None:
    environment = {"KVTIER_REDIS_URL": "redis://:p@h:1/0", "KVTIER_REQUIRE_ALL": "1", "PATH": "/bin"}
    assert isinstance(resolve({}, environment), Effective)
    assert redis_url(environment) == TierUrl("redis", None, "p", "h", 1, "/0")
    assert redis_url({}) is None
    assert requires_all(environment)
    assert not requires_all({"KVTIER_REQUIRE_ALL": "0"})


def test_the_default_server_listens_on_loopback_only() -> None:
    assert resolve({}, {}).settings.server.host == "127.0.0.1"


# Memory.


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  16777216 kB\nMemAvailable:    8388608 kB\n"}


def test_without_a_limit_the_machine_decides(tmp_path: Path) -> None:
    found = available_memory(
        machine(tmp_path, MEMINFO | {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"})
    )
    assert (found.nbytes, found.where) == (8 << 30, "memory")


def test_the_tightest_cgroup_decides_whatever_its_depth(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/container\n",
        "sys/fs/cgroup/pod/memory.max": str(4 << 30),
        "sys/fs/cgroup/pod/memory.current": str(3 << 30),
        "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {1 << 30}\n",
        "sys/fs/cgroup/pod/container/memory.max": "max\n",
    }
    found = available_memory(machine(tmp_path, MEMINFO | files))
    assert (found.nbytes, found.where) == (2 << 30, str(tmp_path / "sys/fs/cgroup/pod/memory.max"))


def test_the_first_version_of_cgroups_is_read_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/1\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(1 << 30),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(1 << 29),
    }
    assert available_memory(machine(tmp_path, MEMINFO | files)).nbytes == 1 << 29


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert available_memory(tmp_path).nbytes == 1 << 30


def test_the_default_tier_is_a_quarter_of_what_is_available() -> None:
    (tier,) = resolve({}, {}).settings.tiers
    assert tier.scheme == "dram"
    assert parse_bytes(tier.params["capacity"]) <= available_memory().nbytes * 0.3
