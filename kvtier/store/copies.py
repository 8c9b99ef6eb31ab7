"""The copies of load and save, between DRAM and an engine's memory.

Both stand in one class, because each step of theirs (taken, begun, taken back, ended) is a step over the same books: which slots
are being read, which are being written, and how many that makes.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from itertools import takewhile

from kvtier.abc.medium import Outcome, SlotMedium, Status
from kvtier.abc.store import NO_HINTS, Fence, Hints, Reason, SlotRange, Transfer
from kvtier.codec.frame import FrameHeader
from kvtier.config import Verify
from kvtier.cost import DRAM
from kvtier.errors import MediumError
from kvtier.key import Address, Span
from kvtier.pool import Slot
from kvtier.quantity import counted
from kvtier.store.clearing import Clearing
from kvtier.store.demotion import Demoter
from kvtier.store.history import LoadTiming
from kvtier.store.match import TieredMatch
from kvtier.store.parts import Parts
from kvtier.store.promotion import Promoter
from kvtier.transfer.copy import load_blocks, save_blocks
from kvtier.transfer.encoded import EncodedSlots
from kvtier.transfer.workers import Urgency

_log = logging.getLogger(__name__)

SAMPLE_SHARE = 0.01
"""Share of loads from DRAM whose content is proven where the tier's ``verify`` is ``sample``."""
CLOSED = "the store is closed"


def _said(verb: str, error: Exception) -> str:
    """What went wrong, in words; what no medium is meant to raise is logged as well."""
    if isinstance(error, MediumError):
        return str(error)
    _log.error("a %s failed", verb, exc_info=error)
    return f"{type(error).__name__}: {error}"


def _failed(count: int, why: str) -> list[Outcome]:
    return [Outcome(Status.FAILED, 0, why)] * count


class Copies:
    """Blocks that are being loaded or saved. Thread-safe; takes the store's lock."""

    def __init__(
        self,
        parts: Parts,
        demoter: Demoter,
        clearing: Clearing,
        promoter: Promoter,
        *,
        verify: Verify,
        copier: Executor | None,
    ) -> None:
        """``copier`` helps with the copies."""
        self._geometry = parts.geometry
        self._arena = parts.arena
        self._dram = parts.dram
        self._workers = parts.workers
        self._history = parts.history
        self._gate = parts.gate
        self._lock = parts.lock
        self._clock = parts.clock
        self._demoter = demoter
        self._clearing = clearing
        self._promoter = promoter
        self._always = verify is Verify.ALWAYS
        self._random = random.Random(0)  # noqa: S311 - draws the loads that are proven, guards nothing
        self._copier = copier
        self._saving: dict[Address, Slot] = {}
        self._hinted: dict[Address, Hints] = {}
        """Of blocks that are being saved, the last hints that differ from none."""
        self._loading: dict[int, Sequence[Slot]] = {}

    @property
    def loading(self) -> int:
        """DRAM slots that are being read."""
        return sum(map(len, self._loading.values()))

    @property
    def saving(self) -> int:
        """DRAM slots that are being written."""
        return len(self._saving)

    @property
    def occupied(self) -> int:
        """DRAM slots that are neither free nor evictable for a while."""
        return self._promoter.reserved + self.loading + self.saving

    def held(self) -> list[Iterable[Slot]]:
        """The slots of each load, and those of all saves."""
        return [*self._loading.values(), self._saving.values()]

    def forget(self, address: Address) -> None:
        """A block that is being saved is not to be shown. Under the lock."""
        self._saving.pop(address, None)
        self._hinted.pop(address, None)

    def load(self, match: TieredMatch, into: SlotRange, after: Fence | None = None) -> Transfer:
        future: Transfer = Future()
        with self._lock:
            slots = self._held_slots(match, len(into.slots))
            count = len(slots)
            self._arena.pool.acquire(slots)
            asked, queued = self._clock(), self.loading * self._geometry.block_bytes
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
            timing = LoadTiming(done * self._geometry.block_bytes, end - (match.began or start))
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
        codec = self._geometry.codec
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
            self._dram.read(done, done * self._geometry.block_bytes, seconds)
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
        addresses = self._geometry.addresses(span)
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
            unsaved(Reason.CLOSING if self._workers.closed else Reason.QUEUE_FULL)
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
            nbytes = done * self._geometry.block_bytes
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
        geometry, created = self._geometry, time.time()
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
                elif self._clearing.stale(header.lot):
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
            self._demoter.keep_reserve(self.occupied)
