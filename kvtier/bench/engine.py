"""``kvtier bench engine``: the bundled engine with its cache and without, in turns, on workloads that people run."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from kvtier.assembly.assemble import Assembly, assemble
from kvtier.bench.ablation import IDEAS, Found, ablate, ideas
from kvtier.bench.drive import Drive, Played
from kvtier.bench.ratio import HOLDS, TOO_FEW, ratio_of_medians
from kvtier.bench.report import Row, Stopped, check_json, machine, percentile, progress, stoppable, table, write_json
from kvtier.bench.workloads import WORKLOADS, Conversation, Draw, named
from kvtier.config import Settings, resolve
from kvtier.config import add_arguments as add_settings
from kvtier.errors import ConfigError
from kvtier.metrics import Metrics
from kvtier.quantity import counted

SETTLE_SECONDS = 60.0
ROOM = 1.1
"""HBM beside what the users' requests need at once, where nobody says how much."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Without --hbm-blocks HBM holds little more than what is running, so that what is used again comes from the tiers. "
        "Ratios are of medians over pairs, above 1 where the cache is faster; with --pairs 7 or more their intervals say "
        "something: exit code 1 where one is under 0.95, or its interval wider than 0.1 (a tenth of a ratio above 1), which "
        "decides nothing; also where "
        "requests failed, a paced model did not keep its pace, or the run was ended early."
    )
    what = parser.add_argument_group("what is run")
    what.add_argument(
        "--workloads",
        type=named,
        default=list(WORKLOADS),
        metavar="LIST",
        help=f"of {','.join(WORKLOADS)} (default: all)",
    )
    what.add_argument(
        "--pairs", type=int, default=1, metavar="N", help="passes with and without, in turns (default: 1)"
    )
    what.add_argument("--users", type=int, default=2, metavar="N", help="rounds that run at a time (default: 2)")
    what.add_argument("--scale", type=float, default=1.0, metavar="X", help="multiply all lengths (default: 1)")
    what.add_argument(
        "--ablate",
        type=ideas,
        metavar="LIST",
        help=f"instead: one list of arrivals, with one idea off at a time; of {','.join(IDEAS)}, or all",
    )
    what.add_argument("--requests", type=int, default=32, metavar="N", help="arrivals of --ablate (default: 32)")
    what.add_argument("--rate", type=float, default=2.0, metavar="R", help="arrivals a second of --ablate (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    add_settings(parser, "engine", "store")


def run(args: argparse.Namespace) -> int:
    settings = resolve(vars(args)).settings
    check_json(args.json)
    if min(args.pairs, args.users, args.requests) < 1 or not 0 < args.scale <= 100 or not 0 < args.rate < 1e6:
        raise ConfigError("--pairs, --users, --requests, --scale and --rate are all above 0")
    with stoppable() as proceed:
        if args.ablate is not None:
            found = ablate(settings, args.ablate, args.requests, args.rate, args.scale, proceed)
        else:
            found = compare(settings, Passes(args.workloads, args.pairs, args.users, args.scale), proceed)
    stopped = found.stopped
    report = {
        "model": settings.engine.model,
        "seed": settings.engine.seed,
        **machine(),
        "complete": stopped is None,
        "notes": found.notes,
        "rows": found.rows,
    }
    write_json(args.json, report)
    for note in found.notes:
        print(note)
    if stopped is not None:
        print(f"ended early ({stopped}): the rows are of what was run until then", file=sys.stderr)
        return stopped.exit_code
    return int(bool(found.faults))


@dataclass(frozen=True, slots=True)
class Passes:
    """What is run, and how often."""

    workloads: Sequence[str]
    pairs: int
    users: int
    scale: float

    def conversations(self, workload: str, pair: int, vocab: int, seed: int) -> list[Conversation]:
        """Others in each pair: nothing is left in the tiers that a later one could use."""
        return WORKLOADS[workload](Draw(vocab, hash_seed(seed, list(WORKLOADS).index(workload), pair), self.scale))

    def hbm_blocks(self, block_tokens: int) -> int:
        """What ``users`` of the longest requests need at once, and a little more."""
        needs = []
        for workload in self.workloads:
            each = sorted((_blocks(one, block_tokens) for one in self.conversations(workload, 0, 2, 0)), reverse=True)
            needs.append(sum(each[: self.users]))
        return int(ROOM * max(needs)) + 1


def hash_seed(*parts: int) -> int:
    """One seed of several numbers, the same in every process."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def _blocks(conversation: Conversation, block_tokens: int) -> int:
    """Blocks of its longest prompt, and of what is generated behind that."""
    said, most = len(conversation.opening), 0
    for each in conversation.rounds:
        prompt = said + len(each.tokens)
        most = max(most, -(-prompt // block_tokens) + each.n * (-(-each.answer // block_tokens) + 1))
        said = prompt + each.answer if conversation.grows else said
    return most


def compare(settings: Settings, passes: Passes, proceed: Callable[[], None]) -> Found:
    """Each workload with the cache and without, ``passes.pairs`` times in turns. ``proceed`` may raise ``Stopped``."""
    engine = settings.engine
    engine = replace(engine, hbm_blocks=engine.hbm_blocks or passes.hbm_blocks(engine.block_tokens))
    cached = replace(settings, engine=engine)
    bare = replace(settings, engine=replace(engine, prefix_cache=False), tiers=())
    found = Found()
    with closing(assemble(cached)) as on, closing(assemble(bare)) as off:
        print(
            f"{on.engine.identity.model}, {passes.users} users, {passes.pairs} pairs, HBM of {engine.hbm_blocks} blocks, "
            f"seed {engine.seed}",
            flush=True,
        )
        tested = Tested("on", on, proceed), Tested("off", off, proceed)
        with progress(len(passes.workloads) * passes.pairs * 2) as step:
            try:
                for each in tested:
                    each.warm_up(engine.seed)
                for workload in passes.workloads:
                    try:
                        _turns(workload, passes, engine.seed, tested, step)
                    finally:
                        _tell(found, workload, engine.seed, tested)
            except Stopped as stopped:
                found.stopped = stopped
        for each in tested:
            pace = each.assembly.engine.pace
            if pace is not None:
                found.note(f"cache {each.cache}: {pace.sentence()}", holds=pace.valid and not pace.wrong_loads)
    print(table(found.rows, COLUMNS))
    return found


@dataclass(slots=True)
class Tested:
    """One of the two engines, and what its passes through the present workload have shown."""

    cache: str
    assembly: Assembly
    proceed: Callable[[], None]
    passes: list[Played] = field(default_factory=list)
    drive: Drive = field(init=False)

    def __post_init__(self) -> None:
        self.drive = Drive(self.assembly.engine, self.proceed)

    @property
    def tiers(self) -> str:
        return ",".join(self.assembly.tiers()) if self.cache == "on" else "none"

    def warm_up(self, seed: int) -> None:
        """First use costs more: of torch, of buffers, of threads."""
        self.drive.conversations(WORKLOADS["unique"](Draw(self.assembly.engine.vocab, seed, 0.1)), 2)
        self.settle()

    def play(self, conversations: list[Conversation], users: int) -> None:
        before = declined_tokens(self.assembly.metrics)
        played = self.drive.conversations(conversations, users)
        self.settle()
        played.declined = declined_tokens(self.assembly.metrics) - before
        self.passes.append(played)

    def settle(self) -> None:
        """Saves end and HBM is emptied, so that every pass begins alike."""
        self.assembly.engine.settle(SETTLE_SECONDS)
        self.assembly.engine.reset_prefix_cache()

    def row(self, workload: str) -> dict[str, object]:
        stats = [each for played in self.passes for each in played.stats]
        ttfts = [ttft for played in self.passes for ttft in played.ttfts]
        gaps = [gap for played in self.passes for gap in played.gaps]
        seconds = sum(played.seconds for played in self.passes)
        return {
            "workload": workload,
            "cache": self.cache,
            "tiers": self.tiers,
            "ttft_p50_s": percentile(ttfts, 50),
            "ttft_p99_s": percentile(ttfts, 99),
            "itl_p50_s": percentile(gaps, 50),
            "itl_p99_s": percentile(gaps, 99),
            "tokens_per_s": statistics.median(played.tokens / played.seconds for played in self.passes),
            "hit_rate": sum(each.cached_tokens for each in stats) / sum(each.prompt_tokens for each in stats),
            "loaded_tokens": sum(played.loaded_tokens for played in self.passes),
            "recomputed_on_purpose": sum(played.declined for played in self.passes),
            "prompt_tokens": sum(each.prompt_tokens for each in stats),
            "store_cpu_share": sum(played.store_cpu_s for played in self.passes) / (seconds * (os.cpu_count() or 1)),
        }


def declined_tokens(metrics: Metrics) -> int:
    """Tokens that the gate has had computed on purpose, of all tiers."""
    samples = (sample for family in metrics.registry.collect() for sample in family.samples)
    return int(
        sum(
            sample.value
            for sample in samples
            if sample.name == "kvtier_gate_tokens_total" and sample.labels["verdict"] == "declined"
        )
    )


def _turns(
    workload: str, passes: Passes, seed: int, tested: tuple[Tested, Tested], step: Callable[[str], None]
) -> None:
    for each in tested:
        each.passes = []
    for pair in range(passes.pairs):
        order = tested if pair % 2 == 0 else tested[::-1]
        for each in order:
            step(f"{workload}, cache {each.cache}")
            vocab = each.assembly.engine.vocab
            each.play(passes.conversations(workload, pair, vocab, seed), passes.users)


def _tell(found: Found, workload: str, seed: int, tested: tuple[Tested, Tested]) -> None:
    """What the whole pairs have shown; a run that was stopped has fewer, or none."""
    whole = min(len(each.passes) for each in tested)
    for each in tested:
        del each.passes[whole:]
    on, off = (each.passes for each in tested)
    if not whole:
        return
    failed = sum(each.failed for each in (*on, *off))
    if failed:
        found.note(f"{workload}: invalid, {counted(failed, 'answer')} failed", holds=False)
    if not all(each.ttfts for each in (*on, *off)):
        return
    ttft = ratio_of_medians(_medians(off), _medians(on), seed)
    speed = ratio_of_medians(
        [each.tokens / each.seconds for each in on], [each.tokens / each.seconds for each in off], seed
    )
    ratios = {"ttft_ratio": ttft.report(), "throughput_ratio": speed.report()}
    found.rows += [{**each.row(workload), **ratios} for each in tested]
    for name, ratio in (("TTFT p50", ttft), ("throughput", speed)):
        found.note(
            f"{workload}: {name} {ratio.ratio:.2f} times as good with the cache "
            f"({ratio.low:.2f} to {ratio.high:.2f}, {len(on)} pairs): {ratio.verdict}",
            holds=ratio.verdict in (HOLDS, TOO_FEW),
        )


def _medians(passes: Sequence[Played]) -> list[float]:
    return [statistics.median(each.ttfts) for each in passes]


def _ms(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row[name] is None else f"{1e3 * float(str(row[name])):.1f}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "workload": lambda row: str(row["workload"]),
    "cache": lambda row: str(row["cache"]),
    "tiers": lambda row: str(row["tiers"]),
    "TTFT p50 ms": _ms("ttft_p50_s"),
    "p99": _ms("ttft_p99_s"),
    "inter-token p50 ms": _ms("itl_p50_s"),
    "p99 ": _ms("itl_p99_s"),
    "tokens/s": lambda row: f"{row['tokens_per_s']:.1f}",
    "hits": lambda row: f"{row['hit_rate']:.1%}",
    "loaded": lambda row: str(row["loaded_tokens"]),
    "on purpose": lambda row: str(row["recomputed_on_purpose"]),
    "store CPU": lambda row: f"{row['store_cpu_share']:.2%}",
}
