"""Is the cache never slower than no cache? Tiers on both sides of break-even, short prefixes, and workloads with it and without.

    python benchmarks/gate.py [--json FILE] [--seed N] [--models LIST] [--tiers LIST] [--parts LIST] [--quick]

``throttle``: break-even bandwidth is what this run's engine makes KV at. Each tier is throttled to 0.1, 0.5, 1, 2 and 10 times
that, as far as it is fast enough unthrottled; a factor that it cannot reach is listed so. At 0.5 and less under 2 % of the tokens
may be loaded, at 2 and more over 95 % have to be. Requests come one at a time, each finds its whole prompt in that tier alone,
and the first few after each change of speed are told apart: they are what the gate learns from. Before that, prefixes so short
that a delay is four times their computing come in turn with long ones: they may not be loaded. First of all the same tier at 0.1
with the gate off: unless that is at least twice as slow as no cache, the throttle is none, and the run is invalid.

``workloads``: ``kvtier bench engine`` with at least seven pairs. Time to the first token and throughput may not be under 0.95 of
no cache, and the store's threads may take 3 % of wall time x cores on prompts that never repeat.
"""

from __future__ import annotations

import kvtier.engine  # noqa: F401 - says how compute threads wait, before torch is imported

# isort: split

import argparse
import random
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from kvtier.abc.medium import Medium, SlotMedium
from kvtier.assembly.assemble import Assembly, assemble
from kvtier.bench.engine import Passes, compare
from kvtier.bench.report import Row, check_json, machine, stoppable, table, write_json
from kvtier.bench.workloads import WORKLOADS
from kvtier.config import EngineSettings, GateMode, Settings, StoreSettings, redis_url
from kvtier.engine.request import Request, RequestStats
from kvtier.engine.sampler import SamplingParams
from kvtier.quantity import Seconds
from kvtier.store.store import TieredStore
from kvtier.testing.faults import FaultySlots, Throttled, wrapped
from kvtier.testing.valkey import start_valkey
from kvtier.url import TierUrl

FACTORS = (10.0, 2.0, 1.0, 0.5, 0.1)
"""Of the break-even bandwidth; from the fastest down, so that the gate has to notice each time that a tier has become slower."""
MOST_LOADED = {0.5: 0.02, 0.1: 0.02}
LEAST_LOADED = {2.0: 0.95, 10.0: 0.95}
LEAST_OFF = 2.0
"""Slower than no cache, with the gate off at the lowest factor."""
DELAY = 4
"""Times the computing of a short prefix."""
SETTLING = 8
"""Requests after a change of speed that are told apart."""
ROOM = 1.25
"""By how much a tier has to be faster than a factor asks."""
LONG, SHORT = 256, 32
"""Tokens of a long prompt and of a short prefix, each with one token more, which is always computed."""
PACED_LONG = 1024
"""Where a GPU is paced: shorter prompts take no longer there than one token, for which all weights are read as well."""
PROMPTS = 4
SLOW = 100.0
"""What a paced model is slowed by at first, to see what its tier can do."""
MOST_CPU = 0.03
"""Of wall time x cores, for the store's threads, on prompts that never repeat."""
DRAM_URL = "dram://?capacity=1GiB&prefault=false"
SMOLLM2, PACED = "SmolLM2-135M-Instruct", "paced://llama-3-8b?gpu=h100"


class SlowDram(FaultySlots):
    """A DRAM whose blocks are found slowly, by the threads that copy them to and from an engine."""

    def __init__(self, inner: SlotMedium, throttle: Throttled) -> None:
        super().__init__(inner, throttle)
        self._throttle = throttle

    def view(self, slot: int) -> memoryview | None:
        if threading.current_thread().name.startswith(("kvtier-dram", "kvtier-copier")):
            self._throttle.refusal("read", slot)
        return super().view(slot)


@dataclass
class Bed:
    """An engine over DRAM and at most one tier below it, which can be throttled."""

    assembly: Assembly
    tier: str
    throttle: Throttled
    rng: random.Random
    tokens: int
    """Of a long prompt, less one."""
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

    def serve(self, prompt: Sequence[int]) -> RequestStats:
        """One request, for one token; then HBM, and DRAM over the tier, are emptied."""
        self.count += 1
        engine = self.assembly.engine
        request = Request(
            f"gate {self.count}", tuple(prompt), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        )
        (done,) = engine.run([request])
        if not (engine.settle(60.0) and self.store.drain(60.0)):
            raise RuntimeError("saves did not end in a minute")
        engine.reset_prefix_cache()
        if self.tier != "dram":
            self.store.empty("dram")
        return done.stats

    def time_computing(self, rounds: int) -> None:
        """Set ``cold``, ``computing`` and ``even`` by prompts of which nothing is cached."""
        whole, least = (
            statistics.median(self.serve(self.fresh(tokens)).ttft or 0.0 for _ in range(rounds))
            for tokens in (self.tokens, 0)
        )
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


@contextmanager
def bed(model: str, tier: str, url: str, seed: int, *, gate: GateMode, tokens: int) -> Iterator[Bed]:
    """With every prompt of the bed in the tier already. ``url`` is the tier's, for all but DRAM."""
    throttle = Throttled(0.0, "read")
    throttle.active = False

    def around(name: str, medium: Medium) -> Medium:
        if name != tier:
            return medium
        return SlowDram(cast("SlotMedium", medium), throttle) if name == "dram" else wrapped(medium, throttle)

    urls = [DRAM_URL, *([url] if tier != "dram" else [])]
    settings = Settings(
        tiers=tuple(map(TierUrl.parse, urls)),
        engine=EngineSettings(model=model, seed=seed, hbm_blocks=2 * tokens // 16 + 8),
        store=StoreSettings(gate=gate, deadline=Seconds(600.0)),
    )
    assembly = assemble(settings, require_all=True, around=around)
    try:
        made = Bed(assembly, tier, throttle, random.Random(f"{seed} {model} {tier} {gate}"), tokens)
        for _ in range(3):  # first use costs more: of torch, of buffers, of threads
            made.serve(made.fresh(tokens))
        made.longs = [made.fresh(tokens) for _ in range(PROMPTS)]
        made.shorts = [made.fresh(SHORT) for _ in range(PROMPTS)]
        for prompt in (*made.longs, *made.shorts):
            made.serve(prompt)
        yield made
    finally:
        assembly.close()


@dataclass(frozen=True, slots=True)
class Share:
    """What of so many requests was loaded."""

    loaded: float
    ttft: float
    """The median, in seconds."""


def share(made: Bed, prompts: Sequence[Sequence[int]], rounds: int) -> Share:
    stats = [made.serve(prompts[number % len(prompts)]) for number in range(rounds)]
    loadable = sum(len(prompts[number % len(prompts)]) - 1 for number in range(rounds))
    return Share(sum(each.external_tokens for each in stats) / loadable, median_ttft(stats))


def median_ttft(stats: Sequence[RequestStats]) -> float:
    return statistics.median(each.ttft or 0.0 for each in stats)


@dataclass(frozen=True, slots=True)
class Trial:
    """One tier under one model."""

    model: str
    tier: str
    url: str
    seed: int
    rounds: int
    tokens: int

    def run(self) -> tuple[list[Row], list[str]]:
        """Rows, and in words what does not hold."""
        rows: list[Row] = []
        wrong: list[str] = []
        model = self.model if not self.model.startswith("paced:") else self._slowed()
        with self._bed(model, GateMode.OFF) as made:
            made.time_computing(5)
            limit = made.bandwidth()
            print(
                f"{model}, {self.tier}: {self.tokens} tokens computed in {made.computing * 1e3:.0f} ms of "
                f"{made.cold * 1e3:.0f} ms, break-even {made.even / 1e9:.3f} GB/s, unthrottled {limit / 1e9:.3f} GB/s",
                flush=True,
            )
            made.throttled(min(FACTORS))
            off = share(made, made.longs, 3)
            rows.append(self._row(made, min(FACTORS), "gate off", off))
            print(f"  gate off at {min(FACTORS):g}: {off.ttft / made.cold:.1f} times as slow as no cache", flush=True)
            if off.ttft < LEAST_OFF * made.cold:
                wrong.append(
                    f"{self.model}, {self.tier}: invalid, without the gate it is not {LEAST_OFF:g} times slower"
                )
        with self._bed(model, GateMode.ON) as made:
            made.time_computing(5)
            if self.tier != "dram":
                rows += self._short(made, wrong)
            for factor in FACTORS:
                if factor * made.even * ROOM > limit:
                    rows.append(self._row(made, factor, "out of reach"))
                    print(f"  {factor:4g} x break-even is out of reach", flush=True)
                else:
                    rows.append(self._judged(made, factor, wrong))
            pace = made.assembly.engine.pace
            if pace is not None and not pace.valid:
                wrong.append(f"{model}: {pace.sentence()}")
        return rows, wrong

    def _bed(self, model: str, gate: GateMode) -> AbstractContextManager[Bed]:
        return bed(model, self.tier, self.url, self.seed, gate=gate, tokens=self.tokens)

    def _slowed(self) -> str:
        """The paced model, so slow that ten times break-even is below what the tier can do."""
        with self._bed(f"{self.model}&slow={SLOW:g}", GateMode.OFF) as made:
            made.time_computing(3)
            needed = SLOW * ROOM * ROOM * max(FACTORS) * made.even / made.bandwidth()
        return f"{self.model}&slow={max(1.0, needed):.0f}"

    def _judged(self, made: Bed, factor: float, wrong: list[str]) -> Row:
        made.throttled(factor)
        settling = share(made, made.longs, SETTLING)
        found = share(made, made.longs, self.rounds)
        if not LEAST_LOADED.get(factor, 0.0) <= found.loaded <= MOST_LOADED.get(factor, 1.0):
            wrong.append(f"{self.model}, {self.tier} at {factor:g}: {found.loaded:.1%} of the tokens loaded")
        print(
            f"  {factor:4g} x break-even: {found.loaded:6.1%} loaded (of the first {SETTLING}: {settling.loaded:.0%}), "
            f"TTFT {found.ttft * 1e3:.0f} ms, without cache {made.cold * 1e3:.0f} ms",
            flush=True,
        )
        return self._row(made, factor, "gate on", found)

    def _short(self, made: Bed, wrong: list[str]) -> list[Row]:
        """Short prefixes in turn with long ones, over a delay that only the long ones are worth."""
        made.throttle.each, made.throttle.call = 0.0, DELAY * made.computing * SHORT / self.tokens
        made.throttle.active = True
        prompts = [each for pair in zip(made.shorts, made.longs, strict=True) for each in pair]
        share(made, prompts, SETTLING)
        stats = [made.serve(prompts[number % len(prompts)]) for number in range(2 * self.rounds)]
        rows: list[Row] = []
        for name, tokens, those in (("short", SHORT, stats[::2]), ("long", self.tokens, stats[1::2])):
            loaded = sum(each.external_tokens for each in those) / (tokens * len(those))
            rows.append(self._row(made, None, f"{name}, delayed", Share(loaded, median_ttft(those))))
            print(f"  delay of {DELAY} x the computing of {SHORT} tokens: {loaded:6.1%} of {name} prefixes loaded")
            if name == "short" and loaded > max(MOST_LOADED.values()):
                wrong.append(f"{self.model}, {self.tier}: {loaded:.1%} of short prefixes loaded")
        return rows

    def _row(self, made: Bed, factor: float | None, what: str, found: Share | None = None) -> Row:
        return {
            "model": self.model,
            "tier": self.tier,
            "what": what,
            "factor": factor,
            "break_even_gb_s": made.even / 1e9,
            "loaded_share": None if found is None else found.loaded,
            "ttft_p50_s": None if found is None else found.ttft,
            "no_cache_ttft_p50_s": made.cold,
        }


def workloads(model: str, urls: Sequence[str], seed: int, pairs: int, *, quick: bool) -> tuple[list[Row], list[str]]:
    """``kvtier bench engine`` over all ``urls``: its rows, and in words what does not hold."""
    settings = Settings(tiers=tuple(map(TierUrl.parse, urls)), engine=EngineSettings(model=model, seed=seed))
    with stoppable() as proceed:
        found = compare(settings, Passes(list(WORKLOADS), pairs, users=2, scale=0.05 if quick else 1.0), proceed)
    wrong = [note for note in found.notes if not note.endswith("holds")]
    cached = [row for row in found.rows if row["cache"] == "on"]
    for row in cached:
        spent = float(str(row["store_cpu_share"]))
        if row["workload"] == "unique" and not model.startswith("paced:") and spent > MOST_CPU:
            wrong.append(
                f"{model}: the store's threads take {spent:.1%} of wall time x cores on prompts that never repeat"
            )
    return list(found.rows), wrong


@contextmanager
def tier_urls(tiers: Sequence[str]) -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="kvtier-gate-", dir=".") as place:
        urls = {"dram": "", "nvme": f"nvme://{Path(place).resolve() / 'nvme'}?capacity=2GiB&write=through"}
        given = redis_url()
        if "redis" not in tiers:
            yield urls
        elif given is not None:
            yield {**urls, "redis": _written_through(str(given))}
        else:
            with start_valkey(Path(place) / "valkey") as server:
                yield {**urls, "redis": _written_through(server.url)}


def _written_through(url: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}write=through&ttl=1h"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    parser.add_argument("--seed", type=int, default=0, help="of prompts (default: 0)")
    parser.add_argument("--models", default=f"{SMOLLM2},{PACED}", help="comma-separated (default: %(default)s)")
    parser.add_argument("--tiers", default="dram,nvme,redis", help="comma-separated (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=60, help="requests per factor (default: 60)")
    parser.add_argument("--parts", default="throttle,workloads", help="comma-separated (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=7, help="of workloads, with and without (default: 7)")
    parser.add_argument("--quick", action="store_true", help="smoke check: few rounds, no verdict")
    args = parser.parse_args()
    check_json(args.json)
    rounds = 6 if args.quick else args.rounds
    print(f"seed {args.seed}; the limit beside each figure is the same prompt without a cache, in the same run")
    parts, tiers, models = args.parts.split(","), args.tiers.split(","), args.models.split(",")
    rows: list[Row] = []
    ran: list[Row] = []
    wrong: list[str] = []
    with tier_urls(tiers) as urls:
        for model, tier in ((model, tier) for model in models for tier in tiers if "throttle" in parts):
            found, failed = Trial(
                model, tier, urls[tier], args.seed, rounds, LONG if model == SMOLLM2 else PACED_LONG
            ).run()
            rows += found
            wrong += failed
        for model in models if "workloads" in parts else []:
            slow = model if not model.startswith("paced:") else f"{model}&slow={SLOW:g}"
            below = [urls[tier] for tier in tiers if tier != "dram"]
            found, failed = workloads(slow, [DRAM_URL, *below], args.seed, args.pairs, quick=args.quick)
            ran += found
            wrong += failed
    if rows:
        print(table(rows, COLUMNS))
    for each in wrong:
        print(f"does not hold: {each}")
    told = {"seed": args.seed, "quick": args.quick, "wrong": wrong, "rows": rows, "workloads": ran}
    write_json(args.json, {**machine(), **told})
    return int(bool(wrong) and not args.quick)


def _shown(name: str, form: str, scale: float = 1.0) -> Callable[[Row], str]:
    return lambda row: "" if row[name] is None else format(scale * float(str(row[name])), form)


COLUMNS: dict[str, Callable[[Row], str]] = {
    "model": lambda row: str(row["model"]).partition("?")[0],
    "tier": lambda row: str(row["tier"]),
    "what": lambda row: str(row["what"]),
    "x break-even": _shown("factor", "g"),
    "loaded": _shown("loaded_share", ".1%"),
    "TTFT p50 ms": _shown("ttft_p50_s", ".0f", 1e3),
    "no cache": _shown("no_cache_ttft_p50_s", ".0f", 1e3),
}


if __name__ == "__main__":
    sys.exit(main())
