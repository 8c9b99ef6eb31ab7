"""Why blocks went, and what requests were told: bounded memory of both, so that a miss can always be explained."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from kvtier.abc.store import BlockFound, Reason
from kvtier.key import Address

T = TypeVar("T")

MOST_GONE = 1 << 15
"""Blocks whose end is remembered."""
MOST_REFUSED = 1 << 16
"""Blocks that are refused although a tier may still have them."""
MOST_REQUESTS = 4096
"""Requests whose last match is remembered, each as runs of equal answers."""


@dataclass(frozen=True, slots=True)
class LoadTiming:
    """What one request's load moved into the engine, and how long that took from first read to last scatter."""

    nbytes: int
    seconds: float


def repeats(things: list[T]) -> Iterator[tuple[T, int]]:
    """What stands in a list, and how often each repeats before the next.

    Of thousands of blocks there are few, and equal ones are mostly one object: so slices of doubling length are compared, which
    takes a hundredth of a look at each.
    """
    start = 0
    while start < len(things):
        first, count, step = things[start], 1, 1
        while step:
            ahead = things[start + count : start + count + step]
            if ahead and ahead == [first] * len(ahead):
                count += len(ahead)
                step *= 2
            else:
                step //= 2
        yield first, count
        start += count


class History:
    """Called under the store's lock."""

    def __init__(self) -> None:
        self._gone: OrderedDict[Address, Reason] = OrderedDict()
        self._refused: OrderedDict[Address, Reason] = OrderedDict()
        self._told: OrderedDict[str, list[tuple[BlockFound, int]]] = OrderedDict()
        self._timed: OrderedDict[str, LoadTiming] = OrderedDict()

    def went(self, addresses: Iterable[Address], reason: Reason) -> None:
        for address in addresses:
            self._gone[address] = reason
            self._gone.move_to_end(address)
        while len(self._gone) > MOST_GONE:
            self._gone.popitem(last=False)

    def came(self, address: Address) -> None:
        """The block was saved again: what was said of it before is over."""
        self._gone.pop(address, None)
        self._refused.pop(address, None)

    def refuse(self, address: Address, reason: Reason) -> None:
        """The block did not prove or was dropped: it misses until it is saved again, whoever still has it."""
        self._refused[address] = reason
        while len(self._refused) > MOST_REFUSED:
            self._refused.popitem(last=False)

    def refuses(self, address: Address) -> bool:
        return address in self._refused

    def why(self, address: Address) -> Reason:
        return self._refused.get(address) or self._gone.get(address, Reason.NEVER_STORED)

    def tell(self, request_id: str, blocks: list[BlockFound]) -> None:
        self._told.pop(request_id, None)
        self._told[request_id] = list(repeats(blocks))
        while len(self._told) > MOST_REQUESTS:
            self._told.popitem(last=False)

    def time(self, request_id: str, timing: LoadTiming) -> None:
        self._timed.pop(request_id, None)
        self._timed[request_id] = timing
        while len(self._timed) > MOST_REQUESTS:
            self._timed.popitem(last=False)

    def timed(self, request_id: str) -> LoadTiming | None:
        return self._timed.get(request_id)

    def told(self, request_id: str) -> list[BlockFound]:
        return [block for block, count in self._told.get(request_id, []) for _ in range(count)]
