"""What algorithms share whose search for a victim moves other entries: a hand passes, a queue is gone round."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container

from kvtier.abc.policy import EvictionPolicy
from kvtier.key import Address


class PlannedPolicy(EvictionPolicy):
    """Searches without moving anything, writes the moves down, and makes those before a victim when that victim goes.

    A plan holds until the next insert, touch or drop; what a pool evicts in place of a victim is removed without any
    move. A move is made once, so it is paid for by the use that asked for it, as in the algorithm as published.
    """

    def __init__(self) -> None:
        self._moves: list[Address] = []
        self._made = 0
        self._due: dict[Address, int] = {}
        """Per victim of the plan, in order, how many moves come before it."""

    @abstractmethod
    def _plan(self, count: int, protected: Container[Address], moves: list[Address], due: dict[Address, int]) -> None:
        """Write down ``count`` victims, or as many as there are, and the moves before each."""

    @abstractmethod
    def _move(self, entry: Address) -> None:
        """Make one move of the plan; ``entry`` may have gone since."""

    @abstractmethod
    def _take(self, entry: Address, *, evicted: bool) -> None:
        """Forget a resident entry."""

    def _forget_plan(self) -> None:
        if self._due:
            self._moves, self._due = [], {}

    def remove(self, entry: Address, *, evicted: bool) -> None:
        if not evicted:
            self._forget_plan()
        upto = self._due.get(entry, 0)
        while self._made < upto:
            self._move(self._moves[self._made])
            self._made += 1
        self._take(entry, evicted=evicted)

    def victims(self, count: int, protected: Container[Address], now: float) -> list[Address] | None:
        self._moves, self._due, self._made = [], {}, 0
        self._plan(count, protected, self._moves, self._due)
        if len(self._due) < count:
            self._moves, self._due = [], {}
            return None
        return list(self._due)
