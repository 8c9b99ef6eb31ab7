"""What finding a prompt costs before its first byte moves: its keys, and the match of a chain that is fully in DRAM.

    python benchmarks/keys.py [--json FILE] [--seed N] [--rounds N]

100,000 random tokens in blocks of 16. The limit of the keys is a bare ``hashlib.blake2b`` loop over the same bytes; that of
the match is one dictionary look-up per block. Medians of rounds in which ours and the limit take turns, of the CPU time of the
one thread that does it all, which others on the machine disturb less, and of the wall's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

import numpy as np

from kvtier.codec.frame import FrameHeader
from kvtier.cost import OpenGate
from kvtier.key import Address, BlockKey, Identity, Origin, Scope, Shard, Span, chain_keys, root_key
from kvtier.layout import CacheGroup, GroupKind, Layout
from kvtier.metrics import Metrics
from kvtier.policy.lru import LruPolicy
from kvtier.storage_backends.dram import DramMedium
from kvtier.store.arena import Arena
from kvtier.store.geometry import Geometry
from kvtier.store.parts import Parts
from kvtier.store.store import TieredStore
from kvtier.transfer.workers import Workers

TOKENS = 100_000
BLOCK_TOKENS = 16
MOST_MS = {"keys": 5.0, "match": 2.0}
"""Of CPU time."""
MOST_RATIO = {"keys": 3.0, "match": math.inf}
LAYOUT = Layout((CacheGroup(GroupKind.MQA, 1, 1, 8, "bf16"),), BLOCK_TOKENS)
"""A small block: neither keys nor match look at its bytes."""


def bare_hashes(parent: bytes, raw: bytes) -> bytes:
    """What any chain over these tokens costs at least: one blake2b per block over the key before it and the block's bytes."""
    size, blake2b = 4 * BLOCK_TOKENS, hashlib.blake2b
    for start in range(0, len(raw), size):
        parent = blake2b(parent + raw[start : start + size], digest_size=32).digest()
    return parent


def resident_store(
    origin: Origin, root: BlockKey, keys: list[BlockKey]
) -> tuple[TieredStore, Span, dict[Address, int]]:
    """A store whose DRAM holds the whole chain."""
    geometry = Geometry(Shard(), LAYOUT.fingerprint(), LAYOUT.block_bytes, BLOCK_TOKENS)
    span = Span(origin, root, 0, tuple(keys))
    arena = Arena(DramMedium(2 * len(keys), LAYOUT.block_bytes, prefault=False), LruPolicy(2 * len(keys)))
    metrics = Metrics()
    parts = Parts(geometry, arena, metrics.tier("dram"), (), Workers("dram", 0), OpenGate(), threading.Lock())
    store = TieredStore(parts, keeper=False)
    slots, _ = arena.take(len(keys), 0.0)
    addresses = geometry.addresses(span)
    for index in reversed(range(len(keys))):
        header = FrameHeader.of(
            span, index, geometry.shard, geometry.layout, raw_bytes=geometry.block_bytes, content=bytes(16), created=0.0
        )
        arena.show(slots[index], addresses[index], header, 0.0)
    arena.pool.release(slots, 0.0)
    return store, span, dict(zip(addresses, slots, strict=True))


def timed(act: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of this thread's CPU time, and of the wall's."""
    start, cpu = time.perf_counter(), time.thread_time()
    act()
    return 1e3 * (time.thread_time() - cpu), 1e3 * (time.perf_counter() - start)


class Row(TypedDict):
    """One line of the result; times in milliseconds, of CPU time but for ``wall_ms``."""

    op: str
    blocks: int
    ms: float
    limit_ms: float
    ratio: float
    wall_ms: float


def measure(seed: int, rounds: int) -> list[Row]:
    tokens = random.Random(seed).choices(range(50_000), k=TOKENS)
    raw = np.asarray(tokens, dtype="<u4").tobytes()
    identity, scope = Identity("benchmark", "r1", "bf16", LAYOUT), Scope()
    root = root_key(identity, scope)
    keys = chain_keys(root, tokens, BLOCK_TOKENS)
    store, span, slot_of = resident_store(Origin(identity.digest(), scope.digest(), scope.tenant_id), root, keys)

    def match() -> None:
        found = store.match("benchmark", span)
        assert found.hits == len(keys), "the chain is resident"
        found.release()

    def look_up() -> None:
        assert None not in list(map(slot_of.get, store.geometry.addresses(span)))

    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "keys": (lambda: chain_keys(root, tokens, BLOCK_TOKENS), lambda: bare_hashes(root, raw)),
        "match": (match, look_up),
    }
    rows: list[Row] = []
    for name, (ours, limit) in ways.items():
        times = [(*timed(ours), timed(limit)[0]) for _ in range(rounds)]
        ms, wall_ms, limit_ms = (statistics.median(each) for each in zip(*times, strict=True))
        row: Row = {
            "op": name,
            "blocks": len(keys),
            "ms": ms,
            "limit_ms": limit_ms,
            "ratio": ms / limit_ms,
            "wall_ms": wall_ms,
        }
        rows.append(row)
    store.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print(
        f"{TOKENS:,} tokens in blocks of {BLOCK_TOKENS}, seed {args.seed}, {platform.machine()}, median of {args.rounds}"
    )
    rows = measure(args.seed, args.rounds)
    for row in rows:
        print(
            f"{row['op']:6} {row['ms']:6.2f} ms of CPU   limit {row['limit_ms']:6.2f} ms   ratio {row['ratio']:.2f}   "
            f"wall {row['wall_ms']:6.2f} ms"
        )
    if args.json:
        args.json.write_text(json.dumps({"seed": args.seed, "rows": rows}, indent=2) + "\n")
    missed = [row["op"] for row in rows if row["ms"] > MOST_MS[row["op"]] or row["ratio"] > MOST_RATIO[row["op"]]]
    if missed:
        print(
            f"missed: {', '.join(missed)} (asked: at most {MOST_MS} ms and {MOST_RATIO} times the limit)",
            file=sys.stderr,
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
