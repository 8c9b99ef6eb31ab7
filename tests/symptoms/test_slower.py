"""Slower with the cache than without: low reuse, slow tiers, full queues; and figures that hide it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.abc.store import Reason
from kvtier.config import resolve
from kvtier.cost import FittedGate, OpenGate
from kvtier.errors import ConfigError
from kvtier.testing.faults import Throttled
from tests.store.builders import chain, make_bench
from tests.store.test_gate import BLOCK, REQUEST, Server, cold


def test_a_tier_slower_than_computing_makes_requests_no_slower_than_no_cache() -> None:
    server = Server.over(Throttled(BLOCK / 0.2, "read"), FittedGate())
    cold(server)
    shared, rounds = chain(1, REQUEST), 200
    server.keep(shared)
    times = sorted(server.request(shared if number % 2 else chain(number, REQUEST)) for number in range(rounds))
    without = REQUEST * BLOCK
    assert times[rounds // 2] <= 1.03 * without and times[-1 - rounds // 50] <= 1.03 * without
    assert sum(times) <= 1.05 * rounds * without


def test_prompts_that_never_come_again_read_nothing_and_hold_nothing(tmp_path: Path) -> None:
    bench = make_bench(16, nvme=tmp_path / "n", gate=FittedGate())
    for number in range(50):
        keys = chain(number, 4)
        assert bench.match(keys).hits == 0
        bench.store.forget("r")
        bench.save(keys)
    assert bench.metrics.value("kvtier_tier_read_bytes_total", tier="nvme") == 0
    bench.idle()


def test_a_prefix_that_is_used_now_and_then_survives_a_flood_of_others() -> None:
    bench = make_bench(32)
    hot = chain(0, 4)
    bench.save(hot)
    for number in range(1, 200):
        bench.save(chain(number, 4))
        if number % 6 == 0:
            assert bench.load(hot) == 4


def test_a_tier_that_does_not_keep_up_holds_nobody_and_grows_nothing(tmp_path: Path) -> None:
    """Its writes stand still: saves go on until DRAM has no clean block left, then they are dropped, and all of it is counted."""
    dram = 16
    bench = make_bench(dram, nvme=tmp_path / "n", gate=OpenGate())
    bench.hand.stall(1)
    dropped = 0
    for number in range(100):
        outcomes = bench.save(chain(number, 2)).result(0)
        dropped += sum(not outcome.done for outcome in outcomes)
        assert bench.workers[1].queued <= 1
        assert len(bench.store._demoter.outboxes["nvme"].slots) <= dram // 2 + 1
    declined = bench.metrics.value("kvtier_tier_saves_dropped_total", tier="nvme", reason="queue_full")
    refused = bench.metrics.value("kvtier_tier_saves_dropped_total", tier="dram", reason="no_room")
    assert declined > 0 and refused == dropped
    bench.hand.release()
    bench.turn()
    bench.idle()


def test_loads_go_before_the_saves_that_have_piled_up(tmp_path: Path) -> None:
    bench = make_bench(32, nvme=tmp_path / "n", gate=OpenGate())
    wanted = chain(1, 4)
    bench.save(wanted)
    bench.empty_dram()
    bench.hand.stall(1)
    for number in range(2, 5):
        bench.save(chain(number, 4))
    assert bench.workers[1].queued
    match = bench.store.match("r", wanted)
    assert match.pending
    assert bench.workers[1].run_one()
    assert not match.pending and match.hits == 4, "the first that ran was the load"
    bench.store.forget("r")
    bench.hand.release()
    bench.turn()
    bench.idle()


def test_a_queue_at_a_tier_is_part_of_what_a_load_from_it_takes() -> None:
    server = Server.over(Throttled(BLOCK / 4, "read"), FittedGate())
    cold(server)
    chains = [chain(number, REQUEST) for number in range(1, 9)]
    for keys in chains:
        server.keep(keys)
    short = chain(100, 4)
    server.keep(short)
    for keys in (*chains[:6], short):
        server.request(keys)
    assert server.computed == 0
    for keys in chains[:2]:
        server.bench.store.prefetch(keys)
        server.bench.workers[1].run_one(lambda count: count - 1)  # the probe; the reads stand in line
    match = server.bench.store.match("r", short)
    server.bench.workers[1].run_one()
    assert not match.pending and match.blocks[0].reason is Reason.BELOW_BREAK_EVEN, "4 blocks behind 24"
    server.bench.store.forget("r")
    server.bench.turn()
    server.bench.idle()
    server.bench.empty_dram()
    assert server.bench.match(short).hits == 4, "and behind none they are worth it"
    server.bench.store.forget("r")


def test_hits_misses_and_verdicts_are_those_of_a_script() -> None:
    """Four requests for the same prompt of 12 blocks, and two for others, each asked for several times, two of them aborted."""
    server = Server.over(Throttled(BLOCK / 10, "read"), FittedGate())
    cold(server)
    bench, keys = server.bench, chain(1, REQUEST)
    server.keep(keys)
    bench.metrics.faults.inc(0)

    def count(what: str, tier: str) -> int:
        return int(bench.metrics.value(f"kvtier_tier_{what}_total", tier=tier))

    before = {what: (count(what, "dram"), count(what, "shared")) for what in ("lookups", "hits")}
    for number in range(4):
        match = bench.store.match(f"r{number}", keys)
        while match.pending:
            bench.store.match(f"r{number}", keys)
            bench.hand.run_one()
        if number % 2:
            assert bench.store.match(f"r{number}", keys) is match
        bench.store.forget(f"r{number}")
        bench.turn()
    for number in (100, 101):
        bench.match(chain(number, 3), f"r{number}")
        bench.store.forget(f"r{number}")
    shared_hits = count("hits", "shared") - before["hits"][1]
    dram_hits = count("hits", "dram") - before["hits"][0]
    assert (shared_hits, dram_hits) == (REQUEST, 3 * REQUEST), "read once, then in DRAM"
    assert count("lookups", "dram") - before["lookups"][0] == 4 * REQUEST + 2 * 3
    assert count("lookups", "shared") - before["lookups"][1] == REQUEST + 2 * 3
    assert bench.metrics.value("kvtier_metric_faults_total") == 0
    bench.idle()


@pytest.mark.parametrize(
    ("flags", "environ", "named"),
    [
        ({"gate": "maybe"}, {}, "gate"),
        ({}, {"KVTIER_GATES": "off"}, "KVTIER_GATE"),
        ({}, {"KVTIER_PREEMPTION": "swap"}, "preemption"),
    ],
)
def test_a_setting_that_cannot_be_is_an_error_that_names_what_can(
    flags: dict[str, object], environ: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        resolve(flags, environ)


def test_of_two_places_that_say_otherwise_the_flag_holds_and_its_source_is_told() -> None:
    effective = resolve({"gate": "on"}, {"KVTIER_GATE": "off"})
    assert effective.settings.store.gate.value == "on"
    assert effective.sources["store.gate"] == "flag --gate"
