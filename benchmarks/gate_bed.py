"""What ``gate.py`` tries the gate on: an engine over DRAM and one tier below it, which can be throttled."""

from __future__ import annotations

import random
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import cast

from kvtier.abc.medium import Medium, SlotMedium
from kvtier.abc.store import NO_HINTS, Found, Hints, Reason
from kvtier.assembly.assemble import Assembly, assemble
from kvtier.config import EngineSettings, GateMode, Settings, StoreSettings
from kvtier.engine.request import Request
from kvtier.engine.sampler import SamplingParams
from kvtier.quantity import Seconds
from kvtier.store.store import TieredStore
from kvtier.testing.faults import FaultySlots, Throttled, wrapped
from kvtier.url import TierUrl

PROMPTS = 4
FRESH = 4
"""Between so many requests whose prompts are in the tier comes one whose prompt nobody has: what computing takes meanwhile."""
DRAM_URL = "dram://?capacity=1GiB&prefault=false"


class SlowDram(FaultySlots):
    """A DRAM whose blocks are found slowly, by the threads that copy them to and from an engine."""

    def __init__(self, inner: SlotMedium, throttle: Throttled) -> None:
        super().__init__(inner, throttle)
        self._throttle = throttle

    def view(self, slot: int) -> memoryview | None:
        if threading.current_thread().name.startswith(("kvtier-dram", "kvtier-copier")):
            self._throttle.refusal("read", slot)
        return super().view(slot)


@dataclass(frozen=True, slots=True)
class Served:
    """One request, and where the tokens of its prompt came from."""

    ttft: float
    loadable: int
    """Tokens that the tier had, were all well."""
    loaded: int
    """Of these, what came from that tier."""
    declined: int
    """Of these, what the gate had computed, at once or when its patience ended."""


@dataclass(frozen=True, slots=True)
class Share:
    """What became of so many requests."""

    loaded: float
    declined: float
    ttft: float
    """The median, in seconds."""
    no_cache: float | None
    """The median of prompts that nobody had, between them."""

    @classmethod
    def of(cls, served: Sequence[Served], fresh: Sequence[float] = ()) -> Share:
        loadable = sum(each.loadable for each in served)
        return cls(
            sum(each.loaded for each in served) / loadable,
            sum(each.declined for each in served) / loadable,
            statistics.median(each.ttft for each in served),
            statistics.median(fresh) if fresh else None,
        )

    @property
    def lost(self) -> float:
        """Neither loaded nor declined: it was not there, or came too late."""
        return max(0.0, 1.0 - self.loaded - self.declined)


@dataclass
class Bed:
    """The engine, and the prompts that its tier has."""

    assembly: Assembly
    tier: str
    throttle: Throttled
    rng: random.Random
    tokens: int
    """Of a long prompt, less one."""
    proceed: Callable[[], None]
    """Called between requests; may raise ``Stopped``."""
    cold: float = 0.0
    """Seconds to the first token of a long prompt, where nothing is cached."""
    computing: float = 0.0
    """Of that, what is saved where all but the last token is loaded."""
    even: float = 0.0
    """Bytes per second at which loading takes as long as that: break-even."""
    count: int = 0
    longs: list[tuple[int, ...]] = field(default_factory=list)
    shorts: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def store(self) -> TieredStore:
        assert self.assembly.store is not None
        return self.assembly.store

    def fresh(self, tokens: int) -> tuple[int, ...]:
        """A prompt that nobody has seen."""
        return tuple(self.rng.randrange(256) for _ in range(tokens + 1))

    def serve(self, prompt: Sequence[int], hints: Hints = NO_HINTS) -> Served:
        """One request, for one token; then HBM, and DRAM over the tier, are emptied.

        Raises ``RuntimeError`` where something was found elsewhere than in the tier: then it says nothing of the gate.
        """
        self.proceed()
        self.count += 1
        engine, name = self.assembly.engine, f"gate {self.count}"
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        (done,) = engine.run([Request(name, tuple(prompt), sampling, hints=hints)])
        found = self.store.explain(name)
        if not (engine.settle(60.0) and self.store.drain(60.0)):
            raise RuntimeError("saves did not end in a minute")
        engine.reset_prefix_cache()
        if self.tier != "dram":
            self.store.empty("dram")
        hits = list(takewhile(lambda block: block.found is Found.HIT, found))
        elsewhere = {block.tier for block in hits} - {self.tier}
        if elsewhere or done.stats.hbm_tokens:
            raise RuntimeError(
                f"{', '.join(map(str, elsewhere)) or 'HBM'} had blocks that {self.tier} alone was to have"
            )
        blocked = len(found) > len(hits) and found[len(hits)].reason in (Reason.BELOW_BREAK_EVEN, Reason.DEADLINE)
        declined = (len(found) - len(hits)) * self.store.geometry.block_tokens if blocked else 0
        return Served(done.stats.ttft or 0.0, len(prompt) - 1, done.stats.external_tokens, declined)

    def uncached(self, tokens: int) -> float:
        """Seconds to the first token of a prompt that nobody has seen, and that is not kept."""
        return self.serve(self.fresh(tokens), Hints(no_store=True)).ttft

    def share(self, prompts: Sequence[Sequence[int]], rounds: int, *, fresh: bool = False) -> Share:
        """``rounds`` requests over ``prompts``; ``fresh``: with others between them that nobody has seen."""
        served, others = [], []
        for number in range(rounds):
            if fresh and number % FRESH == 0:
                others.append(self.uncached(self.tokens))
            served.append(self.serve(prompts[number % len(prompts)]))
        return Share.of(served, others)

    def time_computing(self, rounds: int) -> None:
        """Set ``cold``, ``computing`` and ``even`` by prompts of which nothing is cached."""
        whole, least = (statistics.median(self.uncached(tokens) for _ in range(rounds)) for tokens in (self.tokens, 0))
        self.cold, self.computing = whole, max(whole - least, whole / 100)
        geometry = self.store.geometry
        self.even = self.tokens // geometry.block_tokens * geometry.block_bytes / self.computing

    def throttled(self, factor: float) -> None:
        """From now on the tier gives ``factor`` times the break-even bandwidth."""
        self.throttle.call = 0.0
        self.throttle.each = self.store.geometry.block_bytes / (factor * self.even)
        self.throttle.active = True

    def bandwidth(self) -> float:
        """Bytes per second at which the tier loads a long prompt, unthrottled."""
        rates = []
        for prompt in self.longs:
            self.serve(prompt)
            timing = self.store.timing(f"gate {self.count}")
            if timing is not None and timing.nbytes:
                rates.append(timing.nbytes / timing.seconds)
        if not rates:
            raise RuntimeError(f"nothing is loaded from {self.tier}, unthrottled as it is")
        return statistics.median(rates)


@dataclass(frozen=True, slots=True)
class Ground:
    """What a bed is made on."""

    tier: str
    url: str
    """Of the tier, for all but DRAM."""
    seed: int
    tokens: int
    short: int
    proceed: Callable[[], None]


@contextmanager
def bed(ground: Ground, model: str, gate: GateMode) -> Iterator[Bed]:
    """With every prompt of the bed in the tier already."""
    throttle = Throttled(0.0, "read")
    throttle.active = False
    tier, tokens = ground.tier, ground.tokens

    def around(name: str, medium: Medium) -> Medium:
        if name != tier:
            return medium
        return SlowDram(cast("SlotMedium", medium), throttle) if name == "dram" else wrapped(medium, throttle)

    urls = [DRAM_URL, *([ground.url] if tier != "dram" else [])]
    settings = Settings(
        tiers=tuple(map(TierUrl.parse, urls)),
        engine=EngineSettings(model=model, seed=ground.seed, hbm_blocks=2 * tokens // 16 + 8),
        store=StoreSettings(gate=gate, deadline=Seconds(600.0)),
    )
    assembly = assemble(settings, require_all=True, around=around)
    try:
        rng = random.Random(f"{ground.seed} {model} {tier} {gate}")
        made = Bed(assembly, tier, throttle, rng, tokens, ground.proceed)
        for _ in range(3):  # first use costs more: of torch, of buffers, of threads
            made.uncached(tokens)
        made.longs = [made.fresh(tokens) for _ in range(PROMPTS)]
        made.shorts = [made.fresh(ground.short) for _ in range(PROMPTS)]
        for prompt in (*made.longs, *made.shorts):
            made.serve(prompt)
        yield made
    finally:
        assembly.close()
