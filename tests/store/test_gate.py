"""The gate in the store: what is not worth loading is computed, and says so. Time is turned by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvtier.abc.store import Reason, SlotRange
from kvtier.config import GateMode, StoreSettings, TierUrl
from kvtier.cost import FittedGate, Gate, Guarded, OpenGate
from kvtier.key import Span
from kvtier.metrics import Metrics
from kvtier.storage_backends.memory import MemoryMedium
from kvtier.store.open import open_store
from kvtier.testing.blocks import filled
from kvtier.testing.faults import Throttled, wrapped

from .builders import GEOMETRY, IDENTITY, Bench, EngineMemory, chain, make_bench

TOKEN = 0.001
"""Seconds in which the engine of these tests computes a token, however many there are."""
BLOCK = TOKEN * GEOMETRY.block_tokens
REQUEST = 12
"""Blocks of a request."""


@dataclass
class Server:
    """A store over a tier whose reads take as long as a test says, and an engine that computes what is not loaded."""

    bench: Bench
    throttle: Throttled
    loaded: int = 0
    computed: int = 0

    @classmethod
    def over(cls, throttle: Throttled, gate: Gate, shared: MemoryMedium | None = None) -> Server:
        bench = make_bench(64, shared=wrapped(shared or MemoryMedium(), throttle), gate=gate)
        throttle._clock, throttle._sleep = bench.clock, bench.clock.advance
        throttle._free = bench.clock.now
        return cls(bench, throttle)

    def keep(self, keys: Span) -> None:
        """Have the tier, and nothing else, hold ``keys``."""
        self.bench.save(keys)
        self.bench.empty_dram()

    def request(self, keys: Span) -> float:
        """Serve a request for ``keys``; seconds to its first token."""
        bench, began = self.bench, self.bench.clock.now
        match = bench.store.match("r", keys)
        while match.pending:
            assert bench.hand.run_one()
        hits = match.hits
        bench.store.load(match, SlotRange(bench.memory, range(hits)))
        bench.workers[0].run_one()
        now = bench.clock.now
        bench.turn()  # what nobody waits for goes on beside the computation
        bench.clock.now = now
        left = (len(keys) - hits) * GEOMETRY.block_tokens
        self.loaded += hits * GEOMETRY.block_tokens
        self.computed += left
        bench.clock.advance(left * TOKEN)
        took = bench.clock.now - began
        if left:
            bench.store.observe_prefill(left, left * TOKEN)
        bench.empty_dram()
        return took


def cold(server: Server, count: int = 4) -> None:
    """Requests that nothing is known of: the engine reports what computing takes."""
    for number in range(count):
        server.request(chain(1000 + number, REQUEST >> number % 3))
    server.loaded = server.computed = 0


def serving(factor: float, gate: Gate | None = None) -> tuple[Server, Span]:
    """An engine beside a tier of ``factor`` times the break-even bandwidth, and a request's blocks, which only that tier has."""
    server = Server.over(Throttled(BLOCK / factor, "read"), gate or FittedGate())
    cold(server)
    keys = chain(1, REQUEST)
    server.keep(keys)
    return server, keys


@pytest.mark.parametrize(
    ("factor", "least", "most"), [(0.1, 0.0, 0.02), (0.5, 0.0, 0.02), (2.0, 0.95, 1.0), (10.0, 0.95, 1.0)]
)
def test_share_of_tokens_loaded_from_a_tier_of_so_many_times_the_break_even_bandwidth(
    factor: float, least: float, most: float
) -> None:
    server, keys = serving(factor)
    times = [server.request(keys) for _ in range(300)]
    share = server.loaded / (server.loaded + server.computed)
    assert least <= share <= most
    assert sum(times) <= 1.05 * 300 * REQUEST * BLOCK, "never slower than computing everything"
    server.bench.idle()


def test_with_the_gate_off_a_slow_tier_is_slower_than_none() -> None:
    """What the throttle above is worth: without the gate the same requests take ten times as long, up to the deadline."""
    server, keys = serving(0.1, OpenGate())
    assert server.request(keys) > 2 * REQUEST * BLOCK


def test_short_prefixes_are_not_loaded_over_a_delay_of_four_times_their_computing() -> None:
    short = 2
    server = Server.over(Throttled(1e-6, "read", call=4 * short * BLOCK), FittedGate())
    cold(server)
    keys, long = chain(1, short), chain(2, 16)
    server.keep(keys)
    server.keep(long)
    for _ in range(200):
        server.request(keys)
    assert server.loaded < 0.02 * (server.loaded + server.computed)
    before = server.loaded
    for _ in range(50):
        server.request(long)
        server.request(keys)
    assert (server.loaded - before) >= 49 * 16 * GEOMETRY.block_tokens, "16 blocks take 16, the delay is one of 8"
    assert server.loaded - before <= 52 * 16 * GEOMETRY.block_tokens


def test_a_tier_that_turns_slow_is_left_and_one_that_recovers_is_used_again() -> None:
    server, keys = serving(10.0)
    for _ in range(20):
        server.request(keys)
    assert server.computed == 0
    server.throttle.each = BLOCK / 0.1
    slow = [server.request(keys) for _ in range(20)]
    assert sum(took > 1.1 * REQUEST * BLOCK for took in slow) <= 3
    server.throttle.each = BLOCK / 10
    back = next(number for number in range(1000) if server.request(keys) < 0.5 * REQUEST * BLOCK)
    assert back < 500, "its share of tries has found out"


def test_one_slow_first_load_does_not_close_a_tier() -> None:
    server, keys = serving(0.1)
    server.request(keys)
    server.throttle.each = BLOCK / 10
    took = [server.request(keys) for _ in range(6)]
    assert min(took[:3]) < 0.5 * REQUEST * BLOCK
    assert max(took[3:]) < 0.5 * REQUEST * BLOCK


def test_what_is_declined_says_why_and_its_tries_hold_nothing() -> None:
    server, keys = serving(0.1)
    for _ in range(10):
        server.request(keys)
    first, *others = server.bench.store.explain("r")
    assert (first.reason, first.tier) == (Reason.BELOW_BREAK_EVEN, "shared")
    assert {block.reason for block in others} == {Reason.BEHIND_A_MISS}
    assert server.bench.metrics.value("kvtier_tier_misses_total", tier="shared", reason="below_break_even") >= 9, (
        "each request once, however often it asked"
    )
    server.bench.idle()


def test_requests_do_not_wait_for_the_try_of_a_tier_that_lost() -> None:
    server, keys = serving(0.1)
    server.request(keys)
    for name in ("declined", "while it is tried"):
        match = server.bench.store.match(name, keys)
        if match.pending:
            server.bench.workers[1].run_one()  # the probe; what is on its way needs none
        assert not match.pending and match.hits == 0
        assert server.bench.workers[1].queued == 1, "the try, which nobody joins"
    for name in ("declined", "while it is tried"):
        server.bench.store.forget(name)
    server.bench.turn()
    server.bench.idle()


def test_loads_that_share_their_bytes_are_measured_once() -> None:
    gate = FittedGate()
    server = Server.over(Throttled(0.01, "read"), gate)
    keys = chain(1, REQUEST)
    server.keep(keys)
    matches = [server.bench.store.match(f"r{number}", keys) for number in range(2)]
    server.bench.turn()
    assert [match.hits for match in matches] == [REQUEST] * 2
    assert gate.seconds("shared", REQUEST * GEOMETRY.block_bytes) == pytest.approx(0.01 * REQUEST, rel=0.01)
    assert gate._tiers["shared"].fit.count == 1
    for number in range(2):
        server.bench.store.forget(f"r{number}")


def test_loads_behind_each_other_do_not_blame_the_tier_for_its_queue() -> None:
    gate = FittedGate()
    server = Server.over(Throttled(0.01, "read"), gate)
    chains = [chain(number, REQUEST) for number in range(4)]
    for keys in chains:
        server.keep(keys)
    for number, keys in enumerate(chains[:2]):
        server.bench.store.match(f"r{number}", keys)
    server.bench.turn()
    nbytes = REQUEST * GEOMETRY.block_bytes
    assert gate.seconds("shared", nbytes) == pytest.approx(0.01 * REQUEST, rel=0.05)
    assert gate.seconds("shared", 2 * nbytes) == pytest.approx(0.02 * REQUEST, rel=0.05)
    for number in range(2):
        server.bench.store.forget(f"r{number}")


def test_nobody_waits_for_a_load_much_longer_than_computing_would_take() -> None:
    server, keys = serving(10.0)
    for _ in range(5):
        server.request(keys)
    match = server.bench.store.match("r", keys)
    assert server.bench.workers[1].run_one() and match.pending, "the probe has answered, and the read does not come"
    server.bench.clock.advance(REQUEST * BLOCK)
    assert match.pending
    server.bench.clock.advance(REQUEST * BLOCK)
    assert not match.pending and match.blocks[0].reason is Reason.DEADLINE
    server.bench.store.forget("r")
    server.bench.store.prefetch(keys)
    server.bench.turn()
    assert server.bench.match(keys).hits == REQUEST, "it comes late, and is there for the next one"
    server.bench.store.forget("r")
    server.bench.idle()


def test_prefetches_are_read_whatever_the_gate_says() -> None:
    server, keys = serving(0.1)
    for _ in range(5):
        server.request(keys)
    server.bench.store.prefetch(keys)
    server.bench.turn()
    assert server.bench.arena.pool.ready == REQUEST, "nobody waits for them"
    assert server.bench.match(keys).hits == REQUEST
    server.bench.store.forget("r")
    server.bench.idle()


def test_a_try_that_hangs_is_the_only_one() -> None:
    server, keys = serving(0.1)
    server.request(keys)
    for number in range(400):
        match = server.bench.store.match(f"r{number}", keys)
        server.bench.workers[1].run_one(lambda count: count - 1)  # the probe, and never the read
        assert not match.pending
        server.bench.store.forget(f"r{number}")
        assert server.bench.workers[1].queued <= 1
    server.bench.turn()
    server.bench.idle()


@pytest.mark.parametrize(("mode", "kind"), [(GateMode.ON, FittedGate), (GateMode.OFF, OpenGate)])
def test_the_setting_decides_which_gate_a_store_has(mode: GateMode, kind: type[Gate]) -> None:
    store = open_store([TierUrl.parse("dram://?capacity=1MiB")], IDENTITY, StoreSettings(gate=mode), Metrics())
    assert isinstance(store._gate, Guarded) and type(store._gate.inner) is kind
    store.close()
    assert StoreSettings().gate is GateMode.ON


def test_a_load_is_answered_whatever_the_gate_makes_of_it() -> None:
    class Failing(OpenGate):
        def observe_load(self, *_: object) -> None:
            raise ZeroDivisionError

    bench = make_bench(gate=Failing())
    keys = chain(1, 2)
    bench.save(keys)
    transfer = bench.store.load(bench.match(keys), SlotRange(bench.memory, range(2)))
    with pytest.raises(ZeroDivisionError):
        bench.turn()
    assert all(outcome.done for outcome in transfer.result(0))
    bench.idle()


def test_a_store_whose_gate_fails_keeps_and_gives_blocks_all_the_same() -> None:
    class Failing(OpenGate):
        def keeps(self, *_: object) -> int:
            raise ZeroDivisionError

        decided = patience = seconds = observe_load = observe_save = observe_prefill = keeps  # type: ignore[assignment]

    url = TierUrl.parse("dram://?capacity=1MiB&prefault=false")
    store = open_store([url], IDENTITY, StoreSettings(), Metrics(), gate=Failing())
    keys, memory = chain(1, 2), EngineMemory(8)
    try:
        assert all(outcome.done for outcome in store.save(keys, filled(memory, keys)).result(10))
        store.observe_prefill(16, 1.0)
        match = store.match("r", keys)
        assert match.hits == 2
        assert all(outcome.done for outcome in store.load(match, SlotRange(memory, range(2))).result(10))
        assert store.drain(10.0) and store.check_integrity() == []
    finally:
        store.close()
