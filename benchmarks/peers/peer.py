"""One side of a comparison: a process that moves blocks when it is told to, in lines of JSON on stdin and stdout.

No import of kvtier and none of a peer: each runs in an environment of its own, this module in all of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from typing import Any


class Peer(ABC):
    """What is timed. ``get`` and ``put`` move all blocks of the task; each ends when that is done."""

    def before_put(self) -> None:  # noqa: B027 - most have nothing to forget
        """Forget what the last ``put`` has stored, where a store would not take it again. Not timed."""

    def before_get(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back, or spoil, what the last ``get`` has brought. Not timed."""

    @abstractmethod
    def put(self) -> None:
        """Store every block; returns when they are as safe as they will be."""

    @abstractmethod
    def get(self) -> None:
        """Fetch every block."""

    @abstractmethod
    def check(self) -> bool:
        """Whether the last ``get`` brought what was put."""

    def lookup(self) -> int:
        """Tokens of the task's prompt that are there, hashing included."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Stop threads and give back what was opened."""


def payload(seed: int, number: int, size: int) -> bytes:
    """The bytes of a block: the same for every side."""
    import random  # noqa: PLC0415 - not at the import of a contract

    start = random.Random(seed * 1_000_003 + number).randbytes(min(size, 1 << 16))
    return (start * -(-size // len(start)))[:size]


def tokens(seed: int, count: int) -> list[int]:
    """The prompt of a look-up."""
    import random  # noqa: PLC0415

    return random.Random(seed).choices(range(50_000), k=count)


def serve(make: Any) -> int:  # noqa: ANN401 - a callable from the task to a Peer
    """Run ``make(task)`` and do what stdin says until it ends. The task is the first argument, as JSON."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not come between our lines

    def tell(**what: object) -> None:
        out.write(json.dumps(what) + "\n")

    try:
        peer = make(json.loads(sys.argv[1]))
    except Exception as failed:  # noqa: BLE001 - told to the other side, whatever it is
        tell(trouble=f"{type(failed).__name__}: {failed}"[:500])
        return 1
    tell(ready=True)
    try:
        for line in sys.stdin:
            do = line.strip()
            if do == "end":
                break
            try:
                if do == "check":
                    tell(right=peer.check())
                    continue
                if do == "put":
                    peer.before_put()
                if do == "get":
                    peer.before_get()
                cpu, start = time.process_time(), time.perf_counter()
                found = getattr(peer, do)()
                seconds = time.perf_counter() - start
                tell(seconds=seconds, cpu=time.process_time() - cpu, found=found)
            except Exception as failed:  # noqa: BLE001 - as above
                tell(trouble=f"{do}: {type(failed).__name__}: {failed}"[:500])
    finally:
        peer.close()
    return 0
