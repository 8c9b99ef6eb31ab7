"""What the index costs and whether it stays as it is: bytes per entry, and a million look-ups that end in every way.

    python benchmarks/index.py [--json FILE] [--seed N] [--entries N] [--lookups N]

Entries: resident memory that a store takes beyond its blocks' bytes, per block, for DRAM and for NVMe. Look-ups: matches of
random chains over DRAM and NVMe that are loaded, given up, asked for twice, aborted while they load, or refused, with saves
between them. Afterwards nothing may be leased, memory must be what it was after a warm-up of the same traffic, and DRAM must
fill to the last slot again. The limit beside the rate of look-ups is one dictionary look-up per block, in the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import TypedDict

from kvtier.abc.store import NO_HINTS, Hints, SlotRange
from kvtier.config import StoreSettings
from kvtier.key import Span
from kvtier.machine import resident_bytes, use_few_heaps
from kvtier.metrics import Metrics
from kvtier.store.open import open_store
from kvtier.store.store import TieredStore
from kvtier.testing.blocks import IDENTITY, EngineMemory, chain
from kvtier.url import TierUrl

MOST_BYTES = 400
"""Asked: index memory per entry, in bytes."""
MOST_GROWTH = 0.02
"""Asked: resident memory may differ by this share."""
DRAM_BLOCKS, NVME_BLOCKS = 2048, 8192
CHAINS, LONGEST = 600, 8
WARM_UP = 100_000
SAMPLES, SAMPLED = 9, 2_000
"""Samples of resident memory at each end of the run, and look-ups before each."""
PAGE = 4096
"""A DRAM slot of the blocks that `kvtier.testing` has: 4 KiB."""
NVME_SLOT = 2 * PAGE
"""A header page and a block's bytes."""
_NO_LOAD = Hints(no_load=True)


class Entries(TypedDict):
    """Index memory of one tier, in bytes."""

    tier: str
    entries: int
    bytes_per_entry: float


class Lookups(TypedDict):
    """The end of the long run."""

    lookups: int
    per_second: float
    limit_per_second: float
    hit_rate: float
    pins: int
    growth: float
    filled: float
    disagreements: list[str]


def resident() -> int:
    """Bytes of this process that are in memory and no garbage."""
    gc.collect()
    return resident_bytes()


@contextmanager
def opened(*tiers: str) -> Iterator[TieredStore]:
    store = open_store([TierUrl.parse(tier) for tier in tiers], IDENTITY, StoreSettings(), Metrics())
    try:
        yield store
    finally:
        store.close()


def save(store: TieredStore, span: Span, memory: EngineMemory) -> None:
    store.save(span, SlotRange(memory, range(len(span)))).result(60.0)


def blocks_of(store: TieredStore, tier: str) -> dict[str, int]:
    """Slots of a tier by state."""
    blocks: dict[str, dict[str, int]] = store.stats()["blocks"]  # type: ignore[assignment]  # plain values, as it says
    return blocks[tier]


def dram_entries(count: int) -> Entries:
    """Fill DRAM and see what that took beyond its own bytes."""
    memory = EngineMemory(LONGEST)
    before = resident()
    with opened(f"dram://?capacity={count * PAGE}") as store:
        for number in range(-(-count // LONGEST)):
            save(store, chain(number, LONGEST), memory)
        held = blocks_of(store, "dram")["ready"]
        assert held >= count - LONGEST, f"dram holds {held} of {count}"
        return {"tier": "dram", "entries": held, "bytes_per_entry": (resident() - before - count * PAGE) / held}


def nvme_tiers(count: int, folder: Path) -> tuple[str, str]:
    return (
        f"dram://?capacity={DRAM_BLOCKS * PAGE}&prefault=false",
        f"nvme://{folder}?capacity={count * NVME_SLOT + (64 << 20)}&write=through",
    )


def fill_nvme(count: int, folder: Path) -> None:
    memory = EngineMemory(LONGEST)
    with opened(*nvme_tiers(count, folder)) as store:
        for number in range(-(-count // LONGEST)):
            save(store, chain(number, LONGEST), memory)
            if number % (DRAM_BLOCKS // LONGEST // 4) == 0:
                assert store.drain(60.0), "every block is below"
        assert store.drain(60.0), "every block is below"


def nvme_entries(count: int, folder: Path) -> Entries:
    """What a process takes that opens a full NVMe folder."""
    before = resident()
    with opened(*nvme_tiers(count, folder)) as store:
        held = blocks_of(store, "nvme")["ready"]
        assert held >= count - LONGEST, f"nvme holds {held} of {count}"
        return {"tier": "nvme", "entries": held, "bytes_per_entry": (resident() - before) / held}


def entries(count: int, folder: Path) -> list[Entries]:
    """Both tiers, each in a process of its own: what another phase has freed would be taken again, and not be seen."""
    few = min(DRAM_BLOCKS, count)
    rows = [_alone(dram_entries, [(few,), (count,)])]
    sized = [(each, folder / str(each)) for each in (few, count)]
    for each, place in sized:
        place.mkdir(exist_ok=True)
        fill_nvme(each, place)
    return [*rows, _alone(nvme_entries, sized)]


def _alone(measure: Callable[..., Entries], calls: Sequence[tuple[object, ...]]) -> Entries:
    """The last of these calls in a new process: what a process needs once is no entry's."""
    with ProcessPoolExecutor(1, get_context("spawn"), use_few_heaps) as process:
        return [process.submit(measure, *call).result() for call in calls][-1]


class Traffic:
    """Random look-ups and how they end."""

    def __init__(self, store: TieredStore, seed: int) -> None:
        self._store = store
        self._random = random.Random(seed)
        self._memory = EngineMemory(LONGEST)
        self._chains = [chain(number, self._random.randint(1, LONGEST)) for number in range(CHAINS)]
        self._asked = 0
        self.found = self.wanted = 0

    def run(self, lookups: int) -> None:
        for _ in range(lookups):
            self._one()

    def _one(self) -> None:
        store, dice = self._store, self._random.random()
        span = self._random.choice(self._chains)
        start = self._random.randrange(len(span)) if dice < 0.2 else 0
        request = f"r{self._asked}"
        self._asked += 1
        match = store.match(request, span, start, hints=NO_HINTS if dice > 0.02 else _NO_LOAD)
        self.wanted += len(span) - start
        self.found += match.hits
        if dice < 0.3:
            match.release()  # the engine has it itself
        elif dice < 0.5:
            pass  # aborted in the queue
        elif dice < 0.6:
            store.match(request, span, start)  # asked again
            store.match(request, span, min(start + 1, len(span)))  # and after a hit of the engine's own
        elif match.hits:
            transfer = store.load(match, SlotRange(self._memory, range(match.hits)))
            if dice < 0.7:
                transfer.cancel()  # aborted while it loads
            elif dice < 0.75:
                transfer.result(60.0)
        if dice > 0.9 or match.hits < len(span) - start:
            store.save(span, SlotRange(self._memory, range(len(span))))
        store.forget(request)


def idle(store: TieredStore) -> bool:
    """Wait until nothing moves any more."""
    due = time.monotonic() + 60.0
    while time.monotonic() < due:
        stats = store.stats()
        if not any(stats[name] for name in ("matches", "leased", "arriving", "saving", "loading")):
            return True
        time.sleep(0.01)
    return False


def steady(store: TieredStore, traffic: Traffic) -> float:
    """Median of resident bytes over more of the traffic: one sample moves by a hundredth with what threads hold just then."""
    samples: list[int] = []
    for _ in range(SAMPLES):
        traffic.run(SAMPLED)
        assert idle(store), "everything ends"
        samples.append(resident())
    return statistics.median(samples)


def lookups(count: int, seed: int, folder: Path) -> Lookups:
    tiers = (
        f"dram://?capacity={DRAM_BLOCKS * PAGE}",
        f"nvme://{folder}?capacity={NVME_BLOCKS * NVME_SLOT}&write=through",
    )
    with opened(*tiers) as store:
        traffic = Traffic(store, seed)
        traffic.run(WARM_UP)
        before = steady(store, traffic)
        found, wanted = traffic.found, traffic.wanted
        began = time.perf_counter()
        traffic.run(count)
        seconds = time.perf_counter() - began
        found, wanted = traffic.found - found, traffic.wanted - wanted
        growth = steady(store, traffic) / before - 1.0
        pins = int(store.stats()["leased"])  # type: ignore[call-overload]  # plain values, as it says
        disagreements = store.check_integrity()
        for number in range(CHAINS, CHAINS + 2 * DRAM_BLOCKS // LONGEST):
            save(store, chain(number, LONGEST), EngineMemory(LONGEST))
        assert store.drain(60.0), "every block is below"
        blocks = blocks_of(store, "dram")
        slot_of = {key: 0 for span in (chain(number, LONGEST) for number in range(CHAINS)) for key in span.keys}
        began = time.perf_counter()
        names = [*slot_of] * max(1, 1_000_000 // len(slot_of))
        list(map(slot_of.get, names))
        each = (time.perf_counter() - began) / len(names)
        return {
            "lookups": count,
            "per_second": count / seconds,
            "limit_per_second": 1.0 / (each * (LONGEST + 1) / 2),
            "hit_rate": found / wanted,
            "pins": pins,
            "growth": growth,
            "filled": blocks["ready"] / sum(blocks.values()),
            "disagreements": disagreements,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--entries", type=int, default=43_700, help="default: just after the hash tables have grown")
    parser.add_argument("--lookups", type=int, default=1_000_000)
    args = parser.parse_args()
    use_few_heaps()  # as the `kvtier` command does
    print(f"seed {args.seed}, {platform.machine()}, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as folder:
        rows = entries(args.entries, Path(folder))
    for row in rows:
        print(f"{row['tier']:5} {row['entries']:,} entries, {row['bytes_per_entry']:.0f} bytes of index each")
    with tempfile.TemporaryDirectory() as folder:
        run = lookups(args.lookups, args.seed, Path(folder))
    print(
        f"{run['lookups']:,} look-ups, {run['per_second']:,.0f}/s (bare dictionary {run['limit_per_second']:,.0f}/s), "
        f"hit rate {run['hit_rate']:.2f}; pins {run['pins']}, memory {run['growth']:+.2%}, DRAM filled to {run['filled']:.0%}"
    )
    for wrong in run["disagreements"]:
        print(wrong, file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps({"seed": args.seed, "rows": rows, "lookups": run}, indent=2) + "\n")
    well = (
        all(row["bytes_per_entry"] <= MOST_BYTES for row in rows)
        and not run["disagreements"]
        and run["pins"] == 0
        and abs(run["growth"]) <= MOST_GROWTH
        and run["filled"] == 1.0
    )
    print(
        f"at most {MOST_BYTES} bytes, no pins, memory within {MOST_GROWTH:.0%}, full again: {'yes' if well else 'NO'}"
    )
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
