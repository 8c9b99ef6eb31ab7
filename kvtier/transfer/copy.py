"""How a batch of blocks is copied: HBM slots <-> DRAM slots, and DRAM slots <-> frames in a slower medium.

Pure functions: no state but a pool of staging pages, no lock, no policy. Every batch has an outcome per block, in input
order. ``CORRUPT`` says that bytes did not prove; the place or buffer they came to then holds garbage. A ``MediumError``
that a medium raises for a whole batch passes through, after every part of the batch that was under way has ended.

Between HBM and DRAM, where ``workers`` is given, one of its threads and the calling thread deal the parts of a batch out
between them. It must not be the executor that runs the call. Media have threads of their own, which also prove what they read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Protocol, TypeAlias, TypeVar

import numpy as np

from kvtier.abc.codec import Codec
from kvtier.abc.medium import Arrived, Iovec, Outcome, SlotMedium, Status
from kvtier.codec.frame import (
    HEADER_BYTES,
    PLAIN,
    Asked,
    ByteArray,
    FrameHeader,
    Summer,
    content_sum,
    copy_with_sum,
    summer_of,
)
from kvtier.codec.seal import Sealer, new_nonce
from kvtier.errors import CorruptFrame
from kvtier.transfer.deal import dealt
from kvtier.transfer.staging import Staging

COPY_BYTES = 1 << 20
"""Memory that a thread copies before it takes the next part: small, so that two threads end together."""
PART_BYTES = 8 << 20
"""Bytes that one thread copies, encodes or decodes before it goes on to the next part of a batch."""
SEALED_BYTES = 24 << 20
"""Bytes that are sealed and written at a time: more than are encoded, because each write ends with a flush of its own."""
DEVICE_BYTES = 16 << 20
"""Memory of a device that is copied at once while the sums of the part before are made."""

_staging = Staging()

Place_contra = TypeVar("Place_contra", contravariant=True)
Done = TypeVar("Done")
Proven: TypeAlias = tuple[Outcome, "FrameHeader | None"]


class FrameMedium(Protocol[Place_contra]):
    """What both kinds of medium have in common: places are slots of one, addresses of the other."""

    header_bytes: int
    auth_key: bytes | None

    def read(
        self, places: Sequence[Place_contra], into: Sequence[Iovec], arrived: Arrived | None, /
    ) -> list[Outcome]: ...
    def write(self, places: Sequence[Place_contra], data: Sequence[Iovec], /) -> list[Outcome]: ...


def save_blocks(
    source: SlotMedium,
    slots: Sequence[int],
    dram: SlotMedium,
    places: Sequence[int],
    *,
    workers: Executor | None = None,
) -> tuple[list[Outcome], list[bytes]]:
    """Copy ``source`` slots into ``dram`` places; also returns each block's content sum (empty where it failed)."""
    size = source.slot_bytes
    done = Outcome(Status.DONE, size)
    seen = not slots or source.view(slots[0]) is not None

    def save(part: range) -> list[tuple[Outcome, bytes]]:
        rooms = [_seen(dram, places[index]) for index in part]
        if not seen:  # the sums are of what has come to DRAM
            outcomes = source.read([slots[index] for index in part], [[room[:size]] for room in rooms])
            return [
                (end, content_sum(room[:size]) if end.done else b"") for end, room in zip(outcomes, rooms, strict=True)
            ]
        views = [source.view(slots[index]) for index in part]
        return [
            (done, copy_with_sum(_array(view, size), _array(room, size)))
            for view, room in zip(views, rooms, strict=True)
            if view is not None
        ]

    saved = _dealt(save, _parts(len(slots), size, COPY_BYTES if seen else DEVICE_BYTES), workers)
    return [outcome for outcome, _ in saved], [made for _, made in saved]


def load_blocks(
    dram: SlotMedium,
    places: Sequence[int],
    sums: Sequence[bytes | None],
    into: SlotMedium,
    slots: Sequence[int],
    *,
    workers: Executor | None = None,
) -> list[Outcome]:
    """Copy ``dram`` places into slots of ``into``; a block whose content sum is given is proven on the way."""
    size = into.slot_bytes
    done, wrong = Outcome(Status.DONE, size), Outcome(Status.CORRUPT, size, "content sum does not match")
    seen = not slots or into.view(slots[0]) is not None

    def load(part: range) -> list[Outcome]:
        loaded = []
        for index in part:
            source, expected = _seen(dram, places[index]), sums[index]
            if seen:
                view = into.view(slots[index])
                assert view is not None
                proven = _copied(_array(source, size), _array(view, size), expected)
            else:
                proven = expected is None or content_sum(source[:size]) == expected
            loaded.append(done if proven else wrong)
        return loaded

    loaded = _dealt(load, _parts(len(slots), size, COPY_BYTES), workers)
    right = [] if seen else [index for index, outcome in enumerate(loaded) if outcome.done]
    if right:  # proven, and now copied in one batch, which a device may take layer by layer
        sources = [[_seen(dram, places[index])[:size]] for index in right]
        for index, outcome in zip(right, into.write([slots[index] for index in right], sources), strict=True):
            loaded[index] = outcome
    return loaded


def write_frames(
    medium: FrameMedium[Place_contra],
    places: Sequence[Place_contra],
    sources: Sequence[memoryview],
    headers: Sequence[FrameHeader],
    codec: Codec,
    *,
    sealer: Sealer | None = None,
) -> list[Outcome]:
    """Write blocks (``sources[i]``: DRAM views of at least ``headers[i].raw_bytes``) as frames, sealed if there is a ``sealer``.

    The headers' content sums are believed. Codec number, payload length and stored sum are filled in here. Raw frames
    go down in one ``medium.write``; what is encoded or sealed is so, and is written, a part of the batch at a time.
    """
    framer = _Framer(medium.header_bytes, codec, summer_of(medium.auth_key), sealer)

    def frame(part: range, pages: Sequence[memoryview], rooms: Sequence[memoryview]) -> list[Iovec]:
        return [
            framer.frame(headers[i], sources[i], page, room) for i, page, room in zip(part, pages, rooms, strict=True)
        ]

    if codec.number == 0 and sealer is None:
        with _staging.lend(len(places), framer.head) as pages:
            return medium.write(places, frame(range(len(places)), pages, sources))

    def write(part: range) -> list[Outcome]:
        most = max(codec.encoded_bytes(headers[i].raw_bytes) for i in part)
        with _staging.lend(len(part), framer.head) as pages, _staging.lend(len(part), most) as rooms:
            return medium.write(places[part.start : part.stop], frame(part, pages, rooms))

    most = max((header.raw_bytes for header in headers), default=1)
    parts = _parts(len(places), most, PART_BYTES if codec.number else SEALED_BYTES)
    return [outcome for part in parts for outcome in write(part)]


def read_frames(
    medium: FrameMedium[Place_contra],
    places: Sequence[Place_contra],
    into: Sequence[memoryview],
    asked: Sequence[Asked],
    codec: Codec,
    *,
    now: float,
    sealer: Sealer | None = None,
) -> tuple[list[Outcome], list[FrameHeader | None]]:
    """Read frames into DRAM views (at least ``asked[i].raw_bytes`` long) and prove each: header, identity, sums.

    The sums of a frame are made by the thread that read it, as soon as it is there. Also returns the header of each block that is
    DONE: its content sum and expiry go into the pool. A frame that is expired at ``now`` (wall-clock seconds) is ABSENT;
    whatever is not what was asked for is CORRUPT and says why: a sealed frame where there is no ``sealer`` as well, and one
    that is not sealed where there is.
    """
    framer = _Framer(medium.header_bytes, codec, summer_of(medium.auth_key), sealer)
    headers: list[FrameHeader | None] = [None] * len(places)

    def read(part: range) -> list[Outcome]:
        most = max(codec.encoded_bytes(asked[i].raw_bytes) for i in part)
        with (
            _staging.lend(len(part), framer.head) as pages,
            _staging.lend(len(part) if codec.number else 0, most) as encoded,
        ):
            rooms = encoded if codec.number else [framer.padded(into[i], asked[i].raw_bytes) for i in part]
            frames = [(page[: framer.head], room) for page, room in zip(pages, rooms, strict=True)]

            if framer.plain:
                return _read_plain(part, frames)

            def prove(at: int, outcome: Outcome) -> Outcome:
                index = part[at]
                outcome, headers[index] = framer.proven(outcome, frames[at], into[index], asked[index], now)
                return outcome

            return medium.read(places[part.start : part.stop], frames, prove)

    def _read_plain(part: range, frames: Sequence[Iovec]) -> list[Outcome]:
        """Sums while the bytes are in the cache, and headers of the whole batch behind: one by one that is three times dearer."""
        sums = [b""] * len(part)
        payloads = [into[index][: asked[index].raw_bytes] for index in part]

        def add_up(at: int, outcome: Outcome) -> Outcome:
            sums[at] = content_sum(payloads[at])
            return outcome

        outcomes = medium.read(places[part.start : part.stop], frames, add_up)
        for at, outcome in enumerate(outcomes):
            if outcome.done:
                index = part[at]
                outcomes[at], headers[index] = framer.proven(
                    outcome, frames[at], into[index], asked[index], now, sums[at]
                )
        return outcomes

    parts = (
        _parts(len(places), max((one.raw_bytes for one in asked), default=1)) if codec.number else [range(len(places))]
    )
    return [outcome for part in parts if part for outcome in read(part)], headers


class _Framer:
    """Makes and proves the frames of one medium with one codec."""

    def __init__(self, header_bytes: int, codec: Codec, summer: Summer, sealer: Sealer | None) -> None:
        self.head = max(HEADER_BYTES, header_bytes)
        self._page_bytes = header_bytes
        self._codec = codec
        self._summer = summer
        self._sealer = sealer
        self.plain = codec.number == 0 and summer is PLAIN and sealer is None
        """Whether the stored sum of a frame is the content sum of the block that it was made of."""

    def padded(self, view: memoryview, nbytes: int) -> memoryview:
        """The first ``nbytes`` of ``view``, made up to whole pages where the medium moves pages and the view has room."""
        if self._page_bytes:
            nbytes = min(len(view), -(-nbytes // self._page_bytes) * self._page_bytes)
        return view[:nbytes]

    def frame(self, header: FrameHeader, source: memoryview, page: memoryview, room: memoryview) -> Iovec:
        raw = source[: header.raw_bytes]
        if self._sealer is not None:
            return self._sealed(self._sealer, header, raw, page, room)
        if self._codec.number == 0:
            stored = header.content if self._summer is PLAIN else self._summer.of(raw)
            if (header.codec, header.payload_bytes, header.stored) != (
                0,
                header.raw_bytes,
                stored,
            ):  # from another tier
                header = header._replace(codec=0, payload_bytes=header.raw_bytes, stored=stored)
            payload = self.padded(source, header.raw_bytes)
        else:
            used = self._codec.encode(raw, room)
            header = header._replace(codec=self._codec.number, payload_bytes=used, stored=self._summer.of(room[:used]))
            payload = self.padded(room, used)
        header.pack_into(page, self._summer)
        return page[: self.head], payload

    def _sealed(
        self, sealer: Sealer, header: FrameHeader, raw: memoryview, page: memoryview, room: memoryview
    ) -> Iovec:
        plain = raw if self._codec.number == 0 else room[: self._codec.encode(raw, room)]
        used = len(plain)
        header = header._replace(codec=self._codec.number, payload_bytes=used, nonce=new_nonce())
        header.pack_into(page, self._summer)
        content, tag = sealer.seal(header.tenant, header.nonce, page, header.content, plain, room)
        header._replace(content=content, stored=tag).pack_into(page, self._summer)
        payload = self.padded(room, used)
        payload[used:] = bytes(len(payload) - used)  # staged memory has held plain bytes before
        page[HEADER_BYTES : self.head] = bytes(self.head - HEADER_BYTES)
        return page[: self.head], payload

    def proven(
        self, outcome: Outcome, frame: Iovec, into: memoryview, asked: Asked, now: float, content: bytes | None = None
    ) -> Proven:
        """The outcome of a read once its header, its sums and its age have been looked at; ``into`` then holds the block.

        ``content``: sum of the block's bytes, where it has been made already and all is ``plain``.
        """
        try:
            header = self._believed(frame, outcome.nbytes - self.head, into, asked, content)
        except CorruptFrame as wrong:
            return Outcome(Status.CORRUPT, outcome.nbytes, str(wrong)), None
        if header.expired(now):
            return Outcome(Status.ABSENT, 0, "expired"), None
        return outcome, header

    def _believed(self, frame: Iovec, came: int, into: memoryview, asked: Asked, content: bytes | None) -> FrameHeader:
        page, room = frame
        header = FrameHeader.parse(page, self._summer)
        wrong = header.disproof(asked, self._codec.number)
        if wrong is not None:
            raise CorruptFrame(wrong)
        if header.payload_bytes > min(came, len(room)):
            raise CorruptFrame(f"{came} bytes came of a payload of {header.payload_bytes}")
        if self._codec.number == 0 and header.payload_bytes != header.raw_bytes:
            raise CorruptFrame(f"raw payload of {header.payload_bytes} bytes for a block of {header.raw_bytes}")
        payload = room[: header.payload_bytes]
        if self._sealer is not None:
            return self._opened(self._sealer, header, page, payload, into[: asked.raw_bytes])
        if header.nonce:
            raise CorruptFrame("the frame is sealed, and this tier has no key (encrypt=KEYFILE)")
        stored = self._summer.of(payload) if content is None else content
        if stored != header.stored:
            raise CorruptFrame("stored sum does not match")
        if self._codec.number == 0:
            # A plain stored sum of raw bytes is their content sum; a keyed one was made of whatever DRAM held by then.
            if (header.stored if self._summer is PLAIN else content_sum(payload)) != header.content:
                raise CorruptFrame("content sum does not match")
            return header
        raw = into[: asked.raw_bytes]
        self._codec.decode(payload, raw)
        if not self._codec.lossy and content_sum(raw) != header.content:
            raise CorruptFrame("content sum does not match")
        return header

    def _opened(
        self, sealer: Sealer, header: FrameHeader, page: memoryview, payload: memoryview, raw: memoryview
    ) -> FrameHeader:
        """The header with its content sum in plain, once ``raw`` holds the block; of the raw codec ``payload`` lies in it."""
        if not header.nonce:
            raise CorruptFrame("the frame is not sealed, and this tier has a key (encrypt=KEYFILE)")
        content, came = sealer.open(header.tenant, header.nonce, page, header.content, header.stored, payload)
        if self._codec.number:
            self._codec.decode(payload, raw)
            came = content_sum(raw)
        if came != content:  # the seal vouches for what DRAM held by then, and this for what was saved
            raise CorruptFrame("content sum does not match")
        return header._replace(content=content, stored=content, codec=0, payload_bytes=header.raw_bytes, nonce=b"")


def _seen(dram: SlotMedium, place: int) -> memoryview:
    view = dram.view(place)
    assert view is not None, "DRAM slots are addressable"
    return view


def _array(view: memoryview, nbytes: int) -> ByteArray:
    return np.frombuffer(view, np.uint8, nbytes)


def _copied(source: ByteArray, into: ByteArray, expected: bytes | None) -> bool:
    if expected is None:
        np.copyto(into, source)
        return True
    return copy_with_sum(source, into) == expected


def _parts(count: int, each_bytes: int, part_bytes: int = PART_BYTES) -> list[range]:
    size = max(1, part_bytes // max(1, each_bytes))
    return [range(start, min(count, start + size)) for start in range(0, count, size)]


def _dealt(function: Callable[[range], list[Done]], parts: Sequence[range], workers: Executor | None) -> list[Done]:
    """Results of all parts in order."""
    return [done for result in dealt(lambda at: function(parts[at]), len(parts), workers) for done in result]
