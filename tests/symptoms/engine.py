"""The bundled engine on a tiny model, its connector, and a store below: turned by hand, or over real tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.abc.connector import Finished, LoadPlan, StepPlan
from kvtier.connectors.bundled import BundledConnector
from kvtier.engine.engine import Engine
from kvtier.engine.request import Output, Request
from kvtier.key import Address
from kvtier.layout import Layout
from kvtier.storage_backends.memory import MemoryMedium
from kvtier.store.geometry import Geometry
from kvtier.store.store import TieredStore
from kvtier.testing.blocks import SHARD
from tests.engine.support import BLOCK, make_engine
from tests.store.builders import make_bench

from .support import prompt_span

IDENTITY = make_engine(8).identity
BLOCK_BYTES = IDENTITY.layout.block_bytes
GEOMETRY = Geometry(SHARD, IDENTITY.layout.fingerprint(), BLOCK_BYTES, BLOCK)


def connected(
    store: TieredStore, blocks: int, *, tokens: int = 64, sequences: int = 8, layout: Layout | None = None
) -> tuple[Engine, BundledConnector]:
    """An engine of ``blocks`` HBM slots over ``store``."""
    connector = BundledConnector(store, BLOCK, blocks, tokens)
    return make_engine(blocks, connector=connector, tokens=tokens, sequences=sequences, layout=layout), connector


class TurnedEngine:
    """An engine over a store whose copies and time a test turns by hand. Loads that a step waits for run at once."""

    def __init__(
        self,
        dram: int = 64,
        blocks: int = 64,
        *,
        nvme: Path | None = None,
        shared: MemoryMedium | None = None,
        tokens: int = 64,
        sequences: int = 8,
        geometry: Geometry = GEOMETRY,
        layout: Layout | None = None,
    ) -> None:
        self.bench = make_bench(dram, nvme=nvme, shared=shared, geometry=geometry)
        self.store = self.bench.store
        self.engine, self.connector = connected(self.store, blocks, tokens=tokens, sequences=sequences, layout=layout)
        self.loads: list[LoadPlan] = []
        """Every load that a step has waited for."""
        self.ended: list[tuple[str, int]] = []
        """(request, HBM slot) of every save whose end was told to the engine."""
        worker = self.connector.worker
        start, finished = worker.start_load_kv, worker.get_finished

        def start_load_kv(plan: StepPlan) -> None:
            start(plan)
            self.loads += plan.loads
            for _ in plan.loads:
                self.bench.workers[0].run_one()  # loads go before saves

        def get_finished() -> Finished:
            told = finished()
            self.ended += [(name, slot) for name, slots in told.saved for slot in slots]
            return told

        worker.start_load_kv = start_load_kv  # type: ignore[method-assign]
        worker.get_finished = get_finished  # type: ignore[method-assign]

    def addresses(self, ids: Sequence[int]) -> list[Address]:
        """What the full blocks of a prompt are stored under."""
        return self.store.geometry.addresses(prompt_span(ids, identity=IDENTITY))

    def serve(self, requests: Sequence[Request], between: Callable[[], object] | None = None) -> list[tuple[int, ...]]:
        """The tokens of each request; ``between`` is called after every step, and is to let copies go on."""
        for request in requests:
            self.engine.add_request(request)
        got: dict[str, tuple[int, ...]] = {request.id: () for request in requests}
        for output in self.run(between):
            got[output.request_id] += output.tokens
        return list(got.values())

    def run(self, between: Callable[[], object] | None = None, most: int = 2000) -> list[Output]:
        """Steps until no request is open."""
        outputs: list[Output] = []
        for _ in range(most):
            if not self.engine.open_requests:
                return outputs
            outputs += self.engine.step()
            (between or self.bench.turn)()
        raise AssertionError(f"requests are still open after {most} steps")

    def forget_hbm(self) -> None:
        """Let every save end, and empty HBM: what is found next is the store's."""
        self.settle()
        self.engine.reset_prefix_cache()
        assert self.engine.pool.ready == 0

    def settle(self) -> None:
        while self.bench.turn():
            pass
        assert self.engine.settle(5.0)

    def expect_idle(self) -> None:
        """Nothing is held on either side, and everything agrees."""
        self.settle()
        assert self.engine.check_integrity() == []
        pool = self.engine.pool
        assert pool.referenced == pool.writing == pool.retiring == 0
        self.bench.idle()
        assert self.bench.arena.pool.referenced == len(self.bench.arena.quarantined)
        assert self.engine.cache_fault is None
