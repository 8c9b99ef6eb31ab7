"""The tiered store.

State (pools, leases, matches, policies) changes under one lock, in microseconds; bytes move outside it on transfer threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future
from functools import partial

from kvtier.abc.store import (
    NO_HINTS,
    BlockFound,
    Cleared,
    Fence,
    Hints,
    Match,
    Reason,
    Selection,
    SlotRange,
    Store,
    Transfer,
)
from kvtier.config import Verify
from kvtier.cost import DRAM
from kvtier.key import Adapter, Span
from kvtier.pool import Slot
from kvtier.store.audit import lease_faults
from kvtier.store.clearing import Clearing
from kvtier.store.copies import Copies
from kvtier.store.demotion import Demoter
from kvtier.store.history import LoadTiming
from kvtier.store.match import TieredMatch
from kvtier.store.notice import Notice
from kvtier.store.parts import Parts
from kvtier.store.promotion import Promoter
from kvtier.tier.lower import LowerTier
from kvtier.transfer.workers import Urgency

_log = logging.getLogger(__name__)

KEEP_SECONDS = 0.25
RECENCY_SECONDS = 5.0
"""How often recency is written down in persistent tiers."""
DRAIN_SECONDS = 0.5
"""How long a drain waits for one tier before it looks whether that is still in use."""


class TieredStore(Store):
    """DRAM over any number of lower tiers, fastest first."""

    def __init__(
        self,
        parts: Parts,
        *,
        verify: Verify = Verify.SAMPLE,
        deadline: float = 2.0,
        keeper: bool = True,
        copier: Executor | None = None,
    ) -> None:
        """``copier`` helps with DRAM copies and is closed with the store. ``keeper=False``: the caller calls ``keep`` itself.

        ``open_store`` is how all but tests get a store.
        """
        self._copier = copier
        self.geometry = geometry = parts.geometry
        self.block_bytes = geometry.block_bytes if geometry.codec is None else geometry.codec.block_bytes
        self._arena = parts.arena
        self._dram = parts.dram
        self._recorders = parts.recorders()
        self._tiers = parts.tiers
        self._workers = parts.workers
        self._lock = parts.lock
        self._clock = parts.clock
        self._gate = parts.gate
        self._history = parts.history
        self._demoter = Demoter(parts)
        self._clearing = Clearing(parts, self._demoter)
        self._notice = Notice(parts.identity, parts.tiers)
        self._promoter = Promoter(parts, self._demoter, self._clearing, self._notice, deadline)
        self._copies = Copies(parts, self._demoter, self._clearing, self._promoter, verify=verify, copier=copier)
        self._prefetches = 0
        self._recency_due = self._clock() + RECENCY_SECONDS
        self._closed = threading.Event()
        for tier in self._tiers:
            self._clearing.learn(tier)
        self._keeper = threading.Thread(target=self._keep_on, name="kvtier-keeper", daemon=True) if keeper else None
        if self._keeper is not None:
            self._keeper.start()

    def match(self, request_id: str, span: Span, start: int = 0, *, hints: Hints = NO_HINTS) -> Match:
        promoter = self._promoter
        with self._lock:
            live = promoter.matches.get(request_id)
            if live is not None and (live.span is span or live.span == span) and live.start == start:
                promoter.advance(live)
                return live
            if live is not None:
                promoter.release(live)
            match = promoter.open(request_id, span, start, Urgency.LOAD, hints)
            if hints.no_load:
                promoter.refuse(match, Reason.NO_LOAD)
            else:
                promoter.advance(match)
            return match

    def expect(self, request_id: str, span: Span, start: int = 0) -> Future[None] | None:
        with self._lock:
            return self._promoter.expect(request_id, span, start)

    def prefetch(self, span: Span) -> None:
        with self._lock:
            self._prefetches += 1
            name = f"prefetch {self._prefetches}"
            self._promoter.advance(self._promoter.open(name, span, 0, Urgency.PREFETCH))

    def forget(self, request_id: str) -> None:
        with self._lock:
            self._promoter.expected.forget(request_id)
            match = self._promoter.matches.get(request_id)
            if match is not None:
                self._promoter.release(match)

    def explain(self, request_id: str) -> list[BlockFound]:
        with self._lock:
            live = self._promoter.matches.get(request_id)
            return list(live.found) if live is not None else self._history.told(request_id)

    def load(self, match: Match, into: SlotRange, after: Fence | None = None) -> Transfer:
        assert isinstance(match, TieredMatch), "a match of this store"
        return self._copies.load(match, into, after)

    def save(self, span: Span, source: SlotRange, after: Fence | None = None, *, hints: Hints = NO_HINTS) -> Transfer:
        return self._copies.save(span, source, after, hints=hints)

    def drop(self, span: Span, reason: Reason) -> None:
        addresses = self.geometry.addresses(span)
        with self._lock:
            for address in addresses:
                slot = self._arena.pool.slot(address)
                if slot is not None:
                    self._arena.drop(slot, evicted=False)
                    self._arena.pool.release([slot], self._clock())
                self._copies.forget(address)
                self._promoter.arrivals.drop(address, reason)
                self._history.refuse(address, reason)
            for tier in self._tiers:
                self._demoter.outboxes[tier.name].cancel(addresses)
                tier.forget(addresses)
                tier.workers.submit(Urgency.PREFETCH, partial(tier.delete, addresses))

    def epoch(self, tenant: bytes, adapter: Adapter | None = None) -> int:
        return self._clearing.epoch(tenant, adapter)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        with self._lock:
            self._gate.observe_prefill(tokens, seconds)

    def demotes(self, blocks: int, unsaved: int) -> bool:
        tokens, nbytes = self.geometry.block_tokens, self.geometry.block_bytes
        with self._lock:
            return self._gate.demotes(blocks * tokens, blocks * nbytes, unsaved * nbytes)

    def former_epoch(self, tenant: bytes, adapter: Adapter | None = None) -> int | None:
        return self._clearing.former_epoch(tenant, adapter)

    def clear(self, what: Selection, tier: str | None = None) -> Cleared:
        return self._clearing.clear(what, tier)

    def reclaim(self, timeout: float) -> bool:
        """Remove what has been cleared before this returns, running queued jobs in this thread; whether all of it went.

        For a store without threads of its own.
        """
        end = time.monotonic() + timeout
        while not self._clearing.finished and time.monotonic() < end:
            self._clearing.keep()
            while any(each.run_one() for each in (self._workers, *(tier.workers for tier in self._tiers))):
                pass
        return self._clearing.finished

    def empty(self, tier: str) -> int:
        """Take out of one tier every block that nobody holds; how many. Other tiers keep theirs. Blocks on the device's I/O.

        DRAM gives up only what is clean: ``drain`` first where a lower tier is to have everything.
        """
        with self._lock:
            if tier == DRAM:
                free = self._arena.pool.free
                slots = self._demoter.make_room(self._arena.pool.evictable + free)
                self._arena.pool.release(slots, self._clock())
                return len(slots) - free
        return self._lower(tier).empty()

    def held(self, tier: str) -> int:
        """Blocks that a tier with slots now shows."""
        with self._lock:
            counts = self._arena.pool.counts() if tier == DRAM else self._lower(tier).counts()
        return counts["ready"]

    def io(self, tier: str) -> str:
        """How a tier's bytes move now: ``memory``, ``direct``, ``buffered`` or ``socket``."""
        return self._arena.medium.io if tier == DRAM else self._lower(tier).medium.io

    def drop_page_caches(self) -> None:
        """Make the next reads of buffered files come from their device, for measurements."""
        for tier in self._tiers:
            tier.drop_page_cache()

    def _lower(self, name: str) -> LowerTier:
        return next(tier for tier in self._tiers if tier.name == name)

    def timing(self, request_id: str) -> LoadTiming | None:
        """How long the request's last load took; None where it had none or it is long ago."""
        with self._lock:
            return self._history.timed(request_id)

    def keep(self) -> None:
        """One round of upkeep: deadlines, the reserve, degraded tiers, recency. A thread calls it; tests may."""
        with self._lock:
            self._arena.pins.expire(self._clock())
            for match in list(self._promoter.matches.values()):
                self._promoter.advance(match)
            self._demoter.keep_reserve(self._copies.occupied)
            flush = self._clock() >= self._recency_due
            if flush:
                self._recency_due = self._clock() + RECENCY_SECONDS
            strange = self._notice.due
        for tier in self._tiers:
            if not tier.usable:
                tier.workers.submit(Urgency.PREFETCH, tier.revive)
            if flush and not tier.probes:
                tier.workers.submit(Urgency.SAVE, partial(tier.refresh, []))
        if strange:
            self._look_for_strangers()
        self._clearing.keep()

    def _look_for_strangers(self) -> None:
        usable = [tier for tier in self._tiers if tier.usable]
        if usable:
            usable[0].workers.submit(Urgency.SAVE, self._notice.look)

    def _keep_on(self) -> None:
        while not self._closed.wait(KEEP_SECONDS):
            try:
                self.keep()
            except Exception:  # noqa: BLE001 - a bug of ours must not end the upkeep
                _log.exception("upkeep failed")

    def stats(self) -> dict[str, object]:
        with self._lock:
            counts = {DRAM: self._arena.pool.counts(), **{tier.name: tier.counts() for tier in self._tiers}}
            waiting = {tier.name: len(self._demoter.outboxes[tier.name].slots) for tier in self._tiers}
            live, reserved = len(self._promoter.matches), self._promoter.reserved
            arriving = Counter(arrival.tier.name for arrival in self._promoter.arrivals.arriving.values())
            saving, loading = self._copies.saving, self._copies.loading
            owing = self._arena.owing_count
            now = self._clock()
            pinned = {DRAM: len(self._arena.pins), **{tier.name: tier.pinned(now) for tier in self._tiers}}
            choices = {DRAM: self._arena.pool.choice(), **{tier.name: tier.choice() for tier in self._tiers}}
        chosen = {name: choice._asdict() for name, choice in choices.items() if choice is not None}
        for name, metrics in self._recorders:
            metrics.pinned(pinned[name])
            if name in chosen:
                metrics.chose(**chosen[name])
            if counts[name]:
                metrics.blocks(**counts[name])
        self._dram.leased(live, reserved)
        self._dram.queued("save", saving)
        self._dram.queued("load", loading)
        for tier in self._tiers:
            tier.metrics.queued("save", waiting[tier.name])
            tier.metrics.queued("load", arriving[tier.name])
        return {
            "note": self._notice.text,
            "blocks": counts,
            "waiting": waiting,
            "matches": live,
            "leased": reserved,
            "arriving": sum(arriving.values()),
            "saving": saving,
            "loading": loading,
            "owing": owing,
            "pinned": pinned,
            "policy": chosen,
        }

    def health(self) -> dict[str, str]:
        wrong = {tier.name: tier.degraded or tier.silent for tier in self._tiers}
        return {DRAM: "ok", **{name: "ok" if why is None else f"degraded: {why}" for name, why in wrong.items()}}

    def notes(self) -> Sequence[str]:
        return [self._notice.text] if self._notice.text is not None else []

    def check_integrity(self) -> list[str]:
        with self._lock:
            found = self._arena.check()
            for tier in self._tiers:
                found += [f"{tier.name}: {wrong}" for wrong in tier.check()]
            expected = [0] * self._arena.pool.capacity
            held: list[Iterable[Slot]] = [match.held.tolist() for match in self._promoter.matches.values()]
            held += [outbox.slots for outbox in self._demoter.outboxes.values()]
            held += [*self._copies.held(), self._arena.quarantined]
            held.append(arrival.slot for arrival in self._promoter.arrivals.arriving.values())
            for slots in held:
                for slot in slots:
                    expected[slot] += 1
            idle = self._workers.idle and all(tier.workers.idle for tier in self._tiers)
            settled = idle and not self._copies.loading and not self._copies.saving
            found += lease_faults(DRAM, self._arena.pool, expected, settled=settled)
            if self._promoter.reserved != sum(match.reserved for match in self._promoter.matches.values()):
                found.append("slots reserved for matches do not add up")
            return found

    def drain(self, timeout: float) -> bool:
        end = time.monotonic() + timeout
        while True:
            idle = self._workers.wait_idle(max(0.0, end - time.monotonic()))
            with self._lock:
                owing = self._demoter.flush()
            for tier in [tier for tier in self._tiers if tier.usable]:  # the others are only being tried again
                idle = tier.workers.wait_idle(max(0.0, min(end - time.monotonic(), DRAIN_SECONDS))) and idle
            with self._lock:
                owing = self._arena.owing_count
            if idle and not owing:
                break
            if time.monotonic() >= end:
                return False
        for tier in self._tiers:
            tier.refresh([])
        return True

    def close(self) -> None:
        self._closed.set()
        if self._keeper is not None and self._keeper is not threading.current_thread():
            self._keeper.join(timeout=10)
        self._workers.close()
        if self._copier is not None:
            self._copier.shutdown()
        for tier in self._tiers:
            tier.close()
        self._arena.medium.close()
