"""Who stays and who is written: floods of prompts that come once, under every policy and admission rule."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from kvtier import policy
from kvtier.config import AdmissionRule, StoreSettings, TierUrl, WriteMode
from kvtier.errors import ConfigError
from kvtier.metrics import Metrics
from kvtier.store.open import open_store
from tests.store.builders import IDENTITY, Bench, chain, make_bench

DRAM = 40


def kept(bench: Bench, every: int) -> int:
    """A prefix of 4 blocks that two requests have used, and one in ``every`` uses; the others come once. Hits of its uses."""
    hot, hits = chain(0, 4), 0
    bench.save(hot)
    for name in ("a", "b"):
        bench.load(hot, name)
    for number in range(1, 150):
        bench.save(chain(number, 4))
        if number % every == 0:
            hits += bench.load(hot, f"r{number}")
            bench.save(hot)
    return hits


@pytest.mark.parametrize("name", sorted(set(policy.names()) - {"fifo"}))
def test_under_every_policy_what_is_used_outlives_what_comes_once(name: str) -> None:
    bench = make_bench(DRAM, policy=partial(policy.make, name))
    assert kept(bench, 5) == 29 * 4
    bench.idle()


@pytest.mark.parametrize("name", ["slru", "arc", "s3fifo", "sieve", "lfu"])
def test_a_flood_larger_than_the_pool_leaves_what_was_used_more_than_once(name: str) -> None:
    """Between two uses of the prefix one and a half times DRAM comes and goes; LRU has lost it each time."""
    assert kept(make_bench(DRAM, policy=partial(policy.make, "lru")), 15) == 0
    assert kept(make_bench(DRAM, policy=partial(policy.make, name)), 15) == 9 * 4


def test_prompts_that_come_once_wear_no_flash_out(tmp_path: Path) -> None:
    bench = make_bench(16, nvme=tmp_path, nvme_write=WriteMode.BACK, admission=AdmissionRule.SECOND)
    for number in range(50):
        bench.save(chain(number, 4))
        bench.store.keep()
        bench.turn()
    assert bench.metrics.value("kvtier_tier_evictions_total", tier="dram", reason="evicted") > 100
    assert bench.metrics.value("kvtier_tier_written_bytes_total", tier="nvme") == 0
    bench.idle()


@pytest.mark.parametrize("option", ["policy=arc", "policy=lru"])
def test_a_policy_that_a_tier_would_not_follow_is_refused(option: str) -> None:
    tiers = [TierUrl.parse(url) for url in ("dram://?capacity=1MiB", f"memory://?{option}")]
    with pytest.raises(ConfigError, match=r"policy: memory:// itself chooses what goes"):
        open_store(tiers, IDENTITY, StoreSettings(), Metrics())


def test_stats_and_metrics_tell_who_decides_where_the_policy_is_adaptive(tmp_path: Path) -> None:
    bench = make_bench(8, nvme=tmp_path, policy=partial(policy.make, "adaptive"))
    bench.save(chain(1, 4))
    assert bench.load(chain(1, 4)) == 4
    told = bench.store.stats()["policy"]
    assert isinstance(told, dict)
    assert told["dram"]["current"] == told["nvme"]["current"] == "lru"
    assert (told["dram"]["references"], told["dram"]["switches"]) == (8, 0)
    assert told["dram"]["hits"] == {"lru": 4.0, "arc": 4.0, "s3fifo": 4.0}
    assert bench.metrics.value("kvtier_policy_current", tier="dram", policy="lru") == 1
    assert bench.metrics.value("kvtier_policy_shadow_hits_total", tier="dram", policy="arc") == 4
    bench.idle()
    assert make_bench(8).store.stats()["policy"] == {}
