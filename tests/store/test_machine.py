"""Any order of verbs, transfers, faults, clock jumps and restarts: never a wrong byte, never a slot that does not add up."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import seed as seeded
from hypothesis.stateful import run_state_machine_as_test

from kvtier.testing.long_run import LongRun
from kvtier.testing.machine import StoreMachine
from kvtier.testing.rig import Rig, drawn_rig

SHORT = settings(
    max_examples=20,
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Every ordered fault is worth a line to an operator, and none here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.timeout(400)  # where something fails, shrinking it takes minutes
def test_any_order_of_verbs_transfers_and_faults(tmp_path: Path) -> None:
    """Another seed each time; a failure is shrunk, and prints what repeats it."""

    class Machine(StoreMachine):
        def make(self, rng: random.Random) -> Rig:
            directory = tmp_path / "rig"
            shutil.rmtree(directory, ignore_errors=True)  # of an example that has failed
            return drawn_rig(directory, rng)

    number = random.SystemRandom().randrange(1 << 32)
    print(f"seed {number}")
    run_state_machine_as_test(seeded(number)(Machine), settings=SHORT)


def test_a_longer_walk_without_shrinking(tmp_path: Path) -> None:
    """A piece of ``python -m kvtier.testing.long_run``."""
    number = random.SystemRandom().randrange(1 << 32)
    print(f"seed {number}: python -m kvtier.testing.long_run --operations 2000 --seed {number}")
    walk = LongRun(tmp_path, number, 0.05, drawn_rig)
    walk.run(2000)
    print(walk.report(0.0))
    assert walk.seen["loaded"] > 10
    assert not walk.seen["wrong"]
