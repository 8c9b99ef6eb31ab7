"""The verbs behind which the tiers stand."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvtier.abc.medium import Outcome, SlotMedium
from kvtier.key import Adapter, Span

Transfer: TypeAlias = "Future[list[Outcome]]"
"""One asynchronous batch copy; its result has an outcome per block, in order, and never raises for the cache's own faults."""


class Found(enum.Enum):
    """What ``match`` says of a block."""

    HIT = "hit"
    PENDING = "pending"
    MISS = "miss"


class Reason(enum.Enum):
    """Why a block is missed, or why it went."""

    NEVER_STORED = "never stored"
    SAVE_DROPPED = "save dropped"
    EVICTED = "evicted"
    DECLINED = "declined by every lower tier"
    BELOW_BREAK_EVEN = "loading would be slower than computing"
    DEADLINE = "not here by the deadline"
    SUM_FAILED = "content or identity did not prove"
    READ_FAILED = "the tier could not read it"
    TIER_DEGRADED = "tier degraded"
    CLEARED = "cleared"
    NO_LOAD = "the request asked not to load"
    NO_STORE = "the request asked not to store it"
    NO_ROOM = "no room for it"
    QUEUE_FULL = "the queue of saves was full"
    WRITE_FAILED = "it could not be written"
    CLOSING = "the store was closing"
    BELOW = "in a lower tier"
    RECOMPUTED_DIFFERENTLY = "a recomputed block differed"
    BEHIND_A_MISS = "an earlier block of its chain is missing"


@dataclass(frozen=True, slots=True)
class BlockFound:
    """One block's answer."""

    found: Found
    tier: str | None = None
    """Name of the tier that has it (HIT: after promotion, the tier it came from)."""
    reason: Reason | None = None
    """Why it is a MISS."""


class Match(ABC):
    """What the store can give one request: one live match per request, and a lease on what it found.

    ``blocks[i]`` answers for ``span.keys[start + i]``: what lies before ``start`` the engine has itself. A PENDING block
    turns into HIT or, at the deadline at the latest, MISS; a block behind a MISS is a MISS. Statistics count once, when
    nothing is pending any more.
    """

    request_id: str
    span: Span
    start: int

    @property
    @abstractmethod
    def blocks(self) -> Sequence[BlockFound]:
        """One answer per key, as of now."""

    @property
    @abstractmethod
    def pending(self) -> bool:
        """Whether asking again may give more."""

    @property
    @abstractmethod
    def hits(self) -> int:
        """Length of the prefix of HITs."""

    @property
    @abstractmethod
    def load_seconds(self) -> float:
        """Estimated time to load the hits."""

    @abstractmethod
    def release(self) -> None:
        """Give up the lease. Idempotent; a load under way keeps its own until it ends."""


MOST_PRIORITY = 100
MOST_PIN_SECONDS = 7 * 86400.0
MOST_WAIT_MS = 600_000.0


@dataclass(frozen=True, slots=True)
class Hints:
    """What a request asks of the store for its own blocks. Plain data. Out of range: ``ValueError`` that begins with the name."""

    priority: int = 0
    """Higher stays longer, with policies that look at it; -100 to 100. It is the block's from when it enters a tier."""
    pin_seconds: float = 0.0
    """For so long from now the prompt's blocks are not evicted, as far as the share of a tier that pins may take allows."""
    no_store: bool = False
    """Nothing of the request is saved."""
    no_load: bool = False
    """Nothing is loaded for the request; what the engine has itself it uses."""
    max_wait_ms: float | None = None
    """How long blocks below DRAM may hold the request (0: not at all); None, or more than the store's deadline: that."""
    store_generated: bool = True
    """Whether blocks with generated tokens in them are saved."""

    def __post_init__(self) -> None:
        _within("priority", self.priority, -MOST_PRIORITY, MOST_PRIORITY)
        _within("pin_seconds", self.pin_seconds, 0, MOST_PIN_SECONDS)
        if self.max_wait_ms is not None:
            _within("max_wait_ms", self.max_wait_ms, 0, MOST_WAIT_MS)
        if self.pin_seconds and self.no_store:
            raise ValueError("pin_seconds and no_store contradict each other: what is not kept cannot be pinned")


def _within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} must be from {least:g} to {most:g}, got {repr(value)[:40]}")


NO_HINTS = Hints()


class Fence(Protocol):
    """Something that a copy must wait for: a CUDA event, or nothing on a CPU."""

    def wait(self) -> None:
        """Block until everything before the fence has happened."""
        ...


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Places of a slot medium: where a save reads from, or a load writes to."""

    medium: SlotMedium
    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class Selection:
    """The scopes that a clear is about; None: any."""

    model: str | None = None
    tenant: bytes | None = None
    """Tenant id, 16 bytes; zeros are the requests that have no tenant."""
    adapter: str | None = None
    """Adapter name, whatever its content."""

    def __post_init__(self) -> None:
        if self.tenant is not None and len(self.tenant) != 16:
            raise ValueError(f"a tenant id has 16 bytes, got {len(self.tenant)}")
        if len(self.model or "") + len(self.adapter or "") > 512:
            raise ValueError("names of model and adapter have at most 512 characters together")
        for name in (self.model, self.adapter):
            (
                name or ""
            ).encode()  # raises ValueError where it is no text: half a surrogate pair, in JSON or an argument

    def __str__(self) -> str:
        tenant = None if self.tenant is None else self.tenant.hex()
        chosen = {"model": self.model, "tenant": tenant, "adapter": self.adapter}
        return ", ".join(f"{name} {value}" for name, value in chosen.items() if value is not None) or "everything"


@dataclass(frozen=True, slots=True)
class ClearedTier:
    """What a clear left behind in one tier."""

    blocks: int | None
    """Blocks that are out of reach and not reclaimed yet; None where only a scan could tell."""
    nbytes: int | None
    trouble: str | None = None
    """Why the tier could not be told; it is told as soon as it can be."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """What a clear did."""

    epoch: int | None
    """The epoch that the selected scopes have from now on; None where one tier was emptied."""
    scopes: tuple[Mapping[str, object], ...]
    """The records of the scopes that are known and were selected."""
    tiers: Mapping[str, ClearedTier]


class Store(ABC):
    """Tiers that keep blocks and give them back. Thread-safe; no verb waits for I/O, and none raises for the cache's faults."""

    block_bytes: int
    """Bytes of one block in the engine, before any codec. An engine whose slots have another size keeps something else than
    this store does."""

    @abstractmethod
    def match(self, request_id: str, span: Span, start: int = 0, *, hints: Hints = NO_HINTS) -> Match:
        """Look up what follows the first ``start`` blocks of the span, and lease what is found.

        The whole prefix, ``start`` included, counts as used. Asking again for a live request returns the same object.

        What lies below DRAM is PENDING while its promotion runs, at most as long as the hints say. ``no_load`` finds nothing
        and says NO_LOAD. What is in a tier with slots, or comes there for this match, is pinned as the hints say.
        """

    def expect(self, request_id: str, span: Span, start: int = 0) -> Future[None] | None:
        """A request has come and will be matched so: what other machines share may be asked at once what it has of it.

        Returns what is done when that is known; None: nothing is asked. Holds nothing and finds nothing by itself. Where the
        request is never matched, ``forget`` it all the same.
        """
        del request_id, span, start
        return None

    @abstractmethod
    def load(self, match: Match, into: SlotRange, after: Fence | None = None) -> Transfer:
        """Copy the first ``len(into.slots)`` hits of ``match``, beginning with ``match.span.keys[match.start]``, then release it.

        An outcome other than DONE means that the place holds garbage and that the block misses from now on.
        """

    @abstractmethod
    def save(self, span: Span, source: SlotRange, after: Fence | None = None, *, hints: Hints = NO_HINTS) -> Transfer:
        """Keep the span's blocks, one per slot of ``source``. Present blocks are a no-op (DONE with 0 bytes).

        The caller leaves the source slots untouched until the transfer is done. No room: FAILED with the reason. With
        ``no_store`` nothing is read or kept, and later misses say NO_STORE.
        """

    @abstractmethod
    def prefetch(self, span: Span) -> None:
        """Start promoting what lies below DRAM, at lower urgency than any load."""

    @abstractmethod
    def drop(self, span: Span, reason: Reason) -> None:
        """Forget the span's blocks everywhere; from now on they miss for ``reason``."""

    @abstractmethod
    def epoch(self, tenant: bytes, adapter: Adapter | None = None) -> int:
        """The clear epoch that keys of a new request are to be made with; ``tenant`` is the tenant's id. Does not wait."""

    def former_epoch(self, tenant: bytes, adapter: Adapter | None = None) -> int | None:
        """The epoch before that, as long as blocks of it are known and misses can be explained by them."""
        del tenant, adapter
        return None

    @abstractmethod
    def clear(self, what: Selection, tier: str | None = None) -> Cleared:
        """Put blocks out of reach at once; their bytes are reclaimed behind.

        Of every tier those of the selected scopes, by a new epoch: what is asked or saved under an older one misses, and is
        not kept, for ``CLEARED``. With ``tier`` every block of that tier alone. Waits for the tiers to be told. Raises
        ``RequestError`` for a tier that there is not.
        """

    @abstractmethod
    def forget(self, request_id: str) -> None:
        """The request has ended: its match, if any is live, is released. Idempotent."""

    @abstractmethod
    def explain(self, request_id: str) -> list[BlockFound]:
        """The answers of the request's last match (kept for the last few thousand requests); empty where unknown."""

    @abstractmethod
    def stats(self) -> dict[str, object]:
        """Counters and gauges as plain values, per tier."""

    @abstractmethod
    def health(self) -> dict[str, str]:
        """Tier name to ``ok`` or ``degraded: <why>``."""

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """The engine computed ``tokens`` in one step: what loading is compared with. Any thread."""
        del tokens, seconds

    def demotes(self, blocks: int, unsaved: int) -> bool:
        """Whether a sequence that has to give up its slots is better saved and loaded again than computed again.

        It has ``blocks``, of which ``unsaved`` would have to be saved first.
        """
        del blocks, unsaved
        return False

    def notes(self) -> Sequence[str]:
        """What is worth knowing although nothing is wrong."""
        return ()

    @abstractmethod
    def check_integrity(self) -> list[str]:
        """Every disagreement between counters, indexes and media, in words; empty where all is well."""

    @abstractmethod
    def drain(self, timeout: float) -> bool:
        """Write what a tier with write mode ``back`` still lacks and end all transfers; whether it was done in time (seconds)."""

    @abstractmethod
    def close(self) -> None:
        """Stop threads and close media; what was not drained is lost. Idempotent."""
