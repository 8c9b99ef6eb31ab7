"""``kvtier bench tiers``: bandwidth and latency of each configured tier, beside the limit of this machine."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.bench.opening import opened
from kvtier.bench.plane import OPS, Plane, Timed, measure
from kvtier.bench.plot import Series, check_plot, line_plot
from kvtier.bench.report import Row, Stopped, check_json, machine, progress, size, stoppable, table, write_json
from kvtier.config import add_arguments as add_settings
from kvtier.config import resolve
from kvtier.errors import CapacityError, ConfigError, KvtierError
from kvtier.quantity import parse_bytes, parse_seconds
from kvtier.registry import TierPlan, plan_tier
from kvtier.store.open import check_tier, tier_names

SIZES = "64KiB,512KiB,2MiB,8MiB,32MiB"
BATCHES = "1,16"
THREADS = "1,4"
QUICK = {"sizes": "64KiB,2MiB", "batches": "8", "callers": "1", "seconds": "10s"}
MOST_BYTES = 64 << 20
"""Most that one round of the default plan moves; a batch that was asked for is measured as it is."""
LEAST_BLOCK_BYTES, MOST_BLOCK_BYTES = 64, 1 << 30
MOST_BLOCKS = 1 << 18
"""That all threads together move at a time: each takes about a kilobyte beside its bytes."""
ROUNDS = 200
PARTLY = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """One shape of work: ``threads`` at a time move ``batch`` blocks of ``block_bytes`` each."""

    block_bytes: int
    batch: int
    threads: int

    @property
    def count(self) -> int:
        return self.batch * self.threads

    @property
    def parts(self) -> list[range]:
        return [range(start, start + self.batch) for start in range(0, self.count, self.batch)]

    def __str__(self) -> str:
        return f"{size(self.block_bytes)} x {self.batch}, {self.threads} threads"


@dataclass(slots=True)
class Report:
    """What was measured, as far as it went."""

    rows: list[Row] = field(default_factory=list)
    troubles: list[dict[str, str]] = field(default_factory=list)
    """Tier, what of it, and why that was not measured."""
    stopped: Stopped | None = None

    @property
    def complete(self) -> bool:
        return not self.troubles and self.stopped is None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "gb_s ends where the store's save or load does: safe and indexed, or verified. bare: the same copies without header, "
        "sums and index. limit: the same bytes by np.copyto, by preadv and pwritev, or by a bare loop on the same sockets. "
        "NVMe and shared folders are measured in a temporary folder on the same file system, Redis under names of its own; "
        "both are gone afterwards, and what is in the tiers stays as it is. Exit code 1: some tier could not be measured."
    )
    parser.add_argument("--block-bytes", dest="sizes", metavar="SIZES", help=f"sizes of a block (default: {SIZES})")
    parser.add_argument("--batch", dest="batches", metavar="COUNTS", help=f"blocks per call (default: {BATCHES})")
    parser.add_argument(
        "--threads", dest="callers", metavar="COUNTS", help=f"threads that call at the same time (default: {THREADS})"
    )
    parser.add_argument("--seconds", metavar="TIME", help="about how long it may take in all (default: 60s)")
    parser.add_argument("--quick", action="store_true", help="two sizes, one batch, one thread, about ten seconds")
    parser.add_argument(
        "--seed", dest="bench_seed", type=int, default=20, metavar="N", help="seed of blocks and places (default: 20)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw them (.png or .svg)")
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    cells, seconds = _asked_for(args)
    check_json(args.json)
    if args.plot is not None:
        check_plot(args.plot)
    plans = [plan_tier(url) for url in resolve(vars(args)).settings.tiers]
    if not plans:
        raise ConfigError("no tier is configured; name one with --tier")
    for plan in plans:
        check_tier(plan)
    names = tier_names(plans)
    print(f"seed {args.bench_seed}, {machine()['cores']} cores; limit: the same bytes without header, sum or index")
    report = Report()
    with stoppable() as proceed, progress(len(plans) * len(cells)) as step:
        try:
            for name, plan in zip(names, plans, strict=True):
                _measure_tier(
                    name, plan, cells, seconds / (len(plans) * len(cells)), args.bench_seed, report, proceed, step
                )
        except Stopped as stopped:
            report.stopped = stopped
    print(table(report.rows, _COLUMNS))
    _tell(report)
    write_json(
        args.json,
        {
            "seed": args.bench_seed,
            "machine": machine(),
            "complete": report.complete,
            "troubles": report.troubles,
            "rows": report.rows,
        },
    )
    if args.plot is not None and report.rows:
        _draw(report, args.plot)
    return report.stopped.exit_code if report.stopped is not None else 0 if not report.troubles else PARTLY


def _asked_for(args: argparse.Namespace) -> tuple[list[Cell], float]:
    """Cells by size of block, largest first within a size (their blocks serve the others), and seconds in all."""
    given = {name: getattr(args, name) for name in ("sizes", "batches", "callers", "seconds")}
    usual = QUICK if args.quick else {"sizes": SIZES, "batches": BATCHES, "callers": THREADS, "seconds": "60s"}
    text = {name: value if value is not None else usual[name] for name, value in given.items()}
    sizes = _numbers("--block-bytes", text["sizes"], parse_bytes, MOST_BLOCK_BYTES, LEAST_BLOCK_BYTES)
    batches = _numbers("--batch", text["batches"], int, 1 << 16)
    callers = _numbers("--threads", text["callers"], int, 1 << 10)
    try:
        seconds = parse_seconds(text["seconds"])
    except ValueError as wrong:
        raise ConfigError(f"--seconds: {wrong}") from None
    if seconds <= 0:
        raise ConfigError("--seconds: must be more than 0")
    if max(batches) * max(callers) > MOST_BLOCKS:
        raise ConfigError(f"--batch, --threads: together they may move {MOST_BLOCKS:,} blocks at a time")
    cells: dict[Cell, None] = {}
    for block_bytes in sizes:
        for threads in callers:
            for batch in batches:
                most = batch if given["batches"] else max(1, min(batch, MOST_BYTES // (threads * block_bytes)))
                cells[Cell(block_bytes, most, threads)] = None
    return list(cells), seconds


def _numbers(flag: str, text: str, parse: Callable[[str], int], most: int, least: int = 1) -> list[int]:
    try:
        numbers = [parse(each) for each in text.replace(",", " ").split()]
    except ValueError as wrong:
        raise ConfigError(f"{flag}: {wrong}") from None
    if not numbers:
        raise ConfigError(f"{flag}: none is given")
    for number in numbers:
        if not least <= number <= most:
            raise ConfigError(f"{flag}: {number} is not from {least} to {most}")
    return list(dict.fromkeys(numbers))


def _measure_tier(
    name: str,
    plan: TierPlan,
    cells: Sequence[Cell],
    seconds: float,
    seed: int,
    report: Report,
    proceed: Callable[[], None],
    step: Callable[[str], None],
) -> None:
    """Add rows of one tier, and what goes wrong with it: no room concerns one size of block, all else the tier."""
    with ThreadPoolExecutor(1) as workers:
        for block_bytes, these in _by_size(cells):
            try:
                count = max(cell.count for cell in these)
                with opened(plan, block_bytes, count, random.Random(seed), workers) as plane:
                    for cell in these:
                        proceed()
                        step(f"{name} {cell}")
                        timed = measure(plane, cell.parts, rounds=ROUNDS, seconds=seconds, proceed=proceed)
                        report.rows += _rows(name, plane, cell, timed)
            except CapacityError as full:
                _note(report, name, size(block_bytes), full)
            except KvtierError as fault:
                _note(report, name, "", fault)
                return


def _by_size(cells: Sequence[Cell]) -> Iterator[tuple[int, list[Cell]]]:
    for block_bytes in dict.fromkeys(cell.block_bytes for cell in cells):
        yield block_bytes, [cell for cell in cells if cell.block_bytes == block_bytes]


def _note(report: Report, name: str, what: str, fault: KvtierError) -> None:
    report.troubles.append({"tier": name, "what": what, "why": str(fault)})


def _rows(name: str, plane: Plane, cell: Cell, timed: dict[str, Timed]) -> Iterator[Row]:
    moved = cell.count * cell.block_bytes
    for op in OPS:
        one = timed[op]
        ours, bare, limit = (one.gb_s(which, moved) for which in range(3))
        assert ours is not None, "at least two rounds are timed"
        yield {
            "tier": name,
            "op": op,
            "block_bytes": cell.block_bytes,
            "batch": cell.batch,
            "threads": cell.threads,
            "gb_s": round(ours, 4),
            "gb_s_bare": None if bare is None else round(bare, 4),
            "limit_gb_s": None if limit is None else round(limit, 4),
            "ratio": None if limit is None else round(ours / limit, 3),
            "p50_ms": round(1e3 * one.latency(50), 4),
            "p99_ms": round(1e3 * one.latency(99), 4),
            "calls": len(one.latencies),
            "io": plane.io,
        }


def _shown(name: str, form: str) -> Callable[[Row], str]:
    return lambda row: "-" if row[name] is None else format(row[name], form)


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "tier": lambda row: str(row["tier"]),
    "op": lambda row: str(row["op"]),
    "block": lambda row: size(float(str(row["block_bytes"]))),
    "batch": _shown("batch", "d"),
    "threads": _shown("threads", "d"),
    "GB/s": _shown("gb_s", ".2f"),
    "bare": _shown("gb_s_bare", ".2f"),
    "limit": _shown("limit_gb_s", ".2f"),
    "ratio": _shown("ratio", ".2f"),
    "p50 ms": _shown("p50_ms", ".3f"),
    "p99 ms": _shown("p99_ms", ".3f"),
    "calls": _shown("calls", "d"),
    "I/O": lambda row: str(row["io"]),
}


def _tell(report: Report) -> None:
    """One line on stderr for whatever is missing above."""
    for each in report.troubles:
        what = f"{each['tier']}, {each['what']}" if each["what"] else each["tier"]
        print(f"kvtier: not measured: {what}: {each['why']}", file=sys.stderr)
    if report.stopped is not None:
        print(f"kvtier: stopped by {report.stopped}: the rows above are not all", file=sys.stderr)


def _draw(report: Report, path: Path) -> None:
    """A panel per tier: the best of all batches and threads at each size, beside the limit of that same row."""
    series = []
    for tier in dict.fromkeys(str(row["tier"]) for row in report.rows):
        for op in OPS:
            best: dict[float, Row] = {}
            for row in report.rows:
                if (row["tier"], row["op"]) == (tier, op):
                    at = float(str(row["block_bytes"]))
                    best[at] = max(best.get(at, row), row, key=lambda each: float(str(each["gb_s"])))
            places = sorted(best)
            series.append(Series(op, places, [float(str(best[at]["gb_s"])) for at in places], panel=tier))
            limited = [at for at in places if best[at]["limit_gb_s"] is not None]
            if limited:
                limits = [float(str(best[at]["limit_gb_s"])) for at in limited]
                series.append(Series(f"limit of {op}", limited, limits, limit=True, panel=tier))
    left = "" if report.complete else " (not all tiers, or stopped early)"
    line_plot(
        series,
        path,
        title=f"kvtier bench tiers{left}",
        x_label="size of a block",
        y_label="GB/s",
        log_x=True,
        x_ticks=size,
    )
