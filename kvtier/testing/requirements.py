"""What a test needs from outside, in two kinds: what could be installed, and what the machine would have to have.

A test that lacks something is skipped with a reason of that kind; with ``KVTIER_REQUIRE_ALL=1`` lacking something
installable fails the test instead. ``kind_of`` reads the kind back, for the list at the end of a run.
"""

from __future__ import annotations

import pytest

from kvtier.config import requires_all

INSTALLABLE = "installable"
"""A package, a server, a browser."""
MACHINE = "machine"
"""A GPU, O_DIRECT, the right to mount."""


def require_installed(condition: object, reason: str) -> None:
    """Skip the calling test unless ``condition`` is true; ``reason`` says what to install. Fails it under REQUIRE_ALL."""
    if condition:
        return
    if requires_all():
        pytest.fail(f"{INSTALLABLE}: {reason} (KVTIER_REQUIRE_ALL=1)", pytrace=False)
    pytest.skip(f"{INSTALLABLE}: {reason}")


def require_machine(condition: object, reason: str) -> None:
    """Skip the calling test unless ``condition`` is true; ``reason`` says what this machine does not have."""
    if not condition:
        pytest.skip(f"{MACHINE}: {reason}")


def kind_of(skip_reason: str) -> tuple[str, str]:
    """(kind, reason) of a skip; the kind is ``other`` where neither function above made it."""
    kind, colon, reason = skip_reason.removeprefix("Skipped: ").partition(": ")
    if colon and kind in (INSTALLABLE, MACHINE):
        return kind, reason
    return "other", skip_reason.removeprefix("Skipped: ")
