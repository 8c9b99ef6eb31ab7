"""What is known of each block in DRAM, in arrays: a header object of its own would cost more than the rest of the index."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.codec.frame import SUM_BYTES, FrameHeader
from kvtier.key import KEY_BYTES, Address, BlockKey, Lot, Shard
from kvtier.pool import Slot


@dataclass(frozen=True, slots=True)
class _Shared:
    """What many blocks have in common; kept once, and as long as one of them is there."""

    identity: bytes
    scope: bytes
    tenant: bytes
    shard: Shard
    layout: bytes
    raw_bytes: int
    adapter: bytes
    epoch: int
    root: BlockKey | None
    """Parent of the first blocks of chains; None for all others."""

    @property
    def lot(self) -> Lot:
        return Lot(self.identity, self.tenant, self.adapter, self.epoch)


class HeaderTable:
    """Headers by slot. In DRAM every block is raw, so codec, payload length and stored sum need no place."""

    def __init__(self, slots: int) -> None:
        self._parents: list[Address | None] = [None] * slots
        self._contents = bytearray(SUM_BYTES * slots)
        self._created = array("d", [0.0]) * slots
        self._expires: dict[Slot, float] = {}
        self._depths = array("I", [0]) * slots
        self._shared: list[_Shared | None] = [None] * slots
        self._known: dict[_Shared, _Shared] = {}
        self._blocks: dict[_Shared, int] = {}

    def put(self, slot: Slot, header: FrameHeader, parent: Address | None) -> None:
        """Note the header of the block that ``slot`` holds from now on.

        ``parent`` (None for the first of a chain) is best the very object that stands in the pool: then it takes no memory.
        """
        self.drop(slot)
        root = None if parent else header.parent
        shared = _Shared(
            header.identity,
            header.scope,
            header.tenant,
            header.shard,
            header.layout,
            header.raw_bytes,
            header.adapter,
            header.epoch,
            root,
        )
        shared = self._known.setdefault(shared, shared)
        self._blocks[shared] = self._blocks.get(shared, 0) + 1
        self._shared[slot] = shared
        self._parents[slot] = parent
        self._contents[SUM_BYTES * slot : SUM_BYTES * (slot + 1)] = header.content
        self._created[slot] = header.created
        if header.expires_at is not None:
            self._expires[slot] = header.expires_at
        self._depths[slot] = header.depth

    def share_parent(self, slot: Slot, parent: Address) -> None:
        """``parent``, equal to what is noted for ``slot``, stands in the pool from now on."""
        self._parents[slot] = parent

    def drop(self, slot: Slot) -> None:
        """The slot holds nothing any more."""
        shared = self._shared[slot]
        if shared is None:
            return
        self._shared[slot] = self._parents[slot] = None
        self._expires.pop(slot, None)
        self._blocks[shared] -= 1
        if not self._blocks[shared]:
            del self._blocks[shared], self._known[shared]

    def content(self, slot: Slot) -> bytes:
        """The content sum of the block that ``slot`` holds."""
        return bytes(self._contents[SUM_BYTES * slot : SUM_BYTES * (slot + 1)])

    def get(self, slot: Slot, entry: Address) -> FrameHeader | None:
        """The header of ``entry``'s block in ``slot``; None where the slot holds nothing."""
        shared = self._shared[slot]
        if shared is None:
            return None
        content, parent = self.content(slot), self._parents[slot]
        above = shared.root if parent is None else BlockKey(parent[:KEY_BYTES])
        assert above is not None, f"slot {slot} has a parent or a root"
        return FrameHeader(
            key=BlockKey(entry[:KEY_BYTES]),
            parent=above,
            depth=self._depths[slot],
            identity=shared.identity,
            scope=shared.scope,
            tenant=shared.tenant,
            shard=shared.shard,
            layout=shared.layout,
            created=self._created[slot],
            expires_at=self._expires.get(slot),
            raw_bytes=shared.raw_bytes,
            content=content,
            codec=0,
            payload_bytes=shared.raw_bytes,
            stored=content,
            adapter=shared.adapter,
            epoch=shared.epoch,
        )

    def slots_of(self, start: int, stop: int, wanted: Callable[[Lot], bool]) -> list[Slot]:
        """The slots from ``start`` to before ``stop`` whose blocks are of a lot that is wanted."""
        part = self._shared[start:stop]
        answers = {shared: shared is not None and wanted(shared.lot) for shared in set(part)}
        return [Slot(slot) for slot, shared in enumerate(part, start) if answers[shared]]

    @property
    def count(self) -> int:
        """How many slots hold a block."""
        return sum(self._blocks.values())
