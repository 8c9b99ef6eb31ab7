"""The GPU's memory, or its stand-in on a CPU: the engine's own block-major tensor as a slot medium."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch

from kvtier.abc.medium import Iovec, MediumContext, Outcome, SlotMedium, Status
from kvtier.codec.frame import ByteArray
from kvtier.errors import CapacityError, ConfigError
from kvtier.machine import require_memory
from kvtier.quantity import rounded_bytes
from kvtier.storage_backends.iovec import gather, scatter, total
from kvtier.url import TierUrl


class HbmMedium(SlotMedium):
    """Slots are the first dimension of ``tensor`` (contiguous ``[slot, ...]``), so that one block is one copy.

    On a CPU every slot has a ``view``. On another device there is none: copies go through torch and are complete when
    the call returns.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Params:
        """Nothing to set: the engine allocates this tier."""

    tensor: torch.Tensor
    """``[slot, ...]``, written by the engine's kernels and by this medium alike."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous() or tensor.dim() < 2:
            raise ValueError(f"HBM slots need a contiguous tensor [slot, ...], got {tuple(tensor.shape)}")
        self.tensor = tensor
        self.slots = tensor.shape[0]
        self._bytes = tensor.view(self.slots, -1).view(torch.uint8)
        self.slot_bytes = self._bytes.shape[1]
        self._rows: ByteArray | None = self._bytes.numpy() if tensor.device.type == "cpu" else None
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

    def read(self, slots: Sequence[int], into: Sequence[Iovec]) -> list[Outcome]:
        outcomes = [self._read(slot, buffers) for slot, buffers in zip(slots, into, strict=True)]
        with self._lock:
            self.bytes_read += sum(outcome.nbytes for outcome in outcomes)
        return outcomes

    def write(self, slots: Sequence[int], data: Sequence[Iovec]) -> list[Outcome]:
        outcomes = [self._write(slot, buffers) for slot, buffers in zip(slots, data, strict=True)]
        with self._lock:
            self.bytes_written += sum(outcome.nbytes for outcome in outcomes)
        return outcomes

    def close(self) -> None:
        """The tensor stays the engine's."""

    def _read(self, slot: int, into: Iovec) -> Outcome:
        if self._rows is not None:
            return scatter(self._rows[slot], into)
        return scatter(self._bytes[slot].cpu().numpy(), into)

    def _write(self, slot: int, data: Iovec) -> Outcome:
        if self._rows is not None:
            return gather(data, self._rows[slot])
        size = total(data)
        if size > self.slot_bytes:
            return Outcome(Status.FAILED, 0, f"{size} bytes do not fit a place of {self.slot_bytes}")
        staged = np.empty(size, np.uint8)
        gather(data, staged)
        self._bytes[slot, :size].copy_(torch.from_numpy(staged))
        return Outcome(Status.DONE, size)
