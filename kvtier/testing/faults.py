"""Media that misbehave on purpose: ``wrapped(medium, Slow(0.01))`` is the same kind of medium with that fault.

Whatever a fault does not touch goes through the wrapped medium's own primitives. A fault may be switched on and off
(``fault.active``) while the medium is in use.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from kvtier.abc.medium import (
    Arrived,
    Iovec,
    Journal,
    KeyMedium,
    LastingMedium,
    Medium,
    Outcome,
    PersistentSlotMedium,
    Record,
    SlotMedium,
    Status,
)
from kvtier.key import Address

M = TypeVar("M", bound=Medium)
Write = Callable[[Sequence[Any], Sequence[Iovec]], list[Outcome]]
Read = Callable[[Sequence[Any], Sequence[Iovec]], list[Outcome]]


class Fault:
    """What happens to calls. ``op`` is the name of the medium's method: read, write, probe, commit and so on."""

    active: bool = True

    def before(self, op: str) -> None:
        """Called ahead of every call; may wait, or raise ``MediumError`` for the whole of it."""

    def refusal(self, op: str, place: object) -> str | None:
        """Why this item of a read or write fails; None where it does not."""
        del op, place
        return None

    def written(self, data: Iovec) -> Iovec:
        """What of an item's bytes really gets written."""
        return data


class Faulty(Fault):
    """Items fail, or whole calls raise ``error``."""

    def __init__(
        self,
        *ops: str,
        places: Collection[Any] | None = None,
        error: Exception | None = None,
        times: int | None = None,
    ) -> None:
        """Of the calls ``ops``: those items in ``places`` (None: all) fail, or the call raises; at most ``times`` calls."""
        self._ops = ops
        self._places = places
        self._error = error
        self._left = times
        self._lock = threading.Lock()
        self._failing: set[str] = set()

    def before(self, op: str) -> None:
        with self._lock:
            hit = self.active and op in self._ops and self._left != 0
            (self._failing.add if hit else self._failing.discard)(op)
            if hit and self._left is not None:
                self._left -= 1
        if hit and self._error is not None:
            raise self._error

    def refusal(self, op: str, place: object) -> str | None:
        failing = op in self._failing and (self._places is None or place in self._places)
        return "a fault was ordered" if failing else None


class Slow(Fault):
    """Every call waits first."""

    def __init__(self, seconds: float, *ops: str, sleep: Callable[[float], None] = time.sleep) -> None:
        """``seconds`` before each of the calls ``ops`` (none named: before all)."""
        self._seconds = seconds
        self._ops = ops
        self._sleep = sleep

    def before(self, op: str) -> None:
        if self.active and (not self._ops or op in self._ops):
            self._sleep(self._seconds)


class Throttled(Fault):
    """Calls take as long as on a slower device: seconds per call and per item, one after the other, whoever calls."""

    SLACK = 0.002
    """Seconds by which a sleep may have been too long; they are made up for with the next item."""

    def __init__(
        self,
        each: float,
        *ops: str,
        call: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``call`` seconds for each of the calls ``ops`` (none named: all) and ``each`` for each of its items."""
        self.each, self.call = each, call
        self._ops, self._clock, self._sleep = ops, clock, sleep
        self._lock = threading.Lock()
        self._free = clock()

    def before(self, op: str) -> None:
        self._take(op, self.call)

    def refusal(self, op: str, place: object) -> str | None:
        self._take(op, self.each)
        return None

    def _take(self, op: str, seconds: float) -> None:
        if not self.active or (self._ops and op not in self._ops) or not seconds:
            return
        with self._lock:
            now = self._clock()
            self._free = (self._free if now - self._free < self.SLACK else now) + seconds
            left = self._free - now
        if left > 0:
            self._sleep(left)


class Torn(Fault):
    """Writes keep only their first bytes and say that all is well, as a device that lost its power does."""

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes

    def written(self, data: Iovec) -> Iovec:
        if not self.active:
            return data
        kept, left = [], self._keep_bytes
        for buffer in data:
            if left > 0:
                kept.append(buffer[:left])
            left -= len(buffer)
        return kept


class Stuck(Fault):
    """Calls do not return until ``release``."""

    def __init__(self, *ops: str) -> None:
        """The calls ``ops`` hang (none named: all)."""
        self._ops = ops
        self._free = threading.Event()
        self.entered = threading.Event()
        """Set as soon as a call hangs."""

    def before(self, op: str) -> None:
        if self.active and (not self._ops or op in self._ops):
            self.entered.set()
            self._free.wait()

    def release(self) -> None:
        """Let every call go, those to come as well."""
        self._free.set()


def wrapped(medium: M, fault: Fault) -> M:
    """The same kind of medium, with the fault."""
    made: Medium
    if isinstance(medium, KeyMedium):
        made = FaultyNames(medium, fault)
    elif isinstance(medium, PersistentSlotMedium):
        made = FaultyPersistentSlots(medium, fault)
    elif isinstance(medium, SlotMedium):
        made = FaultySlots(medium, fault)
    else:
        raise TypeError(f"{type(medium).__name__} is neither a slot nor a key medium")
    return cast("M", made)


class _Faults(Medium):
    """What the wrappers share: the common attributes, and reads and writes of which some items fail."""

    def __init__(self, inner: Any, fault: Fault) -> None:  # noqa: ANN401 - either kind of medium
        self._inner, self._fault = inner, fault
        self.header_bytes, self.auth_key = inner.header_bytes, inner.auth_key

    @property
    def io(self) -> str:  # type: ignore[override]  # as the wrapped one has it now
        return str(self._inner.io)

    def close(self) -> None:
        self._inner.close()

    def _spared(self, op: str, places: Sequence[Any], move: Callable[[list[int]], list[Outcome]]) -> list[Outcome]:
        self._fault.before(op)
        reasons = [self._fault.refusal(op, place) for place in places]
        spared = [index for index, reason in enumerate(reasons) if reason is None]
        outcomes = [Outcome(Status.FAILED, 0, reason or "") for reason in reasons]
        for index, outcome in zip(spared, move(spared) if spared else [], strict=True):
            outcomes[index] = outcome
        return outcomes

    def _read(self, places: Sequence[Any], into: Sequence[Iovec], arrived: Arrived | None) -> list[Outcome]:
        def move(spared: list[int]) -> list[Outcome]:
            chosen, buffers = [places[i] for i in spared], [into[i] for i in spared]
            if arrived is None:
                return self._inner.read(chosen, buffers)  # type: ignore[no-any-return]  # a medium's
            then = arrived
            return self._inner.read(chosen, buffers, lambda at, outcome: then(spared[at], outcome))  # type: ignore[no-any-return]

        outcomes = self._spared("read", places, move)
        self.bytes_read += sum(outcome.nbytes for outcome in outcomes)
        return outcomes

    def _write(self, places: Sequence[Any], data: Sequence[Iovec]) -> list[Outcome]:
        def move(spared: list[int]) -> list[Outcome]:
            done = self._inner.write([places[i] for i in spared], [self._fault.written(data[i]) for i in spared])
            full = [sum(map(len, data[i])) for i in spared]
            return [Outcome(Status.DONE, size) if one.done else one for one, size in zip(done, full, strict=True)]

        outcomes = self._spared("write", places, move)
        self.bytes_written += sum(outcome.nbytes for outcome in outcomes)
        return outcomes


class FaultySlots(_Faults, SlotMedium):
    def __init__(self, inner: SlotMedium, fault: Fault) -> None:
        super().__init__(inner, fault)
        self.slots, self.slot_bytes = inner.slots, inner.slot_bytes

    def read(self, slots: Sequence[int], into: Sequence[Iovec]) -> list[Outcome]:
        return self._read(slots, into, None)

    def write(self, slots: Sequence[int], data: Sequence[Iovec]) -> list[Outcome]:
        return self._write(slots, data)

    def view(self, slot: int) -> memoryview | None:
        view: memoryview | None = self._inner.view(slot)
        return view


class _LastingFaults(_Faults, LastingMedium):
    """What ``remember`` and the epochs of both kinds of lasting medium have in common."""

    def remember(self, kind: str, digest: bytes, text: str) -> None:
        self._fault.before("remember")
        self._inner.remember(kind, digest, text)

    def records(self, kind: str) -> dict[bytes, str]:
        self._fault.before("records")
        records: dict[bytes, str] = self._inner.records(kind)
        return records

    def epochs(self) -> dict[str, int]:
        self._fault.before("epochs")
        epochs: dict[str, int] = self._inner.epochs()
        return epochs

    def raise_epochs(self, wanted: Mapping[str, int], implied: Mapping[str, int]) -> None:
        self._fault.before("raise_epochs")
        self._inner.raise_epochs(wanted, implied)


class FaultyPersistentSlots(_LastingFaults, PersistentSlotMedium):
    def __init__(self, inner: PersistentSlotMedium, fault: Fault) -> None:
        super().__init__(inner, fault)
        self.slots, self.slot_bytes = inner.slots, inner.slot_bytes
        self.journal = _FaultyJournal(inner.journal, fault)

    def read(self, slots: Sequence[int], into: Sequence[Iovec], arrived: Arrived | None = None) -> list[Outcome]:
        return self._read(slots, into, arrived)

    def write(self, slots: Sequence[int], data: Sequence[Iovec]) -> list[Outcome]:
        return self._write(slots, data)

    def drop_page_cache(self) -> None:
        self._inner.drop_page_cache()

    def drop_others(self) -> int:
        self._fault.before("drop_others")
        return int(self._inner.drop_others())


class _FaultyJournal(Journal):
    def __init__(self, inner: Journal, fault: Fault) -> None:
        self._inner, self._fault = inner, fault

    def load(self) -> Iterator[Record]:
        self._fault.before("load")
        return self._inner.load()

    def identities(self) -> set[bytes]:
        self._fault.before("identities")
        return self._inner.identities()

    def commit(self, added: Sequence[Record], removed: Sequence[int]) -> None:
        self._fault.before("commit")
        self._inner.commit(added, removed)

    def touch(self, used: Iterable[tuple[int, float]]) -> None:
        self._fault.before("touch")
        self._inner.touch(used)


class FaultyNames(_LastingFaults, KeyMedium):
    @property
    def epochs_version(self) -> bytes:  # type: ignore[override]  # as the wrapped one has it now
        return bytes(self._inner.epochs_version)

    @property
    def generation(self) -> int:  # type: ignore[override]  # as the wrapped one has it now
        return int(self._inner.generation)

    @property
    def ttl(self) -> float:  # type: ignore[override]  # as the wrapped one has it
        inner: KeyMedium = self._inner
        return inner.ttl

    def probe(self, names: Sequence[Address]) -> int:
        self._fault.before("probe")
        return int(self._inner.probe(names))

    def read(self, names: Sequence[Address], into: Sequence[Iovec], arrived: Arrived | None = None) -> list[Outcome]:
        return self._read(names, into, arrived)

    def write(self, names: Sequence[Address], data: Sequence[Iovec]) -> list[Outcome]:
        return self._write(names, data)

    def touch(self, names: Sequence[Address]) -> None:
        self._fault.before("touch")
        self._inner.touch(names)

    def delete(self, names: Sequence[Address]) -> None:
        self._fault.before("delete")
        self._inner.delete(names)

    def scan(self) -> Iterator[Address]:
        self._fault.before("scan")
        yield from self._inner.scan()

    def heads(self, names: Sequence[Address], nbytes: int) -> list[bytes]:
        self._fault.before("heads")
        return list(self._inner.heads(names, nbytes))

    def clear(self) -> None:
        self._fault.before("clear")
        self._inner.clear()

    def reclaim(self) -> int:
        self._fault.before("reclaim")
        return int(self._inner.reclaim())

    def ping(self) -> None:
        self._fault.before("ping")
        self._inner.ping()
