"""SIEVE (Zhang and others: SIEVE is simpler than LRU: an efficient turn-key eviction algorithm, NSDI 2024)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from kvtier.abc.policy import EntryMeta
from kvtier.key import Address
from kvtier.policy.planned import PlannedPolicy


class SievePolicy(PlannedPolicy):
    """One queue in order of arrival, and a hand that goes from old to new: what was used since it last passed stays.

    The queue is kept as two: what the hand has passed in this round, and what lies ahead, each with whether it was used.
    """

    def __init__(self, capacity: int) -> None:
        del capacity  # keeps no ghosts
        super().__init__()
        self._passed: OrderedDict[Address, bool] = OrderedDict()
        self._ahead: OrderedDict[Address, bool] = OrderedDict()
        """Empty only where both are: at the newest entry a new round begins."""

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        self._forget_plan()
        self._ahead[entry] = False

    def touch(self, entry: Address, now: float) -> None:
        self._forget_plan()
        (self._ahead if entry in self._ahead else self._passed)[entry] = True

    def _move(self, entry: Address) -> None:
        if self._ahead.pop(entry, None) is not None:
            self._passed[entry] = False
            self._turn()

    def _take(self, entry: Address, *, evicted: bool) -> None:
        if self._ahead.pop(entry, None) is None:
            del self._passed[entry]
        self._turn()

    def _turn(self) -> None:
        if not self._ahead:
            self._ahead, self._passed = self._passed, self._ahead

    def _plan(self, count: int, protected: Container[Address], moves: list[Address], due: dict[Address, int]) -> None:
        """Every entry that the hand comes to is a move, victims too: where one does not go, the hand has passed it."""
        used: set[Address] = set()
        for queue in (self._ahead, self._passed):
            for entry, was_used in queue.items():
                if len(due) == count:
                    return
                if was_used:
                    used.add(entry)
                elif entry not in protected:
                    due[entry] = len(moves)
                moves.append(entry)
        for entry in list(moves):
            if len(due) == count:
                return
            if entry in used and entry not in protected:
                due[entry] = len(moves)
            moves.append(entry)
