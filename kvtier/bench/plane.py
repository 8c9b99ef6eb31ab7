"""A tier opened to be measured: the copies that the store makes, the same without proof, and the machine's limit beside them."""

from __future__ import annotations

import math
import mmap
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from kvtier.abc.codec import Codec
from kvtier.abc.medium import Iovec, KeyMedium, Outcome, PersistentSlotMedium, Record, SlotMedium
from kvtier.bench.limits import Limit, spread
from kvtier.bench.report import percentile
from kvtier.codec.catalogue import codec_named
from kvtier.codec.frame import HEADER_BYTES, Asked, FrameHeader, content_sum
from kvtier.codec.seal import Sealer
from kvtier.errors import MediumError
from kvtier.key import KEY_BYTES, Address, BlockKey, Origin, Shard, Span, address
from kvtier.storage_backends.dram import DramMedium
from kvtier.transfer.copy import COPY_BYTES, FrameMedium, load_blocks, read_frames, save_blocks, write_frames

SAMPLE = 0.01
"""Share of loads from DRAM that the store verifies by default."""
RAW = codec_named("raw")
OPS = ("save", "load")
_PAGE_BYTES = 4096
_PATTERN_BYTES = 4 << 20
_CALLS_SECONDS = 0.005
"""What is timed lasts at least so long: several calls where one is shorter."""
_MOST_CALLS = 64

Way = Callable[[range], None]
"""Moves the blocks of a range of numbers, and returns when that is done."""


class Blocks:
    """Random blocks in shuffled DRAM slots, their frames' headers, and as many more slots to promote into."""

    def __init__(
        self,
        block_bytes: int,
        count: int,
        rng: random.Random,
        mark: bytes = b"",
        content: Callable[[int], bytes] | None = None,
    ) -> None:
        """``mark``: what all keys begin with, so that whoever finds a block knows whose it is. ``content``: bytes by number."""
        self.block_bytes = block_bytes
        self.count = count
        self.dram = DramMedium(2 * count, block_bytes)
        self.dram.wait_prefaulted(60.0)
        slots = rng.sample(range(2 * count), 2 * count)
        self.sources, self.targets = slots[:count], slots[count:]
        made = np.random.default_rng(rng.getrandbits(32)).integers(0, 256, min(block_bytes, _PATTERN_BYTES), np.uint8)
        for slot in range(2 * count):
            view = np.frombuffer(self.view(slot), np.uint8)
            for start in range(0, block_bytes, len(made)):
                np.copyto(view[start : start + len(made)], made[: block_bytes - start])
            view[:16] = np.frombuffer(rng.randbytes(16), np.uint8)
        for number, slot in enumerate(self.sources if content is not None else ()):
            self.view(slot)[:] = content(number)  # type: ignore[misc]  # only where there is one
        self.sums = [content_sum(self.view(slot)) for slot in self.sources]
        keys = tuple(BlockKey(mark + rng.randbytes(KEY_BYTES - len(mark))) for _ in range(count))
        span = Span(Origin(b"i" * 32, b"s" * 32, bytes(16)), BlockKey(bytes(32)), 0, keys)
        shard, layout = Shard(), b"l" * 16
        self.headers = [
            FrameHeader.of(span, i, shard, layout, raw_bytes=block_bytes, content=self.sums[i], created=1.0)
            for i in range(count)
        ]
        self.asked = [Asked(key, shard, layout, b"i" * 32, block_bytes) for key in keys]
        self.names = [address(key, shard) for key in keys]
        self.source_views = [self.dram.view(slot) for slot in self.sources]
        self.target_views = [self.dram.view(slot) for slot in self.targets]

    def view(self, slot: int) -> memoryview:
        return self.dram.view(slot)[: self.block_bytes]

    def close(self) -> None:
        self.dram.close()


def bare_names(blocks: Blocks) -> list[Address]:
    """Where values go that are not encoded, in a tier that encodes: those have another size."""
    return [address(key, Shard(group=1)) for key in (asked.key for asked in blocks.asked)]


def proven(outcomes: Sequence[Outcome]) -> None:
    """Raises ``MediumError`` unless every block is DONE."""
    for outcome in outcomes:
        if not outcome.done:
            raise MediumError(f"a block failed: {outcome.status.value}: {outcome.detail or 'without a reason'}")


class Plane(ABC):
    """One tier at one size of block. Several threads may move different blocks at the same time."""

    io = "memory"
    """How bytes move, as `Medium.io` has it: through the page cache, loads may never see the device."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks

    @abstractmethod
    def ways(self, op: str) -> tuple[Way, Way, Way | None]:
        """How blocks are saved or loaded: as the store does it, without sums and index, and at the machine's limit."""

    @abstractmethod
    def spoil(self, part: range) -> None:
        """Overwrite a little of where loads go."""

    @abstractmethod
    def check(self, part: range) -> None:
        """Raise ``MediumError`` unless the last load gave back what was saved."""

    @abstractmethod
    def close(self) -> None:
        """Remove what was written, and give back what was opened for it."""


class DramPlane(Plane):
    """Slots of an engine's memory <-> slots of the DRAM tier."""

    def __init__(
        self,
        blocks: Blocks,
        engine: SlotMedium,
        rng: random.Random,
        workers: Executor,
        *,
        share: float = SAMPLE,
    ) -> None:
        """``engine``: twice as many slots as blocks. ``workers``: one thread of it helps. ``share``: of loads, are verified."""
        super().__init__(blocks)
        self._engine = engine
        self._rng = rng
        self._workers = workers
        self._share = share
        order = rng.sample(range(2 * blocks.count), 2 * blocks.count)
        self._origin, self._back = order[: blocks.count], order[blocks.count :]
        views = [engine.view(slot) for slot in range(2 * blocks.count)]
        assert None not in views, "an engine's memory on a CPU"
        self._engine_bytes = [np.frombuffer(view or b"", np.uint8, blocks.block_bytes) for view in views]
        self._dram_bytes = [np.frombuffer(blocks.view(slot), np.uint8) for slot in range(2 * blocks.count)]
        for slot, source in zip(self._origin, blocks.sources, strict=True):
            np.copyto(self._engine_bytes[slot], self._dram_bytes[source])

    def ways(self, op: str) -> tuple[Way, Way, Way | None]:
        if op == "save":
            return self._save, self._bare_save, self._limit_save
        return self._load, self._bare_load, self._limit_load

    def _save(self, part: range) -> None:
        blocks, these = self.blocks, slice(part.start, part.stop)
        outcomes, sums = save_blocks(
            self._engine, self._origin[these], blocks.dram, blocks.targets[these], workers=self._workers
        )
        proven(outcomes)
        if sums != blocks.sums[these]:
            raise MediumError("a save made other sums than the blocks have")

    def _load(self, part: range) -> None:
        sums = [self.blocks.sums[i] if self._rng.random() < self._share else None for i in part]
        self._moved_back(part, sums)

    def _bare_save(self, part: range) -> None:
        blocks, these, none = self.blocks, slice(part.start, part.stop), [None] * len(part)
        source, places = self._origin[these], blocks.targets[these]
        proven(load_blocks(self._engine, source, none, blocks.dram, places, workers=self._workers))

    def _bare_load(self, part: range) -> None:
        self._moved_back(part, [None] * len(part))

    def _moved_back(self, part: range, sums: Sequence[bytes | None]) -> None:
        blocks, these = self.blocks, slice(part.start, part.stop)
        proven(
            load_blocks(
                blocks.dram, blocks.targets[these], sums, self._engine, self._back[these], workers=self._workers
            )
        )

    def _limit_save(self, part: range) -> None:
        def copy(i: int) -> None:
            np.copyto(self._dram_bytes[self.blocks.targets[i]], self._engine_bytes[self._origin[i]])

        spread(copy, part, self._hands(part), self._workers)

    def _limit_load(self, part: range) -> None:
        def copy(i: int) -> None:
            np.copyto(self._engine_bytes[self._back[i]], self._dram_bytes[self.blocks.targets[i]])

        spread(copy, part, self._hands(part), self._workers)

    def _hands(self, part: range) -> int:
        """A second thread costs more than it brings where the store's copies have none either."""
        return 2 if len(part) * self.blocks.block_bytes > COPY_BYTES else 1

    def spoil(self, part: range) -> None:
        for i in part:
            self._engine_bytes[self._back[i]][:64] = 0

    def check(self, part: range) -> None:
        if [content_sum(self._engine_bytes[self._back[i]].data) for i in part] != self.blocks.sums[
            part.start : part.stop
        ]:
            raise MediumError("a load gave back other bytes than were saved")

    def close(self) -> None:
        """The engine's memory is its owner's."""


class FramePlane(Plane):
    """DRAM slots <-> frames in a slower medium: the way of demotion and promotion."""

    def __init__(
        self,
        blocks: Blocks,
        medium: PersistentSlotMedium | KeyMedium,
        limit: Limit | None,
        *,
        slots: Sequence[int] = (),
        codec: Codec = RAW,
        sealer: Sealer | None = None,
        index: bool = True,
    ) -> None:
        """``slots``: of a slot medium, one per block. ``index``: a save there includes the transaction of the index."""
        super().__init__(blocks)
        self.medium = medium
        self.io = medium.io
        self._limit = limit
        self._codec = codec
        self._sealer = sealer
        self._places: Sequence[int | Address] = slots or blocks.names
        self._bare: Sequence[int | Address] = self._places if codec.number == 0 else bare_names(blocks)
        self._frames: FrameMedium[int | Address] = medium  # type: ignore[assignment]  # places are this medium's own
        rows = [
            Record(slot, name, name, depth, bytes(16), 1.0)
            for depth, (slot, name) in enumerate(zip(slots, blocks.names, strict=False))
        ]
        self._rows = rows if index else []
        head = max(HEADER_BYTES, medium.header_bytes)
        pages = memoryview(mmap.mmap(-1, _PAGE_BYTES * blocks.count))
        heads = [pages[start : start + head] for start in range(0, len(pages), _PAGE_BYTES)]
        whole = max(medium.header_bytes, 1)
        size = -(-blocks.block_bytes // whole) * whole
        self._sources: list[Iovec] = [
            (page, view[:size]) for page, view in zip(heads, blocks.source_views, strict=True)
        ]
        self._targets: list[Iovec] = [
            (page, view[:size]) for page, view in zip(heads, blocks.target_views, strict=True)
        ]

    def ways(self, op: str) -> tuple[Way, Way, Way | None]:
        limit = self._limit
        if op == "save":
            return self._save, self._bare_save, None if limit is None else lambda part: limit.write(part, self._sources)
        return self._load, self._bare_load, None if limit is None else lambda part: limit.read(part, self._targets)

    def _save(self, part: range) -> None:
        blocks, these = self.blocks, slice(part.start, part.stop)
        sources, headers = blocks.source_views[these], blocks.headers[these]
        proven(write_frames(self._frames, self._places[these], sources, headers, self._codec, sealer=self._sealer))
        if self._rows:
            assert isinstance(self.medium, PersistentSlotMedium), "only those have rows"
            self.medium.journal.commit(self._rows[these], [])

    def _load(self, part: range) -> None:
        blocks, these = self.blocks, slice(part.start, part.stop)
        into, asked = blocks.target_views[these], blocks.asked[these]
        outcomes, _ = read_frames(
            self._frames, self._places[these], into, asked, self._codec, now=0.0, sealer=self._sealer
        )
        proven(outcomes)

    def _bare_save(self, part: range) -> None:
        these = slice(part.start, part.stop)
        proven(self._frames.write(self._bare[these], self._sources[these]))

    def _bare_load(self, part: range) -> None:
        these = slice(part.start, part.stop)
        proven(self._frames.read(self._bare[these], self._targets[these], None))

    def spoil(self, part: range) -> None:
        for view in self.blocks.target_views[part.start : part.stop]:
            view[:64] = bytes(64)

    def check(self, part: range) -> None:
        blocks = self.blocks
        if [content_sum(blocks.view(blocks.targets[i])) for i in part] != blocks.sums[part.start : part.stop]:
            raise MediumError("a load gave back other bytes than were saved")

    def close(self) -> None:
        try:
            if self._limit is not None:
                self._limit.close()
            if isinstance(self.medium, KeyMedium):
                self.medium.delete(list({*self.blocks.names, *bare_names(self.blocks)}))
        finally:
            self.medium.close()


@dataclass(slots=True)
class Timed:
    """What rounds of one direction took."""

    seconds: tuple[list[float], list[float], list[float]] = field(default_factory=lambda: ([], [], []))
    """Per call of every thread: as the store does it, bare, at the limit."""
    latencies: list[float] = field(default_factory=list)
    """Seconds of each single call, as the store makes it."""

    def gb_s(self, which: int, nbytes: int) -> float | None:
        """10^9 bytes a second at the median round of ``nbytes``; None where nothing was timed."""
        return nbytes / 1e9 / statistics.median(self.seconds[which]) if self.seconds[which] else None

    def latency(self, rank: int) -> float:
        """Seconds within which so many percent of the calls ended."""
        found = percentile(self.latencies, rank)
        assert found is not None, "at least two rounds are timed"
        return found


def measure(
    plane: Plane,
    parts: Sequence[range],
    *,
    rounds: int,
    seconds: float = math.inf,
    least: int = 2,
    proceed: Callable[[], None] = lambda: None,
    limits: bool = True,
) -> dict[str, Timed]:
    """Time both directions, a thread per part, in rounds in which the three ways take turns, each first in a third of them.

    At most ``rounds``, and after ``seconds`` no more than ``least``; one more goes before, to warm up. ``proceed`` is called
    between calls and may raise.
    """
    timed = {op: Timed() for op in OPS}
    repeats = dict.fromkeys(OPS, 1)
    end = time.perf_counter() + seconds
    with ThreadPoolExecutor(max(1, len(parts) - 1)) as callers:
        for turn in range(rounds + 1):
            if turn > least and time.perf_counter() > end:
                break
            for op in OPS:
                ways = plane.ways(op)
                took = [0.0, 0.0, 0.0]
                for step in range(3):
                    which = (turn + step) % 3
                    way = ways[which]
                    if way is None or (which == 2 and not limits):
                        continue
                    proceed()
                    latencies: list[float] = []
                    took[which] = _called(way, parts, callers, repeats[op], latencies)
                    if turn:  # the first round warms up
                        timed[op].seconds[which].append(took[which])
                        timed[op].latencies += latencies if which == 0 else []
                if turn == 0:
                    repeats[op] = max(1, min(_MOST_CALLS, math.ceil(_CALLS_SECONDS / max(took[0], 1e-9))))
                for part in parts:
                    if op == "save":
                        ways[0](part)
                        plane.spoil(part)
                    else:
                        ways[0](part)
                        plane.check(part)
    return timed


def _called(way: Way, parts: Sequence[range], callers: Executor, repeat: int, latencies: list[float]) -> float:
    """``repeat`` calls for every part, each part on a thread; seconds for one call of every part."""

    def play(part: range) -> None:
        for _ in range(repeat):
            begun = time.perf_counter()
            way(part)
            latencies.append(time.perf_counter() - begun)

    start = time.perf_counter()
    others = [callers.submit(play, part) for part in parts[1:]]
    try:
        play(parts[0])
    finally:
        for other in others:
            other.exception()
    for other in others:
        other.result()
    return (time.perf_counter() - start) / repeat
