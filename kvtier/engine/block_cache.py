"""The engine's HBM blocks: a `BlockPool` seen as block tables and a prefix cache.

Everything here is called under the engine's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvtier.abc.policy import EntryMeta
from kvtier.engine.sequence import Sequence as TokenSequence
from kvtier.key import Address
from kvtier.pool import BlockPool, Slot


class BlockCache:
    """Hands slots to sequences, publishes what they fill, and finds it again by prefix."""

    def __init__(
        self, pool: BlockPool, block_tokens: int, block_bytes: int, clock: Callable[[], float], *, reuse: bool = True
    ) -> None:
        """``reuse=False`` keeps paging and forks but neither publishes nor finds blocks."""
        self.pool = pool
        self.block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._clock = clock
        self._reuse = reuse

    def blocks(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_tokens)

    @property
    def available(self) -> int:
        """Slots that an allocation could have now."""
        return self.pool.free + self.pool.evictable

    def match(self, addresses: Sequence[Address]) -> list[Slot]:
        """Slots of the longest resident prefix; takes no reference."""
        return self.pool.lookup(addresses) if self._reuse else []

    def acquire(self, slots: Sequence[Slot]) -> None:
        """Hold a chain's READY slots for a sequence and note their use."""
        if slots:
            self.pool.acquire(slots)
            self.pool.touch(slots, self._clock())

    def share(self, slots: Sequence[Slot]) -> None:
        """One more reference to slots that somebody holds."""
        if slots:
            self.pool.acquire(slots)

    def release(self, slots: Sequence[Slot]) -> None:
        self.pool.release(slots, self._clock())

    def allocate(self, count: int) -> list[Slot] | None:
        """``count`` slots for one sequence, or None where not so many can be had."""
        got = self.pool.allocate(count, self._clock())
        return None if got is None else got.slots

    def free(self, sequence: TokenSequence) -> None:
        """Take back a sequence's references; what it published stays, to be found until it is evicted."""
        if sequence.slots:
            self.pool.refresh(sequence.slots, self._clock())
            self.pool.release(sequence.slots, self._clock())
        sequence.slots = []
        sequence.computed = sequence.committed = 0
        sequence.tail_shared = False

    def publish(self, sequence: TokenSequence) -> None:
        """Commit the blocks that ``sequence`` has filled since the last time, tail first.

        Where another copy of a block is there already this one stays private, and goes when the sequence lets it go.
        """
        full = sequence.computed // self.block_tokens
        if full <= sequence.committed:
            return
        sequence.chain.extend(sequence.tokens)
        if self._reuse:
            addresses, now = sequence.chain.addresses, self._clock()
            new = slice(sequence.committed, full)
            metas = [
                EntryMeta(
                    addresses[index - 1] if index else None,
                    index,
                    self._block_bytes,
                    priority=sequence.hints.priority,
                    tenant=sequence.chain.origin.tenant,
                )
                for index in range(new.start, full)
            ]
            self.pool.commit_all(sequence.slots[new], addresses[new], metas, now)
        sequence.committed = full

    def own_tail(self, sequence: TokenSequence) -> bool:
        """Whether the block that ``sequence`` writes next is its alone, or does not exist yet."""
        if not sequence.tail_shared:
            return True
        index = sequence.computed // self.block_tokens
        return index >= len(sequence.slots) or self.pool.references(sequence.slots[index]) == 1

    def drop(self, addresses: Sequence[Address]) -> None:
        """Forget blocks: nobody finds them any more, and their slots are free once their last holder lets them go."""
        for slot in self.pool.resident(addresses):
            self.pool.retire(slot, evicted=False)
            self.pool.release([slot], self._clock())

    def check(self, sequences: Iterable[TokenSequence], others: Iterable[Slot]) -> list[str]:
        """Disagreements between pool and block tables, in words; ``others``: slots held by who is no sequence."""
        found = self.pool.check()
        held = Counter(others)
        for sequence in sequences:
            held.update(sequence.slots)
            least, most = self.blocks(sequence.computed), self.blocks(len(sequence.tokens))
            if sequence.slots and not least <= len(sequence.slots) <= most:
                found.append(f"{sequence.id} has {len(sequence.slots)} slots and needs from {least} to {most}")
        for slot in map(Slot, range(self.pool.capacity)):
            counted = self.pool.references(slot)
            if counted != held[slot]:
                found.append(f"slot {slot} is counted {counted} times and held {held[slot]} times")
        return found

    def reset(self) -> int:
        """Drop every block that nobody holds; returns how many."""
        dropped = 0
        for entry in self.pool.entries():
            slot = self.pool.slot(entry)
            if slot is not None and self.pool.references(slot) == 0:
                self.pool.retire(slot, evicted=False)
                self.pool.release([slot], self._clock())
                dropped += 1
        return dropped
