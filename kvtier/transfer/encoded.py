"""An engine's memory as a store with a lossy codec sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager

from kvtier.abc.medium import Iovec, Outcome, SlotMedium, Status
from kvtier.codec.lossy import LossyCodec
from kvtier.errors import CorruptFrame, NotEncodable
from kvtier.transfer.deal import dealt
from kvtier.transfer.staging import Staging

PART_BYTES = 16 << 20
"""Memory of an engine that the CPU cannot address, staged at a time."""

_staging = Staging()


class EncodedSlots(SlotMedium):
    """Reading a slot gives its block encoded; writing one takes an encoded block and decodes it into the engine's memory.

    It has no views: what it holds exists encoded only in the caller's buffers, one for each block.
    """

    def __init__(self, engine: SlotMedium, codec: LossyCodec, workers: Executor | None = None) -> None:
        """``workers``: one thread of it helps the calling one; a caller that is such a thread itself goes on alone."""
        assert engine.slot_bytes == codec.block_bytes, f"{codec.name} knows blocks of {codec.block_bytes} bytes"
        self.slots = engine.slots
        self.slot_bytes = codec.encoded_bytes(engine.slot_bytes)
        self._engine = engine
        self._codec = codec
        self._workers = workers

    def read(self, slots: Sequence[int], into: Sequence[Iovec]) -> list[Outcome]:
        """A block that cannot be encoded is FAILED."""

        def encode(raw: memoryview, buffers: Iovec) -> Outcome:
            (room,) = buffers
            try:
                return Outcome(Status.DONE, self._codec.encode(raw, room))
            except NotEncodable as odd:
                return Outcome(Status.FAILED, 0, str(odd))

        outcomes: list[Outcome] = []
        for part in self._parts(len(slots)):
            places, rooms = slots[part], into[part]
            with self._raw(places) as (raws, staged):
                came = self._engine.read(places, [[raw] for raw in raws]) if staged else None
                ended = self._each(encode, raws, rooms)
            outcomes += ended if came is None else _both(came, ended)
        return outcomes

    def write(self, slots: Sequence[int], data: Sequence[Iovec]) -> list[Outcome]:
        """What is no encoded block is CORRUPT, and its slot holds garbage."""

        def decode(raw: memoryview, buffers: Iovec) -> Outcome:
            (payload,) = buffers
            try:
                self._codec.decode(payload, raw)
            except CorruptFrame as wrong:
                return Outcome(Status.CORRUPT, 0, str(wrong))
            return Outcome(Status.DONE, len(payload))

        outcomes: list[Outcome] = []
        for part in self._parts(len(slots)):
            places, payloads = slots[part], data[part]
            with self._raw(places) as (raws, staged):
                ended = self._each(decode, raws, payloads)
                if staged:
                    ended = _both(ended, self._engine.write(places, [[raw] for raw in raws]))
            outcomes += ended
        return outcomes

    def close(self) -> None:
        """The memory stays the engine's."""

    def _parts(self, count: int) -> Iterator[slice]:
        step = max(1, PART_BYTES // self._engine.slot_bytes)
        return (slice(start, min(count, start + step)) for start in range(0, count, step))

    @contextmanager
    def _raw(self, slots: Sequence[int]) -> Iterator[tuple[list[memoryview], bool]]:
        """The slots themselves where the CPU can address them; else room for them, and True."""
        size = self._engine.slot_bytes
        views = [view[:size] for view in map(self._engine.view, slots) if view is not None]
        if len(views) == len(slots):
            yield views, False
            return
        with _staging.lend(len(slots), size) as lent:
            yield [room[:size] for room in lent], True

    def _each(
        self, turn: Callable[[memoryview, Iovec], Outcome], raws: Sequence[memoryview], buffers: Sequence[Iovec]
    ) -> list[Outcome]:
        """``turn`` for every block, by this thread and one of ``workers``, as far as that is free."""
        return dealt(lambda at: turn(raws[at], buffers[at]), len(raws), self._workers)


def _both(first: Sequence[Outcome], second: Sequence[Outcome]) -> list[Outcome]:
    """Per block the outcome of two steps: the first that did not go well."""
    return [one if not one.done else two for one, two in zip(first, second, strict=True)]
