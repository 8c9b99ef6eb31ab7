"""Builders for tests of the shared folder: a medium, names as they are in use, and writers in processes of their own."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

from kvtier.abc.medium import Outcome, Status
from kvtier.key import Address
from kvtier.storage_backends.fs import FsMedium
from kvtier.testing.media import room


def opened(root: Path, **params: object) -> FsMedium:
    return FsMedium(str(root), FsMedium.Params(**{"capacity": 1 << 40, **params}))  # type: ignore[arg-type]


def place(root: Path, name: Address, generation: int = 0) -> Path:
    text = name.hex()
    return root / text[:2] / text[2] / f"{text}.{generation}"


def spread(count: int, seed: int) -> list[Address]:
    """Names as they are in use: digests."""
    source = random.Random(seed)
    return [Address(source.randbytes(40)) for _ in range(count)]


def taken(root: Path) -> int:
    """Bytes below a folder as ``du`` counts them."""
    total = root.lstat().st_blocks
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            try:
                total += os.lstat(f"{folder}/{name}").st_blocks
            except FileNotFoundError:
                continue
    return total * 512


WRITER = """
import os, random, signal, sys
from kvtier.key import Address
from kvtier.storage_backends import fs
root, point, seed, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
medium = fs.FsMedium(root, fs.FsMedium.Params(capacity=1 << 40, sync=point == "synced"))
die = lambda *given, **more: os.kill(os.getpid(), signal.SIGKILL)
pour, source = fs.pour, random.Random(seed)
if point == "created": fs.pour = die
if point == "half": fs.pour = lambda descriptor, data: (pour(descriptor, [data[0][:70_000]]), die())
if point == "poured": fs.os.close = die
if point == "synced": fs.os.fsync = die
print("ready", flush=True)
for turn in range(rounds):
    name = source.randbytes(40)
    value = random.Random(name).randbytes(200_000)
    medium.write([Address(name)], [[memoryview(value)]])
"""


def writer(root: Path, point: str, seed: int = 1, rounds: int = 100_000) -> subprocess.Popen[bytes]:
    """Another process that writes values which follow from their names; ready to do so."""
    started = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), point, str(seed), str(rounds)], stdout=subprocess.PIPE
    )
    assert started.stdout is not None
    assert started.stdout.readline() == b"ready\n"
    return started


def whole(medium: FsMedium) -> int:
    """How many values there are, each read and compared."""
    count = 0
    for name in medium.scan():
        value = room(200_000)
        (outcome,) = medium.read([name], [[value]])
        assert outcome == Outcome(Status.DONE, 200_000)
        assert value == random.Random(bytes(name)).randbytes(200_000)
        count += 1
    return count
