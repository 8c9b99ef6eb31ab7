"""What is read from the environment and is no setting: secrets, and what demo, tests and benchmarks go by."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier.errors import ConfigError
from kvtier.url import TierUrl

PREFIX = "KVTIER_"
NOT_SETTINGS = {"API_KEY", "CA_FILE", "CONFIG", "REDIS_URL", "REQUIRE_ALL"}
"""Variables of ours that are no settings, without the prefix."""


def redis_url(environ: Mapping[str, str] | None = None) -> TierUrl | None:
    """The Redis that demo and benchmarks are to use (``KVTIER_REDIS_URL``); None: they start their own."""
    text = (os.environ if environ is None else environ).get(PREFIX + "REDIS_URL")
    return TierUrl.parse(text) if text else None


def environment_secret(variable: str) -> bytes:
    """A secret that stands in a variable which a flag names. Raises ``ConfigError`` where it is not set."""
    text = os.environ.get(variable)
    if text is None:
        raise ConfigError(f"environment: {variable} is not set")
    return text.encode()


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """What lets a client in at a server: never a flag, never shown."""

    key: str | None = field(default=None, repr=False)
    """Sent as a bearer token."""
    ca_file: str | None = None
    """Certificates that the server's is trusted by; None: the system's."""


def api_access() -> ApiAccess:
    """``KVTIER_API_KEY`` and ``KVTIER_CA_FILE``, each where it is set."""
    return ApiAccess(os.environ.get(PREFIX + "API_KEY") or None, os.environ.get(PREFIX + "CA_FILE") or None)


def requires_all(environ: Mapping[str, str] | None = None) -> bool:
    """Whether a test that lacks something installable fails instead of being skipped (``KVTIER_REQUIRE_ALL=1``)."""
    return (os.environ if environ is None else environ).get(PREFIX + "REQUIRE_ALL") == "1"
