"""A short run of every fuzz target; ``python -m tests.fuzz --seconds 600`` is the long one."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.fuzz.targets import EXAMPLES, TARGETS


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_a_short_run(name: str) -> None:
    short = settings(
        max_examples=EXAMPLES[name], deadline=None, print_blob=True, suppress_health_check=list(HealthCheck)
    )
    short(TARGETS[name])()


def test_no_example_of_any_test_is_timed() -> None:
    """What no test says otherwise of is 200 ms an example, which a loaded machine exceeds."""
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check
