"""What the store has found for one request, and the lease on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from itertools import takewhile

import numpy as np

from kvtier.abc.store import BlockFound, Found, Hints, Match, Reason
from kvtier.key import Address, Span
from kvtier.pool import BlockPool, SlotArray
from kvtier.store.history import repeats
from kvtier.transfer.workers import Urgency
from kvtier.tree import NONE

UNKNOWN = BlockFound(Found.PENDING)
BEHIND = BlockFound(Found.MISS, reason=Reason.BEHIND_A_MISS)
_MISSED = {reason: BlockFound(Found.MISS, None, reason) for reason in Reason}


def missed(reason: Reason, tier: str | None = None) -> BlockFound:
    return _MISSED[reason] if tier is None else BlockFound(Found.MISS, tier, reason)


@cache
def hit(tier: str) -> BlockFound:
    """The answer of one tier: one object, so that equal answers are told at a glance."""
    return BlockFound(Found.HIT, tier)


@cache
def coming(tier: str) -> BlockFound:
    return BlockFound(Found.PENDING, tier)


class TieredMatch(Match):
    """A match and its lease. Its fields belong to the promoter, which changes them under the store's lock."""

    def __init__(
        self,
        lock: threading.Lock,
        advance: Callable[[TieredMatch], None],
        give_up: Callable[[TieredMatch], None],
        request_id: str,
        span: Span,
        start: int,
        addresses: Sequence[Address],
        latest: float,
        urgency: Urgency,
        hints: Hints,
    ) -> None:
        self._lock = lock
        self._advance = advance
        self._give_up = give_up
        self.request_id = request_id
        self.span = span
        self.start = start
        self.addresses = addresses
        """Of the whole span; what is matched begins at ``start``."""
        self.deadline = self._latest = latest
        self.urgency = urgency
        self.hints = hints
        self.found: list[BlockFound] = [UNKNOWN] * (len(addresses) - start)
        self.slots: SlotArray = np.full(len(self.found), NONE, np.intp)
        """By index from ``start``: the DRAM slot on which this match holds a reference, or NONE."""
        self.awaited = 0
        """Blocks on their way up."""
        self.present: dict[str, int] = {}
        """By tier that probes: index from ``start`` up to which it has everything."""
        self.probing = False
        self.reserved = 0
        """Slots that count against the half of DRAM that unscheduled requests may hold."""
        self.settled = False
        self.released = False
        self.seconds = 0.0
        self.began: float | None = None
        """When the first read for it began (seconds of ``time.perf_counter``)."""

    @property
    def blocks(self) -> Sequence[BlockFound]:
        return tuple(self.found)

    @property
    def pending(self) -> bool:
        with self._lock:
            self._advance(self)
            return not self.settled

    @property
    def hits(self) -> int:
        of_hits = takewhile(lambda one: one[0].found is Found.HIT, repeats(self.found))
        return sum(count for _, count in of_hits)

    @property
    def held(self) -> SlotArray:
        """The slots on which this match holds a reference, in the chain's order."""
        held: SlotArray = self.slots[self.slots != NONE]
        return held

    def let_go(self, pool: BlockPool, start: int, now: float) -> None:
        """Give up the references from index ``start`` on."""
        beyond = self.slots[start:]
        pool.release(beyond[beyond != NONE], now)
        beyond[:] = NONE

    @property
    def load_seconds(self) -> float:
        return self.seconds

    def release(self) -> None:
        with self._lock:
            self._give_up(self)

    def wait_until(self, deadline: float) -> None:
        """Move the deadline, never past what the request said."""
        self.deadline = min(deadline, self._latest)

    def end(self, start: int, answer: BlockFound) -> None:
        """Everything from ``start`` on is missed, the first of it as ``answer`` says."""
        if start < len(self.found):
            self.found[start:] = [answer, *[BEHIND] * (len(self.found) - start - 1)]
