"""How often something was seen lately, in little room and never too low."""

from __future__ import annotations

from kvtier.key import Address

MOST = 15
"""Where a counter stops: four bits, as in TinyLFU."""
SAMPLE = 10
"""References per entry of capacity after which every counter is halved."""
_MIX = 0x9E3779B97F4A7C15F39CC0605CEDC835
_HALVED = bytes(count >> 1 for count in range(256))


class FrequencySketch:
    """A count-min sketch of four rows behind a doorkeeper (Einziger, Friedman, Manes: TinyLFU, ACM ToS 2017).

    The doorkeeper, a Bloom filter, takes the first use of a sample, so that what comes once does not fill the rows. An entry's
    places follow from its own bytes, so that every process counts alike.
    """

    def __init__(self, capacity: int) -> None:
        self._bits = max(4, (2 * capacity - 1).bit_length())
        self._rows = [bytearray(1 << self._bits) for _ in range(4)]
        self._door = bytearray(1 << self._bits)
        self._sample = SAMPLE * max(1, capacity)
        self._seen = 0

    def _places(self, entry: Address) -> tuple[int, int, int, int]:
        mixed = int.from_bytes(entry[:8], "little") * _MIX
        mask = (1 << self._bits) - 1
        return mixed >> 32 & mask, mixed >> 56 & mask, mixed >> 80 & mask, mixed >> 96 & mask

    def add(self, entry: Address) -> None:
        """One more use."""
        a, b, c, d = self._places(entry)
        door = self._door
        if not (door[a] and door[c]):
            door[a] = door[c] = 1
        else:
            for row, place in zip(self._rows, (a, b, c, d), strict=True):
                if row[place] < MOST:
                    row[place] += 1
        self._seen += 1
        if self._seen >= self._sample:
            self._seen //= 2
            self._rows = [row.translate(_HALVED) for row in self._rows]
            self._door = bytearray(len(door))

    def count(self, entry: Address) -> int:
        """How often the entry was used lately; an upper bound."""
        places = self._places(entry)
        door = self._door
        counted = min(row[place] for row, place in zip(self._rows, places, strict=True))
        return counted + bool(door[places[0]] and door[places[2]])
