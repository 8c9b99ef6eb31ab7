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
One script, long as it is, because all of it runs over the same blocks and media.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvtier.abc.medium import MediumContext, Outcome, Record
from kvtier.codec.catalogue import codec_named
from kvtier.codec.frame import HEADER_BYTES, Asked, FrameHeader, content_sum
from kvtier.codec.seal import Sealer
from kvtier.config import redis_url
from kvtier.errors import ConfigError, KvtierError
from kvtier.key import BlockKey, Origin, Shard, Span, address
from kvtier.quantity import Bytes
from kvtier.storage_backends.dram import DramMedium
from kvtier.storage_backends.hbm import HbmMedium
from kvtier.storage_backends.nvme import NvmeMedium
from kvtier.storage_backends.redis import RedisMedium
from kvtier.testing.valkey import start_valkey
from kvtier.transfer.copy import FrameMedium, load_blocks, read_frames, save_blocks, write_frames
from kvtier.url import TierUrl

BLOCKS = 64
BLOCK_BYTES = (2 << 20, 360 << 10)
SAMPLE = 0.01
"""Share of loads from DRAM that the store verifies by default."""
LEAST_RATIO = {
    "dram": {"load": 0.8, "save": 0.6},
    "nvme": {"load": 0.8, "save": 0.8},
    "redis": {"load": 0.7, "save": 0.7},
}
MOST_PROOF_PERCENT = {"nvme": 10.0, "redis unix": 20.0, "redis tcp": 10.0}
"""Of the bandwidth, that sums and their verification may cost."""
SOCKET_BYTES = 1 << 20
RAW = codec_named("raw")

Way = Callable[[], None]


@dataclass(frozen=True)
class Ways:
    """One tier at one block size: what is timed, for each direction, as (ours, bare, limit)."""

    save: tuple[Way, Way, Way]
    load: tuple[Way, Way, Way]
    check: Way
    """Raises unless the last load by ours gave back what was saved."""


class Blocks:
    """64 random blocks in shuffled DRAM slots, their frames' headers, and 64 more slots to promote into."""

    def __init__(self, block_bytes: int, rng: random.Random) -> None:
        self.block_bytes = block_bytes
        self.dram = DramMedium(2 * BLOCKS, block_bytes)
        self.dram.wait_prefaulted(60.0)
        slots = rng.sample(range(2 * BLOCKS), 2 * BLOCKS)
        self.sources, self.targets = slots[:BLOCKS], slots[BLOCKS:]
        fill = np.random.default_rng(rng.getrandbits(32))
        for slot in range(2 * BLOCKS):
            view = np.frombuffer(self.dram.view(slot), np.uint8)
            view[:] = fill.integers(0, 256, len(view), np.uint8)
        self.sums = [content_sum(self.view(slot)) for slot in self.sources]
        keys = tuple(BlockKey(rng.randbytes(32)) for _ in range(BLOCKS))
        self.span = Span(Origin(b"i" * 32, b"s" * 32, bytes(16)), BlockKey(bytes(32)), 0, keys)
        self.shard, layout = Shard(), b"l" * 16
        self.headers = [
            FrameHeader.of(self.span, i, self.shard, layout, raw_bytes=block_bytes, content=self.sums[i], created=1.0)
            for i in range(BLOCKS)
        ]
        self.asked = [Asked(key, self.shard, layout, b"i" * 32, block_bytes) for key in keys]
        self.names = [address(key, self.shard) for key in keys]
        self.source_views = [self.dram.view(slot) for slot in self.sources]
        self.target_views = [self.dram.view(slot) for slot in self.targets]

    def view(self, slot: int) -> memoryview:
        return self.dram.view(slot)[: self.block_bytes]

    def check(self) -> None:
        if [content_sum(self.view(slot)) for slot in self.targets] != self.sums:
            raise SystemExit("a load gave back other bytes than were saved")

    def spoil(self) -> None:
        for slot in self.targets:
            self.dram.view(slot)[:64] = bytes(64)


def proven(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        if not outcome.done:
            raise SystemExit(f"a block failed: {outcome}")


def spread(job: Callable[[int], None], count: int, hands: int, pool: Executor) -> None:
    """``job`` for each index, on this thread and ``hands - 1`` of the pool's, as the tiers do it."""
    turn = iter(range(count))

    def play() -> None:
        for index in turn:
            job(index)

    others = [pool.submit(play) for _ in range(hands - 1)]
    play()
    wait(others)
    for other in others:
        other.result()


@contextmanager
def dram_ways(blocks: Blocks, workers: Executor, rng: random.Random) -> Iterator[Ways]:
    hbm = HbmMedium.allocate(2 * BLOCKS, (blocks.block_bytes,), torch.uint8)
    order = rng.sample(range(2 * BLOCKS), 2 * BLOCKS)
    origin, back = order[:BLOCKS], order[BLOCKS:]
    hbm_bytes = [np.frombuffer(memoryview(hbm.view(slot) or b""), np.uint8) for slot in range(2 * BLOCKS)]
    dram_bytes = [np.frombuffer(blocks.view(slot), np.uint8) for slot in range(2 * BLOCKS)]
    for slot, source in zip(origin, blocks.sources, strict=True):
        np.copyto(hbm_bytes[slot], dram_bytes[source])

    def save() -> None:
        outcomes, sums = save_blocks(hbm, origin, blocks.dram, blocks.targets, workers=workers)
        proven(outcomes)
        if sums != blocks.sums:
            raise SystemExit("a save made other sums than the blocks have")

    def load() -> None:
        sums = [one if rng.random() < SAMPLE else None for one in blocks.sums]
        proven(load_blocks(blocks.dram, blocks.targets, sums, hbm, back, workers=workers))

    def bare_save() -> None:
        proven(load_blocks(hbm, origin, [None] * BLOCKS, blocks.dram, blocks.targets, workers=workers))

    def bare_load() -> None:
        proven(load_blocks(blocks.dram, blocks.targets, [None] * BLOCKS, hbm, back, workers=workers))

    def limit_save() -> None:
        spread(lambda i: np.copyto(dram_bytes[blocks.targets[i]], hbm_bytes[origin[i]]), BLOCKS, 2, workers)

    def limit_load() -> None:
        spread(lambda i: np.copyto(hbm_bytes[back[i]], dram_bytes[blocks.targets[i]]), BLOCKS, 2, workers)

    def check() -> None:
        if [content_sum(hbm_bytes[slot].data) for slot in back] != blocks.sums:
            raise SystemExit("a load gave back other bytes than were saved")

    yield Ways((save, bare_save, limit_save), (load, bare_load, limit_load), check)


@contextmanager
def nvme_ways(blocks: Blocks, rng: random.Random, directory: Path) -> Iterator[Ways]:
    params = NvmeMedium.Params(capacity=Bytes(512 << 20))
    medium = NvmeMedium(directory, blocks.block_bytes, params)
    slots = rng.sample(range(medium.slots), BLOCKS)
    rows = [
        Record(slot, name, name, depth, bytes(16), 1.0)
        for depth, (slot, name) in enumerate(zip(slots, blocks.names, strict=True))
    ]
    pages = [memoryview(bytearray(2 * 4096)) for _ in slots]
    pages = [page[-(np.frombuffer(page, np.uint8).ctypes.data) % 4096 :][:4096] for page in pages]
    (path,) = directory.glob("slots-*.kvt")
    stride = int(path.stem.partition("-")[2])
    descriptor = os.open(path, os.O_RDWR | (os.O_DIRECT if medium.io == "direct" else 0))
    pool = ThreadPoolExecutor(params.threads)

    def whole(done: int) -> None:
        if done != len(blocks.source_views[0]):
            raise SystemExit("short I/O in the limit")

    def save() -> None:
        proven(write_frames(medium, slots, blocks.source_views, blocks.headers, RAW))
        medium.journal.commit(rows, [])

    def load() -> None:
        outcomes, _ = read_frames(medium, slots, blocks.target_views, blocks.asked, RAW, now=0.0)
        proven(outcomes)

    def bare_save() -> None:
        proven(medium.write(slots, list(zip(pages, blocks.source_views, strict=True))))

    def bare_load() -> None:
        proven(medium.read(slots, list(zip(pages, blocks.target_views, strict=True))))

    def limit_save() -> None:
        def write(i: int) -> None:
            whole(os.pwritev(descriptor, [blocks.source_views[i]], slots[i] * stride + 4096))

        spread(write, BLOCKS, params.threads, pool)
        os.fdatasync(descriptor)

    def limit_load() -> None:
        def read(i: int) -> None:
            whole(os.preadv(descriptor, [blocks.target_views[i]], slots[i] * stride + 4096))

        spread(read, BLOCKS, params.threads, pool)

    print(f"nvme I/O: {medium.io}, {params.threads} threads, {path.parent}")
    try:
        yield Ways((save, bare_save, limit_save), (load, bare_load, limit_load), blocks.check)
    finally:
        pool.shutdown()
        os.close(descriptor)
        medium.close()


@contextmanager
def redis_ways(blocks: Blocks, url: TierUrl) -> Iterator[Ways]:
    params = RedisMedium.Params()
    medium = RedisMedium.open(url, params, MediumContext(blocks.block_bytes))
    medium.ping()
    pool = ThreadPoolExecutor(params.connections)
    sockets = [_socket(url) for _ in range(params.connections)]
    limit_names = [b"lim:%042d" % i for i in range(BLOCKS)]
    size = blocks.block_bytes

    def save() -> None:
        proven(write_frames(medium, blocks.names, blocks.source_views, blocks.headers, RAW))

    def load() -> None:
        outcomes, _ = read_frames(medium, blocks.names, blocks.target_views, blocks.asked, RAW, now=0.0)
        proven(outcomes)

    bare_names = [address(BlockKey(bytes(31) + bytes([i])), blocks.shard) for i in range(BLOCKS)]

    def bare_save() -> None:
        proven(medium.write(bare_names, [(view[:size],) for view in blocks.source_views]))

    def bare_load() -> None:
        proven(medium.read(bare_names, [(view[:size],) for view in blocks.target_views]))

    def over_sockets(job: Callable[[socket.socket, int], None]) -> None:
        def play(hand: int) -> None:
            for i in range(hand, BLOCKS, len(sockets)):
                job(sockets[hand], i)

        spread(play, len(sockets), len(sockets), pool)

    def limit_save() -> None:
        over_sockets(lambda sock, i: _set(sock, limit_names[i], blocks.source_views[i][:size]))

    def limit_load() -> None:
        over_sockets(lambda sock, i: _get(sock, limit_names[i], blocks.target_views[i][:size]))

    try:
        yield Ways((save, bare_save, limit_save), (load, bare_load, limit_load), blocks.check)
    finally:
        for sock in sockets:
            sock.close()
        pool.shutdown()
        medium.delete([*blocks.names, *bare_names])
        medium.close()


@contextmanager
def redis_server(directory: Path) -> Iterator[list[TierUrl]]:
    """The server of ``KVTIER_REDIS_URL``, or one of our own on a Unix socket and on TCP."""
    given = redis_url()
    if given is None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with start_valkey(directory, port=port) as server:
            yield [TierUrl.parse(server.url), TierUrl.parse(f"redis://127.0.0.1:{port}")]
    elif given.scheme == "rediss" or given.password is not None or "password" in given.params:
        raise ConfigError(
            "KVTIER_REDIS_URL: the limit's bare sockets speak neither TLS nor AUTH; name a server without them"
        )
    else:
        yield [given]


@contextmanager
def proof_ways(
    blocks: Blocks, workers: Executor, rng: random.Random, directory: Path, urls: Sequence[TierUrl]
) -> Iterator[list[tuple[str, str, Way, Way]]]:
    """(tier, operation, with proof, without), over the same places of the same medium."""
    ways: list[tuple[str, str, Way, Way]] = []
    hbm = HbmMedium.allocate(BLOCKS, (blocks.block_bytes,), torch.uint8)
    order = rng.sample(range(BLOCKS), BLOCKS)

    def load(share: float) -> Way:
        def way() -> None:
            sums = [one if rng.random() < share else None for one in blocks.sums]
            proven(load_blocks(blocks.dram, blocks.sources, sums, hbm, order, workers=workers))

        return way

    ways += [("dram sample", "load", load(SAMPLE), load(0.0)), ("dram always", "load", load(1.0), load(0.0))]
    pages = [bytearray(2 * 4096) for _ in range(BLOCKS)]
    aligned = [memoryview(page)[-(np.frombuffer(page, np.uint8).ctypes.data) % 4096 :][:4096] for page in pages]

    def framed(
        name: str,
        medium: NvmeMedium | RedisMedium,
        places: Sequence[object],
        others: Sequence[object],
        head: int,
        size: int,
    ) -> None:
        plain = [(page[:head], view[:size]) for page, view in zip(aligned, blocks.source_views, strict=True)]
        into = [(page[:head], view[:size]) for page, view in zip(aligned, blocks.target_views, strict=True)]
        any_medium: FrameMedium[object] = medium  # type: ignore[assignment]  # places are this medium's own
        for tier, sealer in ((name, None), (f"{name} sealed", Sealer(b"k" * 32))):

            def save(sealer: Sealer | None = sealer) -> None:
                proven(write_frames(any_medium, places, blocks.source_views, blocks.headers, RAW, sealer=sealer))

            def load(sealer: Sealer | None = sealer) -> None:
                ended, _ = read_frames(
                    any_medium, places, blocks.target_views, blocks.asked, RAW, now=0.0, sealer=sealer
                )
                proven(ended)

            ways.append((tier, "save", save, lambda: proven(any_medium.write(others, plain))))
            ways.append((tier, "load", load, lambda: proven(any_medium.read(places, into, None))))

    nvme = NvmeMedium(directory, blocks.block_bytes, NvmeMedium.Params(capacity=Bytes(512 << 20)))
    slots = rng.sample(range(nvme.slots), 2 * BLOCKS)
    framed("nvme", nvme, slots[:BLOCKS], slots[BLOCKS:], 4096, len(blocks.source_views[0]))
    media: list[NvmeMedium | RedisMedium] = [nvme]
    others = [address(BlockKey(bytes(31) + bytes([i])), blocks.shard) for i in range(BLOCKS)]
    try:
        for url in urls:
            redis = RedisMedium.open(url, RedisMedium.Params(), MediumContext(blocks.block_bytes))
            media.append(redis)
            kind = "unix" if url.scheme == "redis+unix" else "tcp"
            framed(f"redis {kind}", redis, blocks.names, others, HEADER_BYTES, blocks.block_bytes)
        yield ways
    finally:
        for medium in media:
            if isinstance(medium, RedisMedium):
                medium.delete([*blocks.names, *others])
            medium.close()


def measure_proof(blocks: Blocks, ways: Sequence[tuple[str, str, Way, Way]], rounds: int) -> list[dict[str, object]]:
    """A row per way: medians of rounds in which with and without take turns."""
    rows: list[dict[str, object]] = []
    moved = BLOCKS * blocks.block_bytes / 1e9
    for tier, op, proof, bare in ways:
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(2 * rounds + 2):
            for which in (turn % 2, 1 - turn % 2):
                start = time.perf_counter()
                (proof, bare)[which]()
                if turn > 1:
                    times[which].append(time.perf_counter() - start)
        ours, without = (moved / statistics.median(each) for each in times)
        cost = (1 - ours / without) * 100
        most = MOST_PROOF_PERCENT.get(tier)
        row = {"tier": tier, "op": op, "block_bytes": blocks.block_bytes, "gb_s": round(ours, 3)}
        rows.append({**row, "gb_s_without": round(without, 3), "cost_percent": round(cost, 1)})
        mark = f"   over {most:.0f} %" if most is not None and cost > most else ""
        print(
            f"{tier:18}{op:5}{blocks.block_bytes >> 10:6} KiB {ours:7.2f} GB/s   without {without:6.2f}   "
            f"proof costs {cost:5.1f} %{mark}",
            flush=True,
        )
    return rows


def _socket(url: TierUrl) -> socket.socket:
    made = socket.socket(socket.AF_UNIX if url.scheme == "redis+unix" else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
    made.settimeout(5.0)
    made.connect(url.path if url.scheme == "redis+unix" else (url.host or "127.0.0.1", url.port or 6379))
    return made


def _set(sock: socket.socket, name: bytes, value: memoryview) -> None:
    sock.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(value)))
    sock.sendall(value)
    sock.sendall(b"\r\n")
    _fill(sock, memoryview(bytearray(5)))


def _get(sock: socket.socket, name: bytes, into: memoryview) -> None:
    sock.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
    _fill(sock, memoryview(bytearray(len(b"$%d\r\n" % len(into)))))
    _fill(sock, into)
    _fill(sock, memoryview(bytearray(2)))


def _fill(sock: socket.socket, into: memoryview) -> None:
    got = 0
    while got < len(into):
        came = sock.recv_into(into[got:])
        if not came:
            raise SystemExit("the server closed the limit's connection")
        got += came


def measure(ways: Ways, blocks: Blocks, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Median GB/s of (ours, bare, limit) per direction. They take turns, and each goes first in a third of the rounds."""
    times: dict[str, list[list[float]]] = {"save": [[], [], []], "load": [[], [], []]}
    for turn in range(rounds + 1):
        for op, three in (("save", ways.save), ("load", ways.load)):
            for step in range(3):
                which = (turn + step) % 3
                start = time.perf_counter()
                three[which]()
                if turn:  # the first round warms up
                    times[op][which].append(time.perf_counter() - start)
            if op == "save":
                ways.save[0]()
                blocks.spoil() if ways.check == blocks.check else None
        ways.load[0]()
        ways.check()
    moved = BLOCKS * blocks.block_bytes / 1e9
    return {
        op: (moved / statistics.median(ours), moved / statistics.median(bare), moved / statistics.median(limit))
        for op, (ours, bare, limit) in times.items()
    }


def run(directory: Path, seed: int, rounds: int) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """A row per tier, operation and block size; and one per proof."""
    rows: list[dict[str, object]] = []
    proofs: list[dict[str, object]] = []
    workers = ThreadPoolExecutor(1)
    with redis_server(directory / "valkey") as urls:
        for block_bytes in BLOCK_BYTES:
            rng = random.Random(seed)
            blocks = Blocks(block_bytes, rng)
            nvme = directory / f"nvme-{block_bytes}"
            tiers = {
                "dram": dram_ways(blocks, workers, rng),
                "nvme": nvme_ways(blocks, rng, nvme),
                "redis": redis_ways(blocks, urls[0]),
            }
            for tier, made in tiers.items():
                with made as ways:
                    measured = measure(ways, blocks, rounds)
                for op, (ours, bare, limit) in measured.items():
                    row = {
                        "tier": tier,
                        "op": op,
                        "block_bytes": block_bytes,
                        "gb_s": round(ours, 3),
                        "gb_s_bare": round(bare, 3),
                        "limit_gb_s": round(limit, 3),
                        "ratio": round(ours / limit, 3),
                    }
                    rows.append(row)
                    mark = "" if ours / limit >= LEAST_RATIO[tier][op] else f"   below {LEAST_RATIO[tier][op]}"
                    print(
                        f"{tier:6}{op:5}{block_bytes >> 10:6} KiB {ours:7.2f} GB/s   bare {bare:6.2f}   "
                        f"limit {limit:6.2f}   ratio {ours / limit:5.2f}{mark}",
                        flush=True,
                    )
            with proof_ways(blocks, workers, rng, nvme, urls) as each:
                proofs += measure_proof(blocks, each, rounds)
            blocks.dram.close()
            shutil.rmtree(nvme, ignore_errors=True)
    workers.shutdown()
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
    except KvtierError as fault:
        print(f"data_plane: error: {fault}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if options.json is not None:
        machine = {"cpu": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
        report = {"seed": options.seed, "machine": machine, "rows": rows, "proof": proofs}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
