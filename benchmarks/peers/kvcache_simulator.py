"""FIFO, LRU and optimum curves beside those of kvcache-simulator (PyPI), on the same file, in its token counting.

Builds a virtual environment, installs the peer there, and runs its command in it. The peer takes sizes in GiB of a model's KV;
what it makes of them in blocks is what ours is run with. Its FIFO knows no prefixes (``--flat`` of ``kvtier replay``), its LRU
and optimum let tails go before heads, as ours always do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier.sim.replay import BELADY, Counting, read_workload, replay
from kvtier.sim.traces import MOONCAKE_TOKENS, open_trace

VERSION = "0.1.3"
MODEL = "llama-3.1-8b"
BUDGETS = "256,512,1024,2048,4096"
OURS = {"fifo": "fifo", "lru": "lru", "optimal": BELADY}
WITHIN = 0.3
"""Points that a curve may differ by."""


def installed(folder: Path, version: str) -> Path:
    """The peer's command, in an environment of its own."""
    command = folder / "bin" / "kvcache-simulator"
    if not command.exists():
        venv.create(folder, with_pip=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, f"kvcache-simulator=={version}"], check=True)
    return command


def theirs(command: Path, trace: Path, model: str, budgets: str) -> dict[str, Any]:
    """Their report."""
    options = ["--trace", str(trace), "--model", model, "--block-size", str(MOONCAKE_TOKENS), "--budgets-gib", budgets]
    done = subprocess.run(
        [str(command), "run", *options, "--backend", "python", "--format", "json", "--no-progress"],
        check=True,
        capture_output=True,
        text=True,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="in Mooncake's format")
    parser.add_argument("--venv", type=Path, metavar="FOLDER", help="where the peer is, or is to be, installed")
    parser.add_argument(
        "--model", default=MODEL, metavar="NAME", help="by whose KV the peer counts (default: %(default)s)"
    )
    parser.add_argument("--budgets-gib", default=BUDGETS, metavar="GIB", help="sizes (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        command = installed(args.venv or Path(scratch) / "venv", VERSION)
        report = theirs(command, args.trace, args.model, args.budgets_gib)
    tree = read_workload(open_trace(args.trace), Counting(unit="tokens"))
    flat = read_workload(open_trace(args.trace), replace(tree.counting, flat=True))
    print(f"kvcache-simulator {VERSION}, {args.trace.name}: hit rates in % of tokens, theirs / ours")
    rows: list[dict[str, object]] = []
    ceiling = 100 * report["hitRateCeiling"]
    worst = abs(ceiling - 100 * tree.infinite)
    print(f"  {'infinite':8} {ceiling:.2f} / {100 * tree.infinite:.2f}")
    for policy, own in OURS.items():
        pairs = []
        for point in report["points"]:
            blocks = point["cacheBlocks"]
            their = 100 * point["results"][policy]["hitRate"]
            our = 100 * replay(flat if policy == "fifo" else tree, own, blocks)
            worst = max(worst, abs(their - our))
            pairs.append(f"{blocks:,}: {their:.2f} / {our:.2f}")
            rows.append({"policy": policy, "blocks": blocks, "theirs": their, "ours": our})
        print(f"  {policy:8} " + "   ".join(pairs))
    well = bool(rows) and worst <= WITHIN
    print(f"the most that any differs by is {worst:.2f} points (asked {WITHIN}): {'yes' if well else 'NO'}")
    if args.json:
        args.json.write_text(json.dumps({"version": VERSION, "rows": rows, "worst": worst}, indent=1) + "\n")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
