"""``memory://``: a key-addressed medium in a dict, for tests and for trying things out."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.abc.medium import MOST_RECORDS, Arrived, Iovec, KeyMedium, MediumContext, Outcome, Status
from kvtier.key import Address
from kvtier.storage_backends.iovec import scatter, total
from kvtier.url import TierUrl


class MemoryMedium(KeyMedium):
    """Values are copied in and out, as by any other medium. Grows as it is written."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Params:
        """Nothing to set."""

    def __init__(self) -> None:
        self.values: dict[Address, bytes] = {}
        self._records: dict[tuple[str, bytes], str] = {}
        self._epochs: dict[str, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, location: TierUrl, params: Params, context: MediumContext) -> MemoryMedium:
        del location, params, context
        return cls()

    def probe(self, names: Sequence[Address]) -> int:
        return next((index for index, name in enumerate(names) if name not in self.values), len(names))

    def read(self, names: Sequence[Address], into: Sequence[Iovec], arrived: Arrived | None = None) -> list[Outcome]:
        outcomes = [self._read(name, buffers) for name, buffers in zip(names, into, strict=True)]
        if arrived is not None:
            outcomes = [arrived(index, outcome) if outcome.done else outcome for index, outcome in enumerate(outcomes)]
        with self._lock:
            self.bytes_read += sum(outcome.nbytes for outcome in outcomes if outcome.done)
        return outcomes

    def _read(self, name: Address, into: Iovec) -> Outcome:
        value = self.values.get(name)
        if value is None:
            return Outcome(Status.ABSENT)
        if len(value) > total(into):
            return Outcome(Status.FAILED, 0, f"a value of {len(value)} bytes does not fit {total(into)}")
        return scatter(np.frombuffer(value, np.uint8), into)

    def write(self, names: Sequence[Address], data: Sequence[Iovec]) -> list[Outcome]:
        values = [b"".join(buffers) for buffers in data]
        with self._lock:
            self.values.update(zip(names, values, strict=True))
            self.bytes_written += sum(map(len, values))
        return [Outcome(Status.DONE, len(value)) for value in values]

    def touch(self, names: Sequence[Address]) -> None:
        pass  # nothing here expires

    def delete(self, names: Sequence[Address]) -> None:
        for name in names:
            self.values.pop(name, None)

    def scan(self) -> Iterator[Address]:
        return iter(list(self.values))

    def ping(self) -> None:
        pass

    def heads(self, names: Sequence[Address], nbytes: int) -> list[bytes]:
        return [self.values.get(name, b"")[:nbytes] for name in names]

    def clear(self) -> None:
        with self._lock:
            self.generation += 1
            self.values.clear()

    def reclaim(self) -> int:
        return 0  # nothing is hidden

    def remember(self, kind: str, digest: bytes, text: str) -> None:
        with self._lock:
            self._records.pop((kind, digest), None)
            self._records[kind, digest] = text
            kept = [name for name in self._records if name[0] == kind]
            for name in kept[: max(0, len(kept) - MOST_RECORDS)]:
                del self._records[name]

    def records(self, kind: str) -> dict[bytes, str]:
        with self._lock:
            return {digest: text for (of, digest), text in self._records.items() if of == kind}

    def epochs(self) -> dict[str, int]:
        with self._lock:
            return dict(self._epochs)

    def raise_epochs(self, wanted: Mapping[str, int], implied: Mapping[str, int]) -> None:
        with self._lock:
            for name, epoch in wanted.items():
                self._epochs[name] = max(epoch, self._epochs.get(name, 0))
            for name, epoch in implied.items():
                if self._epochs.get(name, epoch + 1) <= epoch:
                    del self._epochs[name]
            self.epochs_version = b"%d" % (int(self.epochs_version or b"0") + 1)

    def close(self) -> None:
        self.values.clear()
