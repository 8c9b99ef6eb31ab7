"""The bundled engine's connector: both halves over one store in the same process."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

from kvtier.abc.connector import (
    Finished,
    KVConnector,
    LoadPlan,
    SavePlan,
    SchedulerConnector,
    StepPlan,
    WorkerConnector,
)
from kvtier.abc.medium import LayeredSlots, SlotMedium
from kvtier.abc.store import NO_HINTS, Fence, Hints, Match, Reason, SlotRange, Store, Transfer
from kvtier.key import Adapter, Span

_log = logging.getLogger(__name__)

SAVE_SHARE = 0.05
"""Share of HBM that running saves may hold."""
START_SECONDS = 2.0
"""A load that no thread has begun by then is taken back and its blocks are computed."""


class BundledScheduler(SchedulerConnector):
    """Asks the store and plans."""

    def __init__(self, store: Store, block_tokens: int, most_saving: int) -> None:
        """``most_saving``: HBM slots that running saves may hold."""
        self._store = store
        self._block_tokens = block_tokens
        self._most_saving = most_saving
        self._matches: dict[str, Match] = {}
        self._loads: list[LoadPlan] = []
        self._saves: list[SavePlan] = []
        self._saving: dict[str, int] = {}
        self._saving_slots = 0

    def get_num_new_matched_tokens(
        self, request_id: str, span: Span, computed_blocks: int = 0, hints: Hints = NO_HINTS
    ) -> int | None:
        match = self._store.match(request_id, span, computed_blocks, hints=hints)
        self._matches[request_id] = match
        if match.pending:
            return None
        return match.hits * self._block_tokens

    def expect(self, request_id: str, span: Span, computed_blocks: int = 0) -> Future[None] | None:
        return self._store.expect(request_id, span, computed_blocks)

    def clear_epoch(self, tenant: bytes, adapter: Adapter | None = None) -> int:
        return self._store.epoch(tenant, adapter)

    def former_epoch(self, tenant: bytes, adapter: Adapter | None = None) -> int | None:
        return self._store.former_epoch(tenant, adapter)

    def update_state_after_alloc(self, request_id: str, slots: Sequence[int], num_tokens: int) -> None:
        match = self._matches.pop(request_id, None)
        if match is None:
            return
        if num_tokens:
            self._loads.append(LoadPlan(request_id, match.span, tuple(slots), match.start))
        else:
            match.release()

    def offer(self, request_id: str, span: Span, slots: Sequence[int], hints: Hints = NO_HINTS) -> int:
        count = min(len(slots), self._most_saving - self._saving_slots)
        if count <= 0:
            return 0
        self._saves.append(SavePlan(request_id, span.head(count), tuple(slots[:count]), hints))
        self._saving[request_id] = self._saving.get(request_id, 0) + count
        self._saving_slots += count
        return count

    def build_connector_meta(self) -> StepPlan:
        plan = StepPlan(tuple(self._loads), tuple(self._saves))
        self._loads, self._saves = [], []
        return plan

    def update_connector_output(self, finished: Finished) -> None:
        for request_id, slots in finished.saved:
            left = self._saving[request_id] - len(slots)
            self._saving_slots -= len(slots)
            if left:
                self._saving[request_id] = left
            else:
                del self._saving[request_id]

    def drop(self, span: Span, reason: Reason) -> None:
        self._store.drop(span, reason)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        self._store.observe_prefill(tokens, seconds)

    def demotes(self, blocks: int, unsaved: int) -> bool:
        return self._store.demotes(blocks, unsaved)

    def request_finished(self, request_id: str) -> bool:
        match = self._matches.pop(request_id, None)
        if match is not None:
            match.release()
        self._store.forget(request_id)
        return request_id in self._saving


@dataclass(frozen=True, slots=True)
class _Load:
    """A load of this step that has not been seen to end."""

    plan: LoadPlan
    transfer: Transfer
    arriving: LayeredSlots | None
    """What it writes to, where its layers may be used as they arrive."""


class BundledWorker(WorkerConnector):
    """Moves blocks between the engine's HBM and the store.

    Blocks are proven whole in DRAM before their first byte goes up. Where the engine's memory is a device's, their layers
    then go up first to last, and the computation of a layer waits, on the device, for that layer alone; what failed is
    known when all have. On a CPU a layer that is there is a block that is there, so the first layer waits for all.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._hbm: SlotMedium | None = None
        self._loads: list[_Load] = []
        self._saved: deque[tuple[str, tuple[int, ...]]] = deque()
        self._failed: set[int] = set()

    def register_kv_caches(self, hbm: SlotMedium) -> None:
        if hbm.slot_bytes != self._store.block_bytes:
            raise ValueError(
                f"the engine's blocks have {hbm.slot_bytes} bytes and those of the store {self._store.block_bytes}: "
                "another layout than the identity says"
            )
        self._hbm = hbm

    def start_load_kv(self, plan: StepPlan) -> None:
        hbm = self._registered()
        self._end_loads()
        self._failed.clear()
        after = hbm.fence()  # what the engine has queued may still read the slots that it now has given away
        for load in plan.loads:
            match = self._store.match(load.request_id, load.span, load.start)
            arriving = hbm.layered(len(load.slots))
            transfer = self._store.load(match, SlotRange(arriving or hbm, load.slots), after)
            self._loads.append(_Load(load, transfer, arriving))
            if arriving is not None:
                transfer.add_done_callback(partial(_note_loaded, arriving))

    def wait_for_layer_load(self, layer: int) -> None:
        for load in list(self._loads):
            if load.arriving is None or not load.arriving.wait_for_layer(layer, START_SECONDS):
                self._loads.remove(load)
                self._end_load(load, START_SECONDS if load.arriving is None else 0.0)

    def _end_loads(self) -> None:
        loads, self._loads = self._loads, []
        for load in loads:
            self._end_load(load)

    def _end_load(self, load: _Load, patience: float = START_SECONDS) -> None:
        """Wait for a load, or take it back where no thread has begun it in time; note what did not come."""
        wait([load.transfer], patience)
        if load.transfer.cancel():  # nothing has been copied yet; what has begun is a memory copy, and ends
            self._failed.update(load.plan.slots)
            return
        outcomes = zip(load.plan.slots, load.transfer.result(), strict=True)
        self._failed.update(slot for slot, outcome in outcomes if not outcome.done)

    def save_kv_layer(self, layer: int) -> None:
        """Nothing: a block is one contiguous copy of all layers, made after the step."""

    def wait_for_save(self, plan: StepPlan, after: Fence | None = None) -> None:
        hbm = self._registered()
        for save in plan.saves:
            try:
                transfer = self._store.save(save.span, SlotRange(hbm, save.slots), after, hints=save.hints)
            except Exception:  # noqa: BLE001 - the slots of a save that never began must not stay held
                _log.exception("a save could not begin")
                self._saved.append((save.request_id, save.slots))
                continue
            transfer.add_done_callback(partial(self._note_saved, save))

    def _note_saved(self, save: SavePlan, transfer: Transfer) -> None:
        del transfer  # saved or not, the slots may be reused
        self._saved.append((save.request_id, save.slots))

    def get_finished(self) -> Finished:
        return Finished(tuple(self._saved.popleft() for _ in range(len(self._saved))))

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        self._end_loads()
        return frozenset(self._failed)

    def _registered(self) -> SlotMedium:
        assert self._hbm is not None, "register_kv_caches comes first"
        return self._hbm


def _note_loaded(arriving: LayeredSlots, transfer: Transfer) -> None:
    del transfer  # whatever came of it
    arriving.end()


class BundledConnector(KVConnector):
    """A store in the engine's own process."""

    def __init__(self, store: Store, block_tokens: int, hbm_slots: int, step_tokens: int) -> None:
        """Running saves hold at most the larger of 5 % of ``hbm_slots`` and the blocks that one step of ``step_tokens`` fills."""
        most_saving = max(int(SAVE_SHARE * hbm_slots), -(-step_tokens // block_tokens))
        self._scheduler = BundledScheduler(store, block_tokens, most_saving)
        self._worker = BundledWorker(store)

    @property
    def scheduler(self) -> SchedulerConnector:
        return self._scheduler

    @property
    def worker(self) -> WorkerConnector:
        return self._worker
