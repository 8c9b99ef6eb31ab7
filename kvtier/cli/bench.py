"""``kvtier bench``: a table of measurements, each a module of ``kvtier.bench`` that is imported only when it runs."""

from __future__ import annotations

import argparse
import importlib
from typing import cast

from kvtier.cli.main import Command, add_commands

BENCHES = {
    "tiers": "bandwidth and latency of each configured tier, beside the limit of this machine",
    "serve": "load on any OpenAI-compatible server: latency percentiles, throughput, goodput",
    "engine": "the bundled engine with its cache and without, in turns, on workloads that people run",
}
"""Measurement -> its line in ``kvtier bench --help``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_commands(parser, BENCHES, "kvtier.bench", title="measurements", dest="bench")


def run(args: argparse.Namespace) -> int:
    return cast("Command", importlib.import_module(f"kvtier.bench.{args.bench}")).run(args)
