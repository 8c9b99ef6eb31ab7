"""``kvtier plan``: what it says of a machine, what it proposes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.cli.main import main
from kvtier.errors import ConfigError
from kvtier.key import Address
from kvtier.sim.models import GPUS, LINKS, gpu, model_shape
from kvtier.sim.planner import Link, kv_bytes
from kvtier.sim.replay import Counting, Workload, workload
from kvtier.sim.sizing import Demand, fewest_gpus, gpus_for, needs_of, planned, pool_of, proposed
from kvtier.sim.traces import Reference

SMALL, LARGE, H100 = model_shape("llama-3-8b"), model_shape("llama-3-70b"), gpu("h100")
DEMAND = Demand(4096, 512, 64)
LOWER = [LINKS["nvme"], LINKS["redis"]]


def test_machines_are_as_large_as_model_and_requests_need() -> None:
    assert fewest_gpus(LARGE, H100, DEMAND) == 2, "141 GB of weights, 72 GB usable each"
    assert gpus_for(LARGE, H100, DEMAND) == 4, "97 GB for 64 sequences as well"
    assert gpus_for(LARGE, H100, Demand(4096, 512, 1 << 16)) == 8, "no more than a machine has"
    assert fewest_gpus(model_shape("llama-3.1-405b"), H100, DEMAND) == 16
    with pytest.raises(ConfigError, match="do not fit on 64 x h100"):
        fewest_gpus(LARGE, H100, Demand(1 << 24, 1, 1))


def test_the_pool_of_eight_h100() -> None:
    pool = pool_of(LARGE, H100.times(8), DEMAND)
    assert pool.nbytes == pytest.approx(432e9, rel=0.01)
    assert pool.blocks == pytest.approx(82_000, rel=0.02)
    assert pool.sequences == pool.blocks // (4608 // 16)
    assert pool.paged_share > 0.96 > pool.slab_share
    with pytest.raises(ConfigError, match="at least 2 are needed"):
        pool_of(LARGE, H100, DEMAND)


def chains(count: int, blocks: int) -> list[tuple[Address, ...]]:
    names = [Address(number.to_bytes(16, "big")) for number in range(count * blocks)]
    return [tuple(names[start : start + blocks]) for start in range(0, count * blocks, blocks)]


def repeated(chain_blocks: int, rounds: int, others: int = 0) -> Workload:
    """One chain again and again, each time followed by ``others`` that never come back."""
    hot, *cold = chains(1 + rounds * others, chain_blocks)
    order = [chain for turn in range(rounds) for chain in (hot, *cold[turn * others : (turn + 1) * others])]
    requests = [Reference(float(i), chain, 16 * chain_blocks, 1) for i, chain in enumerate(order)]
    return workload(requests, 16, Counting())


def test_a_trace_says_where_its_hits_saturate() -> None:
    needs = needs_of(repeated(10, 40, others=4), SMALL)
    assert needs.working_set == 10 * 161 * kv_bytes(SMALL, 16)
    assert needs.saturating is not None
    assert needs.saturating.hit_rate == needs.reuse == 0.2
    assert [size.hit_rate for size in needs.sizes[:-1]] == [0.0] * (len(needs.sizes) - 1)
    assert needs_of(repeated(10, 1, others=20), SMALL).saturating is None
    few = [size.blocks for size in needs_of(repeated(1, 20, others=1), SMALL).sizes]
    assert few == sorted(set(few)), "each size once"


def test_tiers_are_proposed_where_they_can_be_hit_and_are_faster_than_computing() -> None:
    machine = H100.times(2)
    pool = pool_of(SMALL, machine, DEMAND)
    dram, nvme, redis = proposed(SMALL, machine, DEMAND, pool, [Link("nvme", 20e9), LINKS["redis"]], None)
    assert (dram.tier, dram.nbytes) == ("dram", 2 * pool.nbytes)
    assert (nvme.tier, nvme.nbytes) == ("nvme", 4 * dram.nbytes)
    assert redis.nbytes == 0
    assert "slower than computing" in redis.why
    asked = proposed(SMALL, machine, DEMAND, pool, [Link("nvme", 20e9)], None, 10**12)
    assert [each.nbytes for each in asked] == [1e12, 4e12]


def test_tiers_follow_the_trace_where_there_is_one() -> None:
    pool = pool_of(SMALL, H100, DEMAND)
    fast = [Link("nvme", 20e9)]
    small = needs_of(repeated(100, 40, others=4), SMALL)
    assert small.saturating is not None
    (none,) = proposed(SMALL, H100, DEMAND, pool, fast, small)
    assert none.nbytes == 0
    assert "HBM holds" in none.why
    (never,) = proposed(SMALL, H100, DEMAND, pool, fast, needs_of(repeated(10, 1, others=20), SMALL))
    assert "nothing in the trace is used twice" in never.why
    tight = pool_of(SMALL, H100, Demand(4096, 512, 64, hbm_share=0.2158))
    assert tight.nbytes < small.saturating.nbytes < 2 * tight.nbytes
    dram, nvme = proposed(SMALL, H100, DEMAND, tight, fast, small)
    assert dram.nbytes == small.saturating.nbytes
    assert (nvme.nbytes, nvme.why) == (0, "DRAM holds what the trace hits")


def test_unlike_gpus_are_ordered_by_cost() -> None:
    plan = planned(
        SMALL, H100, DEMAND, ways=[Link("pcie", 64e9)], network=LINKS["400gb"], lower=LOWER, gpus=list(GPUS.values())
    )
    costs = [pair.split.cost for pair in plan.pairs]
    assert costs == sorted(costs)
    assert {pair.prefill for pair in plan.pairs} >= {"h100", "mi300x", "rtx-4090"}
    alike = next(pair for pair in plan.pairs if (pair.prefill, pair.decode) == ("h100", "h100"))
    assert alike.split.cost == pytest.approx(plan.shared_cost)


# -- the command


def plan(*arguments: str) -> int:
    return main(["plan", "--model", "llama-3-70b", *arguments])


def test_the_whole_plan_in_words_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "plan.json"
    assert plan("--utilisation", "1", "--gpus", "8", "--link", "pcie=8GB/s", "--json", str(report)) == 0
    told = capsys.readouterr().out
    for words in (
        "327,680 bytes per token, 5,242,880 per block of 16",
        "pcie (dram)",
        "nvlink",
        "400gb",
        "nvme",
        "redis",
    ):
        assert words in told
    assert "(published: 20.4% to 38.2%)" in told
    assert "swapping is cheaper (41.9 ms out and back over PCIe" in told
    assert "400gb 50 26.8 ms" in " ".join(told.split())
    plain = json.loads(report.read_text())
    assert plain["context_bytes"] == 4096 * 327_680
    assert plain["prefill_seconds_without_attention"] == pytest.approx(0.584 / 8, rel=0.001)
    assert {"pool", "ways", "split", "pairs", "tiers", "break_even_bandwidth"} <= set(plain)
    assert plain["split"]["pays"] is True


def test_a_dram_tier_smaller_than_the_hbm_cache_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--dram", "100GiB") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "DRAM tier of 100GiB is smaller than the HBM cache of 136.8GiB" in err
    assert "never hit" in err
    assert plan("--dram", "200GiB") == 0
    assert "1.5 x the HBM cache" in capsys.readouterr().out


def test_prices_and_lengths_are_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": i, "input_length": 1000, "output_length": 10, "hash_ids": [0, 1]} for i in range(4)]
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    assert plan("--trace", str(trace), "--price", "h100=100", "--price", "h20=0.01") == 0
    told = capsys.readouterr().out
    assert "A prompt of 1,000 tokens" in told
    assert "1,000 + 10 tokens" in told
    assert "trace.jsonl (mooncake): 4 requests" in told
    assert "HBM holds the" in told
    cheapest = told.partition("USD per 1,000\n")[2].splitlines()[0]
    assert cheapest.split()[:6] == ["2", "x", "h20", "2", "x", "h20"], "as priced"
    assert plan("--trace", str(trace), "--context", "2000") == 0
    assert "2,000 + 10 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu", "h1000"], "did you mean 'h100'"),
        (["--gpus", "0"], "--gpus 0"),
        (["--gpus", "1"], "at least 2 are needed"),
        (["--context", "0"], "--context 0: must be above 0 and at most 1,073,741,824"),
        (["--context", "0", "--trace", "not-read.jsonl"], "--context 0: must be above 0"),
        (["--output", "0", "--trace", "not-read.jsonl"], "--output 0: must be above 0"),
        (["--utilisation", "1.5"], "--utilisation 1.5: must be above 0 and at most 1"),
        (["--utilisation", "nan"], "--utilisation nan"),
        (["--price", "h100"], "write NAME=VALUE"),
        (["--price", "h10=1"], "did you mean 'h100'"),
        (["--price", "h100=much"], "'much' is not a number"),
        (["--price", "h100=-1"], "a price is 0 or more"),
        (["--link", "nvm=1GB"], "did you mean 'nvme'"),
        (["--link", "nvme=fast"], "is not a size"),
        (["--link", "nvme=0"], "must be above 0"),
        (["--dram", "lots"], "is not a size"),
        (["--kv-dtype", "fp17"], "did you mean 'fp16'"),
        (["--trace", "none.jsonl"], "none.jsonl"),
        (["--json", "none/plan.json"], "--json none/plan.json"),
        (["--model", "lama-3-70b"], "did you mean 'llama-3-70b'"),
    ],
)
def test_what_is_wrong_is_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*flags) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
