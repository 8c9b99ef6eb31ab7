"""Hit rates on public traces, asked beside measured, and how fast the classes that serve are replayed.

``--traces`` is a folder with ``mooncake_fast25/conversation_trace.jsonl.gz`` (github kvcache-ai/Mooncake, FAST25-release/traces)
and ``claude_code_kvct/sessions_rle.jsonl.gz`` (github callanjfox/kv-cache-tester, one session per line); of each what is there.
Hit rates of the first are asked for. An infinite tier has to hit exactly what a count says that shares no code with kvtier.
Speed is CPU time of one core, in the pool under LRU, beside that of a bare ``OrderedDict`` that knows no tree and no slots.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import platform
import resource
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.policy import names
from kvtier.sim.replay import (
    ADAPTIVE,
    BELADY,
    MOST,
    NEAR,
    NEAR_SHARE,
    Counting,
    ReplayedTier,
    Workload,
    blocks_of,
    near_best,
    read_workload,
    regret,
    replay,
    replay_cells,
)
from kvtier.sim.traces import Sample, open_trace

CONVERSATION = "mooncake_fast25/conversation_trace.jsonl.gz"
AGENT = "claude_code_kvct/sessions_rle.jsonl.gz"
SIZES = ("0.5%", "1%", "2%", "5%", "10%", "20%", "40%")
ASKED_SIZES = ("2%", "5%", "10%", "20%")
ASKED = {
    "lru": (0.5, (7.8, 20.0, 28.8, 35.9)),
    "arc": (1.5, (8.4, 21.3, 30.3, 31.8)),
    "s3fifo": (1.5, (11.7, 20.0, 23.0, 28.9)),
    "belady": (0.5, (32.7, 39.0, 39.0, 39.0)),
}
"""Per policy by how many points a hit rate may differ, and hit rates in % at 2, 5, 10 and 20 % of the distinct blocks."""
ASKED_INFINITE = 39.0
ASKED_RATE = 300_000
"""Block references a second."""
ASKED_SECONDS = 60.0
"""For five policies at seven sizes."""
TIMED = ("lru", "arc", "s3fifo", "adaptive", "belady")


def count_independently(path: Path) -> tuple[int, int]:
    """Hits and references of the second half in a cache that forgets nothing, from the file alone."""
    with gzip.open(path, "rt") as file:
        requests = [json.loads(line)["hash_ids"] for line in file]
    seen: set[int] = set()
    hits = references = 0
    for number, ids in enumerate(requests):
        alive = number >= len(requests) // 2
        for one in ids:
            references += number >= len(requests) // 2
            alive = alive and one in seen
            hits += alive
        seen |= set(ids)
    return hits, references


def bare_lru(work: Workload, capacity: int) -> float:
    """Hit rate of what an LRU cache costs at least."""
    order: OrderedDict[bytes, None] = OrderedDict()
    hits = []
    for chain in work.chains:
        count = 0
        for entry in chain:
            if entry not in order:
                break
            count += 1
        hits.append(count)
        for entry in reversed(chain):
            order[entry] = None
            order.move_to_end(entry)
        while len(order) > capacity:
            order.popitem(last=False)
    return work.share(hits)


def speed(work: Workload) -> tuple[float, float]:
    """Block references a second under LRU at a tenth of the distinct blocks: the pool's, and the bare dictionary's."""
    capacity = blocks_of("10%", work.unique)
    return (
        _rate(work, lambda: replay(work, "lru", capacity)),
        _rate(work, lambda: bare_lru(work, capacity)),
    )


def _rate(work: Workload, once: Callable[[], object]) -> float:
    """The best of three."""
    seconds = []
    for _ in range(3):
        began = time.process_time()
        once()
        seconds.append(time.process_time() - began)
    return work.references / min(seconds)


def cpu_seconds() -> float:
    """Of this process and those that it has waited for."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


def curves(path: Path, work: Workload, policies: Sequence[str], jobs: int) -> dict[str, list[float]]:
    """Per policy its hit rates in % at all sizes."""
    cells = [(policy, blocks_of(size, work.unique)) for policy in policies for size in SIZES]
    trace = open_trace(path, Sample())
    rates = [100 * rate for rate in replay_cells(trace, work, cells, jobs)]
    return {policy: rates[at * len(SIZES) : (at + 1) * len(SIZES)] for at, policy in enumerate(policies)}


def show(found: dict[str, list[float]], infinite: float) -> None:
    print(f"  {'':10}" + "".join(f"{size:>8}" for size in SIZES))
    for policy, rates in found.items():
        print(f"  {policy:10}" + "".join(f"{rate:8.1f}" for rate in rates))
    print(f"  {'infinite':10}" + f"{infinite:8.1f}" * len(SIZES))


def compare(found: dict[str, list[float]], infinite: float) -> bool:
    """Print what was asked for beside what came."""
    well = True
    print(f"  asked at {', '.join(ASKED_SIZES)}:")
    for policy, (within, asked) in ASKED.items():
        if policy not in found:
            continue
        rates = [found[policy][SIZES.index(size)] for size in ASKED_SIZES]
        fits = all(abs(rate - want) <= within for rate, want in zip(rates, asked, strict=True))
        well &= fits
        pairs = ", ".join(f"{want:.1f} / {rate:.1f}" for rate, want in zip(rates, asked, strict=True))
        print(f"  {policy:10} asked / measured {pairs}; within {within}: {'yes' if fits else 'NO'}")
    fits = abs(infinite - ASKED_INFINITE) <= 0.05
    print(f"  infinite   asked / measured {ASKED_INFINITE} / {infinite:.1f}: {'yes' if fits else 'NO'}")
    return well and fits


def regrets(found: dict[str, list[float]]) -> list[float]:
    """Points that adaptive loses to the best static policy, per size."""
    return [regret({policy: rates[at] for policy, rates in found.items()}) for at in range(len(SIZES))]


def judge(all_regrets: list[float]) -> bool:
    near, well = near_best(all_regrets)
    print(
        f"adaptive: within {NEAR:g} point in {near:.0%} of {len(all_regrets)} cells (asked {NEAR_SHARE:.0%}), "
        f"worst {max(all_regrets):.1f} (asked {MOST:g}): {'yes' if well else 'NO'}"
    )
    return well


def infinite_is_exact(path: Path, work: Workload) -> bool:
    hits, references = count_independently(path)
    tier = ReplayedTier("lru", work.unique, max(map(len, work.chains)), work.metas)
    served = [tier.request(chain, now) for chain, now in zip(work.chains, work.times, strict=True)]
    ours = sum(served[len(served) // 2 :])
    print(f"  an infinite tier hits {ours:,} blocks, the independent count {hits:,} of {references:,}")
    return ours == hits


def timed(path: Path, work: Workload, jobs: int) -> tuple[float, float]:
    """Seconds on the wall and of CPU for the policies of ``TIMED``, with all that reading the trace takes."""
    began, used = time.perf_counter(), cpu_seconds()
    curves(path, work, [policy for policy in TIMED if policy in {*names(), BELADY}], jobs)
    return time.perf_counter() - began, cpu_seconds() - used


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    print(f"seed {Sample().seed}, {platform.machine()}, Python {platform.python_version()}, {args.jobs} processes")
    paths = [args.traces / name for name in (CONVERSATION, AGENT)] if args.traces else []
    paths = [path for path in paths if path.is_file()]
    if not paths:
        print("no trace to replay: name a folder with --traces (see --help)")
    report: dict[str, object] = {"seed": Sample().seed, "sizes": SIZES}
    every, well = [], True
    for path in paths:
        work = read_workload(open_trace(path), Counting())
        print(
            f"{path.name}: {len(work.chains):,} requests, {work.references:,} references to {work.unique:,} blocks; in %"
        )
        found, infinite = curves(path, work, [*names(), BELADY], args.jobs), 100 * work.infinite
        show(found, infinite)
        if ADAPTIVE in found:
            lost = regrets(found)
            print(f"  {'regret':10}" + "".join(f"{regret:8.1f}" for regret in lost))
            every += lost
        report[path.name] = {"hit_rates": found, "infinite": infinite}
        print(f"  sha256 {hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]}, the same in every run")
        if path.match(CONVERSATION):
            well &= compare(found, infinite) & infinite_is_exact(path, work)
            ours, bare = speed(work)
            wall, cpu = timed(path, work, args.jobs)
            print(f"  LRU {ours:,.0f} references/s of CPU time (asked {ASKED_RATE:,}; bare OrderedDict {bare:,.0f})")
            print(
                f"  {len(TIMED)} policies at {len(SIZES)} sizes: {wall:.0f} s, {cpu:.0f} s of CPU (asked {ASKED_SECONDS:.0f})"
            )
            well &= ours >= ASKED_RATE and cpu < ASKED_SECONDS
            report["speed"] = {"references_per_s": ours, "bare_per_s": bare, "wall_s": wall, "cpu_s": cpu}
    if every:
        well &= judge(every)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
