"""A key-addressed medium below DRAM, shared with others."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from kvtier.abc.codec import Codec
from kvtier.abc.medium import KeyMedium, Outcome
from kvtier.codec.frame import HEADER_BYTES, Asked, FrameHeader, summer_of
from kvtier.config import TierOptions
from kvtier.errors import CorruptFrame
from kvtier.key import Address, Lot, address
from kvtier.metrics import TierMetrics
from kvtier.pool import Slot
from kvtier.tier.lower import LowerTier, Parcel
from kvtier.transfer.copy import read_frames, write_frames
from kvtier.transfer.workers import Workers

T = TypeVar("T")

STEP = 1000
"""Values whose headers are looked at in one step of a search for cleared blocks."""

REFRESH_SECONDS = 60.0
"""A block's expiry is pushed back at most so often."""
MOST_KNOWN = 1 << 18
"""Names that a key tier remembers to have written or seen."""


def _trim(oldest_first: OrderedDict[Address, T], most: int) -> None:
    while len(oldest_first) > most:
        oldest_first.popitem(last=False)


class KeyTier(LowerTier):
    """A place per name, shared with others: what is there only the medium knows, so presence is probed."""

    probes = True

    def __init__(
        self,
        name: str,
        options: TierOptions,
        medium: KeyMedium,
        codec: Codec,
        workers: Workers,
        metrics: TierMetrics,
        lock: threading.Lock,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name, options, medium, codec, workers, metrics, lock, clock)
        self._names = medium
        self._known: OrderedDict[Address, None] = OrderedDict()
        self._refreshed: OrderedDict[Address, float] = OrderedDict()
        self._version = b""
        self._generation = medium.generation
        self._sweep: Iterator[Address] | None = None
        """Where the search for cleared blocks stands; None: nowhere."""
        self._hidden = False
        """Whether values that were cleared as a whole may be left."""

    def places(self, addresses: Sequence[Address]) -> list[Slot | None]:
        return [None] * len(addresses)

    def holds(self, address: Address) -> bool:
        return address in self._known

    def forget(self, addresses: Sequence[Address]) -> None:
        for each in addresses:
            self._known.pop(each, None)

    def touch(self, addresses: Sequence[Address], now: float) -> Sequence[Address]:
        """The server evicts by itself; what lives is the TTL of the whole prefix, pushed back once a minute at most."""
        every = min(REFRESH_SECONDS, self._names.ttl / 4)
        due = [a for a in addresses if now - self._refreshed.get(a, -every) >= every]
        self._refreshed.update(dict.fromkeys(due, now))
        _trim(self._refreshed, MOST_KNOWN)
        return due

    def empty(self) -> int:
        entries = list(self._names.scan())
        with self._lock:
            self.forget(entries)
        self.delete(entries)
        return len(entries)

    def _returned(self) -> None:
        with self._lock:
            self._known.clear()
            self._refreshed.clear()

    def _note(self, addresses: Sequence[Address]) -> None:
        with self._lock:
            self._known.update(dict.fromkeys(addresses))
            _trim(self._known, MOST_KNOWN)

    def _probe(self, addresses: Sequence[Address]) -> int:
        present = self._names.probe(addresses)
        self._follow()
        self._note(addresses[:present])
        with self._lock:
            self.forget(addresses[present:])  # what follows the first gap may be gone as well: it is written again
        return present

    def _fetch(
        self, addresses: Sequence[Address], views: Sequence[memoryview], asked: Sequence[Asked]
    ) -> tuple[list[Outcome], list[FrameHeader | None]]:
        return read_frames(self._names, addresses, views, asked, self._codec, now=time.time(), sealer=self._sealer)

    def _put(self, parcels: Sequence[Parcel]) -> list[Outcome]:
        addresses = [parcel.address for parcel in parcels]
        outcomes = write_frames(
            self._names,
            addresses,
            [p.view for p in parcels],
            [p.header for p in parcels],
            self._codec,
            sealer=self._sealer,
        )
        self._note([a for a, outcome in zip(addresses, outcomes, strict=True) if outcome.done])
        return outcomes

    def _delete(self, addresses: Sequence[Address]) -> None:
        self._names.delete(addresses)

    def _lost(self, addresses: Sequence[Address], corrupt: Sequence[Address]) -> None:
        with self._lock:
            self.forget(addresses)
        if corrupt:  # what only could not be read now may be good, for us later and for others at once
            self._delete(corrupt)

    def _refresh(self, addresses: Sequence[Address]) -> None:
        self._names.touch(addresses)

    def _ping(self) -> None:
        self._names.ping()

    @property
    def news(self) -> bool:  # type: ignore[override]  # only the medium knows
        return self._names.epochs_version != self._version

    def epochs(self) -> dict[str, int] | None:
        def read() -> dict[str, int]:
            version = self._names.epochs_version  # before: a probe may see a later one, and not its rows, at any time
            rows = self._names.epochs()
            if self._names.epochs_version != version:  # mostly because this reading has brought it
                version, rows = self._names.epochs_version, self._names.epochs()
            self._version = version
            return rows

        return self._guarded("epochs", read, None)

    def clear(self) -> bool:
        def clear() -> bool:
            self._names.clear()
            self._sweep = None
            self._hidden = True
            return True

        done = self._guarded("clear", clear, otherwise=False)
        self._follow()
        return done

    def stale(self, cleared: Callable[[Lot], bool]) -> None:
        del cleared

    def _reclaim(self, cleared: Callable[[Lot], bool]) -> tuple[list[Address], bool]:
        if self._hidden:
            self._hidden = False  # before: what is cleared meanwhile is hidden again
            try:
                self._names.reclaim()
            except BaseException:
                self._hidden = True
                raise
        sweep, self._sweep = self._sweep or self._names.scan(), None
        names = list(islice(sweep, STEP))
        summer = summer_of(self._names.auth_key)
        gone = []
        for name, head in zip(names, self._names.heads(names, HEADER_BYTES), strict=True):
            try:
                header = FrameHeader.parse(memoryview(head), summer)
            except CorruptFrame:  # gone meanwhile, or not for us to judge
                continue
            if address(header.key, header.shard) == name and cleared(header.lot):
                gone.append(name)
        with self._lock:
            self.forget(gone)
        self._names.delete(gone)
        if len(names) == STEP:
            self._sweep = sweep
        return gone, self._sweep is None

    def _follow(self) -> None:
        """Where the medium was cleared, by whomever, nothing that was known of it holds any more."""
        if self._names.generation != self._generation:
            self._generation = self._names.generation
            self._returned()
