"""ARC, the adaptive replacement cache (Megiddo, Modha: ARC: a self-tuning, low overhead replacement cache, FAST 2003)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

from kvtier.abc.policy import EntryMeta, EvictionPolicy
from kvtier.key import Address


class ArcPolicy(EvictionPolicy):
    """Divides the room between what was used once and what was used again, and learns the share from its own mistakes.

    ``once`` and ``again`` are the paper's T1 and T2; ghosts of what either evicted are B1 and B2. A ghost that comes back
    says that its list was too short, and moves the target. The one difference: a pool asks for room before it says for
    whom, so the paper's tie (an entry of B2 comes while T1 has just its target) is settled in favour of T1. ARC has no
    free parameter.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0
        """What ``once`` is to hold: the paper's p."""
        self._once: OrderedDict[Address, None] = OrderedDict()
        self._again: OrderedDict[Address, None] = OrderedDict()
        self._once_ghosts: OrderedDict[Address, None] = OrderedDict()
        self._again_ghosts: OrderedDict[Address, None] = OrderedDict()

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        once, again = self._once_ghosts, self._again_ghosts
        if entry in once:
            self._target = min(self._capacity, self._target + max(1.0, len(again) / len(once)))
            del once[entry]
        elif entry in again:
            self._target = max(0.0, self._target - max(1.0, len(once) / len(again)))
            del again[entry]
        else:
            self._once[entry] = None
            self._bound_ghosts()
            return
        self._again[entry] = None

    def _bound_ghosts(self) -> None:
        once, again = self._once_ghosts, self._again_ghosts
        resident = len(self._once)
        while once and resident + len(once) > self._capacity:
            once.popitem(last=False)
        resident += len(self._again)
        while again and resident + len(once) + len(again) > 2 * self._capacity:
            again.popitem(last=False)

    def touch(self, entry: Address, now: float) -> None:
        self.touch_all((entry,), now)

    def touch_all(self, entries: Sequence[Address], now: float) -> None:
        once, again = self._once, self._again
        for entry in entries:
            if entry in again:
                again.move_to_end(entry)
            else:
                del once[entry]
                again[entry] = None

    def refresh(self, entry: Address, now: float) -> None:
        (self._again if entry in self._again else self._once).move_to_end(entry)

    def remove(self, entry: Address, *, evicted: bool) -> None:
        if entry in self._once:
            del self._once[entry]
            ghosts = self._once_ghosts
        else:
            del self._again[entry]
            ghosts = self._again_ghosts
        if evicted:
            ghosts[entry] = None
            self._bound_ghosts()

    def victims(self, count: int, protected: Container[Address], now: float) -> list[Address] | None:
        once = (entry for entry in self._once if entry not in protected)
        again = (entry for entry in self._again if entry not in protected)
        held = len(self._once)
        chosen: list[Address] = []
        while len(chosen) < count:
            from_once = held > self._target
            entry = next(once if from_once else again, None)
            if entry is None:
                from_once = not from_once
                entry = next(once if from_once else again, None)
                if entry is None:
                    return None
            held -= from_once
            chosen.append(entry)
        return chosen
