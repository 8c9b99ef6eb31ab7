"""Blocks of another adapter, tenant, picture, dtype, revision, layout or rank are never given out; equal ones always are."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.key import Adapter, Extra, Identity, Scope, Shard
from kvtier.layout import CacheGroup, GroupKind, Layout
from kvtier.testing.blocks import IDENTITY
from tests.support import ROOT

from .support import Tiers, dram, nvme, prompt, valkey

BLOCKS = 10
WRITER = """
import sys
from tests.symptoms.support import Tiers, dram, prompt
with Tiers(dram(64), sys.argv[1]) as tiers:
    assert all(one.done for one in tiers.save(prompt(1, int(sys.argv[2]))))
    assert tiers.store.drain(20.0)
"""


@pytest.mark.parametrize(("where", "hash_seed"), [("nvme", None), ("nvme", "0"), ("redis", "random")])
def test_a_second_process_loads_all_that_the_first_stored(tmp_path: Path, where: str, hash_seed: str | None) -> None:
    """Whatever the hash seed of either: keys come from nothing that a process draws."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    with ExitStack() as stack:
        below = nvme(tmp_path / "nvme")
        if where == "redis":
            below = f"{stack.enter_context(valkey(tmp_path / 'valkey')).url}?write=through"
        command = [sys.executable, "-c", WRITER, below, str(BLOCKS)]
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        with Tiers(dram(64), below) as second:
            assert second.load(prompt(1, BLOCKS)) == BLOCKS
            assert second.count("hits", where) == BLOCKS


# -- what varies by request


def expect_apart(tmp_path: Path, scopes: list[Scope]) -> None:
    """Each scope stores the same prompt after all before it were looked up in vain; DRAM, NVMe and Redis are asked."""
    with valkey(tmp_path / "valkey") as server:
        with Tiers(dram(64), nvme(tmp_path / "nvme"), f"{server.url}?write=through") as tiers:
            for number, scope in enumerate(scopes):
                assert tiers.found(prompt(1, 4, scope)) == 0, f"{scope} is given what others stored"
                tiers.save(prompt(1, 4, scope))
                if number == 0:
                    tiers.only_below()
            for scope in scopes:
                assert tiers.load(prompt(1, 4, scope)) == 4, "and caching is on"
        with Tiers(dram(64), f"{server.url}?write=through") as elsewhere:
            assert elsewhere.load(prompt(1, 4, scopes[0])) == 4
            assert elsewhere.found(prompt(1, 4, Scope(salt="nobody's"))) == 0


def test_two_adapters_never_share_blocks(tmp_path: Path) -> None:
    adapters = [None, Adapter("a", b"1" * 32), Adapter("b", b"2" * 32), Adapter("a", b"2" * 32)]
    expect_apart(tmp_path, [Scope(adapter=adapter) for adapter in adapters])


def test_a_salt_counts_in_every_tier(tmp_path: Path) -> None:
    expect_apart(tmp_path, [Scope(salt=salt) for salt in ("x", "y", "", None)])


def test_a_tenant_is_never_served_from_anothers_cache(tmp_path: Path) -> None:
    expect_apart(tmp_path, [Scope(tenant=tenant) for tenant in (b"one", b"two", None)])


@pytest.mark.parametrize("agreeing", [16, 32], ids="last {} bits agree".format)
def test_two_pictures_under_one_text_never_share_blocks(tmp_path: Path, agreeing: int) -> None:
    """The text before the picture is shared all the same."""
    tail = bytes(range(agreeing // 8))
    one, other = (
        prompt(1, 4, extras={2: [Extra("image", 4, digest)], 3: [Extra("image", 0, digest, offset=12)]})
        for digest in (first * (32 - len(tail)) + tail for first in (b"\x01", b"\x02"))
    )
    with Tiers(dram(64), nvme(tmp_path / "nvme")) as tiers:
        tiers.save(one)
        tiers.only_below()
        assert tiers.found(other) == 2, "the blocks before the picture, and no more"
        assert tiers.found(prompt(1, 4)) == 2
        assert tiers.load(one) == 4


# -- what is fixed for an engine


def of_dtype(kv_dtype: str, stored: str) -> Identity:
    return replace(IDENTITY, kv_dtype=kv_dtype, layout=Layout((CacheGroup(GroupKind.GQA, 2, 2, 16, stored),), 16))


@pytest.mark.parametrize(
    "identities",
    [
        [
            of_dtype("bf16", "bf16"),
            of_dtype("fp16", "fp16"),
            of_dtype("fp8_e4m3", "fp8_e4m3"),
            of_dtype("fp8_e5m2", "fp8_e4m3"),
            of_dtype("fp16", "bf16"),
        ],
        [IDENTITY, replace(IDENTITY, weights="r2"), replace(IDENTITY, model="another")],
        [
            replace(IDENTITY, engine_format="head-major"),
            replace(IDENTITY, engine_format="token-major"),
            replace(IDENTITY, layout=Layout((CacheGroup(GroupKind.GQA, 2, 4, 8, "bf16"),), 16)),
            replace(IDENTITY, layout=Layout((CacheGroup(GroupKind.GQA, 1, 4, 16, "bf16"),), 16)),
            replace(IDENTITY, layout=Layout((CacheGroup(GroupKind.GQA, 2, 2, 16, "bf16", window=64),), 16)),
            replace(IDENTITY, rope="linear:2"),
        ],
    ],
    ids=["kv dtype", "weights or model", "layout of one size"],
)
def test_one_directory_never_mixes_engines(tmp_path: Path, identities: list[Identity]) -> None:
    """Each opens the directory that the ones before it have filled with the same tokens."""
    below = nvme(tmp_path / "nvme", "16MiB")
    for identity in identities:
        with Tiers(dram(64), below, identity=identity) as tiers:
            assert tiers.found(prompt(1, 4, identity=identity)) == 0, f"{identity} reads what others wrote"
            tiers.save(prompt(1, 4, identity=identity))
            assert tiers.store.drain(20.0)
    for identity in identities:
        with Tiers(dram(64), below, identity=identity) as tiers:
            assert tiers.load(prompt(1, 4, identity=identity)) == 4, "and its own it finds again"


def test_a_frame_under_our_name_and_with_another_layout_is_not_believed(tmp_path: Path) -> None:
    """Equal key and equal size: what the header says of the layout decides, not the size."""
    with valkey(tmp_path) as server:
        other = replace(IDENTITY, layout=Layout((CacheGroup(GroupKind.GQA, 2, 4, 8, "bf16"),), 16))
        assert other.layout.block_bytes == IDENTITY.layout.block_bytes
        with Tiers(dram(64), f"{server.url}?write=through", identity=other) as theirs:
            theirs.save(prompt(1, 3))
            assert theirs.store.drain(20.0)
        with Tiers(dram(64), f"{server.url}?write=through") as tiers:
            assert tiers.load(prompt(1, 3)) == 0
            assert tiers.count("sum_failures", "redis") == 3


# -- ranks


def test_every_rank_reads_only_its_own_blocks(tmp_path: Path) -> None:
    """Two ranks store the same tokens: two objects each, and no other number of ranks finds either."""
    span = prompt(1, 4)
    with valkey(tmp_path / "valkey") as server:
        below = f"{server.url}?write=through"
        for rank in range(2):
            with Tiers(dram(64), below, shard=Shard(rank, 2)) as tiers:
                assert tiers.found(span) == 0, "of the other rank's"
                tiers.save(span)
                assert tiers.store.drain(20.0)
        for rank in range(2):
            with Tiers(dram(64), below, shard=Shard(rank, 2)) as tiers:
                assert tiers.load(span) == 4, "bytes follow from the address, so the other rank's would show"
        for shard in (Shard(), Shard(0, 4), Shard(1, 4), Shard(0, 2, pp_stage=1)):
            with Tiers(dram(64), below, shard=shard) as tiers:
                assert tiers.found(span) == 0, f"{shard} is given another sharding's blocks"
                tiers.save(span)
                assert tiers.store.drain(20.0)
        for rank in range(2):
            with Tiers(dram(64), below, shard=Shard(rank, 2)) as tiers:
                assert tiers.load(span) == 4, "nobody has written over them"


def test_a_directory_of_two_ranks_is_no_hit_for_one_or_four(tmp_path: Path) -> None:
    span = prompt(1, 4)
    with Tiers(dram(64), nvme(tmp_path, "16MiB"), shard=Shard(0, 2)) as tiers:
        tiers.save(span)
        tiers.only_below()
    for shard, expected in ((Shard(0, 4), 0), (Shard(), 0), (Shard(0, 2), 4)):
        with Tiers(dram(64), nvme(tmp_path, "16MiB"), shard=shard) as tiers:
            assert tiers.load(span) == expected, shard
