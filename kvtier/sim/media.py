"""Media that move no bytes: they keep frames' headers, and take the time that the bytes would.

A block is stood in for by ``STAND_IN`` bytes, all zero and the same for all blocks, so that every sum and header is made and
proven by the code that serves. Whatever counts or times bytes counts those of a whole block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvtier.abc.medium import (
    Arrived,
    Iovec,
    Journal,
    KeyMedium,
    Outcome,
    PersistentSlotMedium,
    Record,
    SlotMedium,
    Status,
)
from kvtier.codec.frame import HEADER_BYTES
from kvtier.key import Address
from kvtier.sim.clock import Schedule

STAND_IN = 64
"""Bytes that a block has in memory."""
_FRAME = HEADER_BYTES + STAND_IN


class Pipe:
    """A way for blocks: one after another at a bandwidth, each call with a latency of its own on top."""

    def __init__(self, schedule: Schedule, block_bytes: int, bandwidth: float, t0: float) -> None:
        """``bandwidth`` in bytes per second, ``t0`` in seconds."""
        self._schedule = schedule
        self._block_seconds = block_bytes / bandwidth
        self._t0 = t0
        self._free_at = 0.0

    @property
    def now(self) -> float:
        return self._schedule.now

    def move(self, blocks: int) -> None:
        """Sleep for as long as that takes, behind whatever is under way."""
        self._free_at = max(self._free_at, self._schedule.now) + blocks * self._block_seconds
        self._schedule.sleep_until(self._free_at + self._t0)


class DramStandIn(SlotMedium):
    """DRAM slots, all of which are the same few bytes, and which are said to have ``block_bytes``: batches go by that."""

    def __init__(self, slots: int, block_bytes: int) -> None:
        self.slots = slots
        self.slot_bytes = block_bytes
        self._view = memoryview(bytearray(STAND_IN))

    def view(self, slot: int) -> memoryview:
        return self._view

    def read(self, slots: Sequence[int], into: Sequence[Iovec]) -> list[Outcome]:
        raise AssertionError("its views are used")

    def write(self, slots: Sequence[int], data: Sequence[Iovec]) -> list[Outcome]:
        raise AssertionError("its views are used")

    def close(self) -> None:
        pass


class DeviceStandIn(SlotMedium):
    """An engine's memory on a device: copies down to DRAM and up from it do not wait for each other, as over PCIe."""

    def __init__(self, slots: int, block_bytes: int, down: Pipe, up: Pipe) -> None:
        self.slots = slots
        self.slot_bytes = STAND_IN
        self._block_bytes = block_bytes
        self._down = down
        self._up = up

    def read(self, slots: Sequence[int], into: Sequence[Iovec]) -> list[Outcome]:
        self._down.move(len(slots))
        self.bytes_read += len(slots) * self._block_bytes
        return [Outcome(Status.DONE, STAND_IN)] * len(slots)

    def write(self, slots: Sequence[int], data: Sequence[Iovec]) -> list[Outcome]:
        self._up.move(len(slots))
        self.bytes_written += len(slots) * self._block_bytes
        return [Outcome(Status.DONE, STAND_IN)] * len(slots)

    def close(self) -> None:
        pass


class _Unwritten(Journal):
    """Nothing outlives a simulation."""

    def load(self) -> Iterator[Record]:
        return iter(())

    def identities(self) -> set[bytes]:
        return set()

    def commit(self, added: Sequence[Record], removed: Sequence[int]) -> None:
        pass

    def touch(self, used: Iterable[tuple[int, float]]) -> None:
        pass


class _Explained:
    """The records of a medium that nobody shares."""

    def remember(self, kind: str, digest: bytes, text: str) -> None:
        pass

    def records(self, kind: str) -> dict[bytes, str]:
        return {}

    def epochs(self) -> dict[str, int]:
        return {}

    def raise_epochs(self, wanted: Mapping[str, int], implied: Mapping[str, int]) -> None:
        raise AssertionError("nothing is cleared in a simulation")

    def close(self) -> None:
        pass


class SlotStandIn(_Explained, PersistentSlotMedium):
    """A device of numbered places, such as an NVMe file."""

    def __init__(self, slots: int, block_bytes: int, pipe: Pipe) -> None:
        self.slots = slots
        self.slot_bytes = STAND_IN
        self.journal = _Unwritten()
        self._block_bytes = block_bytes
        self._pipe = pipe
        self._headers: dict[int, bytes] = {}

    def read(self, slots: Sequence[int], into: Sequence[Iovec], arrived: Arrived | None = None) -> list[Outcome]:
        self._pipe.move(len(slots))
        self.bytes_read += len(slots) * self._block_bytes
        return _given([self._headers.get(slot) for slot in slots], into, arrived)

    def write(self, slots: Sequence[int], data: Sequence[Iovec]) -> list[Outcome]:
        self._pipe.move(len(slots))
        self.bytes_written += len(slots) * self._block_bytes
        self._headers.update(zip(slots, (bytes(buffers[0]) for buffers in data), strict=True))
        return [Outcome(Status.DONE, _FRAME)] * len(slots)


class KeyStandIn(_Explained, KeyMedium):
    """A server of names and values, such as a Redis: over its ``capacity`` it drops what was used longest ago.

    A name that is neither written nor touched for ``ttl`` seconds is gone.
    """

    def __init__(self, capacity: int | None, block_bytes: int, pipe: Pipe, ttl: float) -> None:
        """``capacity`` in blocks; None: there is no end to it."""
        self.ttl = ttl
        self._capacity = capacity
        self._block_bytes = block_bytes
        self._pipe = pipe
        self._headers: OrderedDict[Address, bytes] = OrderedDict()
        self._until: dict[Address, float] = {}

    def probe(self, names: Sequence[Address]) -> int:
        self._pipe.move(0)
        return next((index for index, name in enumerate(names) if self._header(name) is None), len(names))

    def _header(self, name: Address) -> bytes | None:
        header = self._headers.get(name)
        if header is not None and self._until[name] <= self._pipe.now:
            self.delete([name])
            return None
        return header

    def _used(self, names: Sequence[Address]) -> None:
        for name in reversed(names):  # a head goes after its tail
            if name in self._headers:
                self._headers.move_to_end(name)

    def read(self, names: Sequence[Address], into: Sequence[Iovec], arrived: Arrived | None = None) -> list[Outcome]:
        self._pipe.move(len(names))
        headers = [self._header(name) for name in names]
        self.bytes_read += (len(headers) - headers.count(None)) * self._block_bytes
        self._used(names)
        return _given(headers, into, arrived)

    def write(self, names: Sequence[Address], data: Sequence[Iovec]) -> list[Outcome]:
        self._pipe.move(len(names))
        self.bytes_written += len(names) * self._block_bytes
        self._headers.update(zip(names, (bytes(buffers[0]) for buffers in data), strict=True))
        self._until.update(dict.fromkeys(names, self._pipe.now + self.ttl))
        self._used(names)
        while self._capacity is not None and len(self._headers) > self._capacity:
            self.delete([next(iter(self._headers))])
        return [Outcome(Status.DONE, _FRAME)] * len(names)

    def touch(self, names: Sequence[Address]) -> None:
        there = [name for name in names if self._header(name) is not None]
        self._used(there)
        self._until.update(dict.fromkeys(there, self._pipe.now + self.ttl))

    def delete(self, names: Sequence[Address]) -> None:
        for name in names:
            self._headers.pop(name, None)
            self._until.pop(name, None)

    def scan(self) -> Iterator[Address]:
        return iter(list(self._headers))

    def heads(self, names: Sequence[Address], nbytes: int) -> list[bytes]:
        return [self._headers.get(name, b"")[:nbytes] for name in names]

    def clear(self) -> None:
        self._headers.clear()
        self._until.clear()

    def reclaim(self) -> int:
        return 0  # nothing is hidden

    def ping(self) -> None:
        pass


def _given(headers: Sequence[bytes | None], into: Sequence[Iovec], arrived: Arrived | None) -> list[Outcome]:
    """Put each header into its first buffer; what is behind it is zero already, in DRAM as at rest."""
    outcomes = []
    for index, (header, buffers) in enumerate(zip(headers, into, strict=True)):
        if header is None:
            outcomes.append(Outcome(Status.ABSENT))
            continue
        buffers[0][:] = header
        outcome = Outcome(Status.DONE, _FRAME)
        outcomes.append(outcome if arrived is None else arrived(index, outcome))
    return outcomes
