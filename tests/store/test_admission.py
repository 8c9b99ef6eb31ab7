"""A lower tier that chooses: what it declines is explained, what it regrets is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.abc.store import Reason
from kvtier.config import AdmissionRule, EngineSettings, StoreSettings, TierUrl, WriteMode
from kvtier.errors import ConfigError
from kvtier.metrics import Metrics
from kvtier.store.open import open_store
from tests.store.builders import IDENTITY, Bench, chain, make_bench


def offers(bench: Bench, verdict: str) -> float:
    return bench.metrics.value("kvtier_tier_offers_total", tier="nvme", verdict=verdict)


def regrets(bench: Bench, regret: str) -> float:
    return bench.metrics.value("kvtier_tier_regrets_total", tier="nvme", regret=regret)


def written(bench: Bench) -> float:
    return bench.metrics.value("kvtier_tier_written_blocks_total", tier="nvme")


def test_what_comes_once_is_declined_and_says_so(tmp_path: Path) -> None:
    bench = make_bench(8, nvme=tmp_path, nvme_write=WriteMode.BACK, admission=AdmissionRule.SECOND)
    once = chain(1, 4)
    bench.save(once)
    assert bench.store.drain(0.0)
    assert (offers(bench, "declined"), written(bench)) == (4, 0)
    bench.empty_dram()
    assert bench.load(once) == 0
    assert bench.store.explain("r")[0].reason is Reason.DECLINED
    assert regrets(bench, "declined_and_wanted") == 4
    bench.save(once)  # it was computed again: that is the second time
    assert not bench.store.drain(0.0)
    bench.turn()
    assert (offers(bench, "admitted"), written(bench)) == (4, 4)
    bench.empty_dram()
    assert bench.load(once, "again") == 4


def test_a_use_in_dram_is_a_second_time(tmp_path: Path) -> None:
    bench = make_bench(8, nvme=tmp_path, nvme_write=WriteMode.BACK, admission=AdmissionRule.SECOND)
    bench.save(chain(1, 4))
    assert bench.load(chain(1, 2)) == 2
    bench.store.drain(0.0)
    bench.turn()
    assert written(bench) == 2


def test_through_is_offered_again_where_the_tier_chooses(tmp_path: Path) -> None:
    bench = make_bench(8, nvme=tmp_path, nvme_write=WriteMode.THROUGH, admission=AdmissionRule.SECOND)
    bench.save(chain(1, 3))
    assert written(bench) == 0
    bench.load(chain(1, 3))
    bench.turn()
    assert written(bench) == 3
    bench.load(chain(1, 3), "again")
    assert offers(bench, "admitted") == 3, "what the tier has is not offered again"


def test_a_budget_stops_writes_until_time_has_passed(tmp_path: Path) -> None:
    probe = make_bench(8)
    block = probe.arena.medium.slot_bytes
    bench = make_bench(16, nvme=tmp_path, nvme_write=WriteMode.THROUGH, write_budget=24 * (2 * block + 7))
    bench.save(chain(1, 5))
    assert (offers(bench, "admitted"), offers(bench, "over_budget"), written(bench)) == (2, 3, 2)
    left = bench.metrics.value("kvtier_tier_write_budget_left_bytes", tier="nvme")
    assert left == 7
    bench.clock.now += 7200
    bench.load(chain(1, 5))
    bench.turn()
    assert written(bench) == 4


def test_a_process_that_ends_again_and_again_writes_no_more_than_one_that_goes_on(tmp_path: Path) -> None:
    block, total = make_bench(8).arena.medium.slot_bytes, 0.0
    for life in range(8):
        bench = make_bench(16, nvme=tmp_path, nvme_write=WriteMode.THROUGH, write_budget=24 * 4 * block)
        bench.save(chain(2 * life, 6))
        bench.clock.now += 600
        bench.save(chain(2 * life + 1, 6))
        total += written(bench)
        bench.store.close()
    assert total == 4, "an hour's worth at first; ten minutes are not enough for a block"


def test_what_was_written_for_nothing_is_regretted(tmp_path: Path) -> None:
    bench = make_bench(64, nvme=tmp_path, nvme_write=WriteMode.THROUGH, write_budget=1 << 40)
    room = bench.tiers[0].counts()["free"]
    bench.save(chain(0, 1))
    bench.empty_dram()
    assert bench.load(chain(0, 1)) == 1
    for number in range(1, room // 32 + 2):
        bench.save(chain(number, 32))
        bench.empty_dram()
    gone = bench.metrics.value("kvtier_tier_evictions_total", tier="nvme", reason="evicted")
    assert bench.load(chain(0, 1)) == 0, "it went first"
    assert regrets(bench, "written_and_unused") == gone - 1 > 0, "what was read once was not written for nothing"
    bench.idle()


@pytest.mark.parametrize(
    ("tiers", "says"),
    [
        (["dram://?capacity=1MiB&admission=second"], "admission: dram takes every block"),
        (["dram://?capacity=1MiB", "nvme://{folder}?capacity=4MiB&write_budget=0"], "less than a block an hour"),
        (["dram://?capacity=1MiB", "nvme://{folder}?capacity=4MiB&write_budget=1kB"], "less than a block an hour"),
    ],
)
def test_options_that_would_do_nothing_are_refused(tiers: list[str], says: str, tmp_path: Path) -> None:
    urls = [TierUrl.parse(url.format(folder=tmp_path / "nvme")) for url in tiers]
    with pytest.raises(ConfigError, match=says):
        open_store(urls, IDENTITY, StoreSettings(), Metrics())
    assert EngineSettings().hbm_policy == "lru"
