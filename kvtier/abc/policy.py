"""Who goes first when room is needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from kvtier.key import Address


class EntryMeta(NamedTuple):
    """What a policy may know of an entry."""

    parent: Address | None = None
    depth: int = 0
    nbytes: int = 0
    cost: float = 0.0
    """Seconds that making it again would take; 0 where nobody said."""
    priority: int = 0
    expires_at: float | None = None
    """On the clock of the pool's ``now``."""
    tenant: bytes = b""

    def shifted(self, seconds: float) -> EntryMeta:
        """The same on a clock that is ``seconds`` ahead."""
        return self if self.expires_at is None else self._replace(expires_at=self.expires_at + seconds)


class Choice(NamedTuple):
    """What a policy that goes by one of several others says of itself, since it was made."""

    current: str
    """Name of the one that decides now."""
    switches: int
    """How often another has taken over."""
    references: int
    """Blocks asked for."""
    hits: Mapping[str, float]
    """Per name the blocks of them that it would have hit had it decided alone, as far as a sample can tell."""


class EvictionPolicy(ABC):
    """Orders the entries of one pool.

    Called under the pool owner's lock: no I/O, no locks, no clock of its own, and no move of bytes. ``now`` never runs
    backwards. Whoever calls guarantees that every touched or removed entry was inserted. Ghosts (entries already gone)
    are the policy's own business and bounded by the pool's capacity, which it is built with.
    """

    @abstractmethod
    def insert(self, entry: Address, meta: EntryMeta, now: float) -> None:
        """A new entry became resident."""

    @abstractmethod
    def touch(self, entry: Address, now: float) -> None:
        """A resident entry was used."""

    def refresh(self, entry: Address, now: float) -> None:  # noqa: B027 - not every policy goes by recency
        """A use that ``insert`` or ``touch`` told of goes on or has ended: the latest by recency, but no second use."""

    def touch_all(self, entries: Sequence[Address], now: float) -> None:
        """``touch`` of each, in this order: what a whole chain costs is often a fraction of its calls."""
        for entry in entries:
            self.touch(entry, now)

    def refresh_all(self, entries: Sequence[Address], now: float) -> None:
        """``refresh`` of each, in this order."""
        for entry in entries:
            self.refresh(entry, now)

    def pass_over(self, entries: Sequence[Address], now: float) -> None:
        """A search for victims came across these, in this order, and they are in use: the next one is to begin behind them."""
        self.refresh_all(entries, now)

    @abstractmethod
    def remove(self, entry: Address, *, evicted: bool) -> None:
        """A resident entry has gone: evicted as a victim (a ghost may stay), or dropped (none may)."""

    @abstractmethod
    def victims(self, count: int, protected: Container[Address], now: float) -> list[Address] | None:
        """``count`` distinct resident entries outside ``protected``, first to go first; None where there are not so many.

        Nothing changes: the caller says with ``remove`` which ones really went, or what went in their place. Whatever a
        search would move (a hand, a queue's order) is moved when a victim that it led to goes, and only where no other
        call but ``remove`` has come in between.
        """

    def choice(self) -> Choice | None:
        """Who decides, of those that this policy chooses among; None where it is one policy."""
        return None
