"""Settings: where each value came from, and errors that name the nearest valid name."""

from __future__ import annotations

import argparse
import enum
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.config import (
    Effective,
    KvDtype,
    LogLevel,
    add_arguments,
    redis_url,
    requires_all,
    resolve,
)
from kvtier.errors import ConfigError
from kvtier.machine import available_memory
from kvtier.quantity import parse_bytes
from kvtier.url import TierUrl


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
        (f"[engine]\nhbm_blocks = 1{'0' * 400}", r"hbm_blocks: 1"),
        (f"[engine]\nrecompute_sample = 1{'0' * 400}", r"recompute_sample: 1"),
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


def test_the_default_tier_is_a_quarter_of_what_is_available() -> None:
    (tier,) = resolve({}, {}).settings.tiers
    assert tier.scheme == "dram"
    assert parse_bytes(tier.params["capacity"]) <= available_memory().nbytes * 0.3
