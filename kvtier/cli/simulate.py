"""``kvtier simulate``: what a ladder of tiers would do for a recorded workload, with the store that serves, in virtual time."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

from kvtier.bench.report import Row, Stopped, check_json, progress, stoppable, table, write_json
from kvtier.cli.replay import about, add_sample_arguments, sample_of
from kvtier.errors import ConfigError
from kvtier.quantity import counted, parse_bytes, parse_seconds, rounded_bytes
from kvtier.sim.models import GPUS, MODELS, gpu, model_shape
from kvtier.sim.planner import UTILISATION, kv_bytes, prefill_seconds
from kvtier.sim.replay import Counting, read_workload
from kvtier.sim.simulate import HBM, Books, Machine, Rung, Simulation, ladder
from kvtier.sim.traces import open_trace
from kvtier.url import TierUrl

DAY = 86400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "A tier is a URL with ?capacity= and, below hbm://, ?bandwidth= (bytes per second) and ?t0= (seconds per call): "
        "hbm:// (the engine's own cache), then dram://, then any of nvme://, redis://, fs://, each with the ?policy=, ?write=, "
        "?admission=, ?write_budget= and (names) ?ttl= that a server would be given; what changes nothing here is refused. "
        "The store, its tiers, queues and gate are the ones that serve; media, clock and "
        "threads are stand-ins. A request's first token is its tiers' time and its own prefill: nobody waits for a GPU that "
        "others use. Ctrl-C leaves the figures of the requests that have come. "
        f"Models: {', '.join(MODELS)}; or the path of a config.json. GPUs: {', '.join(GPUS)}."
    )
    add = parser.add_argument
    add("--trace", type=Path, required=True, metavar="FILE", help="a recorded workload, as `kvtier replay` reads it")
    add("--tier", dest="ladder", action="append", default=[], metavar="URL", help="a tier, fastest first; repeatable")
    add(
        "--model",
        dest="sim_model",
        default="llama-3-8b",
        metavar="NAME",
        help="whose blocks they are (default: %(default)s)",
    )
    add("--gpu", default="h100", metavar="NAME", help="what computes (default: %(default)s)")
    add("--gpus", type=int, default=1, metavar="N", help="that share every layer (default: 1)")
    add("--utilisation", type=float, default=UTILISATION, metavar="SHARE", help="of their peak (default: %(default)s)")
    add("--prefill", type=float, metavar="TOKENS", help="computed per second, in place of --model and --gpu")
    add("--block-bytes", dest="sim_block_bytes", metavar="SIZE", help="of one of the trace's blocks, with --prefill")
    add(
        "--gate",
        dest="sim_gate",
        choices=("on", "off"),
        default="on",
        help="load only what is slower to compute (default: on)",
    )
    add("--deadline", dest="sim_deadline", default="2s", metavar="TIME", help="longest wait for a tier (default: 2s)")
    add("--warmup", type=float, default=0.5, metavar="SHARE", help="of the requests, not counted (default: 0.5)")
    add_sample_arguments(parser)
    add("--json", type=Path, metavar="FILE", help="also write the figures here")


def run(args: argparse.Namespace) -> int:
    check_json(args.json)
    try:
        counting = Counting(args.warmup)
        deadline = parse_seconds(args.sim_deadline)
    except ValueError as wrong:
        raise ConfigError(str(wrong)) from None
    trace = open_trace(args.trace, sample_of(args))
    machine = _machine(args, trace.block_tokens)
    rungs = ladder([TierUrl.parse(url) for url in args.ladder], machine.block_bytes)
    work = read_workload(trace, counting)
    print(
        f"{about(trace)}: {len(work.chains):,} requests, blocks of {trace.block_tokens} tokens and "
        f"{rounded_bytes(machine.block_bytes)}; the last {1 - counting.warmup:.0%} of the requests count"
    )
    simulation = Simulation(work, rungs, machine, gated=args.sim_gate == "on", deadline=deadline)
    stopped: Stopped | None = None
    with stoppable() as proceed, progress(len(work.chains)) as step:

        def goes_on(number: int) -> bool:
            nonlocal stopped
            try:
                proceed()
            except Stopped as asked:
                stopped = asked
                return False
            step(f"request {number}")
            return True

        books = simulation.run(goes_on)
    if stopped is not None:
        print(f"stopped by {stopped}: {counted(books.requests, 'request')} of those that count", file=sys.stderr)
        if not books.requests:
            return stopped.exit_code
    rows = [_row(rung, books) for rung in rungs]
    print(table([row._asdict() for row in rows], _COLUMNS))
    report = _report(books)
    _tell(books)
    write_json(args.json, {**report, "rows": [row._asdict() for row in rows], "complete": stopped is None})
    return 0 if stopped is None else stopped.exit_code


def _machine(args: argparse.Namespace, block_tokens: int) -> Machine:
    """From the planner, or from two numbers."""
    if (args.prefill is None) != (args.sim_block_bytes is None):
        raise ConfigError("--prefill and --block-bytes say together what a model and a GPU would; give both or none")
    if args.prefill is not None:
        if not 0.0 < args.prefill < float("inf"):
            raise ConfigError(f"--prefill {args.prefill:g}: that many tokens are never computed")
        try:
            block_bytes = parse_bytes(args.sim_block_bytes)
        except ValueError as wrong:
            raise ConfigError(f"--block-bytes: {wrong}") from None
        if block_bytes < 1:
            raise ConfigError("--block-bytes: a block has at least one byte")
        return Machine(block_bytes, partial(_at_rate, args.prefill))
    if args.gpus < 1 or not 0.0 < args.utilisation <= 1.0:
        raise ConfigError(
            f"--gpus {args.gpus} --utilisation {args.utilisation:g}: nothing would be computed, or too much"
        )
    shape, machine = model_shape(args.sim_model), gpu(args.gpu).times(args.gpus)

    def seconds(tokens: int, past: int) -> float:
        return prefill_seconds(shape, machine, tokens, past=past, utilisation=args.utilisation)

    return Machine(kv_bytes(shape, block_tokens), seconds)


def _at_rate(rate: float, tokens: int, past: int) -> float:
    del past
    return tokens / rate


class _Row(NamedTuple):
    tier: str
    blocks: int | None
    hit_rate: float
    """Share of all block references."""
    bytes_read: int
    bytes_written: int
    bytes_written_per_day: int


def _row(rung: Rung, books: Books) -> _Row:
    read, written = books.moved.get(rung.name, (0, 0))
    rate = books.hits[rung.name] / max(1, books.references)
    return _Row(rung.name, rung.blocks, round(rate, 6), read, written, round(written / books.span_s * DAY))


def _size(name: str, row: Row) -> str:
    return "" if row["tier"] == HBM else rounded_bytes(cast("int", row[name]))


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "tier": lambda row: str(row["tier"]),
    "blocks": lambda row: "no end" if row["blocks"] is None else f"{row['blocks']:,}",
    "hit rate": lambda row: f"{100 * cast('float', row['hit_rate']):.1f} %",
    "read": partial(_size, "bytes_read"),
    "written": partial(_size, "bytes_written"),
    "written a day": partial(_size, "bytes_written_per_day"),
}


def _report(books: Books) -> dict[str, object]:
    """What came of it, as plain values: seconds, and shares of block references."""
    of = max(1, books.references)
    return {
        "requests": books.requests,
        "references": books.references,
        "seconds": round(books.span_s, 6),
        "hit_rate": round(books.hit_rate, 6),
        "computed_because": {reason: round(count / of, 6) for reason, count in sorted(books.missed.items())},
        "ttft_s": _percentiles(books.ttft),
        "ttft_without_s": _percentiles(books.ttft_without),
        "gpu_seconds": round(books.gpu_seconds, 3),
        "gpu_seconds_saved": round(books.gpu_seconds_saved, 3),
    }


def _tell(books: Books) -> None:
    of = max(1, books.references)
    print(f"hit rate {books.hit_rate:.1%} of {books.references:,} block references")
    reasons = ", ".join(f"{reason} {count / of:.1%}" for reason, count in books.missed.most_common())
    print(f"computed: {reasons or 'nothing'}")
    ours, without = _percentiles(books.ttft), _percentiles(books.ttft_without)
    both = ", ".join(f"{name} {ours[name]:.3f} s against {without[name]:.3f}" for name in ours)
    print(f"time to first token, beside all computed: {both}")
    saved, spent = books.gpu_seconds_saved, books.gpu_seconds
    print(f"GPU-seconds of prefill: {spent:,.0f} spent, {saved:,.0f} saved ({saved / max(1e-9, saved + spent):.0%})")


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and mean of at least one value."""
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [*values] * 99
    return {"p50": round(cuts[49], 6), "p99": round(cuts[98], 6), "mean": round(statistics.fmean(values), 6)}
