"""One tier's hit rate on a trace: the pool and the policies that serve, and no bytes.

How it is counted: a request's hits are the blocks of its longest prefix that is wholly resident, as a share of all block
references. Its blocks are then all inserted, tail before head, and the cache evicts down to its capacity. The first requests
warm up and are not counted.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvtier.abc.policy import EntryMeta
from kvtier.errors import ConfigError
from kvtier.key import Address
from kvtier.policy import check, make
from kvtier.pool import BlockPool
from kvtier.sim.belady import belady_hits, infinite_hits
from kvtier.sim.traces import Reference, Trace

BELADY = "belady"
"""The offline optimum's name among the policies."""
ADAPTIVE = "adaptive"
NEAR, NEAR_SHARE, MOST = 1.0, 0.9, 2.0
"""Asked of adaptive: within so many points of the best static policy in such a share of cells, and never worse than the last."""


@dataclass(frozen=True, slots=True)
class Counting:
    """Which requests count, and as what."""

    warmup: float = 0.5
    """The first share of the requests, which is not counted."""
    unit: Literal["blocks", "tokens"] = "blocks"
    """``tokens``: a block counts as the tokens in it, which in a prompt's last block may be few."""
    flat: bool = False
    """Blocks know no parents and are inserted head first: what a cache does that knows nothing of prefixes."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.warmup < 1.0:
            raise ValueError(f"the warm-up is a share of the requests from 0 to below 1, not {self.warmup:g}")


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace in memory, as every cell of a replay goes through it."""

    times: list[float]
    chains: list[tuple[Address, ...]]
    metas: dict[Address, EntryMeta]
    """What policies may know of each distinct block."""
    references: int
    """Blocks of all chains together."""
    tokens: list[int]
    """Per request those in its blocks."""
    block_tokens: int
    counting: Counting

    @property
    def unique(self) -> int:
        """Distinct blocks."""
        return len(self.metas)

    @property
    def infinite(self) -> float:
        """Hit rate of a cache that forgets nothing."""
        return self.share(infinite_hits(self.chains))

    def share(self, hits: Sequence[int]) -> float:
        """Hit rate of the counted requests, where ``hits`` has the blocks hit per request."""
        first = int(len(self.chains) * self.counting.warmup)
        if self.counting.unit == "blocks":
            return sum(hits[first:]) / max(1, sum(map(len, self.chains[first:])))
        tokens = self.tokens[first:]
        hit = sum(min(count * self.block_tokens, most) for count, most in zip(hits[first:], tokens, strict=True))
        return hit / max(1, sum(tokens))


def read_workload(trace: Trace, counting: Counting) -> Workload:
    """Read a whole trace into memory. Raises ``ConfigError`` where there is nothing to keep."""
    work = workload(trace, trace.block_tokens, counting)
    if not work.unique:
        raise ConfigError(f"{trace.path}: no request in it has a whole block")
    return work


def workload(requests: Iterable[Reference], block_tokens: int, counting: Counting) -> Workload:
    """What ``requests`` ask for; equal blocks are one object each, which hashes once."""
    names: dict[Address, Address] = {}
    metas: dict[Address, EntryMeta] = {}
    times, chains, tokens = [], [], []
    for one in requests:
        chain = tuple(names.setdefault(entry, entry) for entry in one.chain)
        for depth, entry in enumerate(chain):
            if entry not in metas:
                metas[entry] = EntryMeta() if counting.flat else EntryMeta(chain[depth - 1] if depth else None, depth)
        times.append(one.time_s)
        chains.append(chain)
        tokens.append(min(len(chain) * block_tokens, one.input_tokens))
    return Workload(times, chains, metas, sum(map(len, chains)), tokens, block_tokens, counting)


def blocks_of(capacity: str, unique: int) -> int:
    """``2%`` of the distinct blocks, or a number of blocks; raises ``ConfigError`` where that is no size or not one block."""
    percent = capacity.endswith("%")
    try:
        blocks = int(float(capacity[:-1]) * unique / 100) if percent else int(capacity)
    except (ValueError, OverflowError):
        raise ConfigError(f"capacity {capacity!r} is neither a share such as 2% nor a number of blocks") from None
    if blocks < 1:
        of = f" of {unique:,} distinct blocks" if percent and float(capacity[:-1]) > 0 else ""
        raise ConfigError(f"capacity {capacity}{of} is not even one block")
    return blocks


class ReplayedTier:
    """A ``BlockPool`` under a policy that holds ``capacity`` blocks between requests.

    Its pool has slots for one whole chain more: a request's blocks are there before anything goes for them.
    """

    def __init__(self, policy: str, capacity: int, longest: int, metas: Mapping[Address, EntryMeta]) -> None:
        self.capacity = capacity
        self.pool = BlockPool(capacity + longest, make(policy, capacity))
        self._metas = metas

    def request(self, chain: Sequence[Address], now: float, *, flat: bool = False) -> int:
        """Serve one request; returns the blocks hit."""
        pool = self.pool
        places = pool.places(chain)
        hits = places.index(None) if None in places else len(chain)
        if hits < len(chain):
            new = [entry for entry, slot in zip(chain[hits:], places[hits:], strict=True) if slot is None]
            got = pool.allocate(len(new), now, evict=False)
            assert got is not None, "there is room for one chain more"
            if flat:
                new.reverse()  # for a chain is committed from its end
            pool.commit_all(got.slots, new, [self._metas[entry] for entry in new], now)
            pool.release(got.slots, now)
        there = [slot for slot in places if slot is not None]
        pool.touch(there[::-1] if flat else there, now)
        if pool.ready > self.capacity:
            gone = pool.evict(pool.ready - self.capacity, now)
            assert gone is not None, "nobody holds a block"
        return hits


def replay(work: Workload, policy: str, blocks: int) -> float:
    """Hit rate of a cache of ``blocks`` blocks under ``policy``, or of the offline optimum."""
    blocks = min(blocks, work.unique)  # what is larger holds everything as well
    if policy == BELADY:
        return work.share(belady_hits(work.chains, blocks))
    tier = ReplayedTier(policy, blocks, max(map(len, work.chains)), work.metas)
    flat = work.counting.flat
    return work.share([tier.request(chain, now, flat=flat) for chain, now in zip(work.chains, work.times, strict=True)])


def regret(rates: Mapping[str, float]) -> float:
    """What adaptive loses to the best static policy in one cell, given hit rates by policy; what they are in, it is in."""
    return max(rate for name, rate in rates.items() if name not in (ADAPTIVE, BELADY)) - rates[ADAPTIVE]


def near_best(regrets: Sequence[float]) -> tuple[float, bool]:
    """Share of the cells in which a regret, in points, is small, and whether adaptive does as well as it is asked to."""
    near = sum(one <= NEAR for one in regrets) / len(regrets)
    return near, near >= NEAR_SHARE and max(regrets) <= MOST


Cell = tuple[str, int]
"""A policy, and a capacity in blocks."""


def replay_cells(trace: Trace, work: Workload, cells: Sequence[Cell], jobs: int) -> Generator[float, None, None]:
    """Hit rates of ``cells``, in their order, each as soon as it is known.

    ``work`` is ``trace`` in memory; of ``jobs`` processes more than one each read it once more. Closing the iterator ends them.
    """
    for policy, _ in cells:
        if policy != BELADY:
            check(policy)
    if jobs <= 1:
        yield from (replay(work, *cell) for cell in cells)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, _begin, (trace, work.counting)) as pool:
        yield from pool.imap(_replayed, cells)


_work: Workload | None = None
"""What this process replays, where it is one of several."""


def _begin(trace: Trace, counting: Counting) -> None:
    global _work  # noqa: PLW0603 - the one thing that a pool's process has from its beginning
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    _work = read_workload(trace, counting)


def _replayed(cell: Cell) -> float:
    assert _work is not None
    return replay(_work, *cell)
