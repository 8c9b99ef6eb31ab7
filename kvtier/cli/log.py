"""Where a subcommand's log goes."""

from __future__ import annotations

import logging

from kvtier.config import LogLevel


def start_logging(level: LogLevel) -> None:
    """Log to stderr, one line per message; called once, by a subcommand that logs."""
    logging.basicConfig(
        level=level.value.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
