"""Clearing: blocks are put out of reach at once, and their bytes are reclaimed behind.

Scopes are cleared by an epoch: keys are of another epoch from then on, and what still comes under an older one is neither
found nor kept. One tier is cleared by emptying its map. What is out of reach is removed a bounded step at a time, DRAM by the
keeper and lower tiers by their own threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial

from kvtier.abc.store import Cleared, ClearedTier, Reason, Selection
from kvtier.cost import DRAM
from kvtier.errors import RequestError
from kvtier.key import Adapter, Address, Lot, Origin, adapter_id
from kvtier.store.demotion import Demoter
from kvtier.store.epochs import Epochs
from kvtier.store.parts import Parts
from kvtier.store.records import ScopeRecord, Scopes, fields_of
from kvtier.tier.lower import LowerTier
from kvtier.transfer.workers import Urgency

_log = logging.getLogger(__name__)

STEPS = 64
"""Steps of one upkeep."""
MOST_TURNS = 8
"""Reads of a tier's epochs until it is seen to have all that it was told."""
MOST_MODELS = 1 << 14
STEP = 256
"""Blocks of DRAM that go, and slots that are looked at, while the lock is held once."""
ASK_SECONDS = 1.0
"""How often a shared tier is asked for what others have cleared where no probe does, and a tier is told what it lacks."""
EXPLAIN_SECONDS = 3600.0
"""For how long after a clear the keys of new requests are made under the former epoch as well, to explain their misses."""


class _Place:
    """How far one tier has come."""

    def __init__(self) -> None:
        self.told = -1
        """Changes of the epochs up to which the tier knows all."""
        self.swept = 0
        """Changes of the epochs up to which its cleared blocks are gone."""
        self.began: int | None = None
        """What ``swept`` is to be when the search that is under way has ended; what is cleared meanwhile is for the next."""
        self.asked = float("-inf")
        self.dirty = False
        """Whether what a clear of the whole tier has left is still to be removed."""
        self.busy = False

    def left(self, swept: int) -> bool:
        """Whether anything may be left of what was cleared up to ``swept``, or of a clear of the whole tier."""
        return self.dirty or self.began is not None or self.swept != swept


class Clearing:
    """Epochs, the records of scopes, and the blocks that are out of reach. Thread-safe; takes the store's lock."""

    def __init__(self, parts: Parts, demoter: Demoter) -> None:
        self.epochs = Epochs()
        self._geometry = parts.geometry
        self._arena = parts.arena
        self._dram = parts.dram
        self._tiers = parts.tiers
        self._history = parts.history
        self._lock = parts.lock
        self._clock = parts.clock
        self._demoter = demoter
        identity = parts.identity
        self._model = None if identity is None else identity.model
        self._models: dict[bytes, str] = {} if identity is None else {identity.digest(): identity.model}
        self._scopes = Scopes([tier.name for tier in parts.tiers])
        self._places = {tier.name: _Place() for tier in parts.tiers}
        self._starting = threading.Lock()
        for tier in parts.tiers:
            tier.newest_epoch, tier.teach = 0, partial(self.learn, tier)
        self._swept = 0
        self._sweep_began = 0
        self._next_slot = 0
        self._explained = 0
        self._explained_until = parts.clock() + EXPLAIN_SECONDS

    def epoch(self, tenant: bytes, adapter: Adapter | None) -> int:
        """The epoch that keys of a new request are made with; from now on its scope is known."""
        name = None if adapter is None else adapter.name
        epoch = self.epochs.of(self._model, tenant, adapter_id(name))
        if self._model is not None:
            self._scopes.seen(self._model, tenant, adapter, epoch)
        return epoch

    def former_epoch(self, tenant: bytes, adapter: Adapter | None) -> int | None:
        """The epoch that a scope had before it was last cleared, for as long as it is remembered what blocks it had."""
        if self._clock() > self._explained_until:
            return None
        return self.epochs.former(self._model, tenant, adapter_id(None if adapter is None else adapter.name))

    def cleared(self, former: Address) -> bool:
        """Whether a block was there under its former name, and went, or is to go, because it was cleared. Under the lock."""
        there = self._arena.pool.slot(former) is not None or any(tier.holds(former) for tier in self._tiers)
        return there or self._history.why(former) is Reason.CLEARED

    def stale(self, lot: Lot | Origin) -> bool:
        """Whether blocks of that lot have been cleared."""
        lot = lot.lot if isinstance(lot, Origin) else lot
        return self.epochs.stale(lot, self._models.get(lot.identity))

    def learn(self, tier: LowerTier) -> str | None:
        """Take over what a tier knows and tell it what it lacks; why not, where that failed. Waits for the tier."""
        why: str | None = None
        for _ in range(MOST_TURNS):
            rows = tier.epochs()
            if rows is None:
                return tier.degraded or "it could not say what has been cleared"
            self.epochs.merge(rows)
            tier.newest_epoch = max(rows.values(), default=0)
            changes = self.epochs.changes
            wanted, implied = self.epochs.lacking(rows)
            self._learn_models(tier)
            if not wanted and not implied:  # seen to be there: what it was told it may have lost at once, with the rest
                self._places[tier.name].told = changes
                return None
            why = tier.raise_epochs(wanted, implied)
            if why is not None:
                break
        return why or "others keep changing what has been cleared"

    def follow(self, tier: LowerTier) -> bool:
        """After a probe: whether all that its tier has to say of clears is known."""
        return not tier.news or self.learn(tier) is None

    def clear(self, what: Selection, tier: str | None) -> Cleared:
        """As ``Store.clear``."""
        if tier is not None:
            return self._clear_tier(tier)
        for each in self._tiers:
            self.learn(each)
        epoch = self.epochs.clear(what)
        trouble = {each.name: self.learn(each) for each in self._tiers}
        blocks: dict[str, int | None] = {DRAM: self._stale_in_dram()}
        blocks |= {each.name: each.stale(self.stale) for each in self._tiers}
        left = {name: self._left(name, count, trouble.get(name)) for name, count in blocks.items()}
        for name, why in trouble.items():
            if why is not None:
                _log.warning("%s: could not be told what was cleared, and is told as soon as it can be: %s", name, why)
        texts = [text for each in self._tiers for text in each.records("scope").items()]
        known = self._scopes.selected(what, texts)
        _log.info("cleared %s: epoch %d", what, epoch)
        return Cleared(epoch, tuple({**fields, "epoch": epoch} for fields in known), left)

    def _left(self, name: str, blocks: int | None, trouble: str | None) -> ClearedTier:
        return ClearedTier(blocks, None if blocks is None else blocks * self._geometry.block_bytes, trouble)

    def _clear_tier(self, name: str) -> Cleared:
        names = [DRAM, *(tier.name for tier in self._tiers)]
        if name not in names:
            raise RequestError(f"tier {name!r} does not exist here; there are {', '.join(names)}")
        if name == DRAM:
            return Cleared(None, (), {DRAM: self._left(DRAM, self._empty_dram(), None)})
        tier = next(each for each in self._tiers if each.name == name)
        with self._lock:
            blocks = tier.counts().get("ready")
        done = tier.clear()
        with self._lock:
            self._arena.not_below(self._demoter.bits[name])
        self._places[name].dirty = True
        self._start_removing(tier)
        why = None if done else tier.degraded or "it could not be cleared"
        _log.info("cleared tier %s", name)
        return Cleared(None, (), {name: self._left(name, blocks, why)})

    def _empty_dram(self) -> int:
        with self._lock:
            entries = self._arena.pool.entries()
        gone = 0
        for start in range(0, len(entries), STEP):
            with self._lock:
                gone += self._drop(entries[start : start + STEP])
        return gone

    def _drop(self, entries: Sequence[Address]) -> int:
        """Take blocks out of DRAM, whoever holds them; how many were there. Under the lock."""
        found = [(entry, slot) for entry, slot in zip(entries, self._arena.pool.places(entries), strict=True)]
        there = [(entry, slot) for entry, slot in found if slot is not None]
        for _, slot in there:
            self._arena.drop(slot, evicted=False)
        self._arena.pool.release([slot for _, slot in there], self._clock())
        self._history.went((entry for entry, _ in there), Reason.CLEARED)
        if there:
            self._dram.evicted(Reason.CLEARED, len(there))
        return len(there)

    def _learn_models(self, tier: LowerTier) -> None:
        """Which model the blocks of other engines in a tier are of."""
        found = {digest: (fields_of(text) or {}).get("model") for digest, text in tier.records("identity").items()}
        named = {digest: model for digest, model in found.items() if isinstance(model, str)}
        if len(self._models) + len(named) > MOST_MODELS:
            self._models = {digest: model for digest, model in self._models.items() if model == self._model}
        self._models = {**named, **self._models}

    def _stale_in_dram(self) -> int:
        count = 0
        for start in range(0, self._arena.pool.capacity, STEP):
            with self._lock:
                count += len(self._arena.cleared(start, start + STEP, self.stale))
        return count

    @property
    def finished(self) -> bool:
        """Whether nothing that can be reached is left of what was cleared."""
        changes = self.epochs.changes
        usable = [self._places[tier.name] for tier in self._tiers if tier.usable]
        return self._swept == changes and not any(place.left(changes) for place in usable)

    def keep(self) -> None:
        """A step of the upkeep: tell tiers what they lack, ask those that others share, remove what is out of reach."""
        if self._explained != self.epochs.changes:
            self._explained = self.epochs.changes
            self._explained_until = self._clock() + EXPLAIN_SECONDS
        for tier in self._tiers:
            place = self._places[tier.name]
            lags = place.told != self.epochs.changes or tier.news
            if tier.usable and (lags or tier.probes) and self._clock() - place.asked >= ASK_SECONDS:
                place.asked = self._clock()
                tier.workers.submit(Urgency.PREFETCH, partial(self._ask, tier))
            for record in self._scopes.unwritten(tier.name) if tier.usable else []:
                if not tier.workers.submit(Urgency.SAVE, partial(self._record, tier, record)):
                    self._scopes.owe(tier.name, record)
        for _ in range(STEPS):
            if self._swept == self.epochs.changes:
                break
            self._sweep_dram()
        for tier in self._tiers:  # after DRAM, out of which cleared blocks may go down until they are gone there
            if self._places[tier.name].left(self._swept):
                self._start_removing(tier)

    def _ask(self, tier: LowerTier) -> None:
        """On a transfer thread."""
        if tier.probes:
            tier.probe([])
        if tier.news or self._places[tier.name].told != self.epochs.changes:
            self.learn(tier)

    def _record(self, tier: LowerTier, record: ScopeRecord) -> None:
        """On a transfer thread."""
        if not tier.remember("scope", record.digest, record.text()):
            self._scopes.owe(tier.name, record)

    def _start_removing(self, tier: LowerTier) -> None:
        place = self._places[tier.name]
        with self._starting:
            if place.busy or not tier.usable:
                return
            place.busy = True
        if not tier.workers.submit(Urgency.SAVE, partial(self._remove, tier)):
            place.busy = False

    def _remove(self, tier: LowerTier) -> None:
        """On a transfer thread: one step in one tier."""
        place = self._places[tier.name]
        if place.began is None:
            place.began, place.dirty = self._swept, False
        try:
            gone, finished = tier.reclaim(self.stale)
            with self._lock:
                self._history.went(gone, Reason.CLEARED)
            if finished:
                place.swept, place.began = place.began, None
        finally:
            place.busy = False

    def _sweep_dram(self) -> None:
        """Drop some of the blocks that have been cleared, and have the tiers drop them as well."""
        if self._next_slot == 0:
            self._sweep_began = self.epochs.changes
        with self._lock:
            stop = min(self._next_slot + STEP, self._arena.pool.capacity)
            gone = self._arena.cleared(self._next_slot, stop, self.stale)
            self._drop(gone)
            for tier in self._tiers:
                self._demoter.outboxes[tier.name].cancel(gone)
        self._next_slot = stop
        if stop == self._arena.pool.capacity:
            self._next_slot = 0
            self._swept = self._sweep_began
