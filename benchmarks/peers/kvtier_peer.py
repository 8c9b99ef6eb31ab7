"""Our side: the copies that the store makes, sums on, as `kvtier bench tiers` calls them; and its look-ups."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from peer import Peer, payload, serve, tokens

from kvtier.abc.medium import MediumContext
from kvtier.abc.store import SlotRange
from kvtier.bench.limits import FileLimit, SocketLimit
from kvtier.bench.plane import Blocks, DramPlane, FramePlane, Plane, Way
from kvtier.config import StoreSettings
from kvtier.key import Identity, Origin, Scope, Shard, Span, chain_keys, root_key
from kvtier.layout import CacheGroup, GroupKind, Layout
from kvtier.metrics import Metrics
from kvtier.quantity import Bytes
from kvtier.storage_backends.dram import DramMedium
from kvtier.storage_backends.nvme import NvmeMedium
from kvtier.storage_backends.redis import PREFIX, RedisMedium, connection_maker
from kvtier.store.geometry import Geometry
from kvtier.store.open import open_store
from kvtier.url import TierUrl

BLOCK_TOKENS = 16
LAYOUT = Layout((CacheGroup(GroupKind.MQA, 1, 1, 8, "bf16"),), BLOCK_TOKENS)
"""Of look-ups: a small block, because neither keys nor match look at its bytes."""


class Copies(Peer):
    """``bare_put``, ``bare_get``: without sums and index. ``limit_put``, ``limit_get``: what the machine does."""

    def __init__(self, task: dict[str, Any]) -> None:
        rng = random.Random(task["seed"])
        size, count = task["block_bytes"], task["blocks"]
        self._blocks = Blocks(size, count, rng, content=lambda number: payload(task["seed"], number, size))
        self._workers = ThreadPoolExecutor(1)
        self._part = range(count)
        self._plane = self._opened(task, rng)
        self._ways: dict[str, Way] = {}
        for ours, op in (("put", "save"), ("get", "load")):
            for name, way in zip(("", "bare_", "limit_"), self._plane.ways(op), strict=True):
                assert way is not None, "each of these tiers has a limit"
                self._ways[name + ours] = way

    def _opened(self, task: dict[str, Any], rng: random.Random) -> Plane:
        blocks = self._blocks
        if task["medium"] == "dram":
            return DramPlane(blocks, DramMedium(2 * blocks.count, blocks.block_bytes), rng, self._workers)
        if task["medium"] == "disk":
            params = NvmeMedium.Params(capacity=Bytes(2 * blocks.count * (blocks.block_bytes + 8192) + (16 << 20)))
            directory = Path(task["directory"])
            nvme = NvmeMedium(directory, blocks.block_bytes, params)
            slots = rng.sample(range(nvme.slots), blocks.count)
            return FramePlane(blocks, nvme, FileLimit(nvme, directory, slots, params.threads), slots=slots)
        url, settings = TierUrl.parse(f"redis://127.0.0.1:{task['port']}"), RedisMedium.Params()
        redis = RedisMedium.open(url, settings, MediumContext(blocks.block_bytes))
        names = [PREFIX + name for name in blocks.names]
        return FramePlane(blocks, redis, SocketLimit(connection_maker(url, settings), names, settings.connections))

    def put(self) -> None:
        self._ways["put"](self._part)

    def before_get(self) -> None:
        self._plane.spoil(self._part)

    def get(self) -> None:
        self._ways["get"](self._part)

    def check(self) -> bool:
        self._plane.check(self._part)
        return True

    def bare_put(self) -> None:
        self._ways["bare_put"](self._part)

    def bare_get(self) -> None:
        self._ways["bare_get"](self._part)

    def limit_put(self) -> None:
        self._ways["limit_put"](self._part)

    def limit_get(self) -> None:
        self._ways["limit_get"](self._part)

    def close(self) -> None:
        self._plane.close()
        self._workers.shutdown()
        self._blocks.close()


class Lookups(Peer):
    """A prompt whose blocks are all there: in DRAM by the store's own match, on Redis by one probe."""

    def __init__(self, task: dict[str, Any]) -> None:
        identity, scope = Identity("peer", "r1", "bf16", LAYOUT), Scope()
        self._origin = Origin(identity.digest(), scope.digest(), scope.tenant_id)
        self._root = root_key(identity, scope)
        self._prompt = tokens(task["seed"], task["tokens"])
        span = self._span()
        self._redis: RedisMedium | None = None
        self._geometry = Geometry(Shard(), LAYOUT.fingerprint(), LAYOUT.block_bytes, BLOCK_TOKENS)
        if task["medium"] == "dram":
            capacity = 2 * len(span) * 4096
            self._store = open_store(
                [TierUrl.parse(f"dram://?capacity={capacity}")], identity, StoreSettings(), Metrics()
            )
            engine = DramMedium(len(span), LAYOUT.block_bytes)
            ended = self._store.save(span, SlotRange(engine, range(len(span)))).result(60.0)
            if not all(outcome.done for outcome in ended):
                raise RuntimeError("a block of the prompt was not saved")
            return
        url = TierUrl.parse(f"redis://127.0.0.1:{task['port']}")
        self._redis = RedisMedium.open(url, RedisMedium.Params(), MediumContext(LAYOUT.block_bytes))
        self._names = self._geometry.addresses(span)
        self._redis.write(self._names, [(memoryview(bytes(LAYOUT.block_bytes)),)] * len(span))

    def _span(self) -> Span:
        return Span(self._origin, self._root, 0, tuple(chain_keys(self._root, self._prompt, BLOCK_TOKENS)))

    def lookup(self) -> int:
        span = self._span()
        if self._redis is not None:
            return BLOCK_TOKENS * self._redis.probe(self._geometry.addresses(span))
        found = self._store.match("peer", span)
        hits: int = found.hits
        found.release()
        return BLOCK_TOKENS * hits

    def put(self) -> None:
        raise NotImplementedError

    def get(self) -> None:
        raise NotImplementedError

    def check(self) -> bool:
        return True

    def close(self) -> None:
        if self._redis is not None:
            self._redis.delete(self._names)
            self._redis.close()
        else:
            self._store.close()


if __name__ == "__main__":
    sys.exit(serve(lambda task: Lookups(task) if task.get("tokens") else Copies(task)))
