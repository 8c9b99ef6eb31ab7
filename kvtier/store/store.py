"""The tiered store.

State (pools, leases, matches, policies) changes under one lock, in microseconds; bytes move outside it on transfer threads.
What is decided stands in `promotion`, `demotion`, `arena` and `history`. The copies of load and save stay here in one piece
with the verbs, because each step of theirs (taken, begun, taken back, ended) is a step of the same lock and the same books.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from itertools import takewhile

from kvtier.abc.medium import Outcome, SlotMedium, Status
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
from kvtier.codec.frame import FrameHeader
from kvtier.config import Verify
from kvtier.cost import DRAM, Gate
from kvtier.errors import MediumError
from kvtier.key import Adapter, Address, Identity, Span
from kvtier.metrics import TierMetrics
from kvtier.pool import Slot
from kvtier.quantity import counted
from kvtier.store.arena import Arena
from kvtier.store.audit import lease_faults
from kvtier.store.clearing import Clearing
from kvtier.store.demotion import Demoter
from kvtier.store.geometry import Geometry
from kvtier.store.history import LoadTiming
from kvtier.store.match import TieredMatch
from kvtier.store.notice import Notice
from kvtier.store.parts import Parts
from kvtier.store.promotion import Promoter
from kvtier.tier.lower import LowerTier, lot_of
from kvtier.transfer.copy import load_blocks, save_blocks
from kvtier.transfer.encoded import EncodedSlots
from kvtier.transfer.workers import Urgency, Workers

_log = logging.getLogger(__name__)

SAMPLE_SHARE = 0.01
"""Share of loads from DRAM whose content is proven where the tier's ``verify`` is ``sample``."""
KEEP_SECONDS = 0.25
RECENCY_SECONDS = 5.0
"""How often recency is written down in persistent tiers."""
DRAIN_SECONDS = 0.5
"""How long a drain waits for one tier before it looks whether that is still in use."""
CLOSED = "the store is closed"


def _said(verb: str, error: Exception) -> str:
    """What went wrong, in words; what no medium is meant to raise is logged as well."""
    if isinstance(error, MediumError):
        return str(error)
    _log.error("a %s failed", verb, exc_info=error)
    return f"{type(error).__name__}: {error}"


def _failed(count: int, why: str) -> list[Outcome]:
    return [Outcome(Status.FAILED, 0, why)] * count


class TieredStore(Store):
    """DRAM over any number of lower tiers, fastest first."""

    def __init__(
        self,
        geometry: Geometry,
        arena: Arena,
        dram: TierMetrics,
        tiers: Sequence[LowerTier],
        workers: Workers,
        gate: Gate,
        lock: threading.Lock,
        *,
        identity: Identity | None = None,
        verify: Verify = Verify.SAMPLE,
        deadline: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        seed: int = 0,
        keeper: bool = True,
        copier: Executor | None = None,
    ) -> None:
        """``lock`` is the one that the tiers use too; ``copier`` helps with DRAM copies and is closed with the store.

        ``identity`` is the engine's; without it the store works, and can neither clear by model nor say who else is there.

        ``keeper=False``: the caller calls ``keep`` itself. Every part comes from outside, more than a constructor should
        take, so that a test can turn threads, clock and chance by hand; ``open_store`` is how all others get a store.
        """
        self._copier = copier
        self.geometry = geometry
        self.block_bytes = geometry.block_bytes if geometry.codec is None else geometry.codec.block_bytes
        self._arena = arena
        self._dram = dram
        self._tiers = tuple(tiers)
        self._workers = workers
        self._lock = lock
        self._always = verify is Verify.ALWAYS
        self._clock = clock
        self._random = random.Random(seed)  # noqa: S311 - draws samples, guards nothing
        parts = Parts(geometry, arena, dram, tuple(tiers), workers, gate, lock, identity, clock)
        self._history = parts.history
        self._demoter = Demoter(parts)
        self._clearing = Clearing(parts, self._demoter)
        self._notice = Notice(identity, parts.tiers)
        self._promoter = Promoter(parts, self._demoter, self._clearing, self._notice, deadline)
        self._saving: dict[Address, Slot] = {}
        self._hinted: dict[Address, Hints] = {}
        """Of blocks that are being saved, the last hints that differ from none."""
        self._loading: dict[int, Sequence[Slot]] = {}
        self._gate = gate
        self._prefetches = 0
        self._recency_due = clock() + RECENCY_SECONDS
        self._closed = threading.Event()
        for tier in tiers:
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

    def prefetch(self, span: Span) -> None:
        with self._lock:
            self._prefetches += 1
            name = f"prefetch {self._prefetches}"
            self._promoter.advance(self._promoter.open(name, span, 0, Urgency.PREFETCH))

    def forget(self, request_id: str) -> None:
        with self._lock:
            match = self._promoter.matches.get(request_id)
            if match is not None:
                self._promoter.release(match)

    def explain(self, request_id: str) -> list[BlockFound]:
        with self._lock:
            live = self._promoter.matches.get(request_id)
            return list(live.found) if live is not None else self._history.told(request_id)

    def load(self, match: Match, into: SlotRange, after: Fence | None = None) -> Transfer:
        assert isinstance(match, TieredMatch), "a match of this store"
        future: Transfer = Future()
        with self._lock:
            slots = self._held_slots(match, len(into.slots))
            count = len(slots)
            self._arena.pool.acquire(slots)
            asked, queued = self._clock(), sum(map(len, self._loading.values())) * self.geometry.block_bytes
            self._loading[id(future)] = slots
            self._promoter.release(match)
            proven = [self._always or self._random.random() < SAMPLE_SHARE for _ in slots]
            sums = [
                self._arena.headers.content(slot) if prove else None for slot, prove in zip(slots, proven, strict=True)
            ]
        beyond = _failed(len(into.slots) - count, "the match no longer holds this block")

        def begun() -> bool:
            if future.set_running_or_notify_cancel():
                return True
            self._loaded(id(future), slots, _failed(count, "taken back"), 0.0)
            return False

        def load() -> None:
            if not begun():
                return
            start, idle = time.perf_counter(), 0.0
            try:
                if after is not None:
                    since = self._clock()
                    after.wait()
                    idle = self._clock() - since  # the computation before it, not the load
                outcomes = load_blocks(
                    self._arena.medium, slots, sums, self._seen(into.medium), into.slots[:count], workers=self._copier
                )
            except Exception as failed:  # noqa: BLE001 - of a fence or an engine's memory: whoever waits gets an answer
                outcomes = _failed(count, _said("load", failed))
            end = time.perf_counter()
            self._loaded(id(future), slots, outcomes, end - start)
            done = sum(outcome.done for outcome in outcomes)
            timing = LoadTiming(done * self.geometry.block_bytes, end - (match.began or start))
            try:
                with self._lock:
                    self._history.time(match.request_id, timing)
                    self._gate.observe_load(DRAM, timing.nbytes, self._clock() - asked - idle, queued)
            finally:  # whatever a gate makes of it: an engine's step waits for this
                future.set_result([*outcomes, *beyond])

        def closed() -> None:
            if begun():
                self._loaded(id(future), slots, _failed(count, CLOSED), 0.0)
                future.set_result(_failed(len(into.slots), CLOSED))

        if not self._workers.submit(Urgency.LOAD, load, closed):
            closed()
        return future

    def _seen(self, engine: SlotMedium) -> SlotMedium:
        """An engine's memory as blocks are kept."""
        codec = self.geometry.codec
        return engine if codec is None else EncodedSlots(engine, codec, self._copier)

    def _held_slots(self, match: TieredMatch, most: int) -> list[Slot]:
        """DRAM slots of the match's first hits, up to one that was dropped or did not prove since."""
        if not match.settled or match.released or self._clearing.stale(match.span.origin):
            return []
        slots = match.slots[: min(most, match.hits)].tolist()
        return list(takewhile(lambda slot: self._arena.pool.entry(slot) is not None, slots))

    def _loaded(self, name: int, slots: Sequence[Slot], outcomes: Sequence[Outcome], seconds: float) -> None:
        done = sum(outcome.done for outcome in outcomes)
        wrong = [slot for slot, outcome in zip(slots, outcomes, strict=True) if outcome.status is Status.CORRUPT]
        if done:
            self._dram.read(done, done * self.geometry.block_bytes, seconds)
        with self._lock:
            del self._loading[name]
            for slot in wrong:
                address = self._arena.pool.entry(slot)
                if address is not None:
                    self._history.refuse(address, Reason.SUM_FAILED)
                    self._arena.quarantine(slot)
            self._arena.pool.release(slots, self._clock())
        if wrong:
            self._dram.sum_failed(len(wrong))
            _log.warning("dram: %s did not prove, to be computed again", counted(len(wrong), "block"))

    def save(self, span: Span, source: SlotRange, after: Fence | None = None, *, hints: Hints = NO_HINTS) -> Transfer:
        future: Transfer = Future()
        addresses = self.geometry.addresses(span)
        outcomes = [Outcome(Status.DONE)] * len(addresses)
        taken, slots, left, why = self._places_to_save(span, addresses, hints)
        for index in left:
            outcomes[index] = Outcome(Status.FAILED, 0, why)

        def end(saved: Sequence[Outcome], sums: Sequence[bytes]) -> None:
            for index, outcome in zip(taken, saved, strict=True):
                outcomes[index] = outcome
            headers = self._headers(span, taken, saved, sums)
            self._saved([addresses[i] for i in taken], slots, headers)

        def begun() -> bool:
            if future.set_running_or_notify_cancel():
                return True
            end(_failed(len(taken), "taken back"), [])
            return False

        def save() -> None:
            if begun():  # else nothing may be read from the source, which holds something else by now
                end(*self._copied(SlotRange(source.medium, [source.slots[i] for i in taken]), slots, after))
                future.set_result(outcomes)

        def unsaved(reason: Reason) -> None:
            if begun():
                self._dram.save_dropped(reason, len(taken))
                end(_failed(len(taken), reason.value), [])
                future.set_result(outcomes)

        if not taken:
            future.set_result(outcomes)
        elif not self._workers.submit(Urgency.SAVE, save, partial(unsaved, Reason.CLOSING)):
            unsaved(Reason.CLOSING if self._closed.is_set() else Reason.QUEUE_FULL)
        return future

    def _places_to_save(
        self, span: Span, addresses: Sequence[Address], hints: Hints
    ) -> tuple[list[int], list[Slot], list[int], str]:
        """Which blocks are to be copied, into which slots, and which have no place, and why."""
        if self._clearing.stale(span.origin):
            self._dram.save_dropped(Reason.CLEARED, len(addresses))
            return [], [], list(range(len(addresses))), "cleared"
        with self._lock:
            there = self._arena.pool.places(addresses)
            new = [i for i, a in enumerate(addresses) if there[i] is None and a not in self._saving]
            if hints.no_store:
                self._history.went((addresses[i] for i in new), Reason.NO_STORE)
                self._dram.save_dropped(Reason.NO_STORE, len(new))
                return [], [], new, Reason.NO_STORE.value
            slots = self._demoter.make_room(len(new))
            taken, left = new[: len(slots)], new[len(slots) :]
            self._saving.update((addresses[i], slot) for i, slot in zip(taken, slots, strict=True))
            if hints != NO_HINTS:
                self._hinted.update((address, hints) for address in addresses if address in self._saving)
            self._history.went((addresses[i] for i in left), Reason.SAVE_DROPPED)
        if left:
            self._dram.save_dropped(Reason.NO_ROOM, len(left))
        return taken, slots, left, "no free or clean slot in DRAM"

    def _copied(
        self, source: SlotRange, slots: Sequence[Slot], after: Fence | None
    ) -> tuple[list[Outcome], list[bytes]]:
        """Copy blocks into DRAM slots: per block its outcome and its content sum."""
        start, copying = time.perf_counter(), self._clock()
        try:
            if after is not None:
                after.wait()
                copying = self._clock()
            saved, sums = save_blocks(
                self._seen(source.medium), source.slots, self._arena.medium, slots, workers=self._copier
            )
        except Exception as failed:  # noqa: BLE001 - of a fence or an engine's memory: whoever waits gets an answer
            saved, sums = _failed(len(slots), _said("save", failed)), []
        done = sum(outcome.done for outcome in saved)
        if done:
            nbytes = done * self.geometry.block_bytes
            self._dram.written(done, nbytes, time.perf_counter() - start)
            with self._lock:
                self._gate.observe_save(nbytes, self._clock() - copying)
        if done < len(saved):
            self._dram.save_dropped(Reason.WRITE_FAILED, len(saved) - done)
        return saved, sums

    def _headers(
        self, span: Span, taken: Sequence[int], saved: Sequence[Outcome], sums: Sequence[bytes]
    ) -> list[FrameHeader | None]:
        """A header for each block whose copy is whole."""
        geometry, created = self.geometry, time.time()
        return [
            FrameHeader.of(
                span,
                index,
                geometry.shard,
                geometry.layout,
                raw_bytes=geometry.block_bytes,
                content=sums[at],
                created=created,
            )
            if saved[at].done
            else None
            for at, index in enumerate(taken)
        ]

    def _saved(
        self, addresses: Sequence[Address], slots: Sequence[Slot], headers: Sequence[FrameHeader | None]
    ) -> None:
        """Copies have ended: show what is whole, tail first."""
        with self._lock:
            now = self._clock()
            shown: list[tuple[Slot, Address]] = []
            pinned: list[tuple[Slot, float]] = []
            for address, slot, header in reversed(list(zip(addresses, slots, headers, strict=True))):
                wanted = self._saving.get(address) == slot  # False: dropped meanwhile, and perhaps being saved again
                hints = NO_HINTS
                if wanted:
                    del self._saving[address]
                    hints = self._hinted.pop(address, NO_HINTS)
                if header is None or not wanted:
                    self._history.went([address], Reason.SAVE_DROPPED)
                elif self._clearing.stale(lot_of(header)):
                    self._history.went([address], Reason.CLEARED)
                elif self._arena.show(slot, address, header, now, hints.priority):
                    self._history.came(address)
                    shown.append((slot, address))
                    if hints.pin_seconds:
                        pinned.append((slot, hints.pin_seconds))
            for slot, seconds in reversed(pinned):
                self._dram.pins_refused(self._arena.pins.pin([slot], now + seconds, now))
            for slot, address in reversed(shown):
                self._demoter.owe_new(slot, address)
            self._arena.pool.release(slots, now)
            self._demoter.keep_reserve(self._held())

    def _held(self) -> int:
        """Slots that are neither free nor evictable for a while."""
        return self._promoter.reserved + sum(map(len, self._loading.values())) + len(self._saving)

    def drop(self, span: Span, reason: Reason) -> None:
        addresses = self.geometry.addresses(span)
        with self._lock:
            for address in addresses:
                slot = self._arena.pool.slot(address)
                if slot is not None:
                    self._arena.drop(slot, evicted=False)
                    self._arena.pool.release([slot], self._clock())
                self._saving.pop(address, None)
                self._hinted.pop(address, None)
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
            self._demoter.keep_reserve(self._held())
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
            saving, loading = len(self._saving), sum(map(len, self._loading.values()))
            owing = self._arena.owing_count
            now = self._clock()
            pinned = {DRAM: len(self._arena.pins), **{tier.name: tier.pinned(now) for tier in self._tiers}}
            choices = {DRAM: self._arena.pool.choice(), **{tier.name: tier.choice() for tier in self._tiers}}
        chosen = {name: choice._asdict() for name, choice in choices.items() if choice is not None}
        for name, metrics in self._recorders():
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

    def _recorders(self) -> Iterable[tuple[str, TierMetrics]]:
        return [(DRAM, self._dram), *((tier.name, tier.metrics) for tier in self._tiers)]

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
            held += [*self._loading.values(), self._saving.values(), self._arena.quarantined]
            held.append(arrival.slot for arrival in self._promoter.arrivals.arriving.values())
            for slots in held:
                for slot in slots:
                    expected[slot] += 1
            idle = self._workers.idle and all(tier.workers.idle for tier in self._tiers)
            settled = idle and not self._loading and not self._saving
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
