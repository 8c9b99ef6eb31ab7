"""Builders for tests of NVMe: a medium, blocks written down as a tier does it, and read back."""

from __future__ import annotations

from pathlib import Path

from kvtier.abc.medium import MediumContext, Status
from kvtier.codec.raw import RawCodec
from kvtier.quantity import Bytes
from kvtier.storage_backends.nvme import NvmeMedium
from kvtier.transfer.copy import read_frames, write_frames
from kvtier.url import TierUrl

from .support import Batch

MIB = 1 << 20
BLOCK = 100_000
RAW = RawCodec()


def opened(directory: Path, capacity: int = 64 * MIB, block: int = BLOCK, **params: object) -> NvmeMedium:
    given = NvmeMedium.Params(capacity=Bytes(capacity), **params)  # type: ignore[arg-type]
    return NvmeMedium.open(TierUrl.parse(f"nvme://{directory}"), given, MediumContext(block))


def demoted(medium: NvmeMedium, batch: Batch, slots: list[int], used: float = 1.0) -> None:
    outcomes = write_frames(medium, slots, batch.sources, batch.headers, RAW)
    assert all(outcome.done for outcome in outcomes), outcomes
    medium.journal.commit(batch.rows(slots, used), [])


def promoted(medium: NvmeMedium, batch: Batch, slots: list[int]) -> list[Status]:
    """Status per block; a block that is DONE is checked to be the right one."""
    outcomes, _ = read_frames(medium, slots, batch.into, batch.asked, RAW, now=0.0)
    for index, outcome in enumerate(outcomes):
        assert not outcome.done or batch.arrived_whole(index)
    return [outcome.status for outcome in outcomes]
