"""``kvtier replay``: the hit rate of one tier on a recorded workload, by policy and size, beside what no cache can pass."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

from kvtier.bench.plot import Series, check_plot, line_plot
from kvtier.bench.report import Row, check_json, progress, table, write_json
from kvtier.cli.main import INTERRUPTED
from kvtier.errors import ConfigError
from kvtier.policy import check, names
from kvtier.sim.replay import BELADY, Cell, Counting, blocks_of, read_workload, replay_cells
from kvtier.sim.traces import Sample, Trace, open_trace

CAPACITIES = "0.5%,1%,2%,5%,10%,20%,40%"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "A request's hits are the blocks of its longest resident prefix; the hit rate is their share of all block "
        "references. FILE is .jsonl or .jsonl.gz in Mooncake's format, coding-agent sessions, or what `kvtier serve "
        "--record` wrote. belady is the offline optimum, infinite a cache that forgets nothing. The same call gives the "
        "same bytes."
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the trace")
    parser.add_argument(
        "--policy",
        dest="policies",
        default="lru",
        metavar="NAMES",
        help=f"one or several of {', '.join(names())}; between commas (default: lru)",
    )
    parser.add_argument(
        "--capacity",
        dest="capacities",
        default=CAPACITIES,
        metavar="SIZES",
        help=f"shares of the distinct blocks, or numbers of blocks (default: {CAPACITIES.replace('%', '%%')})",
    )
    parser.add_argument(
        "--warmup", type=float, default=0.5, metavar="SHARE", help="of the requests, not counted (default: 0.5)"
    )
    parser.add_argument(
        "--count", choices=("blocks", "tokens"), default="blocks", help="what hit rates are shares of (default: blocks)"
    )
    parser.add_argument(
        "--flat", action="store_true", help="as a cache would that knows no prefixes: heads may go before tails"
    )
    add_sample_arguments(parser)
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: one per core)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw them (.png or .svg)")


def add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    """What `sample_of` reads."""
    usual = Sample()
    parser.add_argument(
        "--sessions",
        type=int,
        default=usual.sessions,
        metavar="N",
        help=f"how many sessions of a trace of sessions are played (default: {usual.sessions})",
    )
    parser.add_argument(
        "--over",
        type=float,
        default=usual.over_s,
        metavar="SECONDS",
        help=f"time within which they begin (default: {usual.over_s:g})",
    )
    parser.add_argument(
        "--seed", dest="sample_seed", type=int, default=usual.seed, metavar="N", help="of that sample (default: 0)"
    )


def sample_of(args: argparse.Namespace) -> Sample:
    """Raises ``ConfigError`` where it could have no session."""
    try:
        return Sample(args.sessions, args.over, args.sample_seed)
    except ValueError as wrong:
        raise ConfigError(str(wrong)) from None


def about(trace: Trace) -> str:
    """What was read, and the seed where any was needed."""
    return f"{trace.format}, seed {trace.sample.seed}" if trace.format == "coding-agent" else trace.format


def run(args: argparse.Namespace) -> int:
    policies = [name for name in _listed("--policy", args.policies) if name != BELADY]
    capacities = _listed("--capacity", args.capacities)
    for name in policies:
        check(name, "--policy")
    for capacity in capacities:
        blocks_of(capacity, 1 << 53)
    if args.jobs is not None and args.jobs < 1:
        raise ConfigError(f"--jobs {args.jobs}: at least one process has to do it")
    try:
        counting = Counting(args.warmup, args.count, args.flat)
    except ValueError as wrong:
        raise ConfigError(f"--warmup: {wrong}") from None
    check_json(args.json)
    if args.plot is not None:
        check_plot(args.plot)
    trace = open_trace(args.file, sample_of(args))
    work = read_workload(trace, counting)
    sizes = {capacity: blocks_of(capacity, work.unique) for capacity in capacities}
    print(
        f"{about(trace)}: {len(work.chains):,} requests, {work.references:,} references to {work.unique:,} distinct blocks "
        f"of {trace.block_tokens} tokens; the last {1 - counting.warmup:.0%} of the requests count"
    )
    asked = [(policy, capacity) for policy in [*policies, BELADY] for capacity in capacities]
    cells: list[Cell] = [(policy, sizes[capacity]) for policy, capacity in asked]
    jobs = min(args.jobs or len(os.sched_getaffinity(0)), len(cells))
    rows: list[_Row] = []
    with progress(len(cells)) as step, closing(replay_cells(trace, work, cells, jobs)) as rates:
        try:
            for policy, capacity in asked:
                step(f"{policy} {capacity}")
                rows.append(_Row(policy, capacity, sizes[capacity], round(next(rates), 6)))
        except KeyboardInterrupt:
            pass  # what there is, is told
    complete = len(rows) == len(asked)
    infinite = round(work.infinite, 6)
    print(_shown(rows, capacities, infinite))
    report = {
        "references": work.references,
        "unique": work.unique,
        "infinite": infinite,
        "rows": [row._asdict() for row in rows],
        "complete": complete,
    }
    write_json(args.json, report)
    if not complete:
        print(
            f"stopped: {len(rows)} of {len(asked)} cells" + (", and no picture" if args.plot else ""), file=sys.stderr
        )
        return INTERRUPTED
    if args.plot is not None:
        _draw(rows, infinite, work.unique, args)
    return 0


class _Row(NamedTuple):
    policy: str
    capacity: str
    """As it was asked for."""
    blocks: int
    hit_rate: float


def _listed(flag: str, text: str) -> list[str]:
    """The items between commas, each once."""
    items = list(dict.fromkeys(item.strip() for item in text.split(",")))
    if "" in items:
        raise ConfigError(f"{flag} {text!r}: something is missing before or after a comma")
    return items


def _shown(rows: list[_Row], capacities: list[str], infinite: float) -> str:
    """A line per policy, a column per capacity; what was not played is left out."""
    lines: dict[str, dict[str, float]] = {}
    for row in rows:
        lines.setdefault(row.policy, {})[row.capacity] = row.hit_rate
    lines["infinite"] = dict.fromkeys(capacities, infinite)
    columns: dict[str, Callable[[Row], str]] = {"policy": lambda line: str(line["policy"])}
    columns |= {capacity: partial(_percent, capacity) for capacity in capacities}
    return table([{"policy": policy, **rates} for policy, rates in lines.items()], columns)


def _percent(name: str, line: Row) -> str:
    return f"{100 * cast('float', line[name]):.1f} %" if name in line else ""


def _draw(rows: list[_Row], infinite: float, unique: int, args: argparse.Namespace) -> None:
    """Hit rate over capacity: a line per policy, and the limits dashed."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row.blocks):
        points.setdefault(row.policy, []).append((100 * row.blocks / unique, 100 * row.hit_rate))
    limit = points.pop(BELADY)
    xs = [x for x, _ in limit]
    lines = [Series(name, xs, [y for _, y in curve]) for name, curve in points.items()]
    limits = [
        Series(BELADY, xs, [y for _, y in limit], limit=True, colour="#000000"),
        Series("infinite", xs, [100 * infinite] * len(xs), limit=True, colour="#888888"),
    ]
    line_plot(
        [*lines, *limits],
        args.plot,
        x_label=f"capacity, % of {unique:,} distinct blocks",
        y_label=f"hit rate, % of {args.count}",
        title=args.file.name,
        log_x=True,
        x_ticks=lambda x: f"{float(f'{x:.2g}'):g}",
    )
