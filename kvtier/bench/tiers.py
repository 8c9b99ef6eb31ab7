"""``kvtier bench tiers``: bandwidth and latency of each configured tier, beside the limit of this machine."""

from __future__ import annotations

import argparse

from kvtier.config import add_arguments as add_settings
from kvtier.config import resolve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, "store")


def run(args: argparse.Namespace) -> int:
    for url in resolve(vars(args)).settings.tiers:
        print(url)
    return 0
