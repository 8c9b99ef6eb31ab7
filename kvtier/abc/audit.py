"""The audit of a medium at rest: what ``kvtier doctor`` asks of whatever outlives its process."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from kvtier.errors import MediumError


class FindingKind(enum.Enum):
    """What is wrong with a place."""

    ORPHAN_ROW = "orphan row"
    """The index says that a block is where another one is, or none."""
    ORPHAN_SLOT = "orphan slot"
    """A whole frame is in a slot that the index neither names nor knows to be free."""
    WRONG_ROW = "wrong row"
    """A row says other things of its block than the block's frame."""
    LEAKED_LEASE = "leaked lease"
    """A slot is held by nobody who is still there."""
    DOUBLE_SLOT = "double slot"
    """Two places for one block, or two blocks for one place."""
    WRONG_BYTES = "wrong byte count"
    """A budget, a length or a counter is not what the medium has."""
    FLIPPED_BIT = "flipped bit"
    """A sum does not match."""
    FOREIGN_FILE = "foreign file"
    """Something in our directory is not ours."""
    FOREIGN_NAME = "foreign name"
    """Something under our prefix is not ours."""
    OLD_SCHEMA = "old schema"
    """Written by a build with other tables or frames."""
    LOST_INDEX = "lost index"
    """The database is not there or is not a database."""
    UNDECODABLE = "undecodable value"
    """Not a frame, or one that this configuration cannot prove."""
    WRONG_NAME = "wrong name"
    """A value's frame names another block than its name does."""
    NO_TTL = "no TTL"
    """A value that would stay for ever."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of one place."""

    kind: FindingKind
    place: str
    detail: str
    repair: Callable[[], str] | None = field(default=None, compare=False, repr=False)
    """Mends it and says how; None where that is not ours to do. Raises ``MediumError`` or ``OSError``."""

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.place}: {self.detail}"


Unseal: TypeAlias = Callable[[bytes, bytes, memoryview, bytes, bytes, memoryview], tuple[bytes, bytes]]
"""Of tenant, nonce, header page, sealed content sum, tag and payload: decrypts the payload where it is, and returns the content
sum that was sealed and that of what came out. Raises ``CorruptFrame`` where the seal does not open."""


@dataclass(slots=True)
class Seals:
    """What an audit can prove of sealed frames, and has."""

    unseal: Unseal | None = None
    """None: there is no key, so that of a sealed frame the header alone is proven."""
    unproven: int = 0
    opened: int = 0

    def repaired(self, repair: Callable[[], str]) -> str:
        """``repair`` of a frame whose seal did not open: only where others' did, for else the key may be the wrong one."""
        if not self.opened:
            raise MediumError("no sealed frame here opens with this key; name the key file that they were written with")
        return repair()


Progress: TypeAlias = Callable[[int, int], None]
"""Called now and then with how many places have been looked at, and of how many about."""


class Auditor(ABC):
    """Looks through one medium that no server is using, or that is shared anyway. Changes nothing but by ``repair``.

    For one thread.
    """

    where: str
    """The medium, as a person knows it."""
    most: int = 1_000_000
    """Names after which the audit of a shared medium ends, with a note."""
    seals: Seals
    """Given before ``look``."""
    looked_at: int = 0
    """Places that ``look`` has seen."""
    notes: list[str]
    """What a person should know of this audit besides its findings."""

    @abstractmethod
    def look(self, progress: Progress) -> Iterator[Finding]:
        """Every fault, as it is found. Raises ``MediumError`` or ``OSError`` where it cannot go on."""

    @abstractmethod
    def close(self) -> None:
        """Give the medium back. Whatever was repaired is on it when this returns."""
