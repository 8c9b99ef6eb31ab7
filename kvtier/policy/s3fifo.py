"""S3-FIFO (Yang and others: FIFO queues are all you need for cache eviction, SOSP 2023)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Sequence

from kvtier.abc.policy import EntryMeta
from kvtier.key import Address
from kvtier.policy.planned import PlannedPolicy

SMALL_SHARE = 0.1
"""Of the capacity, for what has come once, as in the paper."""
USES_TO_STAY = 1
"""Uses in the small queue that lead to the main one. The paper's algorithm 1 says two; blocks are used once per request, so
one use is already a second request."""
MOST_USES = 3
"""Two bits of counter, as in the paper."""


class S3FifoPolicy(PlannedPolicy):
    """A small queue that most entries pass only once, a main one with as many more rounds as uses, and a ghost queue.

    The paper keeps as many ghosts as the main queue has entries; here it is the capacity, which a pool of any size affords.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._most_small = max(1, int(capacity * SMALL_SHARE))
        self._most_ghosts = capacity
        self._small: OrderedDict[Address, int] = OrderedDict()
        self._main: OrderedDict[Address, int] = OrderedDict()
        self._ghosts: OrderedDict[Address, None] = OrderedDict()

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        self._forget_plan()
        if entry in self._ghosts:
            del self._ghosts[entry]
            self._main[entry] = 0
        else:
            self._small[entry] = 0

    def touch(self, entry: Address, now: float) -> None:
        self.touch_all((entry,), now)

    def touch_all(self, entries: Sequence[Address], now: float) -> None:
        self._forget_plan()
        small, main = self._small, self._main
        for entry in entries:
            queue = small if entry in small else main
            uses = queue[entry]
            if uses < MOST_USES:
                queue[entry] = uses + 1

    def pass_over(self, entries: Sequence[Address], now: float) -> None:
        self._forget_plan()
        for entry in entries:
            (self._small if entry in self._small else self._main).move_to_end(entry)

    def _move(self, entry: Address) -> None:
        uses = self._small.pop(entry, None)
        if uses is not None:
            self._main[entry] = 0
        elif entry in self._main:
            self._main[entry] -= 1
            self._main.move_to_end(entry)

    def _take(self, entry: Address, *, evicted: bool) -> None:
        if self._main.pop(entry, None) is not None:
            return
        del self._small[entry]
        if evicted:
            self._ghosts[entry] = None
            if len(self._ghosts) > self._most_ghosts:
                self._ghosts.popitem(last=False)

    def _plan(self, count: int, protected: Container[Address], moves: list[Address], due: dict[Address, int]) -> None:
        small, main = iter(self._small.items()), iter(self._main.items())
        again: deque[tuple[Address, int]] = deque()
        held = len(self._small)
        small_left, main_left = True, True
        while len(due) < count and (small_left or main_left):
            if small_left and (held >= self._most_small or not main_left):
                found = next(small, None)
                if found is None:
                    small_left = False
                elif found[0] not in protected:
                    held -= 1
                    if found[1] < USES_TO_STAY:
                        due[found[0]] = len(moves)
                    else:
                        moves.append(found[0])
                        again.append((found[0], 0))
                        main_left = True
                continue
            found = next(main, None) or (again.popleft() if again else None)
            if found is None:
                main_left = False
            elif found[0] not in protected:
                if found[1] == 0:
                    due[found[0]] = len(moves)
                else:
                    moves.append(found[0])
                    again.append((found[0], found[1] - 1))
