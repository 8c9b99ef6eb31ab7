"""Any order of verbs, transfers, faults and clock jumps: never a wrong byte, never a slot that does not add up."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from kvtier.abc.store import Match, Reason, SlotRange, Transfer
from kvtier.config import WriteMode
from kvtier.errors import MediumUnavailable
from kvtier.key import Span
from kvtier.storage_backends.memory import MemoryMedium
from kvtier.testing.faults import Faulty, wrapped

from .builders import SMALL_NVME, Bench, EngineMemory, content, make_bench, span

CHAINS = 5
MOST_BLOCKS = 9


class Walk:
    """Random verbs over a few chains that share prefixes, with an oracle that knows every block's bytes."""

    def __init__(self, bench: Bench, rng: random.Random, faults: list[Faulty], shared: MemoryMedium) -> None:
        self.bench = bench
        self.rng = rng
        self.faults = faults
        self.shared = shared
        self.matches: dict[str, Match] = {}
        self.requests = 0
        self.loads: list[tuple[Span, int, EngineMemory, Transfer]] = []
        self.saves: list[Transfer] = []
        self.loaded = 0
        self.failed = 0

    def prompt(self) -> Span:
        """A prefix of one of a few chains; chain 2k + 1 branches off chain 2k after four blocks."""
        number, blocks = self.rng.randrange(CHAINS), self.rng.randrange(1, MOST_BLOCKS)
        tokens = [
            number // 2,
            *range(1, 16 * 4),
            *(1000 * (number % 2) + token for token in range(16 * (MOST_BLOCKS - 4))),
        ]
        return span(tokens[: 16 * blocks])

    def save(self) -> None:
        keys = self.prompt()
        memory = EngineMemory(len(keys))
        for index in range(len(keys)):
            memory.bytes[index] = content(keys, index)
        self.saves.append(self.bench.store.save(keys, SlotRange(memory, range(len(keys)))))

    def match(self) -> None:
        self.requests += 1
        keys = self.prompt()
        start = self.rng.choice([0, 0, self.rng.randrange(len(keys) + 1)])
        name = f"r{self.requests}"
        self.matches[name] = self.bench.store.match(name, keys, start, load=self.rng.random() > 0.05)

    def ask_again(self) -> None:
        if self.matches:
            name = self.rng.choice(list(self.matches))
            match = self.matches[name]
            assert self.bench.store.match(name, match.span, match.start) is match

    def load(self) -> None:
        ready = [name for name, match in self.matches.items() if not match.pending]
        if ready:
            match = self.matches.pop(self.rng.choice(ready))
            count = self.rng.randrange(match.hits + 1)
            memory = EngineMemory(max(1, count))
            transfer = self.bench.store.load(match, SlotRange(memory, range(count)))
            self.loads.append((match.span, match.start, memory, transfer))

    def give_up(self) -> None:
        if self.matches:
            name = self.rng.choice(list(self.matches))
            match = self.matches.pop(name)
            match.release() if self.rng.random() < 0.5 else self.bench.store.forget(name)

    def cancel(self) -> None:
        if self.loads:
            self.rng.choice(self.loads)[3].cancel()

    def turn(self) -> None:
        worker = self.rng.choice(self.bench.workers)
        worker.run_one(self.rng.randrange)

    def wait(self) -> None:
        self.bench.clock.advance(self.rng.choice([0.1, 1.0, 3.0]))
        self.bench.store.keep()

    def drop(self) -> None:
        self.bench.store.drop(self.prompt(), Reason.CLEARED)

    def prefetch(self) -> None:
        self.bench.store.prefetch(self.prompt())

    def flip(self) -> None:
        """A bit rots in DRAM or in the shared medium."""
        at = self.rng.randrange(4096)
        if self.rng.random() < 0.5 and self.shared.values:
            name = self.rng.choice(list(self.shared.values))
            value = bytearray(self.shared.values[name])
            value[at % len(value)] ^= 1 << self.rng.randrange(8)
            self.shared.values[name] = bytes(value)
        else:
            ready = self.bench.arena.pool.entries()
            slot = self.bench.arena.pool.slot(self.rng.choice(ready)) if ready else None
            if slot is not None:
                view = self.bench.arena.medium.view(slot)
                assert view is not None
                view[at] ^= 1 << self.rng.randrange(8)

    def fault(self) -> None:
        fault = self.rng.choice(self.faults)
        fault.active = not fault.active and self.rng.random() < 0.5

    def check(self) -> None:
        """Whatever a finished load calls done is right, and everything adds up."""
        for keys, start, memory, transfer in [load for load in self.loads if load[3].done()]:
            self.loads.remove((keys, start, memory, transfer))
            if transfer.cancelled():
                continue
            for index, outcome in enumerate(transfer.result(0)):
                self.loaded += outcome.done
                self.failed += not outcome.done
                if outcome.done:
                    assert np.array_equal(memory.bytes[index], content(keys, start + index)), (
                        "wrong bytes were called done"
                    )
        self.saves = [save for save in self.saves if not save.done()]
        assert self.bench.store.check_integrity() == []
        pool = self.bench.arena.pool
        assert pool.free + pool.writing + pool.ready + pool.retiring == pool.capacity

    def come_to_rest(self) -> None:
        for fault in self.faults:
            fault.active = False
        for name in list(self.matches):
            self.bench.store.forget(name)
        for _ in range(20):
            self.bench.turn()
            self.bench.clock.advance(3.0)
            self.bench.store.keep()
        self.check()
        assert not self.loads
        assert not self.saves
        self.bench.idle()


VERBS = (
    ("save", 8),
    ("match", 8),
    ("ask_again", 4),
    ("load", 8),
    ("give_up", 2),
    ("cancel", 1),
    ("turn", 40),
    ("wait", 3),
    ("drop", 1),
    ("prefetch", 1),
    ("flip", 1),
    ("fault", 1),
)


@pytest.mark.parametrize("seed", range(10))
def test_any_order_of_verbs_transfers_and_faults(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    modes = [rng.choice(list(WriteMode)), rng.choice(list(WriteMode))]
    dram = rng.choice([6, 16, 32])
    print(f"seed {seed}: {modes}, {dram} slots of DRAM")
    shared = MemoryMedium()
    faults = [
        Faulty("read", "write", error=MediumUnavailable("ordered")),
        Faulty("read", "write"),
        Faulty("probe", error=RuntimeError("ordered")),
    ]
    for fault in faults:
        fault.active = False
    broken = shared
    for fault in faults:
        broken = wrapped(broken, fault)
    bench = make_bench(
        dram, nvme=tmp_path / "n", nvme_write=modes[0], nvme_capacity=SMALL_NVME, shared=broken, shared_write=modes[1]
    )
    walk = Walk(bench, rng, faults, shared)
    names, weights = zip(*VERBS, strict=True)
    for verb in rng.choices(names, weights, k=3000):
        getattr(walk, verb)()
        walk.check()
    walk.come_to_rest()
    print(f"{walk.loaded} blocks loaded, {walk.failed} failed")
    assert walk.loaded > 10
    bench.store.close()
