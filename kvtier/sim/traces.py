"""Traces of requests: who asked when, and for which chain of blocks.

Three formats are read, each plain or gzip-compressed, by lines:

- Mooncake's: ``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one id per 512 tokens]}``
  (Qin et al., FAST'25).
- coding-agent sessions: one session per line, ``{"id", "block_size": 64, "requests": [{"t", "in", "out", "r"}]}`` with ``r``
  inclusive ranges of block ids of the session's own (after kv-cache-tester's traces). A seeded sample of sessions is started at
  random moments; blocks are taken eight at a time, and what is left over at a chain's end is in no block.
- ours, as a server records it: ``{"format": "kvtier-trace", "version": 1, "block_tokens": 16}``, then per request
  ``{"t": seconds, "in": tokens, "out": tokens, "keys": [first 16 bytes of each block's key in hex]}``.

Requests stand in the order in which they came. A line that is not what its format says ends the reading with one
``ConfigError`` that names file and line.
"""

from __future__ import annotations

import gzip
import hashlib
import heapq
import json
import math
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np

from kvtier.errors import ConfigError
from kvtier.key import Address

MOST_LINE_BYTES = 64 << 20
"""A longer line is taken for no trace at all."""
MOST_BLOCKS = 1 << 22
"""Blocks in one chain."""
ID_BYTES = 16
MOONCAKE_TOKENS = 512
AGENT_TOKENS, AGENT_TOGETHER = 64, 8
_GZIP = b"\x1f\x8b"

Record: TypeAlias = "dict[str, Any]"
"""One line, as JSON has it."""


class Reference(NamedTuple):
    """One request."""

    time_s: float
    """Seconds from the trace's beginning; never runs backwards."""
    chain: tuple[Address, ...]
    """Its prompt's blocks, head first, each named by 16 bytes that stand for everything before it as well."""
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Which sessions of a trace of sessions are started, and when; other traces say so themselves."""

    sessions: int = 150
    """So many, or all where there are fewer."""
    over_s: float = 4 * 3600.0
    """Their beginnings are spread uniformly over so many seconds."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sessions < 1:
            raise ValueError(f"a sample has at least one session, not {self.sessions}")
        if not 0.0 <= self.over_s < math.inf:
            raise ValueError(f"sessions begin within some seconds, not {self.over_s:g}")


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace on disk; each iteration reads it anew, a line at a time."""

    path: Path
    format: str
    """``mooncake``, ``coding-agent`` or ``kvtier``."""
    block_tokens: int
    sample: Sample

    def __iter__(self) -> Iterator[Reference]:
        last = -1.0
        for line, one in _READERS[self.format](self):
            if one.time_s < last:
                raise _broken(self.path, line, f"its time {one.time_s:g} s lies before that of the request before it")
            last = one.time_s
            yield one
        if last < 0.0:
            raise _empty(self.path)


def open_trace(path: str | Path, sample: Sample = Sample()) -> Trace:
    """Look at the first line of ``path`` and say what it is; raises ``ConfigError`` where it is no trace, or empty."""
    path = Path(path)
    for line, record in _records(path):
        if "hash_ids" in record:
            return Trace(path, "mooncake", MOONCAKE_TOKENS, sample)
        if "requests" in record and "block_size" in record:
            return Trace(path, "coding-agent", AGENT_TOKENS * AGENT_TOGETHER, sample)
        if record.get("format") == "kvtier-trace":
            with _blamed(path, line):
                if record.get("version") != 1:
                    raise ValueError(
                        f"version {record.get('version')!r} of kvtier-trace is not known; this one reads 1"
                    )
                return Trace(path, "kvtier", _whole(record, "block_tokens", least=1), sample)
        raise _broken(
            path,
            line,
            "unknown format; known are Mooncake's (hash_ids), coding-agent sessions (requests) and kvtier-trace",
        )
    raise _empty(path)


def _empty(path: Path) -> ConfigError:
    return ConfigError(f"{path}: no request is in it")


def _broken(path: Path, line: int, why: object) -> ConfigError:
    return ConfigError(f"{path}: line {line}: {why}")


@contextmanager
def _blamed(path: Path, line: int) -> Iterator[None]:
    """Whatever is wrong inside is this line's fault."""
    try:
        yield
    except KeyError as missing:
        raise _broken(path, line, f"{missing.args[0]!r} is missing") from None
    except (ValueError, TypeError) as wrong:
        raise _broken(path, line, wrong) from None


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The file, unpacked where it is packed, whatever its name says."""
    with path.open("rb") as raw:
        packed = raw.read(len(_GZIP)) == _GZIP
        raw.seek(0)
        if not packed:
            yield raw
            return
        with gzip.GzipFile(fileobj=raw) as unpacked:
            yield unpacked  # type: ignore[misc]  # reads lines as a file does


def _records(path: Path) -> Iterator[tuple[int, Record]]:
    """Line numbers and what stands there; empty lines are passed by."""
    number = 0
    try:
        with _opened(path) as file:
            while line := file.readline(MOST_LINE_BYTES + 1):
                number += 1
                if len(line) > MOST_LINE_BYTES:
                    raise _broken(path, number, f"longer than {MOST_LINE_BYTES:,} bytes")
                if not line.isspace():
                    yield number, _record(path, number, line)
    except (OSError, EOFError, zlib.error) as failed:
        packed = isinstance(failed, (EOFError, zlib.error, gzip.BadGzipFile))
        where = f"{path}: line {number + 1}" if number or packed else path
        raise ConfigError(f"{where}: {getattr(failed, 'strerror', None) or failed}") from failed


def _record(path: Path, number: int, line: bytes) -> Record:
    try:
        record = json.loads(line)
    except ValueError as wrong:
        raise _broken(path, number, f"no JSON: {wrong}") from None
    except RecursionError:
        raise _broken(path, number, "no JSON that can be read: nested too deeply") from None
    if not isinstance(record, dict):
        raise _broken(path, number, "no JSON object")
    return record


def _whole(record: Record, name: str, least: int = 0) -> int:
    value = record[name]
    if type(value) is not int or not least <= value < 1 << 53:
        raise ValueError(f"{name} is {_shown(value)}, and no whole number from {least}")
    return value


def _seconds(record: Record, name: str, unit: float = 1.0) -> float:
    value = record[name]
    if type(value) not in (int, float) or not 0 <= value < 1e15 or not math.isfinite(value):
        raise ValueError(f"{name} is {_shown(value)}, and no time from 0")
    return float(value) * unit


def _listed(record: Record, name: str) -> list[Any]:
    value = record[name]
    if not isinstance(value, list) or len(value) > MOST_BLOCKS:
        raise ValueError(f"{name} is {_shown(value)}, and no list of at most {MOST_BLOCKS:,} items")
    return value


def _distinct(name: str, ids: Sequence[object]) -> None:
    """A block's name stands for all before it, so none can come twice in a chain."""
    if len(set(ids)) < len(ids):
        raise ValueError(f"{name} names a block twice")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _named(*parts: bytes) -> Address:
    return Address(hashlib.blake2b(b"".join(parts), digest_size=ID_BYTES).digest())


def _mooncake(trace: Trace) -> Iterator[tuple[int, Reference]]:
    for line, record in _records(trace.path):
        with _blamed(trace.path, line):
            ids = _listed(record, "hash_ids")
            for one in ids:
                if type(one) is not int or not 0 <= one < 1 << 64:
                    raise ValueError(f"hash_ids has {_shown(one)}, and no whole number of 64 bits")
            _distinct("hash_ids", ids)
            yield (
                line,
                Reference(
                    _seconds(record, "timestamp", 1e-3),
                    tuple(_named(one.to_bytes(8, "little")) for one in ids),
                    _whole(record, "input_length"),
                    _whole(record, "output_length"),
                ),
            )


def _recorded(trace: Trace) -> Iterator[tuple[int, Reference]]:
    records = _records(trace.path)
    next(records)
    for line, record in records:
        with _blamed(trace.path, line):
            keys = [_unhexed(key) for key in _listed(record, "keys")]
            _distinct("keys", keys)
            yield (
                line,
                Reference(
                    _seconds(record, "t"),
                    tuple(keys),
                    _whole(record, "in"),
                    _whole(record, "out"),
                ),
            )


def _unhexed(text: object) -> Address:
    raw = bytes.fromhex(text) if isinstance(text, str) else b""
    if len(raw) != ID_BYTES:
        raise ValueError(f"keys has {_shown(text)}, and not {ID_BYTES} bytes in hex")
    return Address(raw)


@dataclass(frozen=True, slots=True)
class _Session:
    """A session of the coding-agent trace, checked."""

    line: int
    seed: bytes
    """Separates its blocks from those of others: its ids are its own."""
    requests: list[tuple[float, int, int, list[tuple[int, int]]]]
    """Seconds from its start, tokens in and out, inclusive ranges of block ids."""

    @classmethod
    def of(cls, line: int, record: Record) -> _Session:
        if _whole(record, "block_size") != AGENT_TOKENS:
            raise ValueError(f"block_size is {record['block_size']}, and not {AGENT_TOKENS}")
        if not isinstance(record["id"], str):
            raise TypeError(f"id is {_shown(record['id'])}, and no text")
        requests = []
        for one in _listed(record, "requests"):
            if not isinstance(one, dict):
                raise TypeError(f"requests has {_shown(one)}, and no object")
            tokens = _whole(one, "in")
            ranges = [_range(each) for each in _listed(one, "r")]
            blocks = sum(last - first + 1 for first, last in ranges)
            if blocks > min(MOST_BLOCKS, tokens // AGENT_TOKENS):
                raise ValueError(f"r has {blocks:,} blocks of {AGENT_TOKENS} tokens for a prompt of {tokens:,}")
            requests.append((_seconds(one, "t"), tokens, _whole(one, "out"), ranges))
        return cls(line, record["id"].encode(), requests)

    def played(self, start_s: float) -> Iterator[tuple[float, int, Reference]]:
        """Its requests where it begins at ``start_s``, each with its time and its line before it."""
        ids, chain = np.empty(0, np.uint64), list[Address]()
        for time_s, tokens, out, ranges in self.requests:
            before = ids
            ids = np.concatenate(
                [np.arange(first, last + 1, dtype=np.uint64) for first, last in ranges] or [before[:0]]
            )
            common = min(len(ids), len(before))
            differ = np.flatnonzero(ids[:common] != before[:common])
            same = (int(differ[0]) if len(differ) else common) // AGENT_TOGETHER
            chain = chain[:same]
            raw, width = ids.astype("<u8").tobytes(), 8 * AGENT_TOGETHER
            for index in range(same, len(ids) // AGENT_TOGETHER):
                above = chain[-1] if chain else self.seed
                chain.append(_named(above, raw[index * width : (index + 1) * width]))
            yield start_s + time_s, self.line, Reference(start_s + time_s, tuple(chain), tokens, out)


def _range(pair: object) -> tuple[int, int]:
    if (
        not isinstance(pair, list)
        or [type(one) for one in pair] != [int, int]
        or not 0 <= pair[0] <= pair[1] < pair[0] + MOST_BLOCKS
        or pair[1] >= 1 << 63
    ):
        raise ValueError(f"r has {_shown(pair)}, and no [first, last]")
    return pair[0], pair[1]


def _agents(trace: Trace) -> Iterator[tuple[int, Reference]]:
    """A sample of sessions drawn in one pass (Vitter's algorithm R), started at random, in the order of time."""
    rng = random.Random(trace.sample.seed)  # noqa: S311 - a sample, and no secret
    chosen: list[_Session] = []
    for count, (line, record) in enumerate(_records(trace.path)):
        with _blamed(trace.path, line):
            session = _Session.of(line, record)
        if count < trace.sample.sessions:
            chosen.append(session)
        elif (place := rng.randrange(count + 1)) < trace.sample.sessions:
            chosen[place] = session
    chosen.sort(key=lambda session: session.line)
    starts = [rng.uniform(0.0, trace.sample.over_s) for _ in chosen]
    playing = [session.played(start) for session, start in zip(chosen, starts, strict=True)]
    for _, line, one in heapq.merge(*playing, key=lambda played: played[:2]):
        yield line, one


_READERS: dict[str, Callable[[Trace], Iterator[tuple[int, Reference]]]] = {
    "mooncake": _mooncake,
    "coding-agent": _agents,
    "kvtier": _recorded,
}
