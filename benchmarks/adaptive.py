"""What the adaptive policy loses to the best static one on public traces, and what it costs beside LRU.

    python benchmarks/adaptive.py --traces FOLDER [--json FILE] [--seed N] [--jobs N]

``FOLDER`` has ``mooncake_fast25/conversation_trace.jsonl.gz`` (github kvcache-ai/Mooncake, FAST25-release/traces) and
``claude_code_kvct/sessions_rle.jsonl.gz`` (github callanjfox/kv-cache-tester, one session per line); of each what is there.
Cells are (trace, size); a cell's regret is the best static policy's hit rate less adaptive's, in points. The seed draws the
coding-agent sessions and their beginnings. Cost is CPU time of one core per block reference, through the pool, beside LRU's
in the same run, which is its limit.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import TypedDict

from kvtier.policy import names
from kvtier.policy.adaptive import AdaptivePolicy
from kvtier.sim.replay import (
    ADAPTIVE,
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
    replay_cells,
)
from kvtier.sim.traces import Sample, open_trace

TRACES = ("mooncake_fast25/conversation_trace.jsonl.gz", "claude_code_kvct/sessions_rle.jsonl.gz")
SIZES = ("0.5%", "1%", "2%", "5%", "10%", "20%", "40%")
STATIC = [name for name in names() if name != ADAPTIVE]


class Row(TypedDict):
    """One cell; hit rates in %, times in seconds."""

    trace: str
    capacity: str
    blocks: int
    best: str
    best_hit_rate: float
    hit_rate: float
    regret: float
    changes: int
    decides: str
    references_per_s: float
    lru_references_per_s: float


def played(work: Workload, policy: str, blocks: int) -> tuple[ReplayedTier, float, float]:
    """The tier after the trace, its hit rate in %, and block references a second."""
    tier = ReplayedTier(policy, blocks, max(map(len, work.chains)), work.metas)
    began = time.process_time()
    hits = [tier.request(chain, now) for chain, now in zip(work.chains, work.times, strict=True)]
    return tier, 100 * work.share(hits), work.references / (time.process_time() - began)


def cells(path: Path, sample: Sample, jobs: int) -> list[Row]:
    """Every size of one trace, printed as they come."""
    trace = open_trace(path, sample)
    work = read_workload(trace, Counting())
    print(f"{path.name}: {len(work.chains):,} requests, {work.references:,} references to {work.unique:,} blocks")
    print(
        f"  {'size':>5} {'blocks':>7}  {'best static':<16}{'adaptive':>9}{'regret':>8}  changes  decides  refs/s (lru's)"
    )
    sizes = {size: blocks_of(size, work.unique) for size in SIZES}
    rates = replay_cells(trace, work, [(name, blocks) for blocks in sizes.values() for name in STATIC], jobs)
    rows: list[Row] = []
    for size, blocks in sizes.items():
        found = {name: 100 * next(rates) for name in STATIC}
        best = max(STATIC, key=found.__getitem__)
        tier, rate, speed = played(work, ADAPTIVE, blocks)
        policy = tier.pool._policy
        assert isinstance(policy, AdaptivePolicy)
        _, _, limit = played(work, "lru", blocks)
        row = Row(
            trace=path.name,
            capacity=size,
            blocks=blocks,
            best=best,
            best_hit_rate=found[best],
            hit_rate=rate,
            regret=regret({**found, ADAPTIVE: rate}),
            changes=policy.switches,
            decides=policy.current,
            references_per_s=speed,
            lru_references_per_s=limit,
        )
        print(
            f"  {size:>5} {blocks:7,}  {best:<10}{found[best]:6.2f}{rate:9.2f}{row['regret']:8.2f}  {policy.switches:7}"
            f"  {policy.current:<7}  {speed:,.0f} ({limit:,.0f})",
            flush=True,
        )
        rows.append(row)
    return rows


def judge(rows: list[Row]) -> bool:
    regrets = [row["regret"] for row in rows]
    near, well = near_best(regrets)
    slower = [row["lru_references_per_s"] / row["references_per_s"] for row in rows]
    print(
        f"within {NEAR:g} point in {near:.0%} of {len(rows)} cells (asked {NEAR_SHARE:.0%}), worst {max(regrets):.2f} "
        f"(asked {MOST:g}): {'yes' if well else 'NO'}; {min(slower):.1f} to {max(slower):.1f} times LRU's cost"
    )
    return well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sample of sessions (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes for static policies (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    print(f"seed {args.seed}, {platform.machine()}, Python {platform.python_version()}")
    paths = [path for name in TRACES if args.traces and (path := args.traces / name).is_file()]
    if not paths:
        print("no trace to replay: name a folder with --traces (see --help)")
    rows = [row for path in paths for row in cells(path, Sample(seed=args.seed), args.jobs)]
    well = judge(rows) if rows else True
    if args.json:
        args.json.write_text(json.dumps({"seed": args.seed, "rows": rows}, indent=1) + "\n")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
