"""The arithmetic of blocks, against published models."""

from __future__ import annotations

import dataclasses

import pytest

from kvtier.layout import DTYPE_BYTES, CacheGroup, GroupKind, Layout

KIB = 1024
LLAMA_3_8B = CacheGroup(GroupKind.GQA, layers=32, kv_heads=8, head_dim=128, dtype="bf16")
LLAMA_3_70B = CacheGroup(GroupKind.GQA, layers=80, kv_heads=8, head_dim=128, dtype="bf16")
DEEPSEEK_V3 = CacheGroup(GroupKind.MLA, layers=61, kv_heads=1, head_dim=512 + 64, dtype="bf16")
SMOLLM2_135M = CacheGroup(GroupKind.GQA, layers=30, kv_heads=3, head_dim=64, dtype="bf16")
FALCON_7B = CacheGroup(GroupKind.MQA, layers=32, kv_heads=1, head_dim=64, dtype="bf16")
LLAMA_2_7B = CacheGroup(GroupKind.MHA, layers=32, kv_heads=32, head_dim=128, dtype="fp16")


@pytest.mark.parametrize(
    ("group", "per_token"),
    [
        pytest.param(LLAMA_2_7B, 512 * KIB, id="Llama-2-7B MHA"),
        pytest.param(FALCON_7B, 8 * KIB, id="Falcon-7B MQA"),
        pytest.param(LLAMA_3_8B, 128 * KIB, id="Llama-3-8B GQA"),
        pytest.param(LLAMA_3_70B, 320 * KIB, id="Llama-3-70B GQA"),
        pytest.param(DEEPSEEK_V3, 70_272, id="DeepSeek-V3 MLA"),
        pytest.param(SMOLLM2_135M, 22.5 * KIB, id="SmolLM2-135M GQA"),
    ],
)
def test_bytes_per_token(group: CacheGroup, per_token: int) -> None:
    assert Layout((group,), block_tokens=16).bytes_per_token == per_token


def test_bytes_per_block() -> None:
    assert Layout((LLAMA_3_8B,), 16).block_bytes == 2 << 20
    assert Layout((SMOLLM2_135M,), 16).block_bytes == 360 * KIB
    assert Layout((SMOLLM2_135M,), 128).block_bytes == 8 * 360 * KIB
    assert Layout((LLAMA_3_70B,), 16).block_bytes == 5_242_880


def test_a_long_prompt_of_a_model_without_shared_heads() -> None:
    assert 10_000 * Layout((LLAMA_2_7B,), 16).bytes_per_token == pytest.approx(5.2e9, rel=0.01)


def test_blocks_that_fit_a_large_host() -> None:
    assert 432 * 10**9 // Layout((LLAMA_3_70B,), 16).block_bytes == pytest.approx(82_000, rel=0.01)


def test_mla_keeps_one_tensor_where_the_others_keep_two() -> None:
    assert DEEPSEEK_V3.tensors == 1
    assert {group.tensors for group in (LLAMA_2_7B, LLAMA_3_8B, FALCON_7B)} == {2}


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_bytes_follow_the_dtype(dtype: str) -> None:
    group = dataclasses.replace(LLAMA_3_8B, dtype=dtype)
    assert group.bytes_per_token == LLAMA_3_8B.bytes_per_token * DTYPE_BYTES[dtype] // 2


def test_groups_add_up() -> None:
    window = dataclasses.replace(LLAMA_3_8B, layers=16, window=4096)
    whole = Layout((dataclasses.replace(LLAMA_3_8B, layers=16), window), 16)
    assert whole.block_bytes == Layout((LLAMA_3_8B,), 16).block_bytes
    assert whole.fingerprint() != Layout((LLAMA_3_8B,), 16).fingerprint()


def test_equal_bytes_do_not_mean_an_equal_fingerprint() -> None:
    wide = Layout((dataclasses.replace(LLAMA_3_8B, kv_heads=16, head_dim=64),), 16)
    usual = Layout((LLAMA_3_8B,), 16)
    assert wide.block_bytes == usual.block_bytes
    assert wide.fingerprint() != usual.fingerprint()
    assert usual.fingerprint() == Layout((dataclasses.replace(LLAMA_3_8B),), 16).fingerprint()


def test_shards_of_a_block_add_up_to_the_block() -> None:
    whole = Layout((LLAMA_3_70B,), 16)
    for ranks in (1, 2, 4, 8):
        assert whole.shard(ranks).block_bytes * ranks == whole.block_bytes


def test_too_few_heads_are_repeated_on_every_rank() -> None:
    assert Layout((LLAMA_3_8B,), 16).shard(16).groups[0].kv_heads == 1
    assert Layout((DEEPSEEK_V3,), 16).shard(8) == Layout((DEEPSEEK_V3,), 16)


@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_heads_that_do_not_split_evenly_are_refused(ranks: int) -> None:
    with pytest.raises(ValueError, match="3 KV heads do not"):
        Layout((SMOLLM2_135M,), 16).shard(ranks)


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": 0},
        {"kv_heads": 0},
        {"head_dim": -1},
        {"kind": GroupKind.MQA},
        {"kind": GroupKind.MLA},
        {"dtype": "int3"},
    ],
)
def test_impossible_geometry_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"at least one|one KV head|unknown KV dtype"):
        dataclasses.replace(LLAMA_3_8B, **wrong)  # type: ignore[arg-type]  # wrong on purpose


def test_a_layout_needs_groups_and_tokens() -> None:
    with pytest.raises(ValueError, match="at least one cache group"):
        Layout((), 16)
    with pytest.raises(ValueError, match="block_tokens"):
        Layout((LLAMA_3_8B,), 0)
