"""Threads that do the same at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def together(play: Callable[[int], None], count: int = 4) -> None:
    """Run ``play(0)`` to ``play(count - 1)``, each on its own thread, none before all are there; raise what one raised."""
    start = threading.Barrier(count)

    def run(number: int) -> None:
        start.wait()
        play(number)

    with ThreadPoolExecutor(count) as pool:
        for running in [pool.submit(run, number) for number in range(count)]:
            running.result()
