"""Each policy once more, naive: lists, copies and sorting, as near to the text of its source as a reader could wish.

``Ordered`` ones say in which order everything would go. ``Stepwise`` ones evict one entry at a time and move others on the
way; what they name is found on a copy, and the copy becomes the state once the victim goes.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Container, Sequence

from kvtier.abc.policy import EntryMeta, EvictionPolicy
from kvtier.key import Address
from kvtier.policy import lfu, s3fifo, slru, wtinylfu
from kvtier.policy.sketch import FrequencySketch


class Ordered(EvictionPolicy):
    @abstractmethod
    def order(self, now: float) -> list[Address]:
        """All that is resident, first to go first."""

    def victims(self, count: int, protected: Container[Address], now: float) -> list[Address] | None:
        chosen = [one for one in self.order(now) if one not in protected][:count]
        return chosen if len(chosen) == count else None


class Fifo(Ordered):
    def __init__(self, capacity: int) -> None:
        self.entries: list[Address] = []

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        self.entries.append(entry)

    def touch(self, entry: Address, now: float) -> None:
        pass

    def pass_over(self, entries: Sequence[Address], now: float) -> None:
        for entry in entries:
            self.entries.remove(entry)
            self.entries.append(entry)

    def remove(self, entry: Address, *, evicted: bool) -> None:
        self.entries.remove(entry)

    def order(self, now: float) -> list[Address]:
        return self.entries


class Lru(Fifo):
    def touch(self, entry: Address, now: float) -> None:
        self.entries.remove(entry)
        self.entries.append(entry)

    refresh = touch


class Slru(Ordered):
    def __init__(self, capacity: int) -> None:
        self.most = max(1, int(slru.PROTECTED_SHARE * capacity))
        self.probation: list[Address] = []
        self.kept: list[Address] = []

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        self.probation.append(entry)

    def touch(self, entry: Address, now: float) -> None:
        self.remove(entry, evicted=False)
        self.kept.append(entry)
        if len(self.kept) > self.most:
            self.probation.append(self.kept.pop(0))

    def refresh(self, entry: Address, now: float) -> None:
        queue = self.probation if entry in self.probation else self.kept
        queue.remove(entry)
        queue.append(entry)

    def remove(self, entry: Address, *, evicted: bool) -> None:
        (self.probation if entry in self.probation else self.kept).remove(entry)

    def order(self, now: float) -> list[Address]:
        return self.probation + self.kept


class Lfu(Ordered):
    """Every use is remembered, and weighed anew each time."""

    def __init__(self, capacity: int) -> None:
        self.half_life = lfu.HALF_LIFE * capacity
        self.references = 0
        self.uses: dict[Address, list[int]] = {}
        self.latest: list[Address] = []

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        self.references += 1
        self.uses[entry] = [self.references]
        self.latest.append(entry)

    def touch(self, entry: Address, now: float) -> None:
        self.references += 1
        self.uses[entry].append(self.references)
        self.latest.remove(entry)
        self.latest.append(entry)

    def pass_over(self, entries: Sequence[Address], now: float) -> None:
        for entry in entries:
            if self.count(entry) < 1.0:
                self.uses[entry] = [self.references]
            self.latest.remove(entry)
            self.latest.append(entry)

    def remove(self, entry: Address, *, evicted: bool) -> None:
        del self.uses[entry]
        self.latest.remove(entry)

    def count(self, entry: Address) -> float:
        return float(sum(2.0 ** ((at - self.references) / self.half_life) for at in self.uses[entry]))

    def order(self, now: float) -> list[Address]:
        def rank(entry: Address) -> tuple[int, int]:
            score = lfu.STEPS * (math.log2(self.count(entry)) + self.references / self.half_life)
            return math.floor(round(score, 9)), self.latest.index(entry)  # a use on a bucket's edge is in the bucket

        return sorted(self.uses, key=rank)


class Gdsf(Ordered):
    def __init__(self, capacity: int) -> None:
        self.age = 0.0
        self.turn = 0
        self.known: dict[Address, tuple[float, int, int, float]] = {}

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        self.turn += 1
        worth = meta.cost / meta.nbytes if meta.cost else 1.0
        self.known[entry] = (self.age + worth, self.turn, 1, worth)

    def touch(self, entry: Address, now: float) -> None:
        self.turn += 1
        _, _, uses, worth = self.known[entry]
        self.known[entry] = (self.age + (uses + 1) * worth, self.turn, uses + 1, worth)

    def pass_over(self, entries: Sequence[Address], now: float) -> None:
        for entry in entries:
            self.turn += 1
            _, _, uses, worth = self.known[entry]
            self.known[entry] = (self.age + uses * worth, self.turn, uses, worth)

    def remove(self, entry: Address, *, evicted: bool) -> None:
        value = self.known.pop(entry)[0]
        if evicted:
            self.age = max(self.age, value)

    def order(self, now: float) -> list[Address]:
        return sorted(self.known, key=lambda entry: self.known[entry][:2])


class Ttl(Ordered):
    def __init__(self, capacity: int) -> None:
        self.recent: list[Address] = []
        self.inserted: list[Address] = []
        self.meta: dict[Address, EntryMeta] = {}

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        self.recent.append(entry)
        self.inserted.append(entry)
        self.meta[entry] = meta

    def touch(self, entry: Address, now: float) -> None:
        self.recent.remove(entry)
        self.recent.append(entry)

    refresh = touch

    def remove(self, entry: Address, *, evicted: bool) -> None:
        self.recent.remove(entry)
        self.inserted.remove(entry)

    def order(self, now: float) -> list[Address]:
        def expiry(entry: Address) -> float:
            at = self.meta[entry].expires_at
            return math.inf if at is None else at

        expired = sorted((one for one in self.inserted if expiry(one) <= now), key=expiry)
        rest = sorted((one for one in self.recent if one not in expired), key=lambda one: self.meta[one].priority)
        return expired + rest


class Arc(EvictionPolicy):
    def __init__(self, capacity: int) -> None:
        self.c = capacity
        self.p = 0.0
        self.t1: list[Address] = []
        self.t2: list[Address] = []
        self.b1: list[Address] = []
        self.b2: list[Address] = []

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        if entry in self.b1:
            self.p = min(self.c, self.p + max(1, len(self.b2) / len(self.b1)))
            self.b1.remove(entry)
            self.t2.append(entry)
        elif entry in self.b2:
            self.p = max(0, self.p - max(1, len(self.b1) / len(self.b2)))
            self.b2.remove(entry)
            self.t2.append(entry)
        else:
            self.t1.append(entry)
            self.forget()

    def forget(self) -> None:
        while self.b1 and len(self.t1 + self.b1) > self.c:
            self.b1.pop(0)
        while self.b2 and len(self.t1 + self.t2 + self.b1 + self.b2) > 2 * self.c:
            self.b2.pop(0)

    def touch(self, entry: Address, now: float) -> None:
        (self.t1 if entry in self.t1 else self.t2).remove(entry)
        self.t2.append(entry)

    def refresh(self, entry: Address, now: float) -> None:
        queue = self.t1 if entry in self.t1 else self.t2
        queue.remove(entry)
        queue.append(entry)

    def remove(self, entry: Address, *, evicted: bool) -> None:
        queue, ghosts = (self.t1, self.b1) if entry in self.t1 else (self.t2, self.b2)
        queue.remove(entry)
        if evicted:
            ghosts.append(entry)
            self.forget()

    def victims(self, count: int, protected: Container[Address], now: float) -> list[Address] | None:
        once, again, chosen = list(self.t1), list(self.t2), []
        for _ in range(count):
            queues = [once, again] if len(once) > self.p else [again, once]
            able = [one for one in queues[0] if one not in protected] or [
                one for one in queues[1] if one not in protected
            ]
            if not able:
                return None
            (once if able[0] in once else again).remove(able[0])
            chosen.append(able[0])
        return chosen


class Stepwise(EvictionPolicy):
    def __init__(self) -> None:
        self.named: dict[Address, Stepwise] = {}
        """Per victim named last, what the state is when it goes."""
        self.gone: list[Address] = []
        """What has gone since."""
        self.ghosts: list[Address] = []
        """No step changes them."""

    @abstractmethod
    def step(self, protected: Container[Address], named: Container[Address], ahead: int) -> Address | None:
        """Move up to the next entry that goes, which is not taken out; with it ``ahead`` are still asked for."""

    @abstractmethod
    def drop(self, entry: Address, *, evicted: bool) -> None: ...

    def copied(self) -> Stepwise:
        twin = copy.copy(self)
        kept = {name: copy.copy(value) for name, value in self.__dict__.items() if isinstance(value, (list, dict, set))}
        twin.__dict__.update(kept)
        return twin

    def remove(self, entry: Address, *, evicted: bool) -> None:
        if not evicted:
            self.named = {}
        if entry in self.named:
            state, (gone, ghosts) = self.named[entry], (self.gone, self.ghosts)
            later = list(self.named)[list(self.named).index(entry) + 1 :]
            self.__dict__ = dict(state.__dict__)
            self.named, self.gone, self.ghosts = {one: state.named[one] for one in later}, gone, ghosts
            for one in self.gone:
                self.drop(one, evicted=False)
        self.drop(entry, evicted=evicted)
        self.gone.append(entry)

    def victims(self, count: int, protected: Container[Address], now: float) -> list[Address] | None:
        self.named, self.gone = {}, []
        trial = self.copied()
        named: dict[Address, Stepwise] = {}
        while len(named) < count:
            found = trial.step(protected, named, count - len(named))
            if found is None:
                return None
            named[found] = trial.copied()
        for one in named.values():
            one.named = named
        self.named = named
        return list(named)


class Sieve(Stepwise):
    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.queue: list[Address] = []
        self.used: set[Address] = set()
        self.hand = 0

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        self.named = {}
        self.queue.append(entry)

    def touch(self, entry: Address, now: float) -> None:
        self.named = {}
        self.used.add(entry)

    def drop(self, entry: Address, *, evicted: bool) -> None:
        place = self.queue.index(entry)
        self.queue.remove(entry)
        self.used.discard(entry)
        self.hand -= int(place < self.hand)
        if self.hand == len(self.queue):
            self.hand = 0

    def step(self, protected: Container[Address], named: Container[Address], ahead: int) -> Address | None:
        for _ in range(2 * len(self.queue)):
            entry = self.queue[self.hand]
            if entry not in self.used and entry not in protected and entry not in named:
                return entry
            self.used.discard(entry)
            self.hand = (self.hand + 1) % len(self.queue)
        return None


class S3Fifo(Stepwise):
    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.small: list[Address] = []
        self.main: list[Address] = []
        self.uses: dict[Address, int] = {}

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        self.named = {}
        self.uses[entry] = 0
        if entry in self.ghosts:
            self.ghosts.remove(entry)
            self.main.append(entry)
        else:
            self.small.append(entry)

    def touch(self, entry: Address, now: float) -> None:
        self.named = {}
        self.uses[entry] = min(s3fifo.MOST_USES, self.uses[entry] + 1)

    def pass_over(self, entries: Sequence[Address], now: float) -> None:
        self.named = {}
        for entry in entries:
            queue = self.main if entry in self.main else self.small
            queue.remove(entry)
            queue.append(entry)

    def drop(self, entry: Address, *, evicted: bool) -> None:
        if entry in self.main:
            self.main.remove(entry)
            return
        self.small.remove(entry)
        if evicted:
            self.ghosts = [*self.ghosts, entry][-self.capacity :]

    def step(self, protected: Container[Address], named: Container[Address], ahead: int) -> Address | None:
        while True:
            small = [one for one in self.small if one not in protected and one not in named]
            main = [one for one in self.main if one not in protected and one not in named]
            held = sum(one not in named for one in self.small)
            if small and (held >= max(1, int(s3fifo.SMALL_SHARE * self.capacity)) or not main):
                if self.uses[small[0]] < s3fifo.USES_TO_STAY:
                    return small[0]
                self.small.remove(small[0])
                self.main.append(small[0])
                self.uses[small[0]] = 0
            elif main:
                if self.uses[main[0]] == 0:
                    return main[0]
                self.main.append(self.main.pop(self.main.index(main[0])))
                self.uses[main[0]] -= 1
            else:
                return None


class WTinyLfu(Stepwise):
    """Counts with the sketch of the house, which has a test of its own."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.most_window = max(1, int(wtinylfu.WINDOW_SHARE * capacity))
        self.most_main = max(0, capacity - self.most_window)
        self.most_kept = max(1, int(wtinylfu.PROTECTED_SHARE * self.most_main))
        self.sketch = FrequencySketch(capacity)
        self.window: list[Address] = []
        self.probation: list[Address] = []
        self.kept: list[Address] = []

    def queue(self, entry: Address) -> list[Address]:
        return next(one for one in (self.window, self.probation, self.kept) if entry in one)

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        self.named = {}
        self.sketch.add(entry)
        self.window.append(entry)
        if len(self.window) > self.most_window and len(self.probation + self.kept) < self.most_main:
            self.probation.append(self.window.pop(0))

    def touch(self, entry: Address, now: float) -> None:
        self.sketch.add(entry)
        if entry not in self.probation:
            self.refresh(entry, now)
            return
        self.named = {}
        self.probation.remove(entry)
        self.kept.append(entry)
        if len(self.kept) > self.most_kept:
            self.probation.append(self.kept.pop(0))

    def refresh(self, entry: Address, now: float) -> None:
        self.named = {}
        queue = self.queue(entry)
        queue.remove(entry)
        queue.append(entry)

    def drop(self, entry: Address, *, evicted: bool) -> None:
        self.queue(entry).remove(entry)

    def step(self, protected: Container[Address], named: Container[Address], ahead: int) -> Address | None:
        def able(queue: list[Address]) -> list[Address]:
            return [one for one in queue if one not in protected and one not in named]

        window, main = able(self.window), able(self.probation) + able(self.kept)
        held = sum(one not in named for one in self.window)
        if not main or not window or held + ahead <= self.most_window:
            return next(iter(main + window), None)
        if self.sketch.count(window[0]) <= self.sketch.count(main[0]):
            return window[0]
        self.window.remove(window[0])
        self.probation.append(window[0])
        return main[0]


REFERENCES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": Lru,
    "fifo": Fifo,
    "lfu": Lfu,
    "slru": Slru,
    "arc": Arc,
    "s3fifo": S3Fifo,
    "sieve": Sieve,
    "wtinylfu": WTinyLfu,
    "gdsf": Gdsf,
    "ttl": Ttl,
}
