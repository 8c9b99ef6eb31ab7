"""A tier below DRAM: a medium with a write mode, an index of what it holds, a state of health and its numbers.

``places``, ``holds`` and ``forget`` are called under the store's lock and answer from memory. ``probe``, ``fetch``, ``put``,
``delete``, ``refresh`` and ``revive`` are called from transfer threads without it, may block, and take it for the moments in
which state changes. A medium's failure never leaves this room: it becomes outcomes, a reason and a metric.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvtier.abc.codec import Codec
from kvtier.abc.medium import LastingMedium, Medium, Outcome, Status
from kvtier.abc.policy import Choice, EntryMeta
from kvtier.abc.store import Reason
from kvtier.codec.frame import Asked, FrameHeader
from kvtier.codec.seal import Sealer
from kvtier.config import TierOptions, WriteMode
from kvtier.errors import KvtierError, MediumError, MediumFull, MediumRefused, MediumUnavailable
from kvtier.key import Address, Lot
from kvtier.metrics import TierMetrics
from kvtier.policy.admission import Regret, Verdict, make_admission
from kvtier.pool import Slot
from kvtier.quantity import counted
from kvtier.transfer.workers import Workers

_log = logging.getLogger(__name__)

T = TypeVar("T")
Answer = TypeVar("Answer", bound="tuple[Sequence[object], Sequence[object]]")

REVIVE_SECONDS = 1.0
"""How often a degraded tier is tried."""
SILENT_SECONDS = 2.0
"""Nobody waits for a tier while one of its reads has been running for so long."""
COMPLAIN_SECONDS = 10.0
REMEMBERED = 1 << 16
"""As many blocks an admission rule remembers of a tier that has no slots to count."""


def _whole(answer: Answer, count: int) -> Answer:
    """An answer with an entry per item: a medium that gives more or fewer has said nothing of any."""
    if any(len(part) != count for part in answer):
        raise MediumError(f"the medium answered for {len(answer[0])} of {count} blocks")
    return answer


@dataclass(frozen=True, slots=True)
class Parcel:
    """One block on its way down: its name, what a policy may know of it, what its frame says, and its bytes in DRAM."""

    address: Address
    meta: EntryMeta
    header: FrameHeader
    view: memoryview
    pinned_until: float = 0.0
    """When its pin ends, in seconds of the store's clock; 0 where it has none."""


class LowerTier(ABC):
    """What the store asks of every tier below DRAM."""

    probes: bool
    """Whether only the medium itself knows what is there."""
    news: bool = False
    """Whether the medium's clear epochs have changed since they were last read."""

    def __init__(
        self,
        name: str,
        options: TierOptions,
        medium: LastingMedium,
        codec: Codec,
        workers: Workers,
        metrics: TierMetrics,
        lock: threading.Lock,
        clock: Callable[[], float],
        remembered: int = REMEMBERED,
    ) -> None:
        """``remembered``: of how many blocks an admission rule remembers what became of them."""
        self.name = name
        self.write = options.write
        self._admission = make_admission(options.admission, options.write_budget, remembered)
        self.workers = workers
        self.metrics = metrics
        self.degraded: str | None = None
        self._codec = codec
        self._sealer = None if options.encrypt is None else Sealer.from_file(options.encrypt)
        self._lock = lock
        self._clock = clock
        self._tried = 0.0
        self._complained: dict[str, float] = {}
        self._medium = medium
        self.newest_epoch = (1 << 32) - 1
        """The latest clear that the medium was seen to know; the highest of all where nobody keeps epochs."""
        self.teach: Callable[[], object] = lambda: None
        """Tell the medium what has been cleared; whoever keeps the epochs gives it."""
        self._introduction: tuple[bytes, str] | None = None
        """Our identity's record, until the medium has it."""
        self._newcomer: bool | None = None
        """Whether the medium had no record of our identity when our first block came; None: none has come."""

    @property
    def medium(self) -> Medium:
        return self._medium

    @property
    def usable(self) -> bool:
        return self.degraded is None

    @property
    def silent(self) -> str | None:
        """Why nothing is read from the tier for now although nothing has failed: a read hangs. None where none does."""
        seconds = self.workers.longest_load
        return f"a read has not returned for {seconds:.0f} s" if seconds > SILENT_SECONDS else None

    @property
    def chooses(self) -> bool:
        """Whether the tier may decline what it is offered although it works and has room."""
        return self._admission is not None

    @property
    def offered_again(self) -> bool:
        """Whether a block that the tier lacks is to be offered at each later use."""
        return self.write is WriteMode.SELECTIVE or (self.write is WriteMode.THROUGH and self.chooses)

    def admits(self, address: Address, nbytes: int) -> bool:
        """Whether a block that is offered is taken. With the four below: under the store's lock."""
        if self._admission is None:
            return True
        now = self._clock()
        verdict = self._admission.offered(address, nbytes, now)
        self.metrics.offered(verdict, self._admission.left(now))
        return verdict is Verdict.ADMITTED

    def reached(self, addresses: Sequence[Address]) -> None:
        """A match has reached these blocks, wherever they were."""
        if self._admission is not None:
            self._admission.used(addresses)

    def gave(self, address: Address) -> None:
        """A block of the tier has come up and proved."""
        if self._admission is not None:
            self._admission.read([address])

    def lost_room(self, addresses: Sequence[Address]) -> None:
        """The tier has evicted these blocks."""
        if self._admission is not None:
            self.metrics.regretted(Regret.WRITTEN_AND_UNUSED, self._admission.evicted(addresses))

    def lacked(self, addresses: Sequence[Address]) -> None:
        """A match has missed these blocks."""
        if self._admission is not None:
            self.metrics.regretted(Regret.DECLINED_AND_WANTED, self._admission.wanted(addresses))

    @abstractmethod
    def places(self, addresses: Sequence[Address]) -> list[Slot | None]:
        """Per address the place where it is known to be; a tier that probes knows none."""

    @abstractmethod
    def holds(self, address: Address) -> bool:
        """Whether the tier is believed to have the block, so that it need not be written."""

    @abstractmethod
    def forget(self, addresses: Sequence[Address]) -> None:
        """Stop serving these at once; ``delete`` makes it so in the medium."""

    @abstractmethod
    def touch(self, addresses: Sequence[Address], now: float) -> Sequence[Address]:
        """Note a use of a chain (head first) for eviction; returns what ``refresh`` is to be called with now."""

    def pin(self, addresses: Sequence[Address], until: float, now: float) -> None:  # noqa: B027 - some evict nothing
        """Keep what the tier has of these from eviction until then, as far as its share for pins allows."""

    def probe(self, addresses: Sequence[Address]) -> int:
        """Length of the present prefix; 0 where the tier fails."""
        return max(0, min(self._guarded("probe", lambda: int(self._probe(addresses)), 0), len(addresses)))

    def fetch(
        self, addresses: Sequence[Address], views: Sequence[memoryview], asked: Sequence[Asked]
    ) -> tuple[list[Outcome], list[FrameHeader | None]]:
        """Read blocks into DRAM views and prove them. Whatever did not prove or read is no longer held."""
        start = time.perf_counter()
        nothing: tuple[list[Outcome], list[FrameHeader | None]] = ([], [])
        outcomes, headers = self._guarded(
            "read", lambda: _whole(self._fetch(addresses, views, asked), len(addresses)), nothing
        )
        if not outcomes:
            outcomes = [Outcome(Status.FAILED, 0, self.degraded or "read failed")] * len(addresses)
            headers = [None] * len(addresses)
        done = sum(outcome.done for outcome in outcomes)
        corrupt = [a for a, outcome in zip(addresses, outcomes, strict=True) if outcome.status is Status.CORRUPT]
        failed = [a for a, outcome in zip(addresses, outcomes, strict=True) if outcome.status is Status.FAILED]
        if done:
            nbytes = sum(one.raw_bytes for one, outcome in zip(asked, outcomes, strict=True) if outcome.done)
            self.metrics.read(done, nbytes, time.perf_counter() - start)
        if corrupt:
            self.metrics.sum_failed(len(corrupt))
            first = next(outcome for outcome in outcomes if outcome.status is Status.CORRUPT)
            self._complain(
                "sum", f"{counted(len(corrupt), 'block')} did not prove, to be computed again: {first.detail}"
            )
        if failed and self.usable:
            self.metrics.failed("read", len(failed))
            first = next(outcome for outcome in outcomes if outcome.status is Status.FAILED)
            self._complain(
                "read", f"{counted(len(failed), 'block')} could not be read, to be computed again: {first.detail}"
            )
        lost = [a for a, outcome in zip(addresses, outcomes, strict=True) if not outcome.done]
        if lost and self.usable:
            self._guarded("delete", lambda: self._lost(lost, corrupt), None)
        return outcomes, headers

    def put(self, parcels: Sequence[Parcel]) -> list[Outcome]:
        """Write blocks. DONE means that the block would be found after a restart of this process."""
        start = time.perf_counter()
        nothing: list[Outcome] = []
        outcomes = self._guarded("write", lambda: self._written(parcels), nothing)
        if not outcomes:
            outcomes = [Outcome(Status.FAILED, 0, self.degraded or "write failed")] * len(parcels)
        done = sum(outcome.done for outcome in outcomes)
        if done:
            nbytes = sum(p.header.raw_bytes for p, outcome in zip(parcels, outcomes, strict=True) if outcome.done)
            self.metrics.written(done, nbytes, time.perf_counter() - start)
            self._introduce()
        if done < len(outcomes):
            full = sum(outcome.status is Status.FULL for outcome in outcomes)
            why = Reason.WRITE_FAILED if self.usable else Reason.TIER_DEGRADED
            for reason, count in ((Reason.NO_ROOM, full), (why, len(outcomes) - done - full)):
                if count:
                    self.metrics.save_dropped(reason, count)
            if self.usable:
                first = next(outcome for outcome in outcomes if not outcome.done)
                self._complain(
                    "write", f"{counted(len(outcomes) - done, 'block')} could not be written: {first.detail}"
                )
        return outcomes

    def _written(self, parcels: Sequence[Parcel]) -> list[Outcome]:
        """A block goes only where a clear as late as its own is known: whoever clears next reads that, and is later."""
        if any(parcel.header.epoch > self.newest_epoch for parcel in parcels):
            self.teach()
        newest = self.newest_epoch
        told = [parcel for parcel in parcels if parcel.header.epoch <= newest]
        try:
            outcomes = iter(_whole((self._put(told), told), len(told))[0] if told else [])
        except MediumFull as full:
            self.metrics.failed("write")
            return [Outcome(Status.FULL, 0, str(full))] * len(parcels)
        untold = Outcome(Status.FULL, 0, "it could not be told yet what was cleared before they were computed")
        return [next(outcomes) if parcel.header.epoch <= newest else untold for parcel in parcels]

    def newcomer(self, identity: bytes, records: Mapping[bytes, str]) -> bool:
        """Whether the tier had no blocks of our identity before this process put some there; ``records`` are its present ones."""
        return identity not in records if self._newcomer is None else self._newcomer

    def identities(self) -> set[bytes] | None:
        """Digests of the identities whose blocks the tier has; None where only a scan could tell."""
        return None

    def _introduce(self) -> None:
        if self._introduction is None:
            return
        if self._newcomer is None:
            self._newcomer = self._introduction[0] not in self.records("identity")
        if self.remember("identity", *self._introduction):
            self._introduction = None

    def delete(self, addresses: Sequence[Address]) -> None:
        """Remove from the medium what ``forget`` has hidden."""
        self._guarded("delete", lambda: self._delete(addresses), None)

    def refresh(self, addresses: Sequence[Address]) -> None:
        """Push back what would expire, or write recency down."""
        self._guarded("touch", lambda: self._refresh(addresses), None)

    def greet(self, identity: bytes, text: str) -> None:
        """See at start that the medium answers. Raises ``MediumError``. ``text`` is the readable record of our identity.

        The record is left once a block of ours is there: a record says that there are, or have been, blocks.
        """
        self._introduction = (identity, text)
        self._begin_admission(new=False)
        self._ping()
        known = self._guarded("records", lambda: self._medium.records("identity"), None, vital=False)
        self._begin_admission(new=known == {})

    def _begin_admission(self, *, new: bool) -> None:
        if self._admission is not None:
            self._admission.begin(new=new)

    def epochs(self) -> dict[str, int] | None:
        """The medium's clear epochs; None where it cannot say."""
        return self._guarded("epochs", self._medium.epochs, None)

    def raise_epochs(self, wanted: Mapping[str, int], implied: Mapping[str, int]) -> str | None:
        """Tell the medium of epochs that it lacks, and of those that others imply; why not, where it cannot be told."""
        failed: str | None = "failed"

        def tell() -> str | None:
            try:
                self._medium.raise_epochs(wanted, implied)
            except MediumFull as full:
                return str(full)
            return None

        return self._guarded("epochs", tell, failed)

    def remember(self, kind: str, digest: bytes, text: str) -> bool:
        """Keep a readable record in the medium; whether it is kept."""

        def keep() -> bool:
            self._medium.remember(kind, digest, text)
            return True

        return self._guarded("remember", keep, otherwise=False, vital=False)

    def records(self, kind: str) -> dict[bytes, str]:
        """The medium's readable records of a kind, none where it cannot say."""
        nothing: dict[bytes, str] = {}
        return self._guarded("records", lambda: self._medium.records(kind), nothing, vital=False)

    @abstractmethod
    def clear(self) -> bool:
        """Put every block out of reach at once; ``reclaim`` and ``delete`` remove them behind. Whether that was done."""

    @abstractmethod
    def stale(self, cleared: Callable[[Lot], bool]) -> int | None:
        """How many blocks are of lots that have been cleared; None where only a scan could tell."""

    def reclaim(self, cleared: Callable[[Lot], bool]) -> tuple[list[Address], bool]:
        """Remove some of the blocks that have been cleared, a bounded step at a time: those that went, and whether all have.

        Not both of a tier at once.
        """
        nothing: tuple[list[Address], bool] = ([], False)
        gone, finished = self._guarded("reclaim", lambda: self._reclaim(cleared), nothing)
        if gone:
            self.metrics.evicted(Reason.CLEARED, len(gone))
        return gone, finished

    @abstractmethod
    def _reclaim(self, cleared: Callable[[Lot], bool]) -> tuple[list[Address], bool]: ...

    def revive(self) -> None:
        """Try a degraded tier, at most every ``REVIVE_SECONDS``."""
        if self.usable or self._clock() - self._tried < REVIVE_SECONDS:
            return
        self._tried = self._clock()
        try:
            self._ping()
        except Exception as still:  # noqa: BLE001 - as in ``_guarded``
            self.degraded = str(still) or type(still).__name__
            return
        self._returned()
        self.degraded = None
        self.metrics.set_degraded(False)
        _log.warning("%s: back in use", self.name)

    def degrade(self, why: str) -> None:
        """Take the tier out of use until ``revive`` finds it well."""
        self._tried = self._clock()
        if self.usable:
            _log.warning("%s: degraded, its blocks are misses until it is back: %s", self.name, why)
        self.degraded = why
        self.metrics.set_degraded(True)

    def _returned(self) -> None:  # noqa: B027 - most tiers know as much as before
        """The medium answers again, perhaps without what it had."""

    @abstractmethod
    def empty(self) -> int:
        """Remove every block that nobody holds; how many."""

    def drop_page_cache(self) -> None:  # noqa: B027 - most media use none
        """Make the next reads come from the device where the medium goes through the page cache."""

    def close(self) -> None:
        self.workers.close()
        self._medium.close()

    def check(self) -> list[str]:
        """Disagreements inside the tier, in words. Called under the store's lock."""
        return []

    def counts(self) -> dict[str, int]:
        """Slots by state, where the tier has slots. Called under the store's lock."""
        return {}

    def choice(self) -> Choice | None:
        """Who decides what the tier evicts, where its policy chooses among several. Called under the store's lock."""
        return None

    def pinned(self, now: float) -> int:
        """How many blocks are pinned. Called under the store's lock."""
        del now
        return 0

    def _complain(self, about: str, text: str) -> None:
        """Log at most once about the same in ``COMPLAIN_SECONDS``: a full disk fails every write, and the metrics count."""
        now = self._clock()
        with self._lock:
            due = now - self._complained.get(about, now - COMPLAIN_SECONDS) >= COMPLAIN_SECONDS
            if due:
                self._complained[about] = now
        if due:
            _log.warning("%s: %s", self.name, text)

    def _guarded(self, verb: str, act: Callable[[], T], otherwise: T, *, vital: bool = True) -> T:
        """``act``, or ``otherwise`` where it fails. What only explains blocks (not ``vital``) may fail in a tier that works."""
        if not self.usable:
            return otherwise
        try:
            return act()
        except MediumFull as full:
            self.metrics.failed(verb)
            self._complain(verb, f"{verb} failed: {full}")
        except KvtierError as failed:
            self.metrics.failed(verb)
            if vital or isinstance(failed, (MediumUnavailable, MediumRefused)):
                self.degrade(str(failed))
            else:
                self._complain(verb, f"{verb} failed: {failed}")
        except Exception as bug:  # noqa: BLE001 - a third party's medium may raise anything; the engine must not notice
            self.metrics.failed(verb)
            self.degrade(f"{type(bug).__name__}: {bug}")
        return otherwise

    @abstractmethod
    def _probe(self, addresses: Sequence[Address]) -> int: ...

    @abstractmethod
    def _fetch(
        self, addresses: Sequence[Address], views: Sequence[memoryview], asked: Sequence[Asked]
    ) -> tuple[list[Outcome], list[FrameHeader | None]]: ...

    @abstractmethod
    def _put(self, parcels: Sequence[Parcel]) -> list[Outcome]: ...

    @abstractmethod
    def _delete(self, addresses: Sequence[Address]) -> None: ...

    @abstractmethod
    def _refresh(self, addresses: Sequence[Address]) -> None: ...

    @abstractmethod
    def _lost(self, addresses: Sequence[Address], corrupt: Sequence[Address]) -> None:
        """Stop serving blocks that did not come; ``corrupt`` are those of them whose bytes came and did not prove."""

    @abstractmethod
    def _ping(self) -> None: ...
