"""The bundled engine's connector: both halves over one store in the same process."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import wait
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
from kvtier.abc.medium import SlotMedium
from kvtier.abc.store import Fence, Match, SlotRange, Store, Transfer
from kvtier.key import Span

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

    def get_num_new_matched_tokens(self, request_id: str, span: Span, computed_blocks: int = 0) -> int | None:
        match = self._store.match(request_id, span, computed_blocks)
        self._matches[request_id] = match
        if match.pending:
            return None
        return match.hits * self._block_tokens

    def update_state_after_alloc(self, request_id: str, slots: Sequence[int], num_tokens: int) -> None:
        match = self._matches.pop(request_id, None)
        if match is None:
            return
        if num_tokens:
            self._loads.append(LoadPlan(request_id, match.span, tuple(slots), match.start))
        else:
            match.release()

    def offer(self, request_id: str, span: Span, slots: Sequence[int]) -> int:
        count = min(len(slots), self._most_saving - self._saving_slots)
        if count <= 0:
            return 0
        self._saves.append(SavePlan(request_id, span.head(count), tuple(slots[:count])))
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

    def request_finished(self, request_id: str) -> bool:
        match = self._matches.pop(request_id, None)
        if match is not None:
            match.release()
        self._store.forget(request_id)
        return request_id in self._saving


class BundledWorker(WorkerConnector):
    """Moves blocks between the engine's HBM and the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._hbm: SlotMedium | None = None
        self._loads: list[tuple[LoadPlan, Transfer]] = []
        self._saved: deque[tuple[str, tuple[int, ...]]] = deque()
        self._failed: set[int] = set()

    def register_kv_caches(self, hbm: SlotMedium) -> None:
        self._hbm = hbm

    def start_load_kv(self, plan: StepPlan) -> None:
        hbm = self._registered()
        self._failed.clear()
        for load in plan.loads:
            match = self._store.match(load.request_id, load.span, load.start)
            self._loads.append((load, self._store.load(match, SlotRange(hbm, load.slots))))

    def wait_for_layer_load(self, layer: int) -> None:
        """Blocks are proven whole, so the first layer waits for all of them and the others find them there."""
        loads, self._loads = self._loads, []
        for load, transfer in loads:
            wait([transfer], START_SECONDS)
            if transfer.cancel():  # nothing has been copied yet; what has begun is a memory copy, and ends
                self._failed.update(load.slots)
                continue
            outcomes = transfer.result()
            self._failed.update(slot for slot, outcome in zip(load.slots, outcomes, strict=True) if not outcome.done)

    def save_kv_layer(self, layer: int) -> None:
        """Nothing: a block is one contiguous copy of all layers, made after the step."""

    def wait_for_save(self, plan: StepPlan, after: Fence | None = None) -> None:
        hbm = self._registered()
        for save in plan.saves:
            try:
                transfer = self._store.save(save.span, SlotRange(hbm, save.slots), after)
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
        return frozenset(self._failed)

    def _registered(self) -> SlotMedium:
        assert self._hbm is not None, "register_kv_caches comes first"
        return self._hbm


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
