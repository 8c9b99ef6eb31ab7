"""How long a restart waits for the NVMe index, beside what a bare read of the same rows takes.

    python benchmarks/restart.py [--json FILE] [--seed N] [--rounds N] [--blocks N] [--directory DIR]

100,000 blocks of 8 KiB, in chains of 500. ``restart``: open the directory and have every block in the index of the tier.
Its limit: a bare SQLite ``SELECT`` of the same rows, in the same run. ``rebuild``: the same after the database was lost,
from header pages that the page cache does not have; its limit: one bare ``pread`` per header page, as cold. Medians of
rounds in which ours and the limit take turns; the rebuild is measured once. Beside the wall clock stands the CPU time,
which others on the machine do not add to.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypedDict

import numpy as np

from kvtier.abc.medium import Record
from kvtier.codec.frame import HEADER_BYTES, FrameHeader, content_sum
from kvtier.codec.raw import RawCodec
from kvtier.key import BlockKey, Origin, Shard, Span, address
from kvtier.quantity import Bytes
from kvtier.storage_backends.dram import DramMedium
from kvtier.storage_backends.nvme import NvmeMedium, SizeClass
from kvtier.testing.tiers import lone_tier
from kvtier.transfer.copy import write_frames

BLOCK_BYTES = 8192
CHAIN = 500
MOST_SECONDS, MOST_RATIO = 1.0, 6.0
"""Asked of a restart with 100,000 blocks; the second, to its limit, where the machine is slow or busy."""
SHARD = Shard()


class Row(TypedDict):
    """One line of the result; times in seconds."""

    op: str
    blocks: int
    seconds: float
    cpu_seconds: float
    limit_seconds: float


def capacity_for(blocks: int) -> Bytes:
    """The smallest round budget that holds so many blocks."""
    budget = 64 << 20
    while SizeClass.of(budget, BLOCK_BYTES).slots < blocks:
        budget += 64 << 20
    return Bytes(budget)


def fill(medium: NvmeMedium, blocks: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    dram = DramMedium(CHAIN, BLOCK_BYTES, prefault=False)
    views = [dram.view(slot) for slot in range(CHAIN)]
    for first in range(0, blocks, CHAIN):
        keys = tuple(BlockKey(draw.bytes(32)) for _ in range(min(CHAIN, blocks - first)))
        span = Span(Origin(b"i" * 32, b"s" * 32, b"t" * 16), BlockKey(draw.bytes(32)), 0, keys)
        headers, rows, chain = [], [], views[: len(keys)]
        for index, view in enumerate(chain):
            view[:BLOCK_BYTES] = draw.bytes(BLOCK_BYTES)
            content = content_sum(view[:BLOCK_BYTES])
            headers.append(
                FrameHeader.of(
                    span, index, SHARD, bytes(16), raw_bytes=BLOCK_BYTES, content=content, created=1.0 + first
                )
            )
            above = address(headers[-1].parent, SHARD)
            rows.append(Record(first + index, address(keys[index], SHARD), above, index, b"t" * 16, 1.0 + first))
        outcomes = write_frames(medium, range(first, first + len(keys)), chain, headers, RawCodec())
        assert all(outcome.done for outcome in outcomes), outcomes
        medium.journal.commit(rows, [])
    dram.close()


def restart(directory: Path, capacity: Bytes, blocks: int) -> None:
    """What ``kvtier serve`` does with the directory before the first request."""
    medium = NvmeMedium(directory, BLOCK_BYTES, NvmeMedium.Params(capacity=capacity))
    tier = lone_tier(medium)
    assert tier.pool.ready == blocks, "every block is there again"
    tier.close()


def bare_select(directory: Path) -> None:
    with closing(sqlite3.connect(directory / "index.sqlite")) as database:
        database.execute("SELECT slot, address, parent, depth, origin, used, expires_at FROM block").fetchall()


def forget_pages(directory: Path) -> None:
    with slot_file(directory).open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def slot_file(directory: Path) -> Path:
    (path,) = directory.glob("slots-*.kvt")
    return path


def bare_headers(directory: Path, blocks: int) -> None:
    path = slot_file(directory)
    stride = int(path.stem.removeprefix("slots-"))
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for slot in range(blocks):
            os.pread(file.fileno(), HEADER_BYTES, slot * stride)


def timed(act: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(directory: Path, blocks: int, seed: int, rounds: int) -> list[Row]:
    capacity = capacity_for(blocks)
    with closing(NvmeMedium(directory, BLOCK_BYTES, NvmeMedium.Params(capacity=capacity))) as medium:
        fill(medium, blocks, seed)
    times = [
        (*timed(lambda: restart(directory, capacity, blocks)), timed(lambda: bare_select(directory))[0])
        for _ in range(rounds)
    ]
    wall, cpu, limit = (statistics.median(each) for each in zip(*times, strict=True))
    rows: list[Row] = [{"op": "restart", "blocks": blocks, "seconds": wall, "cpu_seconds": cpu, "limit_seconds": limit}]
    forget_pages(directory)
    limit, _ = timed(lambda: bare_headers(directory, blocks))
    forget_pages(directory)
    for part in directory.glob("index.sqlite*"):
        part.unlink()
    wall, cpu = timed(lambda: restart(directory, capacity, blocks))
    rows.append({"op": "rebuild", "blocks": blocks, "seconds": wall, "cpu_seconds": cpu, "limit_seconds": limit})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--directory", type=Path, help="where to make the tier's directory (default: the system's)")
    args = parser.parse_args()
    print(
        f"{args.blocks:,} blocks of {BLOCK_BYTES} bytes, seed {args.seed}, {platform.machine()}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, median of {args.rounds}"
    )
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="kvtier-restart-") as above:
        rows = measure(Path(above) / "tier", args.blocks, args.seed, args.rounds)
    for row in rows:
        print(
            f"{row['op']:8} {row['seconds']:6.2f} s (CPU {row['cpu_seconds']:5.2f} s)   limit {row['limit_seconds']:6.2f} s"
        )
    if args.json:
        args.json.write_text(json.dumps({"seed": args.seed, "rows": rows}, indent=2) + "\n")
    asked = max(MOST_SECONDS * args.blocks / 100_000, MOST_RATIO * rows[0]["limit_seconds"])
    if rows[0]["seconds"] > asked:
        print(f"missed: restart (asked: at most {asked:.2f} s)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
