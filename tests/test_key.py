"""Identity, scope and keys.

``vectors/keys.json`` is the specification. The oracle below makes the same bytes from the words of the specification alone
(``|`` joins parts that are preceded by their length as uint32 little-endian; tokens as uint32 little-endian; identity, scope
and extras as msgpack arrays in shortest encodings, absent = nil) with nothing but hashlib and struct. Run this file to write
the vectors anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.key import (
    Adapter,
    BlockKey,
    Extra,
    Identity,
    Origin,
    Scope,
    Shard,
    Span,
    address,
    chain_keys,
    foreign_key,
    root_key,
)
from kvtier.layout import CacheGroup, GroupKind, Layout

VECTORS = Path(__file__).parent / "vectors" / "keys.json"
Case: TypeAlias = "dict[str, Any]"

# The oracle.


def packed(value: object) -> bytes:
    """msgpack, by hand and in its shortest form."""
    if value is None:
        return b"\xc0"
    if isinstance(value, int):
        for limit, prefix, code in (
            (1 << 7, "", ">B"),
            (1 << 8, "cc", ">B"),
            (1 << 16, "cd", ">H"),
            (1 << 32, "ce", ">I"),
        ):
            if 0 <= value < limit:
                return bytes.fromhex(prefix) + struct.pack(code, value)
        raise ValueError(value)
    if isinstance(value, str):
        raw = value.encode()
        heads = ((1 << 5, 0xA0, None), (1 << 8, 0xD9, ">B"), (1 << 16, 0xDA, ">H"))
    elif isinstance(value, bytes):
        raw = value
        heads = ((0, 0, None), (1 << 8, 0xC4, ">B"), (1 << 16, 0xC5, ">H"))
    else:
        assert isinstance(value, list)
        assert len(value) < 16
        return bytes([0x90 | len(value)]) + b"".join(map(packed, value))
    for limit, first, length in heads:
        if len(raw) < limit:
            return (
                bytes([first | len(raw)]) if length is None else bytes([first]) + struct.pack(length, len(raw))
            ) + raw
    raise ValueError(value)


def hashed(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(struct.pack("<I", len(part)) + part for part in parts), digest_size=32).digest()


def oracle(case: Case) -> dict[str, Any]:
    """Everything that the vectors say of a case, from the case alone."""
    who, where = case["identity"], case["scope"]
    groups = [[g["kind"], g["layers"], g["kv_heads"], g["head_dim"], g["dtype"], g["window"]] for g in who["groups"]]
    identity = packed(
        [
            who["model"],
            who["weights"],
            who["kv_dtype"],
            [groups, who["block_tokens"]],
            who["rope"],
            who["block_tokens"],
            who["codec"],
            who["engine_format"],
            who["schema"],
        ]
    )
    tenant = None if where["tenant"] is None else bytes.fromhex(where["tenant"])
    adapter = where["adapter"] and [where["adapter"]["name"], bytes.fromhex(where["adapter"]["digest"])]
    scope = packed([tenant, adapter, where["salt"], where["epoch"]])
    key = root = hashed(identity, scope)
    keys = []
    size = who["block_tokens"]
    for index in range(len(case["tokens"]) // size):
        tokens = struct.pack(f"<{size}I", *case["tokens"][index * size : (index + 1) * size])
        extras = case["extras"].get(str(index))
        rows = extras and [[e["kind"], e["position"], bytes.fromhex(e["digest"]), e["offset"]] for e in extras]
        key = hashed(key, tokens, packed(rows))
        keys.append(key.hex())
    return {
        "identity_packed": identity.hex(),
        "identity_digest": hashed(identity).hex(),
        "scope_packed": scope.hex(),
        "scope_digest": hashed(scope).hex(),
        "root": root.hex(),
        "keys": keys,
        "foreign": hashed(identity, scope, b"engine hash").hex(),
    }


def cases() -> list[Case]:
    """The cases of the vectors, without their answers."""
    group = {"kind": "gqa", "layers": 30, "kv_heads": 3, "head_dim": 64, "dtype": "bf16", "window": None}
    latent = {"kind": "mla", "layers": 61, "kv_heads": 1, "head_dim": 576, "dtype": "fp8_e4m3", "window": None}
    who = {
        "model": "SmolLM2-135M-Instruct", "weights": "sha256:00ff", "kv_dtype": "bf16", "groups": [group],
        "block_tokens": 16, "rope": None, "codec": None, "engine_format": None, "schema": 1,
    }  # fmt: skip
    scope: dict[str, Any] = {"tenant": None, "adapter": None, "salt": None, "epoch": 0}
    image = {"kind": "image", "position": 3, "digest": bytes(range(32)).hex(), "offset": 0}
    rest = {"kind": "image", "position": 0, "digest": bytes(range(32)).hex(), "offset": 13}
    adapter = {"name": "poet", "digest": "aa" * 32}
    every = who | {
        "kv_dtype": "fp8_e4m3", "groups": [latent, group | {"window": 4096}], "block_tokens": 128,
        "rope": "yarn:factor=4", "codec": "int8", "engine_format": "amx-2", "schema": 300,
    }  # fmt: skip
    plain = {"identity": who, "scope": scope, "tokens": list(range(48)), "extras": {}}
    wide = [0, 1, 255, 256, 65535, 65536, 2**31, 2**32 - 1]
    return [
        plain | {"name": "plain"},
        plain | {"name": "no block is full", "tokens": [1, 2, 3]},
        plain | {"name": "a partly filled last block", "tokens": [7] * 40},
        plain | {"name": "every width of token id", "tokens": wide * 4},
        plain | {"name": "empty salt", "scope": scope | {"salt": ""}},
        plain | {"name": "salt", "scope": scope | {"salt": "käse-" + "x" * 40}},
        plain | {"name": "tenant", "scope": scope | {"tenant": "5ec2e7" * 10}},
        plain | {"name": "adapter", "scope": scope | {"adapter": adapter}},
        plain | {"name": "cleared once, and very often", "scope": scope | {"epoch": 1}},
        plain | {"name": "the last clear epoch", "scope": scope | {"epoch": 2**32 - 1}},
        plain | {"name": "an image over two blocks", "extras": {"1": [image], "2": [rest]}},
        plain
        | {"name": "two extras in a block", "extras": {"0": [image, image | {"kind": "embedding", "position": 9}]}},
        {
            "name": "everything set",
            "identity": every,
            "scope": {"tenant": "00" * 300, "adapter": adapter, "salt": "s", "epoch": 70_000},
            "tokens": list(range(300)),
            "extras": {"0": [image]},
        },
    ]


def read_vectors() -> list[Case]:
    loaded: list[Case] = json.loads(VECTORS.read_text(encoding="utf-8"))
    return loaded


# Ours, built from a case.


def identity_of(case: Case) -> Identity:
    who = dict(case["identity"])
    groups = tuple(CacheGroup(**(g | {"kind": GroupKind(g["kind"])})) for g in who.pop("groups"))
    return Identity(layout=Layout(groups, who.pop("block_tokens")), **who)


def scope_of(case: Case) -> Scope:
    where = case["scope"]
    adapter = where["adapter"] and Adapter(where["adapter"]["name"], bytes.fromhex(where["adapter"]["digest"]))
    return Scope(where["tenant"] and bytes.fromhex(where["tenant"]), adapter, where["salt"], where["epoch"])


def ours(case: Case) -> dict[str, Any]:
    identity, scope = identity_of(case), scope_of(case)
    extras = {
        int(index): [Extra(e["kind"], e["position"], bytes.fromhex(e["digest"]), e["offset"]) for e in rows]
        for index, rows in case["extras"].items()
    }
    root = root_key(identity, scope)
    keys = chain_keys(root, case["tokens"], identity.layout.block_tokens, extras)
    return {
        "identity_packed": identity.packed().hex(),
        "identity_digest": identity.digest().hex(),
        "scope_packed": scope.packed().hex(),
        "scope_digest": scope.digest().hex(),
        "root": root.hex(),
        "keys": [key.hex() for key in keys],
        "foreign": foreign_key(identity, scope, b"engine hash").hex(),
    }


# Golden vectors.


def test_the_vectors_hold_every_case() -> None:
    asked = [{name: value for name, value in case.items() if name != "answer"} for case in read_vectors()]
    assert asked == cases()


@pytest.mark.parametrize("case", read_vectors(), ids=lambda case: case["name"])
def test_golden_vectors(case: Case) -> None:
    assert oracle(case) == case["answer"]
    assert ours(case) == case["answer"]


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=70),
    block_tokens=st.integers(1, 40),
    salt=st.none() | st.text(max_size=300),
    epoch=st.integers(0, 2**32 - 1),
    tenant=st.none() | st.binary(max_size=300),
)
def test_any_chain_is_what_the_oracle_says(
    tokens: list[int], block_tokens: int, salt: str | None, epoch: int, tenant: bytes | None
) -> None:
    case = cases()[0]
    case["identity"] = case["identity"] | {"block_tokens": block_tokens}
    scope = {"salt": salt, "epoch": epoch, "tenant": None if tenant is None else tenant.hex(), "adapter": None}
    case |= {"tokens": tokens, "scope": scope}
    assert oracle(case)["keys"] == [
        key.hex()
        for key in chain_keys(root_key(identity_of(case), Scope(tenant, None, salt, epoch)), tokens, block_tokens)
    ]


@pytest.mark.parametrize("hash_seed", [None, "random", "0"])
def test_a_fresh_interpreter_makes_the_same_bytes(hash_seed: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    code = "import json, runpy, sys; m = runpy.run_path(sys.argv[1]); print(json.dumps([m['ours'](c) for c in m['cases']()]))"
    done = subprocess.run(
        [sys.executable, "-c", code, __file__], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == [case["answer"] for case in read_vectors()]


# What must not be shared, and what must.

IDENTITY = identity_of(cases()[0])
TOKENS = list(range(64))


def keys_of(
    identity: Identity = IDENTITY,
    scope: Scope | None = None,
    tokens: Sequence[int] | np.ndarray = TOKENS,
    extras: Mapping[int, Sequence[Extra]] | None = None,
) -> list[BlockKey]:
    return chain_keys(root_key(identity, scope or Scope()), tokens, identity.layout.block_tokens, extras)


def assert_disjoint(*chains: list[BlockKey]) -> None:
    assert all(chains)
    for one, other in itertools.combinations(chains, 2):
        assert not set(one) & set(other)


def with_group(**changes: Any) -> Identity:
    return dataclasses.replace(
        IDENTITY, layout=Layout((dataclasses.replace(IDENTITY.layout.groups[0], **changes),), 16)
    )


def test_equal_prompts_share_and_a_longer_one_extends() -> None:
    assert keys_of() == keys_of(tokens=np.array(TOKENS, dtype=np.int64))
    assert keys_of(tokens=[*TOKENS, *TOKENS])[:4] == keys_of()
    root = root_key(IDENTITY, Scope())
    head = chain_keys(root, TOKENS[:32], 16)
    assert head + chain_keys(head[-1], TOKENS[32:], 16) == keys_of()


def test_a_token_changes_its_block_and_all_after_it() -> None:
    changed = keys_of(tokens=[*TOKENS[:20], 9999, *TOKENS[21:]])
    assert changed[0] == keys_of()[0]
    assert_disjoint(changed[1:], keys_of()[1:])


def test_a_block_in_another_place_has_another_key() -> None:
    assert len(set(keys_of(tokens=[5] * 64))) == 4


def test_adapters_share_nothing() -> None:
    adapters = [None, Adapter("a", b"1" * 32), Adapter("b", b"1" * 32), Adapter("a", b"2" * 32)]
    assert_disjoint(*(keys_of(scope=Scope(adapter=adapter)) for adapter in adapters))


def test_salts_share_nothing_and_no_salt_is_not_the_empty_one() -> None:
    assert_disjoint(*(keys_of(scope=Scope(salt=salt)) for salt in (None, "", "x", "y")))
    assert keys_of(scope=Scope(salt="x")) == keys_of(scope=Scope(salt="x"))


def test_tenants_share_nothing_and_no_tenant_is_not_the_empty_one() -> None:
    assert_disjoint(*(keys_of(scope=Scope(tenant=tenant)) for tenant in (None, b"", b"one", b"two")))


def test_the_same_text_as_tenant_and_as_salt_is_not_the_same() -> None:
    assert_disjoint(keys_of(scope=Scope(tenant=b"x")), keys_of(scope=Scope(salt="x")))


def test_clearing_starts_a_new_space() -> None:
    assert_disjoint(*(keys_of(scope=Scope(epoch=epoch)) for epoch in (0, 1, 2**32 - 1)))
    with pytest.raises(ValueError, match="uint32"):
        Scope(epoch=2**32)


@pytest.mark.parametrize("agreeing", [16, 32], ids="last {} bits agree".format)
def test_images_that_differ_only_early_in_their_digest(agreeing: int) -> None:
    tail = bytes(range(agreeing // 8))
    one, other = (first * (32 - len(tail)) + tail for first in (b"\x01", b"\x02"))
    chains = [
        keys_of(extras={1: [Extra("image", 4, digest)], 2: [Extra("image", 0, digest, offset=12)]})
        for digest in (one, other)
    ]
    assert chains[0][0] == chains[1][0] == keys_of()[0], "what comes before the picture is shared"
    assert_disjoint(chains[0][1:], chains[1][1:], keys_of()[1:])


def test_an_extra_counts_with_its_kind_its_place_and_its_offset() -> None:
    picture = Extra("image", 4, b"d" * 32)
    variants = [
        dataclasses.replace(picture, **change) for change in ({}, {"kind": "embedding"}, {"position": 5}, {"offset": 1})
    ]
    assert_disjoint(*(keys_of(extras={0: [extra]}) for extra in variants))
    assert keys_of(extras={0: []}) == keys_of(extras={}) == keys_of()


def test_dtypes_share_nothing() -> None:
    dtypes = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp32")
    assert_disjoint(*(keys_of(dataclasses.replace(IDENTITY, kv_dtype=dtype)) for dtype in dtypes))


def test_revisions_and_models_share_nothing() -> None:
    assert_disjoint(
        keys_of(),
        keys_of(dataclasses.replace(IDENTITY, weights="another")),
        keys_of(dataclasses.replace(IDENTITY, model="another")),
    )


@pytest.mark.parametrize("wrong", [{"model": ""}, {"model": "/models/smollm2"}, {"weights": ""}])
def test_an_identity_without_name_or_weights_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="identity needs"):
        dataclasses.replace(IDENTITY, **wrong)  # type: ignore[arg-type]  # only texts


def test_layouts_of_one_size_share_nothing() -> None:
    same_bytes = [with_group(kv_heads=6, head_dim=32), with_group(layers=15, kv_heads=6), with_group(window=4096)]
    assert {identity.layout.block_bytes for identity in same_bytes} == {IDENTITY.layout.block_bytes}
    assert_disjoint(keys_of(), *map(keys_of, same_bytes))


def test_formats_overrides_codecs_and_schemas_share_nothing() -> None:
    changes: list[dict[str, Any]] = [
        {"engine_format": "head-major"}, {"engine_format": "token-major"}, {"rope": "linear:2"}, {"codec": "int8"}, {"schema": 2},
    ]  # fmt: skip
    assert_disjoint(keys_of(), *(keys_of(dataclasses.replace(IDENTITY, **change)) for change in changes))


def test_another_block_size_shares_nothing() -> None:
    wide = dataclasses.replace(IDENTITY, layout=dataclasses.replace(IDENTITY.layout, block_tokens=32))
    assert_disjoint(keys_of(), keys_of(wide))


def test_shards_have_one_key_and_addresses_of_their_own() -> None:
    key = keys_of()[0]
    shards = [
        Shard(), Shard(tp_rank=0, tp_size=2), Shard(tp_rank=1, tp_size=2), Shard(tp_rank=1, tp_size=4),
        Shard(pp_stage=1), Shard(group=1),
    ]  # fmt: skip
    addresses = [address(key, shard) for shard in shards]
    assert len(set(addresses)) == len(shards)
    assert all(each.startswith(key) and len(each) == 40 for each in addresses)
    assert Shard(3, 4, 5, 6).packed() == struct.pack("<4H", 3, 4, 5, 6)


@pytest.mark.parametrize(
    "wrong",
    [{"tp_rank": 1}, {"tp_rank": -1}, {"tp_size": 0}, {"tp_size": 1 << 16}, {"pp_stage": -1}, {"group": 1 << 16}],
)
def test_impossible_shards_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"tp rank|uint16"):
        Shard(**wrong)


def test_an_engine_with_its_own_chain_stays_within_identity_and_scope() -> None:
    hashes = [b"one", b"two"]
    assert_disjoint(
        [foreign_key(IDENTITY, Scope(), each) for each in hashes],
        [foreign_key(IDENTITY, Scope(salt=""), each) for each in hashes],
        [foreign_key(dataclasses.replace(IDENTITY, weights="another"), Scope(), each) for each in hashes],
        keys_of(),
    )


@pytest.mark.parametrize("wrong", [[-1] * 16, [2**32] * 16, np.full(16, -1)])
def test_token_ids_outside_uint32_are_refused(wrong: Sequence[int]) -> None:
    with pytest.raises(OverflowError):
        keys_of(tokens=wrong)


def test_token_ids_that_are_no_whole_numbers_are_refused() -> None:
    with pytest.raises(TypeError, match="whole numbers"):
        keys_of(tokens=np.full(16, 1.5))


def test_no_representation_gives_a_secret_away() -> None:
    scope = Scope(tenant=b"hunter2", salt="pepper")
    assert "hunter2" not in repr(scope)
    assert "pepper" not in repr(scope)
    assert scope.tenant_id != Scope(tenant=b"other").tenant_id
    assert Scope().tenant_id == bytes(16)


def test_the_head_of_a_span_keeps_its_place() -> None:
    keys = tuple(keys_of())
    span = Span(Origin(bytes(32), bytes(32), bytes(16)), root_key(IDENTITY, Scope()), 0, keys)
    assert span.head(3) == Span(span.origin, span.parent, span.depth, keys[:3])
    assert span.head(9) == span and len(span.head(0)) == 0


if __name__ == "__main__":
    written = [case | {"answer": oracle(case)} for case in cases()]
    VECTORS.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
