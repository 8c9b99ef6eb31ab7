"""Backends and connectors found by entry point, with a third party's package made for the occasion."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import cast

import pytest

from kvtier.abc.medium import MediumContext
from kvtier.config import WriteMode
from kvtier.errors import ConfigError
from kvtier.registry import BACKENDS, connector_class, installed, plan_tier
from kvtier.url import TierUrl

THIRD_PARTY = """
from dataclasses import dataclass

from kvtier.quantity import Bytes


class ShelfMedium:
    @dataclass(frozen=True, kw_only=True)
    class Params:
        capacity: Bytes = Bytes(1024)

    def __init__(self, location, params, context):
        self.said = (location, params, context)

    @classmethod
    def open(cls, location, params, context):
        return cls(location, params, context)
"""
CONTEXT = cast("MediumContext", "the context")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on ``sys.path`` into which a test installs packages."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, module: str, source: str, *entries: str, group: str = BACKENDS) -> None:
    (site / f"{module}.py").write_text(source)
    info = site / f"{module}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n" + "\n".join(entries) + "\n")
    importlib.invalidate_caches()


def test_a_third_party_adds_a_scheme_without_touching_us(site: Path) -> None:
    install(site, "kvtier_shelf", THIRD_PARTY, "shelf = kvtier_shelf:ShelfMedium")
    assert "shelf" in installed(BACKENDS)
    url = TierUrl.parse("shelf:///oak?capacity=4KiB&write=back")
    plan = plan_tier(url)
    assert plan.options.write is WriteMode.BACK
    medium = plan.open(CONTEXT)
    assert vars(medium)["said"] == (url, plan.params, CONTEXT)
    assert plan.params.capacity == 4096


def test_nothing_is_imported_before_it_is_asked_for(site: Path) -> None:
    install(site, "kvtier_lazy", "raise RuntimeError('imported')", "lazy = kvtier_lazy:Medium")
    assert "lazy" in installed(BACKENDS)
    plan_tier(TierUrl.parse("dram://?capacity=1MiB"))
    assert "kvtier_lazy" not in sys.modules


def test_a_wrong_parameter_of_a_plug_in_is_refused(site: Path) -> None:
    install(site, "kvtier_strict", THIRD_PARTY, "strict = kvtier_strict:ShelfMedium")
    with pytest.raises(
        ConfigError, match=r"strict://\?capcity=1: unknown parameter 'capcity'; did you mean 'capacity'"
    ):
        plan_tier(TierUrl.parse("strict://?capcity=1"))


def test_an_unknown_scheme_lists_what_is_installed_and_how_to_install() -> None:
    with pytest.raises(ConfigError) as refused:
        plan_tier(TierUrl.parse("s3://bucket"))
    message = str(refused.value)
    assert message.startswith(
        "unknown tier scheme 's3'; installed: dram, fs, hbm, memory, nvme, redis, redis+unix, rediss"
    )
    assert "pip install" in message


@pytest.mark.parametrize("source", ["import no_such_module_at_all", "raise RuntimeError('no_such_module_at_all')", ""])
def test_a_plug_in_that_fails_to_import_stops_start_up_with_its_error(site: Path, source: str) -> None:
    name = f"kvtier_broken_{len(source)}"
    install(site, name, source, f"broken = {name}:Medium")
    wanted = "no_such_module_at_all" if source else "has no attribute 'Medium'"
    with pytest.raises(
        ConfigError, match=rf"'broken' \({name}:Medium of {name} 1.5\) cannot be loaded: .*{wanted}"
    ) as refused:
        plan_tier(TierUrl.parse("broken://"))
    assert refused.value.__cause__ is not None


def test_a_scheme_that_two_packages_provide_is_refused(site: Path) -> None:
    install(site, "kvtier_one", THIRD_PARTY, "twice = kvtier_one:ShelfMedium")
    install(site, "kvtier_two", THIRD_PARTY, "twice = kvtier_two:ShelfMedium")
    with pytest.raises(ConfigError, match=r"'twice' is provided twice: .*kvtier_one.* and .*kvtier_two"):
        plan_tier(TierUrl.parse("twice://"))


def test_connectors_are_found_by_name(site: Path) -> None:
    install(site, "kvtier_wire", "class Wire: ...", "wire = kvtier_wire:Wire", group="kvtier.connectors")
    assert connector_class("wire").__name__ == "Wire"
    with pytest.raises(ConfigError, match=r"unknown connector 'wier'; did you mean 'wire'\?"):
        connector_class("wier")
