"""How much load ``kvtier bench serve`` can make: the generator on one core, a stub of a server on another.

    python benchmarks/load_generator.py [--json FILE] [--seed N] [--rate R] [--seconds S]

Prompts of about 1 KiB at Poisson times; the stub answers each with 16 server-sent events, one every 10 ms, so that each
arrives by itself. Asked for: at least 500 streams a second. The limit beside it is how many streams the CPU time that the
generator spent would allow on a core of its own. p99 of sent - due is the generator's own error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import aiohttp

from kvtier.bench.arrivals import MadeUp, Poisson, words
from kvtier.bench.client import Client
from kvtier.bench.goodput import Targets, summary
from kvtier.bench.sender import Plan, Sender
from kvtier.config import ApiAccess
from kvtier.testing.completions import MODEL, StubServer

PIECES, GAP_SECONDS = 16, 0.01
PROMPT_TOKENS = 222
"""1 KiB of the generator's words."""
ASKED = 500.0
"""Streams per second."""


async def stub(core: int) -> None:
    """The server, on ``core``, until it is killed; its address is its first line."""
    os.sched_setaffinity(0, {core})
    async with StubServer(gap=GAP_SECONDS, keep=False) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


async def measure(url: str, rate: float, seconds: float, seed: int) -> dict[str, object]:
    """One run; the first tenth of a second of another one warms both sides up."""
    async with Client(url, ApiAccess()) as client:
        source = MadeUp(PROMPT_TOKENS, PIECES)
        await Sender(client, MODEL, Plan(source, Poisson(rate), words, seed + 1, max(1, int(rate / 10)))).run(
            Poisson(rate)
        )
        sender = Sender(client, MODEL, Plan(source, Poisson(rate), words, seed, max(1, int(rate * seconds))))
        calls = await sender.run(Poisson(rate))
        report = summary(calls, Targets(1.0, 1.0))
        pieces = sum(len(call.times) for call in calls)
        assert report["failed"] == {}, report["failed"]
        assert pieces == PIECES * len(calls), f"{pieces} pieces of {len(calls)} streams"
        prompt_bytes = len(client.body(MODEL, " ".join(["word"] * PROMPT_TOKENS), PIECES))
        limit = len(calls) / sender.cpu_seconds
        return {"cpu_s": sender.cpu_seconds, "limit_streams_s": limit, "body_bytes": prompt_bytes, **report}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seed", type=int, default=20240607)
    parser.add_argument("--rate", type=float, default=550.0, help="streams per second to send (default: 550)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--stub", type=int, metavar="CORE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stub is not None:
        asyncio.run(stub(args.stub))
        return 0
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        print("load_generator: two cores are needed, one for the generator and one for the stub", file=sys.stderr)
        return 2
    os.sched_setaffinity(0, cores[:1])
    server = subprocess.Popen([sys.executable, __file__, "--stub", str(cores[1])], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        report = asyncio.run(measure(server.stdout.readline().strip(), args.rate, args.seconds, args.seed))
    finally:
        server.kill()
        server.wait()
    rate, late = float(str(report["requests_per_s"])), report["late_s"]
    assert isinstance(late, dict)
    print(
        f"aiohttp {aiohttp.__version__}, Python {platform.python_version()}, {platform.machine()}, seed {args.seed}\n"
        f"{rate:.0f} streams/s of {PIECES} events, bodies of {report['body_bytes']} bytes; asked for: {ASKED:.0f}\n"
        f"limit: {report['limit_streams_s']:.0f} streams/s ({report['cpu_s']:.2f} s of CPU for {report['requests']} streams)\n"
        f"sent - due: p50 {1e3 * late['p50']:.2f} ms, p99 {1e3 * late['p99']:.2f} ms"
    )
    held = rate >= ASKED
    print(f"at least {ASKED:.0f} streams/s: {'yes' if held else 'NO'}")
    if args.json:
        args.json.write_text(json.dumps({"seed": args.seed, "asked_streams_s": ASKED, **report}, indent=2) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
