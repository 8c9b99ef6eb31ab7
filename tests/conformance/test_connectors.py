"""The bundled connector passes the connector suite, over a store that is turned by hand and over one with threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.abc.connector import KVConnector
from kvtier.abc.store import Reason, Store
from kvtier.config import StoreSettings
from kvtier.connectors.bundled import BundledConnector
from kvtier.key import Span
from kvtier.metrics import Metrics
from kvtier.storage_backends.memory import MemoryMedium
from kvtier.store.open import open_store
from kvtier.testing.blocks import IDENTITY, LAYOUT
from kvtier.testing.connectors import ConnectorSuite
from kvtier.url import TierUrl
from tests.store.builders import Bench, make_bench


def bundled(store: Store) -> BundledConnector:
    return BundledConnector(store, LAYOUT.block_tokens, hbm_slots=64, step_tokens=16 * LAYOUT.block_tokens)


class TestBundledByHand(ConnectorSuite):
    bench: Bench

    @pytest.fixture
    def connector(self, tmp_path: Path) -> Iterator[KVConnector]:
        self.bench = make_bench(48, nvme=tmp_path / "n", shared=MemoryMedium())
        yield bundled(self.bench.store)
        self.bench.turn()
        assert self.bench.store.check_integrity() == []
        self.bench.store.close()

    def turn(self) -> None:
        self.bench.turn()

    def lose(self, keys: Span) -> None:
        self.bench.store.drop(keys, Reason.CLEARED)


class TestBundledWithThreads(ConnectorSuite):
    store: Store

    @pytest.fixture
    def connector(self) -> Iterator[KVConnector]:
        tiers = [TierUrl.parse(f"dram://?capacity={48 * LAYOUT.block_bytes}"), TierUrl.parse("memory://")]
        self.store = open_store(tiers, IDENTITY, StoreSettings(), Metrics())
        yield bundled(self.store)
        self.store.close()

    def lose(self, keys: Span) -> None:
        self.store.drop(keys, Reason.CLEARED)
