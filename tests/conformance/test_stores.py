"""The tiered store passes the store suite: turned by hand and with threads, alone and over lower tiers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.abc.store import Store
from kvtier.config import StoreSettings, WriteMode
from kvtier.key import Span
from kvtier.metrics import Metrics
from kvtier.quantity import Seconds
from kvtier.storage_backends.memory import MemoryMedium
from kvtier.store.open import open_store
from kvtier.store.store import TieredStore
from kvtier.testing.blocks import IDENTITY
from kvtier.testing.stores import PATIENCE, StoreSuite
from kvtier.url import TierUrl
from tests.store.builders import Bench, make_bench, rotten

DRAM_BYTES = 24 * 4096


class ByHand(StoreSuite[TieredStore]):
    """What stores over a bench have in common."""

    bench: Bench

    def turn(self, store: TieredStore) -> None:
        self.bench.turn()

    def drained(self, store: TieredStore) -> bool:
        return any(store.drain(0.0) for _ in range(10) if self.bench.turn() >= 0)

    def lose(self, store: TieredStore, keys: Span) -> bool:
        return rotten(store, keys)

    def test_threads_get_their_own_bytes(self, store: TieredStore) -> None:
        """Nothing to see: one thread turns this store."""


class TestDramByHand(ByHand):
    @pytest.fixture
    def store(self) -> Store:
        self.bench = make_bench(24)
        return self.bench.store


class TestThreeTiersByHand(ByHand):
    @pytest.fixture(params=list(WriteMode), ids=lambda mode: mode.value)
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> Store:
        self.bench = make_bench(
            24,
            nvme=tmp_path / "n",
            nvme_write=request.param,
            nvme_capacity=3300 << 10,
            shared=MemoryMedium(),
            shared_write=request.param,
            codec="shuffle+lz4",
        )
        return self.bench.store


class TestWithThreads(StoreSuite[TieredStore]):
    @pytest.fixture(params=["dram", "dram+memory", "dram+nvme+memory"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
        urls = {
            "dram": f"dram://?capacity={DRAM_BYTES}&verify=always",
            "nvme": f"nvme://{tmp_path}/n?capacity=3300KiB&write=back",
            "memory": "memory://?write=through",
        }
        tiers = [TierUrl.parse(urls[name]) for name in request.param.split("+")]
        with_threads = open_store(tiers, IDENTITY, StoreSettings(deadline=Seconds(PATIENCE)), Metrics())
        yield with_threads
        with_threads.close()

    def lose(self, store: TieredStore, keys: Span) -> bool:
        return rotten(store, keys)
