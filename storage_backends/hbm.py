"""The GPU's memory, or its stand-in on a CPU: the engine's own block-major tensor as a slot medium."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch

from kvtier.abc.medium import Iovec, LayeredSlots, MediumContext, Outcome, SlotMedium, Status
from kvtier.codec.frame import ByteArray
from kvtier.errors import CapacityError, ConfigError
from kvtier.machine import require_memory
from kvtier.quantity import rounded_bytes
from kvtier.storage_backends.cuda_copy import CopyQueue, CudaQueue, Mark, Way
from kvtier.storage_backends.iovec import gather, scatter, total
from kvtier.url import TierUrl

if TYPE_CHECKING:
    from kvtier.abc.store import Fence

LAYER_GROUPS = 8
"""Parts of a layered load: the first layers wait for an eighth of it. With more parts, each of them is smaller and slower."""


class HbmMedium(SlotMedium):
    """Slots are the first dimension of ``tensor`` (contiguous ``[slot, layer, ...]``), so that one block is one copy.

    On a CPU every slot has a ``view``. On a device there is none: reads and writes go through a ``CopyQueue``, and are
    complete when the call returns. What they have to wait for in the engine's computation is in ``fence``.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Params:
        """Nothing to set: the engine allocates this tier."""

    tensor: torch.Tensor
    """``[slot, layer, ...]``, written by the engine's kernels and by this medium alike."""

    def __init__(self, tensor: torch.Tensor, queue: CopyQueue | None = None) -> None:
        """``queue`` copies between the tensor's device and the host; by default CUDA's for a CUDA tensor, none for a CPU's."""
        if not tensor.is_contiguous() or tensor.dim() < 2:
            raise ValueError(f"HBM slots need a contiguous tensor [slot, ...], got {tuple(tensor.shape)}")
        self.tensor = tensor
        self.slots = tensor.shape[0]
        rows = tensor.view(self.slots, -1).view(torch.uint8)
        self.slot_bytes = rows.shape[1]
        self._base = tensor.data_ptr()
        self._queue = CudaQueue(tensor.device) if queue is None and tensor.is_cuda else queue
        self._rows: ByteArray | None = rows.numpy() if self._queue is None else None
        self._views = [] if self._rows is None else [memoryview(row) for row in self._rows]  # type: ignore[arg-type]  # a row is a buffer
        self._lock = threading.Lock()

    @classmethod
    def allocate(
        cls, slots: int, shape_per_slot: Sequence[int], dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> HbmMedium:
        """Zero-filled slots, touched once so that no step pays for first use. Raises ``CapacityError``."""
        asked = slots * torch.Size(shape_per_slot).numel() * dtype.itemsize
        if torch.device(device).type == "cpu":
            require_memory(asked, f"{slots} HBM blocks")
        try:
            tensor = torch.zeros((slots, *shape_per_slot), dtype=dtype, device=device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise CapacityError(f"asked for {rounded_bytes(asked)} of memory on {device}: {error}") from error
        return cls(tensor.zero_())

    @classmethod
    def open(cls, location: TierUrl, params: Params, context: MediumContext) -> NoReturn:
        del params, context
        raise ConfigError(
            f"{location}: HBM belongs to the engine, which sizes it itself (hbm_blocks); name no tier for it"
        )

    def view(self, slot: int) -> memoryview | None:
        return self._views[slot] if self._views else None

    def fence(self) -> Fence | None:
        return None if self._queue is None else self._queue.fence()

    def layered(self, blocks: int) -> LayeredSlots | None:
        return None if self._queue is None else _LayeredHbm(self, self._queue, blocks)

    def read(self, slots: Sequence[int], into: Sequence[Iovec]) -> list[Outcome]:
        if self._rows is None:
            outcomes = self._moved(Way.TO_HOST, slots, into)
        else:
            outcomes = [scatter(self._rows[slot], buffers) for slot, buffers in zip(slots, into, strict=True)]
        self.count(read=sum(outcome.nbytes for outcome in outcomes))
        return outcomes

    def write(self, slots: Sequence[int], data: Sequence[Iovec]) -> list[Outcome]:
        if self._rows is None:
            outcomes = self._moved(Way.TO_DEVICE, slots, data)
        else:
            outcomes = [gather(buffers, self._rows[slot]) for slot, buffers in zip(slots, data, strict=True)]
        self.count(written=sum(outcome.nbytes for outcome in outcomes))
        return outcomes

    def close(self) -> None:
        """The tensor stays the engine's."""

    def address(self, slot: int) -> int:
        """Where a slot begins in its device's memory."""
        return self._base + slot * self.slot_bytes

    def count(self, *, read: int = 0, written: int = 0) -> None:
        """Add to what has been moved."""
        with self._lock:
            self.bytes_read += read
            self.bytes_written += written

    def _moved(self, way: Way, slots: Sequence[int], buffers: Sequence[Iovec]) -> list[Outcome]:
        """Copy between slots and buffers laid end to end, all buffers of one size at once."""
        assert self._queue is not None
        outcomes = []
        pairs: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for slot, pieces in zip(slots, buffers, strict=True):
            if total(pieces) > self.slot_bytes and way is Way.TO_DEVICE:
                why = f"{total(pieces)} bytes do not fit a place of {self.slot_bytes}"
                outcomes.append(Outcome(Status.FAILED, 0, why))
                continue
            start = 0
            for piece in pieces:
                size = min(len(piece), self.slot_bytes - start)
                if size:
                    pairs[size].append(_pair(way, self.address(slot) + start, address_of(piece)))
                start += size
            outcomes.append(Outcome(Status.DONE, start))
        marks: list[Mark] = []
        try:
            marks.extend(self._queue.copy(way, some, size) for size, some in pairs.items())
        finally:
            for mark in marks:
                mark.wait()
        return outcomes


class _LayeredHbm(LayeredSlots):
    """One load into HBM, its copies queued for the first layers first, with a mark behind each group of layers."""

    def __init__(self, hbm: HbmMedium, queue: CopyQueue, blocks: int) -> None:
        self.slots, self.slot_bytes = hbm.slots, hbm.slot_bytes
        self._hbm, self._queue, self._blocks = hbm, queue, blocks
        self._layers = hbm.tensor.shape[1]
        self._group = -(-self._layers // LAYER_GROUPS)
        self._queued = [0] * -(-self._layers // self._group)
        """Blocks whose copies are queued, by group of layers."""
        self._marks: list[Mark | None] = [None] * len(self._queued)
        """Behind the copies of each group: the last one, as they are all in one stream."""
        self._ended = False
        self._changed = threading.Condition()

    def read(self, slots: Sequence[int], into: Sequence[Iovec]) -> list[Outcome]:
        return self._hbm.read(slots, into)

    def write(self, slots: Sequence[int], data: Sequence[Iovec]) -> list[Outcome]:
        assert all(len(buffers) == 1 and len(buffers[0]) == self.slot_bytes for buffers in data), "whole blocks"
        places = [(self._hbm.address(slot), address_of(buffer)) for slot, (buffer,) in zip(slots, data, strict=True)]
        layer_bytes = self.slot_bytes // self._layers
        mark: Mark | None = None
        try:
            for group, first in enumerate(range(0, self._layers, self._group)):
                start, count = first * layer_bytes, min(self._group, self._layers - first)
                pairs = [(to + start, source + start) for to, source in places]
                mark = self._queue.copy(Way.TO_DEVICE, pairs, count * layer_bytes)
                with self._changed:
                    self._marks[group] = mark
                    self._queued[group] += len(places)
                    self._changed.notify_all()
        finally:
            if mark is not None:
                mark.wait()
        self._hbm.count(written=len(places) * self.slot_bytes)
        return [Outcome(Status.DONE, self.slot_bytes)] * len(places)

    def close(self) -> None:
        """Nothing of its own."""

    def wait_for_layer(self, layer: int, timeout: float) -> bool:
        group = layer // self._group
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended or self._queued[group] >= self._blocks, timeout):
                return False
            mark = self._marks[group]
        if mark is not None:
            mark.hold_compute()
        return True

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def address_of(buffer: memoryview) -> int:
    """Where a contiguous buffer begins in this process's memory."""
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def _pair(way: Way, device: int, host: int) -> tuple[int, int]:
    return (device, host) if way is Way.TO_DEVICE else (host, device)
