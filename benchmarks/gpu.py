"""How near copies between HBM and DRAM come to one pinned copy of the same bytes, by size of block. Needs a GPU.

    python benchmarks/gpu.py [--json FILE] [--seed N] [--rounds N]

64 blocks at shuffled places, saved and loaded by the HBM medium over a page-locked arena: in one batch, and for loads also
layer by layer. The limit is one ``cudaMemcpyAsync`` of all bytes between page-locked and device memory, in the same run.
Medians of rounds in which both take turns. Where there is no GPU it says so and ends well.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypedDict

import torch

from kvtier.storage_backends.cuda_copy import device_count
from kvtier.storage_backends.dram import DramMedium
from kvtier.storage_backends.hbm import HbmMedium

BLOCKS = 64
LAYERS = 32
LEAST = 0.8
"""Asked: the share of the limit that blocks of 2 MiB reach in one batch."""
ASKED_KIB = 2048
SIZES_KIB = (2048, 512, 256, 128, 64, 16)


class Row(TypedDict):
    """One figure beside its limit."""

    kib: int
    what: str
    gb_per_s: float
    limit_gb_per_s: float
    share: float


def timed(act: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(kib: int, rounds: int, seed: int) -> Iterator[Row]:
    nbytes = kib << 10
    hbm = HbmMedium.allocate(BLOCKS, (LAYERS, nbytes // LAYERS), torch.uint8, "cuda")
    dram = DramMedium(BLOCKS, nbytes, pin=True)
    assert dram.wait_prefaulted(60), "the arena is not page-locked"
    order = random.Random(seed).sample(range(BLOCKS), BLOCKS)
    rooms = [[dram.view(slot)[:nbytes]] for slot in range(BLOCKS)]
    pinned = torch.empty(BLOCKS * nbytes, dtype=torch.uint8).pin_memory()
    flat = torch.empty(BLOCKS * nbytes, dtype=torch.uint8, device="cuda")

    def by_layer() -> None:
        arriving = hbm.layered(BLOCKS)
        assert arriving is not None
        arriving.write(order, rooms)

    cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "save": (lambda: hbm.read(order, rooms), lambda: pinned.copy_(flat, non_blocking=True)),
        "load": (lambda: hbm.write(order, rooms), lambda: flat.copy_(pinned, non_blocking=True)),
        "load by layer": (by_layer, lambda: flat.copy_(pinned, non_blocking=True)),
    }
    for what, (ours, limit) in cases.items():
        for act in (ours, limit, ours, limit):
            act()
        times = [(timed(ours), timed(limit)) for _ in range(rounds)]
        mine, bare = (statistics.median(each) for each in zip(*times, strict=True))
        size = BLOCKS * nbytes / 1e9
        yield Row(kib=kib, what=what, gb_per_s=size / mine, limit_gb_per_s=size / bare, share=bare / mine)
    dram.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if not (torch.cuda.is_available() and device_count()):
        print("no GPU that torch and CuPy can use: nothing to measure")
        return 0
    rows = [row for kib in SIZES_KIB for row in measure(kib, options.rounds, options.seed)]
    for row in rows:
        print(
            f"{row['kib']:5d} KiB {row['what']:14s} {row['gb_per_s']:6.1f} GB/s, "
            f"{row['share']:5.0%} of {row['limit_gb_per_s']:.1f}"
        )
    good = all(row["share"] >= LEAST for row in rows if row["kib"] == ASKED_KIB and row["what"] != "load by layer")
    print(f"{ASKED_KIB} KiB in one batch, at least {LEAST:.0%} asked: {'yes' if good else 'no'}")
    if options.json:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
        result = {"machine": about, "seed": options.seed, "rounds": options.rounds, "rows": rows, "good": good}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
