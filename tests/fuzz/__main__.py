"""Fuzz for as long as told: ``python -m tests.fuzz --seconds 600 [target ...]``, from the top of the checkout."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections import Counter

from hypothesis import HealthCheck, seed, settings

from tests.fuzz.targets import EXAMPLES, TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="how long (default: 600)")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)} (default: all in turn)")
    given = parser.parse_args()
    if unknown := set(given.targets) - set(TARGETS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    logging.disable(logging.CRITICAL)
    done: Counter[str] = Counter()
    began = time.monotonic()
    rounds = {
        name: settings(
            max_examples=5 * EXAMPLES[name], deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )(TARGETS[name])
        for name in given.targets or TARGETS
    }
    while time.monotonic() - began < given.seconds:
        for name, one in rounds.items():
            number = random.SystemRandom().randrange(1 << 32)
            try:
                seed(number)(one)()
            except BaseException:
                print(f"{name} failed with seed {number}")
                raise
            done[name] += 5 * EXAMPLES[name]
            if time.monotonic() - began >= given.seconds:
                break
    print(f"{time.monotonic() - began:.0f} s without a failure; examples: {dict(done)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
