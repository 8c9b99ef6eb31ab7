"""Statistics that do not lie and do not raise."""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.abc.store import Reason
from kvtier.metrics import EngineMetrics, Metrics, TierMetrics


class Colour(enum.Enum):
    RED = "a colour"


def test_lookups_are_hits_and_misses_whatever_happens() -> None:
    metrics = Metrics()
    dram, nvme = metrics.tier("dram"), metrics.tier("nvme")
    dram.settled(3, {Reason.NEVER_STORED: 2})
    dram.settled(0, {Reason.EVICTED: 1, Reason.NEVER_STORED: 4})
    nvme.settled(5, {})
    assert metrics.value("kvtier_tier_lookups_total", tier="dram") == 10
    assert metrics.value("kvtier_tier_hits_total", tier="dram") == 3
    assert metrics.value("kvtier_tier_misses_total", tier="dram", reason="never_stored") == 6
    assert metrics.value("kvtier_tier_misses_total", tier="dram", reason="evicted") == 1
    assert (
        metrics.value("kvtier_tier_lookups_total", tier="nvme")
        == metrics.value("kvtier_tier_hits_total", tier="nvme")
        == 5
    )


def test_what_moved_is_counted_in_blocks_bytes_and_time() -> None:
    metrics = Metrics()
    tier = metrics.tier("nvme")
    tier.read(2, 4096, 0.5)
    tier.written(3, 6144, 0.25)
    assert metrics.value("kvtier_tier_read_blocks_total", tier="nvme") == 2
    assert metrics.value("kvtier_tier_read_bytes_total", tier="nvme") == 4096
    assert metrics.value("kvtier_tier_written_blocks_total", tier="nvme") == 3
    assert metrics.value("kvtier_tier_written_bytes_total", tier="nvme") == 6144
    assert metrics.value("kvtier_tier_transfer_seconds_sum", tier="nvme", verb="read") == 0.5
    assert metrics.value("kvtier_tier_transfer_seconds_count", tier="nvme", verb="write") == 1


def test_reasons_failures_and_gauges_carry_their_labels() -> None:
    metrics = Metrics()
    tier = metrics.tier("redis")
    tier.evicted(Colour.RED, 2)
    tier.save_dropped("queue_full")
    tier.sum_failed()
    tier.failed("probe")
    tier.queued("load", 7)
    tier.queued("load", 1)
    tier.set_degraded(True)
    tier.blocks(free=1, writing=2, ready=3, retiring=4)
    assert metrics.value("kvtier_tier_evictions_total", tier="redis", reason="red") == 2
    assert metrics.value("kvtier_tier_saves_dropped_total", tier="redis", reason="queue_full") == 1
    assert metrics.value("kvtier_tier_sum_failures_total", tier="redis") == 1
    assert metrics.value("kvtier_tier_failures_total", tier="redis", verb="probe") == 1
    assert metrics.value("kvtier_tier_queue_depth", tier="redis", kind="load") == 1
    assert metrics.value("kvtier_tier_degraded", tier="redis") == 1
    states = ("free", "writing", "ready", "retiring")
    assert [metrics.value("kvtier_tier_blocks", tier="redis", state=state) for state in states] == [1, 2, 3, 4]


def test_the_engine_counts_each_prompt_token_by_where_it_came_from() -> None:
    metrics = Metrics()
    engine = metrics.engine
    engine.prompt_tokens("computed", 100)
    engine.prompt_tokens("nvme", 16)
    engine.generated(3)
    engine.preempted()
    engine.finished("stop")
    engine.queue(running=2, waiting=5)
    engine.first_token(0.2)
    engine.next_token(0.01)
    assert metrics.value("kvtier_prompt_tokens_total", source="nvme") == 16
    assert metrics.value("kvtier_generated_tokens_total") == 3
    assert metrics.value("kvtier_preemptions_total") == 1
    assert metrics.value("kvtier_requests_total", outcome="stop") == 1
    assert metrics.value("kvtier_requests_waiting") == 5
    assert metrics.value("kvtier_first_token_seconds_count") == metrics.value("kvtier_inter_token_seconds_count") == 1


Wrong = Callable[[TierMetrics, EngineMetrics], None]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda tier, engine: tier.settled(-1, {}),
        lambda tier, engine: tier.settled(1, {Reason.EVICTED: -1}),
        lambda tier, engine: tier.settled(1, cast("Any", None)),
        lambda tier, engine: tier.read(1, -1, 0.0),
        lambda tier, engine: tier.written(1, 1, math.nan),
        lambda tier, engine: tier.evicted(Reason.EVICTED, -2),
        lambda tier, engine: tier.save_dropped("x", cast("Any", "many")),
        lambda tier, engine: tier.queued("load", -1),
        lambda tier, engine: tier.blocks(free=-1, writing=0, ready=0, retiring=0),
        lambda tier, engine: engine.prompt_tokens("hbm", -16),
        lambda tier, engine: engine.first_token(-0.1),
        lambda tier, engine: engine.next_token(math.inf),
        lambda tier, engine: engine.generated(cast("Any", None)),
    ],
)
def test_nonsense_neither_raises_nor_counts(wrong: Wrong, caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    tier = metrics.tier("dram")
    before = samples(metrics)
    with caplog.at_level(logging.WARNING):
        wrong(tier, metrics.engine)
        wrong(tier, metrics.engine)
    assert metrics.value("kvtier_metric_faults_total") == 2
    assert {name: value for name, value in samples(metrics).items() if "faults" not in name} == {
        name: value for name, value in before.items() if "faults" not in name
    }
    assert len(caplog.records) == 1, "one line in the log, not one per fault"


def samples(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        f"{s.name}{s.labels}": s.value for family in families for s in family.samples if not s.name.endswith("_created")
    }


def test_rendering_gives_zeros_before_anything_happened() -> None:
    metrics = Metrics()
    metrics.tier("dram")
    shown = samples(metrics)
    assert shown["kvtier_tier_hits_total{'tier': 'dram'}"] == 0
    assert shown["kvtier_tier_degraded{'tier': 'dram'}"] == 0


def test_two_stores_in_a_process_do_not_mix() -> None:
    one, other = Metrics(), Metrics()
    one.tier("dram").settled(1, {})
    assert one.tier("dram") is one.tier("dram")
    assert other.value("kvtier_tier_hits_total", tier="dram") == 0


def test_who_decides_is_shown_by_tier_and_totals_only_grow() -> None:
    metrics = Metrics()
    hits = {"lru": 3.0, "arc": 5.5}
    metrics.tier("nvme").chose(current="arc", switches=1, references=10, hits=hits)
    metrics.tier("nvme").chose(current="lru", switches=2, references=14, hits={**hits, "lru": 4.0})
    metrics.policy.chose("hbm", current="lru", switches=0, references=0, hits=hits)
    assert metrics.value("kvtier_policy_current", tier="nvme", policy="lru") == 1
    assert metrics.value("kvtier_policy_current", tier="nvme", policy="arc") == 0
    assert metrics.value("kvtier_policy_switches_total", tier="nvme") == 2
    assert metrics.value("kvtier_policy_references_total", tier="nvme") == 14
    assert metrics.value("kvtier_policy_shadow_hits_total", tier="nvme", policy="lru") == 4
    assert metrics.value("kvtier_policy_shadow_hits_total", tier="nvme", policy="arc") == 5.5
    assert b'kvtier_tier_lookups_total{tier="hbm"}' not in metrics.render(), "no tier of the store's"
    assert metrics.value("kvtier_metric_faults_total") == 0
