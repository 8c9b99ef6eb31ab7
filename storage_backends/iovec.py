"""Copies between one contiguous place and buffers laid end to end, without holding the GIL."""

from __future__ import annotations

import numpy as np

from kvtier.abc.medium import Iovec, Outcome, Status
from kvtier.codec.frame import ByteArray


def total(buffers: Iovec) -> int:
    """Bytes of all buffers."""
    return sum(map(len, buffers))


def scatter(place: ByteArray, into: Iovec) -> Outcome:
    """Fill ``into`` from the start of ``place``; what reaches beyond it stays as it was."""
    start = 0
    for buffer in into:
        piece = place[start : start + len(buffer)]
        np.copyto(np.frombuffer(buffer, np.uint8, len(piece)), piece)
        start += len(piece)
    return Outcome(Status.DONE, start)


def gather(data: Iovec, place: ByteArray) -> Outcome:
    """Lay ``data`` end to end at the start of ``place``; FAILED, and nothing written, where it is too long."""
    size = total(data)
    if size > len(place):
        return Outcome(Status.FAILED, 0, f"{size} bytes do not fit a place of {len(place)}")
    start = 0
    for buffer in data:
        np.copyto(place[start : start + len(buffer)], np.frombuffer(buffer, np.uint8))
        start += len(buffer)
    return Outcome(Status.DONE, size)
