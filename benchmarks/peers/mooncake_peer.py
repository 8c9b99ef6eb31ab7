"""Mooncake Store over TCP: a client without memory of its own, beside one that holds all of it; in its own environment."""

from __future__ import annotations

import mmap
import sys
from typing import Any

from mooncake.store import MooncakeDistributedStore
from peer import Peer, payload, serve


class Client(Peer):
    """``holds``: bytes that this one offers to all, for the process that is the other side of the socket."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._store = MooncakeDistributedStore()
        holds = task.get("holds", 0)
        code = self._store.setup("127.0.0.1", "P2PHANDSHAKE", holds, 128 << 20, "tcp", "", f"127.0.0.1:{task['port']}")
        if code:
            raise RuntimeError(f"Mooncake's setup ended with {code}")
        if holds:
            return
        size, count = task["block_bytes"], task["blocks"]
        self._size = size
        self._names = [f"block-{number}" for number in range(count)]
        self._memory = mmap.mmap(-1, 2 * size * count)
        for number in range(count):
            self._memory[number * size : (number + 1) * size] = payload(task["seed"], number, size)
        import ctypes  # noqa: PLC0415 - only a client has memory of its own

        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._sources = [start + number * size for number in range(count)]
        self._targets = [start + (count + number) * size for number in range(count)]
        if self._store.register_buffer(start, 2 * size * count):
            raise RuntimeError("Mooncake refuses the buffer")

    def before_put(self) -> None:
        self._store.batch_remove(self._names, force=True)

    def put(self) -> None:
        self._done(self._store.batch_put_from(self._names, self._sources, [self._size] * len(self._names)), "put")

    def get(self) -> None:
        self._done(self._store.batch_get_into(self._names, self._targets, [self._size] * len(self._names)), "get")

    def _done(self, codes: list[int], what: str) -> None:
        if any(code < 0 for code in codes):
            raise RuntimeError(f"Mooncake's {what} ended with {sorted(set(codes))[:3]}")

    def check(self) -> bool:
        half = len(self._memory) // 2
        return bool(self._memory[:half] == self._memory[half:])

    def close(self) -> None:
        self._store.close()


if __name__ == "__main__":
    sys.exit(serve(Client))
