"""What the index knows of a block in DRAM, and what that takes."""

from __future__ import annotations

import gc
import tracemalloc

from kvtier.codec.frame import FrameHeader
from kvtier.key import Address
from kvtier.policy.lru import LruPolicy
from kvtier.storage_backends.dram import DramMedium
from kvtier.store.arena import Arena
from tests.store.builders import GEOMETRY, chain

MOST_BYTES = 400
BLOCKS_A_CHAIN = 8


def headers_of(number: int, blocks: int = BLOCKS_A_CHAIN) -> list[tuple[Address, FrameHeader]]:
    keys = chain(number, blocks)
    return [
        (
            address,
            FrameHeader.of(
                keys,
                index,
                GEOMETRY.shard,
                GEOMETRY.layout,
                raw_bytes=GEOMETRY.block_bytes,
                content=number.to_bytes(8, "little") + index.to_bytes(8, "little"),
                created=1000.5 + number,
                expires_at=2000.25 if number % 2 else None,
            ),
        )
        for index, address in enumerate(GEOMETRY.addresses(keys))
    ]


def show(arena: Arena, chain_of: list[tuple[Address, FrameHeader]]) -> None:
    """As a save does: tail first."""
    slots, _ = arena.take(len(chain_of), 0.0)
    for slot, (address, header) in reversed(list(zip(slots, chain_of, strict=True))):
        assert arena.show(slot, address, header, 0.0)
    arena.pool.release(slots, 0.0)


def test_headers_come_back_as_they_were() -> None:
    arena = Arena(DramMedium(64, GEOMETRY.block_bytes, prefault=False), LruPolicy(64))
    chains = [headers_of(number, 4) for number in range(4)]
    for each in chains:
        show(arena, each)
    for address, header in (pair for each in chains for pair in each):
        slot = arena.pool.slot(address)
        assert slot is not None
        assert arena.header(slot) == header
        assert arena.headers.content(slot) == header.content
    assert arena.check() == []


def test_a_slot_used_again_has_nothing_of_the_block_before() -> None:
    arena = Arena(DramMedium(4, GEOMETRY.block_bytes, prefault=False), LruPolicy(4))
    show(arena, headers_of(1, 4))
    later = [(address, header._replace(tenant=bytes([7]) * 16)) for address, header in headers_of(2, 4)]
    show(arena, later)
    for address, header in later:
        slot = arena.pool.slot(address)
        assert slot is not None
        assert arena.header(slot) == header
    assert arena.headers.count == 4
    assert arena.check() == []


def test_a_header_without_its_block_is_noticed() -> None:
    arena = Arena(DramMedium(4, GEOMETRY.block_bytes, prefault=False), LruPolicy(4))
    show(arena, headers_of(1, 2))
    slot = arena.pool.slot(headers_of(1, 2)[0][0])
    assert slot is not None
    arena.headers.drop(slot)
    assert any("no header" in wrong for wrong in arena.check())


def test_an_entry_takes_a_few_hundred_bytes_of_index() -> None:
    # Just past the size at which the hash tables double: as bad as it gets.
    count = 2 * (1 << 14) // 3 // BLOCKS_A_CHAIN * BLOCKS_A_CHAIN + BLOCKS_A_CHAIN
    medium = DramMedium(count, GEOMETRY.block_bytes, prefault=False)
    gc.collect()
    tracemalloc.start()
    try:
        arena = Arena(medium, LruPolicy(count))
        for number in range(count // BLOCKS_A_CHAIN):
            show(arena, headers_of(number))
        gc.collect()
        each = tracemalloc.get_traced_memory()[0] / count
    finally:
        tracemalloc.stop()
    assert arena.pool.ready == count
    print(f"{each:.0f} bytes per entry")
    assert each <= MOST_BYTES
