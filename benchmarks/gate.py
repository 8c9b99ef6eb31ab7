"""Is the cache never slower than no cache? Tiers on both sides of break-even, short prefixes, and workloads with it and without.

    python benchmarks/gate.py [--json FILE] [--seed N] [--models LIST] [--tiers LIST] [--parts LIST] [--minutes N] [--quick]

``throttle``: break-even bandwidth is what this run's engine makes KV at. Each tier is throttled to 0.1, 0.5, 1, 2 and 10 times
that, as far as it is fast enough unthrottled; a factor that it cannot reach is listed so. At 0.5 and less under 2 % of the tokens
may be loaded, at 2 and more over 95 % have to be. Requests come one at a time, each finds its whole prompt in that tier alone,
and the first few after each change of speed are told apart: they are what the gate learns from. Before that, prefixes so short
that a delay is four times their computing come in turn with long ones, which the delay is worth: the short may not be loaded, the
long have to be. First of all the same tier at 0.1 with the gate off: unless that is at least twice as slow as no cache, the
throttle is none, and the run is invalid. So it is where what was not loaded was not the gate's doing, or where computing took
another time than when break-even was measured.

A paced model whose URL says no ``slow`` gets one at which ten times break-even lies below what the tier does unthrottled; one
that says it is taken as it is, with the factors that its tiers reach.

``workloads``: ``kvtier bench engine`` with at least seven pairs, over all tiers as they are by default. Time to the first token
and throughput may not be under 0.95 of no cache, and the store's threads may take 3 % of wall time x cores on prompts that
never repeat.

Progress goes to stderr. Ctrl-C, or the end of ``--minutes``, keeps what was found: the JSON is written after every cell.
"""

from __future__ import annotations

import kvtier.engine  # noqa: F401 - says how compute threads wait, before torch is imported

# isort: split

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gate_bed import DRAM_URL, Bed, Ground, Share, bed

from kvtier.bench.engine import Passes, compare
from kvtier.bench.ratio import FEWEST
from kvtier.bench.report import Row, Stopped, check_json, machine, stoppable, table, write_json
from kvtier.bench.workloads import WORKLOADS
from kvtier.config import EngineSettings, GateMode, Settings, redis_url
from kvtier.errors import ConfigError, KvtierError
from kvtier.testing.valkey import start_valkey
from kvtier.url import TierUrl

FACTORS = (10.0, 2.0, 1.0, 0.5, 0.1)
"""Of the break-even bandwidth; from the fastest down, so that the gate has to notice each time that a tier has become slower."""
MOST_LOADED = {0.5: 0.02, 0.1: 0.02}
LEAST_LOADED = {2.0: 0.95, 10.0: 0.95}
MOST_LOST = 0.02
"""Tokens that were neither loaded nor declined by the gate."""
MOST_DRIFT = 1.6
"""Times that computing may take more or less than when break-even was measured: less than what lies between the factors."""
LEAST_OFF = 2.0
"""Slower than no cache, with the gate off at the lowest factor."""
DELAY = 4
"""Times the computing of a short prefix."""
SETTLING = 8
"""Requests after a change of speed that are told apart."""
UNJUDGED = 12
"""Requests at break-even itself, where either is right."""
ROOM = 1.25
"""By how much a tier has to be faster than a factor asks."""
SLOW = 20.0
"""What a paced model is slowed by at least, and at first, to see what its tier can do: shorter steps are late on few cores."""
MOST_CPU = 0.03
"""Of wall time x cores, for the store's threads, on prompts that never repeat."""
SMOLLM2 = "SmolLM2-135M-Instruct"
PACED = "paced://llama-3-8b?gpu=h100"
MODELS = f"{SMOLLM2},{PACED}&utilisation=0.1,{PACED}&slow=1"
"""At a tenth of the GPU's arithmetic a short prompt outweighs a step's reading of the weights: a cell takes a minute."""
TIERS, PARTS = ("dram", "nvme", "redis"), ("throttle", "workloads")


def lengths(model: str) -> tuple[int, int]:
    """Tokens of a long prompt and of a short prefix, each with one token more, which is always computed."""
    if not model.startswith("paced:"):
        return 256, 32
    return (1024, 32) if fixed_pace(model) else (128, 16)


def fixed_pace(model: str) -> bool:
    return model.startswith("paced:") and "slow=" in model


class OutOfTime(Stopped):
    def __init__(self) -> None:
        Exception.__init__(self, "the time is up")
        self.exit_code = 1


@dataclass
class Report:
    """What was found until now, and where it is kept."""

    path: Path | None
    told: dict[str, object]
    rows: list[Row] = field(default_factory=list)
    workloads: list[Row] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """What does not hold, in words."""
    began: float = field(default_factory=time.monotonic)

    def say(self, what: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {what}", file=sys.stderr, flush=True)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.keep(complete=False)

    def fault(self, what: str) -> None:
        self.say(f"does not hold: {what}")
        self.wrong.append(what)

    def keep(self, *, complete: bool) -> None:
        found = {"complete": complete, "wrong": self.wrong, "rows": self.rows, "workloads": self.workloads}
        write_json(self.path, {**machine(), **self.told, "seconds": time.monotonic() - self.began, **found})


@dataclass(frozen=True, slots=True)
class Trial:
    """One tier under one model."""

    model: str
    ground: Ground
    rounds: int
    report: Report

    @property
    def name(self) -> str:
        return f"{self.model}, {self.ground.tier}"

    def run(self) -> None:
        chosen = self.model.startswith("paced:") and not fixed_pace(self.model)
        model = self._slowed() if chosen else self.model
        with self._bed(model, GateMode.OFF) as made:
            made.time_computing(5)
            limit = made.bandwidth()
            self.report.say(
                f"{model}, {self.ground.tier}: {made.tokens} tokens computed in {made.computing * 1e3:.0f} ms of "
                f"{made.cold * 1e3:.0f} ms, break-even {made.even / 1e9:.3f} GB/s, unthrottled {limit / 1e9:.3f} GB/s"
            )
            made.throttled(min(FACTORS))
            off = made.share(made.longs, 3)
            self._add(made, min(FACTORS), "gate off", off)
            if off.ttft < LEAST_OFF * made.cold:
                self._fault(f"invalid, without the gate it is not {LEAST_OFF:g} times slower than no cache")
        with self._bed(model, GateMode.ON) as made:
            made.time_computing(5)
            if self.ground.tier != "dram" and not fixed_pace(self.model):
                self._short(made)
            for factor in FACTORS:
                if factor * made.even * ROOM <= limit:
                    self._judged(made, factor)
                    continue
                self._add(made, factor, "out of reach")
                if not fixed_pace(self.model):
                    self._fault(f"{factor:g} x break-even is out of reach: nothing is shown of it")
            pace = made.assembly.engine.pace
            if pace is not None and not pace.valid:
                self._fault(pace.sentence())

    def _bed(self, model: str, gate: GateMode) -> AbstractContextManager[Bed]:
        return bed(self.ground, model, gate)

    def _slowed(self) -> str:
        """The paced model, so slow that ten times break-even is below what the tier can do."""
        with self._bed(f"{self.model}&slow={SLOW:g}", GateMode.OFF) as made:
            made.time_computing(3)
            needed = SLOW * ROOM * ROOM * max(FACTORS) * made.even / made.bandwidth()
        return f"{self.model}&slow={max(SLOW, needed):.1f}"

    def _judged(self, made: Bed, factor: float) -> None:
        made.throttled(factor)
        settling = made.share(made.longs, SETTLING)
        judged = factor in MOST_LOADED or factor in LEAST_LOADED
        found = made.share(made.longs, self.rounds if judged else min(self.rounds, UNJUDGED), fresh=True)
        if not LEAST_LOADED.get(factor, 0.0) <= found.loaded <= MOST_LOADED.get(factor, 1.0):
            self._fault(f"{found.loaded:.1%} of the tokens loaded at {factor:g}")
        if judged and found.lost > MOST_LOST:
            self._fault(
                f"invalid, {found.lost:.1%} of the tokens at {factor:g} neither loaded nor declined by the gate"
            )
        drift = (found.no_cache or made.cold) / made.cold
        if not 1 / MOST_DRIFT <= drift <= MOST_DRIFT:
            self._fault(f"invalid, computing takes {drift:.2f} times as long at {factor:g} as at first")
        self._add(made, factor, "gate on", found, f" (of the first {SETTLING}: {settling.loaded:.0%})")

    def _short(self, made: Bed) -> None:
        """Short prefixes in turn with long ones, over a delay that only the long ones are worth."""
        short = self.ground.short
        made.throttle.each, made.throttle.call = 0.0, DELAY * made.computing * short / made.tokens
        made.throttle.active = True
        prompts = [each for pair in zip(made.shorts, made.longs, strict=True) for each in pair]
        made.share(prompts, SETTLING)
        served = [made.serve(prompts[number % len(prompts)]) for number in range(2 * self.rounds)]
        for name, those in (("short", Share.of(served[::2])), ("long", Share.of(served[1::2]))):
            self._add(made, None, f"{name}, delayed", those)
            if name == "short" and those.loaded > max(MOST_LOADED.values()):
                self._fault(f"{those.loaded:.1%} of short prefixes loaded")
            if name == "long" and those.loaded < min(LEAST_LOADED.values()):
                self._fault(f"only {those.loaded:.1%} of long prefixes loaded beside the short ones")
            if those.lost > MOST_LOST:
                self._fault(f"invalid, {those.lost:.1%} of {name} prefixes neither loaded nor declined by the gate")

    def _fault(self, what: str) -> None:
        self.report.fault(f"{self.name}: {what}")

    def _add(self, made: Bed, factor: float | None, what: str, found: Share | None = None, more: str = "") -> None:
        row = {
            "model": self.model,
            "tier": self.ground.tier,
            "what": what,
            "factor": factor,
            "break_even_gb_s": made.even / 1e9,
            "loaded_share": None if found is None else found.loaded,
            "declined_share": None if found is None else found.declined,
            "ttft_p50_s": None if found is None else found.ttft,
            "no_cache_ttft_p50_s": (found.no_cache if found else None) or made.cold,
        }
        shown = ", ".join(f"{name} {show(row)}" for name, show in COLUMNS.items() if show(row))
        self.report.say(shown + more)
        self.report.add(row)


def workloads(
    report: Report, model: str, urls: Sequence[str], seed: int, passes: Passes, proceed: Callable[[], None]
) -> None:
    """``kvtier bench engine`` over all ``urls``."""
    settings = Settings(tiers=tuple(map(TierUrl.parse, urls)), engine=EngineSettings(model=model, seed=seed))
    report.say(f"{model}: workloads of {passes.scale:g} times their length, {passes.pairs} pairs")
    found = compare(settings, passes, proceed)
    report.workloads += [{"model": model, **row} for row in found.rows]
    cached = {str(row["workload"]): row for row in found.rows if row["cache"] == "on"}
    for fault in found.faults:
        report.fault(f"{model}: {fault}")
    if passes.pairs < FEWEST:
        report.fault(f"{model}: with fewer than {FEWEST} pairs nothing is said of workloads")
    for name in passes.workloads:
        if name not in cached:
            report.fault(f"{model}, {name}: not run")
    spent = float(str(cached["unique"]["store_cpu_share"])) if "unique" in cached else 1.0
    if not model.startswith("paced:") and not 0.0 < spent <= MOST_CPU:
        report.fault(f"{model}: the store's threads take {spent:.1%} of wall time x cores on prompts that never repeat")
    if found.stopped is not None:
        raise found.stopped


@contextmanager
def tier_urls(tiers: Sequence[str]) -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="kvtier-gate-", dir=".") as place:
        urls = {"dram": "", "nvme": f"nvme://{Path(place).resolve() / 'nvme'}?capacity=2GiB"}
        given = redis_url()
        if "redis" not in tiers:
            yield urls
        elif given is not None:
            yield {**urls, "redis": _expiring(given.reveal())}
        else:
            with start_valkey(Path(place) / "valkey") as server:
                yield {**urls, "redis": _expiring(server.url)}


def _expiring(url: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}ttl=1h"


def _listed(name: str, text: str, known: Sequence[str]) -> list[str]:
    chosen = text.split(",")
    if not set(chosen) <= set(known):
        raise ConfigError(f"--{name} {text}: what there is are {', '.join(known)}")
    return chosen


def measure(args: argparse.Namespace, report: Report, proceed: Callable[[], None]) -> None:
    """All parts, tiers and models; a trial that fails is told, and the next one goes on."""
    parts, tiers = _listed("parts", args.parts, PARTS), _listed("tiers", args.tiers, TIERS)
    models = args.models.split(",")
    with tier_urls(tiers) as urls:
        for model, tier in ((model, tier) for model in models for tier in tiers if "throttle" in parts):
            through = f"{urls[tier]}&write=through" if urls[tier] else ""  # every prompt is to be found there
            ground = Ground(tier, through, args.seed, *lengths(model), proceed)
            try:
                Trial(model, ground, 6 if args.quick else args.rounds, report).run()
            except (KvtierError, RuntimeError) as failed:
                report.fault(f"{model}, {tier}: {failed}")
        for model in models if "workloads" in parts else []:
            paced = model.startswith("paced:")
            if paced and fixed_pace(model):
                continue  # a pace for every tier is chosen below
            slow, scale = (f"{model.partition('&')[0]}&slow=10", 0.5) if paced else (model, 0.35)
            below = [urls[tier] for tier in tiers if tier != "dram"]
            passes = Passes(list(WORKLOADS), args.pairs, users=2, scale=0.05 if args.quick else scale)
            workloads(report, slow, [DRAM_URL, *below], args.seed, passes, proceed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE, after every cell")
    parser.add_argument("--seed", type=int, default=0, help="of prompts (default: 0)")
    parser.add_argument("--models", default=MODELS, help="comma-separated (default: %(default)s)")
    parser.add_argument("--tiers", default=",".join(TIERS), help="comma-separated (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=52, help="requests per factor (default: 52, of which one is under 2 %%)"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=7, help="of workloads, with and without (default: 7)")
    parser.add_argument("--minutes", type=float, default=30.0, help="end then, with what was found (default: 30)")
    parser.add_argument("--quick", action="store_true", help="smoke check: few rounds, no verdict")
    args = parser.parse_args()
    check_json(args.json)
    print(f"seed {args.seed}; the limit beside each figure is the same prompt without a cache, in the same run")
    report = Report(args.json, {"seed": args.seed, "quick": args.quick})
    stopped: Stopped | None = None
    with stoppable() as asked:

        def proceed() -> None:
            asked()
            if time.monotonic() > report.began + 60 * args.minutes:
                raise OutOfTime

        try:
            measure(args, report, proceed)
        except Stopped as early:
            stopped = early
            report.fault(f"ended early ({early}): what was not run is not shown")
    if report.rows:
        print(table(report.rows, COLUMNS))
    for each in report.wrong:
        print(f"does not hold: {each}")
    report.keep(complete=stopped is None)
    if stopped is not None:
        return stopped.exit_code
    return int(bool(report.wrong) and not args.quick)


def _shown(name: str, form: str, scale: float = 1.0) -> Callable[[Row], str]:
    return lambda row: "" if row[name] is None else format(scale * float(str(row[name])), form)


COLUMNS: dict[str, Callable[[Row], str]] = {
    "model": lambda row: str(row["model"]).removeprefix("paced://"),
    "tier": lambda row: str(row["tier"]),
    "what": lambda row: str(row["what"]),
    "x break-even": _shown("factor", "g"),
    "loaded": _shown("loaded_share", ".1%"),
    "declined": _shown("declined_share", ".1%"),
    "TTFT p50 ms": _shown("ttft_p50_s", ".0f", 1e3),
    "no cache": _shown("no_cache_ttft_p50_s", ".0f", 1e3),
}


if __name__ == "__main__":
    sys.exit(main())
