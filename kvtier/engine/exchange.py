"""The engine's side of the connector: what it asks, what it still owes, and what it does when the other side fails.

Nothing that a connector does may stop the engine. An exception is logged once and from then on nothing more is asked of
that connector, except to end the loads under way, because they write to slots that are used again at once, and which saves
have ended: their slots stay held until it says so, because a copy may still read them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import TypeVar

from kvtier.abc.connector import Finished, KVConnector, StepPlan
from kvtier.abc.medium import SlotMedium
from kvtier.abc.store import Fence, Hints, Reason
from kvtier.engine.block_cache import BlockCache
from kvtier.engine.sequence import Sequence as TokenSequence
from kvtier.key import Scope, Span
from kvtier.pool import Slot

_log = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")

ASK_SECONDS = 30.0
"""A connector that answers "ask later" for longer is not asked again for that request: its tokens are computed."""


def _with_what_is_left(hints: Hints, waited: float) -> Hints:
    """The hints of a request that has waited for an earlier match already: its patience is for all of them together."""
    if hints.max_wait_ms is None or not waited:
        return hints
    return replace(hints, max_wait_ms=max(0.0, hints.max_wait_ms - waited * 1000))


def _of_generated(hints: Hints) -> Hints:
    """What holds for blocks with generated tokens in them: pins are for prompts."""
    if hints.store_generated and not hints.pin_seconds:
        return hints
    return replace(hints, pin_seconds=0.0, no_store=hints.no_store or not hints.store_generated)


class Exchange:
    """Matches, loads and saves of all sequences, through one connector or none."""

    def __init__(
        self,
        connector: KVConnector | None,
        cache: BlockCache,
        clock: Callable[[], float],
        ask_seconds: float = ASK_SECONDS,
    ) -> None:
        self._connector = connector
        self._cache = cache
        self._clock = clock
        self._ask_seconds = ask_seconds
        self._held: Counter[tuple[str, Slot]] = Counter()
        """How many saves under way of each request read each slot: one that was offered again may have several."""
        self._unplanned: list[tuple[str, tuple[int, ...]]] = []
        """Saves that were taken and that no plan names yet: (request id, slots)."""
        self._never_begun: list[tuple[str, tuple[int, ...]]] = []
        """Saves that were taken before a fault and that nobody will begin."""
        self._gave_up: set[str] = set()
        self._starts: dict[str, int] = {}
        self._asked: deque[Future[None]] = deque()
        self._epoch = 0
        """The highest clear epoch that the connector ever said."""
        self.fault: str | None = None
        """Why the connector is not used any more; None while it is."""
        self.waited = 0.0
        """Seconds that steps have spent on loads."""
        self.dropped = 0
        """Blocks that were never taken for saving, because their request ended first."""

    @property
    def active(self) -> bool:
        return self._connector is not None and self.fault is None

    @property
    def held(self) -> int:
        """Slots that saves under way still hold."""
        return self._held.total()

    def held_slots(self) -> list[Slot]:
        """Slots that saves under way hold, once per save."""
        return [slot for _, slot in self._held.elements()]

    def epoch(self, scope: Scope) -> int:
        """The clear epoch for the keys of a new request of ``scope``. Any thread. Asked even after a fault.

        Where the connector does not say, the highest that it ever said: too high an epoch finds nothing, too low a one might
        find what has been cleared.
        """
        if self._connector is None:
            return 0
        try:
            epoch = self._connector.scheduler.clear_epoch(scope.tenant_id, scope.adapter)
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine goes on
            self._break("clear_epoch", error)
            return self._epoch
        self._epoch = max(self._epoch, epoch)
        return epoch

    def former_epoch(self, scope: Scope) -> int | None:
        """The epoch before that, where misses can be explained by it. Any thread."""
        if not scope.epoch:
            return None
        return self._guarded(lambda c: c.scheduler.former_epoch(scope.tenant_id, scope.adapter), None)

    def register(self, hbm: SlotMedium, misfit: str | None = None) -> None:
        """Show the connector the engine's memory. One that cannot take it is not used.

        ``misfit``: in what the memory is not laid out as the identity says; sizes alone would not tell.
        """
        if misfit is not None and self._connector is not None:
            self._break(
                "registering the engine's memory", ValueError(f"another layout than the identity says: {misfit}")
            )
        self._guarded(lambda c: c.worker.register_kv_caches(hbm), None)

    def expect(self, request_id: str, span: Span, computed_blocks: int) -> None:
        """Tell that a request has come and will be matched. Any thread."""
        if len(span) > computed_blocks:
            known = self._guarded(lambda c: c.scheduler.expect(request_id, span, computed_blocks), None)
            if known is not None:
                self._asked.append(known)

    def await_answers(self, seconds: float) -> None:
        """Wait so long for what has been asked of requests that have come; what is not known then is waited for no more."""
        if self._asked:
            wait([self._asked.popleft() for _ in range(len(self._asked))], seconds)

    def match(self, sequence: TokenSequence, span: Span, computed_blocks: int) -> int | None:
        """Blocks that can be loaded after the first ``computed_blocks``; None: ask again at a later step.

        A match begins where the engine's own hit ended when it was first asked. Where HBM has gained or lost blocks of the
        prompt since then, that match is given up and another one asked for.
        """
        room = len(span) - computed_blocks
        if not self.active or not len(span) or sequence.id in self._gave_up:
            return 0
        if self._starts.setdefault(sequence.id, computed_blocks) != computed_blocks:
            self._guarded(lambda c: c.scheduler.update_state_after_alloc(sequence.id, (), 0), None)
            self._starts[sequence.id] = computed_blocks
        now = self._clock()
        hints = _with_what_is_left(sequence.hints, 0.0 if sequence.asked is None else now - sequence.asked)
        tokens: int | None = self._guarded(
            lambda c: c.scheduler.get_num_new_matched_tokens(sequence.id, span, computed_blocks, hints), 0
        )
        if tokens is None:
            if not room:
                return 0
            sequence.asked = now if sequence.asked is None else sequence.asked
            if now - sequence.asked < self._ask_seconds:
                return None
            _log.warning(
                "request %s: the connector gave no answer in %.0f s; computing", sequence.id, self._ask_seconds
            )
            self._gave_up.add(sequence.id)
            return 0
        return max(0, min(tokens // self._cache.block_tokens, room))

    def allocated(self, sequence: TokenSequence, slots: Sequence[Slot]) -> None:
        """``slots`` are where the sequence's match is to be loaded; none of them: the match is given up."""
        sequence.asked = None
        self._settled(sequence)
        tokens = len(slots) * self._cache.block_tokens
        self._guarded(lambda c: c.scheduler.update_state_after_alloc(sequence.id, slots, tokens), None)

    def offer(self, sequence: TokenSequence) -> None:
        """Offer the blocks that ``sequence`` has filled and that nobody has taken yet; what is taken stays held."""
        stop = sequence.committed
        if sequence.offered >= stop:
            return
        if not self.active:
            sequence.offered = stop
            return
        hints, generated = sequence.hints, _of_generated(sequence.hints)
        prompt = stop if generated is hints else min(sequence.prompt_blocks, stop)
        if sequence.offered < prompt:
            self._offer(sequence, prompt, hints)
        if prompt <= sequence.offered < stop:
            self._offer(sequence, stop, generated)

    def _offer(self, sequence: TokenSequence, stop: int, hints: Hints) -> None:
        start = sequence.offered
        span, slots = sequence.chain.span(start, stop), sequence.slots[start:stop]
        taken = self._guarded(lambda c: c.scheduler.offer(sequence.id, span, slots, hints), 0)
        taken = max(0, min(taken, len(slots)))
        self._cache.share(slots[:taken])
        self._held.update((sequence.id, slot) for slot in slots[:taken])
        self._unplanned.append((sequence.id, tuple(slots[:taken])))
        sequence.offered = start + taken

    def finished(self, sequence: TokenSequence) -> None:
        """The sequence has ended, in whatever state it was."""
        self._settled(sequence)
        if self.active:
            self.dropped += max(0, sequence.committed - sequence.offered)
            self._guarded(lambda c: c.scheduler.request_finished(sequence.id), None)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """A step computed ``tokens``."""
        self._guarded(lambda c: c.scheduler.observe_prefill(tokens, seconds), None)

    def demotes(self, sequence: TokenSequence) -> bool:
        """Whether a sequence that gives way is better saved and loaded again than computed again."""
        blocks = sequence.committed
        unsaved = max(0, blocks - sequence.offered)
        return self._guarded(lambda c: c.scheduler.demotes(blocks, unsaved), fallback=False)

    def drop(self, span: Span, reason: Reason) -> None:
        """Forget blocks in every tier below."""
        self._guarded(lambda c: c.scheduler.drop(span, reason), None)

    def plan(self) -> StepPlan:
        plan = self._guarded(lambda c: c.scheduler.build_connector_meta(), None)
        if plan is None:
            self._never_begun += self._unplanned
        self._unplanned.clear()
        return plan or StepPlan()

    def start_loads(self, plan: StepPlan) -> None:
        if plan.loads:
            self._loading(lambda c: c.worker.start_load_kv(plan), None)

    def wait_for_layer(self, layer: int) -> None:
        self._loading(lambda c: c.worker.wait_for_layer_load(layer), None)

    def layer_written(self, layer: int) -> None:
        self._guarded(lambda c: c.worker.save_kv_layer(layer), None)

    def failed(self, plan: StepPlan, expected: frozenset[Slot]) -> frozenset[int]:
        """Which of the ``expected`` slots hold garbage: those that failed, that no plan names, or all after a fault.

        From here on no load writes to any of them. Asked even after a fault.
        """
        if self._connector is None or not expected:
            return expected
        began = time.perf_counter()
        planned = {slot for load in plan.loads for slot in load.slots}
        try:
            broken = self._connector.worker.get_block_ids_with_load_errors()
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine goes on
            self._break("get_block_ids_with_load_errors", error)
            broken = expected
        self.waited += time.perf_counter() - began
        if not self.active:
            return expected
        return frozenset(slot for slot in expected if slot in broken or slot not in planned)

    def start_saves(self, plan: StepPlan, after: Fence | None = None) -> None:
        """Start the plan's saves, behind ``after``."""
        if plan.saves and not self.active:
            self._never_begun += [(save.request_id, save.slots) for save in plan.saves]
        elif plan.saves:
            self._guarded(lambda c: c.worker.wait_for_save(plan, after), None)

    def collect(self) -> None:
        """Let go of the slots whose saves have ended. Asked even after a fault, as long as anything is held."""
        if self._connector is None or not (self._held or self.active):
            return
        self._release(Finished(tuple(self._never_begun)))
        self._never_begun.clear()
        try:
            ended = self._connector.worker.get_finished()
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine goes on
            self._break("get_finished", error)
            return
        if ended.saved:
            self._guarded(lambda c: c.scheduler.update_connector_output(ended), None)
        self._release(ended)

    def _settled(self, sequence: TokenSequence) -> None:
        self._gave_up.discard(sequence.id)
        self._starts.pop(sequence.id, None)

    def _release(self, ended: Finished) -> None:
        for request_id, slots in ended.saved:
            for slot in slots:
                entry = (request_id, Slot(slot))
                if entry in self._held:
                    self._held[entry] -= 1
                    self._cache.release([Slot(slot)])
                    if not self._held[entry]:
                        del self._held[entry]
                else:
                    _log.error("the connector ended a save of slot %d for %s that is not under way", slot, request_id)

    def _loading(self, call: Callable[[KVConnector], T], fallback: U) -> T | U:
        """As ``_guarded``, for what only a step with loads has to do."""
        began = time.perf_counter()
        try:
            return self._guarded(call, fallback)
        finally:
            self.waited += time.perf_counter() - began

    def _guarded(self, call: Callable[[KVConnector], T], fallback: U) -> T | U:
        if self._connector is None or self.fault is not None:
            return fallback
        try:
            return call(self._connector)
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine goes on
            self._break("the connector", error)
            return fallback

    def _break(self, where: str, error: Exception) -> None:
        if self.fault is None:
            self.fault = f"{where} failed: {error!r}"
            _log.error("%s failed; going on without the tiers below HBM", where, exc_info=error)
