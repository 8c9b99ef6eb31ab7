"""Where bytes physically live: slot-addressed media (hbm, dram, nvme) and key-addressed ones (redis, fs, a daemon).

Both are called from transfer threads, several at a time, and may block; neither encodes, verifies, evicts or keeps a
buffer of the caller. A batch is the primitive: outcomes are per item and in input order, and one bad item never fails
its neighbours. A medium that cannot be reached at all may raise ``MediumError`` for the whole batch instead.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from kvtier.key import Address

if TYPE_CHECKING:
    from kvtier.abc.audit import Auditor
    from kvtier.abc.store import Fence
    from kvtier.url import TierUrl

Iovec: TypeAlias = Sequence[memoryview]
"""Contiguous byte buffers laid end to end (header page, payload), filled or written in one go."""


class Status(enum.Enum):
    """How one item of a batch ended."""

    DONE = "done"
    ABSENT = "absent"
    FAILED = "failed"
    FULL = "full"
    """Not written: there is no room for it."""
    CORRUPT = "corrupt"
    """Bytes came and are not what they should be. Said by whoever verifies, never by a medium."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one item: what happened, how many bytes moved, and why not where it failed."""

    status: Status
    nbytes: int = 0
    detail: str = ""

    @property
    def done(self) -> bool:
        return self.status is Status.DONE


Arrived: TypeAlias = Callable[[int, Outcome], Outcome]
"""Called with each item that came whole (its index in the batch, DONE), at once and on the thread that moved it; what it
returns is the item's outcome. So a reader proves bytes while they are in the cache and others are on the way. Does not
raise; is called again for an item that had to be read again."""


class Medium(ABC):
    """What every medium has in common."""

    io: str = "memory"
    """How bytes move, for reports: ``memory``, ``direct``, ``buffered`` or ``socket``."""
    header_bytes: int = 0
    """Least size of an item's first buffer: one page where headers are pages of their own (NVMe), else 0."""
    auth_key: bytes | None = None
    """Secret under which the sums of this medium's frames are made, where others can write to it; None: plain sums."""
    bytes_read: int = 0
    """Bytes that reads have moved since the medium was opened."""
    bytes_written: int = 0
    """Bytes that writes have moved since the medium was opened."""

    def check(self) -> list[str]:
        """Disagreements between what the medium counts and what is there, in words. Takes microseconds."""
        return []

    @classmethod
    def auditor(cls, location: TierUrl, params: Any) -> Auditor | None:  # noqa: ANN401 - its own Params
        """What looks through the medium at rest; None where nothing outlives the process.

        Raises ``ConfigError`` where the medium is not there, or a server is using what only one process may.
        """
        del location, params
        return None

    @abstractmethod
    def close(self) -> None:
        """Give back files, sockets and memory. Idempotent; no call may follow."""


MOST_RECORDS = 1024
"""Records of one kind that a medium keeps; those that were remembered longest ago go first."""
RECORD_BYTES = 4096
"""No record is longer, and no name of an epoch."""


class LastingMedium(Medium):
    """A medium that outlives its process, and so keeps what explains its blocks and what has been cleared."""

    @abstractmethod
    def remember(self, kind: str, digest: bytes, text: str) -> None:
        """Keep one readable record of what frames name by digest (``kind``: identity, scope). Never a secret."""

    @abstractmethod
    def records(self, kind: str) -> dict[bytes, str]:
        """Digest to text of every record of a kind that is still kept."""

    @abstractmethod
    def epochs(self) -> dict[str, int]:
        """What ``raise_epochs`` has been told by anybody: name to clear epoch, empty where it was lost."""

    @abstractmethod
    def raise_epochs(self, wanted: Mapping[str, int], implied: Mapping[str, int]) -> None:
        """Raise epochs to what is wanted; a higher one stays. Those of ``implied`` that are not higher go.

        Atomic: of several that raise at once none lowers what another has raised. They never expire.
        """


class SlotMedium(Medium):
    """Numbered places of one size."""

    slots: int
    """How many places there are."""
    slot_bytes: int
    """Payload bytes of one place (a header page, where the medium keeps one, not counted)."""

    @abstractmethod
    def read(self, slots: Sequence[int], into: Sequence[Iovec]) -> list[Outcome]:
        """Fill ``into[i]`` from place ``slots[i]``. ``into[i]`` may be shorter than the place: the rest is not read."""

    @abstractmethod
    def write(self, slots: Sequence[int], data: Sequence[Iovec]) -> list[Outcome]:
        """Put ``data[i]`` into place ``slots[i]``. Returns when the bytes would survive what the medium survives."""

    def view(self, slot: int) -> memoryview | None:
        """The place itself, writable, where the CPU can address it; else None.

        It begins at the place's first byte and has at least ``slot_bytes``: the rest is padding for direct I/O.
        """
        return None

    def fence(self) -> Fence | None:
        """What a copy has to wait for, so that all that the calling thread has queued on this memory has happened.

        None where nothing is ever queued.
        """
        return None

    def layered(self, blocks: int) -> LayeredSlots | None:
        """This medium for one load of ``blocks`` whose layers may be used as they arrive; None where a write is seen whole."""
        return None


class LayeredSlots(SlotMedium):
    """A slot medium as one load writes to it: whole blocks, in one batch or several, the first layers of a batch first.

    ``write`` returns, as ever, when all is there. Meanwhile the thread that computes asks for layer after layer.
    """

    @abstractmethod
    def wait_for_layer(self, layer: int, timeout: float) -> bool:
        """Let nothing that the calling thread queues from now on see ``layer`` before it has arrived.

        Blocks at most until the layer's copies are queued, and not for the copies. False where they were not in ``timeout``
        seconds. True as well where the load has ended without them: its outcomes say which blocks never came.
        """

    @abstractmethod
    def end(self) -> None:
        """The load has ended in whatever way: nobody waits any more. Idempotent, from any thread."""


class Record(NamedTuple):
    """One row of a persistent medium's index: where an object is and what evicting it must know.

    A tuple and no dataclass, as ``EntryMeta``: a restart makes one of each per block, and a tuple takes a fifth of the time.
    """

    slot: int
    address: Address
    parent: Address
    depth: int
    tenant: bytes
    used: float
    """Wall-clock seconds of last use."""
    expires_at: float | None = None
    identity: bytes = bytes(32)
    """Digest of the identity."""
    adapter: bytes = bytes(16)
    epoch: int = 0


class Journal(ABC):
    """The index that lets a slot medium outlive its process. A row proves nothing until its frame has been checked."""

    @abstractmethod
    def load(self) -> Iterator[Record]:
        """All rows that survived, one at a time; rebuilt from header pages where the index was lost or corrupt.

        The names in them are shared: a parent that is a row's address as well is the same object.
        """

    @abstractmethod
    def identities(self) -> set[bytes]:
        """Digests of the identities that have blocks of any size; some that had may be among them."""

    @abstractmethod
    def commit(self, added: Sequence[Record], removed: Sequence[int]) -> None:
        """One transaction: rows of ``removed`` slots go, ``added`` come. On ``MediumError`` nothing changed."""

    @abstractmethod
    def touch(self, used: Iterable[tuple[int, float]]) -> None:
        """Note recency (slot, wall-clock seconds). May be written late; losing it loses only order."""


class PersistentSlotMedium(SlotMedium, LastingMedium):
    """A slot medium that outlives its process."""

    journal: Journal

    @abstractmethod
    def read(self, slots: Sequence[int], into: Sequence[Iovec], arrived: Arrived | None = None) -> list[Outcome]:
        """As for any slot medium."""

    def drop_page_cache(self) -> None:
        """Make the next reads come from the device, for measurements. Nothing to do where no page cache is used."""

    def drop_others(self) -> int:
        """Forget what is kept for blocks of other sizes; bytes that this gives back. Nothing where only one size is kept."""
        return 0


class KeyMedium(LastingMedium):
    """A place per name. Names outlive the process and are shared by whoever reaches the medium."""

    ttl: float = math.inf
    """Seconds after which a value goes that nobody wrote or touched."""
    epochs_version: bytes = b""
    """As of the last probe: another value means that the epochs have changed, or are lost."""
    generation: int = 0
    """How often the medium has been cleared, as of the last probe. Names of earlier generations are absent."""

    @abstractmethod
    def probe(self, names: Sequence[Address]) -> int:
        """Length of the present prefix of ``names``, in one round trip. A hint: it may be gone at the read.

        Brings ``epochs_version`` and ``generation`` up to date in the same round trip.
        """

    @abstractmethod
    def read(self, names: Sequence[Address], into: Sequence[Iovec], arrived: Arrived | None = None) -> list[Outcome]:
        """Fill ``into[i]`` with the value of ``names[i]``; ``nbytes`` is its length. Longer than the room: FAILED."""

    @abstractmethod
    def write(self, names: Sequence[Address], data: Sequence[Iovec]) -> list[Outcome]:
        """Store values whole, each visible at once or not at all."""

    @abstractmethod
    def touch(self, names: Sequence[Address]) -> None:
        """Push back the expiry of all ``names`` (the whole prefix of a hit)."""

    @abstractmethod
    def delete(self, names: Sequence[Address]) -> None:
        """Remove; names that are absent are no error."""

    @abstractmethod
    def scan(self) -> Iterator[Address]:
        """Every name that is present, in no order; one may come twice."""

    @abstractmethod
    def heads(self, names: Sequence[Address], nbytes: int) -> list[bytes]:
        """The first ``nbytes`` of each value, or fewer where it is shorter; empty where it is absent."""

    @abstractmethod
    def clear(self) -> None:
        """Make every name absent at once, here and with the next probe for all who share the medium."""

    @abstractmethod
    def reclaim(self) -> int:
        """Remove the values that ``clear`` has hidden; how many there were. May take long."""

    @abstractmethod
    def ping(self) -> None:
        """Raise ``MediumUnavailable`` or ``MediumRefused`` where it cannot be used now. Bounded by its timeout."""


@dataclass(frozen=True, slots=True)
class MediumContext:
    """What a medium is told besides its own URL."""

    slot_bytes: int
    """Payload bytes of one block; 0 where nobody has a block: a medium that has kept some then goes by those, and nothing
    is made where no tier has been."""
    advice: str | None = None
    """What to tell a person where another process has the medium to itself; None: what the medium says of itself."""


class MediumFactory(Protocol):
    """What an entry point of ``kvtier.storage_backends`` names: usually the medium's class."""

    Params: type[Any]
    """Frozen keyword-only dataclass of the URL's parameters, with their defaults."""

    def auditor(self, location: TierUrl, params: Any) -> Auditor | None:  # noqa: ANN401 - its own Params
        """As ``Medium.auditor``."""
        ...

    def open(self, location: TierUrl, params: Any, context: MediumContext) -> Medium:  # noqa: ANN401 - its own Params
        """The medium at ``location``; a remote one does not connect yet.

        Raises ``ConfigError`` where it cannot be what was asked for.
        """
        ...
