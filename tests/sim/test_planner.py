"""The field's arithmetic against numbers that stand in papers and on model cards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.sim.models import GPUS, LINKS, MODELS, gpu, model_shape, shape_of
from kvtier.sim.planner import (
    PUBLISHED_PAGED_SHARE,
    PUBLISHED_SLAB_SHARES,
    UTILISATION,
    Link,
    Piece,
    attention_flops,
    blocks_in,
    break_even_bandwidth,
    break_even_tokens,
    colocated_cost,
    decode_seconds,
    disaggregate,
    kv_bytes,
    paged_useful_share,
    prefill_seconds,
    slab_useful_share,
    step_seconds,
    swap_seconds,
    transfer_seconds,
    weight_flops,
    weights_touched,
)

H100 = gpu("h100")
LARGE, SMALL = model_shape("llama-3-70b"), model_shape("llama-3-8b")
PCIE = Link("PCIe", H100.pcie)


@pytest.mark.parametrize(
    ("model", "nbytes"),
    [
        ("llama-2-7b", 512 << 10),
        ("falcon-7b", 8 << 10),
        ("llama-3-8b", 128 << 10),
        ("llama-3-70b", 320 << 10),
        ("deepseek-v3", 70_272),
        ("smollm2-135m", 23_040),
    ],
)
def test_bytes_per_token_are_those_of_the_papers(model: str, nbytes: int) -> None:
    shape = model_shape(model)
    assert kv_bytes(shape, 1) == nbytes
    assert shape.layout(16).block_bytes == 16 * nbytes


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("mistral-7b", 7_248_023_552),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("mixtral-8x7b", 46_702_792_704),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_weights_are_counted_as_model_cards_count_them(model: str, parameters: int) -> None:
    assert model_shape(model).parameters == parameters


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [("deepseek-v3", 671e9, 37e9), ("qwen3-30b-a3b", 30.5e9, 3.3e9), ("falcon-7b", 6.92e9, 6.92e9)],
)
def test_experts_are_counted_apart(model: str, total: float, active: float) -> None:
    shape = model_shape(model)
    assert shape.parameters == pytest.approx(total, rel=0.02)
    assert shape.active == pytest.approx(active, rel=0.02)
    assert weights_touched(shape, 1) == pytest.approx(shape.active)
    assert shape.active <= weights_touched(shape, 16) <= weights_touched(shape, 100_000) <= shape.parameters


def test_a_prompt_of_70b_swapped_recomputed_and_shipped() -> None:
    nbytes = kv_bytes(LARGE, 4096)
    assert nbytes == pytest.approx(1.34e9, rel=0.005)
    assert swap_seconds(nbytes, PCIE) == pytest.approx(0.042, abs=0.0005)
    assert prefill_seconds(LARGE, H100, 4096, utilisation=1, attention=False) == pytest.approx(0.584, abs=0.0005)
    assert transfer_seconds(nbytes, LINKS["400gb"]) == pytest.approx(0.027, abs=0.0005)


def test_what_432_gb_hold() -> None:
    assert blocks_in(432e9, LARGE, 16) == pytest.approx(82_000, rel=0.01)
    assert blocks_in(-1, LARGE, 16) == 0


def test_break_even_bandwidth_of_large_gpus() -> None:
    slow = break_even_bandwidth(LARGE, H100, 4096, utilisation=0.4, attention=False)
    fast = break_even_bandwidth(SMALL, H100, 4096, utilisation=0.6, attention=False)
    assert slow == pytest.approx(0.9e9, rel=0.05)
    assert fast == pytest.approx(5e9, rel=0.05)
    assert break_even_bandwidth(SMALL, H100, 100_000) < break_even_bandwidth(SMALL, H100, 1000)


def test_at_the_break_even_bandwidth_loading_takes_as_long_as_computing() -> None:
    bandwidth = break_even_bandwidth(SMALL, H100, 3000)
    loading = transfer_seconds(kv_bytes(SMALL, 3000), Link("tier", bandwidth))
    assert loading == pytest.approx(prefill_seconds(SMALL, H100, 3000))


@pytest.mark.parametrize(("bandwidth", "latency"), [(6.5e9, 0.01), (6.5e9, 0.05), (3.9e9, 1e-4), (64e9, 0.0)])
def test_a_prefix_is_worth_loading_from_some_length_on(bandwidth: float, latency: float) -> None:
    long, tier = model_shape("llama-3.1-8b"), Link("tier", bandwidth, latency)
    tokens = break_even_tokens(long, H100, tier)
    assert tokens is not None

    def gained(count: int) -> bool:
        flops = weight_flops(long, count) + attention_flops(long, Piece(0, count))
        return transfer_seconds(kv_bytes(long, count), tier) < flops / (H100.flops * UTILISATION)

    assert gained(tokens)
    assert tokens == 1 or not gained(tokens - 1)


def test_no_prompt_is_long_enough_for_a_tier_that_is_too_slow() -> None:
    assert break_even_tokens(SMALL, H100, Link("slow", 1e9)) is None


def test_slab_and_paged_shares_beside_the_published_ones() -> None:
    # ShareGPT as the paper describes it: 161 tokens in, 338 out, spread about as wide as it is long; room for 2,048.
    share = slab_useful_share(161, 338, 2048, spread=338)
    assert PUBLISHED_SLAB_SHARES["reserve the longest"] <= share <= PUBLISHED_SLAB_SHARES["reserve as if foretold"]
    assert sorted(PUBLISHED_SLAB_SHARES.values())[::2] == [0.204, 0.382]
    assert paged_useful_share(161 + 338, 16) > 0.96
    assert PUBLISHED_PAGED_SHARE > 0.96
    assert paged_useful_share(100, 1) == 1
    assert slab_useful_share(4096, 0, 2048) == 1


def test_attention_counts_every_pair_once() -> None:
    whole = attention_flops(SMALL, Piece(0, 300))
    parts = attention_flops(SMALL, Piece(0, 100)) + attention_flops(SMALL, Piece(100, 200))
    assert whole == parts
    pairs = sum(range(1, 301))
    assert whole == pairs * 4 * 32 * 32 * 128


@pytest.mark.parametrize(("past", "new"), [(0, 10), (0, 50), (10, 20), (30, 5), (19, 1), (20, 1)])
def test_a_window_bounds_what_is_kept_and_what_is_seen(past: int, new: int) -> None:
    raw = {**MODELS["mistral-7b"][1], "sliding_window": 20}
    shape = shape_of("windowed", raw, "bf16")
    seen = sum(min(position + 1, 20) for position in range(past, past + new))
    assert attention_flops(shape, Piece(past, new)) == seen * 4 * 32 * 32 * 128
    assert kv_bytes(shape, 50) == kv_bytes(shape, 20) == 20 * (128 << 10)


def test_a_step_is_bound_by_memory_when_small_and_by_products_when_large() -> None:
    alone = decode_seconds(SMALL, H100, 1000, 1)
    assert alone == pytest.approx(SMALL.weight_bytes / H100.memory_bandwidth, rel=0.05)
    assert decode_seconds(SMALL, H100, 1000, 16) < 2 * alone
    assert step_seconds(SMALL, H100, [Piece(0, 4096)]) == prefill_seconds(SMALL, H100, 4096)
    assert step_seconds(SMALL, H100, []) == 0
    assert prefill_seconds(SMALL, H100.times(2), 4096) == pytest.approx(prefill_seconds(SMALL, H100, 4096) / 2)


def test_disaggregation_pays_where_shipping_takes_less_than_the_prefills_of_others() -> None:
    fast = disaggregate(SMALL, H100, H100, LINKS["400gb"], context=4096, output=256, batch=32)
    assert fast.pays
    assert not disaggregate(SMALL, H100, H100, LINKS["400gb"], context=4096, output=256, batch=1).pays
    assert not disaggregate(SMALL, H100, H100, Link("slow", 1e6), context=4096, output=256, batch=32).pays
    both = colocated_cost(SMALL, H100, context=4096, output=256, batch=32)
    assert fast.cost == pytest.approx(both), "unlike GPUs alone change the cost"
    cheap = disaggregate(SMALL, H100, gpu("h20"), LINKS["400gb"], context=4096, output=256, batch=32)
    assert cheap.prefill_seconds == fast.prefill_seconds
    assert cheap.cost < both


def test_a_config_file_gives_what_the_table_gives(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS["deepseek-v3"][1]))
    for given in (folder, folder / "config.json"):
        shape = model_shape(str(given))
        assert shape.name == "mine"
        assert (shape.parameters, shape.groups) == (
            model_shape("deepseek-v3").parameters,
            model_shape("deepseek-v3").groups,
        )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ("{}", "no num_hidden_layers"),
        (json.dumps({**MODELS["llama-3-8b"][1], "num_hidden_layers": "32"}), "num_hidden_layers must be"),
        (json.dumps({**MODELS["llama-3-8b"][1], "num_attention_heads": 0}), "whole number from 1, is 0"),
        (json.dumps({**MODELS["llama-3-8b"][1], "num_key_value_heads": 0}), "whole number from 1, is 0"),
        (json.dumps({**MODELS["llama-3-8b"][1], "num_key_value_heads": 3}), "32 heads do not share 3 KV heads evenly"),
        (json.dumps({**MODELS["llama-3-8b"][1], "hidden_size": 1e308}), r"whole number from 1, is 1e\+308$"),
        (json.dumps({**MODELS["llama-3-8b"][1], "hidden_size": 10**300}), r"is 1000000000.{30}$"),
        (json.dumps({**MODELS["llama-3-8b"][1], "head_dim": None, "num_attention_heads": 24}), "no whole number of 24"),
        (json.dumps({**MODELS["llama-3-8b"][1], "intermediate_size": 0}), "intermediate_size must be .* from 1"),
        (json.dumps({**MODELS["llama-3-8b"][1], "vocab_size": 0}), "vocab_size must be .* from 1"),
        (json.dumps({**MODELS["llama-3-8b"][1], "max_position_embeddings": 0}), "must be .* from 1"),
        (
            json.dumps({**MODELS["llama-3-8b"][1], "sliding_window": 8, "layer_types": ["full_attention"] * 40}),
            "each of 32",
        ),
        (json.dumps({**MODELS["llama-3-8b"][1], "sliding_window": 8, "layer_types": "full"}), "each of 32"),
        (json.dumps({**MODELS["mixtral-8x7b"][1], "num_experts_per_tok": 9}), "9 of 8 experts"),
        (json.dumps({**MODELS["deepseek-v3"][1], "first_k_dense_replace": 62}), "is 62, of 61 layers"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_broken_config_is_one_line_that_names_it(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words) as caught:
        model_shape(str(path))
    assert "\n" not in str(caught.value)


def test_where_every_expert_is_asked_all_weights_are_touched() -> None:
    shape = shape_of("all", {**MODELS["mixtral-8x7b"][1], "num_experts_per_tok": 8}, "bf16")
    assert weights_touched(shape, 1) == shape.parameters == shape.active


def test_llama_3_70b_on_h100_by_hand() -> None:
    """80 layers, 8 of 64 heads for K and V, 128 wide, two bytes; 989.4 TFLOP/s at half; 70.55 billion weights."""
    per_token = 2 * 80 * 8 * 128 * 2
    assert kv_bytes(LARGE, 1) == per_token == 327_680
    products = 2 * 70_553_706_496 * 4096
    pairs = 4096 * 4097 / 2
    attention = 80 * pairs * 2 * 64 * (128 + 128)
    seconds = (products + attention) / (989.4e12 * 0.5)
    assert prefill_seconds(LARGE, H100, 4096) == pytest.approx(seconds)
    assert break_even_bandwidth(LARGE, H100, 4096) == pytest.approx(4096 * per_token / seconds)
    behind = (2 * 70_553_706_496 * 1024 + 80 * (1024 * 3072 + 1024 * 1025 / 2) * 2 * 64 * 256) / (989.4e12 * 0.5)
    assert prefill_seconds(LARGE, H100, 1024, past=3072) == pytest.approx(behind), "new tokens see those before them"
    step = (2 * 70_553_706_496 + 64 * 4096 * per_token) / 3.35e12
    assert decode_seconds(LARGE, H100, 4096, 64) == pytest.approx(step), "a step reads the weights once and all KV"


def test_unknown_names_are_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama-3-70b'"):
        model_shape("lama-3-70b")
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        gpu("h10")
    with pytest.raises(ConfigError, match="did you mean 'bf16'"):
        model_shape("llama-3-8b", "bf6")
    with pytest.raises(ConfigError, match="cannot read"):
        model_shape(str(tmp_path / "none.json"))


def test_every_number_of_the_tables_has_a_source() -> None:
    assert all(model_shape(name).source for name in MODELS)
    assert all(each.source and each.hourly > 0 for each in GPUS.values())
    assert all(each.source for each in LINKS.values())
