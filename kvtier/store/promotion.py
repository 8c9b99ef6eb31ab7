"""The way up: matches, their leases, and the blocks that come up from lower tiers for them.

A match walks the chain; what is in DRAM is a HIT, what is below is PENDING while it is read, proved and committed. A match
takes every slot that it will load from, or read into, before its first byte moves. Matches of requests that are not yet
scheduled hold at most half of DRAM, in the order in which they asked; one that alone wants more is cut to that half.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import groupby

import numpy as np

from kvtier.abc.store import NO_HINTS, BlockFound, Found, Hints, Reason
from kvtier.cost import DRAM, Run
from kvtier.key import Address, Span
from kvtier.pool import Slot, SlotArray
from kvtier.store.arrivals import Arrivals, Step
from kvtier.store.clearing import Clearing
from kvtier.store.demotion import Demoter
from kvtier.store.expected import Expectations, Expected
from kvtier.store.history import repeats
from kvtier.store.match import TieredMatch, hit, missed
from kvtier.store.notice import Notice
from kvtier.store.parts import Parts
from kvtier.tier.lower import LowerTier
from kvtier.transfer.workers import Urgency
from kvtier.tree import NONE

LINE_SECONDS = 20.0
"""Longest wait behind other requests' leases: whoever computed instead would come after them all the same."""
IN_DRAM = Step()


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

    def __init__(self, parts: Parts, demoter: Demoter, clearing: Clearing, notice: Notice, deadline: float) -> None:
        """``deadline``: seconds that a match may wait for blocks on their way."""
        self.reserved = 0
        """Slots that matches of unscheduled requests hold or wait for."""
        self.matches: dict[str, TieredMatch] = {}
        self.arrivals = Arrivals(parts, demoter, clearing, self._settle)
        self.expected = Expectations(parts.clock)
        self._geometry = parts.geometry
        self._arena = parts.arena
        self._dram = parts.dram
        self._recorders = parts.recorders()
        self._tiers = parts.tiers
        self._history = parts.history
        self._gate = parts.gate
        self._lock = parts.lock
        self._clock = parts.clock
        self._demoter = demoter
        self._clearing = clearing
        self._notice = notice
        self._deadline = deadline
        self._half = max(1, parts.arena.pool.capacity // 2)
        self._line: OrderedDict[str, TieredMatch] = OrderedDict()
        self._moving = False
        self._below = {tier.name: Step(tier=tier) for tier in parts.tiers}

    def open(self, request_id: str, span: Span, start: int, urgency: Urgency, hints: Hints = NO_HINTS) -> TieredMatch:
        """A new live match, not advanced yet."""
        now = self._clock()
        latest = math.inf if hints.max_wait_ms is None else now + hints.max_wait_ms / 1000
        expected = self.expected.met(request_id, span, start)
        addresses = self._geometry.addresses(span) if expected is None else expected.addresses
        match = TieredMatch(
            self._lock, self.advance, self.release, request_id, span, start, addresses, latest, urgency, hints
        )
        match.wait_until(now + self._deadline)
        self.matches[request_id] = match
        if expected is not None:  # for answers that are not there yet it waits, as if it had asked itself
            match.present.update(expected.present)
            match.probing = bool(expected.unanswered)
            expected.match = match
        return match

    def expect(self, request_id: str, span: Span, start: int) -> Future[None] | None:
        """Ask the tiers that others share for what no tier of our own has, before the request is matched."""
        shared = [tier for tier in self._tiers if tier.probes and _answers(tier)]
        if not shared or request_id in self.matches or not self.expected.takes(request_id):
            return None
        if self._clearing.stale(span.origin):
            return None
        named = self._geometry.addresses(span)
        addresses = named[start:]
        lacking = np.flatnonzero(self._arena.pool.find(addresses) == NONE).tolist()
        known = self._own_places(addresses) if lacking else []
        index = next((index for index in lacking if all(places[index] is None for _, places in known)), None)
        if index is None:
            return None
        asked = self.expected.add(request_id, span, start, named, {tier.name for tier in shared})
        for tier in shared:
            if not self._ask(tier, addresses[index:], partial(self._told, asked, tier.name, index)):
                self._told(asked, tier.name, 0, 0)
        return asked.known

    def _own_places(self, addresses: Sequence[Address]) -> list[tuple[LowerTier, list[Slot | None]]]:
        """Per tier of our own that answers its place of each block; None where it has none."""
        return [(tier, tier.places(addresses)) for tier in self._tiers if not tier.probes and _answers(tier)]

    def _told(self, asked: Expected, name: str, index: int, present: int) -> None:
        """A tier has everything from block ``index`` on for so long."""
        asked.present[name] = index + present
        asked.unanswered.discard(name)
        if not asked.unanswered:
            asked.known.set_result(None)
        match = asked.match
        if match is not None and not match.settled:
            match.present[name] = index + present
            match.probing = bool(asked.unanswered)
            self.advance(match)

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
        match.found[: len(steps)] = [hit(DRAM)] * len(steps)
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
        known = self._own_places(addresses)
        shared = [tier for tier in answering if tier.probes]
        for index in lacking:
            address = addresses[index]
            arrival = self.arrivals.arriving.get(address)
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
        match.probing = True

        def answered(present: int) -> None:
            match.present[tier.name] = index + present
            match.probing = False
            self.advance(match)

        if not self._ask(tier, match.addresses[match.start + index :], answered, match.urgency):
            match.present[tier.name] = 0
            match.probing = False

    def _ask(
        self,
        tier: LowerTier,
        addresses: Sequence[Address],
        answered: Callable[[int], None],
        urgency: Urgency = Urgency.LOAD,
    ) -> bool:
        """Ask how many of the first of ``addresses`` a tier has; False where it takes no question.

        ``answered`` is called on a transfer thread, under the lock.
        """

        def probe() -> None:
            present = tier.probe(addresses)
            if not self._clearing.follow(tier):
                present = 0
            with self._lock:
                answered(present)

        return tier.workers.submit(urgency, probe)

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
        slots = self._demoter.make_room(len(wanted))
        if len(slots) < len(wanted):
            cut = wanted[len(slots)]
            match.let_go(self._arena.pool, cut, now)
            steps, end = steps[:cut], missed(Reason.NO_ROOM)
        match.reserved = len(steps)
        self.reserved += len(steps)
        if end is not None:
            match.end(len(steps), end)
        match.found[: len(steps)] = [hit(DRAM)] * len(steps)
        self.arrivals.join(match, steps, lacking, slots)
        self._act_on(match, walk.steps, runs, kept)
        if not match.awaited:
            self._settle(match)

    def _act_on(self, match: TieredMatch, steps: Sequence[Step], runs: Sequence[Run], kept: int) -> None:
        """What follows from loading the first ``kept`` runs: tries of tiers that lost, and how long to wait."""
        for index in self._gate.decided(runs, kept, self.arrivals.untried):
            count = min(self._length(runs[index : index + 1]), self._half // 2)
            self.arrivals.try_out(match, steps, self._length(runs[:index]), count)
        patience = self._gate.patience(runs[:kept]) if match.awaited and runs else None
        if patience is not None:
            match.wait_until(min(match.deadline, self._clock() + patience))

    def _judged(self, match: TieredMatch, steps: list[Step]) -> tuple[list[Run], int]:
        """The runs of a walk, and how many of the first are worth loading: all, where nobody waits for them."""
        runs: list[Run] = []
        if match.urgency is Urgency.PREFETCH:
            return runs, 0
        queued = dict(self.arrivals.queued)
        for (tier, arriving), equal in groupby(repeats(steps), key=lambda one: one[0].source()):
            count, name = sum(count for _, count in equal), tier.name if tier else DRAM
            tokens, nbytes = count * self._geometry.block_tokens, count * self._geometry.block_bytes
            runs.append(Run(name, tokens, nbytes, queued.pop(name, 0), arriving))
        return runs, self._gate.keeps(runs)

    def _length(self, runs: Sequence[Run]) -> int:
        """Blocks of ``runs``."""
        return sum(run.tokens for run in runs) // self._geometry.block_tokens

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
        for name, metrics in self._recorders:
            below -= given.get(name, 0)
            metrics.settled(given.get(name, 0), {**misses, **({Reason.BELOW: below} if below else {})})

    def _pin(self, addresses: Sequence[Address], seconds: float) -> None:
        now = self._clock()
        slots = self._arena.pool.resident(addresses)
        self._dram.pins_refused(self._arena.pins.pin(slots, now + seconds, now))
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
