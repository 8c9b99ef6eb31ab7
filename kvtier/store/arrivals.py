"""Blocks on their way up: sent for in batches, read by a lower tier's threads, proved, and committed in DRAM."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial

from kvtier.abc.medium import Outcome, Status
from kvtier.abc.store import BlockFound, Reason
from kvtier.codec.frame import Asked, FrameHeader
from kvtier.key import Address
from kvtier.pool import Slot
from kvtier.store.clearing import Clearing
from kvtier.store.demotion import Demoter
from kvtier.store.match import TieredMatch, coming, hit, missed
from kvtier.store.parts import Parts
from kvtier.tier.lower import LowerTier
from kvtier.transfer.workers import Urgency

BATCH_BYTES = 16 << 20
"""Bytes of one read from a lower tier: large enough for bandwidth, small enough that the first arrive early."""


@dataclass(slots=True)
class Reading:
    """What one match reads from one tier, for the gate to learn from."""

    tier: LowerTier
    asked: float
    """When it was asked for, in seconds of the store's clock."""
    queued: int
    """Bytes that the tier had to deliver before."""
    trial: bool
    """Whether nobody asked for it but the gate."""
    batches: int = 0
    """Reads that have not ended."""
    blocks: int = 0
    """Blocks that came and proved."""


@dataclass(slots=True)
class Arrival:
    """One block on its way into a DRAM slot, and the matches that wait for it (with the index it has in each)."""

    address: Address
    slot: Slot
    tier: LowerTier
    waiting: list[tuple[TieredMatch, int]] = field(default_factory=list)
    dropped: BlockFound | None = None
    """What it is to be once it arrives, where it was dropped on the way."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Where one block of a match is: on its way, in a lower tier, or (neither) in DRAM. One object per tier."""

    arrival: Arrival | None = None
    tier: LowerTier | None = None

    def source(self) -> tuple[LowerTier | None, bool]:
        """The tier that the block would come from (None: DRAM), and whether it is on its way already."""
        return (self.tier, False) if self.arrival is None else (self.arrival.tier, True)


class Arrivals:
    """Owns what is on its way up. Called under the store's lock, but for ``_fetch``, which runs on transfer threads."""

    def __init__(
        self, parts: Parts, demoter: Demoter, clearing: Clearing, settle: Callable[[TieredMatch], None]
    ) -> None:
        """``settle`` is told of a match for which nothing is on its way any more."""
        self.arriving: dict[Address, Arrival] = {}
        self.queued = dict.fromkeys((tier.name for tier in parts.tiers), 0)
        """By tier: bytes that it was asked for and that have not come."""
        self._tried: set[str] = set()
        """Tiers that lost and are being tried now."""
        self._geometry = parts.geometry
        self._arena = parts.arena
        self._history = parts.history
        self._gate = parts.gate
        self._lock = parts.lock
        self._clock = parts.clock
        self._demoter = demoter
        self._clearing = clearing
        self._settle = settle
        self._batch = max(1, BATCH_BYTES // max(1, parts.arena.medium.slot_bytes))

    @property
    def untried(self) -> AbstractSet[str]:
        """Tiers that are not being tried now."""
        return self.queued.keys() - self._tried

    def drop(self, address: Address, reason: Reason) -> None:
        """Let a block that is on its way arrive as missed."""
        arrival = self.arriving.get(address)
        if arrival is not None:
            arrival.dropped = missed(reason)

    def join(self, match: TieredMatch, steps: Sequence[Step], lacking: Sequence[int], slots: Sequence[Slot]) -> None:
        """Join what is on its way already, and send for the rest into ``slots``; ``lacking``: blocks that DRAM has not."""
        free = iter(slots)
        wanted: list[int] = []
        for index in lacking[: bisect_left(lacking, len(steps))]:
            step = steps[index]
            arrival = step.arrival
            if step.tier is not None:
                arrival = Arrival(match.addresses[match.start + index], next(free), step.tier)
                self.arriving[arrival.address] = arrival
                wanted.append(index)
            if arrival is not None:
                arrival.waiting.append((match, index))
                match.found[index] = coming(arrival.tier.name)
                match.awaited += 1
        self._send(match, steps, wanted, match.urgency)

    def try_out(self, match: TieredMatch, steps: Sequence[Step], first: int, count: int) -> None:
        """Read a run that was declined all the same, in the background: what its tier takes now."""
        slots = self._demoter.make_room(count)
        indexes = range(first, first + len(slots))
        if not indexes:
            return
        for index, slot in zip(indexes, slots, strict=True):
            tier = steps[index].tier
            assert tier is not None, "only what lies below is tried in the background"
            address = match.addresses[match.start + index]
            self.arriving[address] = Arrival(address, slot, tier)
            self._tried.add(tier.name)
        self._send(match, steps, indexes, Urgency.PREFETCH, trial=True)

    def _send(
        self,
        match: TieredMatch,
        steps: Sequence[Step],
        indexes: Iterable[int],
        urgency: Urgency,
        *,
        trial: bool = False,
    ) -> None:
        """Have blocks read for which an arrival stands ready, in batches of one tier each."""
        now = self._clock()
        batches: list[list[int]] = []
        for index in indexes:
            last = batches[-1] if batches else []
            if not last or len(last) == self._batch or steps[last[-1]].tier is not steps[index].tier:
                batches.append([])
            batches[-1].append(index)
        readings: dict[str, Reading] = {}
        jobs = []
        for batch in batches:
            arrivals = [self.arriving[match.addresses[match.start + index]] for index in batch]
            tier = arrivals[0].tier
            reading = readings.setdefault(tier.name, Reading(tier, now, self.queued[tier.name], trial))
            reading.batches += 1
            jobs.append((arrivals, self._geometry.asked(match.span, [match.start + index for index in batch]), reading))
        for arrivals, asked, reading in jobs:
            self.queued[reading.tier.name] += len(arrivals) * self._geometry.block_bytes
            if not reading.tier.workers.submit(urgency, partial(self._fetch, arrivals, asked, reading)):
                closed = [Outcome(Status.FAILED, 0, "closed")] * len(arrivals)
                self._arrive(arrivals, closed, [None] * len(arrivals), reading)

    def _read(self, reading: Reading, outcomes: Sequence[Outcome]) -> None:
        """One batch of a reading has ended; with the last the gate learns what it took."""
        name, nbytes = reading.tier.name, self._geometry.block_bytes
        self.queued[name] -= len(outcomes) * nbytes
        reading.blocks += sum(outcome.done for outcome in outcomes)
        reading.batches -= 1
        if not reading.batches:
            if reading.trial:
                self._tried.discard(name)
            self._gate.observe_load(name, reading.blocks * nbytes, self._clock() - reading.asked, reading.queued)

    def _fetch(self, batch: Sequence[Arrival], asked: Sequence[Asked], reading: Reading) -> None:
        """On a transfer thread, without the lock."""
        began = time.perf_counter()
        for match in {id(match): match for arrival in batch for match, _ in arrival.waiting}.values():
            match.began = match.began or began
        views = [self._arena.view(arrival.slot) for arrival in batch]
        outcomes, headers = batch[0].tier.fetch([arrival.address for arrival in batch], views, asked)
        with self._lock:
            self._arrive(batch, outcomes, headers, reading)

    def _arrive(
        self,
        batch: Sequence[Arrival],
        outcomes: Sequence[Outcome],
        headers: Sequence[FrameHeader | None],
        reading: Reading,
    ) -> None:
        self._read(reading, outcomes)
        ended: dict[int, TieredMatch] = {}
        for arrival, outcome, header in reversed(list(zip(batch, outcomes, headers, strict=True))):
            if self.arriving.get(arrival.address) is arrival:
                del self.arriving[arrival.address]
            slot, why = self._landed(arrival, outcome, header)
            for match, index in arrival.waiting:
                if match.settled:
                    continue
                if why is None:
                    self._arena.pool.acquire([slot])
                    match.slots[index] = slot
                match.found[index] = why or hit(arrival.tier.name)
                match.awaited -= 1
                ended[id(match)] = match
            self._arena.pool.release([arrival.slot], self._clock())
        for match in ended.values():
            if not match.awaited:
                self._settle(match)

    def _landed(self, arrival: Arrival, outcome: Outcome, header: FrameHeader | None) -> tuple[Slot, BlockFound | None]:
        """Commit an arrival that proved: the slot that has it, or why there is none."""
        slot, address, tier = arrival.slot, arrival.address, arrival.tier
        if arrival.dropped is not None:
            return slot, arrival.dropped
        if header is not None and self._clearing.stale(header.lot):
            return slot, missed(Reason.CLEARED)
        if outcome.done and header is not None:
            priority = max((match.hints.priority for match, _ in arrival.waiting), default=0)
            if not self._arena.show(slot, address, header, self._clock(), priority):
                there = self._arena.pool.slot(address)
                assert there is not None, "the first copy is there"
                return there, None
            self._history.came(address)
            self._demoter.owe_promoted(slot, address, tier)
            tier.gave(address)
            return slot, None
        if outcome.status is Status.CORRUPT:
            self._history.refuse(address, Reason.SUM_FAILED)
            return slot, missed(Reason.SUM_FAILED, tier.name)
        reason = Reason.EVICTED if outcome.status is Status.ABSENT else Reason.READ_FAILED
        if not tier.usable:
            reason = Reason.TIER_DEGRADED
        self._history.went([address], reason)
        return slot, missed(reason, tier.name)
