"""A store with hands around it: whoever holds a rig turns its transfers, its clock, its faults and its power switch.

``TieredRig`` is the tiered store over DRAM, a real NVMe directory and a key medium that outlives it. Whoever has another
store to show gives a ``Rig`` of it: what it cannot do it leaves as it is here.
"""

from __future__ import annotations

import enum
import random
import shutil
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from kvtier.abc.medium import Iovec
from kvtier.abc.store import Store
from kvtier.codec.catalogue import codec_named
from kvtier.config import TierOptions, Verify, WriteMode
from kvtier.cost import OpenGate
from kvtier.errors import MediumFull, MediumUnavailable
from kvtier.metrics import Metrics
from kvtier.policy.lru import LruPolicy
from kvtier.quantity import Bytes
from kvtier.storage_backends.dram import DramMedium
from kvtier.storage_backends.memory import MemoryMedium
from kvtier.storage_backends.nvme import NvmeMedium
from kvtier.store.arena import Arena
from kvtier.store.parts import Parts
from kvtier.store.store import TieredStore
from kvtier.testing.blocks import GEOMETRY, IDENTITY
from kvtier.testing.faults import Fault, wrapped
from kvtier.testing.hand import HandTurned, ManualClock
from kvtier.tier.key import KeyTier
from kvtier.tier.slot import SlotTier

SMALL_NVME = 3300 << 10
"""Bytes of an NVMe directory for some forty blocks: fewer than the walks save."""


class Mishap(enum.Enum):
    """What can befall the next call to a medium."""

    UNAVAILABLE = "does not answer"
    FULL = "is full"
    BUG = "raises what no medium should"
    ITEM = "fails for one item"
    TORN = "keeps half of what it is given and says that all is well"
    SLOW = "takes three seconds"
    POWER = "is cut off from its power"


class Rig(ABC):
    """A store under test. One thread holds it."""

    store: Store
    happened: Counter[str]
    """Mishaps that have befallen a call, and flipped bits, by name."""
    lasting: Collection[str] = ()
    """Names of the tiers that outlive a restart."""
    meanwhile: Callable[[], None] | None = None
    """Run ahead of every call to a medium, as if another thread had come in between."""

    @abstractmethod
    def run_one(self, choose: Callable[[int], int]) -> bool:
        """Run one queued transfer job; False where there is none."""

    def advance(self, seconds: float) -> None:  # noqa: B027 - not every store has a hand for it
        """Let time pass, and have the store do its upkeep."""

    def order(self, mishap: Mishap, medium: int) -> None:  # noqa: B027 - not every store has a hand for it
        """Let something befall the next call to a medium (numbered from 0, any number is one)."""

    def flip(self, draw: Callable[[int], int]) -> None:  # noqa: B027 - not every store has a hand for it
        """Let one stored bit rot; ``draw(count)`` chooses."""

    def stall(self, which: int) -> None:  # noqa: B027 - not every store has a hand for it
        """Let one set of transfer threads stand still."""

    def calm(self) -> None:  # noqa: B027 - not every store has a hand for it
        """No more mishaps; stalled threads go on."""

    @property
    def dead(self) -> bool:
        """Whether the power went in the middle of a call: nothing counts until ``restart``."""
        return False

    def restart(self, *, kill: bool) -> bool:
        """Close the store, or leave it as if the process had been killed, and open it again; False where that cannot be."""
        del kill
        return False

    def pools(self) -> Mapping[str, Mapping[str, int]]:
        """Per pool its slots by state, and under ``capacity`` how many it has."""
        return {}

    def held(self) -> Mapping[str, int]:
        """What has to be 0 when nobody asks for anything."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""


class _Server(MemoryMedium):
    """A key medium that outlives the stores over it."""

    def close(self) -> None:
        """A server stays when its client goes."""

    def copy(self) -> _Server:
        """Another one that holds the same."""
        made = _Server()
        vars(made).update({name: dict(held) if isinstance(held, dict) else held for name, held in vars(self).items()})
        return made


class _Chaos(Fault):
    """Mishaps in the order in which they were ordered, one per call."""

    def __init__(self, rig: TieredRig) -> None:
        self._rig = rig
        self.orders: deque[Mishap] = deque()
        self._now: Mishap | None = None

    def before(self, op: str) -> None:
        if self._rig.meanwhile is not None:
            self._rig.meanwhile()
        self._now = mishap = self.orders.popleft() if self.orders else None
        if mishap is None:
            return
        self._rig.happened[mishap.name.lower()] += 1
        if mishap is Mishap.UNAVAILABLE:
            raise MediumUnavailable("it does not answer")
        if mishap is Mishap.FULL:
            raise MediumFull("it is full")
        if mishap is Mishap.BUG:
            raise RuntimeError("no medium should raise this")
        if mishap is Mishap.SLOW:
            self._rig.clock.advance(3.0)
        if mishap is Mishap.POWER:
            self._rig.snapshot()

    def refusal(self, op: str, place: object) -> str | None:
        if self._now is Mishap.ITEM:
            self._now = None
            return "this one fails"
        return None

    def written(self, data: Iovec) -> Iovec:
        if self._now is not Mishap.TORN:
            return data
        whole = sum(map(len, data))
        kept: list[memoryview] = []
        left = whole // 2
        for buffer in data:
            kept.append(buffer[: max(0, left)])
            left -= len(buffer)
        return kept


class TieredRig(Rig):
    """The tiered store over DRAM, an NVMe directory and a key medium."""

    lasting = ("nvme", "shared")

    def __init__(
        self,
        directory: Path,
        *,
        dram: int = 16,
        nvme_write: WriteMode = WriteMode.BACK,
        shared_write: WriteMode = WriteMode.THROUGH,
        codec: str = "shuffle+lz4",
    ) -> None:
        """``directory`` is made and removed; the codec is the key tier's."""
        self._directory = directory
        self._dram, self._nvme_write, self._shared_write, self._codec = dram, nvme_write, shared_write, codec
        self.happened = Counter()
        self.clock = ManualClock()
        self._lives = 0
        self._snapshot: Path | None = None
        self._committed = 0
        self._server = self._left = _Server()
        self._chaos = (_Chaos(self), _Chaos(self))
        directory.mkdir(parents=True, exist_ok=True)
        self._open(directory / "life-0")

    def _open(self, place: Path) -> None:
        lock, metrics, self.hand, self._place = threading.Lock(), Metrics(), HandTurned(), place
        self.arena = Arena(DramMedium(self._dram, GEOMETRY.block_bytes, prefault=False), LruPolicy(self._dram))
        above = self.hand.add("dram")
        params = NvmeMedium.Params(capacity=Bytes(SMALL_NVME), threads=1, direct=False)
        nvme = NvmeMedium(place, GEOMETRY.block_bytes, params)
        self.nvme = SlotTier(
            "nvme",
            TierOptions(self._nvme_write),
            wrapped(nvme, self._chaos[0]),
            codec_named("raw"),
            self.hand.add("nvme"),
            metrics.tier("nvme"),
            lock,
            LruPolicy(nvme.slots),
            self.clock,
        )
        shared = KeyTier(
            "shared",
            TierOptions(self._shared_write),
            wrapped(self._server, self._chaos[1]),
            codec_named(self._codec),
            self.hand.add("shared"),
            metrics.tier("shared"),
            lock,
            self.clock,
        )
        dram = metrics.tier("dram")
        parts = Parts(GEOMETRY, self.arena, dram, (self.nvme, shared), above, OpenGate(), lock, IDENTITY, self.clock)
        self.store = TieredStore(parts, verify=Verify.ALWAYS, keeper=False)

    def run_one(self, choose: Callable[[int], int]) -> bool:
        return self.hand.run_one(choose)

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self._tiered.keep()

    @property
    def _tiered(self) -> TieredStore:
        assert isinstance(self.store, TieredStore)
        return self.store

    def order(self, mishap: Mishap, medium: int) -> None:
        self._chaos[medium % 2].orders.append(mishap)

    def flip(self, draw: Callable[[int], int]) -> None:
        kind = draw(3)
        bit = 1 << draw(8)
        if kind == 0:
            resident = self.arena.pool.entries()
            slot = self.arena.pool.slot(resident[draw(len(resident))]) if resident else None
            if slot is None:
                return
            view = self.arena.medium.view(slot)
            assert view is not None
            view[draw(GEOMETRY.block_bytes)] ^= bit
        elif kind == 1:
            values = self._server.values
            if not values:
                return
            name = list(values)[draw(len(values))]
            spoilt = bytearray(values[name])
            spoilt[draw(len(spoilt))] ^= bit
            values[name] = bytes(spoilt)
        else:
            (path,) = self._place.glob("slots-*.kvt")
            size = path.stat().st_size
            if not size:
                return
            with path.open("r+b") as file:
                at = draw(size)
                file.seek(at)
                old = file.read(1)
                file.seek(at)
                file.write(bytes([old[0] ^ bit]))
        self.happened[f"bit of {('dram', 'shared', 'nvme')[kind]}"] += 1

    def stall(self, which: int) -> None:
        self.hand.stall(which % len(self.hand.workers))
        self.happened["stall"] += 1

    def calm(self) -> None:
        self.hand.release()
        for chaos in self._chaos:
            chaos.orders.clear()

    def snapshot(self) -> None:
        """What the directory and the key medium hold at this moment is what a restart will find."""
        if self._snapshot is None:
            self._lives += 1
            self._snapshot = self._directory / f"life-{self._lives}"
            shutil.copytree(self._place, self._snapshot)
            self._left = self._server.copy()
            self._committed = self.nvme.pool.ready

    @property
    def dead(self) -> bool:
        return self._snapshot is not None

    def restart(self, *, kill: bool) -> bool:
        self.calm()
        if kill:
            self.snapshot()
        dead, self._snapshot = self._snapshot, None
        between, self.meanwhile = self.meanwhile, None  # nobody calls a store that is being closed, or is not open yet
        self.store.close()
        if dead is None:
            self._open(self._place)
            self.meanwhile = between
            return True
        shutil.rmtree(self._place)
        self._server = self._left
        self._open(dead)
        self.meanwhile = between
        assert self.nvme.pool.ready >= self._committed, (
            f"{self._committed} blocks were committed to NVMe, {self.nvme.pool.ready} are there after the kill"
        )
        return True

    def pools(self) -> Mapping[str, Mapping[str, int]]:
        pools = {"dram": self.arena.pool, "nvme": self.nvme.pool}
        return {name: {**pool.counts(), "capacity": pool.capacity} for name, pool in pools.items()}

    def held(self) -> Mapping[str, int]:
        stats = self.store.stats()
        names = ("matches", "leased", "arriving", "saving", "loading", "owing")
        counts = {name: stats[name] for name in names}
        writing = {f"writing {name}": counts["writing"] for name, counts in self.pools().items()}
        return {name: count for name, count in {**counts, **writing}.items() if isinstance(count, int)}

    def close(self) -> None:
        self.store.close()
        shutil.rmtree(self._directory)


def drawn_rig(directory: Path, rng: random.Random) -> TieredRig:
    """A rig with whatever sizes, write modes and codec come up."""
    return TieredRig(
        directory,
        dram=rng.choice([6, 16, 32]),
        nvme_write=rng.choice(list(WriteMode)),
        shared_write=rng.choice(list(WriteMode)),
        codec=rng.choice(["raw", "shuffle+lz4"]),
    )
