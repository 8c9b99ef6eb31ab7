"""Order, seeds, torch on one thread, and the closing list of what could not run here."""

from __future__ import annotations

import os
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest

import kvtier.engine  # noqa: F401 - says how compute threads wait, before any test imports torch
from kvtier.testing.requirements import INSTALLABLE, MACHINE, kind_of

if find_spec("hypothesis") is not None:  # tests on a GPU do without it
    from hypothesis import HealthCheck, settings

    # A loaded machine makes an example slow, and is no fault of what it shows.
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")

SEED = int(os.environ.get("PYTEST_SEED", "20240607"))
_TITLES = {
    INSTALLABLE: "installable (a package, a server, a browser; KVTIER_REQUIRE_ALL=1 makes these fail)",
    MACHINE: "machine (GPU, O_DIRECT, mount rights)",
    "other": "other",
}


def pytest_report_header() -> str:
    return f"seed: {SEED} (PYTEST_SEED), hash seed: {os.environ.get('PYTHONHASHSEED', 'random')}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first: unmarked, then slow ones, then those on the real model; else the order stays."""
    items.sort(key=lambda item: 2 if item.get_closest_marker("model") else bool(item.get_closest_marker("slow")))


@pytest.fixture(autouse=True)
def seed() -> int:
    """Every test starts from the same random state; a test that draws takes the number from here."""
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 - libraries under test may draw from the global state
    return SEED


@pytest.fixture(scope="module", autouse=True)
def compute_threads() -> Iterator[None]:
    """An engine that a module opens sets the process's compute threads; the next module gets all of them again."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(len(os.sched_getaffinity(0)))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The tiny model is faster on one thread, and the machine is shared."""
    import torch  # noqa: PLC0415 - most tests do not need it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for report in terminalreporter.stats.get("skipped", []):
        if isinstance(report.longrepr, tuple):
            kind, reason = kind_of(report.longrepr[2])
            skipped[kind][reason] += 1
    terminalreporter.section("could not run here" if skipped else "everything could run here")
    for kind, title in _TITLES.items():
        if kind in skipped:
            terminalreporter.write_line(title)
            for reason, count in sorted(skipped[kind].items()):
                terminalreporter.write_line(f"  {count} x {reason}")
