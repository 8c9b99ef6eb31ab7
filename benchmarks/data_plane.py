"""How close each tier comes to the bare copies that it is made of.

    python benchmarks/data_plane.py [--json FILE] [--directory DIR] [--seed N] [--rounds N]

64 blocks of 2 MiB and of 360 KiB. dram: HBM slot <-> DRAM slot; nvme, redis: DRAM slot <-> medium (the demote and promote
path), by the functions that the store itself calls. The limit moves the same bytes between the same shuffled slots with
the same threads and connections, without header, sum or index: np.copyto between the same arenas; preadv and pwritev on
the same file, one fdatasync per written batch; a bare RESP loop with recv_into on the same kind of socket. ``gb_s`` of a
save ends when the batch is safe and indexed, that of a load when it is verified as the tier does by default;
``gb_s_bare`` is the same without sum and index; ``ratio`` is ``gb_s / limit_gb_s``. Medians of rounds in which the three
take turns.

Then what proof costs: loads from DRAM with ``verify=sample`` and ``always`` beside none; frames to and from nvme and redis (Unix
socket, TCP) beside the same bytes between the same places without header and sum; and frames that are sealed (``encrypt=``).
What is measured, and how, is that of `kvtier bench tiers` (kvtier/bench/plane.py).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from operator import truediv
from pathlib import Path

import torch

from kvtier.abc.medium import MediumContext
from kvtier.bench.limits import FileLimit, SocketLimit
from kvtier.bench.plane import OPS, SAMPLE, Blocks, DramPlane, FramePlane, Plane, measure
from kvtier.bench.report import machine, write_json
from kvtier.codec.seal import Sealer
from kvtier.config import redis_url
from kvtier.errors import KvtierError
from kvtier.quantity import Bytes
from kvtier.storage_backends.hbm import HbmMedium
from kvtier.storage_backends.nvme import NvmeMedium
from kvtier.storage_backends.redis import PREFIX, RedisMedium, connection_maker
from kvtier.testing.valkey import start_valkey
from kvtier.url import TierUrl

BLOCKS = 64
BLOCK_BYTES = (2 << 20, 360 << 10)
LEAST_RATIO = {
    "dram": {"load": 0.8, "save": 0.6},
    "nvme": {"load": 0.8, "save": 0.8},
    "redis": {"load": 0.7, "save": 0.7},
}
MOST_PROOF_PERCENT = {"nvme": 10.0, "redis unix": 20.0, "redis tcp": 10.0}
"""Of the bandwidth, that sums and their verification may cost."""
NVME = NvmeMedium.Params(capacity=Bytes(512 << 20))
REDIS = RedisMedium.Params()


def dram_plane(blocks: Blocks, workers: Executor, rng: random.Random, share: float = SAMPLE) -> DramPlane:
    hbm = HbmMedium.allocate(2 * blocks.count, (blocks.block_bytes,), torch.uint8)
    return DramPlane(blocks, hbm, rng, workers, share=share)


def nvme_plane(
    blocks: Blocks, rng: random.Random, directory: Path, *, index: bool, sealer: Sealer | None = None
) -> FramePlane:
    medium = NvmeMedium(directory, blocks.block_bytes, NVME)
    slots = rng.sample(range(medium.slots), blocks.count)
    limit = FileLimit(medium, directory, slots, NVME.threads)
    if index:
        print(f"nvme I/O: {medium.io}, {NVME.threads} threads, {directory}")
    return FramePlane(blocks, medium, limit, slots=slots, sealer=sealer, index=index)


def redis_plane(blocks: Blocks, url: TierUrl, sealer: Sealer | None = None) -> FramePlane:
    medium = RedisMedium.open(url, REDIS, MediumContext(blocks.block_bytes))
    medium.ping()
    names = [PREFIX + name for name in blocks.names]
    limit = SocketLimit(connection_maker(url, REDIS), names, REDIS.connections)
    return FramePlane(blocks, medium, limit, sealer=sealer)


@contextmanager
def redis_server(directory: Path) -> Iterator[list[TierUrl]]:
    """The server of ``KVTIER_REDIS_URL``, or one of our own on a Unix socket and on TCP."""
    given = redis_url()
    if given is not None:
        yield [given]
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with start_valkey(directory, port=port) as server:
        yield [TierUrl.parse(server.url), TierUrl.parse(f"redis://127.0.0.1:{port}")]


def measure_tier(tier: str, plane: Plane, rounds: int) -> list[dict[str, object]]:
    """A row per direction, printed as well."""
    rows: list[dict[str, object]] = []
    block_bytes, moved = plane.blocks.block_bytes, plane.blocks.count * plane.blocks.block_bytes
    for op, timed in measure(plane, [range(plane.blocks.count)], rounds=rounds).items():
        ours, bare, limit = (timed.gb_s(which, moved) or 0.0 for which in range(3))
        row = {"tier": tier, "op": op, "block_bytes": block_bytes, "gb_s": round(ours, 3)}
        rows.append(
            {**row, "gb_s_bare": round(bare, 3), "limit_gb_s": round(limit, 3), "ratio": round(ours / limit, 3)}
        )
        mark = "" if ours / limit >= LEAST_RATIO[tier][op] else f"   below {LEAST_RATIO[tier][op]}"
        print(
            f"{tier:6}{op:5}{block_bytes >> 10:6} KiB {ours:7.2f} GB/s   bare {bare:6.2f}   "
            f"limit {limit:6.2f}   ratio {ours / limit:5.2f}{mark}",
            flush=True,
        )
    return rows


def measure_proof(tier: str, ops: Sequence[str], plane: Plane, rounds: int) -> list[dict[str, object]]:
    """A row per direction: what sums and headers take of the bandwidth, by the median of what each round says of both."""
    rows: list[dict[str, object]] = []
    block_bytes, moved = plane.blocks.block_bytes, plane.blocks.count * plane.blocks.block_bytes
    timed = measure(plane, [range(plane.blocks.count)], rounds=4 * rounds, limits=False)
    for op in ops:
        ours, without = (timed[op].gb_s(which, moved) or 0.0 for which in range(2))
        proven_s, bare_s, _ = timed[op].seconds
        cost = (1 - statistics.median(map(truediv, bare_s, proven_s))) * 100
        most = MOST_PROOF_PERCENT.get(tier)
        row = {"tier": tier, "op": op, "block_bytes": block_bytes, "gb_s": round(ours, 3)}
        rows.append({**row, "gb_s_without": round(without, 3), "cost_percent": round(cost, 1)})
        mark = f"   over {most:.0f} %" if most is not None and cost > most else ""
        print(
            f"{tier:18}{op:5}{block_bytes >> 10:6} KiB {ours:7.2f} GB/s   without {without:6.2f}   "
            f"proof costs {cost:5.1f} %{mark}",
            flush=True,
        )
    return rows


def run(directory: Path, seed: int, rounds: int) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """A row per tier, operation and block size; and one per proof."""
    rows: list[dict[str, object]] = []
    proofs: list[dict[str, object]] = []
    with ThreadPoolExecutor(1) as workers, redis_server(directory / "valkey") as urls:
        for block_bytes in BLOCK_BYTES:
            rng = random.Random(seed)
            blocks = Blocks(block_bytes, BLOCKS, rng)
            nvme = directory / f"nvme-{block_bytes}"
            for tier, made in (
                ("dram", partial(dram_plane, blocks, workers, rng)),
                ("nvme", partial(nvme_plane, blocks, rng, nvme, index=True)),
                ("redis", partial(redis_plane, blocks, urls[0])),
            ):
                with closing(made()) as plane:
                    rows += measure_tier(tier, plane, rounds)
            for name, share in (("dram sample", SAMPLE), ("dram always", 1.0)):
                with closing(dram_plane(blocks, workers, rng, share)) as plane:
                    proofs += measure_proof(name, ("load",), plane, rounds)
            for sealer in (None, Sealer(b"k" * 32)):
                kinds = {"nvme": partial(nvme_plane, blocks, rng, nvme, index=False)}
                for url in urls:
                    kinds["redis unix" if url.scheme == "redis+unix" else "redis tcp"] = partial(
                        redis_plane, blocks, url
                    )
                for kind, make in kinds.items():
                    with closing(make(sealer=sealer)) as plane:
                        proofs += measure_proof(f"{kind} sealed" if sealer else kind, OPS, plane, rounds)
            blocks.close()
            shutil.rmtree(nvme, ignore_errors=True)
    return rows, proofs


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="KVTIER_REDIS_URL names a Redis to use instead of our own.",
    )
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--directory", type=Path, help="where the NVMe tier's files go (default: a new temporary one)")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print(
        f"seed {options.seed}, {BLOCKS} blocks, median of {options.rounds} interleaved rounds, {os.cpu_count()} cores"
    )
    print("limit: the same bytes without header, sum or index (np.copyto; preadv/pwritev + fdatasync; bare RESP)")
    parent = options.directory
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="kvtier-data-plane-", dir=parent))
    try:
        rows, proofs = run(directory, options.seed, options.rounds)
        write_json(options.json, {"seed": options.seed, "machine": machine(), "rows": rows, "proof": proofs})
    except KvtierError as fault:
        print(f"data_plane: error: {fault}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
