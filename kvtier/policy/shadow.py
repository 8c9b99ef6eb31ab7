"""Shadow caches: what policies would hit had they decided, on all references or on a sample of whole branches."""

from __future__ import annotations

import random
from collections.abc import Sequence

import xxhash

from kvtier.abc.policy import EntryMeta, EvictionPolicy
from kvtier.key import Address

KEPT = 100
"""Chains that stand for the recent ones."""
RECENT = 6400
"""About so many of the last chains are the recent ones."""
LEAST_SHARED = 5
"""Of the chains kept: what fewer of them share is a branch, so what 5 % share is trunk."""
LONGEST = 1024
"""Blocks from its head by which a kept chain is remembered."""
_NAME_BYTES = 32
"""Of an address, what is its key: shards of one block are in a sample together."""
_BARE = EntryMeta()


class Branches:
    """A sample of the tree of chains that takes or leaves whole branches, so that whoever is in it is there with its prefix.

    A branch begins at a chain's first block that fewer than 5 % of recent chains share; a hash of that block's name decides.
    The trunk above is always in the sample. Recent chains are known by ``KEPT`` of them, a reservoir that forgets
    (Aggarwal: On biased reservoir sampling in the presence of stream evolution, VLDB 2006). Chains are given tail first.
    """

    def __init__(self, share: float, seed: int = 0) -> None:
        self._share = share
        self._seed = seed
        self._rng = random.Random(seed)  # noqa: S311 - a sample, and no secret
        self._seen = 0
        self._kept: list[list[Address]] = []
        self._times: dict[Address, int] = {}
        """Per block in how many of the kept chains it is."""
        self.trunk = 0
        """Blocks of the trunk."""

    def note(self, chain: Sequence[Address]) -> None:
        """A chain was asked for, from its head on."""
        self._seen = min(self._seen + 1, RECENT)
        if len(self._kept) < KEPT:
            self._kept.append([])
        elif self._rng.random() * self._seen >= KEPT:
            return
        place = self._rng.randrange(KEPT) if self._seen > KEPT else len(self._kept) - 1
        for entry in self._kept[place]:
            self._less(entry)
        kept = self._kept[place] = list(chain[-LONGEST:])
        for entry in kept:
            times = self._times[entry] = self._times.get(entry, 0) + 1
            self.trunk += times == LEAST_SHARED

    def _less(self, entry: Address) -> None:
        times = self._times[entry] - 1
        self.trunk -= times == LEAST_SHARED - 1
        if times:
            self._times[entry] = times
        else:
            del self._times[entry]

    def is_trunk(self, entry: Address) -> bool:
        return self._times.get(entry, 0) >= LEAST_SHARED

    def trunk_of(self, chain: Sequence[Address]) -> int:
        """How many of a chain's blocks, from its head on, are trunk."""
        times, count = self._times.get, 0
        for entry in reversed(chain):
            if times(entry, 0) < LEAST_SHARED:
                break
            count += 1
        return count

    def is_sampled(self, root: Address) -> bool:
        """Whether the branch that begins at ``root`` is in the sample."""
        return xxhash.xxh3_64_intdigest(root[:_NAME_BYTES], self._seed) < self._share * 2.0**64

    def forget(self, entry: Address) -> None:
        """Keep nothing of ``entry``, nor of what lies below it."""
        if entry in self._times:
            for chain in self._kept:
                if entry in chain:
                    below = chain.index(entry) + 1
                    for one in chain[:below]:
                        self._less(one)
                    del chain[:below]


class Shadow:
    """What one policy would hold, and its hits of late."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._held: set[Address] = set()
        self.score = 0.0
        """Blocks hit, each counting for less the longer ago it was."""
        self.hits = 0.0
        """Blocks hit since the beginning."""

    def fade(self, keep: float) -> None:
        """What was hit so far counts for less."""
        self.score *= keep

    def hit(self, blocks: float) -> None:
        self.score += blocks
        self.hits += blocks

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, entry: object) -> bool:
        return entry in self._held

    def serve(self, chain: Sequence[Address], above: Address | None, room: int, now: float) -> int:
        """A chain below ``above`` is asked for, given tail first: how many blocks from its head on are held.

        Then all are, and what must go for them goes, down to ``room``.
        """
        held, policy = self._held, self._policy
        hits = 0
        if above is None or above in held:
            for entry in reversed(chain):
                if entry not in held:
                    break
                hits += 1
        for entry in chain[: len(chain) - hits]:
            if entry in held:
                policy.touch(entry, now)
            else:
                policy.insert(entry, _BARE, now)
        policy.touch_all(chain[len(chain) - hits :], now)
        held.update(chain)
        if len(held) > room:
            for entry in policy.victims(len(held) - room, frozenset(), now) or ():
                policy.remove(entry, evicted=True)
                held.remove(entry)
        return hits

    def refresh_all(self, entries: Sequence[Address], now: float) -> None:
        held = self._held
        self._policy.refresh_all([entry for entry in entries if entry in held], now)

    def drop(self, entry: Address) -> None:
        """Hold ``entry`` no longer, and keep no ghost of it."""
        if entry in self._held:
            self._held.remove(entry)
        else:
            self._policy.insert(entry, _BARE, 0.0)  # what comes is a ghost no more
        self._policy.remove(entry, evicted=False)
