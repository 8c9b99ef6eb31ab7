"""The real model gives the same tokens and the same logits wherever its prompt's blocks come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvtier.config import EngineSettings

from .support import House, Served, real_prompts, valkey

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

PROMPTS, BATCH, NEW_TOKENS = 20, 4, 64
LOWER = ("dram", "nvme", "redis")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder: Path = tmp_path_factory.mktemp("exactness")
    with valkey(folder / "valkey") as server:
        tiers = (
            "dram://?capacity=320MiB",
            f"nvme://{folder}/nvme?capacity=640MiB&write=through",
            f"{server.url}?write=through",
        )
        with House(tiers, EngineSettings(hbm_blocks=512, max_num_seqs=8)) as made:
            yield made


def expect_source(served: list[Served], read: dict[str, int], tier: str, block_bytes: int) -> None:
    """Every prompt's whole blocks came from ``tier``, and no other tier read anything but what went through DRAM."""
    external = sum(each.stats.external_tokens for each in served)
    hbm = sum(each.stats.hbm_tokens for each in served)
    usable = sum((each.stats.prompt_tokens - 1) // 16 * 16 for each in served)
    assert (hbm, external) == {"cold": (0, 0), "hbm": (usable, 0)}.get(tier, (0, usable)), tier
    expected = dict.fromkeys(LOWER, 0)
    if tier in LOWER:
        expected["dram"] = expected[tier] = external // 16 * block_bytes
    assert read == expected, tier


def test_tokens_and_logits_are_the_same_from_every_tier(house: House, seed: int) -> None:
    """Cold, then from each tier with the faster ones emptied; then second turns, which reach blocks made by decoding."""
    prompts = real_prompts(house.tokenizer, seed, PROMPTS, 240, 272)
    total = sum(map(len, prompts))
    print(f"seed {seed}: {PROMPTS} prompts, {total} tokens, batches of {BATCH}, {NEW_TOKENS} new tokens each")
    block_bytes = house.store.geometry.block_bytes
    cold: list[Served] = []
    second: list[Served] = []
    follow_ups: list[tuple[int, ...]] = []
    for tier in ("cold", "hbm", *LOWER):
        if tier != "cold":
            house.empty_above(tier)
        before = house.reads()
        served = house.in_batches(prompts, BATCH, NEW_TOKENS)
        house.settle()
        read = {name: count - before[name] for name, count in house.reads().items()}
        expect_source(served, read, tier, block_bytes)
        if tier == "cold":
            cold = served
            follow_ups = [
                (*prompt, *each.tokens, *house.tokenizer.encode("\nAnd then?"))
                for prompt, each in zip(prompts, served, strict=True)
            ]
            house.in_batches(follow_ups, BATCH, 1)  # so that every later one finds the same blocks
            house.settle()
            continue
        for number, (each, first) in enumerate(zip(served, cold, strict=True)):
            assert each.tokens == first.tokens, f"prompt {number} from {tier}"
            if house.engine.config.exact:
                assert torch.equal(each.logits, first.logits), f"prompt {number} from {tier}"
        house.empty_above(tier)
        before = house.reads()
        turn = house.in_batches(follow_ups, BATCH, 1)
        read = {name: count - before[name] for name, count in house.reads().items()}
        expect_source(turn, read, tier, block_bytes)
        second = second or turn
        for number, (each, first) in enumerate(zip(turn, second, strict=True)):
            assert torch.equal(each.logits, first.logits), f"second turn {number} from {tier} and from HBM"
        house.settle()
    print(f"exact: {house.engine.config.exact}; equal from {', '.join(('hbm', *LOWER))}")
    house.expect_idle()
