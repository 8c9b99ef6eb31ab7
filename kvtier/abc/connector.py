"""Between an engine and a store: the two halves of vLLM's V1 connector, with the same verbs.

The halves share no memory: what passes between them is the ``StepPlan``, plain serialisable data. The scheduler half is
called on the scheduler's thread and never blocks; the worker half on the thread that runs steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvtier.abc.medium import SlotMedium
from kvtier.abc.store import NO_HINTS, Fence, Hints, Reason
from kvtier.key import Adapter, Span


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Blocks of one request that the worker half is to load into HBM slots."""

    request_id: str
    span: Span
    """What was matched: the whole prompt from depth 0."""
    slots: tuple[int, ...]
    start: int = 0
    """Index in ``span`` of the block that goes into the first slot."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Filled blocks of one request that the worker half is to save from HBM slots after the step."""

    request_id: str
    span: Span
    slots: tuple[int, ...]
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step asks of the worker half."""

    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """Saves that ended since the last time asked."""

    saved: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(request id, slots): these HBM slots may be reused."""


class SchedulerConnector(ABC):
    """The half that decides."""

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request_id: str, span: Span, computed_blocks: int = 0, hints: Hints = NO_HINTS
    ) -> int | None:
        """Tokens that can be loaded after the engine's own hit; None: ask again later.

        ``span`` is the whole prompt from depth 0, less its last token; the engine has its first ``computed_blocks`` itself.
        They are passed all the same, because a hit refreshes the whole prefix in every tier: otherwise the head of a chain
        that HBM keeps hitting grows cold below, goes first and orphans its tail. Cheap, without side effect when repeated,
        never blocks.
        """

    def expect(self, request_id: str, span: Span, computed_blocks: int = 0) -> Future[None] | None:
        """A request has come, of which the engine has the first ``computed_blocks`` itself, and will be matched so.

        What takes time to be known of it may be asked at once: the step that could start it need not pass without it. Returns
        what is done when that is known; None: there is nothing to wait for. Called from any thread, before anything else for
        that request; does not wait.
        """
        del request_id, span, computed_blocks
        return None

    def clear_epoch(self, tenant: bytes, adapter: Adapter | None = None) -> int:
        """The clear epoch that keys of a new request are to be made with: so what was cleared is no hit in HBM either.

        ``tenant`` is the tenant's id. Called from any thread; does not wait. 0 where the store below cannot be cleared.
        """
        del tenant, adapter
        return 0

    def former_epoch(self, tenant: bytes, adapter: Adapter | None = None) -> int | None:
        """The epoch before that, as long as misses can be explained by it: spans then carry the former keys as well."""
        del tenant, adapter
        return None

    @abstractmethod
    def update_state_after_alloc(self, request_id: str, slots: Sequence[int], num_tokens: int) -> None:
        """The engine took ``slots`` for ``num_tokens`` of the matched tokens (0: it declined; the match is given up)."""

    @abstractmethod
    def offer(self, request_id: str, span: Span, slots: Sequence[int], hints: Hints = NO_HINTS) -> int:
        """Filled blocks to save after this step; returns how many of the first were taken (the rest: offer again later)."""

    @abstractmethod
    def build_connector_meta(self) -> StepPlan:
        """Everything planned since the last call, for the worker half."""

    @abstractmethod
    def update_connector_output(self, finished: Finished) -> None:
        """What the worker half said of ended saves, passed on by the engine."""

    @abstractmethod
    def drop(self, span: Span, reason: Reason) -> None:
        """The engine has found these blocks to be wrong: they are forgotten everywhere, and miss for ``reason``."""

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """The engine computed ``tokens`` in one step: what loading is compared with. Cheap, never blocks."""
        del tokens, seconds

    def demotes(self, blocks: int, unsaved: int) -> bool:
        """Whether a sequence that has to give up its slots is better saved and loaded again than computed again.

        It has ``blocks``, of which ``unsaved`` would have to be saved first. Cheap, never blocks.
        """
        del blocks, unsaved
        return False

    @abstractmethod
    def request_finished(self, request_id: str) -> bool:
        """The request ended in any way. True: saves still read its slots; hold them until ``get_finished`` names them."""


class WorkerConnector(ABC):
    """The half that moves."""

    @abstractmethod
    def register_kv_caches(self, hbm: SlotMedium) -> None:
        """The engine's HBM, once, before any other call."""

    @abstractmethod
    def start_load_kv(self, plan: StepPlan) -> None:
        """Start the plan's loads."""

    @abstractmethod
    def wait_for_layer_load(self, layer: int) -> None:
        """Return when the loads that this step needs have arrived in ``layer`` or have failed. Bounded."""

    @abstractmethod
    def save_kv_layer(self, layer: int) -> None:
        """``layer`` of every sequence in the step has been written."""

    @abstractmethod
    def wait_for_save(self, plan: StepPlan, after: Fence | None = None) -> None:
        """The step's KV is written (once ``after`` has passed): start the plan's saves. Does not wait for them."""

    @abstractmethod
    def get_finished(self) -> Finished:
        """Saves that ended since the last call; of loads ``get_block_ids_with_load_errors`` tells."""

    @abstractmethod
    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        """Slots of this step's loads that failed; asked after ``wait_for_layer_load``, and after an exception of any verb too.

        When it returns or raises, nothing writes to any slot of these loads any more: they are used again at once.
        """


class KVConnector(ABC):
    """A connector is its two halves, built where each is needed."""

    @property
    @abstractmethod
    def scheduler(self) -> SchedulerConnector: ...

    @property
    @abstractmethod
    def worker(self) -> WorkerConnector: ...
