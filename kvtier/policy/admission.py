"""Admission: whether a tier below DRAM takes a block that it is offered.

Writing wears flash out and takes its bandwidth, and most blocks are never asked for again. A rule is called under the store's
lock: no I/O, no clock of its own. What it remembers is bounded by what its tier holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum

from kvtier.config import AdmissionRule
from kvtier.key import Address

DAY = 86_400.0
BURSTS = 24
"""A budget per day may be spent by the hour at most."""
MOST_USES = 3
"""Times that a block has been seen, as far as they are told apart."""
FORGET = 0.5
"""What was learned counts so much after as many decisions as the tier has room for blocks."""


class Verdict(Enum):
    """What became of an offer."""

    ADMITTED = "admitted"
    DECLINED = "declined"
    OVER_BUDGET = "over_budget"


class Regret(Enum):
    """What a decision turned out to be."""

    DECLINED_AND_WANTED = "declined_and_wanted"
    WRITTEN_AND_UNUSED = "written_and_unused"


class WriteBudget:
    """Bytes that may be written: in no 24 hours more than ``per_day``, whenever they begin.

    A token bucket that holds an hour's worth and is filled at the rate of the other 23. It lives as long as its process. Where
    others may have spent it before, it begins empty: else a process that ends again and again would write without a limit.
    """

    def __init__(self, per_day: int) -> None:
        self.most = per_day / BURSTS
        self._rate = (per_day - self.most) / DAY
        self._left = self.most
        self._at: float | None = None

    def left(self, now: float) -> float:
        """Bytes that may be written at once."""
        if self._at is not None:
            self._left = min(self.most, self._left + max(0.0, now - self._at) * self._rate)
        self._at = now
        return self._left

    def spend(self, nbytes: int) -> None:
        self._left -= nbytes

    def begin(self, *, full: bool) -> None:
        """Begin with as much as the bucket holds, or with nothing."""
        self._left = self.most if full else 0.0


class Admission:
    """Takes everything that the budget, if there is one, allows. What the other rules are made from."""

    def __init__(self, budget: WriteBudget | None, remembered: int) -> None:
        self._budget = budget
        self._most = max(1, remembered)
        self._trial: OrderedDict[Address, tuple[int, bool]] = OrderedDict()
        """Decided on and not wanted since: what had been seen of the block, and whether it was taken.

        As many as the tier holds may be in it, so that they last until they go, and as many again were declined.
        """

    def offered(self, entry: Address, nbytes: int, now: float) -> Verdict:
        """Decide on a block of which ``nbytes`` would be written."""
        seen = self._seen(entry)
        verdict = Verdict.DECLINED
        if self._wants(seen, now):
            verdict = Verdict.ADMITTED
            if self._budget is not None and self._budget.left(now) < nbytes:
                verdict = Verdict.OVER_BUDGET
            elif self._budget is not None:
                self._budget.spend(nbytes)
        self._decided(seen)
        self._trial[entry] = (seen, verdict is Verdict.ADMITTED)
        self._trial.move_to_end(entry)
        if len(self._trial) > 2 * self._most:
            self._trial.popitem(last=False)
        return verdict

    def used(self, entries: Iterable[Address]) -> None:
        """A request has reached these blocks, wherever they were."""

    def wanted(self, entries: Iterable[Address]) -> int:
        """A request has missed these; how many of them had been declined."""
        return sum(self._ended(entry, taken=False) for entry in entries)

    def read(self, entries: Iterable[Address]) -> None:
        """The tier has given these blocks: it was right to take them."""
        for entry in entries:
            self._ended(entry, taken=True)

    def evicted(self, entries: Iterable[Address]) -> int:
        """The tier has evicted these; how many of them had been written and never read."""
        gone = 0
        for entry in entries:
            trial = self._trial.get(entry)
            if trial is not None and trial[1]:
                del self._trial[entry]
                gone += 1
        return gone

    def begin(self, *, new: bool) -> None:
        """The tier begins: ``new``, or with what earlier processes have written to it, nobody knows when."""
        if self._budget is not None:
            self._budget.begin(full=new)

    def left(self, now: float) -> float | None:
        """Bytes that may be written at once; None: as many as one likes."""
        return None if self._budget is None else self._budget.left(now)

    def _ended(self, entry: Address, *, taken: bool) -> bool:
        trial = self._trial.get(entry)
        if trial is None or trial[1] is not taken:
            return False
        del self._trial[entry]
        self._was_wanted(trial[0])
        return True

    def _seen(self, entry: Address) -> int:
        """How often the block has been seen before this offer."""
        return 0

    def _wants(self, seen: int, now: float) -> bool:
        return True

    def _decided(self, seen: int) -> None:
        """A block that had been ``seen`` so often was decided on."""

    def _was_wanted(self, seen: int) -> None:
        """It was asked for afterwards."""


class SecondHit(Admission):
    """Takes a block that was used, or offered, before: most that are not are never asked for."""

    def __init__(self, budget: WriteBudget | None, remembered: int) -> None:
        super().__init__(budget, remembered)
        self._times: OrderedDict[Address, int] = OrderedDict()
        """How often each was seen, up to ``MOST_USES``; latest last, as many again as the tier has room for."""

    def used(self, entries: Iterable[Address]) -> None:
        for entry in entries:
            self._see(entry)

    def _see(self, entry: Address) -> int:
        before = self._times.get(entry, 0)
        self._times[entry] = min(MOST_USES, before + 1)
        self._times.move_to_end(entry)
        if len(self._times) > self._most:
            self._times.popitem(last=False)
        return before

    def _seen(self, entry: Address) -> int:
        return self._see(entry)

    def _wants(self, seen: int, now: float) -> bool:
        return seen > 0


class RegretDriven(SecondHit):
    """Learns from its regrets which blocks are asked for again, and is as choosy as its budget is spent.

    Blocks are told apart by how often they were seen before. For each kind it counts decisions, and those after which the
    block was asked for: read if it was taken, missed if not. A kind is taken while the share of its blocks that were asked
    for is at least that of the best kind times the part of the budget that is spent: everything with a full bucket, the best
    alone with an empty one (a threshold that rises with what is used up, as in online knapsack: Chakrabarty, Zhou, Lukose,
    WINE 2008). It has no other parameter. A kind of which nothing is known counts as asked for.
    """

    def __init__(self, budget: WriteBudget, remembered: int) -> None:
        super().__init__(budget, remembered)
        self._bucket = budget
        self._keep = FORGET ** (1 / self._most)
        self._decisions = [0.0] * (MOST_USES + 1)
        self._asked_for = [0.0] * (MOST_USES + 1)

    def _share(self, seen: int) -> float:
        return (self._asked_for[seen] + 1) / (self._decisions[seen] + 1)

    def _wants(self, seen: int, now: float) -> bool:
        spent = 1.0 - self._bucket.left(now) / self._bucket.most
        return self._share(seen) >= spent * max(map(self._share, range(MOST_USES + 1)))

    def _decided(self, seen: int) -> None:
        self._decisions = [self._keep * count for count in self._decisions]
        self._asked_for = [self._keep * count for count in self._asked_for]
        self._decisions[seen] += 1

    def _was_wanted(self, seen: int) -> None:
        self._asked_for[seen] += 1


def make_admission(rule: AdmissionRule, write_budget: int | None, remembered: int) -> Admission | None:
    """The rule of a tier with room for ``remembered`` blocks; None: it takes all, without a limit.

    ``write_budget`` is in bytes per day; ``ADAPTIVE`` needs one.
    """
    budget = None if write_budget is None else WriteBudget(write_budget)
    if rule is AdmissionRule.ADAPTIVE:
        assert budget is not None, "its options were checked"
        return RegretDriven(budget, remembered)
    if rule is AdmissionRule.SECOND:
        return SecondHit(budget, remembered)
    return None if budget is None else Admission(budget, remembered)
