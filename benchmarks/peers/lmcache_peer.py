"""LMCache's backends, as its own engine calls them; runs in the environment that `environments.py` builds.

dram: what ``store`` and ``retrieve`` do per chunk (allocate, copy, submit; get, copy back). disk, redis, resp: between
LMCache's DRAM and the medium. Look-ups are ``LMCacheEngine.lookup``: hashing and presence.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from peer import Peer, payload, serve, tokens

CHUNK_TOKENS = 16
DISK_THREADS = 4
WAIT_SECONDS = 60.0
_BACKENDS = {"dram": "LocalCPUBackend", "disk": "LocalDiskBackend", "redis": "RemoteBackend", "resp": "RemoteBackend"}


class LmcachePeer(Peer):
    def __init__(self, task: dict[str, Any]) -> None:
        medium = task["medium"]
        self._medium = medium
        self._block_bytes = task["block_bytes"]
        heads = self._block_bytes // (2 * CHUNK_TOKENS * 8 * 2)
        shape = (1, 2, CHUNK_TOKENS, heads, 8)
        self._shape = torch.Size((2, 1, CHUNK_TOKENS, heads * 8))
        needed = (task["blocks"] * max(self._block_bytes, 4096) * 3) / (1 << 30)
        given: dict[str, Any] = {
            "chunk_size": CHUNK_TOKENS,
            "local_cpu": medium == "dram",
            "max_local_cpu_size": max(0.5, needed),
            "save_unfull_chunk": False,
            "extra_config": {"use_odirect": True, "disk_io_threads": DISK_THREADS, "save_chunk_meta": False},
        }
        if medium == "disk":
            given |= {"local_disk": f"{task['directory']}/", "max_local_disk_size": max(1.0, needed)}
        if medium in ("redis", "resp"):
            given |= {"remote_url": f"{medium}://127.0.0.1:{task['port']}", "remote_serde": "naive"}
        config = LMCacheEngineConfig.from_defaults(**given)
        metadata = LMCacheMetadata("peer", 1, 1, 0, 0, torch.bfloat16, shape, chunk_size=CHUNK_TOKENS, role="worker")
        self._engine = LMCacheEngineBuilder.get_or_create(
            "peer", config, metadata, MockGPUConnector(shape), lambda *_: None, lambda thing, _: thing
        )
        self._engine.post_init()
        self._backends = self._engine.storage_manager.storage_backends
        self._backend = self._backends[_BACKENDS[medium]]
        self._pool = ThreadPoolExecutor(DISK_THREADS)
        self._prompt: list[int] = []
        if task.get("tokens"):
            self._prompt = tokens(task["seed"], task["tokens"])
            self._keys = [key for _, _, key in self._engine.token_database.process_tokens(tokens=self._prompt)]
        else:
            self._keys = [
                CacheEngineKey("peer", 1, 0, 1000 + number, torch.bfloat16) for number in range(task["blocks"])
            ]
        size = self._block_bytes // 2
        self._engine_memory = torch.empty((len(self._keys), size), dtype=torch.bfloat16)
        self._back = torch.empty_like(self._engine_memory)
        seen = self._engine_memory.view(torch.uint8).numpy()
        for number in range(len(self._keys)):
            seen[number] = np.frombuffer(payload(task["seed"], number, self._block_bytes), np.uint8)
        self._back.zero_()
        self._held: list[Any] = []
        if medium != "dram":
            self._held = [self._allocated(number) for number in range(len(self._keys))]
        self._got: list[Any] = []

    def _allocated(self, number: int) -> Any:  # noqa: ANN401 - LMCache's
        held = self._backends["LocalCPUBackend"].allocate(self._shape, torch.bfloat16, MemoryFormat.KV_2LTD)
        if held is None:
            raise MemoryError("LMCache has no room for a chunk")
        held.tensor.view(-1).copy_(self._engine_memory[number])
        return held

    def before_put(self) -> None:
        self._release()
        for key in self._keys:
            if self._medium in ("dram", "disk"):
                self._backend.remove(key)

    def put(self) -> None:
        if self._medium == "dram":
            made = [self._allocated(number) for number in range(len(self._keys))]
            self._backend.batched_submit_put_task(self._keys, made)
            for each in made:
                each.ref_count_down()
            return
        ended = threading.Semaphore(0)
        self._backend.batched_submit_put_task(self._keys, self._held, on_complete_callback=lambda _: ended.release())
        for _ in self._keys:
            if not ended.acquire(timeout=WAIT_SECONDS):
                raise TimeoutError("LMCache did not end its puts")
        if self._medium == "disk":
            list(self._pool.map(self._sync, self._keys))

    def _sync(self, key: Any) -> None:  # noqa: ANN401
        descriptor = os.open(self._backend._key_to_path(key), os.O_RDWR)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def before_get(self) -> None:
        self._release()

    def get(self) -> None:
        if self._medium == "dram":
            for number, key in enumerate(self._keys):
                held = self._backend.get_blocking(key)
                self._back[number].copy_(held.tensor.view(-1))
                held.ref_count_down()
            return
        self._got = self._backend.batched_get_blocking(self._keys)
        if any(each is None for each in self._got):
            raise LookupError("LMCache did not give a chunk back")

    def _release(self) -> None:
        for each in self._got:
            each.ref_count_down()
        self._got = []

    def check(self) -> bool:
        if self._medium == "dram":
            return bool(torch.equal(self._back.view(torch.int16), self._engine_memory.view(torch.int16)))
        pairs = zip(self._got, self._engine_memory, strict=True)
        return all(torch.equal(got.tensor.view(-1).view(torch.int16), raw.view(torch.int16)) for got, raw in pairs)

    def lookup(self) -> int:
        return int(self._engine.lookup(tokens=self._prompt))

    def close(self) -> None:
        self._release()
        for each in self._held:
            each.ref_count_down()
        self._pool.shutdown()
        LMCacheEngineBuilder.destroy("peer")


if __name__ == "__main__":
    sys.exit(serve(LmcachePeer))
