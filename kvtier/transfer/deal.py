"""Work that several threads share as each comes free."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, wait
from typing import TypeVar

T = TypeVar("T")


def dealt(work: Callable[[int], T], count: int, workers: Executor | None, others: int = 1) -> list[T]:
    """``work(0)`` to ``work(count - 1)``, in order: done by this thread and, as far as they are free, ``others`` of ``workers``.

    Returns, or raises what a thread raised, only when nothing is under way any more.
    """
    if workers is None or count < 2:
        return [work(index) for index in range(count)]
    results: dict[int, T] = {}
    hand = iter(range(count))  # one C iterator for all threads: next() is atomic under the GIL

    def play() -> None:
        for index in hand:
            results[index] = work(index)

    helpers = [workers.submit(play) for _ in range(min(others, count - 1))]
    try:
        play()
    finally:
        helpers = [helper for helper in helpers if not helper.cancel()]
        wait(helpers)
    for helper in helpers:
        helper.result()
    return [results[index] for index in range(count)]
