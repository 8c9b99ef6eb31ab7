"""Small traces on disk."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path


def write_lines(path: Path, records: Iterable[object]) -> Path:
    """One record per line, packed where the name ends in ``.gz``."""
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def mooncake(path: Path, chains: Iterable[Sequence[int]], every_s: float = 1.0) -> Path:
    """A trace in Mooncake's format: these chains of block ids, one request every ``every_s`` seconds."""
    return write_lines(
        path,
        (
            {
                "timestamp": round(1000 * every_s * number),
                "input_length": 512 * len(chain),
                "output_length": 10,
                "hash_ids": list(chain),
            }
            for number, chain in enumerate(chains)
        ),
    )


def recorded(path: Path, chains: Iterable[Sequence[int]], block_tokens: int = 16, every_s: float = 1.0) -> Path:
    """A trace of our own format."""
    return write_lines(
        path,
        [{"format": "kvtier-trace", "version": 1, "block_tokens": block_tokens}]
        + [
            {
                "t": every_s * number,
                "in": block_tokens * len(chain),
                "out": 4,
                "keys": [one.to_bytes(16, "big").hex() for one in chain],
            }
            for number, chain in enumerate(chains)
        ],
    )


def session(name: str, requests: Sequence[tuple[float, Sequence[tuple[int, int]]]]) -> dict[str, object]:
    """One session of the coding-agent trace: seconds from its start, and inclusive ranges of block ids."""
    return {
        "id": name,
        "block_size": 64,
        "scope": "local",
        "tool_tokens": 0,
        "system_tokens": 0,
        "requests": [
            {
                "t": time_s,
                "in": 64 * sum(last - first + 1 for first, last in ranges) + 5,
                "out": 7,
                "r": [list(one) for one in ranges],
            }
            for time_s, ranges in requests
        ],
    }


def drawn_chains(seed: int, requests: int, roots: int = 3, longest: int = 8) -> list[tuple[int, ...]]:
    """Chains over a random tree of ids: an id has one parent, so a chain's ids name their prefixes."""
    rng = random.Random(seed)
    children: dict[int, list[int]] = {}
    fresh = itertools.count(1)
    chains = []
    for _ in range(requests):
        chain: list[int] = []
        for depth in range(rng.randrange(1, longest + 1)):
            known = children.setdefault(chain[-1] if chain else 0, [])
            if not known or (len(known) < roots + depth and rng.random() < 0.4):
                known.append(next(fresh))
            chain.append(known[min(rng.randrange(len(known)), rng.randrange(len(known)))])
        chains.append(tuple(chain))
    return chains
