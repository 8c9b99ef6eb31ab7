"""W-TinyLFU (Einziger, Friedman, Manes: TinyLFU: a highly efficient cache admission policy, ACM ToS 2017)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container

from kvtier.abc.policy import EntryMeta
from kvtier.key import Address
from kvtier.policy.planned import PlannedPolicy
from kvtier.policy.sketch import FrequencySketch

WINDOW_SHARE = 0.01
"""Of the capacity, for what has just come; the paper's choice."""
PROTECTED_SHARE = 0.8
"""Of the main part; the paper's choice."""


class WTinyLfuPolicy(PlannedPolicy):
    """What leaves a small LRU window is let into the main part, an SLRU, only if it was used more often than what would go.

    The window's size is fixed; where recency says more than frequency (large caches), a plain LRU is better. Of an eviction
    for more entries than the window holds, what is over passes unasked: not for pools of fewer than some thousand blocks.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._most_window = max(1, int(capacity * WINDOW_SHARE))
        self._most_main = max(0, capacity - self._most_window)
        self._most_protected = max(1, int(self._most_main * PROTECTED_SHARE))
        self._sketch = FrequencySketch(capacity)
        self._window: OrderedDict[Address, None] = OrderedDict()
        self._probation: OrderedDict[Address, None] = OrderedDict()
        self._protected: OrderedDict[Address, None] = OrderedDict()

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        self._forget_plan()
        self._sketch.add(entry)
        self._window[entry] = None
        if len(self._window) > self._most_window and len(self._probation) + len(self._protected) < self._most_main:
            self._probation[self._window.popitem(last=False)[0]] = None

    def touch(self, entry: Address, now: float) -> None:
        self._forget_plan()
        self._sketch.add(entry)
        if entry in self._probation:
            del self._probation[entry]
            self._protected[entry] = None
            if len(self._protected) > self._most_protected:
                self._probation[self._protected.popitem(last=False)[0]] = None
        else:
            self.refresh(entry, now)

    def refresh(self, entry: Address, now: float) -> None:
        self._forget_plan()
        self._list(entry).move_to_end(entry)

    def _list(self, entry: Address) -> OrderedDict[Address, None]:
        return next(one for one in (self._window, self._probation, self._protected) if entry in one)

    def _move(self, entry: Address) -> None:
        if entry in self._window:
            del self._window[entry]
            self._probation[entry] = None

    def _take(self, entry: Address, *, evicted: bool) -> None:
        del self._list(entry)[entry]

    def _plan(self, count: int, protected: Container[Address], moves: list[Address], due: dict[Address, int]) -> None:
        """The window is to have room for as many as are asked for: that many of its entries ask for admission."""
        window = (entry for entry in self._window if entry not in protected)
        probation = (entry for entry in self._probation if entry not in protected)
        kept = (entry for entry in self._protected if entry not in protected)
        admitted: deque[Address] = deque()

        def next_of_main() -> Address | None:
            return next(probation, None) or (admitted.popleft() if admitted else next(kept, None))

        held, rival, victim = len(self._window), next(window, None), next_of_main()
        while len(due) < count and (rival is not None or victim is not None):
            asks = rival is not None and (victim is None or held + count - len(due) > self._most_window)
            if asks and rival is not None:
                held -= 1
                if victim is not None and self._sketch.count(rival) > self._sketch.count(victim):
                    moves.append(rival)
                    admitted.append(rival)
                    due[victim] = len(moves)
                    victim = next_of_main()
                else:
                    due[rival] = len(moves)
                rival = next(window, None)
            elif victim is not None:
                due[victim] = len(moves)
                victim = next_of_main()
