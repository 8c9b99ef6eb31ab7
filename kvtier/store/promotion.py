"""The way up: matches, their leases, and the blocks that come up from lower tiers for them.

A match walks the chain; what is in DRAM is a HIT, what is below is PENDING while it is read, proved and committed. A match
takes every slot that it will load from, or read into, before its first byte moves. Matches of requests that are not yet
scheduled hold at most half of DRAM, in the order in which they asked; one that alone wants more is cut to that half.

One module, long as it is: looking (`_walk`), taking (`_reserve`), reading (`_start`), arriving and settling are stages of one
match, over the same books.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from kvtier.abc.medium import Outcome, Status
from kvtier.abc.store import NO_HINTS, BlockFound, Found, Hints, Reason
from kvtier.codec.frame import Asked, FrameHeader
from kvtier.cost import DRAM, Gate, Run
from kvtier.key import Address, Span
from kvtier.metrics import TierMetrics
from kvtier.pool import NONE, Slot, SlotArray
from kvtier.store.arena import Arena, Gone
from kvtier.store.demotion import Demoter
from kvtier.store.geometry import Geometry
from kvtier.store.history import History, repeats
from kvtier.store.match import TieredMatch, missed
from kvtier.tier.lower import LowerTier, lot_of
from kvtier.transfer.workers import Urgency

if TYPE_CHECKING:
    from kvtier.store.clearing import Clearing
    from kvtier.store.notice import Notice

BATCH_BYTES = 16 << 20
"""Bytes of one read from a lower tier: large enough for bandwidth, small enough that the first arrive early."""
LINE_SECONDS = 20.0
"""Longest wait behind other requests' leases: whoever computed instead would come after them all the same."""


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


IN_DRAM = Step()


def _source(step: Step) -> tuple[LowerTier | None, bool]:
    """The tier that a block would come from (None: DRAM), and whether it is on its way already."""
    return (step.tier, False) if step.arrival is None else (step.arrival.tier, True)


def _answers(tier: LowerTier) -> bool:
    return tier.usable and tier.silent is None


@dataclass(frozen=True, slots=True)
class Walk:
    """The usable prefix of a match, and why it ends where it does (None: it does not)."""

    steps: list[Step]
    resident: SlotArray
    """Per block of the match its DRAM slot, NONE where it has none."""
    lacking: list[int]
    """Blocks of the match that have none."""
    end: BlockFound | None


class Promoter:
    """Owns the matches. Called under the store's lock, but for ``_fetch`` and the probes, which run on transfer threads."""

    def __init__(
        self,
        geometry: Geometry,
        arena: Arena,
        dram: TierMetrics,
        tiers: Sequence[LowerTier],
        demoter: Demoter,
        history: History,
        clearing: Clearing,
        notice: Notice,
        gate: Gate,
        lock: threading.Lock,
        clock: Callable[[], float],
        deadline: float,
    ) -> None:
        self.reserved = 0
        """Slots that matches of unscheduled requests hold or wait for."""
        self.arriving: dict[Address, Arrival] = {}
        self.matches: dict[str, TieredMatch] = {}
        self._geometry = geometry
        self._arena = arena
        self._dram = dram
        self._tiers = tuple(tiers)
        self._demoter = demoter
        self._history = history
        self._clearing = clearing
        self._notice = notice
        self._gate = gate
        self._lock = lock
        self._clock = clock
        self._deadline = deadline
        self._half = max(1, arena.pool.capacity // 2)
        self._batch = max(1, BATCH_BYTES // max(1, arena.medium.slot_bytes))
        self._queued = dict.fromkeys((tier.name for tier in tiers), 0)
        """By tier: bytes that it was asked for and that have not come."""
        self._tried: set[str] = set()
        """Tiers that lost and are being tried now."""
        self._line: OrderedDict[str, TieredMatch] = OrderedDict()
        self._moving = False
        self._hit = {name: BlockFound(Found.HIT, name) for name in [DRAM, *(tier.name for tier in tiers)]}
        self._coming = {tier.name: BlockFound(Found.PENDING, tier.name) for tier in tiers}
        self._below = {tier.name: Step(tier=tier) for tier in tiers}

    def open(self, request_id: str, span: Span, start: int, urgency: Urgency, hints: Hints = NO_HINTS) -> TieredMatch:
        """A new live match, not advanced yet."""
        now = self._clock()
        latest = math.inf if hints.max_wait_ms is None else now + hints.max_wait_ms / 1000
        addresses = self._geometry.addresses(span)
        match = TieredMatch(
            self._lock, self.advance, self.release, request_id, span, start, addresses, latest, urgency, hints
        )
        match.wait_until(now + self._deadline)
        self.matches[request_id] = match
        return match

    def advance(self, match: TieredMatch) -> None:
        """Let a pending match go on: its deadline, or its turn for room, may have come."""
        if match.settled:
            return
        if self._clock() >= match.deadline:
            self._expire(match)
        elif not match.probing and not match.awaited and (match.request_id not in self._line or self._is_first(match)):
            walk = self._walk(match)
            if walk is not None:
                self._reserve(match, walk)

    def refuse(self, match: TieredMatch, reason: Reason) -> None:
        """Settle a new match as missed from its first block on."""
        match.end(0, missed(reason))
        self._settle(match)

    def release(self, match: TieredMatch) -> None:
        """End a match's lease and life. Idempotent."""
        if match.released:
            return
        match.released = True
        self.reserved -= match.reserved
        match.reserved = 0
        self._arena.pool.release(match.held, self._clock())
        match.slots = match.slots[:0]
        self._line.pop(match.request_id, None)
        if self.matches.get(match.request_id) is match:
            del self.matches[match.request_id]
        if not match.settled:
            match.settled = True
            self._miss_pending(match)
            self._history.tell(match.request_id, match.found)
        self._move_line()

    def note_gone(self, gone: Sequence[Gone]) -> None:
        """Blocks were evicted from DRAM."""
        for one in gone:
            self._history.went([one.address], Reason.DECLINED if one.declined and self._tiers else Reason.EVICTED)
        if gone:
            self._dram.evicted(Reason.EVICTED, len(gone))

    def _move_line(self) -> None:
        """Room may have come free: let whoever is first in line try, and the next one if that one goes."""
        if self._moving:
            return
        self._moving = True
        try:
            while self._line:
                first = next(iter(self._line.values()))
                self.advance(first)
                if next(iter(self._line.values()), None) is first:
                    break
        finally:
            self._moving = False

    def _is_first(self, match: TieredMatch) -> bool:
        return next(iter(self._line), match.request_id) == match.request_id

    def _expire(self, match: TieredMatch) -> None:
        if not match.awaited and not len(match.held):
            self._take_resident(match)
        self._miss_pending(match)
        match.awaited = 0
        match.probing = False
        self._settle(match)

    def _take_resident(self, match: TieredMatch) -> None:
        """What DRAM has is given to a match that has waited in vain, for room or for an answer."""
        known = self._arena.pool.find(match.addresses[match.start :])
        lacking = np.flatnonzero(known == NONE)
        whole = int(lacking[0]) if len(lacking) else len(known)
        steps = [IN_DRAM] * max(0, min(whole, self._half - self.reserved))
        runs, kept = self._judged(match, steps)
        steps = steps[: self._length(runs[:kept])] if kept < len(runs) else steps
        self._gate.decided(runs, kept, ())
        match.slots[: len(steps)] = known[: len(steps)]
        match.found[: len(steps)] = [self._hit[DRAM]] * len(steps)
        match.reserved = len(steps)
        self.reserved += len(steps)
        self._arena.pool.acquire(match.held)

    def _miss_pending(self, match: TieredMatch) -> None:
        for index, block in enumerate(match.found):
            if block.found is Found.PENDING:
                match.end(index, missed(Reason.DEADLINE, block.tier))
                break

    def _walk(self, match: TieredMatch) -> Walk | None:
        """Where each block of the match is; None where a probe has been sent and must answer first."""
        if self._clearing.stale(match.span.origin):
            return Walk([], match.slots[:0], [], missed(Reason.CLEARED))
        addresses = match.addresses[match.start :]
        resident = self._arena.pool.find(addresses)
        steps = [IN_DRAM] * len(resident)
        lacking = np.flatnonzero(resident == NONE).tolist()
        if not lacking:
            return Walk(steps, resident, lacking, None)
        answering = [tier for tier in self._tiers if _answers(tier)]
        known = [(tier, tier.places(addresses)) for tier in answering if not tier.probes]
        shared = [tier for tier in answering if tier.probes]
        for index in lacking:
            address = addresses[index]
            arrival = self.arriving.get(address)
            if arrival is not None and arrival.dropped is None:
                if arrival.tier not in answering:
                    return Walk(steps[:index], resident, lacking, missed(Reason.TIER_DEGRADED, arrival.tier.name))
                steps[index] = Step(arrival=arrival)
                continue
            tier: LowerTier | None = None
            if not self._history.refuses(address):
                tier = next((one for one, places in known if places[index] is not None), None)
                unasked = next((one for one in shared if one.name not in match.present), None)
                if tier is None and unasked is not None:
                    self._probe(match, unasked, index)
                    return None
                tier = tier or next((one for one in shared if index < match.present[one.name]), None)
            if tier is None:
                why = self._why(address, match.span, match.start + index)
                return Walk(steps[:index], resident, lacking, missed(why))
            steps[index] = self._below[tier.name]
        return Walk(steps, resident, lacking, None)

    def _why(self, address: Address, span: Span, index: int) -> Reason:
        why = self._history.why(address)
        if why is Reason.NEVER_STORED and index < len(span.former):
            former = self._geometry.addresses(Span(span.origin, span.parent, 0, span.former[index : index + 1]))
            if self._clearing.cleared(former[0]):
                return Reason.CLEARED
        degraded = not all(map(_answers, self._tiers))
        return Reason.TIER_DEGRADED if degraded and why in (Reason.NEVER_STORED, Reason.EVICTED) else why

    def _probe(self, match: TieredMatch, tier: LowerTier, index: int) -> None:
        wanted = match.addresses[match.start + index :]
        match.probing = True

        def probe() -> None:
            present = tier.probe(wanted)
            if not self._clearing.follow(tier):
                present = 0
            with self._lock:
                match.present[tier.name] = index + present
                match.probing = False
                self.advance(match)

        if not tier.workers.submit(match.urgency, probe):
            match.present[tier.name] = 0
            match.probing = False

    def _reserve(self, match: TieredMatch, walk: Walk) -> None:
        """Take every slot that the match will load from or read into, or let it wait: for its turn, or for a demotion."""
        runs, kept = self._judged(match, walk.steps)
        steps, end = walk.steps, walk.end
        if kept < len(runs):
            steps = steps[: self._length(runs[:kept])]
            end = missed(Reason.BELOW_BREAK_EVEN, runs[kept].tier)
        if steps and (len(steps) > self._half - self.reserved or not self._is_first(match)):
            if self.reserved or not self._is_first(match):
                if match.request_id not in self._line:
                    match.wait_until(max(match.deadline, self._clock() + LINE_SECONDS))
                self._line[match.request_id] = match
                return
            steps, end = steps[: self._half], missed(Reason.NO_ROOM)
        now = self._clock()
        match.slots[: len(steps)] = walk.resident[: len(steps)]
        self._arena.pool.acquire(match.held)
        lacking = walk.lacking[: bisect_left(walk.lacking, len(steps))]
        wanted = [index for index in lacking if steps[index].tier is not None]
        if self._arena.owing_count and not self._arena.has_room(len(wanted)):
            self._arena.pool.release(match.held, now)
            match.slots[:] = NONE
            self._demoter.keep_reserve(self.reserved + len(wanted))
            self._line[match.request_id] = match
            return
        if self._line.pop(match.request_id, None) is not None:
            match.wait_until(now + self._deadline)
        slots, gone = self._arena.take(len(wanted), now)
        self.note_gone(gone)
        if len(slots) < len(wanted):
            cut = wanted[len(slots)]
            match.let_go(self._arena.pool, cut, now)
            steps, end = steps[:cut], missed(Reason.NO_ROOM)
        match.reserved = len(steps)
        self.reserved += len(steps)
        if end is not None:
            match.end(len(steps), end)
        match.found[: len(steps)] = [self._hit[DRAM]] * len(steps)
        self._start(match, steps, lacking, slots)
        self._act_on(match, walk.steps, runs, kept)
        if not match.awaited:
            self._settle(match)

    def _act_on(self, match: TieredMatch, steps: Sequence[Step], runs: Sequence[Run], kept: int) -> None:
        """What follows from loading the first ``kept`` runs: tries of tiers that lost, and how long to wait."""
        for index in self._gate.decided(runs, kept, self._queued.keys() - self._tried):
            self._try(match, steps, self._length(runs[:index]), self._length(runs[index : index + 1]))
        patience = self._gate.patience(runs[:kept]) if match.awaited and runs else None
        if patience is not None:
            match.wait_until(min(match.deadline, self._clock() + patience))

    def _judged(self, match: TieredMatch, steps: list[Step]) -> tuple[list[Run], int]:
        """The runs of a walk, and how many of the first are worth loading: all, where nobody waits for them."""
        runs: list[Run] = []
        if match.urgency is Urgency.PREFETCH:
            return runs, 0
        queued = dict(self._queued)
        for (tier, arriving), equal in groupby(repeats(steps), key=lambda one: _source(one[0])):
            count, name = sum(count for _, count in equal), tier.name if tier else DRAM
            tokens, nbytes = count * self._geometry.block_tokens, count * self._geometry.block_bytes
            runs.append(Run(name, tokens, nbytes, queued.pop(name, 0), arriving))
        return runs, self._gate.keeps(runs)

    def _length(self, runs: Sequence[Run]) -> int:
        """Blocks of ``runs``."""
        return sum(run.tokens for run in runs) // self._geometry.block_tokens

    def _try(self, match: TieredMatch, steps: Sequence[Step], first: int, count: int) -> None:
        """Read a run that was declined all the same, in the background: what its tier takes now."""
        now = self._clock()
        slots, gone = self._arena.take(min(count, self._half // 2), now)
        self.note_gone(gone)
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

    def _start(self, match: TieredMatch, steps: Sequence[Step], lacking: Sequence[int], slots: Sequence[Slot]) -> None:
        """Join what is on its way already, and send for the rest."""
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
                match.found[index] = self._coming[arrival.tier.name]
                match.awaited += 1
        self._send(match, steps, wanted, match.urgency)

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
            reading = readings.setdefault(tier.name, Reading(tier, now, self._queued[tier.name], trial))
            reading.batches += 1
            jobs.append((arrivals, self._geometry.asked(match.span, [match.start + index for index in batch]), reading))
        for arrivals, asked, reading in jobs:
            self._queued[reading.tier.name] += len(arrivals) * self._geometry.block_bytes
            if not reading.tier.workers.submit(urgency, partial(self._fetch, arrivals, asked, reading)):
                closed = [Outcome(Status.FAILED, 0, "closed")] * len(arrivals)
                self._arrive(arrivals, closed, [None] * len(arrivals), reading)

    def _read(self, reading: Reading, outcomes: Sequence[Outcome]) -> None:
        """One batch of a reading has ended; with the last the gate learns what it took."""
        name, nbytes = reading.tier.name, self._geometry.block_bytes
        self._queued[name] -= len(outcomes) * nbytes
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
                match.found[index] = why or self._hit[arrival.tier.name]
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
        if header is not None and self._clearing.stale(lot_of(header)):
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

    def _settle(self, match: TieredMatch) -> None:
        """Nothing is pending any more: fix the answer, let go of what lies behind it, count once, note the use."""
        if match.settled:
            return
        match.settled = True
        self._line.pop(match.request_id, None)
        hits = match.hits
        if hits < len(match.found):
            match.end(hits, match.found[hits])
        match.let_go(self._arena.pool, hits, self._clock())
        self.reserved += hits - match.reserved
        match.reserved = hits
        self._note_use(match, hits)
        self._note_lack(match.addresses[match.start + hits :])
        if match.hints.pin_seconds:
            self._pin(match.addresses[: match.start + hits], match.hints.pin_seconds)
        if match.urgency is Urgency.PREFETCH:
            self.release(match)
            return
        match.seconds = self._gate.seconds(DRAM, hits * self._geometry.block_bytes)
        self._history.tell(match.request_id, match.found)
        self._count(match.found)
        if match.start == 0:
            self._notice.settled(match.found)
        self._move_line()

    def _count(self, blocks: list[BlockFound]) -> None:
        given: dict[str, int] = {}
        misses: dict[str | Enum, int] = {}
        for block, count in repeats(blocks):
            if block.found is Found.HIT and block.tier:
                given[block.tier] = given.get(block.tier, 0) + count
            elif block.reason:
                misses[block.reason] = misses.get(block.reason, 0) + count
        below = sum(given.values())
        for name, metrics in [(DRAM, self._dram), *((tier.name, tier.metrics) for tier in self._tiers)]:
            below -= given.get(name, 0)
            metrics.settled(given.get(name, 0), {**misses, **({Reason.BELOW: below} if below else {})})

    def _pin(self, addresses: Sequence[Address], seconds: float) -> None:
        now = self._clock()
        places = [slot for slot in self._arena.pool.places(addresses) if slot is not None]
        self._dram.pins_refused(self._arena.pins.pin(places, now + seconds, now))
        for tier in self._tiers:
            tier.pin(addresses, now + seconds, now)

    def _note_lack(self, addresses: Sequence[Address]) -> None:
        """A match has missed these blocks, but for those that DRAM has behind the first it lacks."""
        choosy = [tier for tier in self._tiers if tier.chooses]
        if choosy:
            places = self._arena.pool.places(addresses)
            lacking = [address for address, slot in zip(addresses, places, strict=True) if slot is None]
            for tier in choosy:
                tier.lacked(lacking)

    def _note_use(self, match: TieredMatch, hits: int) -> None:
        """A match has reached these blocks: recency in every tier, and a second use for tiers that wait for one."""
        addresses = match.addresses[: match.start + hits]
        if not addresses:
            return
        now = self._clock()
        places = np.concatenate((self._arena.pool.find(addresses[: match.start]), match.slots[:hits]))
        self._arena.pool.touch(places[places != NONE].tolist(), now)
        for tier in self._tiers:
            if tier.usable:
                due = tier.touch(addresses, now)
                if due:
                    tier.workers.submit(Urgency.SAVE, partial(tier.refresh, due))
            tier.reached(addresses)
        if any(tier.offered_again for tier in self._tiers):
            for address, slot in zip(addresses, places.tolist(), strict=True):
                if slot != NONE and self._arena.pool.entry(slot) is not None:  # else dropped since
                    self._demoter.used_again(slot, address)
