"""``kvtier bench serve``: load on any OpenAI-compatible server, and what it makes of it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import secrets
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from kvtier.bench.arrivals import Arrivals, MadeUp, OfTrace, Poisson, Recorded, Users, ids_below, words
from kvtier.bench.client import Client
from kvtier.bench.goodput import Call, RateSearch, Targets, summary
from kvtier.bench.report import STOPPED_BY, check_json, machine, write_json
from kvtier.bench.sender import Plan, Sender
from kvtier.config import api_access
from kvtier.errors import ConfigError
from kvtier.quantity import parse_seconds
from kvtier.sim.traces import Sample, open_trace

LATE_SECONDS, LATE_SHARE = 0.005, 0.1
"""Requests sent later than both, the latter of the median TTFT, make the figures the generator's own."""
MOST_KINDS = 10
"""Of failures, that are shown; the JSON has all of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Latencies count from when a request was sent; how late that was is shown beside them. Users who ask again when "
        "answered ask a slow server less often: what waits at a given load is seen with --rate or a trace's times. "
        "KVTIER_API_KEY holds the key that the server asks for, KVTIER_CA_FILE the certificates that it is trusted by. "
        "Exit code: 0 where every request was answered, 1 where some were not or the run ended early, 2 where none could "
        "be sent, 130 after Ctrl-C and 143 after SIGTERM; what was measured until then is shown."
    )
    parser.add_argument("--base-url", required=True, metavar="URL", help="the server, such as http://127.0.0.1:8000")
    parser.add_argument("--model", help="model to ask for (default: the first that the server names)")
    parser.add_argument("--chat", action="store_true", help="ask /chat/completions instead of /completions")
    when = parser.add_argument_group("when requests are sent")
    either = when.add_mutually_exclusive_group()
    either.add_argument("--rate", type=float, metavar="R", help="R a second, at random (Poisson)")
    either.add_argument(
        "--users", type=int, metavar="N", help="by N users, each asking again when answered (default: 4)"
    )
    when.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="a trace's times, X times as fast (default: 1)"
    )
    when.add_argument("--requests", type=int, default=100, metavar="N", help="so many at most (default: 100)")
    when.add_argument("--duration", type=_seconds, metavar="TIME", help="none later than this, such as 5m")
    what = parser.add_argument_group("what is asked")
    what.add_argument(
        "--trace", type=Path, metavar="FILE", help="a trace's requests; at its times without --rate or --users"
    )
    what.add_argument("--shrink", type=int, default=1, metavar="N", help="divide a trace's lengths by N (default: 1)")
    what.add_argument("--prompt-tokens", type=int, default=256, metavar="N", help="without a trace (default: 256)")
    what.add_argument("--output-tokens", type=int, default=64, metavar="N", help="without a trace (default: 64)")
    what.add_argument(
        "--shared-tokens", type=int, default=0, metavar="N", help="of a prompt, in others too (default: 0)"
    )
    what.add_argument("--prefixes", type=int, default=1, metavar="N", help="different shared beginnings (default: 1)")
    what.add_argument("--token-ids", type=int, metavar="VOCAB", help="send ids below VOCAB instead of words")
    good = parser.add_argument_group("goodput")
    good.add_argument(
        "--ttft-target", type=_seconds, default=1.0, metavar="TIME", help="to the first token (default: 1s)"
    )
    good.add_argument(
        "--tpot-target", type=_seconds, default=0.1, metavar="TIME", help="per further token (default: 100ms)"
    )
    good.add_argument(
        "--find-rate",
        action="store_true",
        help="the rate at which 90 %% still meet both: runs at several Poisson rates",
    )
    good.add_argument(
        "--most-runs", type=int, default=8, metavar="N", help="runs that --find-rate may make (default: 8)"
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=120.0, metavar="TIME", help="for one request (default: 120s)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="send the prompts of an earlier run again, which the server may still have cached (default: drawn, and shown)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")


def _seconds(text: str) -> float:
    try:
        seconds = float(parse_seconds(text))
    except ValueError as wrong:
        raise argparse.ArgumentTypeError(str(wrong)) from None
    if not seconds:
        raise argparse.ArgumentTypeError("must be more than 0")
    return seconds


def run(args: argparse.Namespace) -> int:
    if args.seed is None:
        args.seed = secrets.randbelow(1 << 31)
    plan = _planned(args)
    check_json(args.json)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection per open request
    report, code = asyncio.run(_measured(args, plan))
    write_json(args.json, report)
    return code


def _planned(args: argparse.Namespace) -> Plan:
    source: MadeUp | OfTrace
    if args.trace is not None:
        source = OfTrace(open_trace(args.trace, Sample(seed=args.seed)), args.shrink)
    else:
        source = MadeUp(args.prompt_tokens, args.output_tokens, args.shared_tokens, args.prefixes)
    if args.find_rate and args.users is not None:
        raise ConfigError("--find-rate looks for a rate; leave --users out")
    if args.most_runs < 1:
        raise ConfigError(f"--most-runs {args.most_runs}: a rate is found by one run at least")
    arrivals: Arrivals
    if args.rate is not None or args.find_rate:
        arrivals = Poisson(1.0 if args.rate is None else args.rate)
    elif args.users is None and args.trace is not None:
        arrivals = Recorded(args.speed)
    else:
        arrivals = Users(4 if args.users is None else args.users)
    if args.token_ids is None:
        return Plan(source, arrivals, words, args.seed, args.requests, args.duration)
    if args.chat:
        raise ConfigError("a chat endpoint takes no token ids; leave --token-ids or --chat out")
    return Plan(source, arrivals, ids_below(args.token_ids), args.seed, args.requests, args.duration)


async def _measured(args: argparse.Namespace, plan: Plan) -> tuple[dict[str, object], int]:
    targets = Targets(args.ttft_target, args.tpot_target)
    async with Client(args.base_url, api_access(), chat=args.chat, timeout=args.timeout) as client:
        model = args.model or await client.model()
        print(f"{client.base}: {model}; seed {plan.seed}", flush=True)
        with _progress(plan.requests) as progress:
            sender = Sender(client, model, plan, progress)
            loop = asyncio.get_running_loop()
            for number in STOPPED_BY:
                loop.add_signal_handler(number, sender.interrupt, number)
            try:
                report = await _runs(sender, args, targets)
            finally:
                for number in STOPPED_BY:
                    loop.remove_signal_handler(number)
    report = {"url": client.base, "model": model, "seed": plan.seed, **machine(), **report}
    if sender.ended is not None:
        print(f"ended early: {sender.ended}; the figures are of what was sent until then", file=sys.stderr)
    if sender.interrupted is not None:
        return report, 128 + sender.interrupted
    return report, int(sender.ended is not None or bool(report["failed"]))


@contextlib.contextmanager
def _progress(requests: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on a terminal; None elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as bars:
        bar = bars.add_task("requests", total=requests)
        yield lambda answered: bars.update(bar, completed=answered)


async def _runs(sender: Sender, args: argparse.Namespace, targets: Targets) -> dict[str, object]:
    """One run, or as many as it takes to find the rate; the report is the last one's."""
    arrivals = sender.plan.arrivals
    if not args.find_rate:
        return _shown(sender, await sender.run(arrivals), arrivals, targets)
    assert isinstance(arrivals, Poisson), "a rate is looked for"
    search = RateSearch(arrivals.rate, most_runs=args.most_runs)
    report: dict[str, object] = {}
    while sender.ended is None and (rate := search.next_rate()) is not None:
        calls = await sender.run(Poisson(rate))
        report = _shown(sender, calls, Poisson(rate), targets)
        if calls and sender.ended is None:
            search.note(rate, sum(map(targets.met, calls)) / len(calls))
    held, broken = search.held, search.broken
    print(
        f"{search.share:.0%} meet both targets "
        + (f"up to {held:.3g} requests/s" if held is not None else "at no rate that was tried")
        + (f"; at {broken:.3g} they do not" if broken is not None else "; no limit was found")
    )
    return {**report, "find_rate": search.report()}


def _shown(sender: Sender, calls: list[Call], arrivals: Arrivals, targets: Targets) -> dict[str, Any]:
    report: dict[str, Any] = {
        "arrivals": str(arrivals),
        "complete": sender.ended is None,
        "ended": sender.ended,
        **summary(calls, targets),
        "cpu_s": sender.cpu_seconds,
    }
    late, first = report["late_s"], report["ttft_s"]
    report["generator_late"] = bool(late and first and late["p99"] > max(LATE_SECONDS, LATE_SHARE * first["p50"]))
    print("\n".join(_lines(report)), flush=True)
    return report


def _lines(report: dict[str, Any]) -> Iterator[str]:
    failed = report["requests"] - report["ok"]
    yield f"{report['arrivals']}: {report['requests']} requests in {report['seconds']:.1f} s, {failed} of them failed"
    for why, count in islice(report["failed"].items(), MOST_KINDS):
        yield f"  {count} x {why}"
    if len(report["failed"]) > MOST_KINDS:
        yield f"  and others, of {len(report['failed']) - MOST_KINDS} more kinds"
    if report["without_text"]:
        yield f"  {report['without_text']} answers had no text: they have no TTFT, and meet no target"
    if report["without_usage"]:
        yield f"  {report['without_usage']} answers had no usage: their pieces are counted as tokens"
    for title, name in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("inter-token", "itl_s"), ("end to end", "e2e_s")):
        if report[name] is not None:
            yield f"  {title:<12}" + "   ".join(f"{rank} {1e3 * value:.1f} ms" for rank, value in report[name].items())
    if report["requests_per_s"] is not None:
        yield f"  throughput  {report['requests_per_s']:.4g} requests/s, {report['output_tokens_per_s']:.4g} output tokens/s"
    if report["prompt_tokens"]:
        yield (
            f"  cached      {report['cached_tokens']:,} of {report['prompt_tokens']:,} prompt tokens "
            f"({report['cached_share']:.1%})"
        )
    good = report["goodput"]
    if good["requests_per_s"] is not None:
        yield (
            f"  goodput     {good['share']:.1%} with TTFT <= {good['ttft_target_s']:g} s and TPOT <= "
            f"{good['tpot_target_s']:g} s: {good['requests_per_s']:.4g} requests/s"
        )
    if report["late_s"] is not None:
        yield (
            f"  generator   sent - due: p50 {1e3 * report['late_s']['p50']:.2f} ms, p99 {1e3 * report['late_s']['p99']:.2f} ms; "
            f"{report['cpu_s']:.2f} s of CPU: its limit is {report['requests'] / max(report['cpu_s'], 1e-9):.4g} requests/s"
        )
    if report["generator_late"]:
        yield "  the generator itself was late: these are its figures rather than the server's"
