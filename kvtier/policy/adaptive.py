"""The policy that has hit most of late, by shadow caches of several."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from kvtier.abc.policy import Choice, EntryMeta, EvictionPolicy
from kvtier.key import Address
from kvtier.policy.arc import ArcPolicy
from kvtier.policy.lru import LruPolicy
from kvtier.policy.s3fifo import S3FifoPolicy
from kvtier.policy.shadow import Branches, Shadow

CANDIDATES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": LruPolicy,
    "arc": ArcPolicy,
    "s3fifo": S3FifoPolicy,
}
"""The first one decides until another has proved better."""
SAMPLED = 4096
"""Blocks of capacity up to which shadows see every reference; a larger cache is sampled down to it."""
FULL = 0.9
"""Share of its capacity from which a cache counts as full."""
MEMORY = 4.0
"""References per block of capacity after which a hit counts half."""
MARGIN = 0.005
"""Share of recent references by which another policy must hit more before it takes over."""


class AdaptivePolicy(EvictionPolicy):
    """Goes by the candidate whose shadow cache hits most, as soon as it leads by a margin.

    Every candidate orders what is resident at any time, so a switch moves nothing and costs nothing. A chain reaches its
    policy tail first and in one go, as pools commit and touch; the shadows see it when its head has come, or another chain.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._share = min(1.0, SAMPLED / capacity)
        """Of the branches, what the shadows see."""
        self._names = list(CANDIDATES)
        self._live = [make(capacity) for make in CANDIDATES.values()]
        self._shadows = [Shadow(make(min(capacity, SAMPLED))) for make in CANDIDATES.values()]
        self._branches = Branches(self._share) if capacity > SAMPLED else None
        self._parent: dict[Address, Address | None] = {}
        self._sampled: set[Address] = set()
        """Resident entries on sampled branches."""
        self._run: list[Address] = []
        """The end of a chain that is just coming in, tail first."""
        self._above: Address | None = None
        """What the run lacks next."""
        self._weight = 0.0
        """References, each counting for less the longer ago it was."""
        self._references = 0
        """References that the shadows have been told of since the beginning."""
        self._current = 0
        self.switches = 0
        """How often another policy has taken over."""

    @property
    def current(self) -> str:
        """Name of the policy that decides now."""
        return self._names[self._current]

    def choice(self) -> Choice:
        hits = {name: shadow.hits for name, shadow in zip(self._names, self._shadows, strict=True)}
        return Choice(self.current, self.switches, self._references, hits)

    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        for policy in self._live:
            policy.insert(entry, meta, now)
        self._parent[entry] = meta.parent
        self._reference(entry, meta.parent, now)

    def touch(self, entry: Address, now: float) -> None:
        self.touch_all((entry,), now)

    def touch_all(self, entries: Sequence[Address], now: float) -> None:
        for policy in self._live:
            policy.touch_all(entries, now)
        for entry in entries:
            self._reference(entry, self._parent[entry], now)

    def refresh(self, entry: Address, now: float) -> None:
        self.refresh_all((entry,), now)

    def refresh_all(self, entries: Sequence[Address], now: float) -> None:
        for policy in self._live:
            policy.refresh_all(entries, now)
        for shadow in self._shadows:
            shadow.refresh_all(entries, now)

    def pass_over(self, entries: Sequence[Address], now: float) -> None:
        for policy in self._live:
            policy.pass_over(entries, now)

    def remove(self, entry: Address, *, evicted: bool) -> None:
        for policy in self._live:
            policy.remove(entry, evicted=evicted)
        del self._parent[entry]
        self._sampled.discard(entry)
        if not evicted:
            self._run = [one for one in self._run if one != entry]
            for shadow in self._shadows:
                shadow.drop(entry)
            if self._branches is not None:
                self._branches.forget(entry)

    def victims(self, count: int, protected: Container[Address], now: float) -> list[Address] | None:
        return self._live[self._current].victims(count, protected, now)

    def _reference(self, entry: Address, parent: Address | None, now: float) -> None:
        if self._run and entry != self._above:
            self._settle(now)
        self._run.append(entry)
        self._above = parent
        if parent is None or len(self._run) >= self._capacity:
            self._settle(now)

    def _settle(self, now: float) -> None:
        """Show the run to the shadows, and see who leads."""
        run, above = self._run, self._above
        self._run, self._above = [], None
        keep = 0.5 ** (len(run) / (MEMORY * self._capacity))
        self._weight = self._weight * keep + len(run)
        self._references += len(run)
        trunk, part, room = 0, run, self._capacity
        if self._branches is not None:
            trunk, part, room = self._sample(self._branches, run, above)
        for shadow in self._shadows:
            shadow.fade(keep)
            if part:
                hits = shadow.serve(part, above, room, now)
                shadow.hit(min(hits, trunk) + max(0, hits - trunk) / self._share)
        self._decide()

    def _sample(self, branches: Branches, run: list[Address], above: Address | None) -> tuple[int, list[Address], int]:
        """How much of a run is trunk, what of it is in the sample, and for how many blocks a shadow has room."""
        trunk = 0
        if above is None or branches.is_trunk(above):
            if above is None:
                branches.note(run)
            trunk = branches.trunk_of(run)
            sampled = trunk < len(run) and branches.is_sampled(run[-1 - trunk])
        else:
            sampled = above in self._sampled
        if sampled:
            self._sampled.update(run)
        else:
            self._sampled.difference_update(run)
        self._share = self._measured_share()
        trunk_room = min(branches.trunk, self._capacity)
        room = trunk_room + round(self._share * (self._capacity - trunk_room))
        return trunk, run if sampled else run[len(run) - trunk :], room

    def _measured_share(self) -> float:
        """Of what is resident, on sampled branches: long branches that are in a sample by luck must not crowd a shadow.

        As asked for until the cache is full, and within a factor of two of that always, which bounds the shadows.
        """
        asked = SAMPLED / self._capacity
        if len(self._parent) < FULL * self._capacity:
            return asked
        return min(2.0 * asked, max(0.5 * asked, len(self._sampled) / len(self._parent)))

    def _decide(self) -> None:
        scores = [shadow.score for shadow in self._shadows]
        best = max(scores)
        if best - scores[self._current] > MARGIN * self._weight:
            self._current = scores.index(best)
            self.switches += 1
