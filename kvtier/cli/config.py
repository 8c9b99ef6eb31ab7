"""``kvtier config``: the effective settings as a TOML file, with the source of each behind it."""

from __future__ import annotations

import argparse
import enum
import json

from kvtier import policy
from kvtier.config import add_arguments as add_settings
from kvtier.config import resolve
from kvtier.registry import plan_tier
from kvtier.store.open import check_tiers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, "engine", "store", "server")


def _literal(value: object) -> str:
    """``value`` as TOML; secrets in URLs are masked."""
    if isinstance(value, tuple):
        inner = "".join(f"\n    {_literal(item)}," for item in value)
        return f"[{inner}\n]" if inner else "[]"
    if isinstance(value, enum.Enum):
        return _literal(value.value)
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False)


def run(args: argparse.Namespace) -> int:
    effective = resolve(vars(args))
    policy.check(effective.settings.engine.hbm_policy, "hbm_policy")
    if effective.settings.tiers:
        check_tiers([plan_tier(url) for url in effective.settings.tiers])
    section = ""
    for dotted, value, source in effective.rows():
        table, _, name = dotted.rpartition(".")
        if table != section:
            section = table
            print(f"\n[{section}]")
        line = f"# {name} = none" if value is None else f"{name} = {_literal(value)}"
        print(f"{line:<40}  # {source}")
    return 0
