"""A ladder of tiers on a trace, in virtual time: the store that serves, over media that move no bytes.

`TieredStore` with its tiers, pools, policies, queues, deadlines and gate runs as it does under an engine; only the media, the
clock and the threads are others. The engine is an estimate: a request begins to compute as soon as what is loaded for it has
arrived, never waits for a GPU that others use, and computes at the speed that it is given.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtier import policy
from kvtier.abc.store import SlotRange, Transfer
from kvtier.codec.catalogue import codec_named
from kvtier.config import StoreSettings, TierOptions, WriteMode, tier_options
from kvtier.cost import DRAM, FittedGate, Gate, OpenGate
from kvtier.errors import ConfigError
from kvtier.key import KEY_BYTES, BlockKey, Origin, Shard, Span
from kvtier.metrics import Metrics
from kvtier.params import nearest
from kvtier.policy.admission import BURSTS
from kvtier.quantity import Bytes, Seconds
from kvtier.sim.clock import Schedule, TimedWorkers
from kvtier.sim.media import STAND_IN, DeviceStandIn, DramStandIn, KeyStandIn, Pipe, SlotStandIn
from kvtier.sim.models import LINKS
from kvtier.sim.replay import ReplayedTier, Workload
from kvtier.sim.traces import ID_BYTES
from kvtier.store.arena import Arena
from kvtier.store.geometry import Geometry
from kvtier.store.open import DRAM_THREADS, MOST_SAVES
from kvtier.store.parts import Parts
from kvtier.store.store import KEEP_SECONDS, TieredStore
from kvtier.tier.key import KeyTier
from kvtier.tier.lower import LowerTier
from kvtier.tier.slot import SlotTier
from kvtier.url import TierUrl

HBM = "hbm"
SLOTTED, NAMED = ("nvme",), ("redis", "rediss", "fs", "memory")
"""Schemes below DRAM, of numbered places and of names."""
LOWER_THREADS = StoreSettings().transfer_threads
_TTL = dict.fromkeys(("redis", "rediss", "fs"), 86_400.0)
"""Seconds that a name lives where a URL does not say."""
STEP_SECONDS = 0.005
"""How often the engine asks again for blocks that are on their way."""
_SPEEDS: dict[str, tuple[float, float]] = {
    DRAM: (25e9, 1e-5),
    "nvme": (LINKS["nvme"].bandwidth, LINKS["nvme"].latency),
    "redis": (LINKS["redis"].bandwidth, LINKS["redis"].latency),
    "rediss": (LINKS["redis"].bandwidth, LINKS["redis"].latency),
}
"""Bytes per second and seconds per call where a URL does not say."""
_ORIGIN, _ROOT = Origin(bytes(32), bytes(32), bytes(16)), BlockKey(bytes(KEY_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What a simulated medium is told in its URL."""

    capacity: Bytes | None = None
    bandwidth: Bytes | None = None
    """Per second, both ways together."""
    t0: Seconds | None = None
    """Before the first byte of a call."""
    threads: int = LOWER_THREADS
    ttl: Seconds | None = None
    """How long a name lives that nothing renews."""

    def __post_init__(self) -> None:
        if self.ttl is not None and self.ttl < 1:
            raise ValueError("ttl: a name has to live for a second at least")
        if self.bandwidth is not None and self.bandwidth < 1:
            raise ValueError("bandwidth: nothing would ever come")
        if self.threads < 1:
            raise ValueError(f"threads: at least one has to do it, not {self.threads}")


@dataclass(frozen=True, slots=True)
class Rung:
    """One tier of a ladder."""

    name: str
    scheme: str
    options: TierOptions
    blocks: int | None
    """Capacity; None: no end to it."""
    bandwidth: float
    t0: float
    threads: int
    ttl: float
    """Seconds that a name lives which nothing renews."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What computes, and what a block of its KV weighs."""

    block_bytes: int
    prefill: Callable[[int, int], float]
    """Seconds to compute so many tokens behind so many others."""


def ladder(urls: Sequence[TierUrl], block_bytes: int) -> list[Rung]:
    """The tiers of ``urls``, fastest first: ``hbm://`` if the engine's own cache is to be counted, then ``dram://``, then any.

    Raises ``ConfigError`` for whatever is wrong with them.
    """
    rungs: list[Rung] = []
    for url in urls:
        if url.scheme not in (HBM, DRAM, *SLOTTED, *NAMED):
            known = nearest(url.scheme, (HBM, DRAM, *SLOTTED, *NAMED))
            raise ConfigError(f"{url}: {url.scheme}:// cannot be simulated{known}")
        options, speeds = tier_options(url, Speeds)
        _check(url, options, block_bytes)
        bandwidth, t0 = _SPEEDS.get(url.scheme, (None, 0.0))
        bandwidth = speeds.bandwidth if speeds.bandwidth is not None else bandwidth
        if speeds.capacity is None and url.scheme not in NAMED:
            raise ConfigError(f"{url}: capacity is missing (a size such as 8GiB)")
        if bandwidth is None and url.scheme != HBM:
            raise ConfigError(f"{url}: bandwidth is missing (bytes per second, such as 3GB)")
        blocks = None if speeds.capacity is None else speeds.capacity // block_bytes
        if blocks is not None and blocks < 1:
            raise ConfigError(f"{url}: capacity {speeds.capacity} is less than one block of {block_bytes:,} bytes")
        same = sum(rung.scheme == url.scheme for rung in rungs)
        rungs.append(
            Rung(
                url.scheme if not same else f"{url.scheme}-{same + 1}",
                url.scheme,
                options,
                blocks,
                bandwidth or 1.0,
                t0 if speeds.t0 is None else speeds.t0,
                speeds.threads,
                _TTL.get(url.scheme, math.inf) if speeds.ttl is None else speeds.ttl,
            )
        )
    schemes = [rung.scheme for rung in rungs]
    below = schemes[1:] if schemes[:1] == [HBM] else schemes
    if below[:1] != [DRAM] or HBM in below or DRAM in below[1:]:
        got = ", ".join(f"{scheme}://" for scheme in schemes) or "none"
        raise ConfigError(f"tiers: one dram:// is needed, before all others but an hbm://; got {got}")
    return rungs


def _check(url: TierUrl, options: TierOptions, block_bytes: int) -> None:
    """Refuse a setting that would change nothing here, or that a server would refuse."""
    policy.check(options.policy, f"{url}: policy")
    for name in sorted({"codec", "encrypt", "verify"} & set(url.params)):
        raise ConfigError(f"{url}: {name}: not simulated; leave it out")
    if "ttl" in url.params and url.scheme not in _TTL:
        raise ConfigError(f"{url}: ttl: {url.scheme}:// keeps blocks until they are evicted")
    if "policy" in url.params and url.scheme in NAMED:
        raise ConfigError(f"{url}: policy: {url.scheme}:// itself chooses what goes; leave it out")
    if url.scheme in (HBM, DRAM):
        for name in sorted({"admission", "write_budget"} & set(url.params)):
            raise ConfigError(f"{url}: {name}: {url.scheme}:// takes every block; only tiers below dram:// choose")
        if options.write is not WriteMode.THROUGH:
            raise ConfigError(f"{url}: write: {url.scheme}:// is offered every block, so only through is possible")
    if options.write_budget is not None and options.write_budget < BURSTS * block_bytes:
        raise ConfigError(
            f"{url}: write_budget: {options.write_budget} bytes a day are less than a block an hour "
            f"({BURSTS * block_bytes})"
        )


@dataclass
class Books:
    """What is counted of the requests that count."""

    requests: int = 0
    references: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    """Blocks by the tier that they came from."""
    missed: Counter[str] = field(default_factory=Counter)
    """Blocks by why they had to be computed; behind a first miss nothing is asked for."""
    ttft: list[float] = field(default_factory=list)
    ttft_without: list[float] = field(default_factory=list)
    """The same where everything is computed."""
    gpu_seconds: float = 0.0
    gpu_seconds_saved: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    moved: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By tier: bytes read and bytes written."""

    @property
    def hit_rate(self) -> float:
        """Of all tiers together."""
        return sum(self.hits.values()) / max(1, self.references)

    @property
    def span_s(self) -> float:
        """Seconds from the first request that counts to the last first token."""
        return max(self.ended - self.began, 1e-9)


class Simulation:
    """One run."""

    def __init__(
        self, work: Workload, rungs: Sequence[Rung], machine: Machine, *, gated: bool = True, deadline: float = 2.0
    ) -> None:
        """``gated``: whether only what is faster to load than to compute is loaded; ``deadline``: longest wait for a tier (s)."""
        self.books = Books()
        self.schedule = Schedule()
        self.work = work
        self.machine = machine
        self.longest = max(map(len, work.chains))
        hbm = next((rung for rung in rungs if rung.scheme == HBM), None)
        self.hbm = None
        if hbm is not None and hbm.blocks is not None:
            self.hbm = ReplayedTier(hbm.options.policy, hbm.blocks, self.longest, work.metas)
        below = [rung for rung in rungs if rung.scheme != HBM]
        down, up = self._pipe(below[0]), self._pipe(below[0])
        self.device = DeviceStandIn(self.longest, machine.block_bytes, down, up)
        self._media: dict[str, SlotStandIn | KeyStandIn] = {}
        self.store = self._opened(below, gated=gated, deadline=deadline)
        self.open = 0
        """Requests that have no first token yet."""
        self._first = int(len(work.chains) * work.counting.warmup)
        self._keeping = False
        self._before: dict[str, tuple[int, int]] = {}

    def run(self, goes_on: Callable[[int], bool] = lambda _: True) -> Books:
        """Play the trace; ``goes_on`` is told the number of each request that comes, and says whether it and others still do."""
        self._arrive(0, goes_on)
        self.schedule.run()
        wrong = self.store.check_integrity()
        assert not wrong, f"the store disagrees with itself: {wrong[0]}"
        self.schedule.close()
        for name, (read, written) in self._moved().items():
            read_before, written_before = self._before.get(name, (read, written))
            self.books.moved[name] = (read - read_before, written - written_before)
        return self.books

    def _pipe(self, rung: Rung) -> Pipe:
        return Pipe(self.schedule, self.machine.block_bytes, rung.bandwidth, rung.t0)

    def _opened(self, rungs: Sequence[Rung], *, gated: bool, deadline: float) -> TieredStore:
        dram, *lower = rungs
        assert dram.blocks is not None, "`ladder` has seen to it"
        metrics, lock = Metrics(), threading.Lock()
        gate: Gate = FittedGate() if gated else OpenGate()
        parts = Parts(
            Geometry(Shard(), bytes(16), STAND_IN, self.work.block_tokens),
            Arena(DramStandIn(dram.blocks, self.machine.block_bytes), policy.make(dram.options.policy, dram.blocks)),
            metrics.tier(DRAM),
            tuple(self._lower(rung, metrics, lock) for rung in lower),
            TimedWorkers(DRAM, DRAM_THREADS, self.schedule, most_saves=MOST_SAVES),
            gate,
            lock,
            clock=self.schedule,
        )
        return TieredStore(parts, deadline=deadline, keeper=False)

    def _lower(self, rung: Rung, metrics: Metrics, lock: threading.Lock) -> LowerTier:
        workers, raw = TimedWorkers(rung.name, rung.threads, self.schedule), codec_named("raw")
        meter, pipe, size = metrics.tier(rung.name), self._pipe(rung), self.machine.block_bytes
        if rung.scheme in NAMED:
            names = self._media[rung.name] = KeyStandIn(rung.blocks, size, pipe, rung.ttl)
            return KeyTier(rung.name, rung.options, names, raw, workers, meter, lock, self.schedule)
        assert rung.blocks is not None, "`ladder` has seen to it"
        slots = self._media[rung.name] = SlotStandIn(rung.blocks, size, pipe)
        order = policy.make(rung.options.policy, rung.blocks)
        return SlotTier(rung.name, rung.options, slots, raw, workers, meter, lock, order, self.schedule)

    def _arrive(self, number: int, goes_on: Callable[[int], bool]) -> None:
        if not goes_on(number):
            return
        if number == self._first:
            self._before = self._moved()
            self.books.began = self.schedule.now
        if number + 1 < len(self.work.chains):
            self.schedule.at(self.work.times[number + 1], partial(self._arrive, number + 1, goes_on))
        self.open += 1
        self._keep_up()
        _Request(self, number, counted=number >= self._first).begin()

    def _keep_up(self) -> None:
        """Upkeep as often as a real store has it, while there is anything to keep up."""
        if not self._keeping:
            self._keeping = True
            self.schedule.at(self.schedule.now + KEEP_SECONDS, self._keep)

    def _keep(self) -> None:
        self._keeping = False
        self.store.keep()
        if self.open:
            self._keep_up()

    def _moved(self) -> dict[str, tuple[int, int]]:
        below = {name: (each.bytes_read, each.bytes_written) for name, each in self._media.items()}
        return {DRAM: (self.device.bytes_written, self.device.bytes_read), **below}


class _Request:
    """One request, from its arrival to its first token."""

    def __init__(self, run: Simulation, number: int, *, counted: bool) -> None:
        self._run = run
        self._name = f"r{number}"
        self._chain = run.work.chains[number]
        self._tokens = run.work.tokens[number]
        self._counted = counted
        self._arrived = run.schedule.now
        self._held = 0
        """Blocks that HBM had."""

    def begin(self) -> None:
        run = self._run
        if run.hbm is not None:
            self._held = len(run.hbm.pool.lookup(self._chain))
        self._match = run.store.match(self._name, self._span(0), self._held)
        self._ask()

    def _span(self, start: int) -> Span:
        keys = tuple(BlockKey(one + bytes(KEY_BYTES - ID_BYTES)) for one in self._chain)
        return Span(_ORIGIN, keys[start - 1] if start else _ROOT, start, keys[start:])

    def _ask(self) -> None:
        run, match = self._run, self._match
        if match.pending:
            run.schedule.at(run.schedule.now + STEP_SECONDS, self._ask)
            return
        if self._counted:
            self._note_blocks()
        if not match.hits:
            self._compute(0)
            return
        transfer = run.store.load(match, SlotRange(run.device, range(match.hits)))
        transfer.add_done_callback(self._loaded)

    def _note_blocks(self) -> None:
        books, match = self._run.books, self._match
        books.requests += 1
        books.references += len(self._chain)
        books.hits[HBM] += self._held
        for block in match.blocks[: match.hits]:
            books.hits[block.tier or DRAM] += 1
        left = len(self._chain) - self._held - match.hits
        if left:
            reason = match.blocks[match.hits].reason
            books.missed[reason.value if reason is not None else "unknown"] += left

    def _loaded(self, transfer: Transfer) -> None:
        """On the transfer's thread."""
        done = sum(outcome.done for outcome in transfer.result())
        self._run.schedule.at(self._run.schedule.now, partial(self._compute, done))

    def _compute(self, loaded: int) -> None:
        run, cached = self._run, self._held + loaded
        past = min(cached * run.work.block_tokens, max(0, self._tokens - 1))  # the last token is always computed
        rest = max(1, self._tokens - past)
        seconds = run.machine.prefill(rest, past)
        run.schedule.at(run.schedule.now + seconds, partial(self._end, cached, rest, seconds))

    def _end(self, cached: int, computed: int, seconds: float) -> None:
        run, books = self._run, self._run.books
        run.store.observe_prefill(computed, seconds)
        if cached < len(self._chain):
            run.store.save(self._span(cached), SlotRange(run.device, range(len(self._chain) - cached)))
        run.store.forget(self._name)
        if run.hbm is not None:
            run.hbm.request(self._chain, run.schedule.now)
        run.open -= 1
        if self._counted:
            without = run.machine.prefill(max(1, self._tokens), 0)
            books.ttft.append(run.schedule.now - self._arrived)
            books.ttft_without.append(without)
            books.gpu_seconds += seconds
            books.gpu_seconds_saved += without - seconds
            books.ended = max(books.ended, run.schedule.now)
