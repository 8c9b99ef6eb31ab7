"""Hit rates that lied: always 1.0, half the truth, counted again with every asking, at the load instead of the look-up."""

from __future__ import annotations

from pathlib import Path

from kvtier.abc.store import Hints, Reason
from kvtier.metrics import Metrics
from tests.store.builders import Bench, chain, make_bench


def counted(bench: Bench, tier: str) -> dict[str, int]:
    """What a tier's counters say: blocks looked up, hit, and missed by reason, without what is 0."""
    counts = {name: int(bench.metrics.value(f"kvtier_tier_{name}_total", tier=tier)) for name in ("lookups", "hits")}
    for reason in Reason:
        counts[reason.name] = int(
            bench.metrics.value("kvtier_tier_misses_total", tier=tier, reason=reason.name.lower())
        )
    return {name: count for name, count in counts.items() if count}


def test_counters_are_what_a_hand_counts(tmp_path: Path) -> None:
    """Known hits, partial hits, retries, aborts, failures: each block that was looked up once, in every tier."""
    bench = make_bench(16, nvme=tmp_path)
    bench.save(chain(1, 4))
    assert counted(bench, "dram") == {}, "a save looks nothing up"

    longer = chain(1, 6)  # four of six are there; asked, asked again twice, and loaded
    for _ in range(3):
        bench.match(longer, "a")
    assert bench.load(longer, "a") == 4
    assert counted(bench, "dram") == {"lookups": 6, "hits": 4, "NEVER_STORED": 1, "BEHIND_A_MISS": 1}
    assert counted(bench, "nvme") == {"lookups": 2, "NEVER_STORED": 1, "BEHIND_A_MISS": 1}

    bench.empty_dram()  # an abort before the answer
    bench.store.match("b", longer)
    bench.store.forget("b")
    bench.turn()
    assert counted(bench, "dram")["lookups"] == 6

    bench.empty_dram()  # they come from below
    assert bench.load(longer, "c") == 4
    assert counted(bench, "dram") == {"lookups": 12, "hits": 4, "BELOW": 4, "NEVER_STORED": 2, "BEHIND_A_MISS": 2}
    assert counted(bench, "nvme") == {"lookups": 8, "hits": 4, "NEVER_STORED": 2, "BEHIND_A_MISS": 2}

    slot = bench.arena.pool.slot(bench.store.geometry.addresses(longer)[1])  # the second does not prove at its load
    assert slot is not None
    bench.arena.view(slot)[0] ^= 1
    match = bench.match(longer, "d")
    assert (match.hits, bench.load(longer, "d")) == (4, 3)
    assert counted(bench, "dram")["hits"] == 8, "it was there when it was looked up"
    assert bench.metrics.value("kvtier_tier_sum_failures_total", tier="dram") == 1

    before = counted(bench, "dram")
    assert bench.match(longer, "e").hits == 1  # and misses from then on, with its reason
    bench.store.forget("e")
    after = counted(bench, "dram")
    assert after["hits"] - before["hits"] == 1
    assert (after["SUM_FAILED"], after["BEHIND_A_MISS"] - before["BEHIND_A_MISS"]) == (1, 4)

    bench.match(longer, "f", hints=Hints(no_load=True))
    bench.store.forget("f")
    assert counted(bench, "dram")["NO_LOAD"] == 1
    for tier in ("dram", "nvme"):
        total = counted(bench, tier)
        assert total.pop("lookups") == sum(total.values()), "every look-up is a hit or a miss with its reason"
    bench.idle()


def test_an_amount_that_cannot_be_raises_nothing_and_changes_nothing() -> None:
    metrics = Metrics()
    tier = metrics.tier("dram")
    tier.settled(3, {Reason.EVICTED: 1})
    for hits, misses in ((-1, {}), (float("nan"), {}), (1, {Reason.EVICTED: -5})):
        tier.settled(hits, misses)  # type: ignore[arg-type]  # what must not be
    assert metrics.value("kvtier_tier_lookups_total", tier="dram") == 4
    assert metrics.value("kvtier_tier_hits_total", tier="dram") == 3
    assert metrics.value("kvtier_metric_faults_total") == 3
